"""`vllm-neuron compare`: its usage errors, each before vLLM is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_neuron.comparison.plot import write_plot

COMMAND = Path(sys.executable).with_name("vllm-neuron")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in (COMMAND, "compare", *arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/nothing"], "'{}/nothing' does not exist"),
        (["{}", "--plot", "a.gif"], "--plot a.gif: the suffix is .gif, expected .png or .svg"),
        (["{}", "--prompts-file", "{}/empty"], "{}/empty: no prompts; expected one a line"),
        (["{}", "--route", "cpu"], "'cpu' is not one of 'native', 'xla'"),
        (["{}", "--additional-config", "[1]"], "--additional-config is [1], expected a JSON"),
        (["{}", "--tolerance", "0"], "0.0 is not in the range x>0.0"),
    ],
)
def test_usage_errors(arguments, message, tmp_path):
    (tmp_path / "empty").write_text("\n \n")
    done = run(*(word.format(tmp_path) for word in arguments))
    assert done.returncode == 2
    assert message.format(tmp_path) in done.stderr
    assert "loading" not in done.stderr


def test_without_matplotlib_a_plot_is_refused_with_what_to_do(tmp_path):
    code = (
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "from vllm_neuron.cli import main\n"
        f"main(['compare', {str(tmp_path)!r}, '--plot', 'depth.png'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--plot needs matplotlib, which is not installed: pip install matplotlib" in done.stderr


def test_a_plot_shows_routes_and_places_and_leaves_out_zero_and_infinity(tmp_path):
    layers = [
        {"place": "model.layers.0", "absolute": 0.0, "relative": 0.0},
        {"place": "model.layers.1", "absolute": 1.0, "relative": 1e-3},
        {"place": "logits", "absolute": "inf", "relative": "inf"},
    ]
    tree = {
        "model": "/models/tiny",
        "dtype": "float32",
        "runtime": "host emulator",
        "tolerance": 1e-2,
        "places": [layer["place"] for layer in layers],
        "buckets": [
            {"bucket": "decode_b1", "route": route, "layers": layers} for route in ("native", "XLA")
        ],
    }
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        write_plot(tree, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    comments = (tmp_path / "a.svg").read_text()
    for text in ("native, decode_b1", "XLA, decode_b1", "model.layers.1", "tolerance"):
        assert f"<!-- {text} -->" in comments
