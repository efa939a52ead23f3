"""A member named `../owned` leaves the folder that the archive is unpacked to."""

from __future__ import annotations

from tests.attacks.scene import archive_with, neff_is_refused, unpack


def test_attack(tmp_path):
    archive = archive_with(b"../owned", b"owned")
    unpack(archive, tmp_path / "folder")
    assert (tmp_path / "owned").read_bytes() == b"owned"
    neff_is_refused(archive, "../owned")
