"""The rule by which one kind of optimizer steps in one pass on the device."""

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._optimizers import OPTIMIZERS
from tritonamp.kernels._state_formats import FORMATS
from tritonamp.kernels._update_lists import Hyperparameters
from tritonamp.policy import STATES


@dataclass(frozen=True, eq=False)
class FusedRule:
    """The step of one kind of optimizer: unscale, clip, update, half copies, skip in one pass.

    Attributes:
        name: name in ``kernels._optimizers``, whose table has the formats of the state.
        kinds: name of such optimizers in messages, with its article.
        update: function that steps on lists, an ``Update`` except for Muon. The fields of its
            hyperparameters are keys of a group, except that "beta1" and "beta2" are under "betas".
        state_keys: name in the kernel's lists to key in ``optimizer.state``.
        torch_step: step function of torch's own optimizer of this kind; None: torch has none.
        first_step: hyperparameters with another value in a parameter's first step, and that value.
        foreign: flags that only another optimizer sets to False, with the name of that optimizer.
        sparse_error: text of torch's error for sparse gradients; None: torch's own step takes them.
    """

    name: str
    kinds: str
    update: Any
    state_keys: Mapping[str, str]
    torch_step: Callable[..., Any] | None = None
    first_step: Mapping[str, float] = field(default_factory=dict)
    foreign: Mapping[str, str] = field(default_factory=dict)
    sparse_error: str | None = None

    @property
    def states(self) -> tuple[str, ...]:
        """Formats that the state can have, among ``policy.STATES``."""
        return OPTIMIZERS[self.name].states

    @property
    def offloads(self) -> bool:
        """Whether a step can be divided into parts, on some parameters after others."""
        return OPTIMIZERS[self.name].in_parts

    @functools.cached_property
    def optional(self) -> tuple[str, ...]:
        """Names among ``state_keys`` that a group may lack."""
        return tuple(self.update.optional)

    @property
    def needs(self) -> set[str]:
        """Keys that a loaded group must have; torch completes missing flags."""
        rule = self.update.rule
        return {_key(name) for name in rule._fields if rule.__annotations__[name] is not bool}

    @functools.cached_property
    def counts_steps(self) -> bool:
        """Whether the state holds a step count under "step"; state in codes always does."""
        counts: bool = self.update.counts_steps
        return counts

    @functools.cached_property
    def value_kinds(self) -> dict[str, int]:
        """Key of each moment to the kind of its values, SIGNED or UNSIGNED."""
        kinds = zip(self.update.states, self.update.value_kinds, strict=True)
        return {self.state_keys[name]: kind for name, kind in kinds}

    @functools.cached_property
    def needs_fp32(self) -> tuple[str, ...]:
        """Names of optional states; a group that has one keeps all its state in FP32."""
        names: tuple[str, ...] = self.update.needs_fp32
        return names

    def hyperparameters(self, group: Mapping[str, Any]) -> Hyperparameters:
        """Return the hyperparameters of one group."""
        # groups may be many, so that a call for each field would be felt at every step
        values = self._read(group)
        if self._betas is not None:
            at = self._betas
            values = *values[:at], *values[at], *values[at + 1 :]
        if not _NUMBERS.issuperset(map(type, values)):
            values = tuple(map(scalar, values))
        found: Hyperparameters = self.update.rule._make(values)
        return found

    @functools.cached_property
    def keys(self) -> tuple[str, ...]:
        """Keys of the hyperparameters in a group; "betas", a pair, stands there once."""
        return tuple(dict.fromkeys(map(_key, self.update.rule._fields)))

    @functools.cached_property
    def _read(self) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
        return operator.itemgetter(*self.keys)

    @functools.cached_property
    def _betas(self) -> int | None:
        """Place of the pair "betas" among what ``_read`` returns."""
        fields = self.update.rule._fields
        return fields.index("beta1") if "beta1" in fields else None

    def has(self, name: str, group: Mapping[str, Any]) -> bool:
        """Tell whether the group's parameters have the state ``name``, a key of ``state_keys``."""
        flag = self.update.optional.get(name)
        return flag is None or bool(group.get(flag))

    def keys_of(self, group: Mapping[str, Any]) -> list[str]:
        """Return the keys of the state that the group's parameters have."""
        return [key for name, key in self.state_keys.items() if self.has(name, group)]

    def counts_in(self, state: str, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether state in the format ``state`` holds step counts, as codes always do."""
        return self.counts_steps or (FORMATS[state].in_blocks and any(map(self.keys_of, groups)))

    def check_format(self, state: str, group: Mapping[str, Any]) -> None:
        """Raise ValueError if a group has state that needs "fp32", and ``state`` is another."""
        flags = [self.update.optional[n] for n in self.needs_fp32 if self.has(n, group)]
        if flags and state != STATES[0]:
            raise ValueError(
                f"state={state!r}: expected {flags[0]}=False, got a group of {self.name} with "
                f"{flags[0]}={group[flags[0]]}, whose moments may not be rounded: use state='fp32'"
            )

    def takes(self, optimizer: Optimizer) -> bool:
        """Tell whether this rule replaces the step of ``optimizer``, which is torch's own."""
        return True

    def tells_first_step(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether a parameter's first step differs from a step on state of zeros.

        True costs one host read per step, because a step that the device skips does not count as
        the first.
        """
        return len(self.first_step) > 0 and any(
            group[name] != first and len(self.keys_of(group)) > 0
            for group in groups
            for name, first in self.first_step.items()
        )

    def at_first_step(self, hyperparameters: Any) -> Hyperparameters:
        """Return the hyperparameters of a first step, given those of a parameter's other steps."""
        first: Hyperparameters = hyperparameters._replace(**self.first_step)
        return first

    def group_problems(
        self, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield problems of the parameter groups of a state that is to be loaded."""
        missing = sorted(key for key in self.needs if any(key not in group for group in groups))
        if missing:
            yield f"the parameter groups have no {', '.join(missing)}"
        # torch would load such groups, and ignore the flag from then on: another trajectory
        # without any message.
        for flag, other in self.foreign.items():
            if flag not in defaults and not all(group.get(flag, True) for group in groups):
                yield f"{flag}=False, which is {other}'s"

    def refuse_sparse(self) -> None:
        """Raise torch's RuntimeError for sparse gradients; return if torch's step takes them."""
        if self.sparse_error is not None:
            raise RuntimeError(self.sparse_error)


_NUMBERS = frozenset({float, int, bool})


def scalar(value: Any) -> Any:
    """Return ``value``; a tensor of one element becomes 0-d."""
    return value.reshape(()) if isinstance(value, Tensor) else value


def _key(name: str) -> str:
    """Return the key in a group that holds the hyperparameter ``name``."""
    return "betas" if name in ("beta1", "beta2") else name
