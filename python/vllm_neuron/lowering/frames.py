"""Length-prefixed messages between the lowering process and its parent: a JSON tree and bytes."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

__all__ = ["read_frame", "write_frame"]

# Byte lengths of the JSON text and of the bytes behind it, little-endian.
_PREFIX = struct.Struct("<IQ")


def write_frame(stream: BinaryIO, header: dict[str, Any], blob: bytes = b"") -> None:
    """Write one message and flush."""
    text = json.dumps(header, separators=(",", ":")).encode()
    stream.write(_PREFIX.pack(len(text), len(blob)))
    stream.write(text)
    stream.write(blob)
    stream.flush()


def read_frame(stream: BinaryIO) -> tuple[dict[str, Any], bytes]:
    """Read one message.

    Raises:
        EOFError: the other side has closed the stream or died.
    """
    text_size, blob_size = _PREFIX.unpack(_exactly(stream, _PREFIX.size))
    return json.loads(_exactly(stream, text_size)), _exactly(stream, blob_size)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError(f"expected {size} bytes, found {len(data)}")
    return data
