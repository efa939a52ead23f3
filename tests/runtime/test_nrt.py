"""The Neuron runtime's C API by way of a stand-in that obeys its documentation strictly.

Nothing here ran on a device: see docs/hardware.md.
"""

import gc
import mmap
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.compiler.modules import (
    add_in_place,
    compiled,
    linear,
    lowered,
    manifest_with,
    reverse,
    write_rows,
)
from tests.neff.samples import SHARED
from tests.stand_ins.device_neff import as_device_neff, as_host_neff
from tests.stand_ins.runtimes import Counters, library_path, runtime_environment
from vllm_neuron import _core
from vllm_neuron._core import NrtLibrary
from vllm_neuron.errors import ExecutionError, NeffChecksumError, NeffFormatError
from vllm_neuron.runtime.host import HostRuntime
from vllm_neuron.runtime.nrt import NrtRuntime
from vllm_neuron.runtime.nrt_tensor import fit
from vllm_neuron.target import TARGETS

VERSION = "2.28.7631.0+stand-in"


@pytest.fixture(scope="module")
def runtime():
    """One per process, as the library is."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in runtime_environment().items():
            patch.setenv(name, value)
        yield NrtRuntime(target=TARGETS["trn2"], lnc=2, library=library_path())


@pytest.fixture
def counters(runtime):
    """The library's counters; the test must give everything back that it makes."""
    gc.collect()
    counters = Counters(library_path())
    before = counters.objects()
    yield counters
    gc.collect()
    assert counters.objects() == before
    assert (counters["bad frees"], counters["freed while in a set"]) == (0, 0)


def device_neff(module, *, architecture="stand-in-cayman", lnc=2, version=VERSION):
    return as_device_neff(compiled(module), architecture=architecture, lnc=lnc, version=version)


def loaded(runtime, module, **options):
    return runtime.load(device_neff(module), aliases=module.aliases, bucket="decode_s1", **options)


# --- the C declarations --------------------------------------------------------------------------


def test_structs_have_the_documented_sizes_and_offsets():
    """Against the table in neff.md 2.3, which was compiled from the public headers."""
    layout = _core.nrt_layout()
    text = (SHARED / "neff.md").read_text("utf-8")
    rows = re.findall(r"^\| (nrt_\w+) \| (\d+)\+? \| (.*) \|$", text, re.M)
    checked = 0
    for struct, size, fields in rows:
        assert layout[struct] == int(size), struct
        checked += 1
        for name in [name.rpartition(".")[2] for name in layout if name.startswith(f"{struct}.")]:
            match = re.search(
                rf"\b{name}\b(?:\[\d+\])?(?: (?:u32|u64|i32|\*u32|ptr))? (\d+)", fields
            )
            if match is None:
                # Several fields of one type, such as "rt_major, minor, patch, maintenance u64 0/8".
                match = re.search(rf"\b{name}\b.*? u64 (\d+)/", fields)
            assert match is not None, f"{struct}.{name} in {fields!r}"
            assert layout[f"{struct}.{name}"] == int(match[1]), f"{struct}.{name}"
            checked += 1
    assert {struct for struct, _, _ in rows} == {name.partition(".")[0] for name in layout} - {
        "NRT_STATUS"
    }
    assert (layout["NRT_STATUS"], checked) == (4, len(layout) - 1)


def test_statuses_are_the_documented_ones():
    text = (SHARED / "neff.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (\d+) \| (NRT_\w+) \|", text, re.M))
    assert len(rows) == 28
    for value in range(2000):
        known = _core.nrt_status(value)
        assert (known and known[0]) == rows.get(str(value))


# --- what goes right -----------------------------------------------------------------------------


