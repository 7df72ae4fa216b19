"""Zip files of unknown origin: one clear error, nothing written, memory bounded."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowering.archive import ArchiveLimits, archive_bytes, open_archive
from lowering.errors import ArtifactError

CONTENT = {"one.json": b"{}" * 40, "folder/two.bin": bytes(range(256)), "empty": b""}
GOOD = archive_bytes(CONTENT)
LIMITS = ArchiveLimits()


def deflated(content: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in content.items():
            file.writestr(name, data)
    return out.getvalue()


GOOD_DEFLATED = deflated(CONTENT)


def content(data: bytes, limits: ArchiveLimits = LIMITS) -> dict[str, bytes]:
    """Read all of a zip file of these bytes; nothing may appear beside it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "some.zip"
        path.write_bytes(data)
        try:
            with open_archive(path, limits) as archive:
                return {name: archive.read(name) for name in archive.names()}
        finally:
            assert [*Path(folder).iterdir()] == [path]


def refusal(data: bytes, limits: ArchiveLimits = LIMITS) -> str:
    with pytest.raises(ArtifactError) as raised:
        content(data, limits)
    assert "some.zip" in str(raised.value)
    return raised.value.reason


names = st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8}){0,2}", fullmatch=True)


@settings(deadline=None)
@given(st.dictionaries(names, st.binary(max_size=2000), max_size=5), st.binary(max_size=100))
def test_what_is_written_is_what_is_read(members: dict[str, bytes], before: bytes) -> None:
    assert content(archive_bytes(members)) == members
    assert content(deflated(members)) == members
    assert content(before + archive_bytes(members)) == members


def test_equal_content_is_written_as_equal_bytes() -> None:
    assert archive_bytes(CONTENT) == GOOD
    with zipfile.ZipFile(io.BytesIO(GOOD)) as file:
        assert file.testzip() is None
        assert file.namelist() == list(CONTENT)


def is_read_or_refused(data: bytes) -> bool:
    """Say whether bytes are read as members, or refused by an error that names the file."""
    try:
        found = content(data)
    except ArtifactError as error:
        return bool(error.reason) and "some.zip" in str(error)
    return all(isinstance(member, bytes) for member in found.values())


@settings(deadline=None, max_examples=400)
@given(st.sampled_from([GOOD, GOOD_DEFLATED]), st.data())
def test_no_flipped_byte_reads_as_other_content(good: bytes, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(good) - 1))
    damaged = bytearray(good)
    damaged[position] ^= data.draw(st.integers(1, 255))
    try:
        found = content(bytes(damaged))
    except ArtifactError:
        return
    # A name may change, and a member may go (manifests say what must be there): no byte of one.
    assert {*found.values()} <= {*CONTENT.values()}


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([GOOD, GOOD_DEFLATED]), st.data())
def test_a_truncated_file_is_refused(good: bytes, data: st.DataObject) -> None:
    assert refusal(good[: data.draw(st.integers(0, len(good) - 1))])


@settings(deadline=None, max_examples=400)
@given(
    st.sampled_from([GOOD, GOOD_DEFLATED]),
    st.lists(st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=8)), max_size=6),
)
def test_overwritten_bytes_crash_nothing(good: bytes, patches: list[tuple[int, bytes]]) -> None:
    damaged = bytearray(good)
    for position, patch in patches:
        damaged[position % len(good) : position % len(good) + len(patch)] = patch
    assert is_read_or_refused(bytes(damaged))


@settings(deadline=None)
@given(st.binary(max_size=400), st.binary(max_size=60))
def test_nonsense_with_an_end_record_crashes_nothing(body: bytes, tail: bytes) -> None:
    assert is_read_or_refused(body + b"PK\x05\x06" + tail)
    assert refusal(body.replace(b"PK", b"") + tail.replace(b"PK", b""))


OUTSIDE = ["../x", "a/../../x", "/x", "//x", "a//x", "./x", "a/.", "..", "\\x", "..\\x", "a\\x",
           "C:/x", "C:x", "x:stream", "\x1b[2Jx", "x\n", "", "/"]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_leads_outside_is_refused(name: str) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr(zipfile.ZipInfo("good"), b"x")
        info = zipfile.ZipInfo("x")
        info.filename = name
        file.writestr(info, b"x")
    assert "leads out of it" in refusal(out.getvalue())


