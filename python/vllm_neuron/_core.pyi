"""Types of the Rust extension module. Each part is written beside its Rust source."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, final

from typing_extensions import Buffer

__all__ = [
    "HOST_KERNELS_VERSION",
    "CanonicalConstant",
    "CanonicalGraph",
    "CanonicalNode",
    "CanonicalTensor",
    "Entry",
    "EntryInfo",
    "EvictedEntry",
    "Eviction",
    "Key",
    "KeyBuilder",
    "KeyLock",
    "NamedObject",
    "Neff",
    "NeffTensor",
    "NodeReference",
    "NrtLibrary",
    "NrtModel",
    "NrtTensor",
    "NrtTensorSet",
    "Store",
    "StoreProblem",
    "__version__",
    "decode_graph",
    "digest",
    "graph_bytes",
    "graph_digest",
    "host_kernels",
    "nrt_layout",
    "nrt_status",
    "write_neff",
]

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
    def parse(
        data: Buffer,
        *,
        path: str | None = None,
        verify_hash: bool = True,
        index: Buffer | None = None,
    ) -> Neff:
        """Parse and validate the bytes of a NEFF, without the GIL.

        A read-only buffer is used in place and must not change afterwards; a writable one is
        copied.

        Args:
            data: the whole file; any contiguous buffer.
            path: where the bytes are from, for messages.
            verify_hash: whether to compare the payload with the digest in the header.
            index: what `Neff.index` gave for the same bytes, kept as safe as they are: the archive
                is then not read again. An index of other bytes or of another version is not used.

        Raises:
            NeffFormatError: a rule of the format is broken (docs/neff-format.md, "Checks").
            NeffChecksumError: the digest is not that of the payload.
            NeffUnsupportedError: a version or feature that is not known.
        """

    def index(self) -> bytes:
        """Return what parsing found out, to be kept beside the bytes and given to `parse`."""
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
        compression: `none` makes reading members cheap, `gzip` makes the file small.

    Raises:
        ConfigurationError: an argument cannot be written. Attributes: `name`, `value`.
    """

# ---- Keys: rust/py/src/key.rs, rust/py/src/graph.rs (docs/key-format.md) -----------------------

@final
class Key:
    """A finished key. Equal and hashed by its digest."""

    @property
    def hex(self) -> str:
        """The key, 64 hex digits."""
    @property
    def short(self) -> str:
        """The first 32 hex digits, for people."""
    @property
    def components(self) -> dict[str, str]:
        """Digest (hex) of each component by its name, in the order they were added."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class KeyBuilder:
    """Collects the named components of a key, in order; the order is part of the key."""

    def __new__(cls, domain: str) -> Self:
        """Make a builder whose keys are unrelated to those of every other domain.

        Raises:
            ValueError: `domain` is not 1 to 64 characters of a-z 0-9 . _ -.
        """
    def add(self, name: str, value: Buffer | str) -> None:
        """Add a component; a str counts as its UTF-8 bytes.

        Raises:
            ValueError: the name is in the key already or not 1 to 64 characters of a-z 0-9 . _ -.
        """
    def finish(self) -> Key:
        """Return the key of the components added so far.

        Raises:
            ValueError: there are none.
        """

def digest(data: Buffer) -> str:
    """Return the BLAKE3-256 of a buffer as 64 hex digits. Large buffers: without the GIL."""

def graph_bytes(graph_module: Any) -> bytes:
    """Return the canonical bytes of a `torch.fx.GraphModule` of ATen operators.

    They do not depend on names, metadata, source locations, device indices or the hash seed.

    Raises:
        GraphKeyError: something in the graph has no canonical form, such as a symbolic size.
            Attributes: `node`, `type_name`, `reason`.
        TypeError: `graph_module` is no GraphModule.
    """

def graph_digest(graph_module: Any) -> str:
    """Return the BLAKE3-256 of `graph_bytes(graph_module)` as 64 hex digits. Raises as that."""

# ---- Decoded graphs: rust/py/src/canonical_graph.rs (docs/key-format.md, "Decoding") ------------

@final
class NodeReference:
    """The result of an earlier node of the same graph, as an argument."""

    @property
    def index(self) -> int: ...

@final
class NamedObject:
    """An object of torch, or a function, by its name."""

    @property
    def kind(
        self,
    ) -> Literal[
        "dtype",
        "layout",
        "memory_format",
        "device",
        "operator",
        "higher_order_operator",
        "function",
    ]: ...
    @property
    def name(self) -> str: ...
    @property
    def overload(self) -> str | None:
        """Of an operator its overload; else None."""

@final
class CanonicalTensor:
    """Shape and type of a tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def device_type(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]:
        """In elements."""

@final
class CanonicalConstant:
    """A constant tensor, whose content is known by its digest."""

    @property
    def tensor(self) -> CanonicalTensor: ...
    @property
    def storage(self) -> int:
        """Constants with the same number share memory."""
    @property
    def storage_offset(self) -> int:
        """In elements."""
    @property
    def digest(self) -> str: ...

