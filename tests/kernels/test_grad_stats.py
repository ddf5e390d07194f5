"""Largest magnitude, bit by bit, and sum of squares, against FP64; bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import numpy_warns, unaligned
from tritonamp.kernels import _device_tables, _tables
from tritonamp.kernels._launch import Launch
from tritonamp.kernels._magnitudes import float_bits, magnitude
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels.device import INTERPRETED, tl, triton
from tritonamp.kernels.grad_stats import checked_stats, checksums, grad_stats

pytestmark = numpy_warns

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
KERNELS_TAKE = DTYPES[:3]
SHAPES = [
    (),
    (1,),
    (7,),
    (9,),
    (511,),
    (513,),
    (2047,),
    (2049,),
    (4095,),
    (4096,),
    (4097,),
    (3, 5, 7),
    (2, 4101),
]
INF, NAN = float("inf"), float("nan")
U = 2.0**-24  # half an ulp of 1 in FP32


def stats(grads: list[Tensor], device: torch.device, backend: str) -> tuple[Tensor, Tensor]:
    """The magnitudes, and the sum of squares in FP64."""
    amax, squares = grad_stats(TensorLists(grads=grads), device, backend)
    assert (amax.dtype, amax.shape, amax.device.type) == (torch.float32, (len(grads),), device.type)
    assert (squares.dtype, squares.dim(), squares.device.type) == (torch.float32, 1, device.type)
    return amax, squares.double().sum()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_fp64(device: torch.device, backend: str, dtype: torch.dtype) -> None:
    """n positive terms in any order: n u for each part, and 4 u for square, root, square again and
    rounding to FP32.
    """
    grads = [torch.randn(shape, device=device).to(dtype) for shape in SHAPES]
    grads += [unaligned(grad) for grad in grads]
    grads += [
        torch.randn(8, 6, device=device).to(dtype)[::2, 1:],
        torch.randn(5, 9, device=device).to(dtype).t(),
    ]
    grads += [
        torch.randn(3, 1, device=device).to(dtype).expand(3, 4),
        torch.zeros(7, dtype=dtype, device=device),
    ]
    kept = [(grad.clone(), grad._version) for grad in grads]
    amax, square_sum = stats(grads, device, backend)
    exact = [grad.double() for grad in grads]
    assert amax.tolist() == [e.abs().max().float().item() for e in exact]
    longest = max(e.numel() for e in exact)
    expected = sum(e.square().sum() for e in exact)
    torch.testing.assert_close(square_sum, expected, rtol=(longest + 4) * U, atol=0)
    assert all(
        torch.equal(g, k) and g._version == version
        for g, (k, version) in zip(grads, kept, strict=True)
    )


@pytest.mark.parametrize("programs", [_device_tables.PROGRAMS, 1])
@pytest.mark.parametrize("place", [lambda x: x, unaligned], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", KERNELS_TAKE, ids=str)
def test_no_element_is_lost(
    device: torch.device,
    backend: str,
    dtype: torch.dtype,
    place: Any,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Integers whose sums of squares FP32 holds exactly, in any order; 4 u for the twin's root.
    Chunks of one tile, and with one program of several.
    """
    monkeypatch.setattr(_device_tables, "PROGRAMS", programs)
    grads = [place(torch.randint(-30, 31, shape, device=device).to(dtype)) for shape in SHAPES]
    amax, square_sum = stats(grads, device, backend)
    assert amax.tolist() == [grad.abs().max().item() for grad in grads]
    expected = sum(grad.double().square().sum() for grad in grads)
    torch.testing.assert_close(
        square_sum, expected, rtol=0 if backend == "triton" else 4 * U, atol=0
    )


