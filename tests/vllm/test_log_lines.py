"""The user guide's log lines in the log of real servers and of `LLM(...)`: exact, and each once."""

import json
import re
import subprocess
import sys
import textwrap

import pytest

from tests.serving import Server, server_environment

pytestmark = pytest.mark.serve

# Two graphs, so that a start is short.
ARGUMENTS = (
    *("--max-model-len", "128", "--max-num-batched-tokens", "128"),
    *("--max-num-seqs", "1", "--dtype", "float32", "--num-gpu-blocks-override", "16"),
)
# The lines whose presence, order and number each row pins down.
PINNED = re.compile(
    r"VLLM_NEURON_BACKEND='|Neuron compilation route: |.*optimization level (?:to )?O\d|"
    r"Explicit --optimization-level|The XLA route|Precompile Cache: o|TORCH_CACHING_PRECOMPILE=1 |"
    r"neuronx-cc has no level"
)

NATIVE_DEFAULT = ("INFO", "Using default optimization level O2 on the Neuron native route")
XLA_DEFAULT = ("INFO", "Defaulting optimization level to O1 on the XLA route")
XLA_DEPRECATED = (
    "WARNING",
    "The XLA route (VLLM_NEURON_BACKEND=vllm_neuron) is deprecated and a future release removes "
    "it. Unset VLLM_NEURON_BACKEND or set it to neuron_native for the native route.",
)
XLA_REASON = ("INFO", "Neuron compilation route: XLA (VLLM_NEURON_BACKEND=vllm_neuron)")
XLA_STATE = ("INFO", "Precompile Cache: off (XLA route)")


def native(reason, state, level=NATIVE_DEFAULT):
    return [
        ("INFO", f"Neuron compilation route: native ({reason})"),
        level,
        ("INFO", f"Precompile Cache: {state}"),
    ]


def explicit(level):
    return ("INFO", f"Explicit --optimization-level: keeping O{level}")


def pinned(records):
    return [(r.level, r.message) for r in records if PINNED.match(r.message)]