@final
class CanonicalNode:
    """One node of a decoded graph."""

    @property
    def op(self) -> Literal["placeholder", "get_attr", "call_function", "output"]: ...
    @property
    def offset(self) -> int:
        """Where the node starts in the bytes."""
    @property
    def target(self) -> Any:
        """Of a call a NamedObject, of get_attr a CanonicalConstant or CanonicalGraph.

        Of a placeholder a CanonicalTensor or a scalar; None in a nested graph. A constant or
        graph that is used again is the same object.
        """
    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...

@final
class CanonicalGraph:
    """The nodes of one decoded graph; the last one is the output."""

    @property
    def nodes(self) -> tuple[CanonicalNode, ...]: ...

def decode_graph(data: Buffer) -> CanonicalGraph:
    """Read canonical graph bytes; torch is not needed, memory is a small multiple of the length.

    Raises:
        GraphFormatError: a byte is not as docs/key-format.md says. Attributes: `offset`,
            `expected`, `found`.
    """

# ---- Entry store: rust/py/src/store.rs (docs/entry-format.md) ----------------------------------

_Kind = Literal["trace", "lowering", "neff"]

@final
class StoreProblem:
    """Something that went wrong without stopping anything."""

    @property
    def path(self) -> str | None: ...
    @property
    def reason(self) -> str:
        """The whole text for a log line."""
    @property
    def error(self) -> Exception:
        """StoreCorruptError, StoreUntrustedError, StoreReadOnlyError, StoreError or OSError."""

