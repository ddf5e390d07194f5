"""Random use of the library: a program is a value, its actions are methods of ``Used``."""

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from runs import LEVELS, OPTIMIZERS, STATES, Training
from torch import Tensor, nn

import tritonamp

NORMS = 0.01, 0.3, 1.0, 1e4


class Varied(nn.Module):
    """Each batch uses one of three experts, and some rows of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.ones(8))  # in no optimizer, until ``add_group``
        self.table = nn.Embedding(20, 8)
        self.first, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(20, (6,), generator=generator)
        # no operation saves the norm's input: the interpreter counts writes to bfloat16 inputs
        hidden = self.norm(self.first(self.table(rows))) * self.late
        return self.last(torch.relu(self.experts[seed % 3](hidden)))


def muon(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return one Muon, which steps parameters that are no matrices as AdamW does."""
    matrices = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    return tritonamp.optim.Muon(matrices, lr=lr, adamw_params=rest)


def muon_and_adamw(params: list[nn.Parameter], lr: float) -> list[torch.optim.Optimizer]:
    matrices = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(rest, lr=lr)]


def in_groups(name: str, params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return OPTIMIZERS[name]([{"params": params[:2], "lr": 3 * lr}, {"params": params[2:]}], lr=lr)


def of_two_kinds(
    first: str, second: str, params: list[nn.Parameter], lr: float
) -> list[torch.optim.Optimizer]:
    half = len(params) // 2
    return [in_groups(first, params[:half], lr), OPTIMIZERS[second](params[half:], lr=lr)]


MUONS = {"Muon": muon, "Muon and AdamW": muon_and_adamw}
NAMES = "AdamW", "amsgrad", "Lion", "SGD momentum", "RMSprop momentum", "our AdamW", "SGD"
PAIRS = ("AdamW", "Lion"), ("AdamW", "AdamW"), ("SGD momentum", "RMSprop momentum")
MAKERS: dict[str, Callable[..., Any]] = {
    **{name: partial(in_groups, name) for name in NAMES},
    **{" and ".join(pair): partial(of_two_kinds, *pair) for pair in PAIRS},
    **MUONS,
}


class Setup(NamedTuple):
    """The arguments of a run; ``growth`` is the interval of a dynamic loss scale, if not 0."""

    maker: str = "AdamW"
    level: str = "O2"
    half: str = "float16"
    state: str = "fp32"
    masters: str | None = None
    growth: int = 0
    skip_outliers: float | None = None
    grad_dtype: torch.dtype | None = None
    track_changes: bool = False

    def fields(self) -> dict[str, Any]:
        """Return the arguments of ``enable``."""
        fields = self._asdict()
        for name in ("maker", "half", "growth"):
            del fields[name]
        if self.level != "O0":
            fields["dtype"] = getattr(torch, self.half)
        if self.growth:
            bounds = {"init_scale": 2.0**10, "max_scale": 2.0**14, "growth_interval": self.growth}
            fields["scaler"] = tritonamp.GradScaler("cpu", **bounds)
        return fields


class Program(NamedTuple):
    """A setup, and names of methods of ``Used``, each with its argument."""

    setup: Setup
    actions: tuple[tuple[str, int], ...]


class Used(Training):
    """A training whose methods are the actions of programs; each takes a number from 0 to 11."""

    def __init__(
        self, setup: Setup, backend: str = "triton", model: Callable[[], nn.Module] = Varied
    ) -> None:
        make, self.setup, self.by_scaler, self.saved = MAKERS[setup.maker], setup, False, None
        self.make_model = model
        self.enabled_with = {"backend": backend, **setup.fields()}
        # the first parameter is ``late``
        optimizers = lambda params, lr: make(params[1:], lr=lr)  # noqa: E731
        super().__init__(model, optimizers, lr=3e-3, **self.enabled_with)
        self.ema = self.amp.ema(0.5)

    def loss(self, x: Any = 0) -> Tensor:
        return self.model(x).float().square().mean()

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def chosen(self, n: int) -> Any:
        """Return one of the parameters."""
        return self.params[n % len(self.params)]

    def stepped(self, n: int) -> tuple[dict[str, Any], Any]:
        """Return one of the tensors that the first optimizer steps on, with its group."""
        rows = [(g, p) for g in self.optimizer.param_groups for p in g["params"]]
        return rows[n % len(rows)]

    def fill_window(self, n: int) -> None:
        """Continue from a full window of outliers, of a run of eager steps, which are quick."""
        with Used(self.setup, "eager", self.make_model) as run:
            for seed in range(64):
                run.step(seed % 12)
            window = run.amp.state_dict()["outliers"]
        self.amp.load_state_dict({**self.amp.state_dict(), "outliers": window})

    # between a backward and a step

    def accumulate(self, n: int) -> None:
        self.backward(self.loss(n), self.by_scaler)

    def accumulate_for_one(self, n: int) -> None:
        self.amp.backward(self.loss(n), self.optimizers[n % len(self.optimizers)])

    def accumulate_another_loss(self, n: int) -> None:
        self.amp.backward(self.loss(n) * 3, loss_id=1)

    def accumulate_inf(self, n: int) -> None:
        self.backward(self.loss(n) * float("inf"), self.by_scaler)

    def accumulate_much(self, n: int) -> None:
        """An overflow, or an outlier."""
        self.backward(self.loss(n) * (2.0**100, 100.0)[n % 2], self.by_scaler)

    def clip(self, n: int) -> None:
        self.amp.clip_grad_norm_(NORMS[n % 4])

    def unscale(self, n: int) -> None:
        if self.by_scaler:
            self.amp.scaler.unscale_(self.optimizers[n % len(self.optimizers)])
        else:
            self.amp.unscale_()

    def veto(self, n: int) -> None:
        self.amp.veto((True, torch.tensor(True), torch.tensor(False), False)[n % 4])

    def write_gradient(self, n: int) -> None:
        for p in self.params[n:]:
            if p.grad is not None:
                p.grad.mul_(0.5)

    def fill_gradient(self, n: int) -> None:
        grad = self.chosen(n).grad
        if grad is not None:
            grad.fill_({0: float("inf"), 1: float("nan")}.get(n, 0.0))

    def remove_gradient(self, n: int) -> None:
        self.chosen(n).grad = None

    def move_gradients(self, n: int) -> None:
        for p in self.params:
            p.grad = None if p.grad is None else p.grad.clone()

    def take(self, n: int) -> None:
        """Step, or have one of two optimizers step alone."""
        for optimizer in self.optimizers[: 1 if n == 7 else None]:
            self.amp.scaler.step(optimizer) if self.by_scaler else optimizer.step()
        if self.by_scaler:
            self.amp.scaler.update()

    def clear(self, n: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=n % 2 == 0)

    # between two steps

    def change_loop(self, n: int) -> None:
        """Go on with the handle's calls, or with torch.amp's."""
        self.by_scaler = n % 2 == 0

    def average(self, n: int) -> None:
        self.ema.update()

    def copy_average(self, n: int) -> None:
        self.ema.copy_to(self.model)

    def change_rate(self, n: int) -> None:
        group, _ = self.stepped(n)
        lr = 1e-3 * (1 + n)
        group["lr"] = torch.tensor(lr) if n in (3, 4) else lr

    def change_rates(self, n: int) -> None:
        """As a schedule does, after each step."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.9

    def change_numbers(self, n: int) -> None:
        group, _ = self.stepped(n)
        for key, value in ("betas", (0.8, 0.9 + n / 100)), ("momentum", 0.1 * n), ("eps", 1e-6):
            if key in group:
                group[key] = value
        group["weight_decay"] = 0.01 * n

    def change_flag(self, n: int) -> None:
        group, _ = self.stepped(n)
        flags = [key for key in ("amsgrad", "maximize", "nesterov") if key in group]
        for key in flags[n % 2 : n % 2 + 1]:
            group[key] = not group[key]

    def write_parameter(self, n: int) -> None:
        with torch.no_grad():
            self.chosen(n).mul_(0.75)

    def write_master(self, n: int) -> None:
        with torch.no_grad():
            self.stepped(n)[1].mul_(0.75)

    def write_value(self, n: int) -> None:
        """Of the FP32 values, which may be lent."""
        with torch.no_grad():
            next(iter(self.amp.master_params())).mul_(0.75)

    def move_parameter(self, n: int) -> None:
        self.chosen(n).data = self.chosen(n).data * 0.5

    def move_master(self, n: int) -> None:
        self.stepped(n)[1].data = self.stepped(n)[1].data.clone()

    def move_state(self, n: int) -> None:
        own = self.optimizer.state.get(self.stepped(n)[1], {})
        for key in [key for key, value in own.items() if isinstance(value, Tensor)][: 1 + n % 3]:
            own[key] = own[key].clone()

    def remove_state(self, n: int) -> None:
        self.optimizer.state.pop(self.stepped(n)[1], None)

    def turn_state(self, n: int) -> None:
        """Another order of parameters, or of one parameter's state."""
        state, master = self.optimizer.state, self.stepped(n)[1]
        if master in state:
            own = state.pop(master)
            state[master] = dict(reversed(own.items())) if n % 2 else own

    def copy_state(self, n: int) -> None:
        self.optimizer.state = copy.copy(self.optimizer.state)

    def turn_group(self, n: int) -> None:
        self.optimizer.param_groups[0]["params"].reverse()

    def new_lists(self, n: int) -> None:
        for group in self.optimizer.param_groups:
            group["params"] = list(group["params"])

    def add_group(self, n: int) -> None:
        self.optimizers[-1].add_param_group({"params": [self.model.late], "lr": 0.1})

    def freeze(self, n: int) -> None:
        self.chosen(n).requires_grad_(not self.chosen(n).requires_grad)

    def save(self, n: int) -> None:
        self.saved = self.bits()

    def load(self, n: int) -> None:
        """Load all that was saved, or only some of it."""
        if self.saved is None:
            return
        saved = copy.deepcopy(self.saved)
        if n < 6:
            self.model.load_state_dict(saved["model"])
        if n > 0:
            for i, optimizer in enumerate(self.optimizers):
                optimizer.load_state_dict(saved[f"optimizer {i}"])
        if n > 3:
            self.amp.load_state_dict(saved["amp"])

    def enable_again(self, n: int) -> None:
        self.amp.disable()
        self.amp = tritonamp.enable(self.model, self.optimizers, **self.enabled_with)
        self.ema = self.amp.ema(0.5)

    def heal(self, n: int) -> None:
        healed = "first" in self.amp.stats()["healed"]
        (self.amp.unheal if healed else self.amp.heal)("first")

    def look(self, n: int) -> None:
        """Ask for the FP32 values, which brings masters up to date."""
        self.masters()

    def copy(self, n: int) -> None:
        copy.deepcopy((self.model, self.optimizer))


LOSSES = "accumulate_for_one", "accumulate_another_loss", "accumulate_inf", "accumulate_much"
EARLY = "clip", "unscale", "veto"
GRADIENTS = "write_gradient", "fill_gradient", "remove_gradient", "move_gradients"
BETWEEN = tuple(vars(Used))[tuple(vars(Used)).index("change_loop") :]
"""Names of the methods between two steps."""
HABITS = (
    ("accumulate", "take", "clear"),
    *[("accumulate", "clip", "take", "clear")] * 2,
    *[("accumulate", "clip", "take", "clear", "average")] * 2,
    *[("accumulate", "accumulate", "clip", "take", "change_rates", "clear")] * 2,
    ("accumulate", "unscale", "clip", "take", "clear", "average"),
)
"""Loops; a program has one of them, and departs from it now and then."""


def setup_of(generator: random.Random) -> Setup:
    """Return a setup that ``enable`` takes."""
    pick = generator.choice
    maker, level = pick(list(MAKERS)), pick([*LEVELS, "O2", "O2"])
    # float16 and FP32 state more often: on other lists of tensors the interpreter builds each step
    half = pick(["float16", "float16", "float16", "bfloat16"])
    states = STATES[:1] if maker in MUONS else STATES[:2] if level == "O3" else STATES
    state = pick([STATES[0], STATES[0], *states])
    masters = pick([None, "packed"]) if level == "O2" else None
    growth = pick([0, 2, 3])
    outliers = pick([None, None, 2.0])
    trains_half = level in ("O2", "O3")
    grad_dtype = pick([None, torch.float32]) if trains_half else None
    tracked = trains_half and pick([False] * 5 + [True])
    return Setup(maker, level, half, state, masters, growth, outliers, grad_dtype, tracked)


def step_of(generator: random.Random, habit: tuple[str, ...]) -> Iterator[str]:
    """Yield the actions of one step, which departs from the habit in one step of three."""
    departs = generator.random() < 0.25
    for name in habit:
        if departs and name == "take":
            for kind in LOSSES, EARLY, GRADIENTS:
                if generator.random() < 0.5:
                    yield generator.choice(kind)
        if not (departs and generator.random() < 0.1):
            yield name


def program_of(seed: int) -> Program:
    """Return the program of a seed: 12 to 30 steps and changes between them."""
    generator = random.Random(seed)
    setup, habit = setup_of(generator), generator.choice(HABITS)
    norm, expert = generator.randrange(12), generator.randrange(3)
    names = ["fill_window"] * (setup.skip_outliers is not None)
    for _ in range(generator.randint(12, 30)):
        if generator.random() < 0.3:
            names.append(generator.choice(BETWEEN))
        else:
            names += step_of(generator, habit)

    def number_of(name: str) -> int:
        number = generator.randrange(12)
        # most batches have gradients for the same parameters, so that steps are alike
        if name == "accumulate" and generator.random() < 0.9:
            number += expert - number % 3
        return norm if name == "clip" else number

    return Program(setup, tuple((name, number_of(name)) for name in names))
