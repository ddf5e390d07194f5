"""What holds for every operation, by the samples that it declares."""

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import SampleCall, each_sample, numpy_warns
from tritonamp.commands.selftest.kernels import differs
from tritonamp.kernels._implementations import Implementations, operations
from tritonamp.kernels._launch import Launch, allocate
from tritonamp.kernels._sample import ListSample

pytestmark = numpy_warns

INF, NAN = float("inf"), float("nan")
MAX_GRID = 2**31 - 1, 65535, 65535  # CUDA's
SHAPES = [(3, 9), (2, 300), (4, 130, 3), (1,)]


@pytest.mark.parametrize("name", operations())
def test_every_operation_has_a_sample(name: str) -> None:
    assert operations()[name].samples


LIST_SAMPLES = {
    f"{name} {sample.variant}".rstrip(): (operation, sample)
    for name, operation in operations().items()
    for sample in operation.samples
    if isinstance(sample, ListSample)
}


@pytest.mark.parametrize(("operation", "sample"), LIST_SAMPLES.values(), ids=LIST_SAMPLES)
def test_twins_agree_on_lists(
    triton_device: torch.device, operation: Implementations, sample: ListSample
) -> None:
    """To a neighbouring value, or in FP32 to what the order of a sum makes of it."""
    for call in sample.calls(triton_device, [torch.float16, torch.bfloat16]):
        kernel, twin = call.run(operation.triton_function), call.run(operation.torch_function)
        assert differs(kernel, twin)[1] == ""


@pytest.mark.parametrize(("operation", "sample"), LIST_SAMPLES.values(), ids=LIST_SAMPLES)
def test_a_call_on_lists_leaves_something(operation: Implementations, sample: ListSample) -> None:
    """Kernels that write nothing would agree with nothing else."""
    for call in sample.calls(torch.device("cpu"), [torch.float16]):
        before = call.results(call.args(), [torch.zeros(1)] * 3)
        assert differs(before, call.run(operation.torch_function))[1]


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("shape", SHAPES)
@each_sample
def test_twins_agree(triton_device: torch.device, call: SampleCall, shape: tuple[int, ...]) -> None:
    """To a rounding to half, and one bit of FP32 for each element of a line."""
    x = torch.randn(shape, device=triton_device).half()
    for dim in range(len(shape)):
        for kernel, twin in zip(call(x, dim), call(x, dim, "eager"), strict=True):
            assert (kernel.dtype, kernel.shape) == (twin.dtype, twin.shape)
            torch.testing.assert_close(kernel, twin, rtol=2.0**-10, atol=2.0**-15)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("value", [INF, -INF, NAN, 65504.0, -65504.0, 6e-8, -0.0])
@each_sample
def test_special_values_are_the_twins(
    triton_device: torch.device, call: SampleCall, value: float
) -> None:
    """In one line, at its start, at its end or everywhere; the other lines know nothing of it, but
    what is summed over lines does.
    """
    x = torch.randn(5, 140, device=triton_device).half()
    x[0, 0] = x[1, -1] = x[3] = value
    kernels, twins = call(x, 1), call(x, 1, "eager")
    for kernel, twin in zip(kernels, twins, strict=True):
        assert torch.equal(kernel.isfinite(), twin.isfinite())
    torch.testing.assert_close(kernels[0][2::2], twins[0][2::2], rtol=2.0**-10, atol=2.0**-15)


@pytest.mark.parametrize(("shape", "dim"), [((1 << 17, 1 << 15), 1), ((1 << 15, 1 << 17), 0)])
@each_sample
def test_more_than_32_bits_of_elements_fit_a_grid(
    monkeypatch: pytest.MonkeyPatch, call: SampleCall, shape: tuple[int, int], dim: int
) -> None:
    """Nothing is allocated; every dimension that a kernel is told is the tensor's own."""
    launches: list[tuple[Launch, tuple[Tensor, ...]]] = []

    def record(launch: Launch, *given: Tensor) -> tuple[Tensor, ...]:
        results = allocate(given[0], launch.results)
        launches.append((launch, (*given, *results)))
        return results

    monkeypatch.setattr(Launch, "__call__", record)
    x = torch.empty(shape, dtype=torch.float16, device="meta")
    call.operation.triton_function(*call.sample.args(x, dim))
    assert launches
    for launch, tensors in launches:
        assert all(0 < size <= limit for size, limit in zip(launch.grid, MAX_GRID, strict=True))
        assert all(tensor.device.type == "meta" for tensor in tensors)
