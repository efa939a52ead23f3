"""The platform's part in the engine configuration: settings, refusals, warnings."""

import json
import re
import subprocess
import sys

import pytest

from tests.serving import server_environment
from vllm_neuron.errors import ConfigurationError
from vllm_neuron.vllm.config import NeuronConfig, parse_additional_config

NATIVE = {"VLLM_NEURON_BACKEND": "neuron_native"}


def warnings(start):
    return [text for level, text in start.lines if level == "WARNING"]


def test_what_the_platform_settles(starts):
    start = starts.cli("--dtype", "float32", environ=NATIVE)
    config = dict(start.config)
    config.pop("hash")
    assert config == {
        "level": 2,
        "mode": "NONE",
        "cudagraph": "NONE",
        "worker": "vllm_neuron.vllm.worker.NeuronWorker",
        "async": False,
        "block_size": 32,
        "device": "cpu",
        "eager": False,
        "dtype": "torch.float32",
    }
    assert warnings(start) == []


@pytest.mark.parametrize("size", [16, 64])
def test_a_given_block_size_is_kept(starts, size):
    assert starts.cli("--block-size", str(size)).config["block_size"] == size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(starts, dtype):
    assert starts.cli("--dtype", dtype).config["dtype"] == f"torch.{dtype}"


def refusal(start, name):
    assert start.error is not None
    assert (start.error["type"], start.error["name"]) == ("ConfigurationError", name)
    return start.error["text"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("--tensor-parallel-size", "2"), "--tensor-parallel-size"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size"),
        (("--data-parallel-size", "2"), "--data-parallel-size"),
        (("--enable-lora", "--fully-sharded-loras"), "--fully-sharded-loras"),
        (("--enable-lora", "--runner", "pooling"), "--enable-lora for a pooling model"),
        (
            ("--speculative-config", '{"method": "ngram_gpu", "num_speculative_tokens": 2}'),
            "--speculative-config",
        ),
        (
            (
                "--speculative-config",
                '{"method": "ngram", "num_speculative_tokens": 2, '
                '"rejection_sample_method": "block"}',
            ),
            "--speculative-config",
        ),
        (
            (
                *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
                *("--long-prefill-token-threshold", "2"),
            ),
            "--long-prefill-token-threshold with --speculative-config",
        ),
        (
            (
                *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
                *("--enable-lora", "--model-impl", "transformers"),
            ),
            "--enable-lora with --speculative-config and vLLM's Transformers backend",
        ),
        (
            (
                "--kv-transfer-config",
                '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}',
            ),
            "--kv-transfer-config",
        ),
        (("--weight-transfer-config", '{"backend": "ipc"}'), "--weight-transfer-config"),
        (("--quantization", "torchao"), "--quantization"),
        (
            ("--quantization-config", '{"linear": {"weight": "fp8_per_tensor_static"}}'),
            "--quantization-config",
        ),
        (("--kv-cache-dtype", "int8_per_token_head"), "--kv-cache-dtype"),
        (
            ("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0"),
            "--kv-cache-dtype-skip-layers",
        ),
        (
            (
                *("--runner", "pooling", "--enable-chunked-prefill"),
                *("--pooler-config", '{"seq_pooling_type": "MEAN"}'),
            ),
            "--enable-chunked-prefill",
        ),
        (
            (
                *("--runner", "pooling", "--enable-prefix-caching"),
                *("--pooler-config", '{"seq_pooling_type": "MEAN"}'),
            ),
            "--enable-prefix-caching",
        ),
        (("--enable-prompt-embeds",), "--enable-prompt-embeds"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(starts, arguments, option):
    text = refusal(starts.cli(*arguments, environ=NATIVE), option)
    assert text.startswith(option)
    assert "is not supported on Neuron in this version." in text


def test_drafts_of_a_model_are_refused_and_those_of_lookup_are_not(starts, checkpoint):
    draft = {"method": "draft_model", "model": str(checkpoint("llama"))}
    for config, error in (
        (draft, "--speculative-config (method draft_model) is not supported on Neuron in this "),
        ({"method": "ngram", "prompt_lookup_max": 3}, None),
    ):
        text = json.dumps({"num_speculative_tokens": 2, **config})
        start = starts.cli("--speculative-config", text, environ=NATIVE)
        if error is None:
            assert (start.error, start.config["async"]) == (None, False)
        else:
            found = refusal(start, "--speculative-config")
            assert found.startswith(error)
            assert "Use method ngram" in found


def test_eager_mode_is_for_cpu_mode_only(starts):
    text = refusal(starts.cli("--enforce-eager", environ=NATIVE), "--enforce-eager")
    assert text.startswith("Eager mode on Neuron is not yet supported.")
    for arguments in ((), ("--enforce-eager",)):
        start = starts.cli(
            *arguments,
            environ=NATIVE | {"VLLM_NEURON_DEVICE": "", "VLLM_NEURON_CPU_MODE": "1"},
        )
        assert start.config["eager"] is True
        assert "Precompile Cache: off (VLLM_NEURON_CPU_MODE=1)" in start.texts
        assert not any("Compiler arguments" in text for text in start.texts)


@pytest.mark.parametrize(
    ("environ", "error", "text"),
    [
        (
            {"VLLM_NEURON_DEVICE": "x"},
            "ConfigurationError",
            "VLLM_NEURON_DEVICE='x' is not valid: expected auto, neuron or host.",
        ),
        (
            {"VLLM_NEURON_DEVICE": "HOST"},
            "ConfigurationError",
            "VLLM_NEURON_DEVICE='HOST' is not valid: expected auto, neuron or host.",
        ),
        (
            {"VLLM_NEURON_DEVICE": "host", "VLLM_NEURON_CPU_MODE": "1"},
            "ConfigurationError",
            "VLLM_NEURON_DEVICE=host and VLLM_NEURON_CPU_MODE=1 contradict each other",
        ),
        (
            {"VLLM_NEURON_CPU_COMPILE": "1", "VLLM_NEURON_CPU_MODE": "1"},
            "RuntimeError",
            "VLLM_NEURON_CPU_MODE and VLLM_NEURON_CPU_COMPILE are not compatible with each other",
        ),
        (
            {"VLLM_NEURON_CPU_MODE": "maybe"},
            "ConfigurationError",
            "VLLM_NEURON_CPU_MODE='maybe' is not valid",
        ),
        (
            {"VLLM_USE_V2_MODEL_RUNNER": "1"},
            "ConfigurationError",
            "VLLM_USE_V2_MODEL_RUNNER=1 asks for vLLM's second model runner",
        ),
    ],
)
def test_settings_that_contradict_stop_the_start(starts, environ, error, text):
    start = starts.cli(environ=NATIVE | environ)
    assert start.error["type"] == error
    assert start.error["text"].startswith(text)
    assert start.lines == []


def test_unknown_variables_are_named_once(starts):
    start = starts.cli(
        environ={
            "VLLM_NEURON_BACKND": "neuron_native",
            "VLLM_NEURON_ZZZZZZZZZZZZ": "1",
            "VLLM_NEURON_SVC_PORT_8000_TCP": "tcp://10.0.0.1:8000",
            "VLLM_SERVICE_HOST": "10.0.0.1",
            "VLLM_NOBODY_READS_THIS": "1",
        }
    )
    assert warnings(start) == [
        "Unknown environment variable VLLM_NEURON_BACKND: did you mean VLLM_NEURON_BACKEND?",
        "Unknown environment variable VLLM_NEURON_ZZZZZZZZZZZZ has no effect.",
        "Unknown vLLM environment variable detected: VLLM_NOBODY_READS_THIS",
    ]


def test_unknown_variables_are_fatal_on_request(starts):
    start = starts.cli("--fail-on-environ-validation", environ={"VLLM_NEURON_BACKND": "1"})
    text = refusal(start, "VLLM_NEURON_BACKND")
    assert text.endswith("did you mean VLLM_NEURON_BACKEND?")
    assert starts.cli("--fail-on-environ-validation").error is None


def test_old_names_and_names_without_effect_are_named_once(starts):
    start = starts.cli(
        environ={
            "VLLM_NEURON_COMPILATION_TIMEOUT": "1800",
            "TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS": "True",
        }
    )
    assert start.error is None
    found = warnings(start)
    assert found[0].startswith("TORCH_NEURONX_PRESERVE_COMPILATION_ARTIFACTS=True has no effect")
    assert found[1] == (
        "VLLM_NEURON_COMPILATION_TIMEOUT is the old name of NEURON_LIBTORCH_COMPILATION_TIMEOUT; "
        "please set NEURON_LIBTORCH_COMPILATION_TIMEOUT."
    )


def test_log_level_of_the_plugin(tmp_path):
    """The plugin's lines have vLLM's format, and its level changes nothing for vLLM's own."""
    code = (
        "import logging\n"
        "from vllm.platforms import current_platform\n"
        "assert current_platform.get_device_name() == 'neuron'\n"
        "from vllm.config.logging import LoggingConfig\n"
        "from vllm.logger import configure_logging\n"
        "configure_logging(LoggingConfig())\n"
        "for name in ('vllm_neuron.route', 'vllm.engine'):\n"
        "    for level in ('debug', 'info', 'warning'):\n"
        "        getattr(logging.getLogger(name), level)('said %s by %s', level, name)\n"
    )
    environ = server_environment({"VLLM_NEURON_LOG_LEVEL": "debug"}, cache_root=tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"(?:DEBUG|INFO|WARNING) \S+ \S+ \[.*\] said (\w+) by (\S+)", done.stdout)
    assert [word for word, name in said if name == "vllm_neuron.route"] == [
        "debug",
        "info",
        "warning",
    ]
    assert [word for word, name in said if name == "vllm.engine"] == ["info", "warning"]


def additional(**section):
    return ("--additional-config", json.dumps({"neuron_config": section}))


SMALL = ("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "256")


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"num_seqs_buckets": []}, "num_seqs_buckets cannot be empty"),
        ({"num_seqs_buckets": 4}, "num_seqs_buckets must be a list, got int"),
        ({"num_seqs_buckets": [2, 2, 4]}, "num_seqs_buckets must be in strictly ascending order"),
        (
            {"num_batched_tokens_buckets": [128, 192]},
            "Last bucket in num_batched_tokens_buckets must equal max_num_batched_tokens (256), "
            "got 192",
        ),
    ],
)
def test_bucket_errors_come_at_start_up(starts, section, text):
    start = starts.cli(*SMALL, *additional(**section))
    assert start.error["type"] == "ConfigurationError"
    assert start.error["text"].startswith(text)


