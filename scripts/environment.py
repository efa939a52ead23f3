"""Make `.venv` in the root: the locked packages and a release build of the product.

    scripts/environment.py [--wheels DIR]

Needs CPython 3.11 on x86-64 Linux and cargo, nothing else. It does only what is out of date: the
packages are installed anew when a lock file changed, the product when one of its sources did. DIR
holds a CPU build of torch; without one PyPI's build is taken, which needs the CUDA libraries to
import (4 GB with them) but no GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
REQUIREMENTS = ROOT / "requirements"
LOCKS = [REQUIREMENTS / name for name in ("no-deps.txt", "runtime.txt", "dev.txt")]
TORCH_CPU, TORCH_CUDA = REQUIREMENTS / "torch-cpu.txt", REQUIREMENTS / "torch-cuda.txt"

PRODUCT = ("Cargo.lock", "Cargo.toml", "LICENSE", "README.md", "pyproject.toml", "python", "rust")
"""What goes into the wheel, relative to the root."""

UNUSED = (
    "*.so",
    "vllm-rs",
    "vllm_flash_attn/*.so",
    "third_party/deep_gemm",
    "third_party/fmha_sm100",
    "third_party/triton_kernels",
)
"""Parts of the vLLM wheel for GPUs: 750 MB that nothing imports on an out-of-tree platform."""

FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_TARGET", "PIP_USER", "PIP_PREFIX")
"""Variables of the caller's shell that would lead Python or pip away from `.venv`."""


def digest(parts: Iterable[Path], *, also: str) -> str:
    """Return the SHA-256 of some files, of the files below some folders and of a text."""
    state = hashlib.sha256(also.encode())
    for part in parts:
        files = sorted(p for p in part.rglob("*") if p.is_file()) if part.is_dir() else [part]
        for path in files:
            if path.suffix not in (".pyc", ".so"):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                state.update(f"{path.relative_to(ROOT)}\0{content}\n".encode())
    return state.hexdigest()


def child_environment() -> dict[str, str]:
    """Return the caller's environment as the children here need it."""
    variables = {k: v for k, v in os.environ.items() if k not in FOREIGN}
    variables["PATH"] = f"{ENVIRONMENT / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}"
    variables["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    variables["MATURIN_PEP517_ARGS"] = "--locked"
    return variables


def pip_install(*arguments: str) -> None:
    """Run `pip install` in `.venv`; every requirement is installed without its dependencies."""
    python = ENVIRONMENT / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, env=child_environment())


def remove_unused() -> int:
    """Delete the unused parts of vLLM.

    Returns:
        Bytes deleted.
    """
    package = ENVIRONMENT / "lib" / "python3.11" / "site-packages" / "vllm"
    freed = 0
    for pattern in UNUSED:
        for path in package.glob(pattern):
            files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
            freed += sum(p.stat().st_size for p in files)
            if path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path)
    return freed


def install_packages(wheels: Path | None) -> None:
    """Make `.venv` from nothing and install what is locked."""
    venv.EnvBuilder(clear=True, symlinks=True, with_pip=True).create(ENVIRONMENT)
    torch = TORCH_CPU if wheels else TORCH_CUDA
    locked = [word for lock in (torch, *LOCKS) for word in ("--requirement", str(lock))]
    sources = ["--find-links", str(wheels)] if wheels else []
    pip_install("--require-hashes", "--only-binary", ":all:", *sources, *locked)
    print(f"removed {remove_unused() / 1e6:.0f} MB of GPU code from vLLM", flush=True)
    python = ENVIRONMENT / "bin" / "python"
    subprocess.run([python, "-c", "import torch"], check=True, cwd=ROOT, env=child_environment())


def install_product() -> None:
    """Build the wheel in release mode, as a user does, and install it."""
    if shutil.which("cargo") is None:
        sys.exit("cargo is not on the PATH; vllm-neuron's extension needs Rust 1.95 or newer")
    pip_install("--no-build-isolation", "--force-reinstall", ".")


def up_to_date(stamp: Path, wanted: str) -> bool:
    """Tell whether a stamp file holds the wanted digest."""
    return stamp.is_file() and stamp.read_text() == wanted


def main() -> None:
    """Bring `.venv` up to date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheels", type=Path, default=ROOT.parent / "shared" / "wheels")
    wheels = parser.parse_args().wheels.resolve()
    machine = (*sys.version_info[:2], platform.system(), platform.machine())
    if machine != (3, 11, "Linux", "x86_64"):
        sys.exit(
            f"requirements/*.txt are locked for CPython 3.11 on Linux x86_64, this is {machine}"
        )
    found = wheels if list(wheels.glob("torch-2.13.0+cpu-cp311-*x86_64.whl")) else None

    with (ROOT / ".environment.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch = TORCH_CPU if found else TORCH_CUDA
        packages = digest([torch, *LOCKS], also=f"{ENVIRONMENT} {sys.version} {UNUSED}")
        product = digest((ROOT / part for part in PRODUCT), also=packages)
        steps: tuple[tuple[str, str, Callable[[], None]], ...] = (
            ("packages", packages, lambda: install_packages(found)),
            ("product", product, install_product),
        )
        for name, wanted, install in steps:
            stamp = ENVIRONMENT / f".{name}"
            if up_to_date(stamp, wanted):
                continue
            stamp.unlink(missing_ok=True)
            origin = f"torch from {found or 'PyPI, with CUDA libraries'}"
            detail = origin if name == "packages" else "release build"
            print(f".venv: installing {name} ({detail}) ...", flush=True)
            started = time.monotonic()
            try:
                install()
            except subprocess.CalledProcessError as error:
                sys.exit(f".venv: {name} failed: exit code {error.returncode}")
            stamp.write_text(wanted)
            print(f".venv: {name} done in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
