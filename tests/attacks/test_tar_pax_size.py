"""A PAX record gives another size than the header: two readers see different members."""

from __future__ import annotations

import io
import tarfile

from tests.attacks.scene import neff_is_refused
from tests.neff.build import block, members, tar


def test_attack():
    record = b"12 size=512\n"
    header = block(b"pax", len(record), kind=b"x") + record.ljust(512, b"\0")
    hidden = block(b"hidden", 0)
    archive = header + block(b"cover", 0) + hidden + tar(members())
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        names = opened.getnames()
    # Python's reader takes the hidden header for content; one that ignores PAX sees it.
    assert ("cover" in names, "hidden" in names) == (True, False)
    neff_is_refused(archive, "size")
