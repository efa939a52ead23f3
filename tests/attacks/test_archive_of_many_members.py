"""An archive of more members than anybody has: an index that grows without bound."""

from __future__ import annotations

import io
import tarfile

from tests.attacks.scene import neff_is_refused
from tests.neff.build import block

MEMBERS = 65_537


def test_attack():
    archive = b"".join(block(b"m%d" % number) for number in range(MEMBERS)) + bytes(1024)
    with tarfile.open(fileobj=io.BytesIO(archive[: 512 * 2000] + bytes(1024))) as opened:
        assert len(opened.getmembers()) == 2000
    neff_is_refused(archive, "65536")
