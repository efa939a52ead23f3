"""Resolve `requirements/*.in` into lock files with exact versions and hashes.

    scripts/lock.py [--wheels DIR] [--upgrade]

Writes, beside the `.in` files:

* `no-deps.txt`: packages installed without the dependencies that they declare;
* `runtime.txt`: all else that a server needs, closed under dependencies;
* `dev.txt`: what tests, checks, build and demo need beyond that;
* `cuda.txt`: the CUDA libraries without which PyPI's build of torch does not import. They are
  installed only where no CPU build of torch is at hand.

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
HEADER = "# Written by scripts/lock.py from {source}; CPython 3.11, Linux x86-64.\n"
CUDA = re.compile(r"(nvidia|cuda)-")

Pins = dict[str, tuple[str, set[str]]]


def canonical(name: str) -> str:
    """Return a distribution name in the form of the simple repository API (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(arguments: list[str], *, find_links: Path | None) -> Pins:
    """Let pip resolve requirements for a new environment.

    Args:
        arguments: requirement arguments of `pip install`.
        find_links: folder of wheels that pip prefers to the registry's, if any.

    Returns:
        Version and SHA-256 digests of the chosen wheel, by canonical name.
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
        version = item["metadata"]["version"].partition("+")[0]
        pins[canonical(item["metadata"]["name"])] = (version, {digest})
    return pins


def write(name: str, pins: Pins, *, source: str) -> None:
    """Write one lock file, sorted by name."""
    lines = [HEADER.format(source=source)]
    for package, (version, digests) in sorted(pins.items()):
        hashes = "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(digests))
        lines.append(f"{package}=={version}{hashes}\n")
    (REQUIREMENTS / name).write_text("".join(lines))
    print(f"requirements/{name}: {len(pins)} packages")


def kept_versions(folder: Path) -> list[str]:
    """Return pip arguments that hold what is locked already at its version."""
    constraints = folder / "constraints.txt"
    with constraints.open("w") as out:
        for name in ("no-deps.txt", "runtime.txt", "dev.txt"):
            if (REQUIREMENTS / name).exists():
                text = (REQUIREMENTS / name).read_text()
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
        keep = [] if options.upgrade else kept_versions(Path(folder))
        # The `.in` file pins these exactly; resolved with torch, so that accelerate takes this one.
        bare = resolve(["--no-deps", "-r", no_deps], find_links=wheels)
        torch = f"torch=={bare['torch'][0]}"
        registry = resolve([*keep, torch], find_links=None)
        bare["torch"][1].update(registry["torch"][1])
        served = resolve([*keep, *runtime], find_links=wheels)
        checked = resolve([*keep, *runtime, *dev, torch], find_links=wheels)
    write("no-deps.txt", bare, source="no-deps.in")
    write("runtime.txt", served, source="runtime.in")
    extra = {k: v for k, v in checked.items() if k not in served and k not in bare}
    write("dev.txt", extra, source="dev.in")
    cuda = {k: v for k, v in registry.items() if CUDA.match(k)}
    write("cuda.txt", cuda, source=f"the CUDA dependencies of {torch}")
    moved = sorted(k for k in served if checked[k] != served[k])
    if moved:
        sys.exit(f"dev.in moves versions of runtime.txt: {', '.join(moved)}. Narrow one of them")


if __name__ == "__main__":
    main()
