"""The fused rules of Muon, alone and combined with AdamW for parameters that are no matrices."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._codes import SIGNED
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._muon_lists import MuonLists, MuonRule
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.kernels.adamw import AdamRule
from tritonamp.step.fused_rule import FusedRule, scalar
from tritonamp.step.rule_table import ADAM, step_of


class FusedMuonRule(FusedRule):
    """The rule of ``torch.optim.Muon``."""

    # not data of an ``Update``, because a step has three phases
    value_kinds: ClassVar[dict[str, int]] = {"momentum_buffer": SIGNED}
    optional: ClassVar[tuple[str, ...]] = ()
    counts_steps: ClassVar[bool] = False
    needs_fp32: ClassVar[tuple[str, ...]] = ()

    @property
    def needs(self) -> set[str]:
        """Keys that a loaded group must have; torch completes no group of Muon."""
        return set(MuonRule._fields) - {"adjust_lr_fn", "compute"}

    def hyperparameters(self, group: Mapping[str, Any]) -> Any:
        """Return the hyperparameters of one group.

        Raises:
            RuntimeError: a parameter of the group is sharded.
        """
        # ``takes`` keeps torch's own Muon away from sharded parameters, but
        # ``tritonamp.optim.Muon`` has no other step to fall back to.
        if any(map(is_sharded, group["params"])):
            raise RuntimeError(
                "tritonamp.optim.Muon: a parameter is sharded (DTensor), but Muon works on whole "
                "matrices. Use torch.optim.Muon, whose own step gathers them"
            )
        return MuonRule(
            scalar(group["lr"]),
            group["weight_decay"],
            group["momentum"],
            group["nesterov"],
            tuple(group["ns_coefficients"]),
            group["eps"],
            group["ns_steps"],
            group.get("adjust_lr_fn"),
        )

    def has(self, name: str, group: Mapping[str, Any]) -> bool:
        return True

    def takes(self, optimizer: Optimizer) -> bool:
        """Tell whether all parameters are whole; torch's own step gathers sharded matrices."""
        return not any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])


class FusedMuonAndAdamRule(FusedMuonRule):
    """The rule of ``tritonamp.optim.Muon`` with ``adamw_params``.

    AdamW steps on groups that have betas, Muon on the others.
    """

    value_kinds: ClassVar[dict[str, int]] = FusedMuonRule.value_kinds | ADAM.value_kinds
    counts_steps: ClassVar[bool] = True
    # all names, because a group has the states of one kind
    optional: ClassVar[tuple[str, ...]] = "momentum_buffers", *ADAM.state_keys

    @property
    def needs(self) -> set[str]:
        """Keys that a loaded group of either kind must have."""
        return super().needs & ADAM.needs

    def hyperparameters(self, group: Mapping[str, Any]) -> Any:
        if not is_adamws(group):
            return super().hyperparameters(group)
        # a Muon does not complete groups that are added later: the decay is AdamW's
        return ADAM.hyperparameters({**group, "decoupled_weight_decay": True})

    def has(self, name: str, group: Mapping[str, Any]) -> bool:
        if not is_adamws(group):
            return name in MUON.state_keys
        return name in ADAM.state_keys and ADAM.has(name, group)


def is_adamws(group: Mapping[str, Any]) -> bool:
    """Tell whether AdamW steps on a group of ``tritonamp.optim.Muon``."""
    return "betas" in group


def _step(
    lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None, backend: str
) -> None:
    from tritonamp.kernels import muon as _muon  # here, because few runs step by it

    matrices = lists
    if any(isinstance(rule, AdamRule) for rule in lists.rules):
        matrices = _lists_of_kind(lists, MuonRule, (*MUON.state_keys,))
        others = _lists_of_kind(lists, AdamRule, (*ADAM.state_keys, "steps"))
        if len(others.tensors):
            ADAM.update(others, grad_scale, found_inf, backend)
    if len(matrices.tensors):
        _muon.muon(MuonLists(matrices), grad_scale, found_inf, backend)


def _lists_of_kind(lists: UpdateLists, kind: type, states: Sequence[str]) -> UpdateLists:
    """Return the lists of the parameters whose rules are of class ``kind``.

    Groups keep their numbers, so both parts send one table of groups. A rule of another class is
    replaced by one of ``kind``, which no kernel reads.

    Args:
        lists: lists of all parameters of a step.
        kind: class of the hyperparameters.
        states: names of the state lists to take along.
    """
    own = [rule for rule in lists.rules if isinstance(rule, kind)]
    rules = [rule if isinstance(rule, kind) else own[0] for rule in lists.rules] if own else []
    numbers = list(lists.tensors.numbers)
    places = [k for k, i in enumerate(numbers) if isinstance(lists.rules[lists.groups[i]], kind)]
    further = [name for name in ("remainders", "changes") if name in lists.tensors]
    names = ("params", "grads", "copies", *further, *states)
    tensors = TensorLists(
        memory=lists.tensors.memory,
        numbers=[numbers[k] for k in places],
        size=lists.tensors.size,
        may_repeat=("copies", "remainders", *ADAM.optional),
        scalars=("steps",) if "steps" in states else (),
        sharded=False,
        **{name: [lists.tensors[name][k] for k in places] for name in names},
    )
    return UpdateLists(tensors, rules, lists.groups)


MUON = FusedMuonRule(
    name="Muon",
    kinds="a Muon",
    update=_step,
    state_keys={"momentum_buffers": "momentum_buffer"},
    torch_step=step_of(torch.optim.Muon),
    sparse_error="Muon does not support sparse gradients",
)
MUON_AND_ADAMW = FusedMuonAndAdamRule(
    name="Muon",
    kinds="a Muon with adamw_params",
    update=_step,
    state_keys={**MUON.state_keys, **ADAM.state_keys},
    sparse_error=MUON.sparse_error,
)
