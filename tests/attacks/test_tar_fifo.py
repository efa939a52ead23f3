"""A FIFO in an archive makes whoever reads the unpacked file wait for ever."""

from __future__ import annotations

import stat

from tests.attacks.scene import archive_with, neff_is_refused, unpack


def test_attack(tmp_path):
    archive = archive_with(b"pipe", kind=b"6")
    unpack(archive, tmp_path / "folder")
    assert stat.S_ISFIFO((tmp_path / "folder" / "pipe").stat().st_mode)
    neff_is_refused(archive, "found a FIFO")
