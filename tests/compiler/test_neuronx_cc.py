"""The driver of neuronx-cc against a stand-in that takes the documented command line only.

Nothing here ran a real neuronx-cc: that is what docs/hardware.md has a check list for.
"""

import json
import logging
import os
import shlex
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.compiler.modules import add_in_place, linear, lowered, reverse, write_rows
from tests.stand_ins.compilers import STAND_IN_CC, compiler_environment
from tests.stand_ins.device_neff import as_host_neff
from tests.stand_ins.modules import read_module
from vllm_neuron._core import Neff
from vllm_neuron.compiler.base import compiler_arguments
from vllm_neuron.compiler.module_files import module_file
from vllm_neuron.compiler.neuronx_cc import NeuronxCompiler, find_neuronx_cc
from vllm_neuron.compiler.neuronx_failures import Outcome, diagnose
from vllm_neuron.errors import CompileError, ConfigurationError
from vllm_neuron.lowering.module import LoweredModule
from vllm_neuron.runtime.host import HostRuntime
from vllm_neuron.trace_record import TensorSpec

VERSION = "2.28.7631.0+stand-in"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, tmp_path):
    for name, value in compiler_environment(STAND_IN_CC_CALLS=str(tmp_path / "calls")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)


def compiler(tmp_path, **options):
    return NeuronxCompiler(**{"target": "trn2", "work_root": tmp_path / "work", **options})


def compiled(driver, module, *, extra=None, bucket="decode_s1"):
    return driver.compile(
        module,
        bucket=bucket,
        arguments=compiler_arguments(2, extra=extra, target=driver.target).arguments,
        input_names=[f"in{index}" for index in range(len(module.inputs))],
        output_names=[f"out{index}" for index in range(len(module.outputs))],
    )


def calls(tmp_path):
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def refused(tmp_path, monkeypatch, failure, **options):
    monkeypatch.setenv("STAND_IN_CC_FAILURE", failure)
    with pytest.raises(CompileError) as caught:
        compiled(compiler(tmp_path, **options), reverse("float32", (4,)))
    return caught.value


def hlo(module):
    """The same module as the XLA route hands it over."""
    return LoweredModule(
        "XLA",
        module_file(module, "hlo", native_int64=True)[1],
        module.inputs,
        module.outputs,
        module.aliases,
    )


# --- what goes right -----------------------------------------------------------------------------


@pytest.mark.parametrize("input_format", ["stablehlo", "hlo"])
def test_a_module_becomes_a_neff_for_the_target(tmp_path, input_format, caplog):
    driver = compiler(tmp_path, input_format=input_format)
    module = add_in_place((4, 2))
    with caplog.at_level(logging.INFO):
        data = compiled(driver, module)
    neff = Neff.parse(data)
    assert (neff.target, neff.lnc_size, neff.compiler_version) == ("stand-in-cayman", 2, VERSION)
    assert neff.warnings == []
    (call,) = calls(tmp_path)
    suffix = {"stablehlo": "mlir", "hlo": "hlo"}[input_format]
    assert call["arguments"] == shlex.split(
        f"compile module.{suffix} --framework XLA --target trn2 --model-type transformer --lnc 2 "
        "-O2 --auto-cast=none --output file.neff --logfile log-neuron-cc.txt"
    )
    # A private folder, which is gone.
    assert Path(call["folder"]).parent == tmp_path / "work"
    assert list((tmp_path / "work").iterdir()) == []
    run = driver.runs["decode_s1"]
    assert (run.status, run.stalled) == (0, False)
    assert 0 < run.cpu_s <= run.wall_s * (os.cpu_count() or 1)
    assert run.peak_bytes > 50 << 20
    assert "neuronx-cc compiled decode_s1 in " in caplog.text
    # It computes what the module says, updates in place included.
    runtime = HostRuntime()
    model = runtime.load(as_host_neff(data), aliases={0: 0}, bucket="b")
    state = runtime.upload(torch.ones(4, 2))
    outputs = model.execute([state, torch.full((4, 2), 2.0)])
    assert outputs[0] is state
    assert state.read().tolist() == [[3.0, 3.0]] * 4
    assert outputs[1].read().tolist() == [[4.0, 4.0]] * 4


