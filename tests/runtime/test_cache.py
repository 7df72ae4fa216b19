"""The compile cache: nothing is compiled twice, nothing is mixed up, nothing breaks it."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import tempfile
import threading
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowering.cache import FORMAT, ArtifactCache, Entry
from lowering.denials import Denial, DenialRecord
from lowering.key import CacheKey
from npu_iree.runner import Runner
from programs.cases import CASES, is_right
from programs.launch import finish, release, run, start_together, wait_until

PAIRS = {
    "wiring": ("times-left", "times-right"),
    "constants": ("plus-1", "plus-100"),
    "dtypes": ("f32", "f16"),
    "flags": ("f32", "flags"),
    "layouts": ("contiguous", "channels-last"),
    "ranks": ("f32", "rank-3"),
}
SPEC = """
module attributes {transform.with_named_sequence} {
  transform.named_sequence @__transform_main(%module: !transform.any_op {transform.readonly}) {
    transform.yield
  }
}
"""
DIFFERENT = sorted({name for pair in PAIRS.values() for name in pair})
STORMERS = 10


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache that this process uses."""
    monkeypatch.setenv("NPU_IREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder: Path) -> list[Path]:
    return sorted((folder / "artifacts").glob("*.npua"))


def litter(folder: Path) -> list[Path]:
    """Give lock files and half-written files."""
    locks = [*(folder / "locks").glob("*"), *folder.glob("*.lock")]
    return [*locks, *(folder / "artifacts").glob(".*")]


@pytest.mark.sweep  # of smaller programs, the tests below tell
@pytest.mark.parametrize("name", ["bert", "resnet50"])
def test_a_second_process_compiles_nothing(name: str, tmp_path: Path) -> None:
    first = run("model", name, NPU_IREE_CACHE=str(tmp_path))
    assert first["counts"]["compiles"] == first["counts"]["cache_misses"] >= 1
    second = run("model", name, NPU_IREE_CACHE=str(tmp_path))
    assert second["counts"]["cache_hits"] == second["counts"]["regions"]
    assert not {"compiles", "cache_misses", "compile_ms"} & second["counts"].keys()
    assert (second["compilers"], second["started"]) == ([], 0)
    assert second["away"] == first["away"] < 1e-5


def test_what_the_cache_has_is_dumped_too(
    folder: Path, counts: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_right("f32")
    monkeypatch.setenv("NPU_IREE_DUMP", str(tmp_path / "dump"))
    assert is_right("f32")
    (dumped,) = (tmp_path / "dump").glob("graph*/region0/04-flow-to-vmfb.vmfb")
    (entry,) = files(folder)
    assert Entry.from_bytes(entry.read_bytes()).vmfb == dumped.read_bytes()
    assert (counts["compiles"], counts["cache_hits"]) == (2, 0)
    assert is_right("f32", compile="never")  # what may not be compiled is loaded all the same
    assert (counts["compiles"], counts["cache_hits"]) == (2, 1)


@pytest.mark.parametrize("pair", PAIRS)
def test_different_programs_have_different_entries(
    pair: str, folder: Path, counts: Counter[str]
) -> None:
    for name in PAIRS[pair]:
        assert is_right(name), name
    assert (counts["compiles"], counts["cache_hits"], len(files(folder))) == (2, 0, 2)
    for name in reversed(PAIRS[pair]):
        assert is_right(name), name
    assert (counts["compiles"], counts["cache_hits"], len(files(folder))) == (2, 2, 2)


@pytest.mark.sweep
def test_different_programs_have_different_entries_across_processes(tmp_path: Path) -> None:
    for i, (name, *others) in enumerate(([*DIFFERENT], [*reversed(DIFFERENT)])):
        done = run("cases", name, *others, NPU_IREE_CACHE=str(tmp_path))
        assert done["right"]
        assert done["counts"].get("cache_hits", 0) == i * len(DIFFERENT)
        assert done["counts"].get("compiles", 0) == (1 - i) * len(DIFFERENT)
        assert len(files(tmp_path)) == len(DIFFERENT)


def test_a_file_that_a_flag_names_is_part_of_the_program(
    folder: Path, counts: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its content, and by the name that it has where the caller is."""
    function, inputs, _ = CASES["f32"]
    spec = Path("a spec, of=ours.mlir")
    flags = [f"--iree-preprocessing-transform-spec-filename={spec}"]

    def call() -> None:
        torch._dynamo.reset()
        options = {"flags": flags, "fallback": "error"}
        torch.compile(function, backend="npu_iree", options=options)(*inputs)

    monkeypatch.chdir(tmp_path)
    spec.write_text(SPEC)
    call()
    (entry,) = files(folder)
    told = json.loads(Entry.from_bytes(entry.read_bytes()).parts["files"])
    assert told == [[str(spec), hashlib.sha256(SPEC.encode()).hexdigest()]]
    spec.write_text("no transform")
    with pytest.raises(Exception, match=r"ours\.mlir"):
        call()
    spec.write_text(SPEC)
    call()
    assert (counts["cache_misses"], counts["cache_hits"]) == (2, 1)


def test_wirings_with_arguments_in_the_same_order_are_different_programs(
    folder: Path, counts: Counter[str], compile_function: Callable[..., Runner]
) -> None:
    """Dynamo numbers inputs by first use; there the two are rightly one program."""
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    wirings = [lambda x, y: (x - y) * x, lambda x, y: (y - x) * y]
    for cache_hits in (0, 2):
        for wiring in wirings:
            (result,) = compile_function(wiring, x, y)(x, y)
            torch.testing.assert_close(result, wiring(x, y))
        assert (counts["compiles"], counts["cache_hits"], len(files(folder))) == (2, cache_hits, 2)
    programs = {Entry.from_bytes(path.read_bytes()).parts["program"] for path in files(folder)}
    assert len(programs) == 2


def test_the_same_program_under_other_names_shares_an_entry(
    folder: Path, counts: Counter[str]
) -> None:
    assert is_right("times-left")
    assert is_right("renamed")
    assert (counts["compiles"], counts["cache_hits"], len(files(folder))) == (1, 1, 1)


def total_of(answers: list[dict[str, Any]]) -> Counter[str]:
    return sum((Counter(answer["counts"]) for answer in answers), Counter[str]())


@pytest.mark.sweep
def test_ten_processes_compile_each_region_once(tmp_path: Path) -> None:
    commands = [("cases", "two-regions")] * STORMERS
    processes = start_together(commands, NPU_IREE_CACHE=str(tmp_path))
    release(processes)
    answers = [finish(process)[-1] for process in processes]
    assert all(a["right"] for a in answers)
    assert not [w for a in answers for w in a["warnings"] if "cache" in w]
    total = total_of(answers)
    assert total["compiles"] == total["cache_misses"] == len(files(tmp_path)) == 2
    assert total["cache_hits"] == total["regions"] - 2 == 2 * STORMERS - 2
    assert litter(tmp_path) == []


@pytest.mark.sweep
def test_one_of_ten_processes_killed_in_the_middle_of_a_write_breaks_nothing(
    tmp_path: Path,
) -> None:
    cache, asking = tmp_path / "cache", tmp_path / "asking"
    asking.mkdir()
    waiting = ("gate", "lock", str(asking), "two-regions")
    commands = [("gate", "write", "two-regions"), *[waiting] * (STORMERS - 1)]
    victim, *others = start_together(commands, NPU_IREE_CACHE=str(cache))
    release([victim])
    assert victim.stdout is not None
    assert "middle of a write" in victim.stdout.readline()
    release(others)
    wait_until(lambda: len([*asking.iterdir()]) == len(others), limit_s=120)
    assert files(cache) == []
    assert any(path.stat().st_size for path in litter(cache)), "half of a file"
    victim.kill()
    victim.communicate()
    answers = [finish(process)[-1] for process in others]
    assert all(a["right"] for a in answers)
    assert not [w for a in answers for w in a["warnings"] if "cache" in w]
    total = total_of(answers)
    assert total["compiles"] == total["cache_misses"] == len(files(cache)) == 2
    assert total["cache_hits"] == 2 * len(others) - 2
    assert litter(cache) == []


def test_what_a_killed_process_left_half_written_is_removed_in_the_end(tmp_path: Path) -> None:
    cache, _ = filled(tmp_path, 1)
    other = tmp_path / "artifacts" / f".{key_of(1).digest}.npua.half"
    own = tmp_path / "artifacts" / f".{KEY.digest}.npua.half"
    for path in (own, other):
        path.write_bytes(b"half")
    with cache.lock(KEY):
        assert [own.exists(), other.exists()] == [False, True]
    cache.prune()
    assert other.exists(), "somebody may be writing it"
    os.utime(other, (0, 0))
    cache.prune()
    assert litter(tmp_path) == []
    assert kept(cache, 1) == [0]


def key_of(number: int) -> CacheKey:
    return CacheKey({"program": str(number), "target": "t", "parameters": "0"})


def entry_of(key: CacheKey, vmfb: bytes = b"module" * 9) -> Entry:
    return Entry(key.parts, ("--flag",), vmfb, "source")


KEY = key_of(0)
GOOD = entry_of(KEY).to_bytes()


def load(data: bytes) -> tuple[Entry | None, bool]:
    """Load `KEY` from a file of these bytes; return the entry, and whether the file is kept."""
    with tempfile.TemporaryDirectory() as folder:
        cache = ArtifactCache(Path(folder))
        path = cache.path(KEY.digest)
        path.parent.mkdir()
        path.write_bytes(data)
        return cache.load(KEY), path.exists()


@settings(deadline=None)
@given(st.binary())
def test_what_is_stored_is_what_is_loaded(vmfb: bytes) -> None:
    assert load(entry_of(KEY, vmfb).to_bytes()) == (entry_of(KEY, vmfb), True)


@settings(deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255))
def test_no_flipped_byte_is_loaded(position: int, mask: int) -> None:
    data = bytearray(GOOD)
    data[position] ^= mask
    assert load(bytes(data)) == (None, False)


@settings(deadline=None)
@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=80))
def test_no_truncated_or_overwritten_entry_is_loaded(size: int, tail: bytes) -> None:
    data = GOOD[:size] + tail
    if data != GOOD:
        assert load(data) == (None, False)


def with_checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


@settings(deadline=None)
@given(st.one_of(st.binary(), st.integers(0, 300).map(lambda n: GOOD[65:][:n])))
def test_nonsense_with_a_right_checksum_is_not_loaded(body: bytes) -> None:
    if body != GOOD[65:]:
        entry, is_kept = load(with_checksum(body))
        assert (entry is not None) == is_kept
        assert entry is None or entry.vmfb != entry_of(KEY).vmfb


def head_of(**fields: Any) -> bytes:
    head = {"format": FORMAT, "key": dict(KEY.parts), "flags": [], "source_bytes": 3, **fields}
    return json.dumps(head).encode() + b"\nabcdef"


@pytest.mark.parametrize(
    "body",
    [head_of(), head_of(source_bytes="x"), head_of(key=[1]), head_of(flags=3), head_of(format=2),
     b"[]\n", b"3\n", b"null\n", b"[" * 100],
)  # fmt: skip
def test_a_head_that_makes_no_sense_is_not_loaded(body: bytes) -> None:
    assert load(with_checksum(body)) == (None, False)


def test_an_entry_whose_source_is_a_bomb_is_not_loaded() -> None:
    bomb = zlib.compress(bytes(64 << 20))
    head = head_of(source_bytes=len(bomb)).partition(b"\n")[0]
    tracemalloc.start()
    assert load(with_checksum(head + b"\n" + bomb)) == (None, False)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


def test_the_entry_of_another_key_is_not_loaded() -> None:
    assert load(entry_of(key_of(1)).to_bytes()) == (None, False)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "checksum": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "head": lambda data: data[:70] + bytes([data[70] ^ 1]) + data[71:],
    "source": lambda data: data[:1400] + bytes([data[1400] ^ 1]) + data[1401:],
    "module": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "all but one byte": lambda data: data[:-1],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_rebuilt(
    damage: str, folder: Path, counts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert is_right("f32")
    (path,) = files(folder)
    good = path.read_bytes()
    path.write_bytes(DAMAGES[damage](good))
    assert is_right("f32")
    assert (counts["compiles"], counts["cache_hits"]) == (2, 0)
    assert "is rebuilt" in caplog.text
    assert Entry.from_bytes(path.read_bytes()) == Entry.from_bytes(good)
    assert is_right("f32")
    assert counts["cache_hits"] == 1


def test_what_cannot_be_read_just_now_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path, *_: Any, **__: Any) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    cache, record = ArtifactCache(folder), DenialRecord(folder / "denials.json")
    cache.store(key_of(1), entry_of(key_of(1)))
    record.add([Denial(program="p", op="o", target="t", reason="r")])
    with monkeypatch.context() as patch:
        for name in ("read_bytes", "read_text"):
            patch.setattr(Path, name, fail)
        assert cache.load(key_of(1)) is None
        record.add([Denial(program="q", op="o", target="t", reason="r")])
    assert "cannot be read: [Errno 24]" in caplog.text
    assert cache.load(key_of(1)) is not None
    assert list(record.read()) == ["p"]


def test_an_entry_with_another_ones_bytes_is_rebuilt(folder: Path, counts: Counter[str]) -> None:
    assert is_right("plus-1")
    (one,) = files(folder)
    assert is_right("plus-100")
    (other,) = {*files(folder)} - {one}
    one.write_bytes(other.read_bytes())
    assert is_right("plus-1")
    assert is_right("plus-100")
    assert (counts["compiles"], counts["cache_hits"]) == (3, 1)


def test_a_folder_in_the_place_of_an_entry_fails_nothing(
    folder: Path, counts: Counter[str]
) -> None:
    assert is_right("f32")
    (path,) = files(folder)
    path.unlink()
    path.mkdir()
    assert is_right("f32")
    assert counts["compiles"] == 2


@pytest.mark.parametrize("place", ["a file", "below a file", "proc"])
def test_a_folder_that_cannot_be_written_to_is_one_warning(
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    counts: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    where = {"a file": file, "below a file": file / "cache", "proc": Path("/proc/npu-iree")}[place]
    monkeypatch.setenv("NPU_IREE_CACHE", str(where))
    for name in ("f32", "plus-1"):
        assert is_right(name)
    assert counts["compiles"] == 2
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "nothing is cached" in warning
    assert str(where) in warning
    assert file.read_text() == "not a folder"


@pytest.mark.slow
def test_a_full_disk_is_one_warning_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run("full_disk", "f32", "plus-1", NPU_IREE_CACHE=str(tmp_path))
    assert done["right"]
    assert done["counts"]["compiles"] == 2
    (warning,) = done["warnings"]
    assert "nothing is cached" in warning
    assert "File too large" in warning
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.sweep
def test_what_was_refused_is_healed_on_a_full_disk_and_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    (tmp_path / "tmp").mkdir()
    env = {
        "NPU_IREE_FAULT": "torch-to-linalg:memory:aten.tanh.default",
        "TMPDIR": f"{tmp_path}/tmp",
    }
    done = run("full_disk", "mixed", NPU_IREE_CACHE=str(tmp_path / "cache"), **env)
    assert done["right"]
    assert (done["counts"]["host_ops"], done["counts"]["healed_ops"]) == (1, 1)
    for part in ("nothing is cached", "dumps are not complete", "refused ops"):
        assert len([w for w in done["warnings"] if part in w]) == 1
    assert len(done["warnings"]) == 3
    assert "NPU_IREE_DUMP" in "".join(done["warnings"]), "there is no repro to point to"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not [path for path in (tmp_path / "cache" / "failures").glob("*")]


@pytest.mark.slow
def test_what_was_refused_is_healed_where_nothing_can_be_written(
    monkeypatch: pytest.MonkeyPatch, counts: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NPU_IREE_CACHE", "/proc/npu-iree/for-denials")
    monkeypatch.setenv("NPU_IREE_FAULT", "torch-to-linalg:error:aten.tanh.default")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/npu-iree")
    assert is_right("mixed")
    assert (counts["host_ops"], counts["healed_ops"]) == (1, 1)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert [w.partition(":")[0] for w in warnings] == [
        "nothing is cached",
        "the compiler refused ops, which run on the host now",
    ]


def test_a_cache_that_is_off_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]
) -> None:
    monkeypatch.setenv("NPU_IREE_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert is_right("f32")
    assert is_right("f32")
    assert (counts["compiles"], counts["cache_hits"], [*tmp_path.iterdir()]) == (2, 0, [])


def filled(folder: Path, count: int) -> tuple[ArtifactCache, int]:
    """Make a cache with entries that were used one after the other; give the size of one, too."""
    cache = ArtifactCache(folder)
    for i in range(count):
        cache.store(key_of(i), entry_of(key_of(i)))
        os.utime(cache.path(key_of(i).digest), (1000 + i, 1000 + i))
    return cache, files(folder)[0].stat().st_size


def kept(cache: ArtifactCache, count: int) -> list[int]:
    return [i for i in range(count) if cache.path(key_of(i).digest).exists()]


def test_the_least_recently_used_entry_goes_first(tmp_path: Path) -> None:
    cache, size = filled(tmp_path, 4)
    assert cache.load(key_of(0)) is not None
    small = ArtifactCache(tmp_path, limit_bytes=3 * size)
    small.store(key_of(4), entry_of(key_of(4)))
    assert kept(cache, 5) == [0, 3, 4]


def test_the_limit_of_the_environment_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, counts: Counter[str]
) -> None:
    assert is_right("f32")
    monkeypatch.setenv("NPU_IREE_CACHE_LIMIT_BYTES", str(files(folder)[0].stat().st_size * 3 // 2))
    assert is_right("plus-1")
    assert len(files(folder)) == 1
    assert is_right("plus-1")
    assert (counts["compiles"], counts["cache_hits"]) == (2, 1)


def test_an_entry_above_the_limit_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    _, size = filled(tmp_path, 2)
    cache = ArtifactCache(tmp_path, limit_bytes=3 * size)
    cache.store(key_of(2), entry_of(key_of(2), vmfb=os.urandom(4 * size)))
    assert kept(cache, 2) == [0, 1]


def test_a_lock_is_for_one_key_and_one_holder_at_a_time(tmp_path: Path) -> None:
    one, other = ArtifactCache(tmp_path), ArtifactCache(tmp_path)
    asks, has = threading.Event(), threading.Event()

    def take() -> None:
        asks.set()
        with other.lock(KEY):
            has.set()

    thread = threading.Thread(target=take)
    with one.lock(KEY):
        with other.lock(key_of(1)):
            assert len(litter(tmp_path)) == 2
        thread.start()
        assert asks.wait(10)
        assert not has.wait(0.2), "two have the lock"
    assert has.wait(10)
    thread.join()
    assert litter(tmp_path) == []


def test_who_waits_long_for_a_lock_is_told_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowering.cache._UNTOLD_S", 0.1)
    cache, has, told = ArtifactCache(tmp_path), threading.Event(), threading.Event()
    monkeypatch.setattr("lowering.cache.log.warning", lambda *_: told.set())

    def take() -> None:
        with cache.lock(KEY):
            has.set()

    thread = threading.Thread(target=take)
    with cache.lock(KEY):
        thread.start()
        assert told.wait(10)
        assert not has.is_set()
    thread.join(10)
    assert has.is_set()


def test_an_error_gives_the_lock_back(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path)
    with pytest.raises(KeyboardInterrupt), cache.lock(KEY):
        raise KeyboardInterrupt
    with cache.lock(KEY):
        assert len(litter(tmp_path)) == 1
    assert litter(tmp_path) == []


def test_a_miss_says_in_which_part_the_nearest_key_differs(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="lowering"):
        assert is_right("f32")
        assert is_right("flags")
    assert "the nearest differs in ['flags']" in caplog.text


def test_every_case_is_in_a_pair_or_is_for_the_services_tests() -> None:
    assert {*CASES} - {*DIFFERENT} == {"renamed", "mixed", "two-regions", "independent"}


def test_waiting_for_what_does_not_come_ends() -> None:
    with pytest.raises(AssertionError, match="did not come"):
        wait_until(lambda: False, limit_s=0)
