"""Tiles by length: a row has the same bits alone and in every batch, in every operation."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import SampleCall as Call
from tests.kernels.conftest import Shrink, Traffic, each_sample, numpy_warns, unaligned
from tritonamp.kernels import _lines, softmax, softmax_backward
from tritonamp.kernels import activation as _activation
from tritonamp.kernels import activation_backward as _activation_backward
from tritonamp.kernels import add_norm as _add_norm
from tritonamp.kernels import cross_entropy as _cross_entropy
from tritonamp.kernels import cross_entropy_backward as _cross_entropy_backward
from tritonamp.kernels import group_norm as _group_norm
from tritonamp.kernels import group_norm_backward as _group_norm_backward
from tritonamp.kernels import masked_softmax as _masked_softmax
from tritonamp.kernels import masked_softmax_backward as _masked_softmax_backward
from tritonamp.kernels import norm as _norm
from tritonamp.kernels import norm_backward as _norm_backward
from tritonamp.kernels import reduce as _reduce
from tritonamp.kernels._by_length import BATCH_INVARIANT, by_length, element_sigmoid, is_by_length
from tritonamp.kernels._implementations import line_sums
from tritonamp.kernels._launch import Launch

pytestmark = numpy_warns

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INVARIANT = BATCH_INVARIANT["triton"]
Results = tuple[Tensor, ...]


class Rows(NamedTuple):
    """Inputs of every operation, in their first dimension one row each."""

    x: Tensor  # [r, n]
    grad: Tensor  # [r, n]
    targets: Tensor  # [r]
    keep: Tensor  # [r, n], bool
    weight: Tensor  # [n], the same for all rows

    @classmethod
    def made(cls, rows: int, n: int, dtype: torch.dtype, device: torch.device) -> "Rows":
        make = torch.Generator().manual_seed(rows * n)
        x = torch.randn(rows, n, generator=make) * 3
        grad = torch.randn(rows, n, generator=make)
        targets = torch.randint(n, (rows,), generator=make)
        keep = torch.rand(rows, n, generator=make) > 0.3
        weight = torch.rand(n, generator=make) + 0.5
        given = x.to(dtype), grad.to(dtype), targets, keep, weight
        return cls(*(each.to(device) for each in given))

    def part(self, at: slice) -> "Rows":
        """Return some of the rows, in memory that begins within the whole."""
        return Rows(self.x[at], self.grad[at], self.targets[at], self.keep[at], self.weight)


def softmaxes(r: Rows, backend: str) -> Results:
    y = softmax.softmax(r.x, 1, r.x.dtype, False, backend)
    log_y = softmax.softmax(r.x, 1, FP32, True, backend)
    back = softmax_backward.softmax_backward
    grads = back(r.grad, y, 1, r.x.dtype, False, backend)
    return y, log_y, grads, back(r.grad.float(), log_y, 1, r.x.dtype, True, backend)


def sums(r: Rows, backend: str) -> Results:
    return (_reduce.sum(r.x, (1,), False, FP32, backend),)


def norms(r: Rows, backend: str) -> Results:
    n, found = r.x.shape[1], []
    for center in (True, False):
        w, b = r.weight, r.weight if center else None
        y, stats = _norm.norm(r.x, w, b, n, 1e-5, center, r.x.dtype, backend)
        added = _add_norm.add_norm(r.x, r.grad, w, b, n, 1e-5, center, backend)
        found += [y, *stats, *added[:2]]
        for of_weight in (True, False):
            other = r.grad if of_weight else None
            args = r.grad, r.x, w, stats, n, of_weight, center and of_weight, other
            found.append(_norm_backward.norm_backward(*args, backend)[0])
    return tuple(found)


def losses(r: Rows, backend: str) -> Results:
    found = []
    for smoothing, temperature, entropy in ((0.0, 1.0, False), (0.1, 0.7, True)):
        how = 1, 3, smoothing, temperature
        loss, stats = _cross_entropy.cross_entropy(r.x, r.targets, *how, entropy, backend)
        grad = r.grad[:, : 1 + entropy].float().t().contiguous()
        if len(grad) == 1 + entropy:  # a line of one element has no more
            args = r.x, r.targets, grad, stats, *how, backend
            found.append(_cross_entropy_backward.cross_entropy_backward(*args))
        found += [loss, *stats]
    return tuple(found)


def masked(r: Rows, backend: str) -> Results:
    found = []
    # as scores [batch, heads, queries, keys]: masks of each row, and of each image
    x, keep = r.x[:, None, None].expand(-1, 1, 2, -1), r.keep[:, None, None]
    whole = keep.expand(-1, 1, 2, -1).contiguous()
    for mask, causal in ((None, True), (keep, False), (whole, True), (keep.to(r.x.dtype), False)):
        args = 0.3, causal, x.dtype, True, -float("inf"), True, False, backend
        y = _masked_softmax.masked_softmax(x, mask, *args)
        grad = r.grad[:, None, None].expand(-1, 1, 2, -1)
        back = _masked_softmax_backward.masked_softmax_backward
        found += [y, back(grad, y, 0.3, causal, x.dtype, backend)]
    return tuple(found)


def activations(r: Rows, backend: str) -> Results:
    args = r.grad, "sigmoid", 1.6, 0.07, backend
    y = _activation.activation(r.x, *args)
    return y, *_activation_backward.activation_backward(r.grad, r.x, *args)


def groups(r: Rows, backend: str) -> Results:
    """Images [r, 6, ...] in 3 groups and one, in both orders of memory."""
    found = []
    for channels in (6, 12) if r.x.shape[1] < 600 else (6,):
        n = r.x.shape[1] // channels * channels
        x, grad = (each[:, :n].reshape(len(each), channels, -1, 1) for each in (r.x, r.grad))
        w = r.weight[:channels]
        for form in (torch.contiguous_format, torch.channels_last):
            x, grad = x.contiguous(memory_format=form), grad.contiguous(memory_format=form)
            for count in (1, 3) if n else ():
                y, stats = _group_norm.group_norm(x, w, w, count, 1e-5, backend)
                args = grad, x, w, stats, count, True, True, backend
                found += [y, _group_norm_backward.group_norm_backward(*args)[0]]
    return tuple(found)


OPS = [softmaxes, sums, norms, losses, masked, activations, groups]
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def differences(op: Callable[[Rows, str], Results], rows: Rows, backend: str) -> list[int]:
    """Return which results of some rows have other bits than they have among all rows."""
    whole, count = op(rows, backend), len(rows.x)
    found = set()
    for at in (slice(1), slice(1, 2), slice(count // 2, None), slice(1, count - 1)):
        if at.stop is None or at.start is None or at.stop > at.start:
            parts = op(rows.part(at), backend)
            for i, (all_rows, part) in enumerate(zip(whole, parts, strict=True)):
                expected = all_rows[at]
                assert expected.shape == part.shape
                if not torch.equal(expected.nan_to_num(7.0), part.nan_to_num(7.0)):
                    found.add(i)
    return sorted(found)


# lengths on both sides of tiles and of vectors; rows in numbers that share tiles, or leave them
LENGTHS = [1, 2, 7, 33, 64, 100, 257, 512, 513, 520, 1000, 1001, 1024, 2049, 4096, 5001, 8193, 9000]
LONG = [16385, 33001, 50257]  # softmax moves along lines above 32768, the others above 8192


@each_op
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("n", LENGTHS)
def test_rows_do_not_depend_on_their_batch(
    triton_device: torch.device, op: Any, dtype: torch.dtype, n: int
) -> None:
    for rows in (3, 19) if n <= 520 else (5,):
        made = Rows.made(rows, n, dtype, triton_device)
        assert differences(op, made, INVARIANT) == []


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(triton_device: torch.device, seed: int) -> None:
    """Ten shapes of random lengths and numbers of rows, each in random splits."""
    draw = random.Random(seed)
    for _ in range(10):
        n = draw.randint(1, 2000)
        count = draw.randint(2, max(4096 // n, 3))
        dtype, op = draw.choice([FP16, BF16, FP32]), draw.choice([softmaxes, sums, norms, losses])
        rows = Rows.made(count, n, dtype, triton_device)
        cuts = sorted({0, count, *(draw.randrange(count) for _ in range(3))})
        whole = op(rows, INVARIANT)
        for at in map(slice, cuts, cuts[1:]):
            for all_rows, part in zip(whole, op(rows.part(at), INVARIANT), strict=True):
                assert torch.equal(all_rows[at], part), (count, n, dtype, op.__name__, at)


@pytest.mark.parametrize("n", LONG)
@pytest.mark.parametrize("op", [softmaxes, sums, losses], ids=lambda op: op.__name__)
def test_long_rows(triton_device: torch.device, op: Any, n: int) -> None:
    assert differences(op, Rows.made(3, n, FP16, triton_device), INVARIANT) == []


@pytest.mark.parametrize("n", [129, 500, 1000])
@pytest.mark.parametrize("op", [softmaxes, sums], ids=lambda op: op.__name__)
def test_shared_rows(
    triton_device: torch.device,
    small_tiles: Shrink,
    monkeypatch: pytest.MonkeyPatch,
    op: Any,
    n: int,
) -> None:
    """Rows above LONG_LINE have several programs, in a number that follows from their length."""
    small_tiles(2)
    monkeypatch.setattr(_lines, "LONG_LINE", 128)
    monkeypatch.setattr(_lines, "SEGMENT", 256)
    for rows in (3, 9):
        assert differences(op, Rows.made(rows, n, FP16, triton_device), INVARIANT) == []


def test_rows_depend_on_their_batch_without_it(triton_device: torch.device) -> None:
    """Rows alone are shared by programs, and odd lines begin within a vector."""
    long, odd = (Rows.made(3, n, FP16, triton_device) for n in (40000, 50257))
    assert differences(softmaxes, long, "triton") or differences(softmaxes, odd, "triton")


@each_op
@pytest.mark.parametrize("n", [7, 1000, 40000])
def test_rows_in_eager_torch(op: Any, n: int) -> None:
    """Also where torch has several threads, among which it divides one long line."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rows = Rows.made(3, n, FP16, torch.device("cpu"))
        assert differences(op, rows, BATCH_INVARIANT["eager"]) == []
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("op", [softmaxes, sums, norms, losses, masked], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_columns_in_eager_torch(op: Any, dtype: torch.dtype) -> None:
    """Rows whose elements are no neighbours in memory have the bits of rows that are."""
    rows = Rows.made(9, 1001, dtype, torch.device("cpu"))
    columns = (each.t().contiguous().t() if each.dim() == 2 else each for each in rows)
    backend = BATCH_INVARIANT["eager"]
    for found, expected in zip(op(Rows(*columns), backend), op(rows, backend), strict=True):
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_an_image_in_channels_last_in_eager_torch() -> None:
    """The groups of one image are columns of its memory, those of several are copied to rows."""
    x = torch.randn(3, 6, 9, 5, generator=torch.Generator().manual_seed(2))
    x = x.contiguous(memory_format=torch.channels_last)
    backend = BATCH_INVARIANT["eager"]
    whole, _ = _group_norm.group_norm(x, None, None, 6, 1e-5, backend)
    alone, _ = _group_norm.group_norm(x[1:2], None, None, 6, 1e-5, backend)
    assert torch.equal(whole[1:2], alone)


def test_a_sigmoid_does_not_depend_on_the_place() -> None:
    x = torch.randn(70001, generator=torch.Generator().manual_seed(4))
    with by_length():
        whole = element_sigmoid(x)
        for at in (slice(1), slice(3, 11), slice(69990, None)):
            assert torch.equal(element_sigmoid(x[at]), whole[at])
    torch.testing.assert_close(whole, element_sigmoid(x))


@each_sample
def test_values_are_those_of_the_twin(call: Call, triton_device: torch.device) -> None:
    """By length, results differ from the twin's by no more than in tiles by shape."""
    for shape in ((5, 130), (3, 2049)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half().to(triton_device)
        for ours, twin in zip(call(x, 1, INVARIANT), call(x, 1, "eager"), strict=True):
            assert ours.dtype is twin.dtype and ours.shape == twin.shape
            largest = 2e-3 * float(twin.float().abs().amax()) if twin.numel() else 0.0
            torch.testing.assert_close(ours.float(), twin.float(), rtol=0.0, atol=largest)


@pytest.mark.parametrize("dim", [(0,), (1,), (0, 1), (0, 2), (1, 2), ()])
def test_sums_along_any_dimension(triton_device: torch.device, dim: tuple[int, ...]) -> None:
    """The bits are those of the same elements as a row."""
    x = torch.randn(5, 33, 7, generator=torch.Generator().manual_seed(1)).half().to(triton_device)
    dims = dim or (0, 1, 2)
    rows = x.permute(*[d for d in range(3) if d not in dims], *dims).flatten(3 - len(dims))
    for keepdim in (False, True):
        for backend in (INVARIANT, BATCH_INVARIANT["eager"]):
            found = _reduce.sum(x, dim, keepdim, FP32, backend)
            assert found.shape == x.float().sum(dims, keepdim).shape
            expected = _reduce.sum(rows, (-1,), False, FP32, backend)
            assert torch.equal(found.flatten(), expected.flatten())


def test_bytes(triton_device: torch.device, traffic: Traffic) -> None:
    """Rows cost no more bytes than by shape, odd ones, too."""
    for n in (1000, 1001, 40000):
        x = Rows.made(8, n, FP16, triton_device).x
        found = {}
        for backend in ("triton", INVARIANT):
            traffic.read = traffic.written = 0
            softmax.softmax(x, 1, FP16, False, backend)
            found[backend] = traffic.read, traffic.written
        assert found[INVARIANT][1] == 2 * x.numel() <= found["triton"][1]
        assert found[INVARIANT][0] <= found["triton"][0]


def test_kernels_get_aligned_rows(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a call and by a plan; the interpreter has the same bits at any address."""
    x = unaligned(torch.randn(3, 33).half().to(triton_device))
    assert x.data_ptr() % 16
    addresses: list[int] = []
    call_launch = Launch.__call__

    def noted(launch: Launch, *tensors: Tensor) -> Any:
        addresses.extend(tensor.data_ptr() % 16 for tensor in tensors)
        return call_launch(launch, *tensors)

    monkeypatch.setattr(Launch, "__call__", noted)
    args = 1, FP16, False
    plan = softmax.SOFTMAX.prepare(INVARIANT, x, *args)
    assert torch.equal(plan(x), softmax.softmax(x, *args, INVARIANT))
    assert addresses and not any(addresses)
    softmax.softmax(x, *args, "triton")
    assert any(addresses)  # by shape, nothing is copied


def test_the_scope_ends_with_an_error() -> None:
    def fail() -> None:
        assert is_by_length()
        raise ArithmeticError

    with pytest.raises(ArithmeticError), by_length():
        fail()
    assert not is_by_length()


def test_sums_of_one_line() -> None:
    x = torch.randn(1, 100000)
    with by_length():
        assert line_sums(x, 1).shape == (1,)
        assert line_sums(x, 1, keepdim=True).shape == (1, 1)
        assert torch.equal(line_sums(x[0], 0), line_sums(x.expand(3, -1).contiguous(), 1)[2])