def test_hlo_of_the_xla_route_goes_as_it_is(tmp_path):
    module = hlo(write_rows(8, 4, 2))
    assert module_file(module, "stablehlo") == ("module.hlo", module.data)
    neff = Neff.parse(compiled(compiler(tmp_path), module))
    assert [(t.name, tuple(t.shape)) for t in neff.inputs] == [
        ("input0", (8, 4)),
        ("input1", (2, 4)),
        ("input2", (2, 1)),
    ]


def test_the_converter_keeps_aliases_as_must_alias():
    from jaxlib import xla_client

    name, data = module_file(write_rows(8, 4, 2), "hlo")
    assert name == "module.hlo"
    header = xla_client.XlaComputation(data).as_hlo_text().partition("\n")[0]
    assert "input_output_alias={ {0}: (0, {}, must-alias) }" in header


def test_flags_are_appended_and_the_right_most_wins(tmp_path):
    compiled(compiler(tmp_path), reverse("float32", (4,)), extra="-O1 --lnc=1 --verbose=35")
    (call,) = calls(tmp_path)
    assert "-O1" in call["arguments"] and "-O2" not in call["arguments"]
    assert "--verbose=35" in call["arguments"]


def test_the_variable_itself_does_not_reach_the_compiler(tmp_path, monkeypatch):
    script = tmp_path / "neuronx-cc"
    script.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'NeuronX Compiler version 2.28.1.0' && exit\n"
        "echo flags: $NEURON_CC_FLAGS.\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("VLLM_NEURON_CC", str(script))
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    with pytest.raises(CompileError, match="flags: \\."):
        compiled(compiler(tmp_path), reverse("float32", (4,)))


def test_runs_at_the_same_time_do_not_meet(tmp_path):
    driver, neffs = compiler(tmp_path), {}

    def run(size):
        neffs[size] = compiled(driver, reverse("float32", (size,)), bucket=f"b{size}")

    threads = [threading.Thread(target=run, args=(size,)) for size in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {s: tuple(Neff.parse(n).inputs[0].shape) for s, n in neffs.items()} == {2: (2,), 3: (3,)}
    assert len({call["folder"] for call in calls(tmp_path)}) == 2


@pytest.mark.parametrize(
    ("target", "lnc", "architecture"),
    [("trn1", 1, "sunda"), ("inf2", 1, "sunda"), ("trn2", 2, "cayman"), ("trn3", 2, "mariana")],
)
def test_the_default_logical_core_of_a_target(tmp_path, target, lnc, architecture):
    neff = Neff.parse(compiled(compiler(tmp_path, target=target), reverse("float32", (4,))))
    assert (neff.target, neff.lnc_size) == (f"stand-in-{architecture}", lnc)


# --- finding it ----------------------------------------------------------------------------------


def test_found_by_variable_then_path_then_scripts(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/neuronx-cc").symlink_to(STAND_IN_CC)
    both = {"VLLM_NEURON_CC": str(STAND_IN_CC), "PATH": str(tmp_path / "bin")}
    assert find_neuronx_cc(both).found_by == "VLLM_NEURON_CC"
    found = find_neuronx_cc({"PATH": str(tmp_path / "bin")})
    assert (found.executable, found.found_by) == (tmp_path / "bin/neuronx-cc", "PATH")
    assert found.version == VERSION
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "bin"))
    found = find_neuronx_cc({"PATH": "/nowhere"})
    assert found.found_by == "the scripts of this Python environment"