def test_version_cores_and_machine(runtime):
    library = runtime.library
    assert library.version() == ([2, 35, 30, 0], "2.35.30.0+stand-in")
    assert (library.total_cores(), library.visible_cores()) == (4, 4)
    assert library.instance() == (5, 7, "stand-in")
    used, limit = library.memory(0)
    assert 0 <= used < limit == 24 << 30
    # The library of the process is the one that was loaded first.
    assert NrtLibrary.open("/nowhere").path == library.path
    library.init()
    assert Counters(library_path())["nrt_init"] == 1


def test_a_neff_is_loaded_from_mapped_pages_and_runs(runtime, counters, tmp_path):
    path = tmp_path / "reverse.neff"
    path.write_bytes(device_neff(reverse("float32", (3,))))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        view = memoryview(pages)
        model = runtime.load(view, aliases={}, bucket="b")
        view.release()
    (output,) = model.execute([torch.tensor([1.0, 2.0, 3.0])])
    assert output.read().tolist() == [3.0, 2.0, 1.0]
    assert [(t.name, t.dtype, tuple(t.shape)) for t in model.inputs] == [("in0", "float32", (3,))]
    assert counters.objects()["models"] == 1


def test_an_aliased_output_is_the_input_tensor_itself(runtime, counters):
    model = loaded(runtime, add_in_place((4, 2)))
    state = runtime.upload(torch.ones(4, 2))
    step = model.bind({0: state})
    for turn in range(1, 4):
        tensors_before = counters["tensors"]
        first, second = step.execute([torch.full((4, 2), 2.0)])
        assert first is state
        assert first.read().tolist() == [[1.0 + 2 * turn] * 2] * 4
        assert second.read().tolist() == [[4.0, 4.0]] * 4
        del first, second
    # Memory of outputs and step arguments is used again.
    assert counters["tensors"] == tensors_before


def test_a_kv_cache_keeps_its_memory_from_model_to_model(runtime, counters):
    cache = runtime.allocate((8, 4), "float32")
    assert cache.read().tolist() == [[0.0] * 4] * 8
    models = [loaded(runtime, write_rows(8, 4, count)) for count in (1, 2)]
    for model, slots in zip(models, ([3], [5, 0]), strict=True):
        rows = torch.arange(4.0 * len(slots)).view(-1, 4) + 1
        _, read_back = model.bind({0: cache}).execute([rows, torch.tensor(slots).view(-1, 1)])
        assert torch.equal(read_back.read(), rows)
    expected = torch.zeros(8, 4)
    expected[3], expected[5], expected[0] = (
        torch.arange(4.0) + 1,
        torch.arange(4.0) + 1,
        torch.arange(4.0) + 5,
    )
    assert torch.equal(cache.read(), expected)


def test_a_cpu_tensor_for_an_updated_input_is_updated(runtime, counters):
    model = loaded(runtime, add_in_place((4, 2)))
    state = torch.ones(4, 2)
    first, _ = model.execute([state, torch.ones(4, 2)])
    assert state.tolist() == first.read().tolist() == [[2.0, 2.0]] * 4
    again, _ = model.execute([state, torch.ones(4, 2)])
    assert (first.read()[0, 0], again.read()[0, 0]) == (2.0, 3.0)


def test_outputs_that_are_kept_are_not_overwritten(runtime, counters):
    model = loaded(runtime, reverse("int32", (2,)))
    kept = [model.execute([torch.tensor([n, n + 1], dtype=torch.int32)])[0] for n in range(5)]
    assert [tensor.read().tolist() for tensor in kept] == [[n + 1, n] for n in range(5)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "int8", "bool"])
def test_every_dtype_survives_the_way_to_the_device_and_back(runtime, counters, dtype):
    values = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(getattr(torch, dtype)).t()
    tensor = runtime.upload(values)
    assert torch.equal(tensor.read(), values)
    assert (tensor.shape, tensor.dtype) == ((3, 2), dtype)
    tensor.write(torch.zeros(3, 2, dtype=values.dtype))
    assert not tensor.read().any()


