"""``offload="state"``: masters and optimizer state in host memory, with the bits of those that are
not.
"""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import more
from gpuless.fake_cuda import FakeCuda
from helpers import storage_bytes
from torch import Tensor, nn

import tritonamp
from tritonamp.step import offload
from tritonamp.step.offload import Offload

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.02, amsgrad=True),
    "our Adam": lambda params: tritonamp.optim.Adam(params, lr=0.02),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1),
    "plain SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "Lion": lambda params: tritonamp.optim.Lion(params, lr=0.003),
}
SKIPS = 2, 7
STEPS = 20


class Net(nn.Module):
    """With tied weights, a norm, a frozen half layer, and sizes that fill no block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12)
        self.tied = nn.Linear(6, 12, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(12, 6).requires_grad_(False)
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(torch.relu(self.norm(self.first(x))))
        return self.last(torch.relu(self.tied(y))).float()


class Run:
    """A model in training, with or without offload."""

    def __init__(
        self,
        device: Any,
        offloads: bool = True,
        kind: str = "AdamW",
        level: str = "O2",
        **fields: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.model.frozen.half()
        self.model = self.model.to(device)
        generator = torch.Generator().manual_seed(1)
        self.batches = torch.randn(4, 8, 6, generator=generator).to(device)
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[kind](
            [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}]
        )
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        if offloads:
            fields["offload"] = "state"
        self.amp = tritonamp.enable(self.model, self.optimizer, level=level, **fields)
        self.taken = 0

    def loss(self) -> Tensor:
        return self.model(self.batches[self.taken % 4]).square().mean()

    def step(self, bad: bool = False, clip: bool = True) -> None:
        self.amp.backward(self.loss() * (math.inf if bad else 1.0))
        self.finish(clip)

    def finish(self, clip: bool = True) -> None:
        if clip:
            self.amp.clip_grad_norm_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1

    def steps(self, number: int) -> "Run":
        for _ in range(number):
            self.step(bad=self.taken in SKIPS, clip=self.taken % 2 == 0)
            self.schedule.step()
        return self

    def states(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "amp": self.amp}
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}

    def load(self, states: dict[str, Any]) -> "Run":
        self.model.load_state_dict(states["model"])
        self.optimizer.load_state_dict(states["optimizer"])
        self.amp.load_state_dict(states["amp"])
        return self

    def bits(self) -> dict[str, Any]:
        """Return copies of all bits that training goes on from, on the CPU."""
        found = {
            **self.states(),
            "as it is kept": self.optimizer.state_dict(packed=True),
            "half": dict(self.model.named_parameters()),
            "masters": dict(self.amp.named_master_params()),
            "in order": list(self.amp.master_params()),
        }
        return on_cpu(found)


def disabled(run: Run) -> Any:
    return on_cpu([run.model.state_dict(), run.optimizer.state_dict()])


def on_cpu(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda x: x.detach().cpu().clone(), tree)


def same_bits(a: Any, b: Any) -> bool:
    left, right = (dict(torch.utils._pytree.tree_leaves_with_path(x)) for x in (a, b))
    return left.keys() == right.keys() and all(
        x.dtype is y.dtype and torch.equal(x, y) if isinstance(x, Tensor) else x == y
        for x, y in ((left[path], right[path]) for path in left)
    )


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has four or five parts."""
    monkeypatch.setattr(offload, "PART", 1024)


@pytest.fixture
def runs(cuda: torch.device) -> Iterator[Callable[..., Run]]:
    """Make runs, which are disabled at the end."""
    made: list[Run] = []

    def make(*args: Any, **fields: Any) -> Run:
        made.append(Run(cuda, *args, **fields))
        return made[-1]

    yield make
    for run in made:
        if run.amp._enabled:
            run.amp.disable()


def pair(runs: Callable[..., Run], *args: Any, **fields: Any) -> tuple[Run, Run]:
    return runs(False, *args, **fields), runs(True, *args, **fields)