@final
class EntryInfo:
    """What a listing tells of one entry."""

    @property
    def key(self) -> str: ...
    @property
    def kind(self) -> _Kind: ...
    @property
    def path(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def modified_s(self) -> float:
        """When it was published, Unix time in seconds."""
    @property
    def last_used_s(self) -> float:
        """When it was last used, to within an hour, Unix time in seconds."""
    @property
    def sections(self) -> dict[str, int]:
        """Length in bytes of each section by its name, in file order."""

@final
class Entry:
    """One entry, held: its bytes stay as they are even when the file is removed."""

    @property
    def key(self) -> str: ...
    @property
    def kind(self) -> _Kind: ...
    @property
    def path(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def sections(self) -> dict[str, int]:
        """Length in bytes of each section by its name, in file order."""
    def section(self, name: str) -> memoryview:
        """Return the content of a section: read-only, without a copy, valid beyond the entry.

        Raises:
            KeyError: there is no section of that name.
            StoreCorruptError: its checksum fails; only for a section that `get` was told not to
                verify.
        """

@final
class EvictedEntry:
    """An entry that was removed."""

    @property
    def key(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def last_used_s(self) -> float:
        """Unix time in seconds."""

@final
class Eviction:
    """What an eviction did, or would do."""

    @property
    def removed(self) -> list[EvictedEntry]: ...
    @property
    def removed_bytes(self) -> int: ...
    @property
    def kept(self) -> int:
        """How many entries stay."""
    @property
    def kept_bytes(self) -> int: ...

@final
class KeyLock:
    """The single-flight lock of one key; freed by the kernel when its process dies.

    For one thread at a time. A forked child does not hold it.
    """

    def acquire(self, timeout_s: float | None = None) -> bool:
        """Wait for the lock, without the GIL, open to Ctrl-C; None waits without end.

        Returns:
            False if `timeout_s` passed first; doing the work all the same is safe.

        Raises:
            StoreReadOnlyError: the directory takes no writes, so there is nothing to wait for.
            StoreUntrustedError: somebody else can write to the directory.
            OSError: the system refused something else.
        """
    def holder(self) -> dict[str, Any] | None:
        """Return who holds the lock, for a log line: pid, host, boot_id, time_s (Unix), note.

        What a holder wrote that was killed is returned too.
        """
    @property
    def held(self) -> bool:
        """Whether this process holds the lock through this object."""
    def release(self) -> None:
        """Free the lock. Without effect if it is not held."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class Store:
    """A directory of entries, used by any number of processes and threads."""

    def __new__(cls, root: str, *, mac_key: Buffer | None = None) -> Self:
        """Name a store; the directory is made (mode 0700) by the first publication.

        Args:
            root: the directory; made absolute now.
            mac_key: 32 secret bytes. What is published is signed with them, and what is not signed
                with them is a miss; every look-up then reads all sections.
        """
    @property
    def root(self) -> str: ...
    def get(self, kind: _Kind, key: str, *, verify: Sequence[str] | None = None) -> Entry | None:
        """Return the entry of a key, or None.

        What cannot be used is None too, counted and described in `take_problems`; a file that
        breaks the format is set aside. Takes no lock and writes nothing else but the time of the
        last use. What somebody in this process still holds is given again without a system call.

        Args:
            kind: what is expected there.
            key: 64 hex digits.
            verify: names of the sections whose checksums are compared now, the others when they
                are first asked for; None compares all now.

        Raises:
            ValueError: no such kind, or not a key.
        """
    def put(self, kind: _Kind, key: str, sections: Mapping[str, Buffer]) -> bool:
        """Publish an entry: complete and durable when this returns.

        Args:
            kind: what the entry holds.
            key: 64 hex digits.
            sections: content by name (1 to 16 printable ASCII characters), 1 to 64 of them, in
                file order. A writable buffer is copied first.

        Returns:
            False if a sound entry of the key was there already; it stays.

        Raises:
            StoreReadOnlyError: the directory takes no writes.
            StoreUntrustedError: somebody else can write to the directory.
            StoreError: the key finds a sound entry of another kind.
            OSError: the system refused something else, such as ENOSPC.
            ValueError: no such kind, not a key, or sections that cannot be stored.
        """
    def remove(self, kind: _Kind, key: str) -> bool:
        """Take an entry away that is sound but of no use, so that a better one can replace it.

        Returns:
            False if there is none.

        Raises:
            StoreReadOnlyError, StoreUntrustedError, StoreError, OSError, ValueError: as `put`.
        """
    def lock(self, key: str, *, note: str = "") -> KeyLock:
        """Return the single-flight lock of a key, not taken yet.

        Args:
            key: 64 hex digits.
            note: says to those who wait what is being done.
        """
    def entries(self) -> list[EntryInfo]:
        """List the entries by their headers, in no order. Unfit files go to `take_problems`."""
    def evict(
        self,
        *,
        max_size_bytes: int | None = None,
        max_age_s: float | None = None,
        min_age_s: float = 60.0,
        dry_run: bool = False,
    ) -> Eviction:
        """Remove the entries that were used longest ago until the rest keeps the limits.

        Takes linear time, no lock, and may run beside readers, writers and other evictions. Who
        holds an entry keeps it. What cannot be removed goes to `take_problems`.

        Args:
            max_size_bytes: most bytes that all entries together may have.
            max_age_s: longest time since the last use.
            min_age_s: entries used within this time stay, whatever the limits are.
            dry_run: only tell what would be removed.

        Raises:
            StoreReadOnlyError: the directory takes no writes.
            StoreUntrustedError: somebody else can write to the directory.
            OSError: the system refused something else.
            ValueError: a negative time.
        """
    def take_problems(self) -> list[StoreProblem]:
        """Return what went wrong since the last call."""
    def counters(self) -> dict[str, int]:
        """Return how often things happened through this object.

        `hits` and `misses` are all look-ups; `corrupt`, `untrusted`, `other_kind` and `errors` are
        misses with a reason; `set_aside`, `published`, `existed` and `evicted` count
        files.
        """

# ---- Kernels of the host emulator: rust/py/src/host.rs (docs/host-emulator.md) -------------------

HOST_KERNELS_VERSION: int

def host_kernels() -> dict[str, object]:
    """Return the handler of each custom call by name, as capsules for jaxlib."""

# ---- Neuron runtime: rust/py/src/nrt.rs -------------------------------------------------------

def nrt_status(value: int) -> tuple[str, str] | None:
    """Name and meaning of an NRT_STATUS, None for one that is not known."""

def nrt_layout() -> dict[str, int]:
    """Sizes (`nrt_version_t`) and offsets (`nrt_version_t.rt_detail`) of the C structs."""

@final
class NrtLibrary:
    """The runtime library of this process; every failing call raises ExecutionError."""

    @staticmethod
    def open(path: str | None = None) -> NrtLibrary:
        """Load it; the first one that is loaded stays for the life of the process."""
    @property
    def path(self) -> Any: ...
    def version(self) -> tuple[list[int], str]: ...
    def init(self) -> None:
        """Initialise the runtime once per process."""
    def close(self) -> None:
        """Give the cores back; nothing can be called afterwards."""
    def total_cores(self) -> int: ...
    def visible_cores(self) -> int: ...
    def instance(self) -> tuple[int, int, str] | None:
        """Family, size and architecture name."""
    def memory(self, core: int) -> tuple[int, int] | None:
        """Bytes used and bytes there are on a logical core."""
    def allocate(
        self, size: int, *, core: int = 0, name: str = "", on_host: bool = False
    ) -> NrtTensor: ...
    def tensor_set(self) -> NrtTensorSet: ...
    def load(self, neff: Buffer, *, core: int = 0, rank: tuple[int, int] | None = None) -> NrtModel:
        """Load a NEFF; `rank` is the part of a model with collectives, and how many there are."""

@final
class NrtTensor:
    """Memory of the runtime, given back when it is destroyed."""

    @property
    def size(self) -> int: ...
    def address(self) -> int: ...
    def slice(self, offset: int, size: int, *, name: str = "") -> NrtTensor: ...
    def clear(self) -> None: ...
    def write(self, source: Buffer, *, offset: int = 0) -> None: ...
    def read(self, target: Buffer, *, offset: int = 0) -> None: ...

@final
class NrtTensorSet:
    """Tensors by name; keeps them alive."""

    def add(self, name: str, tensor: NrtTensor) -> None: ...

@final
class NrtModel:
    """A loaded NEFF, unloaded when it is destroyed."""

    def tensors(self) -> list[tuple[str, bool, int]] | None:
        """Name, whether it is an output, and bytes of each tensor."""
    def execute(self, inputs: NrtTensorSet, outputs: NrtTensorSet) -> None: ...