def test_empty_tensors(runtime, counters):
    tensor = runtime.upload(torch.empty(0, 3))
    assert (tensor.nbytes, tensor.data_ptr(), tuple(tensor.read().shape)) == (0, 0, (0, 3))


def test_slices_share_memory_and_keep_it_alive(runtime, counters):
    whole = runtime.library.allocate(16)
    part = whole.slice(4, 8)
    part.write(b"ABCDEFGH")
    everything = bytearray(16)
    whole.read(everything)
    assert everything == b"\0" * 4 + b"ABCDEFGH" + b"\0" * 4
    del whole
    gc.collect()
    got = bytearray(2)
    part.read(got, offset=6)
    assert got == b"GH"
    on_host = runtime.library.allocate(4, on_host=True)
    on_host.write(b"host")
    assert counters["bytes"] >= 20


def test_a_model_with_collectives_is_loaded_by_its_rank(runtime, counters):
    neff = device_neff(reverse("float32", (3,)))
    model = runtime.library.load(neff, core=0, rank=(0, 2))
    assert model.tensors() == [("in0", False, 12), ("out0", True, 12)]
    with pytest.raises(ExecutionError, match="nrt_load_collectives: NRT_INVALID"):
        runtime.library.load(neff, rank=(2, 2))


def test_threads_run_models_at_the_same_time(runtime, counters):
    models = [loaded(runtime, linear(2, 3, 4)) for _ in range(3)]
    weight = runtime.upload(torch.arange(12.0).view(4, 3))
    steps = [model.bind({1: weight}) for model in models]

    def run(number):
        x = torch.full((2, 3), float(number))
        (output,) = steps[number % 3].execute([x])
        return torch.equal(output.read(), x @ torch.arange(12.0).view(4, 3).t())

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(run, range(60)))


def test_the_interpreter_runs_while_a_program_does(runtime, counters):
    size = 700
    model = loaded(runtime, linear(size, size, size))
    step = model.bind({1: runtime.upload(torch.ones(size, size))})
    stop, turns = threading.Event(), 0
    worker = threading.Thread(target=lambda: (step.execute([torch.ones(size, size)]), stop.set()))
    worker.start()
    while not stop.is_set():
        turns += 1
        stop.wait(0.0005)
    worker.join()
    assert turns > 3


# --- values that the device computes in fewer bits -----------------------------------------------


def test_step_arguments_are_narrowed_to_what_the_neff_declares():
    assert fit(torch.tensor([1, -(2**31)]), "int32", what="x").dtype is torch.int32
    assert fit(torch.tensor([True]), "uint8", what="x").tolist() == [1]
    with pytest.raises(ExecutionError, match="x: values from 0 to 2147483648 do not fit int32"):
        fit(torch.tensor([0, 2**31]), "int32", what="x")


def test_64_bit_step_arguments_of_a_32_bit_neff(runtime, counters):
    model = loaded(runtime, reverse("int32", (2,)))
    (output,) = model.execute([torch.tensor([1, 2])])
    assert (output.dtype, output.read().tolist()) == ("int32", [2, 1])


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architecture": "stand-in-mariana"}, "is for 'stand-in-mariana', the device is"),
        ({"architecture": "cayman"}, "is for 'cayman', the device is 'stand-in-cayman' (trn2)"),
        ({"lnc": 1}, "for logical cores of 1 physical cores, the device has 2"),
        ({"version": "3.1.0.0+stand-in"}, "made by neuronx-cc 3.1.0.0+stand-in, and this is"),
    ],
)
def test_a_neff_that_does_not_fit_the_device(runtime, counters, change, reason):
    with pytest.raises(ExecutionError, match=re.escape(reason)) as caught:
        runtime.load(device_neff(reverse("float32", (3,)), **change), aliases={}, bucket="b")
    assert (caught.value.bucket, caught.value.status) == ("b", 2)


