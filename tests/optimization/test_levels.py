"""Every spelling of a level, on each route, through the real argument parser and EngineArgs."""

import subprocess
import sys

import pytest

from tests.serving import server_environment
from tests.starts import Starts

NATIVE = {"VLLM_NEURON_BACKEND": "neuron_native"}
XLA = {"VLLM_NEURON_BACKEND": "vllm_neuron"}

NATIVE_DEFAULT = ("INFO", "Using default optimization level O2 on the Neuron native route")
XLA_DEFAULT = ("INFO", "Defaulting optimization level to O1 on the XLA route")


def keeping(level):
    return ("INFO", f"Explicit --optimization-level: keeping O{level}")


def level_lines(start):
    return [line for line in start.lines if "optimization level" in line[1].lower()] + [
        line for line in start.lines if "--optimization-level" in line[1]
    ]


def compiler_level(start):
    (line,) = (text for text in start.texts if text.startswith("Compiler arguments: "))
    return next(word for word in line.split() if word.startswith("-O"))


def check(start, *, route, level, origin):
    """The level lines, the compiler's level and the configuration."""
    default = {"native": NATIVE_DEFAULT, "XLA": XLA_DEFAULT}[route]
    assert level_lines(start) == [default if origin == "default" else keeping(level)]
    assert sum(text.startswith(f"Neuron compilation route: {route}") for text in start.texts) == 1
    assert compiler_level(start) == f"-O{max(level, 1)}"
    notice = ("INFO", "neuronx-cc has no level O0: compiling with -O1")
    assert start.lines.count(notice) == (level == 0)
    assert len(start.lines) == len(set(start.lines))
    if route == "XLA":
        assert "Precompile Cache: off (XLA route)" in start.texts
    assert start.error is None
    record = start.record
    assert (record["level"], record["level_origin"]) == (level, origin)
    assert record["explicit"] is (origin != "default")
    assert start.config["level"] == level


@pytest.fixture(params=["native", "XLA"])
def route(request):
    return request.param


@pytest.fixture
def environ(route):
    return NATIVE if route == "native" else XLA


@pytest.mark.parametrize(
    ("arguments", "level"),
    [
        (("--optimization-level", "2"), 2),
        (("--optimization-level=2",), 2),
        (("--optimization_level", "2"), 2),
        (("--optimization_level=2",), 2),
        (("-O2",), 2),
        (("-O", "2"), 2),
        (("-O=2",), 2),
        # argparse takes an unambiguous beginning of an option.
        (("--optimization-lev", "2"), 2),
        (("-O0",), 0),
        (("-O1",), 1),
        (("-O3",), 3),
        (("-O1", "-O2"), 2),
    ],
)
def test_command_line(starts, environ, route, arguments, level):
    check(starts.cli(*arguments, environ=environ), route=route, level=level, origin="cli")


@pytest.mark.parametrize("arguments", [("--optimization-level", "2"), ("-O2",)])
def test_command_line_of_a_program_of_ones_own(starts, environ, route, arguments):
    start = starts.cli(*arguments, environ=environ, plain=True)
    check(start, route=route, level=2, origin="cli")


@pytest.mark.parametrize(
    ("yaml", "arguments", "level", "origin"),
    [
        ("optimization-level: 2", (), 2, "config file"),
        ("optimization_level: 2", (), 2, "config file"),
        ("optimization-lev: '2'", (), 2, "config file"),
        ("optimization-level: 0", (), 0, "config file"),
        ("optimization-level: 1", ("-O3",), 3, "cli"),
        ("max-num-seqs: 4", ("-O2",), 2, "cli"),
        ("max-num-seqs: 4", (), None, "default"),
    ],
)
def test_config_file(starts, environ, route, tmp_path, yaml, arguments, level, origin):
    path = tmp_path / "config.yaml"
    path.write_text(yaml + "\n")
    if level is None:
        level = 2 if route == "native" else 1
    start = starts.cli("--config", str(path), *arguments, environ=environ)
    check(start, route=route, level=level, origin=origin)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("value", "level"),
    [
        (2, 2),
        ("2", 2),
        ("OptimizationLevel.O2", 2),
        ("OptimizationLevel.O1", 1),
        (0, 0),
        (1, 1),
        (3, 3),
    ],
)
def test_python(starts, environ, route, value, level, asynchronous):
    start = starts.api(optimization_level=value, asynchronous=asynchronous, environ=environ)
    check(start, route=route, level=level, origin="api")


