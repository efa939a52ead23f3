"""Keys of named components."""

from __future__ import annotations

import pytest

from vllm_neuron import _core


def key(domain: str, *components: tuple[str, object]) -> _core.Key:
    builder = _core.KeyBuilder(domain)
    for name, value in components:
        builder.add(name, value)
    return builder.finish()


def test_key_has_all_its_parts():
    found = key("trace", ("dtype", "bfloat16"), ("bucket", b"decode 8"))
    assert len(found.hex) == 64
    assert found.short == found.hex[:32]
    assert list(found.components) == ["dtype", "bucket"]
    assert repr(found) == f"Key('{found.hex}')"


def test_equal_components_make_equal_keys():
    first, second = key("trace", ("a", "1"), ("b", "2")), key("trace", ("a", b"1"), ("b", "2"))
    assert first == second
    assert hash(first) == hash(second)
    assert first != first.hex
    assert {first: 1}[second] == 1
    assert key("trace", ("a", bytearray(b"1"))) == key("trace", ("a", memoryview(b"1")))


def test_every_difference_makes_another_key():
    keys = [
        key("trace", ("a", "1"), ("b", "2")),
        key("graph", ("a", "1"), ("b", "2")),
        key("trace", ("b", "2"), ("a", "1")),
        key("trace", ("a", "1"), ("b", "3")),
        key("trace", ("a", "1"), ("c", "2")),
        key("trace", ("a", "1")),
        key("trace", ("a", "12")),
        key("trace", ("a", "1"), ("b", "")),
        key("trace", ("ab", "1")),
        key("trace", ("a", "1"), ("b", "2"), ("c", "")),
    ]
    assert len(set(keys)) == len(keys)


def test_components_are_compared_factor_by_factor():
    first = key("trace", ("dtype", "bfloat16"), ("level", "2"))
    second = key("module", ("level", "1"), ("dtype", "bfloat16"))
    assert first.components["dtype"] == second.components["dtype"]
    assert first.components["level"] != second.components["level"]


def test_a_key_is_no_plain_digest():
    assert key("trace", ("a", b"x")).components["a"] != _core.digest(b"x")


def test_builder_can_be_continued():
    builder = _core.KeyBuilder("trace")
    builder.add("a", "1")
    short = builder.finish()
    builder.add("b", "2")
    assert short == key("trace", ("a", "1"))
    assert builder.finish() == key("trace", ("a", "1"), ("b", "2"))


@pytest.mark.parametrize("name", ["", "A", "a b", ".a", "-", "\u00e9", "a" * 65, "a/b"])
def test_names_have_one_form(name):
    form = "expected 1 to 64 characters of a-z 0-9 . _ -, a letter or digit first"
    with pytest.raises(ValueError, match=form):
        _core.KeyBuilder(name)
    with pytest.raises(ValueError, match=form):
        key("trace", (name, "1"))


def test_misuse_is_refused():
    with pytest.raises(ValueError, match='component "a" is in the key already'):
        key("trace", ("a", "1"), ("a", "1"))
    with pytest.raises(ValueError, match="the key has no components"):
        key("trace")
    with pytest.raises(TypeError):
        key("trace", ("a", 1))


def test_digest_is_plain_blake3():
    # Source: test_vectors.json of the BLAKE3 repository: byte i is i % 251.
    vectors = {
        0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
        1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    }
    for length, digest in vectors.items():
        assert _core.digest(bytes(i % 251 for i in range(length))) == digest
    assert _core.digest(bytearray(1 << 20)) == _core.digest(bytes(1 << 20))