@pytest.mark.parametrize(
    "sample", sorted((SHARED / "neff-samples").glob("*.neff")), ids=lambda p: p.name
)
def test_real_neffs_are_sound_and_refused_with_the_reason(runtime, counters, sample):
    """Nothing may run engine code here, and nothing may pretend to."""
    neff = _core.Neff.parse(sample.read_bytes())
    with pytest.raises(ExecutionError, match="the device is 'stand-in-cayman'"):
        runtime.load(sample.read_bytes(), aliases={}, bucket="b")
    # Past the product's own check the library refuses it too.
    with pytest.raises(ExecutionError, match="nrt_load: NRT_INVALID") as caught:
        runtime.library.load(sample.read_bytes())
    assert caught.value.status == 2
    with pytest.raises(ExecutionError, match=f"is for target '{neff.target}'; this is the host"):
        HostRuntime().load(sample.read_bytes(), aliases={}, bucket="b")


def test_there_are_eight_real_neffs():
    assert len(list((SHARED / "neff-samples").glob("*.neff"))) == 8


def test_bytes_that_are_no_neff(runtime, counters):
    neff = bytearray(device_neff(reverse("float32", (3,))))
    with pytest.raises(NeffFormatError):
        runtime.load(bytes(neff[:500]), aliases={}, bucket="b")
    neff[-2000] ^= 1
    with pytest.raises(NeffChecksumError):
        runtime.load(bytes(neff), aliases={}, bucket="b")


@pytest.mark.parametrize("aliases", [{0: 1}, {0: 7}, {5: 0}])
def test_aliases_that_the_tensors_do_not_allow(runtime, counters, aliases):
    module = linear(2, 3, 4)
    with pytest.raises(ExecutionError, match=r"cannot be in the memory|there is no output"):
        runtime.load(device_neff(module), aliases=aliases, bucket="b")


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([torch.ones(2, 3)], "1 inputs given, expected 2: in0, in1"),
        ([torch.ones(3, 2), torch.ones(4, 3)], "input 0 (in0): expected float32[2, 3], found"),
        ([torch.ones(2, 3), torch.ones(4, 3).half()], "input 1 (in1): expected float32[4, 3]"),
    ],
)
def test_inputs_that_do_not_fit(runtime, counters, inputs, reason):
    model = loaded(runtime, linear(2, 3, 4))
    with pytest.raises(ExecutionError, match=re.escape(reason)) as caught:
        model.execute(inputs)
    assert caught.value.status == 1002


def test_the_library_refuses_what_the_product_would_not_send(runtime, counters):
    library = runtime.library
    model = library.load(device_neff(linear(2, 3, 4)))
    inputs, outputs = library.tensor_set(), library.tensor_set()
    x, weight, y = library.allocate(24), library.allocate(48), library.allocate(32)

    def refused(status):
        with pytest.raises(ExecutionError) as caught:
            model.execute(inputs, outputs)
        assert caught.value.status == status

    refused(1002)
    inputs.add("in0", x)
    inputs.add("in1", weight)
    refused(1002)
    outputs.add("out0", x)
    refused(2)
    outputs.add("out0", y)
    model.execute(inputs, outputs)
    outputs.add("nobody", y)
    refused(1002)
    with pytest.raises(ExecutionError, match="inputs and outputs are one tensor set"):
        model.execute(inputs, inputs)
    with pytest.raises(ExecutionError, match="expected a range within 24 bytes, found 8 bytes at"):
        x.write(b"12345678", offset=20)
    with pytest.raises(ExecutionError, match="at least 1 byte, found 0"):
        library.allocate(0)
    with pytest.raises(ExecutionError, match="NRT_LOAD_NOT_ENOUGH_NC"):
        library.allocate(4, core=9)
    with pytest.raises(BufferError, match="writable"):
        x.read(b"123")


# --- failures: reported with their status, and nothing leaks -------------------------------------


