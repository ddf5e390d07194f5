"""What kernel tests get: both forms of an operation, small tiles, guarded memory, bounds for the
distance from FP64.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import every_test  # noqa: F401  # first: it asks for Triton's interpreter
import pytest
import torch
from torch import Tensor

from tritonamp.kernels import softmax, softmax_backward
from tritonamp.kernels._implementations import TraceableOp, operations
from tritonamp.kernels._sample import Sample, as_list
from tritonamp.kernels.device import INTERPRETED, why_not_triton

Shrink = Callable[[int | None], None]  # what the fixture small_tiles is
GUARD = 64  # elements; a multiple of 16 bytes leaves the alignment as it is
U = 2.0**-24  # half an ulp of 1 in FP32

# of overflows and the like in the interpreter
numpy_warns = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")


def unaligned(tensor: Tensor) -> Tensor:
    """Return a copy, dense and of the same order in memory, one element behind an address that is a
    multiple of 16 bytes.
    """
    memory = tensor.new_full((tensor.numel() + 16,), 7)
    assert memory.data_ptr() % 16 == 0
    dense = torch.empty_like(tensor)
    return memory[1 : 1 + tensor.numel()].as_strided(dense.shape, dense.stride()).copy_(tensor)


def made(
    shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype, seed: int
) -> list[Tensor]:
    """Return random tensors of these shapes, and a transposed one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors.append(torch.randn(6, 5, generator=generator).t())
    return [t.to(device, dtype) for t in tensors]


class SampleCall(NamedTuple):
    """A sample, and the operation that declares it."""

    operation: TraceableOp
    sample: Sample

    def __call__(self, x: Tensor, dim: int, backend: str = "triton") -> Sequence[Tensor]:
        return as_list(self.operation(backend, *self.sample.args(x, dim)))


SAMPLES = {
    " ".join(filter(None, (operation.name, sample.variant))): SampleCall(operation, sample)
    for operation in operations().values()
    if isinstance(operation, TraceableOp)
    for sample in operation.samples
}
each_sample = pytest.mark.parametrize("call", SAMPLES.values(), ids=SAMPLES)


def kernel_modules(attribute: str) -> list[ModuleType]:
    """Modules of the kernels that have this attribute."""
    found = [m for name, m in sys.modules.items() if name.startswith("tritonamp.kernels.")]
    return [module for module in found if hasattr(module, attribute)]


def ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of ``dtype``'s values around each FP64 value; in the subnormal range that of the
    smallest.
    """
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs().clamp(min=info.tiny)).exponent
    return torch.ldexp(torch.full_like(exact, info.eps), exponent - 1)


def assert_within(actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    assert actual.shape == exact.shape
    error = (actual.double() - exact).abs()
    assert (error <= bound).all(), f"{(error / bound).max()} times the bound"


def assert_rounded(actual: Tensor, dtype: torch.dtype, exact: Tensor, error: Tensor) -> None:
    """Assert that ``exact``, with an error of FP32 arithmetic, was rounded to ``dtype``."""
    assert actual.dtype is dtype
    assert_within(actual, exact, ulp(exact, dtype) / 2 + error)


def length(x: Tensor, dim: int) -> int:
    return x.shape[dim] if x.dim() else 1


def softmax_and_error(log: bool, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """softmax or log_softmax in FP64, and the error of FP32 arithmetic.

    With d = max - x. A product with log2(e) turns d into exp2's argument: three relative errors, of
    d (1 u), the constant (0.23 u) and the product (1 u), become 2.25 d u of exp(-d); a GPU's exp2
    itself is off by 2 ulps of what is correctly rounded (5 u). Below 2**-126 it returns 0.

    The sum s: the mean of d, weighted with exp(-d), is at most log n. So s carries 2.25 log n + 5,
    n from additions in any order, and 6 for each time that a part is rescaled to a new maximum.
    softmax: 1 / s is off by 2 ulps on a GPU (4 u), the product by 1 u.
    log_softmax: what s carries turns absolute. A GPU's log2 is off by 2**-22 max(1, log2 s): 4 log
    s + 2.8 after the product with log(2), which adds 1.05 log s; d is rounded, and the difference
    too.
    """
    wide, n = x.double(), length(x, dim)
    exact = torch.log_softmax(wide, dim) if log else torch.softmax(wide, dim)
    if not x.numel():
        return exact, exact
    d = wide.amax(dim, keepdim=True) - wide
    tile = softmax.tiling(x.shape, dim, dim, softmax.PER_THREAD, softmax.LONGEST, 8).layout[-1]
    total = 2.25 * math.log(n) + 5 + n + 6 * -(-n // tile)
    if log:
        return exact, (2 * d + 6.05 * math.log(n) + 3 + total) * U
    return exact, (2.25 * d + 11 + total) * U * exact + 2.0**-126


def backward_and_error(log: bool, grad: Tensor, y: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The gradient in FP64 from the y that is given, and the error of FP32 arithmetic.

    softmax: n + 5 roundings of y (|grad| + sum |grad y|).
    log_softmax: 2 of |grad|; of exp(y) sum |grad| n + 8, and 1.25 |y| from exp2's argument, as
    forward. exp2 returns 0 below 2**-126.
    """
    g, w, n = grad.double(), y.double(), length(y, dim)
    if not log:
        exact = w * (g - (g * w).sum(dim, keepdim=True))
        return exact, (n + 5) * U * w.abs() * (g.abs() + (g * w).abs().sum(dim, keepdim=True))
    exact = g - w.exp() * g.sum(dim, keepdim=True)
    mass = g.abs().sum(dim, keepdim=True)
    return exact, 2 * U * g.abs() + (n + 8 + 1.25 * w.abs()) * U * w.exp() * mass + 2.0**-126 * mass


