"""The host runtime: loading and refusing NEFFs, execution, updates in place, failures."""

import gc
import logging
import mmap
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.compiler.modules import (
    add_in_place,
    compiled,
    linear,
    lowered,
    manifest_with,
    reverse,
    with_members,
    write_rows,
)
from tests.neff.samples import SHARED
from vllm_neuron._core import Neff
from vllm_neuron.compiler import host_kernels, xla_cpu
from vllm_neuron.errors import ExecutionError, NeffChecksumError, NeffFormatError
from vllm_neuron.runtime.host import HostRuntime


@pytest.fixture
def runtime():
    return HostRuntime()


def loaded(runtime, module, *, bucket="decode_s1"):
    return runtime.load(compiled(module), aliases=module.aliases, bucket=bucket)


# --- loading -----------------------------------------------------------------------------------


def test_a_neff_is_loaded_from_mapped_pages(runtime, tmp_path):
    path = tmp_path / "reverse.neff"
    path.write_bytes(compiled(reverse("int64", (3,))))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        view = memoryview(pages)
        model = runtime.load(view, aliases={}, bucket="b")
        view.release()
        gc.collect()
    # The map is closed: the model keeps nothing of the file.
    (output,) = model.execute([torch.tensor([1, 2, 2**40])])
    assert output.read().tolist() == [2**40, 2, 1]
    assert [(t.name, t.dtype, t.shape) for t in model.inputs] == [("in0", "int64", (3,))]
    assert [(t.name, t.dtype, t.shape) for t in model.outputs] == [("out0", "int64", (3,))]
    assert runtime.counters == {
        "executables_loaded": 1,
        "executables_rebuilt": 0,
        "executions": 1,
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda neff: manifest_with(neff, jaxlib="0.9.9"),
            f"it was made by jaxlib 0.9.9, here is {xla_cpu.jaxlib_version()}",
        ),
        (
            lambda neff: manifest_with(neff, cpu="x86_64 avx2 sse9"),
            "it was made for another processor",
        ),
        (
            lambda neff: manifest_with(neff, kernels=0),
            f"it was made for version 0 of the host kernels, here is {host_kernels.VERSION}",
        ),
        (
            lambda neff: with_members(neff, executable=b"no executable"),
            "it cannot be loaded (INVALID_ARGUMENT: Failed to parse SerializedXlaExecutable",
        ),
        (
            lambda neff: with_members(neff, executable=None),
            "it cannot be loaded (",
        ),
    ],
)
def test_an_executable_that_cannot_run_here_is_rebuilt(runtime, caplog, change, reason):
    module = linear(2, 64, 4)
    neff = change(compiled(module))
    x, weight = torch.randn(2, 64), torch.randn(4, 64)
    (expected,) = loaded(HostRuntime(), module).execute([x, weight])
    with caplog.at_level(logging.INFO, "vllm_neuron.runtime.host"):
        first = runtime.load(neff, aliases={}, bucket="decode_s2")
        runtime.load(neff, aliases={}, bucket="decode_s4")
    assert torch.equal(first.execute([x, weight])[0].read(), expected.read())
    assert runtime.counters["executables_rebuilt"] == 2
    assert runtime.counters["executables_loaded"] == 0
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith(
        "Host emulator: the executable in the NEFF of bucket decode_s2 is compiled again from its "
        f"module, because {reason}"
    )


def test_buckets_can_be_loaded_from_several_threads(runtime):
    module = linear(2, 64, 4)
    neffs = [compiled(module), manifest_with(compiled(module), jaxlib="0.9.9")] * 4
    with ThreadPoolExecutor(4) as pool:
        models = list(
            pool.map(lambda neff: runtime.load(neff, aliases={}, bucket="decode_s2"), neffs)
        )
    x, weight = torch.randn(2, 64), torch.randn(4, 64)
    first, *others = [model.execute([x, weight])[0].read() for model in models]
    assert all(torch.equal(first, other) for other in others)
    assert runtime.counters == {
        "executables_loaded": 4,
        "executables_rebuilt": 4,
        "executions": 8,
    }


def test_a_rebuilt_executable_updates_in_place_too(runtime):
    module = add_in_place((4, 4))
    neff = manifest_with(compiled(module), jaxlib="0.9.9")
    model = runtime.load(neff, aliases={0: 0}, bucket="b")
    state = runtime.allocate((4, 4), "float32")
    address = state.data_ptr()
    for _ in range(2):
        assert model.execute([state, torch.ones(4, 4)])[0] is state
    assert state.data_ptr() == address
    assert torch.equal(state.read(), torch.full((4, 4), 2.0))