def test_buckets_that_fit(starts):
    section = {"num_seqs_buckets": [3, 4], "num_batched_tokens_buckets": [256]}
    start = starts.cli(*SMALL, *additional(**section))
    assert (start.error, warnings(start)) == (None, [])


def test_unknown_keys_of_additional_config(starts):
    value = {
        "neuron_config": {"num_seq_buckets": [4], "max_vision_seq_len": 4},
        "neuron_cfg": {},
    }
    start = starts.cli(*SMALL, "--additional-config", json.dumps(value))
    assert start.error is None
    assert warnings(start) == [
        "Unknown key 'neuron_cfg' in additional_config has no effect. Did you mean neuron_config?",
        "Unknown key 'num_seq_buckets' in neuron_config has no effect. "
        "Did you mean num_seqs_buckets?",
        "Unknown key 'max_vision_seq_len' in neuron_config has no effect. "
        "It is a key of vision_neuron_config.",
    ]


def test_additional_config_by_keys():
    config, found = parse_additional_config(
        {
            "neuron_config": {
                "num_seqs_buckets": [1, 2],
                "decode_context_length_buckets": [128],
                "on_device_sampling_config": {"top_k": 1},
                "mm_language_model_only": True,
                "attention_dp_size": 2,
                "ep_degree": 1,
            },
            "vision_neuron_config": {"tp_size": 1},
            "gdn_prefill_backend": "triton",
        }
    )
    assert config == NeuronConfig(
        num_seqs_buckets=[1, 2],
        decode_context_length_buckets=[128],
        on_device_sampling_config={"top_k": 1},
        ep_degree=1,
    )
    assert found == [
        "neuron_config.mm_language_model_only has no effect there: it is a key of "
        "additional_config itself.",
        "neuron_config.on_device_sampling_config has no effect in this version.",
        "neuron_config.attention_dp_size has no effect in this version.",
        "additional_config.vision_neuron_config has no effect in this version.",
    ]
    assert parse_additional_config(None) == (NeuronConfig(), [])


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [
        ([1], "additional_config", "additional_config must be a mapping"),
        ({"neuron_config": [1]}, "neuron_config", "neuron_config must be a mapping"),
        (
            {"neuron_config": {"quantization": "mxfp8"}},
            "neuron_config.quantization",
            "neuron_config.quantization='mxfp8' is not supported in this version.",
        ),
        (
            {"neuron_config": {"ep_degree": 2}},
            "neuron_config.ep_degree",
            "neuron_config.ep_degree=2 is not supported in this version.",
        ),
        (
            {"neuron_config": {"enable_structured_outputs": "yes"}},
            "neuron_config.enable_structured_outputs",
            "neuron_config.enable_structured_outputs='yes' is not valid: expected true or false.",
        ),
        (
            {"neuron_config": {"on_device_sampling_config": 3}},
            "neuron_config.on_device_sampling_config",
            "neuron_config.on_device_sampling_config must be a mapping",
        ),
    ],
)
def test_additional_config_with_wrong_values(value, name, text):
    with pytest.raises(ConfigurationError) as caught:
        parse_additional_config(value)
    assert caught.value.name == name
    assert str(caught.value).startswith(text)