# the bits


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("AdamW", {}),
        ("AdamW", {"state": "bf16", "backend": "eager"}),
        ("AdamW", {"state": "8bit"}),
        ("SGD", {"backend": "eager"}),
        ("Lion", {"dtype": torch.bfloat16, "backend": "eager"}),
        *more(
            [
                ("AdamW", {"state": "bf16"}),
                ("AdamW", {"state": "8bit", "dtype": torch.bfloat16}),
                ("AdamW", {"level": "O1"}),
                ("AdamW", {"level": "O1", "state": "8bit"}),
                ("AdamW", {"level": "O0"}),
                ("AdamW", {"level": "O3", "backend": "eager"}),
                ("AdamW", {"grad_dtype": torch.float32}),
                ("AdamW", {"fp32_modules": ("last",)}),
                ("amsgrad", {}),
                ("our Adam", {"state": "8bit", "backend": "eager"}),
                ("our Adam", {}),
                ("SGD", {}),
                ("SGD", {"state": "bf16"}),
                ("plain SGD", {"level": "O1"}),
                ("plain SGD", {}),
                ("Lion", {"state": "bf16"}),
            ]
        ),
    ],
    ids=str,
)
@pytest.mark.steps
@pytest.mark.long
def test_the_bits_are_the_same(runs: Callable[..., Run], kind: str, fields: dict[str, Any]) -> None:
    """Of twenty steps, two of which are skipped, every other one clipped."""
    plain, offloaded = pair(runs, kind, **fields)
    for _ in range(2):
        for run in (plain, offloaded):
            run.steps(STEPS // 2)
        assert same_bits(plain.bits(), offloaded.bits())
    assert offloaded.amp.stats()["skipped"] == len(SKIPS)
    for run in (plain, offloaded):
        run.amp.disable()
    assert same_bits(*(disabled(run) for run in (plain, offloaded)))
    for state in offloaded.optimizer.state.values():
        assert all(x.is_cuda for k, x in state.items() if k != "step" and isinstance(x, Tensor))


BESIDE: dict[str, Callable[[Run], Any]] = {
    "a write to a master": lambda run: write(next(run.amp.master_params())),
    "a write to a half parameter": lambda run: write(run.model.first.weight),
    "another memory": lambda run: setattr(run.model.first.weight, "data", run.model.first.weight * 2),
    "a write to both": lambda run: (
        write(next(run.amp.master_params())),
        write(run.model.first.weight),
    ),
    "masters that are read": lambda run: list(run.amp.master_params()),
    "heal": lambda run: run.amp.heal("last"),
    "heal, unheal": lambda run: (run.amp.heal("last"), run.step(), run.amp.unheal("last")),
    "sleep": lambda run: (run.amp.sleep(), run.amp.wake()),
    "sleep of weights": lambda run: (run.amp.sleep(weights=True), run.amp.wake()),
    "channels last": lambda run: channels_last(run),
    "accumulation": lambda run: run.amp.backward(run.loss()),
    "two losses": lambda run: run.amp.backward(run.loss(), loss_id=1),
    "unscale_": lambda run: (run.amp.backward(run.loss()), halve(run), run.finish(clip=False)),
    "a veto": lambda run: (run.amp.backward(run.loss()), run.amp.veto(True), run.finish()),
    "unfrozen": lambda run: unfreeze(run),
    "a group that is added": lambda run: add_group(run),
    "a parameter without gradient": lambda run: (
        run.amp.backward(run.model.first(run.batches[0]).float().square().mean()),
        run.finish(),
    ),
    "loaded": lambda run: run.load(run.states()),
    "a model that is loaded": lambda run: run.model.load_state_dict(copy.deepcopy(run.model.state_dict())),
    "a state that is edited": lambda run: write(
        next(iter(run.optimizer.state.values()))["exp_avg"]
    ),
    "more steps before": lambda run: run.steps(3),
}


@torch.no_grad()
def write(tensor: Tensor) -> None:
    tensor.add_(0.375)


def halve(run: Run) -> None:
    run.amp.unscale_()
    for master in run.amp.master_params():
        assert master.grad is not None
        assert master.grad.dtype is torch.float32
    for group in run.optimizer.param_groups:
        for param in group["params"]:
            param.grad.mul_(0.5)
    nn.utils.clip_grad_norm_(list(run.amp.master_params()), 0.01)


def channels_last(run: Run) -> None:
    weight = run.model.first.weight
    weight.data = weight.data.t().contiguous().t()


def unfreeze(run: Run) -> None:
    run.model.frozen.requires_grad_(True)
    run.optimizer.add_param_group({"params": [run.model.frozen.bias]})


def add_group(run: Run) -> None:
    run.optimizer.add_param_group({"params": list(run.model.frozen.parameters()), "lr": 0.01})
    run.model.frozen.requires_grad_(True)


@pytest.mark.parametrize("state", ["fp32", *more(["8bit"])])
@pytest.mark.parametrize("what", BESIDE)
def test_whatever_a_loop_does_beside(runs: Callable[..., Run], what: str, state: str) -> None:
    plain, offloaded = pair(runs, state=state, backend="eager")
    for run in (plain, offloaded):
        run.step()
        BESIDE[what](run)
        run.step()
        run.step(bad=True)
        run.step()
    if what.startswith("a state") and state == "8bit":
        return
    assert same_bits(plain.bits(), offloaded.bits())


# memory and the bus


def bytes_of(run: Run) -> int:
    """Bytes of masters (or their lower bits) and moments."""
    kept = [x for s in run.optimizer.state.values() for k, x in s.items() if k in HOST]
    lent = run.amp._parts.fp32_values._lent
    return sum(x.nbytes for x in (*kept, *(value.beside() for value in lent.values())))


HOST = "exp_avg", "exp_avg_sq", "moments", "momentum_buffer"


@pytest.mark.parametrize(
    ("kind", "state", "per_parameter"),
    [("AdamW", "fp32", 12), ("AdamW", "bf16", 8), ("AdamW", "8bit", 4 + 2 / 128), ("SGD", "fp32", 8)],
)
def test_bytes_over_the_bus(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, kind: str, state: str, per_parameter: float
) -> None:
    """Masters and moments in each direction, in a step that is skipped, too."""
    moved = {"send": 0, "fetch": 0}
    run = Run("cuda", kind=kind, state=state, backend="eager")
    run.steps(2)
    for name in moved:
        original = getattr(fake_cuda, name)

        def counted(into: Tensor, out_of: Tensor, name: str = name, original: Any = original) -> None:
            if into.numel() > 10:  # not the records
                moved[name] += into.nbytes
            original(into, out_of)

        monkeypatch.setattr(fake_cuda, name, counted)
    for bad in (False, True):
        run.amp.backward(run.loss() * (math.inf if bad else 1.0))
        moved.update(send=0, fetch=0)
        run.optimizer.step()
        assert moved == {"send": bytes_of(run), "fetch": bytes_of(run)}
        run.optimizer.zero_grad()
    run.amp.disable()
