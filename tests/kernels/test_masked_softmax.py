"""Masked softmax, kernel and twin against FP64."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import Shrink, U, assert_within, numpy_warns, ulp
from tritonamp.kernels import masked_softmax as module
from tritonamp.kernels._masks import MOST_DIMS, line_tiling, mask_layout
from tritonamp.kernels.device import INTERPRETED
from tritonamp.kernels.masked_softmax import masked_softmax

pytestmark = [numpy_warns, pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")]

HALF, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")
BATCH, HEADS, QUERIES = 2, 3, 5

Shape = tuple[int, ...]
PATTERNS: dict[str, Callable[[int, int, int, int], Shape]] = {
    "one": lambda b, h, q, k: (),
    "K": lambda b, h, q, k: (k,),
    "Q K": lambda b, h, q, k: (q, k),
    "B 1 1 K": lambda b, h, q, k: (b, 1, 1, k),
    "B 1 Q K": lambda b, h, q, k: (b, 1, q, k),
    "1 H Q K": lambda b, h, q, k: (1, h, q, k),
    "H 1 K": lambda b, h, q, k: (h, 1, k),
    "B H Q K": lambda b, h, q, k: (b, h, q, k),
    "B 1 Q 1": lambda b, h, q, k: (b, 1, q, 1),
    "H 1 1": lambda b, h, q, k: (h, 1, 1),
}
KINDS = ["bool", "half", "float32", "none"]
KEYS = [1, 2, 7, 8, 31, 33, 100, 511, 513, 1000, 1001, 1024, 1025, 2049]

each_pattern = pytest.mark.parametrize("pattern", PATTERNS)
each_kind = pytest.mark.parametrize("kind", KINDS)
each_causal = pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])


class How(NamedTuple):
    """Arguments of ``masked_softmax`` after its tensors, without the backend."""

    scale: float = 0.3
    causal: bool = False
    dtype: torch.dtype = HALF
    keep: bool = True
    fill: float = -INF
    zero: bool = True
    rounds: bool = False


def mask_of(kind: str, shape: Shape, device: torch.device) -> Tensor | None:
    """A mask that excludes about a third, and of an added one some columns."""
    if kind == "none":
        return None
    kept = torch.rand(shape, device=device) < 0.65
    if kind == "bool":
        return kept
    added = torch.randn(shape, device=device).masked_fill(~kept, -INF)
    return added.to(HALF) if kind == "half" else added


def scores(
    shape: Shape, device: torch.device, dtype: torch.dtype = HALF, spread: float = 4
) -> Tensor:
    """In memory from ``empty_like``, which may be guarded."""
    x = (torch.randn(shape, device=device) * spread).to(dtype)
    return torch.empty_like(x).copy_(x)


def exact_and_error(
    x: Tensor, mask: Tensor | None, how: How, products: bool
) -> tuple[Tensor, Tensor]:
    """The result in FP64, and the error of FP32 arithmetic.

    As in ``softmax_and_error``; the difference of scores is scaled by a rounded factor, 3 d u in
    all. With ``products``, scores are products and sums instead, off by the half ulps of these two,
    and so is the largest.
    """
    wide = x.double() * how.scale
    size = wide.abs()
    excluded = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if mask is not None and mask.dtype is torch.bool:
        excluded = (mask != how.keep).expand(x.shape)
        wide = wide.masked_fill(excluded, how.fill)
    elif mask is not None:
        excluded = (mask == -INF).expand(x.shape)
        wide = wide + mask.double()
        size = size + wide.abs().nan_to_num(0, 0, 0)
    if how.causal:
        queries, keys = x.shape[-2:]
        above = torch.ones(queries, keys, device=x.device, dtype=torch.bool)
        above = above.triu(keys - queries + 1)
        wide, excluded = wide.masked_fill(above, -INF), excluded | above
    exact = wide.softmax(-1)
    if how.zero:
        exact = exact.masked_fill(excluded.all(-1, keepdim=True), 0.0)
    if not x.numel():
        return exact, exact
    n = x.shape[-1] if x.dim() else 1
    tile = line_tiling(tuple(x.shape), module.PER_THREAD, module.LONGEST, 8).layout[-1]
    d = (wide.amax(-1, keepdim=True) - wide).nan_to_num(0, 0, 0)
    of_sum = 3 * math.log(n) + 5 + n + 6 * -(-n // tile)
    of_products = 2 * size.amax(-1, keepdim=True) if products else 0
    return exact, (3 * d + of_products + 11 + of_sum) * U * exact + 2.0**-126


def check(x: Tensor, mask: Tensor | None, how: How, backend: str, one_ulp: bool = True) -> Tensor:
    """FP32's errors, and the result rounded: of half at most one ulp, the numerics contract."""
    adds = mask is not None and mask.dtype is not torch.bool
    exact, error = exact_and_error(x, mask, how, backend == "eager" or adds or how.scale <= 0)
    y = masked_softmax(x, mask, *how, backend)
    assert y.dtype is how.dtype
    bound = ulp(exact, how.dtype) / 2 + error
    assert_within(y, exact, bound.minimum(ulp(exact, how.dtype)) if one_ulp else bound)
    return y


