"""A header claims a member of 8 GiB: who allocates first has no memory left."""

from __future__ import annotations

import io
import tarfile

from tests.attacks.scene import neff_is_refused
from tests.neff.build import block


def test_attack():
    archive = block(b"huge", b"77777777777\0")
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        assert opened.next().size == 8**11 - 1
    neff_is_refused(archive, "expected at most 4294967296, found 8589934591")
