"""The host compiler: what its NEFFs hold, which options reach XLA, what it refuses."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.compiler.modules import add_in_place, compiled, linear, lowered, reverse
from vllm_neuron._core import Neff
from vllm_neuron.compiler import host_kernels, xla_cpu
from vllm_neuron.compiler.host import HostCompiler
from vllm_neuron.compiler.host_program import HostManifest
from vllm_neuron.errors import CompileError
from vllm_neuron.trace_record import TensorSpec


def test_the_neff_holds_module_executable_and_manifest():
    module = add_in_place((4, 2))
    neff = Neff.parse(compiled(module, level=3, bucket="decode_s4"))
    assert (neff.name, neff.target, neff.lnc_size) == ("decode_s4", "host", 1)
    assert neff.compiler_version == f"xla-cpu {xla_cpu.jaxlib_version()}"
    assert [(t.name, t.dtype, t.shape) for t in neff.inputs] == [
        ("in0", "float32", (4, 2)),
        ("in1", "float32", (4, 2)),
    ]
    assert [(t.name, t.dtype, t.shape) for t in neff.outputs] == [
        ("out0", "float32", (4, 2)),
        ("out1", "float32", (4, 2)),
    ]
    assert neff.member("host/module.stablehlo") == module.data
    manifest = HostManifest.from_json(neff.member("host/manifest.json"))
    assert manifest.jaxlib == _jax_version()
    assert manifest.cpu == xla_cpu.cpu_features()
    assert manifest.kernels == host_kernels.VERSION
    assert manifest.aliases == {0: 0}
    assert manifest.arguments[-2:] == ("-O3", "--auto-cast=none")
    assert manifest.options == {
        "xla_allow_excess_precision": False,
        "xla_backend_optimization_level": 3,
        "xla_cpu_enable_fast_math": False,
        "xla_cpu_enable_fast_min_max": False,
    }
    assert neff.warnings == []


def _jax_version():
    import jaxlib

    return jaxlib.__version__


def test_equal_input_gives_the_same_module_and_manifest():
    first, second = (Neff.parse(compiled(reverse("int32", (3,)))) for _ in range(2))
    for name in ("host/manifest.json", "host/module.stablehlo"):
        assert first.member(name) == second.member(name)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_level_reaches_the_compiler(level, tmp_path):
    """XLA's own record of the options that differ from its defaults shows the level it used."""
    xla_cpu.compile_module(
        linear(2, 8, 4).data,
        {**xla_cpu.options_for_level(level), "xla_dump_to": str(tmp_path)},
        module_format="stablehlo",
    )
    (flags,) = tmp_path.glob("*.debug_options")
    recorded = dict(line.split(": ", 1) for line in flags.read_text().splitlines())
    assert recorded.get("xla_backend_optimization_level", "3") == str(level)
    assert recorded["xla_allow_excess_precision"] == "false"


def test_an_option_that_xla_does_not_know_is_refused():
    with pytest.raises(xla_cpu.XlaError, match="No such compile option: 'xla_no_such_option'"):
        xla_cpu.compile_module(
            reverse("int32", (3,)).data, {"xla_no_such_option": True}, module_format="stablehlo"
        )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "MLIR module must have a main function"),
        (b"not a module", "custom op 'not' is unknown"),
        (b"ML\xefR" + bytes(40), "duplicate top-level section"),
        (reverse("int32", (3,)).data[:-20], ""),
        (
            b"module { func.func @other() { return } }",
            "MLIR module must have a main function",
        ),
        (
            b"module { func.func @main(%a: tensor<?xf32>) -> tensor<?xf32> "
            b"{ return %a : tensor<?xf32> } }",
            "",
        ),
        (
            b"module { func.func @main(%a: tensor<3xi32>) -> tensor<3xi32> "
            b"{ %0 = stablehlo.custom_call @nowhere(%a) : (tensor<3xi32>) -> tensor<3xi32> "
            b"return %0 : tensor<3xi32> } }",
            "nowhere",
        ),
    ],
)
def test_a_bad_module_is_an_error_with_its_parts(data, reason):
    module = replace(reverse("int32", (3,)), data=data)
    with pytest.raises(CompileError) as caught:
        compiled(module, bucket="prefill_s128")
    error = caught.value
    assert str(error).startswith("bucket prefill_s128: the host compiler (XLA:CPU of jaxlib ")
    assert reason in error.reason
    assert len(error.reason) <= 600
    assert "\n" not in str(error)
    assert (error.bucket, error.exit_code, error.log_path) == ("prefill_s128", None, None)
    assert error.command[:3] == ("xla-cpu", "--framework", "XLA")