@pytest.fixture(scope="module")
def cache_root(tmp_path_factory):
    """Shared by all servers of this file: the later ones start warm."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def server(checkpoint, cache_root, tmp_path):
    def start(value, *arguments, **environment):
        return Server(
            checkpoint("llama"),
            cache_root=cache_root,
            folder=tmp_path,
            arguments=(*ARGUMENTS, *arguments),
            environment={"VLLM_NEURON_BACKEND": value, **environment},
            fork=True,
        )

    return start


NOT_SET, EMPTY = "VLLM_NEURON_BACKEND is not set", "VLLM_NEURON_BACKEND is empty"
ON = "on ({cache_root}/neuron/precompile)"


def misspelt(value):
    reason = f"VLLM_NEURON_BACKEND='{value}' is not a valid route"
    return [
        ("WARNING", f"{reason}. The native route runs now."),
        *native(reason, "off (VLLM_NEURON_BACKEND is not a valid route)"),
    ]


@pytest.mark.parametrize(
    ("value", "arguments", "environment", "lines"),
    [
        (None, (), {}, native(NOT_SET, f"off ({NOT_SET})")),
        (None, ("-O2",), {}, native(NOT_SET, f"off ({NOT_SET})", explicit(2))),
        ("", (), {}, native(EMPTY, f"off ({EMPTY})")),
        ("neuron_native", (), {}, native("VLLM_NEURON_BACKEND=neuron_native", ON)),
        (
            " NEURON\r",
            # Each API server process builds an engine configuration of its own.
            ("--optimization-level", "1", "--api-server-count", "2"),
            {},
            native("VLLM_NEURON_BACKEND=neuron", ON, explicit(1)),
        ),
        (
            "neuron_native",
            ("--config", "{config}"),
            {},
            native("VLLM_NEURON_BACKEND=neuron_native", ON, explicit(3)),
        ),
        (
            "neuron_native",
            (),
            {"TORCH_CACHING_PRECOMPILE": "0"},
            native("VLLM_NEURON_BACKEND=neuron_native", "off (TORCH_CACHING_PRECOMPILE=0)"),
        ),
        (" Neuron-Nativ", (), {}, misspelt(" Neuron-Nativ")),
    ],
)
def test_native_rows(server, cache_root, tmp_path, value, arguments, environment, lines):
    config = tmp_path / "config.yaml"
    config.write_text("optimization-level: 3\n")
    arguments = [word.format(config=config) for word in arguments]
    with server(value, *arguments, **environment) as running:
        assert len(running.complete("hello", max_tokens=2)["choices"]) == 1
        expected = [(level, text.format(cache_root=cache_root)) for level, text in lines]
        assert pinned(running.records()) == expected


@pytest.mark.parametrize(
    ("value", "arguments", "lines"),
    [
        ("vllm_neuron\r", (), [XLA_REASON, XLA_DEFAULT, XLA_DEPRECATED, XLA_STATE]),
        # An explicit 2 is not the default 2.
        ("vllm_neuron", ("-O2",), [XLA_REASON, explicit(2), XLA_DEPRECATED, XLA_STATE]),
    ],
)
def test_xla_rows(server, value, arguments, lines):
    with server(value, *arguments) as running:
        assert len(running.complete("hello", max_tokens=2)["choices"]) == 1
        assert pinned(running.records()) == lines


def test_without_the_worker_s_interpreter_the_xla_route_stops_before_weights_are_loaded(
    server, tmp_path
):
    stopped = server("vllm_neuron", XDG_DATA_HOME=str(tmp_path))
    try:
        stopped.start()
        assert stopped.wait_exit() == 1
    finally:
        stopped.close()
    assert pinned(stopped.records()) == [XLA_REASON, XLA_DEFAULT, XLA_DEPRECATED, XLA_STATE]
    last = stopped.log_lines()[-1]
    assert last.startswith("vllm_neuron.errors.ConfigurationError: The XLA route lowers graphs in")
    assert f"{tmp_path}/vllm-neuron/xla-env does not exist" in last
    assert "Make it: vllm-neuron xla-env create." in last
    assert not any("Starting to load model" in message for message in stopped.messages())
    assert not any(record.process.startswith("EngineCore") for record in stopped.records())


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"VLLM_NEURON_DEVICE": "neuron"}, "VLLM_NEURON_DEVICE=neuron needs a Neuron device"),
        ({"VLLM_NEURON_DEVICE": "x"}, "VLLM_NEURON_DEVICE='x' is not valid: expected auto, neuron"),
    ],
)
def test_settings_that_cannot_be_served_stop_a_real_server(server, environment, text):
    stopped = server("neuron_native", **environment)
    try:
        stopped.start()
        assert stopped.wait_exit() == 1
    finally:
        stopped.close()
    assert stopped.log_lines()[-1].startswith(f"vllm_neuron.errors.ConfigurationError: {text}")
    assert pinned(stopped.records()) == []


def test_cpu_mode(server):
    with server("neuron_native", VLLM_NEURON_DEVICE=None, VLLM_NEURON_CPU_MODE="1") as running:
        assert len(running.complete("hello", max_tokens=2)["choices"]) == 1
        assert pinned(running.records()) == native(
            "VLLM_NEURON_BACKEND=neuron_native", "off (VLLM_NEURON_CPU_MODE=1)"
        )
        assert "CPU eager mode — skipping warmup" in running.messages("INFO")


def test_offline_llm(checkpoint, cache_root, tmp_path):
    """Two `LLM(...)` are two starts, and a later change of the variable changes neither."""
    script = tmp_path / "offline.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, os, sys
            from vllm import LLM, EngineArgs, SamplingParams
            from vllm.v1.engine.llm_engine import LLMEngine

            def main(model):
                options = dict(model=model, max_model_len=128, max_num_batched_tokens=128,
                               max_num_seqs=1, dtype="float32",
                               num_gpu_blocks_override=16)
                greedy = SamplingParams(temperature=0, max_tokens=3)
                answers = []
                for level in ({}, {"optimization_level": 2}):
                    llm = LLM(**options, **level)
                    answers.append(list(llm.generate("hi", greedy)[0].outputs[0].token_ids))
                    llm.llm_engine.engine_core.shutdown()
                config = EngineArgs(**options).create_engine_config()
                # After the start: the engine's processes see this value and must not read it.
                os.environ["VLLM_NEURON_BACKEND"] = "vllm_neuron"
                engine = LLMEngine.from_vllm_config(config)
                engine.add_request("1", "hi", greedy)
                while engine.has_unfinished_requests():
                    done = engine.step()
                answers.append(list(done[-1].outputs[0].token_ids))
                engine.engine_core.shutdown()
                print("ANSWERS", json.dumps(answers))

            if __name__ == "__main__":
                main(sys.argv[1])
            """
        )
    )
    log = tmp_path / "offline.log"
    environ = server_environment({"VLLM_NEURON_BACKEND": "neuron"}, cache_root=cache_root)
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, script, checkpoint("llama")],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            timeout=600,
        )
    text = log.read_text()
    assert done.returncode == 0, text[-4000:]
    answers = json.loads(re.search(r"^ANSWERS (.*)$", text, re.MULTILINE)[1])
    assert len(answers[0]) == 3
    assert answers == [answers[0]] * 3
    state = ON.format(cache_root=cache_root)
    start = native("VLLM_NEURON_BACKEND=neuron", state)
    second = native("VLLM_NEURON_BACKEND=neuron", state, explicit(2))
    found = re.findall(r"(INFO|WARNING) \S+ \S+ \[\S+\] (.*)", text)
    assert [pair for pair in found if PINNED.match(pair[1])] == [*start, *second, *start]
