"""A symbolic link in an archive points out of the folder; a later member is written through it."""

from __future__ import annotations

from tests.attacks.scene import neff_is_refused, unpack
from tests.neff.build import block, members, tar


def test_attack(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    link = block(b"way", kind=b"2", linkname=str(outside).encode())
    through = block(b"way/owned", 5) + b"owned".ljust(512, b"\0")
    archive = link + through + tar(members())
    unpack(archive, tmp_path / "folder")
    assert (outside / "owned").read_bytes() == b"owned"
    neff_is_refused(archive, "found a symbolic link")
