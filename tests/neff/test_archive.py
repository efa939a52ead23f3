"""Check 8: hostile and broken archives are refused, odd but harmless ones are read."""

import gzip
import io
import resource
import tarfile
import time
import zlib

import pytest

from vllm_neuron import _core
from vllm_neuron.errors import NeffFormatError

from . import build

# Where records appended by `build.sound` start in the archive.
APPENDED = len(build.sound()) - 1024 - 1024


def refused(data: bytes) -> NeffFormatError:
    with pytest.raises(NeffFormatError) as caught:
        _core.Neff.parse(data)
    assert caught.value.status == 2
    return caught.value


UNSAFE_NAMES = [
    b"/etc/passwd",
    b"../outside",
    b"sg00/../../outside",
    b"sg00/..",
    b"..",
    b".",
    b"./neff.json2",
    b"a//b",
    b"a/",
    b"",
]


@pytest.mark.parametrize("compressed", [True, False], ids=["gzip", "plain"])
@pytest.mark.parametrize("name", UNSAFE_NAMES)
def test_name_that_could_leave_a_directory_is_refused(name, compressed):
    error = refused(build.sound(build.record(name, b"x"), compressed=compressed))
    assert error.expected == "a relative path without empty, `.` or `..` components"
    assert error.member == name.decode()
    if compressed:
        assert (error.offset, error.inflated_offset) == (1024, APPENDED)
    else:
        assert (error.offset, error.inflated_offset) == (1024 + APPENDED, None)


@pytest.mark.parametrize("name", UNSAFE_NAMES)
def test_unsafe_name_in_a_pax_record_is_refused(name):
    records = build.pax(b"path=" + name) + build.record(b"harmless", b"x")
    assert refused(build.sound(records)).member == name.decode()


def test_unsafe_name_in_the_prefix_is_refused():
    error = refused(build.sound(build.record(b"passwd", b"x", prefix=b"/etc")))
    assert error.member == "/etc/passwd"


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (b"1", "a hard link (type '1')"),
        (b"2", "a symbolic link (type '2')"),
        (b"3", "a character device (type '3')"),
        (b"4", "a block device (type '4')"),
        (b"6", "a FIFO (type '6')"),
        (b"7", "an unknown kind of member (type '7')"),
        (b"L", "a GNU long name (type 'L')"),
        (b"K", "a GNU long name (type 'K')"),
        (b"S", "a sparse file (type 'S')"),
        (b"X", "an unknown kind of member (type 'X')"),
    ],
)
def test_member_that_is_no_file_is_refused(kind, found):
    error = refused(build.sound(build.record(b"m", kind=kind, linkname=b"sg00/PE.bin")))
    assert error.expected == "a regular file, a directory or PAX records"
    assert error.found == found
    assert error.offset == 1024 + APPENDED + 156


@pytest.mark.parametrize("name", [b"neff.json", b"sg00/PE.bin"])
def test_duplicate_name_is_refused(name):
    error = refused(build.sound(build.record(name, b"other")))
    assert error.member == name.decode()
    assert (error.expected, error.found) == ("every name once", "a second member of this name")
    assert error.offset == 1024 + APPENDED


def test_duplicate_through_a_pax_path_is_refused():
    records = build.pax(b"path=neff.json") + build.record(b"m", b"other")
    assert refused(build.sound(records)).member == "neff.json"


@pytest.mark.parametrize("lie", [b"0", b"4", b"5", b"512", b"99999999999999"])
def test_pax_size_that_differs_from_the_header_is_refused(lie):
    records = build.pax(b"size=" + lie) + build.record(b"m", b"abc")
    error = refused(build.sound(records))
    assert error.expected == "the PAX size to be that of the header, 3 bytes"
    assert error.found == f"{int(lie)} bytes"
    assert error.member == "m"