def test_no_compiler(tmp_path):
    with pytest.raises(ConfigurationError, match="neuronx-cc is not found: not on PATH"):
        find_neuronx_cc({"PATH": str(tmp_path)})
    with pytest.raises(ConfigurationError, match="is not an executable file"):
        find_neuronx_cc({"VLLM_NEURON_CC": str(tmp_path / "absent")})


@pytest.mark.parametrize(
    ("text", "reason"),
    [("echo hello", "does not tell a version.*'hello'"), ("exit 3", "exit code 3")],
)
def test_something_that_is_no_neuronx_cc(tmp_path, text, reason):
    script = tmp_path / "neuronx-cc"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    with pytest.raises(ConfigurationError, match=reason):
        find_neuronx_cc({"VLLM_NEURON_CC": str(script)})


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.26.9.0", "hlo"), ("2.27.5334.0", "stablehlo"), ("3.0.1.0", "stablehlo")],
)
def test_the_version_decides_what_it_is_given(tmp_path, version, expected):
    script = tmp_path / "neuronx-cc"
    script.write_text(f"#!/bin/sh\necho 'NeuronX Compiler version {version}+1897edc9'\n")
    script.chmod(0o755)
    found = find_neuronx_cc({"VLLM_NEURON_CC": str(script)})
    assert (found.version, found.input_format) == (f"{version}+1897edc9", expected)
    factors = NeuronxCompiler(target="trn2", installation=found).key_factors()
    assert factors == {
        "compiler": "neuronx-cc",
        "version": f"{version}+1897edc9",
        "target": "trn2",
        "input-format": expected,
        "module-rules": "1",
    }


def test_an_unknown_target_is_refused():
    with pytest.raises(ConfigurationError, match="'trn9' is not a target of neuronx-cc; known are"):
        NeuronxCompiler(target="trn9")


# --- what goes wrong: each outcome, by the stand-in ----------------------------------------------


@pytest.mark.parametrize(
    ("failure", "outcome", "exit_code", "code", "said"),
    [
        ("unsupported operator", Outcome.UNSUPPORTED_OPERATOR, 70, "NCC_EUOC002", "list-operators"),
        ("device memory", Outcome.DEVICE_MEMORY, 70, "NCC_EVRF009", "--gpu-memory-utilization"),
        ("instructions", Outcome.COMPILE_ERROR, 70, "NCC_EBVF030", "too many instructions"),
        ("internal error", Outcome.INTERNAL_ERROR, 70, None, "try another level"),
        ("out of memory", Outcome.HOST_MEMORY, 70, None, "PARALLEL_COMPILE_WORKERS"),
        ("out of memory exit", Outcome.HOST_MEMORY, 137, None, "PARALLEL_COMPILE_WORKERS"),
        ("out of memory signal", Outcome.HOST_MEMORY, -9, None, "signal 9 (SIGKILL)"),
        ("abort", Outcome.ABORTED, -6, None, "signal 6 (SIGABRT)"),
        ("abort of a part", Outcome.ABORTED, 70, None, "a part of it ended by 6 (SIGABRT)"),
        ("segmentation fault", Outcome.SEGMENTATION_FAULT, -11, None, "signal 11 (SIGSEGV)"),
        ("segmentation fault of a part", Outcome.SEGMENTATION_FAULT, 70, None, "11 (SIGSEGV)"),
        ("exit code 1", Outcome.COMPILE_ERROR, 1, None, "something went wrong"),
        ("no neff", Outcome.NO_NEFF, 0, None, "exit code 0, no file.neff"),
        ("torn", Outcome.BAD_NEFF, 0, None, "expected"),
        ("other target", Outcome.OTHER_TARGET, 0, None, "found 'stand-in-mariana'"),
        ("other lnc", Outcome.OTHER_LNC, 0, None, "expected 2, found 1"),
    ],
)
def test_each_failure_is_told_apart(tmp_path, monkeypatch, failure, outcome, exit_code, code, said):
    error = refused(tmp_path, monkeypatch, failure)
    assert (error.outcome, error.exit_code, error.code) == (outcome, exit_code, code)
    text = str(error)
    assert text.startswith(f"bucket decode_s1: {outcome} (")
    assert said in text and error.advice in text
    assert f"neuronx-cc {VERSION}, target trn2, " in text
    # The folder stays, with what is needed to do it again by hand.
    folder = Path(error.work_folder)
    assert f"kept: {folder}" in text
    assert (folder / "command.txt").read_text() == shlex.join(error.command) + "\n"
    assert (folder / "module.mlir").read_text().startswith("module")
    assert Path(error.log_path).parent == folder


