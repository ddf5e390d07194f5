"""optim.Lion: levels and refusals."""

import math

import pytest
import torch
from runs import Training, batch
from torch import nn

import tritonamp


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_levels_train_and_skip(level: str, clip: float | None, device: torch.device) -> None:
    ends = []
    for name in (level, "O0"):
        run = Training(optimizer="Lion", level=name, device=device, lr=1e-3)
        for seed in range(6):
            run.step(batch(seed, device=device), math.nan if seed == 2 else 1.0, clip)
        assert run.amp.stats()["steps"] == 5
        ends.append(run.masters())
        run.end()
    for a, b in zip(*ends, strict=True):  # a sign may differ, of five
        assert (a.float() - b).abs().max() <= 2e-3 * (5 if level == "O3" else 3)


def test_bad_hyperparameters_are_refused() -> None:
    params = [nn.Parameter(torch.zeros(1))]
    with pytest.raises(ValueError, match="lr: expected 0 or more, got -1"):
        tritonamp.optim.Lion(params, lr=-1.0)
    with pytest.raises(ValueError, match=r"betas: expected two numbers .* got \(0.9, 1.0\)"):
        tritonamp.optim.Lion(params, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match=r"weight_decay: expected 0 or more, got -0\.1"):
        tritonamp.optim.Lion(params, weight_decay=-0.1)


def test_a_foreign_state_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    adam = torch.optim.Adam(params)
    optimizer = tritonamp.optim.Lion(params)
    params[0].grad = torch.ones(2)
    adam.step()
    state = adam.state_dict()
    state["state"][0].pop("exp_avg")
    with pytest.raises(ValueError, match="expected the state of a Lion"):
        optimizer.load_state_dict(state)
    params[0].grad = torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="Lion does not support sparse gradients"):
        optimizer.step()
