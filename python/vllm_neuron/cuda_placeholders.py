"""Stub libraries in place of the CUDA ones that PyPI's torch links, for an environment without GPU.

PyPI's build of torch does not import without 5 GB of CUDA libraries, and the XLA route's worker
uses none of them. For each one that is missing, a library of the same name, versions and functions
is made by the C compiler; every function returns 100, `cudaErrorNoDevice`, so torch says that
there is no GPU. Never for an environment that should see one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

from vllm_neuron.errors import ConfigurationError

__all__ = ["TOOLS", "make_stubs", "require_tools"]

TOOLS = ("cc", "readelf")
"""What making stubs needs: a C compiler and the ELF reader of binutils."""

# Part of the C library and the compiler's runtime: there on every system.
_SYSTEM = re.compile(r"(lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|util)\.so|ld-linux)")
_NEEDED = re.compile(r"\(NEEDED\).*\[(.*?)\]")

# Functions that are linked without a symbol version are told apart by their names. Sources: the
# API references of the CUDA libraries.
_PREFIXES = {
    "libcublas": "cublas",
    "libcublasLt": "cublasLt",
    "libcudart": "cuda",
    "libcudnn": "cudnn",
    "libcufft": "cufft",
    "libcurand": "curand",
    "libcusparse": "cusparse",
    "libcusparseLt": "cusparseLt",
    "libnccl": "nccl",
    "libcufile": "cuFile",
    "libcupti": "cupti",
    "libnvrtc": "nvrtc",
    "libcuda": "cu",
    "libcusolver": "cusolver",
    "libnvshmem_host": "nvshmem",
}


def require_tools() -> None:
    """Check that stubs can be made here.

    Raises:
        ConfigurationError: a tool is missing; `name` is the tool.
    """
    for tool in TOOLS:
        if shutil.which(tool) is None:
            raise ConfigurationError(
                f"{tool} is not on the PATH, and stubs of the CUDA libraries are made with "
                f"{' and '.join(TOOLS)}. Install a C compiler and binutils, or use --full.",
                name=tool,
                value=None,
            )


def make_stubs(folder: Path) -> list[str]:
    """Make the libraries that those in `folder` need and nobody has, in the same folder.

    Returns:
        Their file names.

    Raises:
        subprocess.CalledProcessError: a tool failed.
    """
    libraries = sorted(folder.glob("*.so*"))
    needed: set[str] = set()
    versions: dict[str, set[str]] = defaultdict(set)
    wanted: dict[str, set[str]] = defaultdict(set)
    unversioned: set[str] = set()
    for library in libraries:
        needed.update(_NEEDED.findall(_readelf("--dynamic", library)))
        for file, version in _needed_versions(_readelf("--version-info", library)):
            versions[file].add(version)
        for symbol in _undefined_symbols(_readelf("--dyn-syms", library)):
            name, _, version = symbol.partition("@")
            if version:
                wanted[version.strip("@")].add(name)
            else:
                unversioned.add(name)
    present = {library.name for library in libraries}
    missing = sorted(name for name in needed - present if not _SYSTEM.match(name))
    for name in missing:
        by_version = {version: wanted[version] for version in versions[name] if version in wanted}
        prefix = _PREFIXES.get(name.partition(".so")[0])
        plain = {symbol for symbol in unversioned if prefix and symbol.startswith(prefix)}
        _compile(folder / name, by_version, plain.difference(*by_version.values()))
    return missing


def _readelf(option: str, library: Path) -> str:
    command = ["readelf", "--wide", option, str(library)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _needed_versions(text: str) -> list[tuple[str, str]]:
    """Library and version name of each version that a library needs of others."""
    found, file = [], None
    for line in text.splitlines():
        if match := re.search(r"File: (\S+)", line):
            file = match[1]
        elif file and "Flags" in line and (match := re.search(r"Name: (\S+)", line)):
            found.append((file, match[1]))
    return found


def _undefined_symbols(text: str) -> list[str]:
    """Names, with `@version`, of the symbols that a library wants of others."""
    rows = [line.split() for line in text.splitlines()]
    return [row[7] for row in rows if len(row) > 7 and row[0].endswith(":") and row[6] == "UND"]


def _compile(path: Path, by_version: dict[str, set[str]], plain: set[str]) -> None:
    names = sorted(plain.union(*by_version.values()))
    source = "".join(f"int {name}(void) {{ return 100; }}\n" for name in names)
    script = "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(symbols))} }};\n"
        for version, symbols in sorted(by_version.items())
    )
    with tempfile.TemporaryDirectory() as folder:
        code, versions = Path(folder, "stub.c"), Path(folder, "stub.map")
        code.write_text(source)
        versions.write_text(script)
        command = ["cc", "-shared", "-fPIC", "-w", "-fno-builtin", str(code), "-o", str(path)]
        command += [f"-Wl,-soname,{path.name}"]
        command += [f"-Wl,--version-script={versions}"] if script else []
        subprocess.run(command, check=True, capture_output=True, text=True)