def test_pax_records_are_applied_and_others_skipped():
    long_name = b"sg00/" + b"n" * 200 + b".bin"
    records = (
        build.pax(b"comment=global", kind=b"g")
        + build.pax(b"mtime=1.5", b"atime=2", b"ctime=3", b"path=" + long_name, b"size=3")
        + build.record(b"short", b"abc")
        + build.pax(b"mtime=4")
        + build.record(b"other", b"de")
    )
    neff = _core.Neff.parse(build.sound(records))
    assert neff.members[-2:] == [(long_name.decode(), 3), ("other", 2)]
    assert neff.member(long_name.decode()) == b"abc"
    assert neff.member("other") == b"de"
    assert neff.warnings == []


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (build.pax(b"path=m", kind=b"g"), "no path and no size for all members at once"),
        (build.pax(b"size=1", kind=b"g"), "no path and no size for all members at once"),
        (build.pax(b"linkpath=sg00/PE.bin"), "no PAX link target"),
        (build.pax(b"GNU.sparse.major=1"), "no PAX sparse file"),
        (build.pax(b"size=-1"), "a decimal PAX size"),
        (build.pax(b"size="), "a decimal PAX size"),
        (build.pax(b"mtime=1") + build.pax(b"mtime=1"), "a member after its PAX records"),
        (build.pax(b"mtime=1") + build.pax(b"a=b", kind=b"g"), "a member after its PAX records"),
        (build.record(b"p", b"9 a=b\n", kind=b"x"), "a PAX record"),
        (build.record(b"p", b"5 a=b\n", kind=b"x"), "a PAX record"),
        (build.record(b"p", b"0 a=b\n", kind=b"x"), "a PAX record"),
        (build.record(b"p", b"+6 a=b\n", kind=b"x"), "a PAX record"),
        (build.record(b"p", b"99999999999999999999999 a=b\n", kind=b"x"), "a PAX record"),
        (build.record(b"p", b"6 abcd", kind=b"x"), "a PAX record"),
        (build.record(b"p", b"7 abcd\n", kind=b"x"), 'a PAX record with a "="'),
        (build.record(b"p", b"\xff" * 512, kind=b"x"), "a PAX record"),
    ],
)
def test_broken_pax_records_are_refused(records, expected):
    error = refused(build.sound(records + build.record(b"m", b"x")))
    assert error.expected.startswith(expected)


def test_pax_records_without_a_member_are_refused():
    error = refused(build.sound(build.pax(b"mtime=1")))
    assert (error.expected, error.found) == (
        "a member after its PAX records",
        "the end of the archive",
    )


def test_pax_records_of_two_mebibytes_are_refused():
    records = build.pax(b"comment=" + b"c" * (2 << 20)) + build.record(b"m", b"x")
    error = refused(build.sound(records))
    assert "bytes of PAX records" in str(error)
    assert error.expected == f"at most {1 << 20}"


def test_name_longer_than_the_limit_is_refused():
    accepted = build.pax(b"path=" + b"n" * 1024) + build.record(b"m", b"x")
    assert _core.Neff.parse(build.sound(accepted)).members[-1] == ("n" * 1024, 1)
    records = build.pax(b"path=" + b"n" * 1025) + build.record(b"m", b"x")
    error = refused(build.sound(records))
    assert "bytes of a name" in str(error)
    assert (error.expected, error.found) == ("at most 1024", "1025")


@pytest.mark.parametrize("name", [b"\xff\xfe", b"a\x00b"])
def test_name_that_is_not_text_is_refused(name):
    refused(build.sound(build.pax(b"path=" + name) + build.record(b"m", b"x")))


@pytest.mark.parametrize(
    "fields",
    [
        {"size": b"00000000003\0", "mode": b"0000644\0"},
        {"size": b"00000000003 ", "mode": b"000664 \0"},
        {"size": b"         3 \0"},
        {"size": b"3\0"},
        {"size": b"000000000003"},
        {"size": b"3 \0 \0"},
    ],
)
def test_octal_fields_end_with_nul_or_space(fields):
    neff = _core.Neff.parse(build.sound(build.record(b"m", b"abc", **fields)))
    assert neff.members[-1] == ("m", 3)
    assert neff.member("m") == b"abc"


@pytest.mark.parametrize("terminators", [b"\0 ", b" \0", b"\0\0", b"  "])
def test_checksum_ends_with_nul_and_space_in_any_order(terminators):
    right = build.block(b"m", 0)[148:154]
    block = build.block(b"m", 0, checksum=right + terminators)
    assert _core.Neff.parse(build.sound(block)).members[-1] == ("m", 0)