def test_a_neff_for_a_device_is_refused(runtime):
    """bugs G04."""
    path = sorted((SHARED / "neff-samples").rglob("*.neff"))[0]
    target = Neff.parse(path.read_bytes()).target
    with pytest.raises(ExecutionError) as caught:
        runtime.load(path.read_bytes(), aliases={}, bucket="decode_s1")
    assert f"is for target {target!r}; this is the host emulator" in str(caught.value)
    assert (caught.value.bucket, caught.value.status) == ("decode_s1", 2)
    assert target in ("sunda", "cayman", "mariana")


def test_a_neff_for_another_emulator_is_refused(runtime):
    neff = with_members(compiled(reverse("int32", (3,))), target="simulator")
    with pytest.raises(ExecutionError, match="for target 'simulator'; this is the host emulator"):
        runtime.load(neff, aliases={}, bucket="b")


def test_a_damaged_neff_is_refused_before_anything_is_loaded(runtime):
    neff = compiled(reverse("int32", (3,)))
    executable = Neff.parse(neff).member("host/executable.xla")
    position = neff.index(executable) + len(executable) // 2
    flipped = bytearray(neff)
    flipped[position] ^= 1
    with pytest.raises(NeffChecksumError):
        runtime.load(bytes(flipped), aliases={}, bucket="b")
    for cut in (0, 100, 1024, len(neff) // 2, len(neff) - 1):
        with pytest.raises(NeffFormatError):
            runtime.load(neff[:cut], aliases={}, bucket="b")
    assert runtime.counters["executables_loaded"] == 0


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"manifest": None}, "holds no program of the host emulator"),
        ({"manifest": b"{}"}, "expected format 2, found None"),
        ({"manifest": b"\xff\xfe"}, "holds no program of the host emulator"),
        ({"executable": b"x", "module": b"y"}, "cannot be compiled: "),
        ({"executable": None, "module": None}, "cannot be compiled: "),
    ],
)
def test_a_neff_without_a_usable_program_is_refused(runtime, members, reason):
    neff = with_members(compiled(reverse("int32", (3,))), **members)
    with pytest.raises(ExecutionError, match=reason) as caught:
        runtime.load(neff, aliases={}, bucket="decode_s1")
    assert str(caught.value).startswith("bucket decode_s1: cannot load: ")
    assert caught.value.status == 2


def test_other_aliases_than_expected_are_refused(runtime):
    with pytest.raises(ExecutionError, match=r"inputs \{0: 0\}, expected \{0: 1\}"):
        runtime.load(compiled(add_in_place((4,))), aliases={0: 1}, bucket="b")


# --- numbers -----------------------------------------------------------------------------------


def test_a_cast_that_the_model_wrote_is_kept(runtime):
    """x.to(bfloat16).float() rounds, as in eager (J16)."""
    kind, narrow = "tensor<1024xf32>", "tensor<1024xbf16>"
    module = lowered(
        f"(%a: {kind}) -> ({kind}, {kind})",
        f"%0 = stablehlo.convert %a : ({kind}) -> {narrow}\n"
        f"%1 = stablehlo.convert %0 : ({narrow}) -> {kind}\n"
        f"%2 = stablehlo.add %0, %0 : {narrow}\n"
        f"%3 = stablehlo.multiply %2, %0 : {narrow}\n"
        f"%4 = stablehlo.convert %3 : ({narrow}) -> {kind}\n"
        f"return %1, %4 : {kind}, {kind}",
    )
    x = torch.randn(1024)
    rounded, product = (o.read() for o in loaded(runtime, module).execute([x]))
    assert torch.equal(rounded, x.bfloat16().float())
    assert torch.equal(product, ((x.bfloat16() + x.bfloat16()) * x.bfloat16()).float())


def test_nan_is_nan_in_minimum_and_maximum(runtime):
    kind = "tensor<3xf32>"
    module = lowered(
        f"(%a: {kind}, %b: {kind}) -> ({kind}, {kind})",
        f"%0 = stablehlo.minimum %a, %b : {kind}\n%1 = stablehlo.maximum %a, %b : {kind}\n"
        f"return %0, %1 : {kind}, {kind}",
    )
    a, b = torch.tensor([float("nan"), 1, 2]), torch.tensor([1, float("nan"), 3])
    low, high = (output.read() for output in loaded(runtime, module).execute([a, b]))
    torch.testing.assert_close(low, torch.minimum(a, b), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(high, torch.maximum(a, b), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 576, 192), (8, 576, 1536), (64, 33, 7)])
