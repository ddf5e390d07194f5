"""How muon multiplies: one stack for each group and shape, in half after FP32 has normalised."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import tritonamp
from tritonamp.kernels import _muon_lists
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._muon_lists import MuonLists, MuonRule, orthogonalize_
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.kernels.muon import muon

RULE = MuonRule(1.0, 0.0, 0.0, False, (3.4445, -4.7750, 2.0315), 1e-7, 5, None)
HALVES = torch.float16, torch.bfloat16


def matrices(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.mark.parametrize("compute", HALVES, ids=str)
@pytest.mark.parametrize("power", [30, -20])
def test_the_size_of_matrices_leaves_no_trace(
    device: torch.device, compute: torch.dtype, power: int
) -> None:
    """Neither format of half holds them; FP32 divides by their norm before they are rounded."""
    rule = RULE._replace(compute=compute)
    usual = matrices((2, 6, 9), device)
    scaled = usual * 2.0**power
    for each in (usual, scaled):
        orthogonalize_(each, rule)
    assert torch.equal(usual, scaled)


def test_a_tall_matrix_costs_what_its_transpose_does(device: torch.device) -> None:
    flops = []
    for shape in ((1, 40, 4), (1, 4, 40)):
        with FlopCounterMode(display=False) as counter:
            orthogonalize_(matrices(shape, device), RULE)
        flops.append(counter.get_total_flops())
    assert flops[0] == flops[1] == 5 * 2 * (4 * 40 * 4 + 4 * 4 * 4 + 4 * 4 * 40)


@pytest.mark.parametrize("dtypes", [("float16", False), ("bfloat16", True)], ids=str)
def test_the_dtype_of_products(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dtypes: tuple[str, bool]
) -> None:
    """float16 where the GPU has no bfloat16."""
    name, has = dtypes
    monkeypatch.setattr(_muon_lists, "takes_bfloat16", lambda device: has)
    seen: list[Any] = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: seen.append(a.dtype) or bmm(a, b))
    orthogonalize_(matrices((1, 3, 3), device), RULE)
    assert set(seen) == {getattr(torch, name)}


def test_groups_of_equal_shapes_have_their_own_factors(device: torch.device, backend: str) -> None:
    """A matrix of group 1 takes its steps, and the factor of its learning rate, from that group."""
    rules = [RULE, RULE._replace(adjust_lr_fn="match_rms_adamw", ns_steps=2, compute=torch.float32)]
    found = []
    for groups, own in (([0, 1], rules), ([0, 0], rules[1:])):
        params = [matrices((4, 7), device) for _ in groups]
        grads = [matrices((4, 7), device) + k for k in range(2)]
        tensors = TensorLists(
            params=params,
            grads=grads,
            momentum_buffers=[torch.zeros_like(p) for p in params],
            copies=params,
        )
        muon(MuonLists(UpdateLists(tensors, own, groups)), None, None, backend)
        found.append(params[1])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("choice", ["eager", "auto"])
def test_a_half_value_that_overflows_is_named(device: torch.device, choice: str) -> None:
    """Its FP32 master is finite."""
    model = nn.Linear(4, 3, bias=False).to(device)
    optimizer = tritonamp.optim.Muon(model.parameters(), lr=1e6)
    with tritonamp.enable(model, optimizer, level="O2", backend=choice) as amp:
        amp.backward(model(torch.ones(2, 4, device=device)).mean())
        optimizer.step()
        assert amp.stats()["overflowed_parameters"] == ["weight"]
        assert all(p.isfinite().all() for p in amp.master_params())
