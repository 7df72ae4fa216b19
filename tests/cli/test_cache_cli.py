"""`npu-iree cache`, as a user types it, on a cache with real entries and one denial."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from command import Ended, invoke
from lowering.cache import Entry
from once import made_once
from programs.launch import run as run_program

Cli = Callable[..., Ended]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process, by default in a wide terminal."""

    def call_(folder: Path | str, *args: str, columns: int = 240, **env: str) -> Ended:
        for name, value in {"NPU_IREE_CACHE": str(folder), **env}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("npu_iree.cli.cache.console._width", columns)
        return invoke(monkeypatch, capsys, "cache", *args)

    return call_


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which compiles have left four entries and a denial."""

    def make(folder: Path) -> None:
        fault = "torch-to-linalg:abort:aten.tanh.default"
        env = {"NPU_IREE_CACHE": str(folder), "NPU_IREE_FAULT": fault}
        assert run_program("cases", "f32", "flags", "mixed", **env)["right"]
        assert len(files(folder)) == 4

    return made_once(tmp_path_factory, "cache-with-entries", make)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of that cache, for this test alone."""
    return Path(shutil.copytree(made, tmp_path / "cache"))


def files(folder: Path) -> list[Path]:
    """Give the entries' files, the most recently used first."""
    paths = (folder / "artifacts").glob("*.npua")
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in files(folder)}


def said(done: Ended) -> str:
    """Return what a command that went well has printed."""
    assert (done.code, done.err) == (0, ""), done.err
    return done.out


def complaint(done: Ended, code: int = 1) -> str:
    """Return the clear message of a command that could not do what it was asked to."""
    assert "Traceback" not in done.err
    assert done.code == code
    assert done.err.startswith("error: ")
    return done.err


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 240])
def test_ls_lists_the_most_recently_used_first(call: Cli, folder: Path, columns: int) -> None:
    for i, path in enumerate(files(folder)):
        os.utime(path, (1e9 + i, 1e9 + i))
    text = said(call(folder, "ls", columns=columns))
    places = [text.index(path.stem[:16]) for path in files(folder)]
    assert places == sorted(places)
    assert text.count("npu-local") == 4


def test_info_counts(call: Cli, folder: Path) -> None:
    text = said(call(folder, "info", NPU_IREE_CACHE_LIMIT_BYTES="123456789"))
    size = sum(path.stat().st_size for path in files(folder))
    assert str(folder) in text
    assert f"{size} of at most 123456789" in text
    assert [line.split()[3] for line in text.splitlines() if "entries" in line] == ["4"]
    assert [line.split()[3] for line in text.splitlines() if "denials" in line] == ["1"]


def test_why_names_the_part_that_differs(call: Cli, folder: Path) -> None:
    by_flags = {
        "ukernels=none" in Entry.from_bytes(p.read_bytes()).parts["flags"]: p for p in files(folder)
    }
    program = Entry.from_bytes(by_flags[True].read_bytes()).parts["program"]
    parts = {p: Entry.from_bytes(p.read_bytes()).parts for p in files(folder)}
    (twin,) = [p for p in parts if parts[p]["program"] == program and p != by_flags[True]]
    text = said(call(folder, "why", by_flags[True].stem[:12], twin.stem[:12]))
    assert "flags" in text
    assert "ukernels=none" in text.replace("\n", "")
    assert "program" not in text
    assert "the same" in said(call(folder, "why", twin.stem[:12], twin.stem[:12]))


@pytest.mark.parametrize("prefix", ["", "zzzz", "[/nothing]", "[bold]"])
def test_why_says_when_a_prefix_names_no_entry(call: Cli, folder: Path, prefix: str) -> None:
    message = complaint(call(folder, "why", prefix, files(folder)[0].stem))
    assert f"{4 * (not prefix)} entries begin with {prefix!r}" in message


def test_verify_compiles_to_the_same_bytes(call: Cli, folder: Path) -> None:
    before = contents(folder)
    assert "4 of 4 entries" in said(call(folder, "verify", "--sample", "0"))
    assert contents(folder) == before


def test_verify_tells_which_entries_are_not_right_and_goes_on(call: Cli, folder: Path) -> None:
    longer, nonsense, left_out, _ = files(folder)
    left_out.unlink()
    entry = Entry.from_bytes(longer.read_bytes())
    other = Entry(entry.parts, entry.flags, entry.vmfb + b"\0", entry.source)
    longer.write_bytes(other.to_bytes())
    entry = Entry.from_bytes(nonsense.read_bytes())
    unreadable = Entry(entry.parts, entry.flags, entry.vmfb, "nonsense")
    nonsense.write_bytes(unreadable.to_bytes())
    done = call(folder, "verify", "--sample", "0")
    assert (done.code, done.err) == (1, "")
    assert f"{longer.stem[:16]} differs" in done.out
    assert f"{nonsense.stem[:16]} cannot be compiled" in done.out
    assert "1 of 3 entries" in done.out


