"""A step that is made again as the last one was: the same bits as one that looks at everything, and
nothing that changes in between goes unseen.
"""

import copy
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import more
from helpers import of_kernels
from runs import OPTIMIZERS, Training, batch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity
from two_ways import plainly

import tritonamp
from tritonamp.kernels import _facts, _native
from tritonamp.kernels._plan import Plan
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.step.steady_step import SteadyStep

pytestmark = of_kernels
KINDS = "AdamW", "amsgrad", "SGD", "SGD momentum", "Lion"


def net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 4, 3, bias=False), nn.Flatten(), nn.Linear(16, 4, bias=False)
    norms = nn.LayerNorm(4, bias=False), nn.LayerNorm(4, bias=False)
    return nn.Sequential(*layers, *norms).to(device)


class Planned(Training):
    """One optimizer over two groups, and a batch for each step."""

    def __init__(self, device: torch.device, kind: str, level: str = "O2") -> None:
        def in_groups(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
            conv, linear, *norms = params
            groups = [{"params": [conv, norms[0]], "lr": 2e-2}, {"params": [linear, norms[1]]}]
            return OPTIMIZERS[kind](groups, lr=lr)

        fields = {"backend": "triton", "loss_scale": 64.0}
        super().__init__(lambda: net(device), in_groups, level, device, **fields)
        self.xs = iter(batch(1, 16, 3, 2, 4, 4, device=device).unbind())

    def next_step(self, change: Callable[["Planned"], None] = lambda run: None) -> None:
        self.backward(self.loss(next(self.xs)))
        change(self)
        self.finish(1.0)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def moments(self) -> list[tuple[dict[str, Any], str]]:
        states = self.optimizer.state.values()
        return [(s, k) for s in states for k in s if isinstance(s[k], Tensor) and k != "step"]


@pytest.fixture
def again(plans: None, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Noted for each update: was it made as the last one was."""
    _facts.use_native()  # not in between: its answers are other ones than Python's
    noted: list[bool] = []
    launch = UpdateLists.launch

    def spied(self: UpdateLists, plan: Plan, *args: Any) -> None:
        noted.append(bool(plan.launches))
        launch(self, plan, *args)

    repeat = SteadyStep.run

    def spied_repeat(self: SteadyStep, *args: Any) -> None:
        noted.append(True)
        repeat(self, *args)

    monkeypatch.setattr(UpdateLists, "launch", spied)
    monkeypatch.setattr(SteadyStep, "run", spied_repeat)
    return noted


def name_of(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__


# what a step again takes in its stride


def nothing(run: Planned) -> None:
    pass


def gradients_elsewhere(run: Planned) -> None:
    for p in run.params:
        assert p.grad is not None
        p.grad = p.grad.clone()


def one_gradient_elsewhere(run: Planned) -> None:
    first = run.params[0]
    assert first.grad is not None
    first.grad.data = first.grad.clone()


def other_rates(run: Planned) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] = 0.1


def gradients_written(run: Planned) -> None:
    for p in run.params:
        assert p.grad is not None
        p.grad.mul_(2)


def overflow(run: Planned) -> None:
    run.params[0].grad[0] = float("inf")  # type: ignore[index]


def parameters_written(run: Planned) -> None:
    """By other code: masters follow."""
    with torch.no_grad():
        run.params[0].mul_(0.5)


def state_looked_up(run: Planned) -> None:
    """Of half parameters, which have none: torch's dict makes an empty one."""
    for p in run.params:
        run.optimizer.state[p]


TAKEN = (
    state_looked_up,
    nothing,
    gradients_elsewhere,
    one_gradient_elsewhere,
    other_rates,
    gradients_written,
    overflow,
    parameters_written,
)

# what it sends pointers for, or builds another plan for


def gradient_missing(run: Planned) -> None:
    run.params[1].grad = None


def gradient_laid_otherwise(run: Planned) -> None:
    first = run.params[0]
    assert first.grad is not None
    first.grad = first.grad.to(memory_format=torch.channels_last)


def gradient_laid_otherwise_in_place(run: Planned) -> None:
    weight = run.params[1]
    assert weight.grad is not None
    weight.grad.as_strided_((4, 16), (1, 4))


def gradient_not_aligned(run: Planned) -> None:
    weight = run.params[1]
    assert weight.grad is not None
    room = weight.grad.new_zeros(1 + weight.numel())
    weight.grad = room[1:].view_as(weight).copy_(weight.grad)


def state_elsewhere(run: Planned) -> None:
    for state, key in run.moments():
        state[key].data = state[key].clone()


def state_replaced(run: Planned) -> None:
    for state, key in run.moments()[-1:]:
        state[key] = 0.5 * state[key]


def state_laid_otherwise(run: Planned) -> None:
    linear = run.optimizer.state[run.optimizer.param_groups[1]["params"][0]]
    *_, key = linear
    linear[key] = linear[key].as_strided((4, 16), (1, 4))


def state_exchanged(run: Planned) -> None:
    (a, key), (b, _) = run.moments()[0], run.moments()[-1]
    a[key], b[key] = b[key].new_zeros(a[key].shape), a[key].new_zeros(b[key].shape)


def state_removed(run: Planned) -> None:
    run.optimizer.state.clear()


def state_of_one_removed(run: Planned) -> None:
    master = run.optimizer.param_groups[1]["params"][0]
    del run.optimizer.state[master]


def state_loaded(run: Planned) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def masters_elsewhere(run: Planned) -> None:
    for master in run.amp.master_params():
        master.data = master.clone()


def halves_elsewhere(run: Planned) -> None:
    for p in run.params:
        if p.dtype is torch.float16:
            p.data = p.data.clone()


def group_without_one(run: Planned) -> None:
    run.optimizer.param_groups[1]["params"].pop()


def groups_exchanged(run: Planned) -> None:
    groups = run.optimizer.param_groups
    groups[0]["params"], groups[1]["params"] = groups[1]["params"], groups[0]["params"]


def more_state(run: Planned) -> None:
    for group in run.optimizer.param_groups:
        group["amsgrad"] = True


def less_state(run: Planned) -> None:
    for group in run.optimizer.param_groups:
        group["momentum"] = 0.0


def boundary_moved(run: Planned) -> None:
    """From one group to the next, in the same order."""
    first, second = run.optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


def alike_exchanged(run: Planned) -> None:
    (*_, one), (*_, other) = (group["params"] for group in run.optimizer.param_groups)
    for group, norm in zip(run.optimizer.param_groups, (other, one), strict=True):
        group["params"][-1] = norm


MOVED = (
    masters_elsewhere,
    halves_elsewhere,
    alike_exchanged,
    boundary_moved,
)
MOVED_STATE = (
    state_elsewhere,
    state_replaced,
    state_exchanged,
    state_removed,
    state_of_one_removed,
    state_loaded,
)
LIE_OTHERWISE = (
    gradient_missing,
    gradient_laid_otherwise,
    gradient_laid_otherwise_in_place,
    gradient_not_aligned,
    group_without_one,
    groups_exchanged,
)


def trained(
    device: torch.device, kind: str, change: Callable[[Planned], None], level: str = "O2"
) -> list[Tensor]:
    """All that is written in four steps, in the third of which something changes."""
    with Planned(device, kind, level) as run:
        for i in range(4):
            run.next_step(change if i == 2 else nothing)
        return run.everything()


Compared = Callable[[Callable[[], list[Tensor]]], list[bool]]


@pytest.fixture
def compared(again: list[bool], monkeypatch: pytest.MonkeyPatch) -> Compared:
    """Compare the result of a training with plain steps'; return which steps repeated the last."""

    def compare(training: Callable[[], list[Tensor]]) -> list[bool]:
        found = training()
        made, again[:] = list(again), []
        plainly(monkeypatch)
        expected = training()
        assert not any(again)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
        return made

    return compare


ORDINARY = [
    *(("AdamW", change) for change in TAKEN),
    *((kind, gradients_elsewhere) for kind in KINDS if kind != "AdamW"),
    *zip(itertools.cycle(["AdamW", "SGD"]), MOVED),
    *zip(itertools.cycle(["AdamW", "SGD momentum"]), MOVED_STATE),
]


@pytest.mark.parametrize(("kind", "change"), [*ORDINARY[:2], *more(ORDINARY[2:])], ids=name_of)
def test_made_again(
    kind: str, change: Callable[[Planned], None], device: torch.device, compared: Compared
) -> None:
    made = compared(lambda: trained(device, kind, change))
    assert made == [False, True, True, True]


UNUSUAL = [
    *zip(itertools.cycle(["AdamW", "SGD"]), LIE_OTHERWISE),
    ("AdamW", state_laid_otherwise),
    ("AdamW", more_state),
    ("SGD momentum", less_state),
]


@pytest.mark.parametrize(("kind", "change"), [*UNUSUAL[:3], *more(UNUSUAL[3:])], ids=name_of)
def test_seen(
    kind: str, change: Callable[[Planned], None], device: torch.device, compared: Compared
) -> None:
    made = compared(lambda: trained(device, kind, change))
    assert made[:3] == [False, True, False]


@pytest.mark.parametrize("level", ["O1", "O3"])
def test_other_levels(level: str, device: torch.device, compared: Compared) -> None:
    made = compared(lambda: trained(device, "AdamW", nothing, level))
    assert made == [False, True, True, True]


def test_two_optimizers(device: torch.device, again: list[bool]) -> None:
    """Each has a plan of its own, and takes turns with the other."""
    models = [net(device), net(device)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    with tritonamp.enable(models, optimizers, level="O2", backend="triton") as amp:
        for _ in range(4):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                x = torch.ones(3, 2, 4, 4, device=device)
                amp.backward(model(x).square().mean(), optimizer)
                optimizer.step()
    assert again[-4:] == [True] * 4
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_optimizers_without_enable(name: str, device: torch.device, compared: Compared) -> None:
    def training() -> list[Tensor]:
        model = net(device)
        optimizer = getattr(tritonamp.optim, name)(model.parameters(), lr=1e-2)
        optimizer._fused_step[0]._backend = "triton"
        for i in range(4):
            optimizer.zero_grad()
            x = torch.full((3, 2, 4, 4), 1.0 + i, device=device)
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert compared(training)[-2:] == [True] * 2


def test_nothing_is_kept_of_state_that_was_replaced(device: torch.device) -> None:
    with Planned(device, "AdamW") as run:
        for _ in range(4):
            run.next_step()
        state = next(iter(run.optimizer.state.values()))
        kept = weakref.ref(state["exp_avg"])
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        assert kept() is None


def test_versions_count_steps_again(device: torch.device, again: list[bool]) -> None:
    """Autograd sees that a step has written to saved tensors."""
    with Planned(device, "AdamW") as run:
        for _ in range(3):
            run.next_step()
        saved = run.model(next(run.xs)).sum()
        run.next_step()
        assert again[-1]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()


REGISTERS: dict[str, Callable[[torch.optim.Optimizer, Any], Any]] = {
    "all pre": lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
    "all post": lambda optimizer, hook: register_optimizer_step_post_hook(hook),
    "pre": lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
    "post": lambda optimizer, hook: optimizer.register_step_post_hook(hook),
}
"""How a hook is registered, for the steps of all optimizers or of one."""


@pytest.mark.parametrize("kind", ["all pre", "post", *more(["all post", "pre"])])
def test_a_hook_sees_each_step_from_the_next_on(
    kind: str, device: torch.device, again: list[bool]
) -> None:
    run, seen = Planned(device, "AdamW"), []

    def master() -> list[float]:
        return run.optimizer.param_groups[0]["params"][0].flatten().tolist()

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        assert optimizer is run.optimizer
        seen.append(master())

    with run.amp:
        run.next_step()
        run.next_step()
        before = [master()]
        handle = REGISTERS[kind](run.optimizer, hook)
        try:
            for _ in range(2):
                run.next_step()
                before.append(master())
        finally:
            handle.remove()
        run.next_step()
    assert before[0] != before[1] != before[2]
    assert seen == (before[:2] if kind.endswith("pre") else before[1:])
    assert again == [False, True, True, True, True]


def test_torchs_profiler_sees_each_step(device: torch.device, again: list[bool]) -> None:
    run = Planned(device, "AdamW")
    with run.amp:
        run.next_step()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            run.next_step()
            run.next_step()
    names = [event.name for event in profiler.events()]
    assert names.count("Optimizer.step#AdamW.step") == 2
    assert again == [False, True, True]


def test_cpp_answers_where_kernels_run(device: torch.device) -> None:
    if _native.build().module is None or _native.PLAIN_STEPS:
        pytest.skip("no C++ here")
    run = Planned(device, "AdamW")
    run.next_step()
    run.amp.disable()
    assert _facts._native is _native.build().module
