"""tritonamp.apex.amp_C and multi_tensor_apply against FP64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tritonamp.apex import amp_C
from tritonamp.apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier

INF, NAN = float("inf"), float("nan")
U32 = torch.finfo(torch.float32).eps
FLOATS = [torch.float32, torch.float16, torch.bfloat16]

each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def tensors(device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    shapes: list[tuple[int, ...]] = [(7, 5), (), (0,), (333,)]
    return [torch.randn(shape).to(device, dtype) for shape in shapes] + [
        torch.randn(4, 6).to(device, dtype).t()
    ]


def flag(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


@each_dtype
@pytest.mark.parametrize("out", FLOATS, ids=str)
def test_scale(dtype: torch.dtype, out: torch.dtype, device: torch.device) -> None:
    xs, found = tensors(device, dtype), flag(device)
    results = [torch.zeros_like(x, dtype=out) for x in xs]
    multi_tensor_applier(amp_C.multi_tensor_scale, found, [xs, results], 0.3)
    assert all(torch.equal(r, (x.float() * 0.3).to(out)) for x, r in zip(xs, results, strict=True))
    assert found.tolist() == [0]
    factor = torch.tensor(2.0, device=device)
    doubled = [x.float() * 2 for x in xs]
    multi_tensor_applier(amp_C.multi_tensor_scale, found, [xs, xs], factor)
    assert all(torch.equal(x, d.to(dtype)) for x, d in zip(xs, doubled, strict=True))


@each_dtype
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("which", [0, 1, 3, 4])
def test_the_flag_is_raised(
    value: float, which: int, dtype: torch.dtype, device: torch.device
) -> None:
    xs, ys = tensors(device, dtype), tensors(device, dtype)
    xs[which][(-1,) * xs[which].dim()] = value
    outs = [torch.zeros_like(x) for x in xs]

    def found(op: Any, *args: Any) -> list[int]:
        raised = flag(device)
        multi_tensor_applier(op, raised, *args)
        return raised.tolist()

    assert found(amp_C.multi_tensor_scale, [xs, outs], 1.0) == [1]
    assert found(amp_C.multi_tensor_l2norm, [xs]) == [1]
    assert found(amp_C.multi_tensor_unscale_l2norm, [xs], torch.ones(1, device=device)) == [1]
    orders = [xs, ys, outs], [ys, xs, outs]
    checked = [
        found(amp_C.multi_tensor_axpby, lists, 1.0, 1.0, n) for lists in orders for n in (-1, 0, 1)
    ]
    assert checked == [[1], [1], [0], [1], [0], [1]]


@each_dtype
def test_axpby(dtype: torch.dtype, device: torch.device) -> None:
    xs, ys, found = tensors(device, dtype), tensors(device, torch.float32), flag(device)
    outs = [torch.zeros_like(x) for x in xs]
    multi_tensor_applier(amp_C.multi_tensor_axpby, found, [xs, ys, outs], 2.0, -3.0, -1)
    for x, y, out in zip(xs, ys, outs, strict=True):
        expected = (2.0 * x.double() - 3.0 * y.double()).to(dtype)
        torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=4 * U32)
    assert found.tolist() == [0]


@each_dtype
@pytest.mark.parametrize("inv_scale", [None, 0.25])
def test_norms(inv_scale: float | None, dtype: torch.dtype, device: torch.device) -> None:
    xs = tensors(device, dtype)
    if dtype is torch.float16:
        xs[-1][0] = 60000.0  # the norm is beyond float16
    expected = torch.stack([x.double().norm() for x in xs]) * (inv_scale or 1.0)
    if inv_scale is None:
        norm, per_tensor = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(device), [xs], True)
        _, nothing = multi_tensor_applier(amp_C.multi_tensor_l2norm, flag(device), [xs])
    else:
        factor = torch.tensor([inv_scale], device=device)
        norm, per_tensor = multi_tensor_applier(
            amp_C.multi_tensor_unscale_l2norm, flag(device), [xs], factor, True
        )
        _, nothing = multi_tensor_applier(
            amp_C.multi_tensor_unscale_l2norm, flag(device), [xs], factor
        )
    assert norm.shape == (1,) and nothing.shape == (0,)
    # FP32 sums of up to 333 squares
    torch.testing.assert_close(norm.double(), expected.norm().reshape(1), rtol=32 * U32, atol=0)
    torch.testing.assert_close(per_tensor.double(), expected, rtol=32 * U32, atol=0)


def test_empty_lists(device: torch.device) -> None:
    found = flag(device)
    multi_tensor_applier(amp_C.multi_tensor_scale, found, [[], []], 2.0)
    multi_tensor_applier(amp_C.multi_tensor_axpby, found, [[], [], []], 2.0, 1.0, -1)
    norm, per_tensor = multi_tensor_applier(amp_C.multi_tensor_l2norm, found, [[]], True)
    assert found.tolist() == [0] and norm.tolist() == [0.0] and per_tensor.tolist() == []


def test_applier_hands_on_its_chunk_size() -> None:
    assert MultiTensorApply.available
    assert MultiTensorApply(333)(lambda *args: args, None, [[]], "more") == (
        333,
        None,
        [[]],
        "more",
    )


def run_scale(
    device: torch.device, overflows: str, scale: float = 16.0
) -> list[tuple[float, int, int]]:
    state = torch.tensor([scale], device=device), flag(device), flag(device) + 2
    settings: Any = {
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "hysteresis": 2,
    }
    history: list[Any] = []
    for overflow in overflows:
        found_inf = torch.tensor([float(overflow)], device=device)
        assert amp_C.update_scale_hysteresis(*state, found_inf, **settings) is state[0]
        history.append(tuple(t.item() for t in state))
    return history


def test_update_scale_hysteresis(device: torch.device) -> None:
    assert run_scale(device, "1") == [(16.0, 0, 1)]  # tolerated
    assert run_scale(device, "111")[1:] == [(8.0, 0, 0), (4.0, 0, -1)]
    # two ranks at once count as one
    assert run_scale(device, "120")[1:] == [
        (8.0, 0, 0),
        (8.0, 1, 2),
    ]
    assert run_scale(device, "000") == [(16.0, 1, 2), (16.0, 2, 2), (32.0, 0, 2)]
    assert run_scale(device, "00100")[-2:] == [(16.0, 1, 2), (16.0, 2, 2)]
    assert run_scale(device, "000", scale=2.0**127)[-1] == (2.0**127, 0, 2)  # not inf
    # no subnormal
    assert run_scale(device, "11", scale=torch.finfo(torch.float32).tiny)[-1][0] == 0.0
