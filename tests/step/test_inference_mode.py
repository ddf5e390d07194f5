"""Calls inside ``torch.inference_mode`` leave normal tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Net, of_kernels, same
from runs import STATES, Training, batch, tensors_of
from torch import Tensor, nn

import tritonamp

pytestmark = of_kernels


def _named(run: "Saved") -> None:
    list(run.amp.named_master_params())


def _average(run: "Saved") -> None:
    average = run.amp.ema(0.9)
    average.update()
    average.load_state_dict(average.state_dict())


def _saved(run: "Saved") -> None:
    tritonamp.save(run.folder / "x.pt", **run.objects())


def _saved_and_loaded(run: "Saved") -> None:
    _saved(run)
    tritonamp.load(run.folder / "x.pt", **run.objects())


def _healed(run: "Saved") -> None:
    name = next(name for name, m in run.model.named_modules() if isinstance(m, nn.Linear))
    run.amp.heal(name)
    run.amp.unheal(name)


def _watched(run: "Saved") -> None:
    run.amp.watch(1)
    run.model(batch(0, 4, 6))


def _negate(run: "Saved") -> None:
    for p in run.amp.master_params():
        p.grad.mul_(-0.5)


def _scheduled(run: "Saved") -> None:
    run.amp.step_schedulers(run.schedule)


CALLS: dict[str, Callable[["Saved"], Any]] = {
    "master_params": lambda run: list(run.amp.master_params()),
    "named_master_params": _named,
    "writes": lambda run: [p.detach().mul_(0.5) for p in run.amp.master_params()],
    "forward": lambda run: run.model(batch(0, 4, 6)),
    "model.state_dict": lambda run: run.model.state_dict(),
    "model.load_state_dict": lambda run: run.model.load_state_dict(run.model.state_dict()),
    "optimizer.state_dict": lambda run: run.optimizer.state_dict(packed=True),
    "load": lambda run: run.optimizer.load_state_dict(run.optimizer.state_dict()),
    "zero_grad": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "amp.load_state_dict": lambda run: run.amp.load_state_dict(run.amp.state_dict()),
    "stats": lambda run: (run.amp.stats(), run.amp.metrics(), run.amp.explain()),
    "ema": _average,
    "save": _saved,
    "save, load": _saved_and_loaded,
    "heal": _healed,
    "watch": _watched,
    "step_schedulers": _scheduled,
    "sleep": lambda run: (run.amp.sleep(), run.amp.wake()),
    "scale": lambda run: run.amp.scaler.scale(run.model(batch(0, 4, 6)).float().mean()),
}
BETWEEN: dict[str, Callable[["Saved"], Any]] = {
    "unscale_": lambda run: run.amp.unscale_(),
    "clip_grad_norm_": lambda run: run.amp.clip_grad_norm_(0.1),
    "unscale_, clip": lambda run: (run.amp.unscale_(), run.amp.clip_grad_norm_(0.1)),
    "veto": lambda run: run.amp.veto(False),
    "gradients": lambda run: (run.amp.unscale_(), _negate(run)),
    "step": lambda run: run.optimizer.step(),
}


class Saved(Training):
    """Makes one call before or inside of one of its steps.

    Args:
        folder: directory of its checkpoints.
    """

    def __init__(self, folder: Path, name: str, **fields: Any) -> None:
        model = Net if name != "Muon" else lambda: nn.Sequential(nn.Linear(6, 6, bias=False))
        super().__init__(model, name, backend="eager", **fields)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.folder = folder

    def trained(self, call: str, at: int, mode: Any) -> list[Tensor]:
        """Return all state that training continues with."""
        for seed in range(4):
            if call in CALLS and seed == at:
                with mode():
                    CALLS[call](self)
            self.backward(self.loss(batch(seed, 4, 6)))
            if call in BETWEEN and seed == at:
                with mode():
                    BETWEEN[call](self)
            if not (call == "step" and seed == at):
                self.optimizer.step()
            self.optimizer.zero_grad()
        kept = [*self.model.parameters(), *tensors_of(self.optimizer.state_dict(packed=True))]
        assert not any(t.is_inference() for t in kept)
        return [*self.masters(), *(t.detach().clone() for t in kept)]


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("call", [*CALLS, *BETWEEN])
@pytest.mark.parametrize(
    ("name", "state"),
    [*(("AdamW", s) for s in STATES), ("our AdamW", "8bit"), ("Lion", "8bit"),
     ("SGD momentum", "bf16"), ("Muon", "fp32"), ("NAdam", "fp32")],
)  # fmt: skip
def test_what_outlives_inference_mode_is_a_normal_tensor(
    tmp_path: Path, name: str, state: str, call: str, at: int
) -> None:
    def run(mode: Any) -> list[Tensor]:
        with Saved(tmp_path, name, state=state) as built:
            return built.trained(call, at, mode)

    assert same(run(torch.inference_mode), run(torch.no_grad))
