"""`vllm-neuron cache ls`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from vllm_neuron import _core
from vllm_neuron.cli.cache import cache
from vllm_neuron.cli.cache_places import age, size

TRACE = {"model": "Llama", "bucket": "decode 8", "route": "native"}


def key(number: int) -> str:
    return f"{number:02x}" * 32


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the root of two caches with three entries."""
    precompile = _core.Store(str(tmp_path / "neuron" / "precompile"))
    compiled = _core.Store(str(tmp_path / "neuron" / "compile_cache"))
    precompile.put("trace", key(1), {"record": json.dumps(TRACE).encode(), "module": bytes(9000)})
    factors = {"model": "ignored", "bucket": "prefill 64"}
    record = {"model": {"name": "evil\x1b[31m\n"}}
    sections = {"factors": json.dumps(factors).encode(), "record": json.dumps(record).encode()}
    compiled.put("neff", key(2), {**sections, "neff": bytes(3_000_000)})
    compiled.put("lowering", key(3), {"record": b"[" * 100_000})
    return tmp_path


def run(*arguments: str, environment: dict[str, str] | None = None) -> tuple[str, str]:
    """Return what the command printed on standard output and error."""
    result = CliRunner().invoke(cache, ["ls", *arguments], env=environment)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_table_shows_every_entry(root):
    output, errors = run("--root", str(root))
    header, *rows, total = output.splitlines()
    assert header.split() == ["KIND", "KEY", "SIZE", "AGE", "USED", "MODEL", "BUCKET", "ROUTE"]
    cells = {row.split()[0]: row for row in rows}
    assert cells["trace"].split()[1] == key(1)[:32]
    assert cells["trace"].split(maxsplit=8)[2:4] == ["20.0", "KiB"]
    assert cells["trace"].split(maxsplit=8)[8] == f"{'Llama':<28}  decode 8    native"
    assert "2.9 MiB" in cells["neff"]
    assert r'{"name": "evil\u001b[31m\n"}  prefill 64  -' in cells["neff"]
    assert cells["lowering"].split()[-3:] == ["-", "-", "-"]
    assert total == "3 entries, 3.0 MiB"
    assert errors == ""
    assert "\x1b" not in output


def test_json_has_every_field(root):
    output, _ = run("--json", "--root", str(root))
    rows = {row["kind"]: row for row in json.loads(output)}
    trace = rows["trace"]
    path = root / "neuron" / "precompile" / "v1" / "01" / key(1)
    assert trace == {
        "kind": "trace",
        "key": key(1),
        "path": str(path),
        "size_bytes": path.stat().st_size,
        "modified_s": pytest.approx(path.stat().st_mtime),
        "last_used_s": pytest.approx(path.stat().st_mtime, abs=5),
        "sections": {"record": len(json.dumps(TRACE)), "module": 9000},
        **TRACE,
    }
    neff = rows["neff"]
    assert (neff["bucket"], neff["route"]) == ("prefill 64", None)
    assert neff["model"] == {"name": "evil\x1b[31m\n"}


def test_root_is_the_servers(root):
    with_variable, _ = run("--json", environment={"VLLM_CACHE_ROOT": str(root)})
    assert len(json.loads(with_variable)) == 3
    environment = {"VLLM_CACHE_ROOT": None, "XDG_CACHE_HOME": None, "HOME": str(root / "home")}
    (root / "home" / ".cache").mkdir(parents=True)
    (root / "home" / ".cache" / "vllm").mkdir()
    (root / "neuron").rename(root / "home" / ".cache" / "vllm" / "neuron")
    by_default, _ = run("--json", environment=environment)
    assert len(json.loads(by_default)) == 3


def test_empty_and_missing_caches_are_listed(tmp_path):
    output, errors = run("--root", str(tmp_path / "missing"))
    assert output.splitlines() == [
        "KIND  KEY  SIZE  AGE  USED  MODEL  BUCKET  ROUTE",
        "0 entries, 0 B",
    ]
    assert errors == ""
    assert json.loads(run("--json", "--root", str(tmp_path))[0]) == []
    assert list(tmp_path.iterdir()) == []


def test_unsound_files_are_named_on_standard_error(root):
    path = root / "neuron" / "compile_cache" / "v1" / "02" / key(2)
    path.chmod(0o600)
    path.write_bytes(b"damaged")
    output, errors = run("--root", str(root))
    assert output.splitlines()[-1].startswith("2 entries, ")
    text = "length of the file at offset 0: expected at least 4096, found 7"
    assert errors == f"{path}: {text}\n"


def test_directory_of_others_is_named_on_standard_error(root):
    (root / "neuron" / "precompile").chmod(0o777)
    output, errors = run("--root", str(root))
    assert output.splitlines()[-1].startswith("2 entries, ")
    assert "the cache directory is writable by group or others (mode 0777)" in errors


def test_bad_variable_is_a_plain_error():
    result = CliRunner().invoke(cache, ["ls"], env={"TORCH_CACHING_PRECOMPILE": "perhaps"})
    assert result.exit_code == 1
    assert "TORCH_CACHING_PRECOMPILE" in result.stderr


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1 << 20, "1.0 MiB"),
        (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB"), (9 << 50, "9216.0 TiB"),
    ],
)  # fmt: skip
def test_sizes_have_units(size_bytes, text):
    assert size(size_bytes) == text


@pytest.mark.parametrize(
    ("age_s", "text"),
    [(-5, "0 s"), (0, "0 s"), (59.9, "59 s"), (60, "1 min"), (7200, "2 h"), (200_000, "2 d")],
)
def test_ages_have_units(age_s, text):
    assert age(age_s) == text


def test_command_imports_nothing_heavy(root):
    code = (
        "import sys; from vllm_neuron.cli.cache import cache;"
        f"cache(['ls', '--root', {str(root)!r}], standalone_mode=False);"
        "heavy = {'torch', 'vllm', 'jax', 'jaxlib', 'numpy', 'rich'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    start_s = time.monotonic()
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert child.stdout.splitlines()[-1] == "3 entries, 3.0 MiB"
    assert time.monotonic() - start_s < 30
