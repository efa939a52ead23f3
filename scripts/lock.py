"""Resolve `requirements/*.in` into lock files with exact versions and hashes.

    scripts/lock.py [--wheels DIR] [--upgrade]

Writes, beside the `.in` files:

* `no-deps.txt`: packages installed without the dependencies that they declare;
* `runtime.txt`: all else that a server needs, closed under dependencies;
* `dev.txt`: what tests, checks, build and demo need beyond that;
* `bench.txt`: what `benches/compare` measures beside ours, for `make bench`;
* `torch-cpu.txt`: a CPU build of torch, from a folder of wheels;
* `torch-cuda.txt`: PyPI's build of torch and the CUDA libraries without which it does not import,
  for where no CPU build is at hand;

and in the package, for `vllm-neuron xla-env create`:

* `xla_environment.txt`: the interpreter of the XLA route's worker, from `requirements/xla.in`.

The locks hold for CPython 3.11 on x86-64 Linux: one wheel a package, with its hash. Versions that
are locked already are kept, except with `--upgrade`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
BENCH_LOCK = REQUIREMENTS / "bench.txt"
XLA_LOCK = ROOT / "python" / "vllm_neuron" / "xla_environment.txt"
HEADER = "# Written by scripts/lock.py from {source}; CPython 3.11, Linux x86-64.\n"
TORCH = "torch==2.13.0"
WITH_CUDA = re.compile(r"torch$|nvidia-|cuda-")

Pins = dict[str, tuple[str, str]]


def canonical(name: str) -> str:
    """Return a distribution name in the form of the simple repository API (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(arguments: list[str], *, find_links: Path | None) -> Pins:
    """Let pip resolve requirements for a new environment.

    Args:
        arguments: requirement arguments of `pip install`.
        find_links: folder of wheels that pip prefers to the registry's, if any.

    Returns:
        Version and SHA-256 digest of the chosen wheel, by canonical name.
    """
    environment = {k: v for k, v in os.environ.items() if k != "PIP_FIND_LINKS"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--only-binary", ":all:", "--report", str(report)]
        if find_links is not None:
            command += ["--find-links", str(find_links)]
        subprocess.run([*command, *arguments], check=True, env=environment)
        chosen = json.loads(report.read_text())["install"]
    pins: Pins = {}
    for item in chosen:
        info = item["download_info"]
        digest = info.get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None:
            path = Path(url2pathname(urlsplit(info["url"]).path))
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        pins[canonical(item["metadata"]["name"])] = (item["metadata"]["version"], digest)
    return pins


def write(path: Path, pins: Pins, *, source: str) -> None:
    """Write one lock file, sorted by name."""
    lines = [HEADER.format(source=source)]
    for package, (version, digest) in sorted(pins.items()):
        lines.append(f"{package}=={version} \\\n    --hash=sha256:{digest}\n")
    path.write_text("".join(lines))
    print(f"{path.relative_to(ROOT)}: {len(pins)} packages")


def kept_versions(folder: Path, *locks: Path) -> list[str]:
    """Return pip arguments that hold what is in these lock files at its version."""
    constraints = folder / f"{locks[0].stem}.constraints"
    with constraints.open("w") as out:
        for lock in locks:
            if lock.exists():
                text = lock.read_text()
                out.writelines(f"{pin}\n" for pin in re.findall(r"^[\w.-]+==[\w.]+", text, re.M))
    return ["--constraint", str(constraints)]


def main() -> None:
    """Write all lock files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheels", type=Path, default=ROOT.parent / "shared" / "wheels")
    parser.add_argument("--upgrade", action="store_true")
    options = parser.parse_args()
    wheels = options.wheels
    if not list(wheels.glob("torch-*.whl")):
        sys.exit(f"{wheels}: no torch wheel; --wheels names a folder with torch's CPU build")
    no_deps = str(REQUIREMENTS / "no-deps.in")
    runtime = ["-r", str(REQUIREMENTS / "runtime.in")]
    dev = ["-r", str(REQUIREMENTS / "dev.in")]
    with tempfile.TemporaryDirectory() as folder:
        kept = [REQUIREMENTS / f"{n}.txt" for n in ("no-deps", "torch-cuda", "runtime", "dev")]
        keep = [] if options.upgrade else kept_versions(Path(folder), *kept)
        keep_xla = [] if options.upgrade else kept_versions(Path(folder), XLA_LOCK)
        keep_bench = [] if options.upgrade else kept_versions(Path(folder), BENCH_LOCK)
        bench = resolve([*keep_bench, "-r", str(REQUIREMENTS / "bench.in")], find_links=None)
        xla = resolve([*keep_xla, "-r", str(REQUIREMENTS / "xla.in")], find_links=None)
        bare = resolve(["--no-deps", "-r", no_deps], find_links=None)
        cpu = resolve(["--no-deps", f"{TORCH}+cpu"], find_links=wheels)
        cuda = resolve([*keep, TORCH], find_links=None)
        served = resolve([*keep, *runtime], find_links=None)
        # With torch, so that accelerate takes this one.
        checked = resolve([*keep, *runtime, *dev, f"{TORCH}+cpu"], find_links=wheels)
    write(REQUIREMENTS / "no-deps.txt", bare, source="no-deps.in")
    write(REQUIREMENTS / "torch-cpu.txt", cpu, source="a CPU build of torch")
    cuda = {k: v for k, v in cuda.items() if WITH_CUDA.match(k)}
    write(REQUIREMENTS / "torch-cuda.txt", cuda, source="PyPI's torch and its CUDA libraries")
    write(REQUIREMENTS / "runtime.txt", served, source="runtime.in")
    write(BENCH_LOCK, bench, source="bench.in")
    write(XLA_LOCK, xla, source="requirements/xla.in")
    extra = {k: v for k, v in checked.items() if k not in {*served, *bare, *cpu}}
    write(REQUIREMENTS / "dev.txt", extra, source="dev.in")
    moved = sorted(k for k in served if checked[k] != served[k])
    if moved:
        sys.exit(f"dev.in moves versions of runtime.txt: {', '.join(moved)}. Narrow one of them")


if __name__ == "__main__":
    main()
