"""`vllm-neuron compare` on a tiny Llama: without a fault, and with one in one route's lowering."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tests.serving import server_environment

pytestmark = pytest.mark.serve

ROOT = Path(__file__).resolve().parents[2]
PLACES = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "logits"]
PROMPTS = ["The", "The compiler lowered every operator in turn, and then it stopped to think."]

COMMAND = "from vllm_neuron.cli import main; main()"
FAULTY = (
    "from vllm_neuron.lowering.native import NativeLowering\n"
    "NativeLowering.worker = 'tests.lowering.faulty_worker'\n" + COMMAND
)


def compare(code, model, folder, *arguments, settings=None):
    """Run the command, in float32 on `PROMPTS`; its result and the JSON report."""
    environment = server_environment(settings or {}, cache_root=folder / "cache")
    environment["PYTHONPATH"] = str(ROOT)
    report = folder / "report.json"
    command = [sys.executable, "-c", code, "compare", str(model), "--dtype", "float32"]
    command += [f"--prompt={prompt}" for prompt in PROMPTS]
    done = subprocess.run(
        [*command, "--tokens", "3", "--json", str(report), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
    )
    assert report.exists(), done.stdout + done.stderr
    return done, json.loads(report.read_text())


def test_both_routes_agree_with_eager(checkpoint, tmp_path):
    plot = tmp_path / "depth.svg"
    model = checkpoint("llama")
    done, report = compare(COMMAND, model, tmp_path, "--plot", str(plot))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "native agrees with eager (tolerance 0.001, relative)." in done.stdout
    assert "XLA agrees with eager (tolerance 0.001, relative)." in done.stdout
    buckets = report.pop("buckets")
    assert isinstance(report.pop("vllm_neuron"), str)
    assert report == {
        "format": 1,
        "model": str(model),
        "dtype": "float32",
        "runtime": "host emulator",
        "reference": "eager",
        "tolerance": 1e-3,
        "prompt_tokens": [len(prompt) for prompt in PROMPTS],
        "generated_tokens": 3,
        "routes": {name: {"agrees": True, "parts": None} for name in ("native", "XLA")},
        "left_out": {},
        "places": PLACES,
    }
    assert [(item["bucket"], item["route"], item["calls"]) for item in buckets] == [
        ("prefill_s128", "native", 2),
        ("prefill_s128", "XLA", 2),
        ("decode_b2", "native", 2),
        ("decode_b2", "XLA", 2),
    ]
    for item in buckets:
        compared = 2 if item["bucket"].startswith("prefill") else 4
        assert item["top_1"] == {"agreeing": compared, "compared": compared}
        assert 0 <= item["kl"]["mean"] <= item["kl"]["largest"] < 1e-6
        assert [layer["place"] for layer in item["layers"]] == PLACES
        for here in (item["logits"], item["kv_caches"], *item["layers"]):
            assert 0 <= here["relative"] < 1e-4
            assert 0 <= here["absolute"] < 1e-2
    # Something was compared: not all of it can be equal bit for bit.
    assert any(layer["absolute"] for item in buckets for layer in item["layers"])
    assert xml.etree.ElementTree.parse(plot).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_a_fault_in_one_layer_is_found_without_a_worker_environment(checkpoint, tmp_path):
    from vllm.model_executor.layers import activation

    settings = {"XDG_DATA_HOME": str(tmp_path), "VLLM_NEURON_XLA_PYTHON": None}
    plot = tmp_path / "depth.png"
    done, report = compare(
        FAULTY, checkpoint("llama"), tmp_path, "--plot", str(plot), settings=settings
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert list(report["left_out"]) == ["XLA"]
    assert "vllm-neuron xla-env create" in report["left_out"]["XLA"]
    assert list(report["routes"]) == ["native"]
    parts = report["routes"]["native"]["parts"]
    assert not report["routes"]["native"]["agrees"]
    assert (parts["bucket"], parts["prompts"]) == ("prefill_s128", [0])
    assert parts["place"] == "model.layers.1"
    assert parts["relative"] > 0.01
    operator = parts["operator"]
    assert operator["operator"] == "aten.sigmoid.default"
    assert operator["module"] == "model.layers.1.mlp.act_fn"
    file, _, line = operator["source"].rpartition(":")
    assert file == inspect.getsourcefile(activation)
    assert "F.silu(" in Path(file).read_text().splitlines()[int(line) - 1]
    # The layer before the fault and its input are as they should be.
    for item in report["buckets"]:
        layers = {layer["place"]: layer["relative"] for layer in item["layers"]}
        assert max(layers["model.embed_tokens"], layers["model.layers.0"]) < 1e-4
        assert min(layers["model.layers.1"], layers["logits"]) > 1e-2
    assert "native parts from eager first at model.layers.1 in prefill_s128" in done.stdout
    assert "Operator aten.sigmoid.default of model.layers.1.mlp.act_fn" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