@each_kind
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_steps_are_rounded_as_separate_operations_round(
    device: torch.device, backend: str, kind: str, dtype: torch.dtype
) -> None:
    """Errors of a step, up to half an ulp of scores near 90, would be far above the bound."""
    if dtype is not HALF and backend == "triton" and INTERPRETED:
        pytest.skip("the interpreter computes bfloat16 tensors as FP32 ones")
    x = (60 * scores((3, 4, 130), device)).to(dtype)
    mask = mask_of(kind, (3, 4, 130), device)
    if kind == "half":
        mask = mask.to(dtype)
    steps = x * 0.3
    if kind == "bool":
        steps = steps.masked_fill(~mask, -INF)
    elif mask is not None:
        steps = steps + mask
    exact = steps.double().softmax(-1)
    y = masked_softmax(x, mask, *How(dtype=dtype, rounds=True), backend)
    assert_within(y, exact, ulp(exact, dtype))
    single = masked_softmax(x, mask, *How(dtype=dtype), backend)
    assert not torch.equal(y, single)


def test_the_lowest_number_makes_a_uniform_row_of_rounded_steps(
    device: torch.device, backend: str
) -> None:
    x = scores((2, 64), device)
    mask = torch.full((2, 64), -65504.0, device=device, dtype=HALF)
    y = masked_softmax(x, mask, *How(scale=1.0, rounds=True), backend)
    assert y.tolist() == [[1 / 64] * 64] * 2
    assert masked_softmax(x, mask, *How(scale=1.0), backend).unique().numel() > 2


@pytest.mark.parametrize("keys", KEYS)
@each_kind
@each_causal
def test_lengths(device: torch.device, backend: str, keys: int, kind: str, causal: bool) -> None:
    x = scores((2, 1, 4, keys), device)
    mask = mask_of(kind, (2, 1, 1, keys), device)
    check(x, mask, How(causal=causal), backend)


@each_pattern
@pytest.mark.parametrize("kind", KINDS[:-1])
@each_causal
@pytest.mark.parametrize("keys", [6, 24])
def test_masks_that_broadcast(
    device: torch.device, backend: str, pattern: str, kind: str, causal: bool, keys: int
) -> None:
    x = scores((BATCH, HEADS, QUERIES, keys), device)
    mask = mask_of(kind, PATTERNS[pattern](*x.shape), device)
    check(x, mask, How(causal=causal), backend)


@pytest.mark.parametrize(
    "dtypes", [(BF16, BF16), (HALF, WIDE), (WIDE, HALF), (WIDE, WIDE)], ids=str
)
@each_kind
@pytest.mark.parametrize("keys", [33, 256])
def test_dtypes(
    device: torch.device,
    backend: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    kind: str,
    keys: int,
) -> None:
    given, result = dtypes
    mask = mask_of(kind, (QUERIES, keys), device)
    how = How(dtype=result, causal=True)
    check(scores((3, QUERIES, keys), device, given), mask, how, backend, result is not WIDE)


