"""Checks 1 to 6: every header field corrupted, every truncation, and what is only a warning."""

import pytest

from vllm_neuron import _core
from vllm_neuron.errors import NeffChecksumError, NeffFormatError, NeffUnsupportedError

from . import build

SOUND = build.sound()
REST = len(SOUND) - 1024

REFUSED = [
    # field, value, class, offset, status, expected, found
    ("pkg_version", 0, NeffUnsupportedError, 0, 10, "1 or 2", "0"),
    ("pkg_version", 3, NeffUnsupportedError, 0, 10, "1 or 2", "3"),
    ("header_size", 0, NeffFormatError, 8, 2, "1024", "0"),
    ("header_size", 1025, NeffFormatError, 8, 2, "1024", "1025"),
    ("header_size", 2**64 - 1, NeffFormatError, 8, 2, "1024", str(2**64 - 1)),
    ("data_size", 0, NeffFormatError, 16, 2, f"{REST} (length of the file - 1024)", "0"),
    ("data_size", REST + 1, NeffFormatError, 16, 2, None, str(REST + 1)),
    ("data_size", 2**64 - 1024, NeffFormatError, 16, 2, None, str(2**64 - 1024)),
    ("data_size", 2**64 - 1, NeffFormatError, 16, 2, None, str(2**64 - 1)),
    ("neff_version_major", 3, NeffUnsupportedError, 24, 10, "at most 2", "3"),
    ("neff_version_major", 2**63, NeffUnsupportedError, 24, 10, "at most 2", str(2**63)),
    ("name", b"x" * 256, NeffFormatError, 220, 2, "a NUL within 256 bytes", "none"),
    # Bit 8 was refused by real runtimes (exactly 0x100).
    ("feature_bits", 0x100, NeffUnsupportedError, 544, 10, None, "0x100 (unknown: 0x100)"),
    ("feature_bits", 0x1500, NeffUnsupportedError, 544, 10, None, "0x1500 (unknown: 0x100)"),
    ("feature_bits", 1 << 62, NeffUnsupportedError, 544, 10, None, None),
    ("hash", bytes(32), NeffChecksumError, 172, 2, None, "00" * 16),
]


@pytest.mark.parametrize(
    ("field", "value", "kind", "offset", "status", "expected", "found"), REFUSED
)
def test_corrupt_field_is_refused(field, value, kind, offset, status, expected, found):
    """bugs G01: also what only a newer runtime could load."""
    data = build.with_field(SOUND, field, value)
    with pytest.raises(kind) as caught:
        _core.Neff.parse(data, path="bad.neff")
    error = caught.value
    assert type(error) is kind
    assert (error.path, error.offset, error.status) == ("bad.neff", offset, status)
    assert error.inflated_offset is None
    if expected is not None:
        assert error.expected == expected
    if found is not None:
        assert error.found == found
    assert f"at offset {offset}: expected {error.expected}, found {error.found}" in str(error)
    assert str(error).startswith("bad.neff: NEFF ")


WARNED = [
    ("neff_version_major", 0, "neff_version_major is 0 with feature_bits 0x0"),
    ("neff_version_major", 2, "neff_version_major is 2 with feature_bits 0x0"),
    ("neff_version_minor", 1, "neff_version_minor is 1"),
    ("neff_build_version", b"1", "neff_build_version (offset 40) is not zero"),
    ("num_tpb", 2, "header says num_tpb 2, info.json says 1"),
    ("uuid", bytes(16), "the uuid (offset 204) is all zero"),
    ("name", b"other", 'header says name "other", info.json says "test.neff"'),
    ("name", b"test.neff\0x", "the name (offset 220) is not filled up with zeros"),
    ("name", b"", "the name (offset 220) is empty"),
    ("name", b"\xff", "the name (offset 220) is not UTF-8"),
    ("requested_tpb_count", 2, "header says requested_tpb_count 2, info.json says 1"),
    ("tpb_per_node", b"\1\1", "header says tpb_per_node [1, 1, 0,"),
    ("feature_bits", 1 << 10, "feature bit 0x400 is set although it is not true that lnc_size"),
    ("feature_bits", 1 << 12, "feature bit 0x1000 is set although it is not true that the last"),
    ("feature_bits", 1 << 21, "feature bit 0x200000 is set although it is not true that the last"),
    ("feature_bits", 1 << 63, "neff_version_major is 1 with feature_bits 0x8000000000000000"),
    ("lnc_size", 2, "lnc_size is 2, the number of subgraphs is 1"),
    ("lnc_size", 0, "lnc_size is 0, the number of subgraphs is 1"),
    ("pad", b"\0\1", "the padding at the end of the header (offset 556) is not zero"),
]


@pytest.mark.parametrize(("field", "value", "warning"), WARNED)
def test_field_unlike_every_known_file_is_a_warning(field, value, warning):
    neff = _core.Neff.parse(build.with_field(SOUND, field, value))
    assert [line for line in neff.warnings if line.startswith(warning)] != []


def test_every_field_of_the_layout_is_covered():
    covered = {row[0] for row in REFUSED} | {row[0] for row in WARNED}
    assert covered == set(build.FIELDS)


def test_sound_file_has_no_warning():
    neff = _core.Neff.parse(SOUND)
    assert neff.warnings == []
    assert neff.neff_version == (1, 0)
    assert neff.name == "test.neff"


@pytest.mark.parametrize("length", [0, 1, 511, 1023])
def test_file_shorter_than_a_header_is_refused(length):
    with pytest.raises(NeffFormatError) as caught:
        _core.Neff.parse(SOUND[:length])
    assert (caught.value.offset, caught.value.status) == (0, 2)
    assert caught.value.expected == "at least 1024 bytes"
    assert caught.value.found == f"{length} bytes"
    assert caught.value.path is None


def test_header_without_payload_is_refused():
    with pytest.raises(NeffFormatError) as caught:
        _core.Neff.parse(SOUND[:1024])
    assert caught.value.offset == 1024
    assert caught.value.expected == "a payload after the header"


@pytest.mark.parametrize("compressed", [True, False], ids=["gzip", "plain"])
def test_every_truncation_is_refused(compressed):
    data = build.sound(compressed=compressed)
    for length in range(1025, len(data)):
        with pytest.raises(NeffFormatError) as caught:
            _core.Neff.parse(data[:length])
        assert caught.value.offset == 16
        assert caught.value.found == str(len(data) - 1024)


def test_bytes_after_the_payload_are_a_warning():
    neff = _core.Neff.parse(SOUND + b"\x00\x01\x02")
    assert neff.warnings == ["3 bytes follow the payload and are ignored"]
    assert neff.size_bytes == len(SOUND) + 3
    assert neff.data_size == REST


def test_checks_are_made_in_their_documented_order():
    """A file wrong in every way names the first check that fails; each repair leads to the next."""
    data = build.with_field(SOUND, "pkg_version", 9)
    for field, value in {
        "header_size": 9,
        "neff_version_major": 9,
        "feature_bits": 0x100,
        "data_size": 9**9,
        "hash": b"9",
    }.items():
        data = build.with_field(data, field, value)
    repairs = {
        "header_size": 1024,
        "neff_version_major": 1,
        "feature_bits": 0,
        "data_size": REST,
        "pkg_version": 2,
        "hash": SOUND[172:204],
    }
    for field, value in repairs.items():
        with pytest.raises((NeffFormatError, NeffUnsupportedError, NeffChecksumError)) as caught:
            _core.Neff.parse(data)
        assert caught.value.offset == build.FIELDS[field][0]
        data = build.with_field(data, field, value)
    assert _core.Neff.parse(data).warnings == []