def test_verify_finds_a_damaged_file(call: Cli, folder: Path) -> None:
    damaged, _, *others = files(folder)
    for path in others:
        path.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done = call(folder, "verify", "--sample", "0")
    assert (done.code, done.err) == (1, "")
    assert f"{damaged.stem[:16]} is damaged" in done.out
    assert "1 of 1 entries" in done.out


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("segv", "SIGSEGV"),
        pytest.param("memory", "out of memory", marks=pytest.mark.sweep),
    ],
)
def test_verify_reports_a_crash_of_the_compiler_and_goes_on(
    call: Cli, folder: Path, kind: str, why: str
) -> None:
    sources = {p: Entry.from_bytes(p.read_bytes()).source for p in files(folder)}
    crashing = {p.stem[:16] for p, source in sources.items() if "torch.aten.relu " in source}
    assert 0 < len(crashing) < 4
    fault = f"linalg-to-flow:{kind}:aten.relu.default"
    done = call(folder, "verify", "--sample", "0", NPU_IREE_FAULT=fault)
    assert done.code == 1
    assert done.out.count(why) == len(crashing)
    assert {line[:16] for line in done.out.splitlines() if "cannot be compiled" in line} == crashing
    assert f"{4 - len(crashing)} of 4 entries" in done.out


def test_prune_keeps_what_was_used_last(call: Cli, folder: Path) -> None:
    newest = files(folder)[0]
    text = said(call(folder, "prune", "--limit-bytes", str(newest.stat().st_size)))
    assert "removed 3 entries" in text
    assert files(folder) == [newest]
    assert "removed 0 entries" in said(call(folder, "prune"))


def test_clear_removes_everything(call: Cli, folder: Path) -> None:
    files(folder)[0].write_bytes(b"")
    said(call(folder, "clear"))
    assert files(folder) == []
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert "removed 0" in said(call(folder, "clear"))


@pytest.mark.slow
def test_an_export_is_imported_elsewhere_and_hit_there(
    call: Cli, folder: Path, tmp_path: Path
) -> None:
    archive, other = tmp_path / "cache.zip", tmp_path / "other"
    assert "4 entries" in said(call(folder, "export", str(archive)))
    assert "took over 4 entries" in said(call(other, "import", str(archive)))
    assert contents(other) == contents(folder)
    answer = run_program("cases", "f32", "flags", "mixed", NPU_IREE_CACHE=str(other))
    assert answer["right"]
    assert (answer["counts"]["cache_hits"], answer["counts"]["denials"]) == (4, 1)
    assert answer["started"] == 0


def test_a_damaged_entry_of_an_archive_is_left_out(call: Cli, folder: Path, tmp_path: Path) -> None:
    good, *others = files(folder)
    others[0].write_bytes(b"")
    others[1].write_bytes(others[1].read_bytes()[:-1])
    archive, other = tmp_path / "cache.zip", tmp_path / "other"
    with zipfile.ZipFile(archive, "w") as out:
        for path in (good, *others[:2]):
            out.write(path, f"artifacts/{path.name}")
        out.writestr("artifacts/renamed.npua", others[2].read_bytes())
        out.writestr("README", "not an entry")
    text = said(call(other, "import", str(archive)))
    assert text.count("is left out") == 2
    assert "took over 2 entries" in text
    assert contents(other).keys() == {good.name, others[2].name}


def test_an_archive_with_a_name_that_leads_outside_is_refused(
    call: Cli, folder: Path, tmp_path: Path
) -> None:
    archive, other = tmp_path / "cache.zip", tmp_path / "other"
    with zipfile.ZipFile(archive, "w") as out:
        for name in ("artifacts/good.npua", "artifacts/../../outside.npua"):
            out.writestr(name, files(folder)[0].read_bytes())
    assert "leads out of it" in complaint(call(other, "import", str(archive)), 5)
    assert not other.exists()
    assert not (tmp_path / "outside.npua").exists()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x05\x06" + b"\0" * 10, None])