SHAPES = [(5, 3), (3, 5), (70, 64), (64, 70), (1, 9), (9, 1), (33, 600), (600, 33)]


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
@each_kind
def test_the_diagonal_ends_in_the_corner(
    device: torch.device, backend: str, queries: int, keys: int, kind: str
) -> None:
    x = scores((2, queries, keys), device)
    mask = mask_of(kind, (keys,), device)
    y = check(x, mask, How(causal=True), backend)
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    above = (j > i + keys - queries).expand(y.shape)
    assert not y[above].any()
    if kind == "none":
        assert (y > 0)[~above].all()


@pytest.mark.parametrize("keys", [129, 200, 256, 300, 1000])
@each_kind
@each_causal
@pytest.mark.usefixtures("small_loops")
def test_long_lines(device: torch.device, backend: str, keys: int, kind: str, causal: bool) -> None:
    """Of several tiles of 128 columns, of which the diagonal leaves some out."""
    x = scores((2, 7, keys), device)
    check(x, mask_of(kind, (7, keys), device), How(causal=causal), backend)
    check(x[:, :, :140].mT, mask_of(kind, (7,), device), How(causal=causal), backend)
    # queries of which the first see no column, and others a few
    tall = scores((min(keys, 200) + 3, 150), device)
    check(tall, mask_of(kind, (150,), device), How(causal=causal), backend)


@pytest.mark.parametrize("keys", [32768, 32769, 40000])
@each_kind
def test_results_at_real_boundaries(
    device: torch.device, backend: str, keys: int, kind: str
) -> None:
    x, mask = scores((2, keys), device), mask_of(kind, (keys,), device)
    check(x, mask, How(causal=True), backend)


@pytest.mark.parametrize("scale", [1.0, 8, -0.7, -3.0, 0.0, 1e-30, 1e-44])
@each_kind
@pytest.mark.parametrize("many", [None, 0])
def test_scales(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    scale: float,
    kind: str,
    many: int | None,
) -> None:
    small_tiles(many)
    x, mask = scores((4, 200), device), mask_of(kind, (200,), device)
    check(x, mask, How(scale=float(scale)), backend)


@pytest.mark.parametrize("many", [None, 0])
def test_large_scores_are_exact(
    device: torch.device, small_tiles: Shrink, many: int | None
) -> None:
    """Products of 60000 and 0.3 are off by 2**-11; their difference, scaled, is not."""
    small_tiles(many)
    x = scores((6, 200), device, spread=3) + 30_000
    check(x, mask_of("bool", (200,), device), How(scale=0.3), "triton")


# lines without a column that counts


@each_kind
@pytest.mark.parametrize("keys", [3, 64, 200])
@pytest.mark.parametrize("many", [None, 0])
def test_lines_without_columns_are_zero(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    kind: str,
    keys: int,
    many: int | None,
) -> None:
    """Their mask is False or -inf everywhere, or there is no key up to the diagonal. As an option
    they are NaN, torch's result.
    """
    small_tiles(many)
    x = scores((keys + 2, keys), device)
    mask = mask_of(kind, x.shape, device)
    if mask is not None:
        mask[3] = False if kind == "bool" else -INF
    empty = torch.arange(keys + 2, device=device) < 2
    empty[3] |= mask is not None
    if mask is not None:  # random ones, in short lines
        kept = mask if kind == "bool" else mask != -INF
        empty |= ~kept.tril(-2).any(-1)
    y = masked_softmax(x, mask, *How(causal=True), backend)
    assert not y[empty].any()
    torch.testing.assert_close(
        y[~empty].sum(-1).double(),
        y.new_ones(1).double().expand(int((~empty).sum())),
        rtol=0,
        atol=keys * 2.0**-11,
    )
    torchs = masked_softmax(x, mask, *How(causal=True, zero=False), backend)
    assert torch.equal(torchs.isnan(), empty[:, None].expand(x.shape))
    assert torch.equal(torchs[~empty], y[~empty])