def test_a_linear_layer_equals_eager(runtime, rows, inner, columns):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
    (output,) = loaded(runtime, linear(rows, inner, columns)).execute([x, weight])
    expected = torch.nn.functional.linear(x.double(), weight.double()).float()
    torch.testing.assert_close(output.read(), expected, rtol=1e-5, atol=1e-4)


_DIGESTS = """
import hashlib, torch
from tests.compiler.modules import compiled, linear
from vllm_neuron.compiler.host import HostCompiler
from vllm_neuron.runtime.host import HostRuntime
runtime = HostRuntime()
torch.manual_seed(0)
digest = hashlib.sha256()
for shape in ((1, 576, 1536), (2, 16384, 2), (8, 8192, 64), (64, 2048, 64), (128, 576, 576)):
    rows, inner, columns = shape
    model = runtime.load(compiled(linear(*shape)), aliases={}, bucket="b")
    x, weight = torch.randn(rows, inner), torch.randn(columns, inner)
    digest.update(model.execute([x, weight])[0].read().numpy().tobytes())
print(digest.hexdigest(), sorted(HostCompiler().key_factors().items()))
"""


def test_the_number_of_threads_changes_neither_numbers_nor_keys():
    """A25: thread counts are left out of keys, which is right only if they are harmless."""
    outputs = set()
    for threads in ("1", "4"):
        run = subprocess.run(
            [sys.executable, "-c", _DIGESTS],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "NPROC": threads, "OMP_NUM_THREADS": threads},
        )
        assert run.returncode == 0, run.stderr
        outputs.add(run.stdout)
    assert len(outputs) == 1


# --- updates in place --------------------------------------------------------------------------


def test_an_aliased_output_is_its_input_in_the_same_memory(runtime):
    model = loaded(runtime, write_rows(64, 8, 2))
    cache = runtime.allocate((64, 8), "float32")
    address = cache.data_ptr()
    expected = torch.zeros(64, 8)
    for step in range(5):
        rows, slots = torch.full((2, 8), float(step + 1)), torch.tensor([[step], [63 - step]])
        updated, read_back = model.execute([cache, rows, slots])
        assert updated is cache
        assert cache.data_ptr() == address
        assert torch.equal(read_back.read(), rows)
        expected[[step, 63 - step]] = step + 1.0
        assert torch.equal(cache.read(), expected)


def test_a_read_of_memory_that_is_updated_in_place_is_a_copy(runtime):
    model = loaded(runtime, add_in_place((4,)))
    state = runtime.allocate((4,), "float32")
    before = state.read()
    model.execute([state, torch.ones(4)])
    after = state.read()
    model.execute([state, torch.ones(4)])
    assert (before[0], after[0], state.read()[0]) == (0, 1, 2)


def test_an_output_keeps_its_contents_through_later_steps(runtime):
    model = loaded(runtime, add_in_place((4,)))
    state = runtime.allocate((4,), "float32")
    _, first = model.execute([state, torch.ones(4)])
    view = first.read()
    del first
    _, second = model.execute([state, torch.full((4,), 5.0)])
    gc.collect()
    assert torch.equal(view, torch.full((4,), 2.0))
    assert torch.equal(second.read(), torch.full((4,), 10.0))


def test_buckets_share_one_cache(runtime):
    """Weights and KV caches are device tensors that the NEFFs of all buckets use."""
    wide, narrow = loaded(runtime, write_rows(64, 8, 4)), loaded(runtime, write_rows(64, 8, 1))
    cache = runtime.allocate((64, 8), "float32")
    address = cache.data_ptr()
    bound = wide.bind({0: cache}), narrow.bind({0: cache})
    for step in range(3):
        slots = torch.arange(4).view(4, 1) + 4 * step
        assert bound[0].execute([torch.ones(4, 8), slots])[0] is cache
        assert bound[1].execute([torch.full((1, 8), 2.0), slots[:1]])[0] is cache
    assert cache.data_ptr() == address
    assert cache.read()[:, 0].tolist() == [2.0, 1.0, 1.0, 1.0] * 3 + [0.0] * 52


def test_an_uploaded_tensor_moves_once_and_the_torch_tensor_stays(runtime):
    model = loaded(runtime, add_in_place((64,)))
    source = torch.ones(64)
    state = runtime.upload(source)
    assert state.shares_torch_memory
    model.execute([state, torch.ones(64)])
    moved = state.data_ptr()
    assert not state.shares_torch_memory
    assert torch.equal(source, torch.ones(64))
    model.execute([state, torch.ones(64)])
    assert state.data_ptr() == moved
    assert torch.equal(state.read(), torch.full((64,), 3.0))