@pytest.mark.parametrize(
    "size",
    [
        b"",
        b"8\0",
        b"-1\0",
        b"0x3\0",
        b"3\x003\0",
        b"\x80" + bytes(10) + b"\3",
        b"3 x\0",
        b"\xff" * 12,
    ],
)
def test_size_that_is_not_octal_is_refused(size):
    error = refused(build.sound(build.record(b"m", b"abc", size=size)))
    assert error.expected == "an octal size"
    assert error.offset == 1024 + APPENDED + 124


def test_wrong_header_checksum_is_refused():
    error = refused(build.sound(build.record(b"m", checksum=b"000001\0 ")))
    assert error.expected.startswith("header checksum ")
    assert error.found == "1"
    assert error.offset == 1024 + APPENDED + 148


@pytest.mark.parametrize(
    "fields", [{"magic": b"ustar ", "version": b" \0"}, {"magic": b"", "version": b""}]
)
def test_tar_that_is_not_posix_is_refused(fields):
    error = refused(build.sound(build.record(b"m", **fields)))
    assert error.expected.startswith("a POSIX ustar header")
    assert error.offset == 1024 + APPENDED + 257


def test_directories_are_passed_over():
    records = build.record(b"sg00/", kind=b"5") + build.record(b"extra", kind=b"5")
    neff = _core.Neff.parse(build.sound(records + build.record(b"m", b"x")))
    assert neff.members[-1] == ("m", 1)
    assert "extra" not in dict(neff.members)


@pytest.mark.parametrize(
    "records",
    [
        build.record(b"../d", kind=b"5"),
        build.record(b"/d/", kind=b"5"),
        build.record(b"d//", kind=b"5"),
        build.record(b"d", b"content", kind=b"5"),
    ],
)
def test_directory_with_content_or_an_unsafe_name_is_refused(records):
    refused(build.sound(records))


# ---- sizes and counts --------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [True, False], ids=["gzip", "plain"])
def test_claim_of_64_gigabytes_is_refused_before_anything_is_read(compressed):
    error = refused(build.sound(build.record(b"m", size=b"7" * 11 + b"\0"), compressed=compressed))
    assert "beyond the reader's limits, bytes of a member" in str(error)
    assert (error.expected, error.found) == (f"at most {4 << 30}", str((8 << 30) - 1))


def test_claims_of_more_than_eight_gigabytes_together_are_refused():
    """By sums of sizes, without as much data: the content of the first is already missing."""
    claim = b"%011o\0" % ((4 << 30) - 512)
    error = refused(build.sound(build.record(b"m", size=claim)))
    assert error.found == "the end of the payload"


def test_member_that_ends_after_the_archive_is_refused():
    error = refused(build.sound(build.record(b"m", b"abc", size=b"%011o\0" % 4096)))
    assert error.found == "the end of the payload"


def test_65537_members_are_refused():
    """Directories count too, and may repeat a name: one block serves for all."""
    error = refused(build.sound(build.block(b"d", kind=b"5") * 65_537, compressed=True))
    assert "beyond the reader's limits, members" in str(error)
    assert error.expected == "at most 65536"