def test_the_model_line_and_the_last_lines_of_the_log_are_in_the_message(tmp_path, monkeypatch):
    error = refused(tmp_path, monkeypatch, "unsupported operator")
    assert error.source == "modeling.py:41"
    assert ", at modeling.py:41 of the model; " in str(error)
    assert str(error).endswith(
        "last lines of its log:\n  step 1\n  step 2\n"
        "  ERROR: [NCC_EUOC002] Unsupported operator: stablehlo.custom_call at modeling.py:41"
    )


@pytest.mark.parametrize(
    "extra", ["--no-such-option", "--auto-cast=some", "--native-int64=yes", "--model-typ generic"]
)
def test_a_bad_flag(tmp_path, extra):
    with pytest.raises(CompileError) as caught:
        compiled(compiler(tmp_path), reverse("float32", (4,)), extra=extra)
    assert (caught.value.outcome, caught.value.exit_code) == (Outcome.BAD_ARGUMENT, 2)
    assert "check the options in NEURON_CC_FLAGS" in str(caught.value)


def test_a_logical_core_that_the_target_does_not_have(tmp_path):
    with pytest.raises(CompileError) as caught:
        compiled(compiler(tmp_path, target="trn1"), reverse("float32", (4,)), extra="--lnc 2")
    assert (caught.value.outcome, caught.value.code) == (Outcome.BAD_ARGUMENT, "NCC_EARG001")


def test_a_standstill_is_ended_with_all_its_processes(tmp_path, monkeypatch):
    started = time.monotonic()
    error = refused(tmp_path, monkeypatch, "stall", stall_s=1.0)
    assert time.monotonic() - started < 20
    assert (error.outcome, error.exit_code) == (Outcome.STALLED, -signal.SIGKILL)
    assert "1 s without output and without processor time" in str(error)
    assert str(error).endswith("last lines of its log:\n  waiting")
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            assert b"stand_ins/compiler.py" not in command