def test_a_name_with_a_zero_byte_is_refused() -> None:
    assert "leads out of it" in refusal(archive_bytes({"good.x": b""}).replace(b"d.x", b"d\0x"))


def test_a_folder_entry_is_no_member() -> None:
    assert content(deflated({"folder/": b"", "folder/x": b"y"})) == {"folder/x": b"y"}


def test_a_name_that_occurs_twice_is_refused() -> None:
    assert "twice" in refusal(archive_bytes({"aa": b"1", "ab": b"2"}).replace(b"ab", b"aa"))


def test_a_member_whose_local_header_has_another_name_is_refused() -> None:
    assert "damaged" in refusal(archive_bytes({"aa": b"1"}).replace(b"aa", b"ab", 1))


def patched(
    data: bytes, *, sizes: int | None = None, method: int | None = None, flags: int | None = None
) -> bytes:
    """Let the directory's first entry lie."""
    at = data.index(b"PK\x01\x02")
    head = bytearray(data)
    if flags is not None:
        struct.pack_into("<H", head, at + 8, flags)
    if method is not None:
        struct.pack_into("<H", head, at + 10, method)
    if sizes is not None:
        struct.pack_into("<II", head, at + 20, sizes, sizes)
    return bytes(head)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (patched(GOOD, sizes=(1 << 32) - 2), "declares 4294967294 bytes"),
        (patched(GOOD, sizes=1 << 30), "no honest file"),
        (patched(GOOD, sizes=1 << 19), "overlap"),
        (patched(GOOD, sizes=79), "damaged"),
        (patched(GOOD, method=12), "method 12"),
        (patched(GOOD, method=99), "method 99"),
        (patched(GOOD, flags=1), "is encrypted"),
        (deflated({"bomb": bytes(64 << 20)}), "no honest file"),
        (b"", "no readable zip file"),
        (b"PK\x05\x06" + b"\xff" * 18, "no readable zip file"),
    ],
)
def test_a_file_that_lies_is_refused(data: bytes, reason: str) -> None:
    assert reason in refusal(data)


def test_more_than_the_limits_is_refused() -> None:
    assert "3 members" in refusal(GOOD, ArchiveLimits(members=2))
    assert "at most 100 are read" in refusal(GOOD, ArchiveLimits(member_bytes=100))


@pytest.mark.parametrize(
    ("place", "reason"), [("x", "there is no such file"), (".", "it is a folder")]
)
def test_what_is_no_file_is_refused(place: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / place
    with pytest.raises(ArtifactError, match=f"{path}: {reason}"), open_archive(path):
        pass


def test_a_member_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(GOOD)
    with open_archive(path) as archive, pytest.raises(ArtifactError, match="no member 'three'"):
        archive.read("three")


def many_members() -> bytes:
    """Return a directory of 2 million entries for one member, as small as can be."""
    data = archive_bytes({"x": b""})
    start, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    directory = data[start:end] * 2_000_000
    tail = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, len(directory), start, 0)
    return data[:start] + directory + tail


def small_then_large() -> bytes:
    """Return a member that declares 100 bytes and decompresses to 256 MiB."""
    data = deflated({"bomb": bytes(256 << 20)})
    at = data.index(b"PK\x01\x02")
    head = bytearray(data)
    struct.pack_into("<I", head, at + 24, 100)
    return bytes(head)


BOMBS: dict[str, Callable[[], bytes]] = {
    "one member": lambda: deflated({"bomb": bytes(1 << 30)}),
    "many members": many_members,
    "declared small": small_then_large,
    "zip64 sizes": lambda: patched(GOOD, sizes=0xFFFFFFFF),
}
READ_ALL = """
import resource, sys
from pathlib import Path
from lowering.archive import open_archive
from lowering.errors import ArtifactError
resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
try:
    with open_archive(Path(sys.argv[1])) as archive:
        for name in archive.names():
            archive.read(name)
except ArtifactError as error:
    print("refused:", error.reason)
"""


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_within_a_memory_limit(bomb: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    path.write_bytes(BOMBS[bomb]())
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL, str(path)], capture_output=True, text=True
    )
    assert done.stdout.startswith("refused:"), done.stderr
    assert "Cannot allocate" not in done.stdout
    assert [*tmp_path.iterdir()] == [path]
