"""Device tensors of the host emulator: dtypes, sharing of memory, reading and writing."""

import pytest
import torch

from tests.compiler.modules import STABLEHLO_TYPES, compiled, reverse
from vllm_neuron.errors import ExecutionError
from vllm_neuron.runtime.host import HostRuntime
from vllm_neuron.runtime.host_tensor import DTYPES


@pytest.fixture
def runtime():
    return HostRuntime()


def values(dtype, shape, seed=0):
    """Random values of any dtype, NaN patterns of the small floats included."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype is torch.complex64:
        return torch.randn(*shape, 2, generator=generator).view(torch.complex64).view(shape)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(shape, generator=generator).to(dtype)
    size = (*shape, dtype.itemsize) if shape else (dtype.itemsize,)
    return torch.randint(0, 256, size, generator=generator).byte().view(dtype).view(shape)


def same_bits(one, other):
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    flat = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*flat)


def test_the_dtypes_are_those_of_the_interface():
    assert list(DTYPES) == list(STABLEHLO_TYPES)


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3), (3, 1)])
@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype_goes_through_a_program_unchanged(runtime, name, shape):
    """64-bit types too, although no jax configuration allows them."""
    source = values(DTYPES[name], shape)
    expected = source
    if source.numel():
        expected = source.reshape(-1).view(torch.uint8).view(-1, source.itemsize)
        expected = expected.flip(0).contiguous().view(source.dtype).view(shape)
    model = runtime.load(compiled(reverse(name, shape)), aliases={}, bucket="b")
    for given in (source, runtime.upload(source)):
        (output,) = model.execute([given])
        assert (output.shape, output.dtype, output.nbytes) == (shape, name, source.nbytes)
        assert same_bits(output.read(), expected)


@pytest.mark.parametrize("name", list(DTYPES))
def test_upload_allocate_read_and_write(runtime, name):
    source = values(DTYPES[name], (5, 7))
    uploaded = runtime.upload(source)
    assert same_bits(uploaded.read(), source)
    allocated = runtime.allocate((5, 7), name)
    assert (allocated.shape, allocated.dtype, allocated.nbytes) == ((5, 7), name, source.nbytes)
    assert same_bits(allocated.read(), torch.zeros(5, 7, dtype=source.dtype))
    address = allocated.data_ptr()
    allocated.write(source)
    assert same_bits(allocated.read(), source)
    assert allocated.data_ptr() == address


def test_an_aligned_tensor_is_uploaded_without_a_copy(runtime):
    weight = torch.nn.Parameter(torch.randn(64, 64))
    uploaded = runtime.upload(weight)
    assert uploaded.shares_torch_memory
    assert uploaded.data_ptr() == weight.data_ptr()
    assert uploaded.read().data_ptr() == weight.data_ptr()
    assert not uploaded.read().requires_grad
    address, expected = weight.data_ptr(), weight.detach().clone()
    del weight
    assert uploaded.data_ptr() == address
    assert torch.equal(uploaded.read(), expected)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda t: t.view(-1)[1:21].view(4, 5), id="address not a multiple of 64"),
        pytest.param(lambda t: t.t(), id="transposed"),
        pytest.param(lambda t: t[:, ::2], id="strided"),
        pytest.param(lambda t: t[:1].expand(4, 8), id="expanded"),
    ],
)
def test_any_other_tensor_is_copied(runtime, view):
    source = view(torch.arange(64.0).view(8, 8))
    base = source._base
    expected = source.clone()
    uploaded = runtime.upload(source)
    assert not uploaded.shares_torch_memory
    assert uploaded.data_ptr() % 64 == 0
    base.fill_(-1)
    assert torch.equal(uploaded.read(), expected)


def test_a_conjugate_view_is_uploaded_with_its_values(runtime):
    source = torch.view_as_complex(torch.randn(4, 2)).conj()
    assert source.is_conj()
    assert torch.equal(runtime.upload(source).read(), source.resolve_conj())


def test_a_write_leaves_the_torch_tensor_whose_memory_was_shared(runtime):
    weight = torch.zeros(16)
    uploaded = runtime.upload(weight)
    uploaded.write(torch.ones(16))
    assert torch.equal(weight, torch.zeros(16))
    assert torch.equal(uploaded.read(), torch.ones(16))
    assert not uploaded.shares_torch_memory
    uploaded.write(weight)
    assert torch.equal(uploaded.read(), torch.zeros(16))
    weight += 3
    assert torch.equal(uploaded.read(), torch.zeros(16))


def test_a_write_that_does_not_fit_is_refused(runtime):
    tensor = runtime.allocate((2, 3), "float32")
    for source, found in (
        (torch.ones(3, 2), r"float32\[3, 2\]"),
        (torch.ones(2, 3, dtype=torch.float64), r"float64\[2, 3\]"),
        (torch.ones(2, 3, device="meta"), r"float32\[2, 3\] on meta"),
        (torch.ones(()), r"float32\[\]"),
    ):
        with pytest.raises(
            ExecutionError, match=rf"source of a write: expected float32\[2, 3\], found {found}$"
        ):
            tensor.write(source)
    assert torch.equal(tensor.read(), torch.zeros(2, 3))


def test_what_cannot_be_uploaded(runtime):
    for tensor, reason in (
        (torch.ones(2, device="meta"), "found torch.strided on meta"),
        (torch.eye(2).to_sparse(), "found torch.sparse_coo on cpu"),
        (torch.ones(2, dtype=torch.complex128), "no tensors of dtype torch.complex128"),
    ):
        with pytest.raises(ExecutionError, match=reason) as caught:
            runtime.upload(tensor)
        assert caught.value.status == 2
    with pytest.raises(ExecutionError, match="no tensors of dtype int4"):
        runtime.allocate((2,), "int4")


def test_zero_size_and_scalar_tensors_have_addresses_as_documented(runtime):
    assert runtime.allocate((0, 4), "float32").data_ptr() == 0
    assert runtime.upload(torch.ones(0)).data_ptr() == 0
    assert runtime.allocate((), "float32").data_ptr() != 0
