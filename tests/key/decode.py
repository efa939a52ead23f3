"""Reads graph bytes by the tables of docs/key-format.md, written without a look at the Rust code.

It proves that the form is complete (nothing is left over, everything has a place) and that the
document is true.
"""

from __future__ import annotations

import struct
from typing import Any


class Reader:
    """A cursor over graph bytes, version 1."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        taken = self.data[self.at : self.at + count]
        assert len(taken) == count, f"truncated at {self.at}"
        self.at += count
        return taken

    def unpack(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def u32(self) -> int:
        return self.unpack("<I")

    def text(self) -> str:
        return self.take(self.u32()).decode()

    def named(self) -> dict[str, Any]:
        items = [(self.text(), self.argument()) for _ in range(self.u32())]
        assert items == sorted(items, key=lambda item: item[0].encode())
        return dict(items)

    def argument(self) -> Any:
        tag = self.unpack("B")
        match tag:
            case 0x10:
                return None
            case 0x11 | 0x12:
                return tag == 0x12
            case 0x13:
                return self.unpack("<q")
            case 0x14:
                return int.from_bytes(self.take(self.u32()), "little", signed=True)
            case 0x15:
                return self.unpack("<d")
            case 0x16:
                return complex(self.unpack("<d"), self.unpack("<d"))
            case 0x17:
                return self.text()
            case 0x18:
                return self.take(self.u32())
            case 0x19:
                return ("node", self.u32())
            case 0x1A:
                return [self.argument() for _ in range(self.u32())]
            case 0x1B:
                return tuple(self.argument() for _ in range(self.u32()))
            case 0x1C:
                return self.named()
            case 0x1D:
                return slice(self.argument(), self.argument(), self.argument())
            case 0x1E:
                return ...
            case 0x20:
                return ("dtype", self.text())
            case 0x21:
                return ("layout", self.text())
            case 0x22:
                return ("memory format", self.text())
            case 0x23:
                return ("device", self.text())
            case 0x24:
                return ("operator", self.text(), self.text())
            case 0x25:
                return ("higher-order operator", self.text())
            case 0x26:
                return ("function", self.text())
        raise AssertionError(f"tag {tag:#x} before {self.at}")

    def spec(self) -> tuple[Any, ...]:
        dtype, device, layout, rank = self.text(), self.text(), self.text(), self.u32()
        shape = tuple(self.unpack("<q") for _ in range(rank))
        return (dtype, device, layout, shape, tuple(self.unpack("<q") for _ in range(rank)))

    def constant(self) -> tuple[Any, ...]:
        match self.unpack("B"):
            case 0x30:
                return (
                    "constant",
                    *self.spec(),
                    self.u32(),
                    self.unpack("<q"),
                    self.take(32).hex(),
                )
            case 0x31:
                return ("constant again", self.u32())
            case 0x32:
                return ("graph", self.graph(nested=True))
            case 0x33:
                return ("graph again", self.u32())
            case tag:
                raise AssertionError(f"tag {tag:#x} before {self.at}")

    def node(self, *, nested: bool) -> tuple[Any, ...]:
        match self.unpack("B"):
            case 0x01 if nested:
                return ("placeholder",)
            case 0x01:
                if self.data[self.at] != 0x40:
                    return ("placeholder", self.argument())
                self.at += 1
                return ("placeholder", self.spec())
            case 0x02:
                return ("get_attr", self.constant())
            case 0x03:
                target = self.argument()
                arguments = tuple(self.argument() for _ in range(self.u32()))
                return ("call_function", target, arguments, self.named())
            case 0x04:
                return ("output", self.argument())
            case tag:
                raise AssertionError(f"tag {tag:#x} before {self.at}")

    def graph(self, *, nested: bool = False) -> list[tuple[Any, ...]]:
        return [self.node(nested=nested) for _ in range(self.u32())]


def decode(data: bytes) -> list[tuple[Any, ...]]:
    """Return the nodes of a graph; raises AssertionError unless every byte has its place."""
    reader = Reader(data)
    assert reader.take(8) == b"VNGRAPH\0"
    assert reader.u32() == 1
    nodes = reader.graph()
    assert reader.at == len(data)
    return nodes
