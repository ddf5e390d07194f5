"""Optimizers that step in one pass on the device: what each rule says, and what all share."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._native import PLAIN_STEPS
from tritonamp.kernels._update_lists import Hyperparameters, UpdateLists
from tritonamp.kernels.device import refuse_capture
from tritonamp.step.gradients import Gradients
from tritonamp.step.plan import StepPlan


class FusedRule(ABC):
    """How one kind of optimizer steps: unscale, clip, update, half copies and skip in one pass.

    Attributes:
        kinds: what users call such optimizers.
        torch_step: the step function of torch's own optimizer of this kind; None: torch has none.
        needs: keys that a parameter group must have.
        state_keys: name in the kernel's lists to key in ``optimizer.state``, of tensors of the
            parameter's shape, in FP32 (FP64 for FP64 parameters).
        optional: those of these names that a group may lack.
        counts_steps: whether the state holds a step count under "step".
        leaves_sparse_to_torch: whether torch's own step takes sparse gradients.
    """

    kinds: str
    torch_step: Callable[..., Any] | None = None
    needs: Sequence[str]
    state_keys: ClassVar[Mapping[str, str]]
    optional: Sequence[str] = ()
    counts_steps: bool = False
    leaves_sparse_to_torch: bool = False

    @abstractmethod
    def update(
        self,
        lists: UpdateLists,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        backend: str,
    ) -> None:
        """Call the operation of ``tritonamp.kernels``."""

    @abstractmethod
    def hyperparameters(self, optimizer: Optimizer, group: dict[str, Any]) -> Hyperparameters:
        """Return the hyperparameters of one group."""

    def has(self, name: str, group: dict[str, Any]) -> bool:
        """Tell whether the group's parameters have the state of that name."""
        return True

    def tells_first_step(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether a parameter's first step differs from one on state of zeros.

        It costs one host read a step: a step that is skipped on the device is not the first one.
        """
        return False

    def at_first_step(self, hyperparameters: Any) -> Hyperparameters:
        """Return what holds in a parameter's first step in the place of ``hyperparameters``."""
        return hyperparameters

    def group_problems(
        self, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield what is wrong with the parameter groups of a state that is to be loaded."""
        missing = sorted(key for key in self.needs if any(key not in group for group in groups))
        if missing:
            yield f"the parameter groups have no {', '.join(missing)}"

    def refuse_sparse(self) -> None:
        """Raise what torch raises for sparse gradients; return where torch takes them."""
        return


class FusedStep:
    """The steps of one optimizer by a rule; hyperparameters and state stay in torch's format.

    Args:
        optimizer: whose ``param_groups`` and ``state`` are read and written.
        rule: of its kind.
        backend: "auto", "triton" or "eager".
        track_lost: count the half values that a step did not change.
    """

    def __init__(
        self, optimizer: Optimizer, rule: FusedRule, backend: str, track_lost: bool = False
    ) -> None:
        self.rule = rule
        self._optimizer = optimizer
        self._backend = backend
        self._lists = UpdateLists(track_lost, rule.optional)
        self._keys = {**rule.state_keys, **({"steps": "step"} if rule.counts_steps else {})}
        self._seen: tuple[Any, ...] = ()  # what the state was brought into shape for
        self._seen_state: list[list[int]] = []
        # where the parameters' states are among the optimizer's; -1: they have none
        self._order: list[int] = []
        self._lacks: dict[str, list[bool]] = {}  # which parameters have no such state, if any
        self._groups: list[int] = []  # by number, which group a parameter belongs to
        self._made: set[int] = set()  # numbers of the parameters whose state was just made
        self._plan: StepPlan | None = None

    def step(
        self, gradients: Gradients, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Step once.

        Args:
            gradients: with what they lead to; "params" and "copies" are written.
            grad_scale: 0-d factor on the gradients, or None.
            found_inf: 0-d, any value other than 0 skips on the device; None: always step.
        """
        tensors = gradients.lists
        if not len(tensors):
            return
        if self._plan is not None and self._plan.holds(gradients):
            self._step_again(gradients, grad_scale, found_inf)
            return
        self._plan = None
        lists, groups = self._lists, self._optimizer.param_groups
        tells_first = self.rule.tells_first_step(groups)
        if tells_first and found_inf is not None and bool(found_inf):
            return
        tensors.may_repeat = self._lists.tensors.may_repeat
        lists.tensors = tensors
        for name, values in self._state(gradients).items():
            if name == "steps":
                lists.steps.number(tensors.numbers, tensors.size)
                lists.steps.set("steps", values, lasting=True)
            else:
                tensors.set(name, values, lasting=True)
        lists.rules = self._rules()
        lists.groups = self._groups
        made, self._made = self._made, set()
        if tells_first:  # behind the groups stand those of first steps
            lists.rules += [self.rule.at_first_step(rule) for rule in lists.rules]
            lists.groups = [g + len(groups) * (i in made) for i, g in enumerate(self._groups)]
        lists.launches = ()
        self.rule.update(lists, grad_scale, found_inf, self._backend)
        if not (PLAIN_STEPS or tells_first or self._lacks_some()) and lists.launches:
            keys = [k for name, k in self._keys.items() if name not in self._lacks]
            self._plan = StepPlan.after(self._optimizer, gradients, keys, self._order, self._kinds)
        # whoever replaces or removes state gets its memory back
        tensors.release(*self.rule.state_keys)
        lists.steps.release("steps")

    def _step_again(
        self, gradients: Gradients, grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Step as the last time: only gradients and hyperparameters are others."""
        self._lists.rules = self._rules()
        self._lists.launch_again(grad_scale, found_inf)
        gradients.lists.mark_written(("params", "copies"))

    def _rules(self) -> list[Hyperparameters]:
        groups = self._optimizer.param_groups
        return [self.rule.hyperparameters(self._optimizer, group) for group in groups]

    def _kinds(self) -> list[list[bool]]:
        """Return by group which optional state there is."""
        groups = self._optimizer.param_groups
        return [[self.rule.has(name, g) for name in self.rule.optional] for g in groups]

    def _lacks_some(self) -> bool:
        """Tell whether some parameters have a kind of state that others lack."""
        return any(not all(lacks) for lacks in self._lacks.values())

    def _state(self, gradients: Gradients) -> dict[str, Sequence[Tensor]]:
        """Return lists of state by the kernel's names; "steps" are the step counts."""
        groups, states = self._optimizer.param_groups, list(self._optimizer.state.values())
        params = gradients.params
        optional = self._kinds()
        members = [list(map(id, group["params"])) for group in groups]
        seen = members, list(map(id, params)), list(map(id, states)), optional
        if seen == self._seen:
            try:
                found = self._read([states[k] if k >= 0 else {} for k in self._order], gradients)
                if self._ids(found) == self._seen_state:
                    return found
            except KeyError:
                pass
        # something is new, or somebody else has been at it: bring the state into shape
        mine = self._bring_into_shape(gradients)
        index = {id(state): k for k, state in enumerate(self._optimizer.state.values())}
        self._order = [index.get(id(state), -1) for state in mine]
        self._seen = (*seen[:2], list(map(id, self._optimizer.state.values())), optional)
        found = self._read(mine, gradients)
        self._seen_state = self._ids(found)
        return found

    def _bring_into_shape(self, gradients: Gradients) -> list[dict[str, Any]]:
        """Make what state is missing; return each parameter's state."""
        groups, params = self._optimizer.param_groups, gradients.params
        tensors = gradients.lists
        group_of = {p: g for g, group in enumerate(groups) for p in group["params"]}
        self._groups = [0] * tensors.size
        for number, param in zip(tensors.numbers, params, strict=True):
            self._groups[number] = group_of[param]
        self._lacks = {}
        for name in self.rule.optional:
            lacks = [not self.rule.has(name, groups[group_of[p]]) for p in params]
            if any(lacks):
                self._lacks[name] = lacks
        return [
            self._shaped(number, param, groups[group_of[param]])
            for number, param in zip(tensors.numbers, params, strict=True)
        ]

    def _shaped(self, number: int, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return one parameter's state in torch's format, made or brought to FP32."""
        keys = [key for name, key in self.rule.state_keys.items() if self.rule.has(name, group)]
        if not keys:
            return {}
        state: dict[str, Any] = self._optimizer.state[param]
        shaped: dict[str, Tensor] = {}
        if self.rule.counts_steps:
            step = state.get("step", 0.0)
            if not isinstance(step, Tensor):
                shaped["step"] = torch.full((), step, dtype=torch.float32, device=param.device)
            elif step.dtype is not torch.float32 or step.device != param.device:
                shaped["step"] = step.to(param.device, torch.float32)
        dtype = torch.promote_types(param.dtype, torch.float32)
        missing = [key for key in keys if state.get(key) is None]  # None: as torch's SGD has it
        for key in keys:
            if key in missing:
                shaped[key] = torch.zeros_like(
                    param, dtype=dtype, memory_format=torch.preserve_format
                )
            elif state[key].is_sparse:  # torch's own step of a sparse gradient has made it
                shaped[key] = state[key].to_dense()
            elif state[key].dtype != dtype:
                shaped[key] = state[key].to(dtype)
        if shaped:
            refuse_capture(param.device, "the optimizer's state")
            state.update(shaped)
        if missing:
            self._made.add(number)
        return state

    def _read(
        self, states: Sequence[Mapping[str, Tensor]], gradients: Gradients
    ) -> dict[str, Sequence[Tensor]]:
        found: dict[str, Sequence[Tensor]] = {}
        params = gradients.lists["params"]
        for name, key in self._keys.items():
            lacks = self._lacks.get(name)
            if lacks is None:
                found[name] = list(map(operator.itemgetter(key), states))
            elif all(lacks):
                found[name] = params
            else:
                rows = zip(states, lacks, params, strict=True)
                found[name] = [param if lack else state[key] for state, lack, param in rows]
        return found

    def _ids(self, found: Mapping[str, Sequence[Tensor]]) -> list[list[int]]:
        """Return who the tensors of the state are; of what all lack, nothing."""
        there = {name: not all(self._lacks.get(name, (False,))) for name in found}
        return [list(map(id, values)) for name, values in found.items() if there[name]]


def scalar(value: Any) -> Any:
    """Return ``value``; a tensor of one element without its dimensions."""
    return value.reshape(()) if isinstance(value, Tensor) else value
