"""`vllm-neuron cache`: show, why, path, verify, promote, export, import, clear."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from vllm_neuron import _core
from vllm_neuron.cache import keys
from vllm_neuron.cache.explain import Miss
from vllm_neuron.cache.start_report import report_path, write_report
from vllm_neuron.cli.cache import cache


def run(*arguments: str, code: int = 0, environment: dict[str, str] | None = None) -> Result:
    result = CliRunner().invoke(cache, list(arguments), env=environment)
    assert result.exit_code == code, result.output
    return result


def key(number: int) -> str:
    return f"{number:02x}" * 32


NEFF = _core.write_neff(
    name="n",
    target="host",
    compiler_version="1",
    inputs=[("input0", "float32", (1,))],
    outputs=[("output0", "float32", (1,))],
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    record = json.dumps({"model": "Llama", "bucket": "decode_b8", "route": "native"}).encode()
    factors = json.dumps({"level": 2, "graph": "ab"}).encode()
    precompile = _core.Store(str(root / "neuron" / "precompile"))
    compiled = _core.Store(str(root / "neuron" / "compile_cache"))
    precompile.put("trace", key(1), {"record": record, "factors": factors, "module": b"ML\xefR1"})
    compiled.put("neff", key(2), {"record": record, "factors": factors, "neff": NEFF})
    compiled.put("lowering", key(0x21), {"record": record, "module": b"hlo"})
    return root


def keys_in(*directories: Path) -> list[str]:
    return sorted(info.key[:2] for d in directories for info in _core.Store(str(d)).entries())


def test_show_by_the_first_digits(root, tmp_path):
    output = run("show", "0202", "--root", str(root)).output
    lines = dict(line.split(maxsplit=1) for line in output.splitlines() if ":" in line[:9])
    assert lines["kind:"] == "neff"
    assert lines["key:"] == key(2)
    assert lines["bucket:"] == "decode_b8"
    assert "factor    level: 2" in output.splitlines()
    shown = json.loads(run("show", key(2), "--json", "--root", str(root)).output)
    assert shown["factors"] == {"graph": "ab", "level": 2}
    assert shown["record"]["model"] == "Llama"
    for digits, folder in (("01", "trace"), ("02", "neff"), ("2121", "lowering")):
        run("show", digits, "--unpack", str(tmp_path / folder), "--root", str(root))
    assert (tmp_path / "neff" / f"graph_{key(2)[:32]}.neff").read_bytes() == NEFF
    assert (tmp_path / "trace" / "module.mlir").read_bytes() == b"ML\xefR1"
    assert (tmp_path / "lowering" / "graph.hlo").read_bytes() == b"hlo"
    assert json.loads((tmp_path / "neff" / "factors.json").read_bytes()) == shown["factors"]


def test_show_of_no_or_several_entries(root):
    assert "no entry 77" in run("show", "77", "--root", str(root), code=1).output
    _core.Store(str(root / "neuron/compile_cache")).put("neff", "01" + "0" * 62, {"neff": NEFF})
    assert (
        "01 is the beginning of several keys: "
        in run("show", "01", "--root", str(root), code=1).output
    )


def test_diff_compares_two_keys_factor_by_factor(root):
    store = _core.Store(str(root / "neuron" / "compile_cache"))
    factors = {"graph": "ab", "level": 1, "evil\x1b[31m": 1}
    store.put("neff", key(3), {"factors": json.dumps(factors).encode(), "neff": NEFF})
    store.put("neff", key(4), {"neff": NEFF})
    expected = [r"evil\x1b[31m was null, is 1", "level was 2, is 1"]
    assert run("diff", "02", "03", "--root", str(root)).output.splitlines() == expected
    as_json = run("diff", "03", "02", "--json", "--root", str(root)).output
    assert json.loads(as_json)[1] == "level was 1, is 2"
    assert run("diff", "02", key(2), "--root", str(root)).output == "no factor differs\n"
    for other, problem in (
        ("77", "no entry 77"),
        ("01", "02 is of kind neff, 01 of kind trace"),
        ("04", f"the entry {key(4)[:32]} has no factors"),
    ):
        assert problem in run("diff", "02", other, "--root", str(root), code=1).output


def test_why_explains_the_last_start(root):
    nothing = run("why", "--root", str(root), code=1).output
    assert f"no start has left a report at {root}/neuron/last_start.json" in nothing
    miss = Miss(keys.key_of("trace", {"a": 1}), ("level was 2, is 1", "evil\x1b[31m was 1, is 2"))
    write_report(
        report_path(root),
        description={"model": "Llama"},
        counters={"graphs": 3},
        misses={"trace": {"decode_b8": miss}, "neff": {}},
        error="CompileError: out of memory",
    )
    lines = run("why", "--root", str(root)).output.splitlines()
    assert lines == [
        "The last start (Llama, 0 s ago): 3 graphs",
        "It failed: CompileError: out of memory",
        f"decode_b8 was traced, key {miss.key.short}:",
        "  level was 2, is 1",
        r"  evil\x1b[31m was 1, is 2",
    ]
    report = json.loads(run("why", "--json", "--root", str(root)).output)
    assert report["misses"][0]["reasons"] == list(miss.reasons)
    report_path(root).write_text("[]")
    assert "is not the report of a start" in run("why", "--root", str(root), code=1).output


def test_path_names_every_directory(root):
    environment = {
        "VLLM_CACHE_ROOT": str(root),
        "NEURON_LIBTORCH_REMOTE_CACHE": "/mnt/shared",
        "NEURON_COMPILED_ARTIFACTS": None,
    }
    assert json.loads(run("path", "--json", environment=environment).output) == {
        "precompile": f"{root}/neuron/precompile",
        "compile_cache": f"{root}/neuron/compile_cache",
        "remote": "/mnt/shared",
    }
    assert run("path", "--root", "/x").output.splitlines() == [
        "precompile    /x/neuron/precompile",
        "compile_cache /x/neuron/compile_cache",
    ]


def test_verify_reads_all_of_every_entry(root):
    assert run("verify", "--root", str(root)).output == "3 entries sound, 0 problems\n"
    compiled = root / "neuron" / "compile_cache"
    _core.Store(str(compiled)).put("neff", key(3), {"neff": b"out of space"})
    path = compiled / "v1" / "21" / key(0x21)
    content = bytearray(path.read_bytes())
    content[8193] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    path.chmod(0o400)
    report = json.loads(run("verify", "--json", "--root", str(root), code=1).output)
    assert report["sound"] == 2
    assert len(report["problems"]) == 2
    assert any(key(3) in problem for problem in report["problems"])
    assert any(str(path) in problem for problem in report["problems"])
    assert not path.exists()


def test_promote_all_and_some_twice(root, tmp_path):
    shared = tmp_path / "shared"
    to = ("--to", str(shared))
    first = run("promote", "0202", *to, "--json", "--root", str(root)).output
    assert json.loads(first) == {"promoted": 1, "existed": 0, "to": str(shared)}
    assert keys_in(shared) == ["02"]
    environment = {
        "VLLM_CACHE_ROOT": str(root),
        "NEURON_LIBTORCH_REMOTE_CACHE": str(shared),
    }
    output = run("promote", environment=environment).output
    assert output == f"2 entries promoted to {shared}, 1 there before\n"
    assert keys_in(shared) == ["01", "02", "21"]
    assert "say where to" in run("promote", "--root", str(root), code=2).output
    listed = json.loads(run("ls", "--json", "--directory", str(shared)).output)
    assert sorted(row["kind"] for row in listed) == ["lowering", "neff", "trace"]


def test_a_bundle_moves_a_cache_g14(root, tmp_path):
    """bugs G14: the bundle holds all that is needed; equal caches give equal bundles."""
    bundle, again = tmp_path / "one.tar", tmp_path / "two.tar"
    output = run("export", str(bundle), "--root", str(root)).output
    assert output.startswith("3 entries, ")
    run("export", str(again), "--root", str(root))
    assert bundle.read_bytes() == again.read_bytes()
    for place in ("--root", "--directory"):
        target = tmp_path / place
        imported = run("import", str(bundle), place, str(target)).output
        assert imported == "3 entries imported, 0 there before\n"
        assert run("import", str(bundle), place, str(target)).output == (
            "0 entries imported, 3 there before\n"
        )
    moved = tmp_path / "--root" / "neuron"
    assert keys_in(moved / "precompile") == ["01"]
    assert keys_in(moved / "compile_cache") == ["02", "21"]
    assert keys_in(tmp_path / "--directory") == ["01", "02", "21"]
    assert sorted(path.name for path in moved.iterdir()) == ["compile_cache", "precompile"]
    for name in ("precompile/v1/01/" + key(1), "compile_cache/v1/02/" + key(2)):
        assert (moved / name).read_bytes() == (root / "neuron" / name).read_bytes()
    run("export", str(bundle), "21", "--root", str(root))
    with tarfile.open(bundle) as archive:
        assert archive.getnames() == [key(0x21)]


def test_a_hostile_bundle_writes_nothing(root, tmp_path):
    good = (root / "neuron" / "precompile" / "v1" / "01" / key(1)).read_bytes()
    bundle = tmp_path / "bad.tar"
    with tarfile.open(bundle, "w") as archive:

        def add(name: str, content: bytes = b"", **fields: object) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for field, value in fields.items():
                setattr(member, field, value)
            archive.addfile(member, io.BytesIO(content))

        add("../../escaped", b"x")
        add(f"../{key(1)}", good)
        add(key(5), type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add(key(6), type=tarfile.DIRTYPE)
        add(key(7), good)  # sound, under another name
        add(key(8), good[:4000])
        add(key(1), good)
    target = tmp_path / "target"
    result = run("import", str(bundle), "--root", str(target), code=1)
    assert result.stdout == "1 entry imported, 0 there before\n"
    assert len(result.stderr.splitlines()) == 6
    assert keys_in(target / "neuron" / "precompile") == ["01"]
    assert not (tmp_path / "escaped").exists()
    assert sorted(path.name for path in (target / "neuron").iterdir()) == ["precompile"]
    (tmp_path / "junk").write_bytes(b"no tar")
    assert "Error: " in run("import", str(tmp_path / "junk"), "--root", str(target), code=1).output


def test_gc_removes_what_was_used_longest_ago(root):
    compiled = root / "neuron" / "compile_cache"
    store = _core.Store(str(compiled))
    for number in range(0x30, 0x38):
        store.put("neff", key(number), {"neff": bytes(1 << 20)})
    long_ago = time.time() - 10_000
    for info in store.entries():
        number = int(info.key[:2], 16)
        os.utime(info.path, (long_ago + number, long_ago + number))
    options = ("--max-size", "4M", "--root", str(root))
    would = json.loads(run("gc", "--dry-run", "--json", *options).output)
    assert len(keys_in(compiled)) == 10
    done = json.loads(run("gc", "--json", *options).output)
    assert done | {"dry_run": True} == would
    # Three quarters of 4 MiB: two entries of a page more than 1 MiB.
    assert keys_in(compiled) == ["36", "37"]
    assert keys_in(root / "neuron" / "precompile") == ["01"]
    assert (
        run("gc", "--max-age", "1h", "--root", str(root))
        .output.splitlines()[0]
        .startswith("2 entries removed, 2.0 MiB")
    )
    assert keys_in(compiled) == []


@pytest.mark.parametrize(
    "arguments", [(), ("--max-age", "soon"), ("--max-size", "0"), ("--max-age", "5w")]
)
def test_gc_says_what_it_needs(root, arguments):
    run("gc", *arguments, "--root", str(root), code=2)


def test_clear_asks_and_removes_every_entry(root):
    kept = CliRunner().invoke(cache, ["clear", "--root", str(root)], input="n\n")
    assert kept.exit_code == 1
    assert "Remove 3 entries from " in kept.output
    neuron = root / "neuron"
    assert len(keys_in(neuron / "precompile", neuron / "compile_cache")) == 3
    assert run("clear", "--yes", "--root", str(root)).output == "3 entries removed\n"
    assert keys_in(neuron / "precompile", neuron / "compile_cache") == []
    assert run("clear", "--root", str(root)).output == "0 entries removed\n"


def test_root_and_directory_exclude_each_other(root):
    result = run("ls", "--root", str(root), "--directory", str(root), code=2)
    assert "--root and --directory exclude each other" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls",),
        ("gc", "--max-age", "1d"),
        ("why",),
        ("show", "02"),
        ("diff", "02", "02"),
        ("verify",),
        ("path",),
        ("promote", "--to", "shared"),
    ],
)
def test_commands_start_without_torch_in_a_fifth_of_a_second(root, tmp_path, arguments):
    """In processor time, since the machine may be busy with other tests."""
    code = (
        "import sys; from vllm_neuron.cli import main\n"
        f"sys.argv[1:] = ['cache', *{arguments!r}, '--root', {str(root)!r}]\n"
        "try: main(standalone_mode=False)\n"
        "except Exception: pass\n"
        "heavy = {'torch', 'vllm', 'jax', 'jaxlib', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    seconds = []
    while not seconds or (seconds[-1] > 0.2 and len(seconds) < 5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert seconds[-1] < 0.2, seconds
