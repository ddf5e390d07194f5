"""Any shape, strides and offset, in small tiles and in those that are shipped."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.conftest import (
    SAMPLES,
    SampleCall,
    Shrink,
    assert_rounded,
    backward_and_error,
    each_sample,
    numpy_warns,
    softmax_and_error,
    sum_and_error,
)
from tritonamp.kernels._sample import Sample
from tritonamp.kernels.reduce import SUM, sum
from tritonamp.kernels.softmax import softmax
from tritonamp.kernels.softmax_backward import softmax_backward

pytestmark = numpy_warns

OTHERS = Sample(
    lambda x, dim: (x, [d for d in range(x.dim()) if d != dim], True, torch.float32),
    any_order=True,
)
CALLS = {**SAMPLES, "sum of the others": SampleCall(SUM, OTHERS)}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {  # of [2, 3, 4, 10]
    "transposed": lambda x: x.transpose(0, 3),
    "permuted": lambda x: x.permute(2, 0, 3, 1),
    "steps": lambda x: x[:, ::2, 1:, ::3],
    "expanded": lambda x: x[:1].expand(5, 3, 4, 10),
    "overlapping": lambda x: x.flatten().unfold(0, 9, 4),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "unaligned": lambda x: x.flatten()[1:].narrow(0, 0, 216).view(12, 18),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_strides_do_not_matter(
    device: torch.device, backend: str, call: SampleCall, view: str
) -> None:
    """Bit for bit, where torch does not choose the order of additions by strides."""
    x = VIEWS[view](torch.randn(2, 3, 4, 10, device=device).to(torch.float16))
    copy = torch.empty(x.shape, dtype=x.dtype, device=device).copy_(x)
    for dim in (0, x.dim() - 1):
        results = zip(call(x, dim, backend), call(copy, dim, backend), strict=True)
        for result, expected in results:
            if backend == "triton" or not call.sample.any_order:
                assert torch.equal(result, expected)
                assert result.is_contiguous()
            else:
                torch.testing.assert_close(result, expected, rtol=2.0**-10, atol=2.0**-15)


@pytest.mark.parametrize("shape", [(3, 5), ()])
@each_sample
def test_dimensions_that_do_not_exist_are_refused(
    device: torch.device, backend: str, call: SampleCall, shape: tuple[int, ...]
) -> None:
    x = torch.ones(shape, dtype=torch.float16, device=device)
    for dim in (5, -3):
        with pytest.raises(IndexError, match="Dimension out of range"):
            call(x, dim, backend)


def test_dimensions_are_summed_once(device: torch.device, backend: str) -> None:
    x = torch.ones(3, 5, dtype=torch.float16, device=device)
    for dims in ((0, 0), (1, -1)):
        with pytest.raises(RuntimeError, match="appears multiple times in the list of dims"):
            sum(x, dims, False, torch.float32, backend)


class View(NamedTuple):
    """What becomes of memory: an offset, a shape, an order of its dimensions, slices, flips,
    repetition.
    """

    offset: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    slices: tuple[slice, ...]
    flipped: tuple[int, ...]
    repeated: tuple[int, ...]

    def random(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        torch.manual_seed(0)
        memory = torch.randn(self.offset + math.prod(self.shape), device=device).mul(3).to(dtype)
        x = (
            memory[self.offset :]
            .view(self.shape)
            .permute(self.order)[self.slices]
            .flip(self.flipped)
        )
        one = tuple(slice(0, 1) if d in self.repeated else slice(None) for d in range(x.dim()))
        return x[one].expand(
            [5 if d in self.repeated and x.shape[d] else x.shape[d] for d in range(x.dim())]
        )


SHAPES = [
    (2, 3, 5, 9),
    (3, 130),
    (17, 9, 2),
    (130, 3),
    (5, 1, 40),
    (2, 300),
    (4, 5, 3, 2),
    (1, 9, 33),
    (600,),
    (1,),
]
SHAPES += [
    (2, 129, 1),
    (33, 9),
    (2, 0, 3),
    (0, 200),
    (),
]  # few elements keep the interpreter quick; a tile has 128


@st.composite
def views(draw: st.DrawFn) -> View:
    shape = draw(st.sampled_from(SHAPES))
    order = draw(st.permutations(range(len(shape))))
    some = st.lists(st.sampled_from(order), unique=True, max_size=2) if shape else st.just([])
    steps = [
        (draw(st.integers(0, shape[d] > 1)), draw(st.sampled_from([1, 1, 2, 3]))) for d in order
    ]
    slices = tuple(slice(start, None, step) for start, step in steps)
    return View(
        draw(st.integers(0, 3)),
        shape,
        tuple(order),
        slices,
        tuple(draw(some)),
        tuple(draw(some)[:1]),
    )


any_dtype = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
Dtypes = tuple[torch.dtype, torch.dtype]


@pytest.fixture(params=[None, 4])
def tiles(request: pytest.FixtureRequest, small_tiles: Shrink) -> None:
    """Those that are shipped, and small ones."""
    small_tiles(request.param)


def on_any_view(**drawn: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
    """Return a decorator that runs a test on any view, in guarded memory.

    drawn: strategies of further arguments; ``dtypes`` are those of the view and of the result.
    """

    def decorated(test: Any) -> Any:
        dtypes = st.tuples(any_dtype, any_dtype)
        run = given(view=views(), data=st.data(), dtypes=dtypes, **drawn)(test)
        reproducible = settings(
            max_examples=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.function_scoped_fixture],
        )
        return pytest.mark.usefixtures("guarded", "tiles")(reproducible(run))

    return decorated


def any_dim(data: st.DataObject, x: Tensor) -> int:
    return data.draw(st.integers(-max(x.dim(), 1), max(x.dim(), 1) - 1), label="dim")


@on_any_view(log=st.booleans())
def test_softmax_of_any_view(
    triton_device: torch.device, view: View, data: st.DataObject, dtypes: Dtypes, log: bool
) -> None:
    x = view.random(dtypes[0], triton_device)
    dim = any_dim(data, x)
    y = softmax(x, dim, dtypes[1], log, "triton")
    assert_rounded(y, dtypes[1], *softmax_and_error(log, x, dim))


@on_any_view(log=st.booleans())
def test_gradient_of_any_view(
    triton_device: torch.device, view: View, data: st.DataObject, dtypes: Dtypes, log: bool
) -> None:
    """The incoming gradient has the view's strides, the output others."""
    grad = view.random(dtypes[0], triton_device)
    dim = any_dim(data, grad)
    y = (torch.log_softmax if log else torch.softmax)(grad.float() / 8, dim).to(dtypes[0])
    dx = softmax_backward(grad, y, dim, dtypes[1], log, "triton")
    assert_rounded(dx, dtypes[1], *backward_and_error(log, grad, y, dim))


@on_any_view(keepdim=st.booleans())
def test_sum_of_any_view(
    triton_device: torch.device, view: View, data: st.DataObject, dtypes: Dtypes, keepdim: bool
) -> None:
    x = view.random(dtypes[0], triton_device)
    some = st.lists(st.sampled_from(range(x.dim())), unique=True) if x.dim() else st.just([])
    dims = tuple(
        d - data.draw(st.sampled_from([0, x.dim()])) for d in data.draw(some, label="dims")
    )
    y = sum(x, dims, keepdim, dtypes[1], "triton")
    assert_rounded(y, dtypes[1], *sum_and_error(x, dims, keepdim))