@pytest.mark.parametrize("large", [-1e9, torch.finfo(WIDE).min, -65504.0])
@pytest.mark.parametrize("many", [None, 0])
def test_large_numbers_are_added_in_fp32(
    device: torch.device, backend: str, small_tiles: Shrink, large: float, many: int | None
) -> None:
    """A line of them everywhere stays a softmax, of scores that FP32 has rounded: near 65504 to
    2**-8, by which they differ if a GPU rounds product and sum once.
    """
    small_tiles(many)
    x = scores((3, 200), device)
    mask = torch.zeros(3, 200, device=device, dtype=HALF if large == -65504 else WIDE)
    mask[1:, 50:] = large
    mask[2] = large
    y = masked_softmax(x, mask, *How(), backend)
    expected = (x.float() * 0.3 + mask.float()).softmax(-1)
    torch.testing.assert_close(y[:2].float(), expected[:2], rtol=2.0**-10, atol=2.0**-24)
    torch.testing.assert_close(y[2].float(), expected[2], rtol=2.0**-7, atol=0)
    assert not y[1, 50:].any() and (y[2] > 0).all()


@pytest.mark.parametrize("keys", [20, 200])
@pytest.mark.parametrize("many", [None, 0])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_fill_of_apex(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    keys: int,
    many: int | None,
    scale: float,
) -> None:
    """Products below the fill leave their probability to what is masked, as in apex."""
    small_tiles(many)
    x = scores((4, keys), device)
    x[1], x[2] = -20_000.0 / scale, -10_000.0 / scale
    mask = torch.rand(4, keys, device=device) < 0.5
    mask[:, 0], mask[3] = False, True
    mask[:3, 1] = True
    how = How(scale=scale, keep=False, fill=-10_000.0)
    y = check(x, mask, how, backend)
    assert not y[3].any() and not y[0][mask[0]].any()
    assert not y[1][~mask[1]].any() and (y[1][mask[1]] > 0).all()


# infinities and NaN

SPECIAL: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "NaN": lambda x, kept: x.__setitem__((0, 2), NAN),
    "inf": lambda x, kept: x.__setitem__((0, 2), INF),
    "late inf": lambda x, kept: x.__setitem__((0, 180), INF),
    "-inf": lambda x, kept: x.__setitem__((0, slice(2, 180)), -INF),
    "-inf everywhere": lambda x, kept: x.__setitem__(0, -INF),
    "NaN that is masked": lambda x, kept: (
        kept.__setitem__((0, 2), False) or x.__setitem__((0, 2), NAN)
    ),
    "inf that is masked": lambda x, kept: (
        kept.__setitem__((0, 2), False) or x.__setitem__((0, 2), INF)
    ),
    "-inf where not masked": lambda x, kept: (
        kept.__setitem__((0, slice(50, 200)), False) or x.__setitem__((0, slice(0, 50)), -INF)
    ),
    "largest": lambda x, kept: x.__setitem__(0, 65504.0),
    "smallest": lambda x, kept: x.__setitem__(0, -65504.0),
}


@pytest.mark.parametrize("special", SPECIAL)
@each_kind
@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("many", [None, 0])
def test_special_values_are_torchs(
    device: torch.device,
    backend: str,
    small_tiles: Shrink,
    special: str,
    kind: str,
    scale: float,
    many: int | None,
) -> None:
    """NaN at a column that a boolean mask excludes has no effect; in an added mask it stays."""
    small_tiles(many)
    x = scores((3, 200), device)
    kept = torch.rand(3, 200, device=device) < 0.65
    kept[:, 2] = kept[:, 180] = True
    SPECIAL[special](x, kept)
    mask: Tensor | None = kept
    wide = (x.float() * scale).masked_fill(~kept, -INF)
    if kind == "none":
        mask, wide = None, x.float() * scale
    elif kind != "bool":
        mask = torch.zeros(3, 200, device=device, dtype=HALF).masked_fill(~kept, -INF)
        wide = x.float() * scale + mask
    y = masked_softmax(x, mask, *How(scale=scale), backend)
    expected = wide.softmax(-1)
    torch.testing.assert_close(y.float(), expected, rtol=2.0**-10, atol=2.0**-24, equal_nan=True)