def test_python_after_importing_llm_first(checkpoint, tmp_path):
    """The default is marked in time whatever the program imports first."""
    cases = [(None, 2, "default"), ("OptimizationLevel.O2", 2, "api"), (2, 2, "api")]
    with Starts(
        checkpoint("llama"), first_import="vllm.entrypoints.llm", folder=tmp_path
    ) as starts:
        for value, level, origin in cases:
            given = {} if value is None else {"optimization_level": value}
            start = starts.api(**given, environ=NATIVE)
            check(start, route="native", level=level, origin=origin)


def test_default(starts, environ, route):
    level = 2 if route == "native" else 1
    for start in (
        starts.cli(environ=environ),
        starts.cli(environ=environ, pickled=True),
        starts.cli(environ=environ, plain=True),
        starts.cli("--additional-config", '{"neuron_config": {}}', environ=environ),
        starts.api(environ=environ),
        starts.api(asynchronous=True, environ=environ),
    ):
        check(start, route=route, level=level, origin="default")


@pytest.mark.parametrize("arguments", [("-O2",), ("--config", "level.yaml")])
def test_the_origin_survives_pickling_of_the_arguments(starts, tmp_path, arguments):
    """vLLM pickles the parsed arguments for its API server processes."""
    path = tmp_path / "level.yaml"
    path.write_text("optimization-level: 2\n")
    arguments = [str(path) if word == "level.yaml" else word for word in arguments]
    origin = "cli" if arguments == ["-O2"] else "config file"
    start = starts.cli(*arguments, environ=NATIVE, pickled=True)
    check(start, route="native", level=2, origin=origin)


@pytest.mark.parametrize("value", ["7", "-1", "fast"])
def test_a_level_that_does_not_exist(starts, value):
    start = starts.cli(f"--optimization-level={value}", environ=NATIVE)
    assert start.error == {
        "type": "ConfigurationError",
        "text": f"--optimization-level {value} is not a level; expected one of 0, 1, 2, 3.",
        "name": "--optimization-level",
    }


def test_neuron_cc_flags_may_set_the_compilers_level(starts):
    start = starts.cli(environ=NATIVE | {"NEURON_CC_FLAGS": "-O3"})
    assert level_lines(start) == [NATIVE_DEFAULT]
    assert compiler_level(start) == "-O3"
    assert any(text.endswith("(level O3 set by NEURON_CC_FLAGS)") for text in start.texts)


def test_neuron_cc_flags_that_cannot_be_parsed(starts):
    start = starts.cli(environ=NATIVE | {"NEURON_CC_FLAGS": "--x='"})
    assert (start.error["type"], start.error["name"]) == ("ConfigurationError", "NEURON_CC_FLAGS")
    assert start.lines == []


def test_one_start_writes_its_lines_once(starts):
    once = starts.cli(environ=NATIVE)
    twice = starts.cli(environ=NATIVE, times=2)
    assert twice.lines == once.lines
    assert twice.config == once.config


def test_two_starts_write_their_lines_twice(starts):
    first, second = starts.api(environ=NATIVE), starts.api(environ=NATIVE)
    assert first.lines == second.lines != []


def test_another_platform_in_place_of_neuron_is_said(checkpoint, tmp_path):
    """`VLLM_TARGET_DEVICE=cpu` makes vLLM ignore platform plugins."""
    code = (
        "from vllm import EngineArgs, platforms\n"
        f"EngineArgs(model={str(checkpoint('llama'))!r}).create_engine_config()\n"
        "print(type(platforms.current_platform).__name__)"
    )
    environ = server_environment({"VLLM_TARGET_DEVICE": "cpu"}, cache_root=tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300
    )
    output = done.stdout + done.stderr
    assert "CpuPlatform" in output
    warning = (
        "Settings ask for the Neuron platform (VLLM_NEURON_DEVICE), but vLLM runs on CpuPlatform."
    )
    assert output.count(warning) == 1
    assert "Neuron compilation route" not in output


@pytest.mark.parametrize(("count", "rank", "writes"), [(2, -1, True), (2, 0, False), (2, 1, False)])
def test_of_several_api_processes_the_launcher_writes(starts, count, rank, writes):
    attributes = {"_api_process_count": count, "_api_process_rank": rank}
    start = starts.cli("-O1", environ=NATIVE, attributes=attributes)
    assert start.error is None
    assert bool(start.lines) is writes
    assert start.record["level"] == 1


def test_the_record_travels_with_every_copy_of_the_configuration(starts):
    kept = starts.carry()
    for refused in ("VllmConfig()", "worker"):
        assert "carries no Neuron route record" in kept.pop(refused)
    assert kept == dict.fromkeys(kept, True)
