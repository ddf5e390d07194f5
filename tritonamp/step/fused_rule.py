"""The rule by which one kind of optimizer steps in one pass on the device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._update_lists import Hyperparameters, UpdateLists
from tritonamp.policy import STATES

Operation = Callable[[UpdateLists, Tensor | None, Tensor | None, str], None]
"""Steps on lists, given the factor on gradients (0-d, or None), a flag that skips, the backend."""


class FusedRule(ABC):
    """The step of one kind of optimizer: unscale, clip, update, half copies, skip in one pass.

    Attributes:
        kinds: name of such optimizers in messages, with its article.
        torch_step: step function of torch's own optimizer of this kind; None: torch has none.
        needs: keys that a parameter group must have.
        states: formats that the state can have, among ``policy.STATES``.
        state_keys: name in the kernel's lists to key in ``optimizer.state``, for tensors of the
            parameter's shape, in FP32 (FP64 for FP64 parameters).
        optional: names among ``state_keys`` that a group may lack.
        counts_steps: whether the state holds a step count under "step"; state "8bit" always does.
        leaves_sparse_to_torch: whether torch's own step takes sparse gradients.
        offloads: whether a step can be divided into parts, on some parameters after others.
    """

    kinds: str
    torch_step: Callable[..., Any] | None = None
    needs: Sequence[str]
    states: tuple[str, ...] = STATES[:1]
    state_keys: ClassVar[Mapping[str, str]]
    optional: Sequence[str] = ()
    counts_steps: bool = False
    leaves_sparse_to_torch: bool = False
    offloads: bool = True

    @abstractmethod
    def operation(self, lists: UpdateLists) -> Operation:
        """Return the operation of ``tritonamp.kernels`` that steps on the lists."""

    @abstractmethod
    def hyperparameters(self, optimizer: Optimizer, group: dict[str, Any]) -> Hyperparameters:
        """Return the hyperparameters of one group."""

    def has(self, name: str, group: dict[str, Any]) -> bool:
        """Tell whether the group's parameters have the state ``name``, a key of ``state_keys``."""
        return True

    def takes(self, optimizer: Optimizer) -> bool:
        """Tell whether this rule replaces the step of ``optimizer``, which is torch's own."""
        return True

    def tells_first_step(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Tell whether a parameter's first step differs from a step on state of zeros.

        True costs one host read per step, because a step that the device skips does not count as
        the first.
        """
        return False

    def at_first_step(self, hyperparameters: Any) -> Hyperparameters:
        """Return the hyperparameters of a first step, given those of a parameter's other steps."""
        return hyperparameters

    def group_problems(
        self, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield problems of the parameter groups of a state that is to be loaded."""
        missing = sorted(key for key in self.needs if any(key not in group for group in groups))
        if missing:
            yield f"the parameter groups have no {', '.join(missing)}"

    def refuse_sparse(self) -> None:
        """Raise torch's error for sparse gradients; return if torch's optimizer takes them."""
        return


def scalar(value: Any) -> Any:
    """Return ``value``; a tensor of one element becomes 0-d."""
    return value.reshape(()) if isinstance(value, Tensor) else value