@pytest.mark.parametrize("place", [lambda x: x, unaligned], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", KERNELS_TAKE, ids=str)
def test_one_large_element_anywhere(
    device: torch.device, backend: str, dtype: torch.dtype, place: Any
) -> None:
    """One element at each end of tiles, chunks and vectors."""
    where = [0, 7, 511, 512, 2047, 2048, 4095, 4096, 4103, 4104, 4106]
    grads = []
    for at in where:
        grad = torch.zeros(4107, device=device, dtype=dtype)
        grad[at] = -2.0
        grads.append(place(grad))
    amax, square_sum = stats(grads, device, backend)
    assert amax.tolist() == [2.0] * len(where)
    torch.testing.assert_close(square_sum.item(), 4.0 * len(where), rtol=4 * U, atol=0)


def test_every_magnitude_of_half_is_exact(device: torch.device) -> None:
    """The twin's."""
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(2**15, dtype=torch.int16).view(dtype)
        finite = every[every.isfinite()].to(device)
        amax, _ = stats(list((-finite[::7]).split(1)), device, "eager")
        assert torch.equal(amax.to(dtype), finite[::7])


@triton.jit
def magnitude_kernel(x_ptr, magnitude_ptr, bits_ptr, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    found = magnitude(tl.load(x_ptr + j), TYPE)
    tl.store(magnitude_ptr + j, found)
    tl.store(bits_ptr + j, float_bits(found, TYPE))


def half_patterns(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def wide_patterns() -> Tensor:
    """Around all powers of two, and NaN of many kinds."""
    exponents = torch.arange(2**8, dtype=torch.int64) << 23
    positive = (exponents[:, None] + torch.tensor([0, 1, 2, 2**22, 2**23 - 1])).flatten()
    return torch.cat([positive, positive - 2**31]).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", KERNELS_TAKE, ids=str)
def test_magnitudes_as_integers(triton_device: torch.device, dtype: torch.dtype) -> None:
    """Each half: they order like |x|, inf above all numbers and NaN above inf, and become the same
    FP32 number.
    """
    if dtype is torch.bfloat16 and INTERPRETED:
        pytest.skip("Triton's interpreter has no bfloat16")
    x = (wide_patterns() if dtype is torch.float32 else half_patterns(dtype)).to(triton_device)
    x = torch.cat([x, x.new_zeros((1 << 16 if dtype is not torch.float32 else 1 << 12) - len(x))])
    magnitude, bits = (
        torch.empty(len(x), dtype=torch.int32, device=triton_device) for _ in range(2)
    )
    kind = getattr(tl, _tables.DTYPES[dtype])
    Launch(magnitude_kernel, (1, 1, 1), (), (kind, len(x)), 4)(x, magnitude, bits)
    result = bits.view(torch.float32)
    torch.testing.assert_close(result, x.float().abs(), rtol=0, atol=0, equal_nan=True)
    assert not result.signbit().any()
    order = torch.argsort(magnitude)
    rank = x[order].double().abs().nan_to_num(nan=2.0**300, posinf=2.0**200)
    assert (rank.diff() >= 0).all()
    numbers = rank[1:] < 2.0**300
    assert torch.equal((rank.diff() > 0)[numbers], (magnitude[order].diff() > 0)[numbers])


@pytest.mark.parametrize("place", [0, 511, 4095, 4096, 4098])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inf_and_nan_show_in_the_magnitude(
    device: torch.device, backend: str, dtype: torch.dtype, place: int
) -> None:
    bad = [1.0, INF, -INF, NAN, -NAN]
    grads = [torch.ones(4099, dtype=dtype, device=device) for _ in bad]
    for grad, value in zip(grads, bad, strict=True):
        grad[place] = value
        grad[(place + 1) % 4099] = torch.finfo(dtype).min
    grads[3][(place + 2) % 4099] = INF  # NaN outdoes inf
    amax, _ = stats(grads, device, backend)
    assert amax.isnan().tolist() == [False, False, False, True, True]
    assert amax[:3].tolist() == [torch.tensor(torch.finfo(dtype).max).float().item(), INF, INF]


@pytest.mark.parametrize("dtype", KERNELS_TAKE, ids=str)
def test_subnormal_numbers(device: torch.device, backend: str, dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    grads = [
        torch.tensor([0.0, -k * smallest, smallest], dtype=dtype, device=device) for k in (1, 2, 3)
    ]
    amax, _ = stats(grads, device, backend)
    assert amax.tolist() == [smallest, 2 * smallest, 3 * smallest]


def test_finite_gradients_whose_squares_overflow_stay_finite_in_the_magnitude(
    device: torch.device, backend: str
) -> None:
    """The sum of squares is no test of finiteness."""
    largest = torch.finfo(torch.bfloat16).max
    grads = [torch.full((3,), largest, dtype=torch.bfloat16, device=device)]
    amax, square_sum = stats(grads, device, backend)
    assert (amax.item(), square_sum.item()) == (largest, INF)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_tensors_count_as_zero(
    device: torch.device, backend: str, dtype: torch.dtype
) -> None:
    one = torch.full((1,), 3.0, dtype=dtype, device=device)
    amax, square_sum = stats([one, one[:0], one.new_empty(0, 4), one], device, backend)
    assert amax.tolist() == [3.0, 0.0, 0.0, 3.0]
    torch.testing.assert_close(square_sum.item(), 18.0, rtol=4 * U, atol=0)
    amax, square_sum = stats([one[:0]], device, backend)
    assert (amax.tolist(), square_sum.item()) == ([0.0], 0.0)


def test_no_gradients_at_all(device: torch.device, backend: str) -> None:
    for result in grad_stats(TensorLists(grads=[]), device, backend):
        assert (result.dtype, result.shape, result.device.type) == (
            torch.float32,
            (0,),
            device.type,
        )
    for result in grad_stats(TensorLists(), device, backend):
        assert (result.dtype, result.shape, result.device.type) == (
            torch.float32,
            (0,),
            device.type,
        )


@pytest.mark.parametrize("dtypes", [DTYPES, KERNELS_TAKE], ids=["all", "kernels'"])
def test_dtypes_may_be_mixed(device: torch.device, backend: str, dtypes: list[torch.dtype]) -> None:
    grads = [
        torch.full((2,), float(i + 1), dtype=dtype, device=device) for i, dtype in enumerate(dtypes)
    ]
    amax, square_sum = stats(grads, device, backend)
    assert amax.tolist() == [float(i + 1) for i in range(len(dtypes))]
    expected = 2.0 * sum((i + 1) ** 2 for i in range(len(dtypes)))
    torch.testing.assert_close(square_sum.item(), expected, rtol=4 * U, atol=0)


def test_complex_gradients(device: torch.device, backend: str) -> None:
    amax, square_sum = stats([torch.tensor([3 - 4j, 1j], device=device)], device, backend)
    torch.testing.assert_close(amax, torch.tensor([5.0], device=device), rtol=2 * U, atol=0)
    torch.testing.assert_close(square_sum.item(), 26.0, rtol=6 * U, atol=0)


def test_no_graph_is_kept(device: torch.device, backend: str) -> None:
    grad = torch.ones(3, device=device, requires_grad=True)
    assert not any(result.requires_grad for result in stats([grad], device, backend))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_numbers_that_no_gradient_has_are_zero(
    device: torch.device, backend: str, dtype: torch.dtype
) -> None:
    grads = [torch.full((2,), value, dtype=dtype, device=device) for value in (3.0, 4.0)]
    lists = TensorLists(numbers=[1, 4], size=6, grads=grads)
    amax, squares = grad_stats(lists, device, backend)
    assert amax.tolist() == [0.0, 3.0, 0.0, 0.0, 4.0, 0.0]
    torch.testing.assert_close(squares.sum().item(), 50.0, rtol=4 * U, atol=0)


def test_nothing_is_left_of_the_step_before(device: torch.device, backend: str) -> None:
    def lists_of(value: float) -> TensorLists:
        sizes, dtype = (3, 4100), torch.float16
        grads = [torch.full((n,), value, dtype=dtype, device=device) for n in sizes]
        return TensorLists(memory=memory, grads=grads)

    memory = Memory()
    grad_stats(lists_of(NAN), device, backend)
    lists = lists_of(2.0)
    for _ in range(2):
        amax, squares = grad_stats(lists, device, backend)
        assert amax.tolist() == [2.0, 2.0]
        torch.testing.assert_close(squares.sum().item(), 4.0 * 4103, rtol=4 * U, atol=0)


@pytest.mark.parametrize("place", [lambda x: x, unaligned], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_each_gradient_is_read_once(
    triton_device: torch.device, traffic: Any, dtype: torch.dtype, place: Any
) -> None:
    """Each program reads its row (4 bytes) and of it size, first chunk, pointer and number (8
    each); it leaves a maximum and a sum.
    """
    grads = [
        place(torch.ones(n, dtype=dtype, device=triton_device))
        for n in (5, 511, 4095, 4096, 4097, 8200)
    ]
    programs = sum(-(-len(grad) // 4096) for grad in grads)
    grad_stats(TensorLists(grads=grads), triton_device, "triton")
    numel = sum(map(len, grads))
    assert traffic.read == numel * dtype.itemsize + programs * (4 + 4 * 8)
    assert traffic.written == programs * 8


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def exact_checksum(x: Tensor) -> int:
    """Patterns added up by Python, as signed 64 bits."""
    bits = (torch.view_as_real(x) if x.is_complex() else x).cpu()
    total = sum(bits.view(INTEGERS[bits.element_size()]).flatten().tolist())
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("programs", [_device_tables.PROGRAMS, 1])
@pytest.mark.parametrize("place", [lambda x: x, unaligned], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksums_add_up_bit_patterns(
    device: torch.device,
    backend: str,
    dtype: torch.dtype,
    place: Any,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the chunks: the same bits, also of inf, NaN with payload and subnormal numbers."""
    monkeypatch.setattr(_device_tables, "PROGRAMS", programs)
    grads = [torch.randn(shape).to(dtype) for shape in SHAPES]
    grads[-1].view(INTEGERS[dtype.itemsize]).random_()
    expected = [exact_checksum(grad) for grad in grads]
    grads = [place(grad.to(device)) for grad in grads]
    result = checksums(grads, device, backend)
    assert (result.dtype, result.device.type) == (torch.int64, device.type)
    assert result.tolist() == expected


@pytest.mark.parametrize("at", [0, 7, 511, 2047, 2048, 4096, 4106])
@pytest.mark.parametrize("dtype", KERNELS_TAKE, ids=str)
def test_one_flipped_bit_changes_the_checksum(
    device: torch.device, backend: str, dtype: torch.dtype, at: int
) -> None:
    """Each bit of an element, at the ends of tiles, chunks and vectors."""
    bits, kind = 8 * dtype.itemsize, INTEGERS[dtype.itemsize]
    grad = torch.randn(4107).to(dtype)
    flips = []
    for k in range(bits):
        flipped = grad.clone()
        flipped.view(kind)[at] ^= -(1 << k) if k == bits - 1 else 1 << k
        flips.append(flipped.to(device))
    first, *others = checksums([grad.to(device), *flips], device, backend).tolist()
    assert [abs(other - first) for other in others] == [1 << k for k in range(bits)]


@pytest.mark.parametrize("dtype", KERNELS_TAKE, ids=str)
def test_the_order_of_elements_leaves_the_checksum(
    device: torch.device, backend: str, dtype: torch.dtype
) -> None:
    """Permuted, transposed, with gaps."""
    grad = torch.randn(60, 70, device=device).to(dtype)
    wide = torch.zeros(60, 140, device=device, dtype=dtype)
    wide[:, ::2] = grad
    shuffled = grad.flatten()[torch.randperm(4200, device=device)]
    grads = [grad, grad.t(), grad.t().contiguous(), wide[:, ::2], wide, shuffled]
    assert len(set(checksums(grads, device, backend).tolist())) == 1


def test_checksums_of_other_dtypes(device: torch.device, backend: str) -> None:
    """Complex numbers, also conjugated; integers; nothing."""
    z = torch.randn(5, dtype=torch.complex64)
    tensors = [z, z.conj(), z.conj().imag, torch.arange(7), torch.ones(3, dtype=torch.bool)]
    expected = [exact_checksum(t.resolve_conj().resolve_neg()) for t in tensors[:-1]] + [3]
    found = checksums([t.to(device) for t in tensors], device, backend)
    assert found.tolist() == expected
    assert checksums([], device, backend).shape == (0,)
    mixed = [torch.ones(2, device=device, dtype=dtype) for dtype in DTYPES]
    assert checksums(mixed, device, backend).tolist() == list(map(exact_checksum, mixed))


def test_checked_stats_are_stats_with_checksums(device: torch.device, backend: str) -> None:
    """The bits of ``grad_stats``, in other memory than its results."""
    memory, grads = Memory(), [torch.randn(n, device=device) for n in (3, 4100)]
    lists = TensorLists(memory=memory, numbers=[1, 3], size=4, grads=grads)
    amax, squares = grad_stats(lists, device, backend)
    kept = amax.clone(), squares.clone()
    for _ in range(2):  # nothing is left of the call before
        *stats, sums = checked_stats(lists, device, backend)
        assert all(map(torch.equal, stats, kept))
        assert sums.tolist() == [0, exact_checksum(grads[0]), 0, exact_checksum(grads[1])]
    assert all(
        ours.data_ptr() != s.data_ptr() for ours, s in zip((amax, squares), stats, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_checksum_reads_no_gradient_again(
    triton_device: torch.device, traffic: Any, dtype: torch.dtype
) -> None:
    """One number more of its row (8 bytes) for each program, and an atomic sum."""
    grads = [torch.ones(n, dtype=dtype, device=triton_device) for n in (5, 511, 4096, 8200)]
    programs = sum(-(-len(grad) // 4096) for grad in grads)
    checked_stats(TensorLists(grads=grads), triton_device, "triton")
    assert traffic.read == sum(map(len, grads)) * dtype.itemsize + programs * (4 + 5 * 8)
    assert traffic.written == programs * 16