def test_stop_kills_the_compilers_that_run(tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_CC_FAILURE", "stall")
    driver = compiler(tmp_path)
    # The stand-in has begun once it has said something.
    timer = threading.Timer(2.0, driver.stop)
    timer.start()
    started = time.monotonic()
    with pytest.raises(CompileError) as caught:
        compiled(driver, reverse("float32", (4,)))
    assert time.monotonic() - started < 20
    assert caught.value.exit_code == -signal.SIGKILL
    timer.join()


def test_work_without_output_is_no_standstill(tmp_path, monkeypatch):
    script = tmp_path / "neuronx-cc"
    script.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'NeuronX Compiler version 2.28.1.0' && exit\n"
        "timeout 2 sh -c 'while :; do :; done'\nexit 9\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("VLLM_NEURON_CC", str(script))
    with pytest.raises(CompileError) as caught:
        compiled(compiler(tmp_path, stall_s=1.0), reverse("float32", (4,)))
    assert caught.value.exit_code == 9


def test_a_compiler_that_cannot_be_started(tmp_path, monkeypatch):
    script = tmp_path / "neuronx-cc"
    script.write_text("#!/bin/sh\necho 'NeuronX Compiler version 2.28.1.0'\n")
    script.chmod(0o755)
    monkeypatch.setenv("VLLM_NEURON_CC", str(script))
    driver = compiler(tmp_path)
    script.unlink()
    with pytest.raises(CompileError) as caught:
        compiled(driver, reverse("float32", (4,)))
    assert (caught.value.outcome, caught.value.exit_code) == (Outcome.NOT_STARTED, None)


def test_other_inputs_than_the_module(tmp_path):
    module = linear(2, 3, 4)
    wrong = LoweredModule(
        module.route, module.data, module.inputs, (TensorSpec((2, 5), "float32"),), {}
    )
    with pytest.raises(CompileError) as caught:
        compiled(compiler(tmp_path), wrong)
    assert caught.value.outcome is Outcome.OTHER_SIGNATURE
    assert "output 0 (output0): expected float32[2, 5], found float32[2, 4]" in str(caught.value)


# --- what is refused before the compiler runs ----------------------------------------------------


def constant(text, dtype="i64"):
    kind = f"tensor<2x{dtype}>"
    return lowered(
        f"(%a: {kind}) -> ({kind})",
        f"%c = stablehlo.constant dense<{text}> : {kind}\n"
        f"%0 = stablehlo.add %a, %c : {kind}\nreturn %0 : {kind}",
    )


def double_inside():
    return lowered(
        "(%a: tensor<2xf32>) -> (tensor<2xf32>)",
        "%0 = stablehlo.convert %a : (tensor<2xf32>) -> tensor<2xf64>\n"
        "%1 = stablehlo.convert %0 : (tensor<2xf64>) -> tensor<2xf32>\nreturn %1 : tensor<2xf32>",
    )


def dynamic():
    module = lowered(
        "(%a: tensor<2xf32>, %n: tensor<1xi32>) -> (tensor<?xf32>)",
        "%0 = stablehlo.dynamic_iota %n, dim = 0 : (tensor<1xi32>) -> tensor<?xf32>\n"
        "return %0 : tensor<?xf32>",
    )
    return replace(module, outputs=(TensorSpec((2,), "float32"),))


@pytest.mark.parametrize("make", [lambda module: module, hlo], ids=["native", "XLA"])
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (constant("[1, 2147483648]"), "a constant tensor<2xi64> holds 2147483648"),
        (constant("-2147483649"), "holds -2147483649"),
        (constant("4294967296", "ui64"), r"a constant tensor<(2x)?ui64> holds 4294967296"),
        (reverse("float64", (2,)), r"input 0 is float64\[2\]"),
        (double_inside(), r"is a 64-bit float \(tensor<2xf64>\)"),
    ],
)
def test_modules_that_the_target_cannot_take(tmp_path, make, module, reason):
    with pytest.raises(CompileError, match=reason) as caught:
        compiled(compiler(tmp_path), make(module))
    error = caught.value
    assert str(error).startswith(
        "bucket decode_s1: the module cannot be compiled for this target trn2: "
    )
    assert (error.outcome, error.exit_code, error.command, error.work_folder) == (
        *(Outcome.MODULE_REFUSED, None, None, None),
    )
    assert not (tmp_path / "calls").exists()


def test_a_dynamic_dimension_is_refused(tmp_path):
    with pytest.raises(CompileError, match=r"dimension 0 of result 0 of stablehlo\.dynamic_iota"):
        compiled(compiler(tmp_path), dynamic())


def test_bytes_that_are_no_module(tmp_path):
    module = reverse("float32", (2,))
    bad = LoweredModule("native", b"ML\xefR no", module.inputs, module.outputs, {})
    with pytest.raises(CompileError, match="it cannot be read"):
        compiled(compiler(tmp_path), bad)


def test_an_extreme_without_a_dimension():
    module = lowered(
        "(%a: tensor<i64>) -> (tensor<i64>)",
        "%c = stablehlo.constant dense<-9223372036854775808> : tensor<i64>\n"
        "%0 = stablehlo.maximum %a, %c : tensor<i64>\nreturn %0 : tensor<i64>",
    )
    _, text = module_file(module, "stablehlo")
    assert b"dense<-2147483648> : tensor<i64>" in text
    assert module_file(module, "hlo")[0] == "module.hlo"