def test_a_torch_tensor_that_the_step_updates_is_updated(runtime):
    """K01: what eager would change in place is changed."""
    model = loaded(runtime, add_in_place((4,)))
    wide = torch.zeros(8)
    state = wide[::2]
    output, _ = model.execute([state, torch.ones(4)])
    assert wide.tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    assert output.read().tolist() == [1, 1, 1, 1]


def test_a_write_is_seen_by_the_next_step(runtime):
    model = loaded(runtime, add_in_place((4,)))
    state = runtime.allocate((4,), "float32")
    bound = model.bind({0: state})
    bound.execute([torch.ones(4)])
    state.write(torch.full((4,), 10.0))
    bound.execute([torch.ones(4)])
    assert state.read().tolist() == [11, 11, 11, 11]


def test_weights_are_not_consumed(runtime):
    model = loaded(runtime, linear(2, 16, 4))
    weight = torch.randn(4, 16)
    uploaded = runtime.upload(weight)
    bound = model.bind({1: uploaded})
    x = torch.randn(2, 16)
    first = bound.execute([x])[0].read()
    second = bound.execute([x])[0].read()
    assert torch.equal(first, second)
    assert uploaded.data_ptr() == weight.data_ptr()
    assert torch.equal(uploaded.read(), weight)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_a_step_costs_the_same_for_a_large_cache(runtime):
    """K02; benches/decode_step.py measures 64 MiB against 1 GiB."""
    best = {}
    for rows in (16 << 10, 256 << 10):
        bound = loaded(runtime, write_rows(rows, 256, 8)).bind(
            {0: runtime.allocate((rows, 256), "float32")}
        )
        arguments = [torch.ones(8, 256), torch.arange(8).view(8, 1)]
        bound.execute(arguments)
        before, times = resident_bytes(), []
        for _ in range(50):
            started = time.perf_counter()
            (updated, _) = bound.execute(arguments)
            times.append(time.perf_counter() - started)
        assert resident_bytes() - before < updated.nbytes / 4
        best[rows] = min(times)
    small, large = best.values()
    # A copy of the large cache, 256 MiB, takes above 20 ms; a step 50 us.
    assert large < 10 * small + 1e-3


# --- arguments ---------------------------------------------------------------------------------


def test_step_arguments_may_be_overwritten_and_strided_in_any_way(runtime):
    kind = "tensor<4x6xf32>"
    module = lowered(
        f"(%a: {kind}, %b: tensor<i64>) -> ({kind}, tensor<i64>)",
        f"%0 = stablehlo.add %a, %a : {kind}\n%1 = stablehlo.add %b, %b : tensor<i64>\n"
        f"return %0, %1 : {kind}, tensor<i64>",
    )
    model = loaded(runtime, module)
    base = torch.arange(24.0).view(6, 4)
    first = model.execute([base.t(), torch.tensor(2**33)])
    base.fill_(-1)
    second = model.execute([base.t(), torch.tensor(1)])
    assert torch.equal(first[0].read(), 2 * torch.arange(24.0).view(6, 4).t())
    assert first[1].read() == 2**34
    assert torch.equal(second[0].read(), torch.full((4, 6), -2.0))


