"""Check 7: the digest in both byte orders and both algorithms, and what it protects."""

import hashlib
import random

import pytest

from vllm_neuron import _core
from vllm_neuron.errors import NeffChecksumError, NeffError

from . import build

SOUND = build.sound(compressed=True)
PAYLOAD = SOUND[1024:]
MD5 = hashlib.md5(PAYLOAD).digest()


def test_standard_order():
    assert _core.Neff.parse(SOUND).digest_order == "standard"


def test_word_swapped_order_is_accepted_and_named():
    data = build.with_field(SOUND, "hash", build.swap_words(MD5))
    neff = _core.Neff.parse(data)
    assert neff.digest_order == "word-swapped"
    assert neff.warnings == []


@pytest.mark.parametrize(
    "digest",
    [
        MD5[::-1],
        # Words in another order, and half-words swapped: neither is ever written.
        MD5[4:] + MD5[:4],
        b"".join(MD5[i : i + 2][::-1] for i in range(0, 16, 2)),
        hashlib.sha256(PAYLOAD).digest(),
        bytes(16),
    ],
    ids=["reversed", "rotated", "half-words", "sha-256", "zero"],
)
def test_any_other_order_is_refused(digest):
    with pytest.raises(NeffChecksumError) as caught:
        _core.Neff.parse(build.with_field(SOUND, "hash", digest))
    assert (caught.value.offset, caught.value.status) == (172, 2)
    assert caught.value.expected == f"{MD5.hex()} (or its word-swapped form)"
    assert caught.value.found == digest[:16].hex()


def test_bytes_after_the_md5_are_a_warning():
    neff = _core.Neff.parse(build.with_field(SOUND, "hash", MD5 + b"\1"))
    assert neff.warnings == ["the 16 bytes after the MD5 digest (offset 188) are not zero"]


def test_package_version_1_uses_sha256():
    digest = hashlib.sha256(PAYLOAD).digest()
    data = build.container(PAYLOAD, pkg_version=1, hash=digest)
    neff = _core.Neff.parse(data)
    assert (neff.package_version, neff.digest_order, neff.warnings) == (1, "standard", [])
    wrong = build.with_field(data, "hash", digest[:31] + bytes([digest[31] ^ 1]))
    with pytest.raises(NeffChecksumError) as caught:
        _core.Neff.parse(wrong)
    assert caught.value.expected == digest.hex()
    with pytest.raises(NeffChecksumError):
        _core.Neff.parse(build.container(PAYLOAD, pkg_version=1))


def test_digest_covers_the_zeros_after_the_gzip_stream():
    padded = PAYLOAD + bytes(-len(PAYLOAD) % 10240)
    neff = _core.Neff.parse(build.container(padded))
    assert neff.digest_order == "standard"
    with pytest.raises(NeffChecksumError):
        _core.Neff.parse(build.container(padded, hash=MD5))


def test_digest_is_compared_only_on_request():
    data = build.with_field(SOUND, "hash", b"wrong")
    assert _core.Neff.parse(data, verify_hash=False).digest_order is None


@pytest.mark.parametrize("compressed", [True, False], ids=["gzip", "plain"])
def test_every_flipped_bit_of_the_payload_is_detected(compressed):
    """500 of them, drawn at random from all."""
    data = build.sound(compressed=compressed)
    generator = random.Random(20260101)
    for _ in range(500):
        bit = generator.randrange(1024 * 8, len(data) * 8)
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(NeffChecksumError):
            _core.Neff.parse(bytes(flipped))


@pytest.mark.parametrize("compressed", [True, False], ids=["gzip", "plain"])
def test_flipped_bytes_without_the_digest_are_refused_or_read_but_never_a_crash(compressed):
    data = build.sound(compressed=compressed)
    generator = random.Random(20260102)
    refused = 0
    for _ in range(2000):
        flipped = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            flipped[generator.randrange(1024, len(data))] = generator.randrange(256)
        try:
            _core.Neff.parse(bytes(flipped), verify_hash=False).to_dict()
        except NeffError as error:
            assert error.status in (2, 10)
            refused += 1
    # The CRC of gzip sees them all; tar has checksums for its headers only.
    assert refused > (1800 if compressed else 200)