def test_bomb_is_refused_early_and_in_little_memory():
    """4 GiB that deflate packs a thousand times: refused after some 90 MB, none of them kept."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    archive = build.without_end(build.tar(build.members()))
    parts = [packer.compress(archive + build.block(b"bomb", b"%011o\0" % ((4 << 30) - 512)))]
    zeros = bytes(1 << 20)
    parts += [packer.compress(zeros) for _ in range(128)]
    data = build.container(b"".join(parts) + packer.flush())
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started = time.process_time()
    error = refused(data)
    assert "inflate ratio" in str(error)
    assert error.inflated_offset < 128 << 20
    assert time.process_time() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes < 16 << 20


def test_64_mebibytes_that_compress_well_are_accepted():
    """A thousand times smaller, which the ratio alone would forbid."""
    zeros = bytes(60 << 20)
    payload = build.sound(build.record(b"zeros", zeros))[1024:]
    packed = gzip.compress(payload, 9)
    assert len(payload) > 900 * len(packed)
    neff = _core.Neff.parse(build.container(packed))
    assert neff.members[-1] == ("zeros", len(zeros))
    assert neff.member("zeros") == zeros


# ---- ends --------------------------------------------------------------------------------------


def payload_of(*, end: bytes) -> bytes:
    return build.without_end(build.tar(build.members())) + end


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("zeros", [1024, 1025, 1536, 10240])
def test_zeros_after_the_end_of_the_archive_are_accepted(zeros, pack):
    _core.Neff.parse(build.container(pack(payload_of(end=bytes(zeros)))))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    "end",
    [
        b"",
        bytes(1),
        bytes(512),
        bytes(1023),
        bytes(512) + build.block(b"hidden"),
        bytes(1024) + b"x",
        bytes(1024) + build.block(b"hidden") + bytes(1024),
        bytes(20_000) + b"x",
    ],
    ids=["none", "1", "512", "1023", "one-block", "byte", "second-archive", "far"],
)
def test_archive_without_a_proper_end_is_refused(end, pack):
    refused(build.container(pack(payload_of(end=end))))


@pytest.mark.parametrize("zeros", [0, 1, 511, 8192])
def test_zeros_after_the_gzip_stream_are_accepted(zeros):
    packed = gzip.compress(payload_of(end=bytes(1024)), 1, mtime=0)
    _core.Neff.parse(build.container(packed + bytes(zeros)))


@pytest.mark.parametrize("zeros", [0, 1, 8192])
def test_other_bytes_after_the_gzip_stream_are_refused(zeros):
    packed = gzip.compress(payload_of(end=bytes(1024)), 1, mtime=0)
    error = refused(build.container(packed + bytes(zeros) + b"\1"))
    assert error.expected == "only zeros after the gzip stream"
    assert error.offset == 1024 + len(packed) + zeros


def test_second_gzip_member_is_refused():
    packed = gzip.compress(payload_of(end=bytes(1024)), 1, mtime=0)
    refused(build.container(packed + packed))


def test_every_truncation_of_the_gzip_stream_is_refused():
    packed = gzip.compress(payload_of(end=bytes(1024)), 1, mtime=0)
    for length in range(1, len(packed)):
        error = refused(build.container(packed[:length]))
        if length >= 3:
            assert error.offset == 1024 + length
            assert error.found == "the end of the payload"


def test_truncation_of_the_plain_archive_is_refused():
    """Everywhere in the first member, and at and around every block edge."""
    archive = payload_of(end=bytes(1024))
    edges = {edge + near for edge in range(0, len(archive) + 1, 512) for near in (-1, 0, 1)}
    for length in sorted(edges | set(range(1024))):
        if 0 < length < len(archive):
            refused(build.container(archive[:length]))


@pytest.mark.parametrize("place", [-8, -4], ids=["crc", "length"])
def test_wrong_gzip_trailer_is_refused(place):
    packed = bytearray(gzip.compress(payload_of(end=bytes(1024)), 1, mtime=0))
    packed[place] ^= 1
    error = refused(build.container(bytes(packed)))
    assert error.expected == "a valid gzip stream"


@pytest.mark.parametrize("payload", [b"\0", bytes(10240), b"x" * 600, b"\x1f\x8b", b"\x1f\x8b\x08"])
def test_payload_that_is_no_archive_is_refused(payload):
    refused(build.container(payload))


def test_gzip_with_every_optional_header_field_is_read():
    stream = io.BytesIO()
    with gzip.GzipFile("a-name.tar", "wb", fileobj=stream, mtime=1_700_000_000) as out:
        out.write(payload_of(end=bytes(1024)))
    assert stream.getvalue()[3] != 0
    assert _core.Neff.parse(build.container(stream.getvalue())).compression == "gzip"


def test_archive_of_tarfile_with_pax_headers_before_every_member_is_read():
    """As compiler 2.0.99229 writes them: mtime, atime and ctime before every file."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as out:
        for name, content in build.members().items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.pax_headers = {"mtime": "1.25", "atime": "1.5", "ctime": "1.75"}
            out.addfile(entry, io.BytesIO(content))
    neff = _core.Neff.parse(build.container(stream.getvalue()))
    assert [name for name, _ in neff.members] == list(build.members())
    assert neff.warnings == []