@pytest.mark.parametrize("offset", [0, 1])
def test_a_large_argument(runtime, offset):
    shape = (513, 1024)
    model = loaded(runtime, reverse("float32", shape))
    x = torch.randn(513 * 1024 + offset)[offset:].view(shape)
    (output,) = model.execute([x])
    assert torch.equal(output.read(), x.flip(0, 1))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([torch.ones(4)], "1 inputs given, expected 2: in0, in1"),
        ([torch.ones(4)] * 3, "3 inputs given, expected 2: in0, in1"),
        (
            [torch.ones(4), torch.ones(4, dtype=torch.int32)],
            r"input 1 \(in1\): expected float32\[4\], found int32\[4\]",
        ),
        (
            [torch.ones(1, 4), torch.ones(4)],
            r"input 0 \(in0\): expected float32\[4\], found float32\[1, 4\]",
        ),
        (
            [torch.ones(4), torch.ones(4, device="meta")],
            r"input 1 \(in1\): expected float32\[4\], found float32\[4\] on meta",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(runtime, arguments, reason):
    model = loaded(runtime, add_in_place((4,)))
    with pytest.raises(ExecutionError, match=f"bucket decode_s1: {reason}$") as caught:
        model.execute(arguments)
    assert caught.value.status == 1002
    assert runtime.counters["executions"] == 0


def test_a_device_tensor_that_does_not_fit_is_refused(runtime):
    model = loaded(runtime, add_in_place((4,)))
    integers = runtime.allocate((4,), "int32")
    with pytest.raises(ExecutionError, match=r"expected float32\[4\], found int32\[4\]"):
        model.bind({0: integers})
    with pytest.raises(ExecutionError, match=r"expected float32\[4\], found int32\[4\]"):
        model.execute([integers, torch.ones(4)])
    with pytest.raises(ExecutionError, match="input 2 cannot be bound, the model has 2 inputs"):
        model.bind({2: runtime.allocate((4,), "float32")})


# --- failures ----------------------------------------------------------------------------------


def too_large():
    """Updates its first input in place and has an output that no machine can allocate."""
    kind, huge = "tensor<4xf32>", "tensor<1048576x1048576x4xf32>"
    return lowered(
        f"(%state: {kind} {{tf.aliasing_output = 0 : i32}}, %x: tensor<f32>) -> ({kind}, {huge})",
        f"%0 = stablehlo.add %state, %state : {kind}\n"
        f"%1 = stablehlo.broadcast_in_dim %x, dims = [] : (tensor<f32>) -> {huge}\n"
        f"return %0, %1 : {kind}, {huge}",
    )


def test_a_failed_execution_says_which_tensors_it_took(runtime):
    model = loaded(runtime, too_large(), bucket="prefill_s8")
    state, x = runtime.allocate((4,), "float32"), runtime.upload(torch.tensor(1.0))
    with pytest.raises(ExecutionError) as caught:
        model.execute([state, x])
    error = caught.value
    assert str(error) == (
        "bucket prefill_s8: the execution failed: RESOURCE_EXHAUSTED: Out of memory allocating "
        "17592186044416 bytes.; lost are the contents of in0"
    )
    assert (error.bucket, error.status) == ("prefill_s8", 4)
    assert error.reason == "RESOURCE_EXHAUSTED: Out of memory allocating 17592186044416 bytes."
    other = loaded(runtime, add_in_place((4,)))
    bound = other.bind({0: state})
    for use in (
        state.read,
        state.data_ptr,
        lambda: state.write(torch.ones(4)),
        lambda: other.execute([state, torch.ones(4)]),
        lambda: bound.execute([torch.ones(4)]),
    ):
        with pytest.raises(
            ExecutionError, match=r"float32\[4\] were lost when an execution .* RESOURCE_EXHAUSTED"
        ):
            use()
    assert "lost" in repr(state)
    assert x.read() == 1
    fresh = runtime.allocate((4,), "float32")
    other.execute([fresh, torch.ones(4)])
    assert fresh.read().tolist() == [1, 1, 1, 1]


def test_one_tensor_as_two_inputs_is_refused_and_not_lost(runtime):
    """A program that updates a tensor in place cannot read the same tensor as another input."""
    model = loaded(runtime, add_in_place((4,)))
    state = runtime.upload(torch.ones(4))
    with pytest.raises(ExecutionError, match="previously donated"):
        model.execute([state, state])
    assert state.read().tolist() == [1, 1, 1, 1]


def test_other_threads_run_during_an_execution(runtime):
    """The interpreter's lock is free while XLA works."""
    size = 1024
    model = loaded(runtime, linear(size, size, size))
    bound = model.bind({1: runtime.upload(torch.randn(size, size))})
    x = torch.randn(size, size)
    bound.execute([x])
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(None)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(10):
            bound.execute([x])
    finally:
        stop.set()
        thread.join()
    assert len(ticks) > 5


def test_threads_that_share_a_cache_do_not_disturb_each_other(runtime):
    bound = loaded(runtime, add_in_place((1024,))).bind({0: runtime.allocate((1024,), "float32")})
    failures = []

    def work():
        try:
            for _ in range(100):
                bound.execute([torch.ones(1024)])
        except ExecutionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    (state, _) = bound.execute([torch.zeros(1024)])
    assert torch.equal(state.read(), torch.full((1024,), 400.0))


def test_loading_and_running_need_no_jax():
    program = """
import importlib.abc, sys
class NoJax(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "jax":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, NoJax())
import torch
from tests.compiler.modules import add_in_place, compiled
from vllm_neuron.runtime.host import HostRuntime
runtime = HostRuntime()
module = add_in_place((4,))
model = runtime.load(compiled(module), aliases={0: 0}, bucket="b")
state, doubled = model.execute([runtime.allocate((4,), "float32"), torch.ones(4)])
print(state.read().tolist(), doubled.read().tolist())
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert (run.stdout, run.returncode) == ("[1.0, 1.0, 1.0, 1.0] [2.0, 2.0, 2.0, 2.0]\n", 0), (
        run.stderr
    )