def test_a_module_that_is_not_what_it_is_declared_to_be():
    module = add_in_place((4, 2))
    wrong_type = replace(module, inputs=(TensorSpec((4, 2), "int32"), module.inputs[1]))
    with pytest.raises(
        CompileError, match=r"inputs are \(f32\[4,2\], f32\[4,2\]\), expected \(s32"
    ):
        compiled(wrong_type)
    wrong_shape = replace(module, outputs=(module.outputs[0], TensorSpec((2, 4), "float32")))
    with pytest.raises(CompileError, match=r"outputs are .* expected \(f32\[4,2\], f32\[2,4\]\)"):
        compiled(wrong_shape)
    with pytest.raises(CompileError, match=r"aliases outputs to inputs \{0: 0\}, expected \{\}"):
        compiled(replace(module, aliases={}))
    plain = reverse("float32", (4,))
    with pytest.raises(CompileError, match=r"aliases outputs to inputs \{\}, expected \{0: 0\}"):
        compiled(replace(plain, aliases={0: 0}))


def test_every_dtype_is_declared_as_xla_has_it():
    kinds = {
        "float64": "f64",
        "bfloat16": "bf16",
        "float8_e4m3fn": "f8E4M3FN",
        "float8_e5m2": "f8E5M2",
        "uint8": "ui8",
        "bool": "i1",
        "complex64": "complex<f32>",
    }
    types = ", ".join(f"tensor<2x{kind}>" for kind in kinds.values())
    names = [f"%a{index}" for index in range(len(kinds))]
    arguments = ", ".join(
        f"{name}: tensor<2x{kind}>" for name, kind in zip(names, kinds.values(), strict=True)
    )
    module = lowered(f"({arguments}) -> ({types})", f"return {', '.join(names)} : {types}")
    neff = Neff.parse(compiled(module))
    assert [tensor.dtype for tensor in neff.outputs] == list(kinds)


def test_key_factors_name_options_but_neither_processor_nor_threads(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    plain = HostCompiler().key_factors()
    assert sorted(plain) == [
        "compiler",
        "host-kernels",
        "host-program-format",
        "target",
        "version",
        "xla-options",
    ]
    assert plain["host-kernels"] == str(host_kernels.VERSION)
    assert (plain["compiler"], plain["target"]) == ("xla-cpu", "host")
    assert plain["version"] == xla_cpu.jaxlib_version()
    assert [o["xla_backend_optimization_level"] for o in json.loads(plain["xla-options"])] == [
        1,
        2,
        3,
    ]
    for variable in ("OMP_NUM_THREADS", "NPROC"):
        monkeypatch.setenv(variable, "7")
    assert HostCompiler().key_factors() == plain
    monkeypatch.setenv("XLA_FLAGS", "  --xla_cpu_prefer_vector_width=512  ")
    assert HostCompiler().key_factors() == {
        **plain,
        "xla-flags": "--xla_cpu_prefer_vector_width=512",
    }


def test_a_manifest_survives_its_json_and_a_bad_one_is_refused():
    manifest = HostManifest(
        jaxlib="0.10.2",
        cpu="x86_64 avx2",
        options={"a": True, "b": 2},
        kernels=7,
        arguments=("-O1",),
        aliases={11: 3, 2: 1},
    )
    assert HostManifest.from_json(manifest.to_json()) == manifest
    fields = json.loads(manifest.to_json())
    for name, value in (
        ("format", 1),
        ("kernels", None),
        ("kernels", True),
        ("jaxlib", None),
        ("cpu", 3),
        ("options", {"a": "x"}),
        ("options", []),
        ("arguments", "-O1"),
        ("arguments", [1]),
        ("aliases", {"x": 1}),
        ("aliases", {"0": "1"}),
        ("aliases", {"0": True}),
    ):
        with pytest.raises(ValueError, match="manifest of a host program: expected"):
            HostManifest.from_json(json.dumps({**fields, name: value}).encode())
    for data in (b"", b"{", b"[]", b"\xff"):
        with pytest.raises(ValueError):
            HostManifest.from_json(data)


def test_compiling_needs_neither_jax_nor_torch():
    """The product environment has jaxlib without jax."""
    program = """
import importlib.abc, sys
class NoJax(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("jax", "torch"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoJax())
from tests.compiler.modules import compiled, reverse
from vllm_neuron._core import Neff
print(Neff.parse(compiled(reverse("bfloat16", (2, 3)))).target)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert (run.stdout, run.returncode) == ("host\n", 0), run.stderr


def test_xla_is_quiet_about_finding_a_processor():
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    run = subprocess.run(
        [sys.executable, "-c", "from vllm_neuron.compiler import xla_cpu; xla_cpu.client()"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert (run.stdout, run.stderr, run.returncode) == ("", "", 0)


def test_short_reason_keeps_the_head_of_a_long_message():
    error = RuntimeError("INTERNAL: first\n\n  second  \nthird\nfourth")
    assert xla_cpu.short_reason(error) == "INTERNAL: first | second | third"
    assert xla_cpu.short_reason(RuntimeError("x" * 5000)) == "x" * 596 + " ..."
    assert xla_cpu.short_reason(RuntimeError("")) == "RuntimeError"
