"""Types of the Rust extension module. Each part is written beside its Rust source."""

from collections.abc import Buffer, Sequence
from typing import Any, Literal, final

__version__: str

# ---- NEFF containers: rust/py/src/neff.rs -----------------------------------------------------

@final
class NeffTensor:
    """One input or output of a NEFF."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Neff:
    """A validated NEFF. It keeps a hold of the buffer that it was parsed from."""

    @staticmethod
    def parse(data: Buffer, *, path: str | None = None, verify_hash: bool = True) -> Neff:
        """Parse and validate the bytes of a NEFF, without the GIL.

        A read-only buffer is used in place and must not change afterwards; a writable one is
        copied.

        Args:
            data: the whole file; any contiguous buffer.
            path: where the bytes are from, for messages.
            verify_hash: whether to compare the payload with the digest in the header.

        Raises:
            NeffFormatError: a rule of the format is broken (docs/neff-format.md, "Checks").
            NeffChecksumError: the digest is not that of the payload.
            NeffUnsupportedError: a version or feature that is not known.
        """

    @property
    def path(self) -> str | None: ...
    @property
    def package_version(self) -> int:
        """1 (SHA-256) or 2 (MD5)."""
    @property
    def neff_version(self) -> tuple[int, int]: ...
    @property
    def name(self) -> str: ...
    @property
    def uuid(self) -> str: ...
    @property
    def feature_bits(self) -> int: ...
    @property
    def lnc_size(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def data_size(self) -> int:
        """Bytes of the payload."""
    @property
    def digest_order(self) -> Literal["standard", "word-swapped"] | None:
        """Order of the digest's bytes; None if it was not verified."""
    @property
    def compression(self) -> Literal["gzip", "none"]: ...
    @property
    def target(self) -> str:
        """Architecture that the code is for; empty if the file names none."""
    @property
    def compiler_version(self) -> str:
        """Version of the compiler; empty if the file names none."""
    @property
    def inputs(self) -> list[NeffTensor]: ...
    @property
    def outputs(self) -> list[NeffTensor]:
        """Outputs, each name once."""
    @property
    def members(self) -> list[tuple[str, int]]:
        """Names and sizes in bytes of the archive's files, in its order."""
    @property
    def warnings(self) -> list[str]:
        """What is allowed but unlike every known NEFF."""
    def member(self, name: str) -> bytes:
        """Return the content of one file of the archive.

        Of a compressed archive everything before the file is inflated again.

        Raises:
            NeffFormatError: there is no file of that name.
        """
    def to_dict(self) -> dict[str, Any]:
        """Return everything above as plain JSON-able values."""

def write_neff(
    *,
    name: str,
    target: str,
    compiler_version: str,
    inputs: Sequence[tuple[str, str, Sequence[int]]],
    outputs: Sequence[tuple[str, str, Sequence[int]]],
    members: Sequence[tuple[str, Buffer]] = (),
    compression: Literal["gzip", "none"] = "gzip",
) -> bytes:
    """Write a NEFF without device code for one core (docs/neff-format.md, "Writer").

    Equal arguments give equal bytes. Tensors are (name, dtype, shape); names are unique over
    inputs and outputs.

    Args:
        name: name of the NEFF, at most 255 bytes.
        target: a name that no device has.
        compiler_version: what `info.json` says.
        inputs: input tensors.
        outputs: output tensors; at least one.
        members: more files for the archive, by relative path.
        compression: `none` makes reading members cheap, `gzip` makes the file small. An archive
            that compresses further than the reader's inflate ratio allows is stored plain.

    Raises:
        ConfigurationError: an argument cannot be written. Attributes: `name`, `value`.
    """
