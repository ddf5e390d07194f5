"""lion_8bit against ``lion`` on what its codes hold. What all packed steps do: test_adamw_8bit."""

import pytest
import torch

from tests.kernels.conftest import numpy_warns
from tests.kernels.test_adamw_8bit import HALF, LionState, each_half
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._small_state import in_order_of_memory, split_master
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.kernels.lion import lion

pytestmark = numpy_warns


@each_half
@pytest.mark.parametrize("maximize", [False, True])
def test_a_lion_step_is_lions_on_what_the_codes_hold(
    device: torch.device, backend: str, half: torch.dtype | None, maximize: bool
) -> None:
    """The arithmetic of ``lion`` in FP32, to two ulps of values below 2; float16 masters keep 26
    bits. Codes are within a code of its moment, an eighth.
    """
    rules = [LionState.rule._replace(maximize=maximize)]
    state = LionState(device, half, rules)
    masters = state.masters()
    moments = [m.clone() for (m,) in state.decoded()]
    pairs = zip(state.grads, state.params, strict=True)
    grads = [in_order_of_memory(g, like=p).clone() for g, p in pairs]
    scale = torch.tensor(0.5, device=device)
    tensors = TensorLists(
        may_repeat=("copies",), params=masters, grads=grads, exp_avgs=moments, copies=masters
    )
    lion(UpdateLists(tensors, rules, state.groups), scale, None, "eager")
    before = state.masters()
    state.step(backend, scale, None)
    moved = 0
    rows = zip(state.masters(), masters, before, state.decoded(), moments, strict=True)
    for got, right, old, (m,), m_right in rows:
        torch.testing.assert_close(got, right, rtol=0, atol=2**-22)
        moved += int((got != old).sum())
        assert ((m - m_right).abs() <= m_right.abs() / 8).all()
    assert moved > 100
    if half is not None:
        for param, master in zip(state.params, state.masters(), strict=True):
            assert torch.equal(in_order_of_memory(param), split_master(master, half)[0])


def test_a_moment_of_lion_decays_and_follows(device: torch.device, backend: str) -> None:
    """Without a gradient by 0.99 a step, in the mean, although a step is a sixth of the distance of
    two codes and less; then to a new gradient. 6 deviations: a step adds p (1 - p), p at most a
    sixth, of an eighth squared.
    """
    state = LionState(device, HALF, [LionState.rule._replace(lr=1e-3)], [(3000,)])
    start = state.decoded()[0][0].clone()
    state.grads = [torch.zeros_like(g) for g in state.grads]
    for _ in range(12):
        state.step(backend)
    deviation = (12 * 5 / 36) ** 0.5 / 8 / 3000**0.5
    ratio = (state.decoded()[0][0] / start).mean().item()
    assert 6 * deviation < 0.2 * (1 - 0.99**12), "a bound that can fail"
    assert abs(ratio - 0.99**12) <= 6 * deviation
    state.grads = [torch.full_like(g, -2.0) for g in state.grads]
    for _ in range(12):
        state.step(backend)
    expected = start * 0.99**24 - 2 * (1 - 0.99**12)
    assert abs((state.decoded()[0][0] - expected).mean().item()) <= 12 * deviation
