"""Exceptions: one root, parts as attributes, and a way through `pickle` and `copy`."""

from __future__ import annotations

import copy
import pickle

import pytest

from vllm_neuron import _core, errors

CLASSES = [getattr(errors, name) for name in errors.__all__]


def test_every_exception_of_the_module_is_listed():
    defined = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.NeuronError)
    }
    assert set(CLASSES) == defined


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_exceptions_survive_pickling_with_their_parts(cls, protocol):
    details = {"path": "/cache/x", "offset": 2**63, "expected": "ab", "found": None}
    error = cls("/cache/x: length at offset 1: expected ab", **details)
    for other in (pickle.loads(pickle.dumps(error, protocol)), copy.deepcopy(error)):
        assert type(other) is cls
        assert str(other) == str(error)
        assert other.details == details
        assert {name: getattr(other, name) for name in details} == details


def test_an_exception_raised_in_rust_is_one_of_them_and_survives_twice():
    with pytest.raises(errors.NeffFormatError) as caught:
        _core.Neff.parse(b"short", path="/cache/y")
    once = pickle.loads(pickle.dumps(caught.value))
    twice = pickle.loads(pickle.dumps(once))
    assert (str(twice), twice.details) == (str(caught.value), caught.value.details)
    assert twice.path == "/cache/y"