def test_what_is_above_the_diagonal_has_no_effect(device: torch.device, backend: str) -> None:
    x = scores((2, 20, 40), device)
    above = torch.ones(20, 40, dtype=torch.bool, device=device).triu(21)
    expected = masked_softmax(x, None, *How(causal=True), backend)
    for bad in (NAN, INF, -INF, 60000.0):
        y = masked_softmax(x.masked_fill(above, bad), None, *How(causal=True), backend)
        assert torch.equal(y, expected)
    # 0 above the diagonal of a line with NaN is NaN, too, as in torch
    x[0, 3, 0] = NAN
    y = masked_softmax(x, None, *How(causal=True), backend)
    assert y[0, 3].isnan().all() and torch.equal(y[0, 4:], expected[0, 4:])


# memory

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {  # of [2, 3, 16, 16]
    "transposed": lambda x: x.mT,
    "permuted": lambda x: x.permute(1, 0, 3, 2),
    "steps": lambda x: x[:, :, ::2, 1::3],
    "narrow": lambda x: x[:, 1:, 3:, 3:],
    "expanded": lambda x: x[:1, :1].expand(4, 5, 16, 16),
    "a window": lambda x: x[:, None, :, None],
    "a window that broadcasts": lambda x: x[:, None, :1, None].mT,
    "a part of a cache": lambda x: x[:, :, 5:6, :13],
    "columns alike": lambda x: x[..., :1].expand(2, 3, 16, 16),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("of", ["scores", "mask", "both"])
@pytest.mark.parametrize("kind", ["bool", "float32"])
@each_causal
def test_strides_do_not_matter(
    device: torch.device, backend: str, view: str, of: str, kind: str, causal: bool
) -> None:
    x, mask = scores((2, 3, 16, 16), device), mask_of(kind, (2, 3, 16, 16), device)
    assert mask is not None
    viewed = VIEWS[view](x), VIEWS[view](mask)
    copies = [t.clone(memory_format=torch.contiguous_format) for t in viewed]
    given = [
        v if of in (name, "both") else c
        for name, v, c in zip(("scores", "mask"), viewed, copies, strict=True)
    ]
    y = masked_softmax(*given, *How(causal=causal), backend)
    assert torch.equal(y, masked_softmax(*copies, *How(causal=causal), backend))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 5), (0,), (3, 0, 0)])
@each_kind
def test_empty(device: torch.device, backend: str, shape: Shape, kind: str) -> None:
    x, mask = scores(shape, device), mask_of(kind, shape[-1:], device)
    for causal in {False, len(shape) > 1}:
        y = masked_softmax(x, mask, *How(causal=causal), backend)
        assert y.shape == shape and y.dtype is HALF


@pytest.mark.parametrize("shape", [(), (9,), (1, 1), (2, 3, 2, 3, 4, 20), (1, 2, 1, 1, 3, 4)])
@each_kind
def test_any_number_of_dimensions(
    device: torch.device, backend: str, shape: Shape, kind: str
) -> None:
    """More than the kernels address, too: every second dimension broadcasts."""
    x = scores(shape, device)
    alternating = tuple(size if d % 2 else 1 for d, size in enumerate(shape))
    for given in {shape, alternating, shape[1:], alternating[1:]}:
        check(x, mask_of(kind, given, device), How(), backend)


LAYOUTS: dict[str, tuple[Shape, Shape, int]] = {
    "one number": ((), (2, 3, 4, 8), 1),
    "keys": ((8,), (2, 3, 4, 8), 1),
    "queries": ((4, 8), (2, 3, 4, 8), 2),
    "padding": ((2, 1, 1, 8), (2, 3, 4, 8), 2),
    "of heads": ((1, 3, 4, 8), (2, 3, 4, 8), 2),
    "usual": ((2, 1, 4, 8), (2, 3, 4, 8), 3),
    "all": ((2, 3, 4, 8), (2, 3, 4, 8), 1),
    "Swin's windows": ((1, 5, 1, 4, 8), (2, 5, 3, 4, 8), 4),
    "one batch": ((1, 1, 4, 8), (1, 3, 4, 8), 2),
}


