"""A sound entry of one kind is asked for as another one."""

from __future__ import annotations

from tests.attacks.scene import filled
from tests.store.places import key_of


def test_attack(tmp_path):
    store = filled(tmp_path / "store")
    assert store.get("trace", key_of(1)) is None
    (problem,) = store.take_problems()
    assert "expected an entry of kind trace, found one of kind neff" in problem.reason
