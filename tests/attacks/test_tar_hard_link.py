"""A hard link in an archive is a second name of a file outside: writing to it changes that."""

from __future__ import annotations

from tests.attacks.scene import neff_is_refused, unpack
from tests.neff.build import block, members, tar


def test_attack(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"precious")
    link = block(b"name", kind=b"1", linkname=b"../secret")
    archive = link + tar(members())
    unpack(archive, tmp_path / "folder")
    assert (tmp_path / "folder" / "name").samefile(secret)
    neff_is_refused(archive, "found a hard link")
