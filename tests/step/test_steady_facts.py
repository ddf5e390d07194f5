"""Each fact that a step like the last one rests on, changed alone: the next step has the bits of a
plain step, and it was built; after changes that are no such fact it was not.
"""

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from covering import more
from helpers import of_kernels
from random_use import Setup, Used
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity
from two_ways import bits_of, repeats, steps, stored_bits

import tritonamp

pytestmark = of_kernels
LIKE = 3  # steps before a change; the last of them is like the one before it


class Tiny(nn.Module):
    """Two half weights and an FP32 one."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.ones(4))
        self.first = nn.Linear(4, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.norm.bias.requires_grad_(False)
        self.last = nn.Linear(8, 4, bias=False)

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5, 4, generator=generator).to(self.first.weight.dtype)
        return self.last(self.norm(self.first(x))) * self.late


class Changing(Used):
    """A training in which a change may open contexts.

    Attributes:
        during: context of the next step of the optimizers.
        opened: contexts that last until the end.
        max_norm: norm to which gradients are clipped; None: they are not.
        clipped: whether the gradients of this step are clipped already.
        loss_id: number of the loss.
        set_to_none: whether steps leave no gradients, or zeros.
        seen: what hooks have seen.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, model=Tiny)
        self.during: AbstractContextManager[Any] = nullcontext()
        self.opened = ExitStack()
        self.max_norm: float | None = 1.0
        self.clipped = False
        self.loss_id = 0
        self.set_to_none = True
        self.seen: list[Any] = []

    def end(self) -> None:
        self.opened.close()
        super().end()

    def whole_step(self, before: "Change", after: "Change") -> None:
        """Take a step, with changes before its backward and after it."""
        before(self)
        if self.by_scaler:
            self.amp.scaler.scale(self.loss(1)).backward()
        else:
            self.amp.backward(self.loss(1), loss_id=self.loss_id)
        after(self)
        if self.max_norm is not None and not self.clipped:
            self.amp.clip_grad_norm_(self.max_norm)
        self.clipped = False
        with self.during:
            self.take(0)
        self.during = nullcontext()
        self.clear(0 if self.set_to_none else 1)

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    @property
    def masters_held(self) -> list[Tensor]:
        """The tensors that the optimizer steps on."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def own_state(self) -> dict[str, Any]:
        """The state of one master."""
        return self.optimizer.state[self.masters_held[0]]


Change = Callable[[Changing], object]


def nothing(run: Changing) -> None:
    pass


class Fact(NamedTuple):
    """A change, and whether the step that follows is built; None: either way.

    ``of_gradients``: the change comes after the backward. ``first``: a change before all steps.
    """

    change: Change
    built: bool | None = True
    setup: Setup = Setup(growth=2)
    of_gradients: bool = False
    first: Change = nothing


def use(name: str, number: int, **fields: Any) -> Fact:
    """Return the fact that an action of random programs changes."""
    return Fact(lambda run: getattr(run, name)(number), **fields)


# the tensors


def replace_data(run: Changing, weight: str, change: Callable[[Tensor], Tensor]) -> None:
    param = run.model.get_parameter(weight)
    param.data = change(param.data)


def of_data(weight: str, change: Callable[[Tensor], Tensor], **fields: Any) -> Fact:
    return Fact(lambda run: replace_data(run, weight, change), **fields)


def write(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(0.5)


def another_parameter(run: Changing) -> None:
    run.model.first.weight = nn.Parameter(run.model.first.weight.detach().clone())


PARAMETERS = {
    "half parameter elsewhere": of_data("first.weight", torch.clone),
    "FP32 parameter elsewhere": of_data("norm.weight", torch.clone),
    "half parameter of other strides": of_data("first.weight", lambda x: x.t().contiguous().t()),
    "half parameter of another dtype": of_data("first.weight", torch.Tensor.bfloat16, built=None),
    "half parameter that becomes FP32": of_data("last.weight", torch.Tensor.float, built=None),
    "half parameter written": Fact(lambda run: write(run.model.first.weight)),
    "FP32 parameter written": Fact(lambda run: write(run.model.norm.weight)),
    "master elsewhere": use("move_master", 0),
    "master written": use("write_master", 0),
    "packed master written": use("write_value", 0, setup=Setup(masters="packed")),
    "model loaded": Fact(lambda run: run.model.load_state_dict(run.model.state_dict())),
    "frozen": Fact(lambda run: run.model.first.weight.requires_grad_(False)),
    "healed": use("heal", 0),
    "no longer healed": use("heal", 0, first=lambda run: run.heal(0)),
    "another parameter in the module": Fact(another_parameter),
}


# gradients: their addresses are no fact


def replace_gradient(run: Changing, change: Callable[[Tensor], Tensor | None]) -> None:
    param = run.model.first.weight
    param.grad = change(param.grad)


def of_gradient(change: Callable[[Tensor], Tensor | None], **fields: Any) -> Fact:
    return Fact(lambda run: replace_gradient(run, change), of_gradients=True, **fields)


def not_aligned(grad: Tensor) -> Tensor:
    return grad.new_zeros(1 + grad.numel())[1:].view_as(grad).copy_(grad)


def in_fp32(run: Changing) -> None:
    param = run.model.first.weight
    grad, param.grad = param.grad, None
    param.grad_dtype = torch.float32
    param.grad = grad.float()


def turned_in_place(run: Changing) -> None:
    run.model.first.weight.grad.as_strided_((8, 4), (1, 8))


def of_another_size(run: Changing) -> None:
    grad = run.model.first.weight.grad
    grad.data = grad.t().contiguous()


def clip_now(run: Changing) -> None:
    run.amp.clip_grad_norm_(1.0)
    run.clipped = True


def move_after_clip(run: Changing) -> None:
    """Move gradients that later backwards add to, after their statistics were taken."""
    clip_now(run)
    run.move_gradients(0)
    run.set_to_none = False


def move_after_clip_and_build(run: Changing) -> None:
    move_after_clip(run)
    run.own_state["exp_avg"] = run.own_state["exp_avg"].clone()


class Marked(Tensor):
    """A tensor of a class of its own."""


def sparse(**fields: Any) -> Fact:
    return of_gradient(lambda grad: grad.to_sparse(), **fields)


GRADIENTS = {
    "no gradient": of_gradient(lambda grad: None),
    "gradient of other strides": of_gradient(lambda grad: grad.t().contiguous().t()),
    "gradient of other strides, in place": Fact(turned_in_place, of_gradients=True),
    "gradient of another size": Fact(of_another_size, of_gradients=True, built=None),
    "gradient not aligned": of_gradient(not_aligned),
    "gradient that repeats one number": of_gradient(lambda grad: grad[:1, :1].expand(8, 4)),
    "gradient of another dtype": Fact(in_fp32, of_gradients=True),
    "gradient of another class": of_gradient(lambda grad: grad.as_subclass(Marked), built=None),
    "sparse gradient, on which torch steps": sparse(setup=Setup("SGD momentum", growth=2)),
    "sparse gradient, which is refused": sparse(built=None),
    "gradients of all elsewhere": use("move_gradients", 0, of_gradients=True, built=False),
    "gradient elsewhere": of_gradient(torch.clone, built=False),
    "gradient written": use("write_gradient", 0, of_gradients=True, built=False),
    "gradients accumulated": use("accumulate", 4, of_gradients=True, built=False),
    "gradients moved after clipping": Fact(move_after_clip, of_gradients=True, built=False),
    "gradients moved, and a step built": Fact(move_after_clip_and_build, of_gradients=True),
    "gradients unscaled": use("unscale", 0, of_gradients=True),
}


# the state


def change_state(run: Changing, key: str, change: Callable[[Any], Any]) -> None:
    run.own_state[key] = change(run.own_state[key])


def of_state(key: str, change: Callable[[Any], Any], **fields: Any) -> Fact:
    return Fact(lambda run: change_state(run, key, change), **fields)


def set_state_data(run: Changing) -> None:
    run.own_state["exp_avg"].data = run.own_state["exp_avg"].clone()


def move_memory(run: Changing) -> None:
    """Give a moment other memory; the tensor stays the same object."""
    moment = run.own_state["exp_avg"]
    moment.set_(moment.clone())


def another_own_state(run: Changing) -> None:
    run.optimizer.state[run.masters_held[0]] = dict(run.own_state)


def load_state(run: Changing) -> None:
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def state_at_the_same_address(run: Changing) -> None:
    """Exchange the dictionary of state by one that may have the address of the old one."""
    values = {p: dict(own) for p, own in run.optimizer.state.items()}
    values[run.masters_held[0]]["exp_avg"] = 0.5 * values[run.masters_held[0]]["exp_avg"]
    kind = type(run.optimizer.state)
    vars(run.optimizer)["state"] = None
    gc.collect()
    run.optimizer.state = kind(dict)
    run.optimizer.state.update(values)


EIGHT_BITS = Setup(state="8bit")  # of which the interpreter builds each step
STATE = {
    **{f"{key} elsewhere": of_state(key, torch.clone) for key in ("step", "exp_avg", "exp_avg_sq")},
    "codes elsewhere": of_state("exp_avg", torch.clone, setup=EIGHT_BITS, built=None),
    "order of the codes": of_state("strides", lambda order: (1, 8), setup=EIGHT_BITS, built=None),
    "moment of other strides": of_state("exp_avg", lambda x: x.t().contiguous().t()),
    "moment of another class": of_state("exp_avg", lambda x: x.as_subclass(Marked)),
    "moment of another dtype": of_state("exp_avg", torch.Tensor.bfloat16),
    "moment with other data": Fact(set_state_data),
    "moment with other memory": Fact(move_memory),
    "moment removed": Fact(lambda run: run.own_state.pop("exp_avg")),
    "step that is a number": of_state("step", float),
    "key that the step does not read": Fact(lambda run: run.own_state.update(mine=torch.ones(2))),
    "order of the keys": use("turn_state", 1),
    "order of the parameters": use("turn_state", 0),
    "another dictionary for a parameter": Fact(another_own_state, built=False),
    "state of a parameter removed": use("remove_state", 0),
    "another dictionary for all": use("copy_state", 0, built=False),
    "dictionary at the same address": Fact(state_at_the_same_address),
    "state loaded": Fact(load_state),
    "moment written": Fact(lambda run: write(run.own_state["exp_avg"]), built=False),
}


# the groups


def set_in_group(**values: Any) -> Change:
    return lambda run: run.group.update(values)


def tuple_at_the_same_address(run: Changing) -> None:
    """Exchange the betas twice: the second tuple may have the address of the first."""
    run.group["betas"] = (0.5, 0.6)
    run.group["betas"] = (0.7, 0.8)


def list_at_the_same_address(run: Changing) -> None:
    params = [*reversed(run.group["params"])]
    run.group["params"] = None
    run.group["params"] = [*params]


def other_groups(run: Changing) -> None:
    run.optimizer.param_groups = list(run.optimizer.param_groups)


def another_group(run: Changing) -> None:
    run.optimizer.param_groups[0] = dict(run.group)


def move_boundary(run: Changing) -> None:
    first, second = run.optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


def set_lr(value: Any) -> Fact:
    """Return a change that is a fact where the learning rate becomes a tensor or a number."""
    return Fact(set_in_group(lr=value), built=not isinstance(value, float))


def lr_in_place(run: Changing) -> None:
    """Write to a learning rate that is a tensor from the second step on."""
    run.group["lr"].mul_(0.5)


SGD = Setup("SGD momentum", growth=2)
GROUPS = {
    "lr": set_lr(0.02),
    "lr that becomes a tensor": set_lr(torch.tensor(0.02)),
    "lr that becomes an integer": set_lr(1),
    "betas": Fact(set_in_group(betas=(0.5, 0.6)), built=None),
    "betas at the same address": Fact(tuple_at_the_same_address, built=None),
    "weight_decay": Fact(set_in_group(weight_decay=0.5), built=False),
    "eps": Fact(set_in_group(eps=1e-2), built=False),
    "amsgrad": Fact(set_in_group(amsgrad=True)),
    "maximize": Fact(set_in_group(maximize=True)),
    "decoupled_weight_decay": Fact(set_in_group(decoupled_weight_decay=False)),
    "capturable": Fact(set_in_group(capturable=True), built=None),
    "nesterov": Fact(set_in_group(nesterov=True), setup=SGD),
    "no momentum": Fact(set_in_group(momentum=0.0), setup=SGD),
    "no momentum of RMSprop": Fact(set_in_group(momentum=0.0), setup=Setup("RMSprop momentum")),
    "momentum": Fact(
        set_in_group(momentum=0.9), setup=SGD, first=set_in_group(momentum=0.0, nesterov=False)
    ),
    "dampening": Fact(set_in_group(dampening=0.5), setup=SGD),
    "another list of parameters": use("new_lists", 0),
    "parameters in another order": use("turn_group", 0),
    "list at the same address": Fact(list_at_the_same_address),
    "another group": Fact(another_group),
    "another list of groups": Fact(other_groups),
    "parameter removed": Fact(lambda run: run.optimizer.param_groups[1]["params"].pop()),
    "boundary moved": Fact(move_boundary),
    "added group": use("add_group", 0),
}


# whatever surrounds the step


def hook(register: Callable[..., Any]) -> Fact:
    """Return the change that hooks of the step note a master from now on."""

    def change(run: Changing) -> None:
        def note(*_: Any) -> None:
            run.seen.append(run.masters_held[0].detach().clone())

        run.opened.callback(register(run.optimizer, note).remove)

    return Fact(change, built=None)


def hook_that_writes(run: Changing) -> None:
    handle = run.optimizer.register_step_pre_hook(lambda *_: write(run.model.first.weight.grad))
    run.opened.callback(handle.remove)


def profile(run: Changing) -> None:
    run.during = torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True)


def set_norm(max_norm: float | None, **fields: Any) -> Fact:
    return Fact(lambda run: setattr(run, "max_norm", max_norm), **fields)


def veto(flag: bool | Tensor) -> Fact:
    return Fact(lambda run: run.amp.veto(flag), of_gradients=True, built=None)


def veto_after_clip(run: Changing) -> None:
    clip_now(run)
    run.amp.veto(True)


def bad(factor: float, **fields: Any) -> Fact:
    return Fact(lambda run: run.backward(run.loss(1) * factor), of_gradients=True, **fields)


def keep_zeros(run: Changing) -> None:
    """Leave zeros instead of no gradients, from now on."""
    run.set_to_none = False


def raise_once(run: Changing) -> None:
    def fail(*_: Any) -> None:
        handle.remove()
        raise ZeroDivisionError("on purpose")

    handle = run.optimizer.register_step_pre_hook(fail)


def give_up(run: Changing) -> None:
    """Have a loss decided, and then clear its gradients."""
    run.accumulate(2)
    run.clip(2)
    run.clear(0)


def load_amp(run: Changing) -> None:
    run.amp.load_state_dict({**run.amp.scaler.state_dict(), "scale": 64.0})


def disable(run: Changing) -> None:
    """Train in FP32 for one step, then enable again."""
    run.amp.disable()
    for optimizer in run.optimizers:
        run.loss(1).backward()
        optimizer.step()
        optimizer.zero_grad()
    run.amp = tritonamp.enable(run.model, run.optimizers, **run.enabled_with)


TWO = Setup("AdamW and AdamW", growth=2)
AROUND = {
    "hook before the step": hook(lambda optimizer, note: optimizer.register_step_pre_hook(note)),
    "hook after the step": hook(lambda optimizer, note: optimizer.register_step_post_hook(note)),
    "hook before all steps": hook(lambda _, note: register_optimizer_step_pre_hook(note)),
    "hook after all steps": hook(lambda _, note: register_optimizer_step_post_hook(note)),
    "hook that writes gradients": Fact(hook_that_writes, built=None),
    "profiler": Fact(profile, built=None),
    "veto": veto(True),
    "veto by a tensor": veto(torch.tensor(True)),
    "veto that is none": veto(torch.tensor(False)),
    "veto after the decision": Fact(veto_after_clip, of_gradients=True, built=None),
    "loss that is not finite": bad(float("inf"), built=False),
    "overflow": bad(2.0**100, built=False),
    "outlier": bad(20.0, setup=Setup(growth=2, skip_outliers=6.0), built=False),
    "clipped to another norm": set_norm(0.1, built=False),
    "clipped no longer": set_norm(None, built=None),
    "loss with a scale of its own": Fact(lambda run: setattr(run, "loss_id", 1), built=None),
    "another loss": use("accumulate_another_loss", 0, of_gradients=True),
    "loss of one of two optimizers": use("accumulate_for_one", 0, setup=TWO, built=None),
    "torch.amp's loop": use("change_loop", 0, built=None),
    "two optimizers": Fact(nothing, built=False, setup=TWO),
    "step that raises": Fact(raise_once, built=None),
    "step without gradients": use("take", 0, built=False),
    "loss that is given up": Fact(give_up, built=None),
    "inference mode": Fact(lambda run: setattr(run, "during", torch.inference_mode()), built=None),
    "average": use("average", 0, built=False),
    "model filled with the average": use("copy_average", 0),
    "gradients kept as zeros": Fact(keep_zeros, built=False),
    "handle's state loaded": Fact(load_amp, built=None),
    "enabled again": use("enable_again", 0),
    "disabled for a step": Fact(disable),
    "copied": use("copy", 0, built=None),
    "FP32 values read": use("look", 0, built=None),
    "nothing": Fact(nothing, built=False),
}

FACTS = {**PARAMETERS, **GRADIENTS, **STATE, **GROUPS, **AROUND}
IN_A_PLAIN_RUN = (
    *("half parameter elsewhere", "master written", "no gradient", "gradients of all elsewhere"),
    *("exp_avg elsewhere", "lr", "betas at the same address", "hook before the step", "veto"),
)


def taken(run: Changing, fact: Fact, changes: bool) -> dict[str, Any]:
    """Take a step, and return what can be seen after it: all bits, numbers, and an error."""
    found: dict[str, Any] = {"error": None}
    change = fact.change if changes else nothing
    try:
        run.whole_step(*((nothing, change) if fact.of_gradients else (change, nothing)))
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        run.clear(0)
    found["numbers"] = repr((run.amp.stats(), run.causes))  # text, because NaN is not NaN
    found |= {f"seen {i}": bits_of(x) for i, x in enumerate(run.seen)}
    return found | stored_bits(run)


def trained(fact: Fact, plain: bool) -> tuple[list[dict[str, Any]], list[int]]:
    """Take equal steps, one with the change, and one more.

    Returns:
        what can be seen after each step; and how many steps of optimizers repeated the last one
        until then.
    """
    found, repeated = [], []
    with steps(plain), repeats() as noted, Changing(fact.setup) as run:
        if fact.setup.skip_outliers is not None:
            run.fill_window(0)
        fact.first(run)
        for number in range(LIKE + 2):
            found.append(taken(run, fact, changes=number == LIKE))
            repeated.append(len(noted))
    return found, repeated


def assert_built(fact: Fact, repeated: list[int]) -> None:
    """Assert that the step before the change repeated the last one, and the next was built."""
    if fact.built is not None:
        assert repeated[LIKE - 1] > repeated[LIKE - 2], "the steps before the change are not alike"
        assert fact.built == (repeated[LIKE] == repeated[LIKE - 1])


@pytest.mark.parametrize(
    "name", [*IN_A_PLAIN_RUN, *more(name for name in FACTS if name not in IN_A_PLAIN_RUN)]
)
def test_a_fact_that_changes_alone(name: str) -> None:
    fact = FACTS[name]
    (found, repeated), (expected, _) = trained(fact, plain=False), trained(fact, plain=True)
    for number, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        assert ours == plain, f"step {number}"
    assert_built(fact, repeated)
