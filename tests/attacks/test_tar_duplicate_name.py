"""Two members of one name: who checks the first one unpacks the second one."""

from __future__ import annotations

import io
import tarfile

from tests.attacks.scene import archive_with, neff_is_refused, unpack


def test_attack(tmp_path):
    archive = archive_with(b"info.json", b"{}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        first = next(member for member in opened if member.name == "info.json")
        assert opened.extractfile(first).read() == b"{}"
    unpack(archive, tmp_path / "folder")
    assert (tmp_path / "folder" / "info.json").read_bytes() != b"{}"
    neff_is_refused(archive, "info.json")