def test_import_says_what_it_cannot_read(call: Cli, content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "[/a] file.zip"
    file.parent.mkdir()
    if content is not None:
        file.write_bytes(content)
    done = call(tmp_path / "cache", "import", str(file))
    assert str(file) in complaint(done, 5).replace("\n", "")


@pytest.mark.parametrize("record", [b"nonsense", b"3", b"[3]", b'[{"op": 1}]', b"\xff", b"null"])
def test_import_says_that_a_denial_record_is_damaged(
    call: Cli, record: bytes, folder: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "cache.zip"
    with zipfile.ZipFile(archive, "w") as out:
        out.writestr("denials.json", record)
        out.write(files(folder)[0], f"artifacts/{files(folder)[0].name}")
    text = said(call(tmp_path / "other", "import", str(archive)))
    assert "denials.json is left out" in text
    assert "took over 1 entries" in text


def test_export_says_where_it_cannot_write(call: Cli, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    file = tmp_path / "taken" / "cache.zip"
    assert str(file) in complaint(call(folder, "export", str(file)), 2).replace("\n", "")
    assert call(folder, "verify", "--sample", "-1").code == 2


def test_an_export_that_fails_leaves_what_was_there(
    call: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError("no space left")

    (tmp_path / "old.zip").write_text("old")
    before = {*tmp_path.iterdir()}
    monkeypatch.setattr(zipfile.ZipFile, "write", fail)
    assert "no space left" in complaint(call(folder, "export", str(tmp_path / "old.zip")))
    assert (tmp_path / "old.zip").read_text() == "old"
    assert {*tmp_path.iterdir()} == before


def test_import_says_that_the_cache_cannot_be_written_to(
    call: Cli, folder: Path, tmp_path: Path
) -> None:
    archive, file = tmp_path / "cache.zip", tmp_path / "file"
    file.write_text("not a folder")
    said(call(folder, "export", str(archive)))
    for command in (("import", str(archive)), ("ls",)):
        assert f"{file} is no folder" in complaint(call(file, *command)).replace("\n", "")


@pytest.mark.parametrize("columns", [80, 300])
def test_denials_show_op_line_reason_and_a_repro_that_is_there(
    call: Cli, folder: Path, columns: int
) -> None:
    text = said(call(folder, "denials", columns=columns))
    if columns == 300:
        for part in ("aten.tanh.default", "died of SIGABRT", "cases.py:", "in _mixed", "failures/"):
            assert part in text
    assert "…" not in text, "what is cut off cannot be used"


@pytest.mark.slow
def test_a_repro_of_a_denial_restarts_the_stage(folder: Path) -> None:
    (script,) = folder.glob("failures/*/repro.sh")
    assert "torch-to-linalg" in script.read_text()
    done = subprocess.run(["sh", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # the fault was not the compiler's


def test_a_cache_that_is_not_there_is_empty(call: Cli, tmp_path: Path) -> None:
    for command in ("ls", "info", "verify", "prune", "clear", "denials"):
        said(call(tmp_path / "none", command))
    assert not (tmp_path / "none").exists()
    assert "nothing is kept" in said(call(Path("/proc/none"), "info")).replace("\n", " ")


@pytest.mark.parametrize("command", ["ls", "info", "prune", "denials"])
def test_a_cache_that_is_off_is_said_to_be(command: str, call: Cli) -> None:
    for off in ("off", "OFF"):
        assert "the cache is off" in complaint(call(off, command))


@pytest.mark.parametrize("limit", ["4G", "-1", "nan"])
def test_a_limit_that_is_no_number_of_bytes_is_one_clear_line(
    call: Cli, folder: Path, limit: str
) -> None:
    done = call(folder, "info", NPU_IREE_CACHE_LIMIT_BYTES=limit)
    assert "NPU_IREE_CACHE_LIMIT_BYTES" in complaint(done, 2)
    assert len(files(folder)) == 4


@pytest.mark.parametrize(
    "args",
    [
        ["prune", "--limit-bytes", "much"],
        ["prune", "--limit-bytes", "-5"],
        ["why", "a"],
        ["import"],
        ["nonsense"],
    ],
)
def test_wrong_arguments_are_explained(args: list[str], folder: Path, call: Cli) -> None:
    done = call(folder, *args)
    assert done.code == 2
    assert "Usage" in done.err
    assert "Traceback" not in done.err


def test_clear_leaves_what_is_not_of_the_cache(folder: Path, call: Cli) -> None:
    others = [folder / name / "mine.txt" for name in ("artifacts", "failures", "locks")]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine")
    assert call(folder, "clear").code == 0
    assert files(folder) == []
    assert all(other.exists() for other in others)