def sum_and_error(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> tuple[Tensor, Tensor]:
    """The sum in FP64, and the error that the numerics contract allows: u (log2 n + 2) sum |x|."""
    wide = x.double()
    exact = torch.sum(wide, dims, keepdim)
    n = max(x.numel() // max(exact.numel(), 1), 1)
    return exact, U * (math.log2(n) + 2) * torch.sum(wide.abs(), dims, keepdim)


@pytest.fixture
def triton_device(device: torch.device) -> torch.device:
    """Each device that kernels run on: without CUDA the CPU, in Triton's interpreter."""
    obstacle = None if INTERPRETED else why_not_triton(device)
    if obstacle is not None:
        pytest.skip(f"no kernels here: {obstacle}")
    return device


@pytest.fixture(params=["eager", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Names the form of an operation. The Triton form works in guarded memory."""
    if request.param == "triton":
        request.getfixturevalue("triton_device")
        request.getfixturevalue("guarded")
    return request.param


@pytest.fixture
def guarded(request: pytest.FixtureRequest) -> Iterator[None]:
    """NaN in new memory and around it: what is not written shows, as do reads and writes out of
    bounds.
    """
    if "device" in request.fixturenames:
        request.getfixturevalue("device")  # made first, so that it ends after the guards are read
    plain_like, plain_new, plain_strided = (
        torch.empty_like,
        Tensor.new_empty,
        Tensor.new_empty_strided,
    )
    buffers: list[Tensor] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        buffers.append(
            torch.full((math.prod(shape) + 2 * GUARD,), float("nan"), dtype=dtype, device=device)
        )
        return buffers[-1][GUARD:-GUARD].view(shape)

    def empty_like(x: Tensor, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if options or not (dtype or x.dtype).is_floating_point or not x.is_contiguous():
            return plain_like(x, dtype=dtype, **options)
        return empty(tuple(x.shape), dtype or x.dtype, x.device)

    def new_empty(
        x: Tensor, *size: Any, dtype: torch.dtype | None = None, **options: Any
    ) -> Tensor:
        if options or not (dtype or x.dtype).is_floating_point:
            return plain_new(x, *size, dtype=dtype, **options)
        return empty(
            tuple(size[0]) if isinstance(size[0], tuple | list) else size,
            dtype or x.dtype,
            x.device,
        )

    def new_empty_strided(
        x: Tensor, size: tuple[int, ...], stride: tuple[int, ...], *, dtype: torch.dtype
    ) -> Tensor:
        like = plain_strided(x, size, stride, dtype=dtype)
        if not dtype.is_floating_point or not like.is_contiguous():
            return like
        return empty(size, dtype, x.device)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch, "empty_like", empty_like)
        monkeypatch.setattr(Tensor, "new_empty", new_empty)
        monkeypatch.setattr(Tensor, "new_empty_strided", new_empty_strided)
        yield
    for buffer in buffers:
        assert buffer[:GUARD].isnan().all() and buffer[-GUARD:].isnan().all(), (
            "written out of bounds"
        )


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Shrink:
    """Takes the number of programs below which they share lines, or None: all as shipped.

    A program then holds at most 128 elements of a line, in softmax's backward 64. It walks over
    longer lines in tiles of as many.
    """

    def shrink(many: int | None) -> None:
        if many is None:
            return
        for name, value in {"SHORT": 64, "LOOP_WARPS": 1, "LOOP": 128, "MANY": many}.items():
            for module in kernel_modules(name):
                monkeypatch.setattr(module, name, value)
        for module in kernel_modules("LONGEST"):
            for name, function in list(vars(module).items()):
                if hasattr(function, "cache_clear"):  # it remembers what it found of a shape
                    monkeypatch.setattr(module, name, inspect.unwrap(function))
            monkeypatch.setattr(module, "PER_THREAD", 4)
            monkeypatch.setattr(module, "LONGEST", 64 if module is softmax_backward else 128)

    return shrink


@pytest.fixture
def tiles_of_layout(small_tiles: Shrink, layout: Any) -> None:
    """Tiles as the parameter ``layout`` has them."""
    small_tiles(layout.many)


@pytest.fixture
def small_loops(small_tiles: Shrink) -> None:
    """One program walks over a line of more than 128 elements in tiles."""
    small_tiles(0)


class Traffic:
    """Bytes that kernels have read and written. An atomic operation counts as written."""

    read = 0
    written = 0


@pytest.fixture
def traffic(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Counts what no mask excludes."""
    if not INTERPRETED:
        pytest.skip("bytes are counted in Triton's interpreter")
    from triton.runtime.interpreter import InterpreterBuilder

    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    atomic = InterpreterBuilder.create_atomic_rmw

    def size(ptrs: Any, mask: Any) -> int:
        return int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8

    def counted_load(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
        traffic.read += size(ptrs, mask)
        return load(self, ptrs, mask, *args)

    def counted_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        traffic.written += size(ptrs, mask)
        return store(self, ptrs, value, mask, *args)

    def counted_atomic(
        self: Any, operation: Any, ptrs: Any, value: Any, mask: Any, *args: Any
    ) -> Any:
        traffic.written += size(ptrs, mask)
        return atomic(self, operation, ptrs, value, mask, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)
    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", counted_atomic)
    return traffic
