"""`vllm-neuron neff info` and `validate`: what an operator reads, and exit codes."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.neff import build
from tests.neff.samples import GOLDEN, REAL
from vllm_neuron import _core
from vllm_neuron.cli import main

SOUND = build.sound()
MD5 = SOUND[172:188].hex()
SUMMARY = "target none, compiler 0.test, LNC 1, 1 input, 1 output, MD5 verified (standard order)"


def run(*arguments: str | Path):
    return CliRunner().invoke(main, ["neff", *map(str, arguments)])


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.neff"
    path.write_bytes(SOUND)
    return path


@pytest.fixture
def corrupt(tmp_path: Path) -> Path:
    path = tmp_path / "corrupt.neff"
    path.write_bytes(build.with_field(SOUND, "hash", bytes(16)))
    return path


def test_validate_sound_file(sound):
    result = run("validate", sound)
    assert result.exit_code == 0
    assert result.stdout == f"ok    {sound}: {SUMMARY}\n"
    assert result.stderr == ""


def test_validate_tells_what_fails_and_where(corrupt):
    result = run("validate", corrupt)
    assert result.exit_code == 1
    assert result.stdout == (
        f"FAIL  {corrupt}: NEFF MD5 digest of the payload, at offset 172: expected {MD5} "
        f"(or its word-swapped form), found {'00' * 16} (status 2)\n"
    )


def test_validate_checks_every_file_and_fails_if_one_does(sound, corrupt, tmp_path):
    short = tmp_path / "short.neff"
    short.write_bytes(SOUND[:-1])
    unsupported = tmp_path / "unsupported.neff"
    unsupported.write_bytes(build.with_field(SOUND, "neff_version_major", 3))
    result = run("validate", corrupt, sound, short, unsupported)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["FAIL", "ok", "FAIL", "FAIL"]
    size = len(SOUND) - 1024
    assert lines[2] == (
        f"FAIL  {short}: NEFF header, data_size, at offset 16: expected {size - 1} (length of the "
        f"file - 1024), found {size} (status 2)"
    )
    assert lines[3] == (
        f"FAIL  {unsupported}: NEFF not supported, neff_version_major, at offset 24: expected at "
        "most 2, found 3 (status 10)"
    )


def test_warnings_are_shown_and_do_not_fail(tmp_path):
    path = tmp_path / "odd.neff"
    path.write_bytes(SOUND + b"x")
    result = run("validate", path)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"ok    {path}: {SUMMARY}",
        "      warning: 1 bytes follow the payload and are ignored",
    ]


def test_validate_json(sound, corrupt):
    result = run("validate", "--json", sound, corrupt)
    assert result.exit_code == 1
    good, bad = json.loads(result.stdout)
    assert good == {**_core.Neff.parse(SOUND, path=str(sound)).to_dict(), "ok": True, "error": None}
    assert bad == {
        "path": str(corrupt),
        "warnings": [],
        "ok": False,
        "error": {
            "type": "NeffChecksumError",
            "message": f"{corrupt}: NEFF MD5 digest of the payload, at offset 172: expected {MD5} "
            f"(or its word-swapped form), found {'00' * 16}",
            "offset": 172,
            "inflated_offset": None,
            "member": None,
            "expected": f"{MD5} (or its word-swapped form)",
            "found": "00" * 16,
            "status": 2,
        },
    }


@pytest.mark.parametrize("command", ["validate", "info"])
def test_no_hash_skips_the_digest(corrupt, command):
    result = run(command, "--no-hash", corrupt)
    assert result.exit_code == 0
    assert "MD5 not verified" in result.stdout


def test_info_lines(tmp_path):
    path = tmp_path / "a.neff"
    path.write_bytes(
        _core.write_neff(
            name="decode-8.neff",
            target="none",
            compiler_version="xla-cpu 1.2",
            inputs=[("x", "float32", [2, 3]), ("scale", "bfloat16", [])],
            outputs=[("y", "int32", [4])],
            members=[("module", b"12345")],
            compression="none",
        )
    )
    neff = _core.Neff.parse(path.read_bytes())
    inflated = sum(size for _, size in neff.members)
    result = run("info", path)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"file      {path} ({neff.size_bytes} bytes)",
        "name      decode-8.neff",
        f"uuid      {neff.uuid}",
        "target    none",
        "compiler  xla-cpu 1.2",
        "version   NEFF 1.0, package 2",
        "features  0x0 (none)",
        "cores     1 requested, 1 for efficient execution, LNC 1",
        f"payload   {neff.data_size} bytes, compression none, MD5 verified (standard order)",
        f"archive   15 files, {inflated} bytes",
        "input     x: float32 [2, 3]",
        "input     scale: bfloat16 []",
        "output    y: int32 [4]",
    ]
    listed = run("info", "--members", path).stdout.splitlines()
    assert listed[-1] == "member    module (5 bytes)"
    assert len([line for line in listed if line.startswith("member ")]) == 15


def test_info_json(sound):
    result = run("info", "--json", sound)
    assert result.exit_code == 0
    expected = _core.Neff.parse(SOUND, path=str(sound)).to_dict()
    assert json.loads(result.stdout) == {**expected, "ok": True, "error": None}


def test_info_of_a_corrupt_file(corrupt):
    result = run("info", corrupt)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"FAIL  {corrupt}: NEFF MD5 digest of the payload, at offset")
    result = run("info", "--json", corrupt)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["type"] == "NeffChecksumError"


@pytest.mark.parametrize("command", ["validate", "info"])
def test_usage_errors_exit_with_2(command, sound, tmp_path):
    assert run(command).exit_code == 2
    assert run(command, "--nonsense", sound).exit_code == 2
    result = run(command, tmp_path / "absent.neff")
    assert result.exit_code == 2
    assert "absent.neff' does not exist" in result.stderr
    assert run(command, tmp_path).exit_code == 2
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = run(command, pipe)
    assert result.exit_code == 2
    assert "expected a regular file" in result.stderr


def test_texts_of_a_file_cannot_command_the_terminal(tmp_path):
    path = tmp_path / "evil.neff"
    name = "\x1b[2J\x1b]0;owned\x07\n[red]x"
    info = build.info(name=name, tool_version="\x1b[31m")
    path.write_bytes(build.container(build.tar(build.members(info=info)), name=name.encode()))
    for arguments in (["info"], ["validate"], ["validate", "--json"], ["info", "--json"]):
        result = run(*arguments, path)
        assert result.exit_code == 0
        assert "\x1b" not in result.stdout
        assert "\x07" not in result.stdout
    assert "name      \\x1b[2J\\x1b]0;owned\\x07\\n[red]x" in run("info", path).stdout


def test_file_name_that_is_not_text_is_shown(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.neff"
    Path(os.fsdecode(path)).write_bytes(SOUND)
    command = Path(sys.executable).with_name("vllm-neuron")
    done = subprocess.run([command, "neff", "validate", path], capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith(b"ok    " + os.fsencode(tmp_path) + b"/\\xff.neff: target none")


def test_table_on_a_terminal(sound):
    """A real pseudo-terminal, because only there rich is used."""
    command = Path(sys.executable).with_name("vllm-neuron")
    primary, secondary = pty.openpty()
    with subprocess.Popen(
        [command, "neff", "info", str(sound)],
        stdout=secondary,
        env={**os.environ, "COLUMNS": "300", "TERM": "xterm"},
    ) as process:
        os.close(secondary)
        output = b""
        while chunk := read_some(primary):
            output += chunk
    os.close(primary)
    assert process.returncode == 0
    text = output.decode()
    assert "\u2502" in text
    assert "x: float32 [2, 3]" in text
    assert str(sound) in text


def read_some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        # Linux reports the closed other side of a terminal as an error.
        return b""


@pytest.mark.parametrize(
    "paths", [pytest.param(GOLDEN, id="golden"), pytest.param(REAL, id="real")]
)
def test_known_files_are_sound(paths):
    if not paths:
        pytest.skip("no neff-samples folder beside the repository")
    result = run("validate", *paths)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line[:6] for line in lines] == ["ok    "] * len(paths)
