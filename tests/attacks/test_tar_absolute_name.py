"""A member with an absolute name is written there."""

from __future__ import annotations

from tests.attacks.scene import archive_with, neff_is_refused, unpack


def test_attack(tmp_path):
    target = tmp_path / "owned"
    archive = archive_with(str(target).encode(), b"owned")
    unpack(archive, tmp_path / "folder")
    assert target.read_bytes() == b"owned"
    neff_is_refused(archive, str(target))