@pytest.mark.parametrize(("shape", "whole", "dims"), LAYOUTS.values(), ids=LAYOUTS)
def test_neighbouring_dimensions_are_one(shape: Shape, whole: Shape, dims: int) -> None:
    """Divisions cost time, and a copy would cost more."""
    mask = torch.arange(math.prod(shape)).view(shape)
    layout = mask_layout(whole, mask)
    assert layout is not None and layout.dims == dims <= MOST_DIMS
    expected = mask.expand(whole)[..., 0].flatten()
    for number, first in enumerate(expected.tolist()):
        rest, offset = number, 0
        for size, stride in zip((*layout.sizes, 1 << 60), layout.strides, strict=True):
            rest, index = divmod(rest, size)
            offset += index * stride
        assert offset == first


# bytes


@pytest.mark.parametrize("keys", [8, 64, 100, 1000])
@pytest.mark.parametrize("queries", [1, 9, 70])
def test_bytes_of_a_causal_softmax(
    traffic: Any, triton_device: torch.device, queries: int, keys: int
) -> None:
    """Columns up to the diagonal are read, and what fills the last vector of 16 bytes."""
    x = scores((2, 3, queries, keys), triton_device)
    masked_softmax(x, None, *How(causal=True), "triton")
    vec = math.gcd(keys, 8)
    seen = [max(i + 1 + keys - queries, 0) for i in range(queries)]
    assert traffic.read == 6 * sum(-(-end // vec) * vec for end in seen) * 2
    assert traffic.written == x.numel() * 2


@each_causal
@pytest.mark.usefixtures("small_loops")
def test_bytes_of_long_lines(traffic: Any, triton_device: torch.device, causal: bool) -> None:
    """Twice up to the diagonal, which crosses a tile; the second time from L2."""
    x = scores((80, 160), triton_device)
    masked_softmax(x, None, *How(causal=causal), "triton")
    ends = [-(-(i + 81) // 8) * 8 if causal else 160 for i in range(80)]
    assert (traffic.read, traffic.written) == (2 * 2 * sum(ends), 2 * x.numel())


@pytest.mark.parametrize(("kind", "size"), [("bool", 1), ("half", 2), ("float32", 4)])
@pytest.mark.parametrize("pattern", ["B 1 Q K", "K", "B H Q K"])
def test_bytes_of_a_mask(
    traffic: Any, triton_device: torch.device, kind: str, size: int, pattern: str
) -> None:
    """Each line reads its mask, which other lines that share it find in L2."""
    x = scores((2, 3, 5, 64), triton_device)
    mask = mask_of(kind, PATTERNS[pattern](*x.shape), triton_device)
    masked_softmax(x, mask, *How(), "triton")
    assert (traffic.read, traffic.written) == (x.numel() * (2 + size), x.numel() * 2)


def test_bytes_of_a_mask_of_lines(traffic: Any, triton_device: torch.device) -> None:
    x = scores((2, 3, 5, 64), triton_device)
    mask = mask_of("bool", (2, 1, 5, 1), triton_device)
    masked_softmax(x, mask, *How(), "triton")
    assert traffic.read == x.numel() * 2 + 30


def test_the_same_bits_in_any_pattern(device: torch.device, backend: str) -> None:
    x = scores((2, 3, 4, 40), device)
    small = mask_of("bool", (1, 1, 1, 40), device)
    assert small is not None
    results = [
        masked_softmax(x, small.expand(*shape, 40).contiguous(), *How(), backend)
        for shape in itertools.product((1, 2), (1, 3), (1, 4))
    ]
    assert all(torch.equal(results[0], result) for result in results[1:])