@pytest.mark.parametrize("make", [lambda module: module, hlo], ids=["native", "XLA"])
def test_extremes_become_those_of_32_bits(tmp_path, make):
    """Reductions start from them; what the compiler would make of them is undocumented."""
    kind = "tensor<2xi64>"
    module = lowered(
        f"(%a: {kind} {{tf.aliasing_output = 0 : i32}}) -> ({kind})",
        f"%c = stablehlo.constant dense<[-9223372036854775808, 7]> : {kind}\n"
        f"%d = stablehlo.constant dense<9223372036854775807> : {kind}\n"
        f"%0 = stablehlo.maximum %a, %c : {kind}\n"
        f"%1 = stablehlo.minimum %0, %d : {kind}\nreturn %1 : {kind}",
    )
    data = compiled(compiler(tmp_path), make(module))
    host = HostRuntime().load(as_host_neff(data), aliases={0: 0}, bucket="b")
    for given, expected in (([-5, 5], [-5, 7]), ([-(2**40), 2**40], [-(2**31), 2**31 - 1])):
        (output,) = host.execute([torch.tensor(given)])
        assert output.read().tolist() == expected
    native = compiled(compiler(tmp_path), make(module), extra="--native-int64 enabled")
    host = HostRuntime().load(as_host_neff(native), aliases={0: 0}, bucket="b")
    (output,) = host.execute([torch.tensor([-(2**40), 2**40])])
    assert output.read().tolist() == [-(2**40), 2**40]


def test_constants_within_32_bits_pass(tmp_path):
    compiled(compiler(tmp_path), constant("[-2147483648, 2147483647]"))


def test_native_64_bit_integers_take_any_constant(tmp_path):
    compiled(compiler(tmp_path), constant("9007199254740993"), extra="--native-int64 enabled")
    with pytest.raises(CompileError, match="--native-int64 enabled does not exist for target trn1"):
        compiled(
            compiler(tmp_path, target="trn1"), constant("1"), extra="--native-int64 enabled --lnc 1"
        )


# --- reading logs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "source"),
    [
        ('%a = f32[] add(), metadata={source_file="model/a.py" source_line=7}', "model/a.py:7"),
        ('loc("model/b.py":12:3): error', "model/b.py:12"),
        ("at /opt/neuronxcc/driver/x.py:99\n", None),
        ("first a.py:1 then b.py:2", "b.py:2"),
    ],
)
def test_the_model_line_in_a_log(log, source):
    assert diagnose(70, log).source == source


def test_the_last_code_counts():
    found = diagnose(70, "[NCC_EVRF004] warning\n[NCC_EOOM001] error")
    assert (found.code, found.outcome) == ("NCC_EOOM001", Outcome.DEVICE_MEMORY)


@pytest.mark.parametrize("code", ["IXYZ123", "ITIN902"])
def test_codes_of_internal_errors(code):
    assert diagnose(70, f"[NCC_{code}]").outcome is Outcome.INTERNAL_ERROR


def test_a_refusal_survives_pickling(tmp_path, monkeypatch):
    import pickle

    error = refused(tmp_path, monkeypatch, "device memory")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.outcome, copy.code) == (str(error), error.outcome, "NCC_EVRF009")


@pytest.mark.parametrize("suffix", ["mlir", "hlo"])
def test_the_modules_of_the_hardware_check_list(suffix):
    golden = read_module(Path(__file__).parents[1] / f"golden/hardware/add.{suffix}")
    module = add_in_place((128, 64))
    assert (golden.inputs, golden.outputs, golden.aliases) == (
        module.inputs,
        module.outputs,
        module.aliases,
    )
