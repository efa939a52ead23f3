"""The archive index against Python's tarfile: equal, or we refuse."""

import io
import tarfile
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scale import scaled
from vllm_neuron import _core
from vllm_neuron.errors import NeffError

from . import build

FILES = build.members()
# Components of names: some of them make a path unsafe, long ones make PAX records.
COMPONENT = st.sampled_from(
    ["a", "b", "c.json", "é", "n" * 60, "l" * 120, " ", "x.npy", "..", ".", "", "a=b", "7 k=v"]
)
NAMES = st.lists(COMPONENT, min_size=1, max_size=4).map("/".join)
CONTENT = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([511, 512, 513, 1024]).map(lambda size: bytes([1]) * size),
)
KINDS = st.sampled_from(
    [tarfile.REGTYPE] * 12 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE]
)
FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
HEADERS = st.dictionaries(
    st.sampled_from(["mtime", "atime", "comment", "SCHILY.xattr.user.x"]),
    st.sampled_from(["1.5", "0", "x=y", "line\nline"]),
    max_size=2,
)


def is_plain(name: str) -> bool:
    return all(part not in ("", ".", "..") for part in name.split("/"))


class Drawn(NamedTuple):
    """A tar archive with the files of a sound NEFF and more, and whether we must accept it."""

    archive: bytes
    must_accept: bool

    def __repr__(self) -> str:
        return f"{len(self.archive)} bytes, must_accept={self.must_accept}"


@st.composite
def archives(draw) -> Drawn:
    chosen = draw(FORMATS)
    must_accept = chosen != tarfile.GNU_FORMAT
    names = set(FILES)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=chosen) as out:
        for name, content in FILES.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            out.addfile(entry, io.BytesIO(content))
        for name in draw(st.lists(NAMES, max_size=4)):
            entry = tarfile.TarInfo(name)
            entry.type = draw(KINDS)
            entry.pax_headers = draw(HEADERS) if chosen == tarfile.PAX_FORMAT else {}
            content = draw(CONTENT) if entry.type == tarfile.REGTYPE else b""
            entry.size = len(content)
            entry.linkname = "neff.json" if entry.type in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            try:
                out.addfile(entry, io.BytesIO(content))
            except ValueError:
                # The name does not fit this format.
                continue
            is_file = entry.type == tarfile.REGTYPE
            must_accept &= is_plain(name) and (is_file or entry.type == tarfile.DIRTYPE)
            must_accept &= not (is_file and name in names)
            names |= {name} if is_file else set()
    return Drawn(stream.getvalue(), must_accept)


def reference(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
        return {
            entry.name: opened.extractfile(entry).read()
            for entry in opened.getmembers()
            if entry.isreg()
        }


def assert_equal(neff: _core.Neff, archive: bytes) -> None:
    expected = reference(archive)
    assert neff.members == [(name, len(content)) for name, content in expected.items()]
    for name, content in expected.items():
        assert neff.member(name) == content


@settings(max_examples=scaled(800), deadline=None)
@given(archives())
def test_index_equals_that_of_tarfile(drawn):
    archive, must_accept = drawn
    try:
        neff = _core.Neff.parse(build.container(archive))
    except NeffError:
        assert not must_accept
        return
    assert_equal(neff, archive)


@settings(max_examples=scaled(1200), deadline=None)
@given(archives(), st.data())
def test_index_of_a_damaged_archive_equals_that_of_tarfile_or_is_refused(drawn, data):
    archive = bytearray(drawn.archive)
    # Only header blocks and PAX records matter for the index; they lie on block edges.
    for _ in range(data.draw(st.integers(1, 3))):
        block = data.draw(st.integers(0, len(archive) // 512 - 1))
        place = data.draw(st.one_of(st.integers(0, 511), st.sampled_from([0, 124, 135, 148, 156])))
        archive[block * 512 + place] = data.draw(st.sampled_from(b"\x00 0179x/.g\xff"))
        if data.draw(st.booleans()):
            repair_checksum(archive, block * 512)
    damaged = bytes(archive)
    try:
        neff = _core.Neff.parse(build.container(damaged))
    except NeffError:
        return
    assert_equal(neff, damaged)


def repair_checksum(archive: bytearray, start: int) -> None:
    archive[start + 148 : start + 156] = b" " * 8
    archive[start + 148 : start + 156] = b"%06o\0 " % sum(archive[start : start + 512])


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1023, 1024, 70_000])
def test_sizes_around_block_edges(size):
    archive = build.tar({**build.members(), "extra": b"\1" * size})
    assert_equal(_core.Neff.parse(build.container(archive)), archive)