def test_a_full_device(runtime, counters):
    with pytest.raises(ExecutionError, match=r"nrt_tensor_allocate: NRT_RESOURCE \(4\)") as caught:
        runtime.allocate((1 << 36,), "float32")
    assert caught.value.status == 4


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (4, "NRT_RESOURCE (4)"),
        (9, "check NEURON_RT_VISIBLE_CORES"),
        (10, "the compiler is newer than the runtime"),
        (4711, "status 4711 (unknown to this version)"),
    ],
)
def test_a_failing_load(runtime, counters, status, text):
    neff = device_neff(reverse("float32", (3,)))
    counters.fail("nrt_load", status)
    with pytest.raises(ExecutionError, match=re.escape(text)) as caught:
        runtime.load(neff, aliases={}, bucket="decode_s1")
    assert (caught.value.status, caught.value.bucket) == (status, "decode_s1")
    assert str(caught.value).startswith("bucket decode_s1: cannot load the NEFF")


@pytest.mark.parametrize("status", [1, 5, 6, 101, 1004, 1205, 4711])
def test_a_failing_execution_takes_what_it_was_to_update(runtime, counters, status):
    model = loaded(runtime, add_in_place((4, 2)))
    state = runtime.upload(torch.ones(4, 2))
    step = model.bind({0: state})
    counters.fail("nrt_execute", status)
    with pytest.raises(ExecutionError, match="lost are the contents of in0") as caught:
        step.execute([torch.ones(4, 2)])
    assert caught.value.status == status
    for use in (state.read, state.data_ptr, lambda: step.execute([torch.ones(4, 2)])):
        with pytest.raises(ExecutionError, match="were lost when an execution"):
            use()


@pytest.mark.parametrize("status", [2, 3, 7, 1002])
def test_an_execution_that_did_not_start_takes_nothing(runtime, counters, status):
    model = loaded(runtime, add_in_place((4, 2)))
    state = runtime.upload(torch.ones(4, 2))
    step = model.bind({0: state})
    counters.fail("nrt_execute", status)
    with pytest.raises(ExecutionError):
        step.execute([torch.ones(4, 2)])
    step.execute([torch.ones(4, 2)])
    assert state.read().tolist() == [[2.0, 2.0]] * 4


def test_nan_is_a_report_and_no_failure(runtime, counters, caplog):
    model = loaded(runtime, reverse("float32", (3,)))
    before = runtime.counters["executions_with_nan"]
    for _ in range(2):
        counters.fail("nrt_execute", 1003)
        model.execute([torch.zeros(3)])
    assert runtime.counters["executions_with_nan"] == before + 2
    assert caplog.text.count("the runtime reports NaN in a result") == (before == 0)


@pytest.mark.parametrize(
    "call",
    ["nrt_allocate_tensor_set", "nrt_tensor_allocate", "nrt_tensor_write", "nrt_tensor_read"],
)
def test_a_failure_anywhere_leaks_nothing(runtime, counters, call):
    model = loaded(runtime, reverse("float32", (3,)))
    counters.fail(call, 1)
    with pytest.raises(ExecutionError, match=f"{call}: NRT_FAILURE"):
        model.execute([torch.zeros(3)])[0].read()
    (output,) = model.execute([torch.tensor([1.0, 2.0, 3.0])])
    assert output.read().tolist() == [3.0, 2.0, 1.0]


def test_a_program_that_the_device_cannot_run(runtime, counters):
    """XLA's own failure comes out as a status."""
    kind = "tensor<2xi32>"
    module = lowered(
        f"(%a: {kind}) -> ({kind})",
        f"%0 = stablehlo.add %a, %a : {kind}\nreturn %0 : {kind}",
    )
    torn = manifest_with(as_host_neff(device_neff(module)), aliases={"0": 5})
    neff = as_device_neff(torn, architecture="stand-in-cayman", lnc=2, version=VERSION)
    with pytest.raises(ExecutionError):
        runtime.load(neff, aliases={}, bucket="b").execute([torch.ones(2, dtype=torch.int32)])
