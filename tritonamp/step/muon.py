"""The fused rules of Muon, alone and combined with AdamW for parameters that are no matrices."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels import adamw as _adamw
from tritonamp.kernels._multi_tensor import TensorLists
from tritonamp.kernels._muon_lists import MuonLists, MuonRule
from tritonamp.kernels._optimizers import OPTIMIZERS
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.step.adam import ADAM
from tritonamp.step.fused_rule import FusedRule, Operation, scalar


class FusedMuonRule(FusedRule):
    """The rule of ``torch.optim.Muon``."""

    kinds = "a Muon"
    torch_step = staticmethod(inspect.unwrap(torch.optim.Muon.step))
    needs: Sequence[str] = (
        "lr",
        "weight_decay",
        "momentum",
        "nesterov",
        "ns_coefficients",
        "eps",
        "ns_steps",
    )
    state_keys: ClassVar[Mapping[str, str]] = {"momentum_buffers": "momentum_buffer"}
    # matrices of one shape are multiplied together, so a step cannot go through the device in parts
    offloads = OPTIMIZERS["Muon"].in_parts

    def operation(self, lists: UpdateLists) -> Operation:
        return _step

    def hyperparameters(self, optimizer: Optimizer, group: dict[str, Any]) -> Any:
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

    def takes(self, optimizer: Optimizer) -> bool:
        """Tell whether all parameters are whole; torch's own step gathers sharded matrices."""
        return not any(is_sharded(p) for group in optimizer.param_groups for p in group["params"])

    def refuse_sparse(self) -> None:
        """Raise the RuntimeError of torch's Muon."""
        raise RuntimeError("Muon does not support sparse gradients")


class FusedMuonAndAdamRule(FusedMuonRule):
    """The rule of ``tritonamp.optim.Muon`` with ``adamw_params``.

    AdamW steps on groups that have betas, Muon on the others.
    """

    kinds = "a Muon with adamw_params"
    torch_step = None  # type: ignore[assignment]
    needs = ("lr", "weight_decay", "eps")
    state_keys: ClassVar[Mapping[str, str]] = {
        "momentum_buffers": "momentum_buffer",
        "exp_avgs": "exp_avg",
        "exp_avg_sqs": "exp_avg_sq",
        "max_exp_avg_sqs": "max_exp_avg_sq",
    }
    optional = tuple(state_keys)
    counts_steps = True

    def hyperparameters(self, optimizer: Optimizer, group: dict[str, Any]) -> Any:
        if not is_adamws(group):
            return super().hyperparameters(optimizer, group)
        # ``optimizer`` is a Muon, so the class cannot say that the decay is AdamW's
        decoupled = {**group, "decoupled_weight_decay": True}
        return ADAM.hyperparameters(optimizer, decoupled)

    def has(self, name: str, group: dict[str, Any]) -> bool:
        if not is_adamws(group):
            return name == "momentum_buffers"
        return name != "momentum_buffers" and ADAM.has(name, group)


def is_adamws(group: Mapping[str, Any]) -> bool:
    """Tell whether AdamW steps on a group of ``tritonamp.optim.Muon``."""
    return "betas" in group


def _step(
    lists: UpdateLists, grad_scale: Tensor | None, found_inf: Tensor | None, backend: str
) -> None:
    from tritonamp.kernels import muon as _muon  # here, because few runs step by it

    # Asked for its side effect: it keeps the plan of these lists in the memory, by which the next
    # step sees that the state is in shape. The launches below work on other lists.
    lists.tensors.uses_triton(backend, _muon.MUON)
    matrices = lists
    if any(isinstance(rule, _adamw.AdamRule) for rule in lists.rules):
        matrices = _lists_of_kind(lists, MuonRule, ("momentum_buffers",), ())
        moments = "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"
        others = _lists_of_kind(
            lists, _adamw.AdamRule, (*moments, "steps"), tuple(_adamw.ADAMW.optional)
        )
        if len(others.tensors):
            _adamw.adamw(others, grad_scale, found_inf, backend)
    if len(matrices.tensors):
        _muon.muon(MuonLists(matrices), grad_scale, found_inf, backend)


def _lists_of_kind(
    lists: UpdateLists, kind: type, states: Sequence[str], optional: Sequence[str]
) -> UpdateLists:
    """Return the lists of the parameters whose rules are of class ``kind``.

    Groups keep their numbers, so both parts send one table of groups. A rule of another class is
    replaced by one of ``kind``, which no kernel reads.

    Args:
        lists: lists of all parameters of a step.
        kind: class of the hyperparameters.
        states: names of the state lists to take along.
        optional: names of the state lists that may repeat the parameters.
    """
    own = [rule for rule in lists.rules if isinstance(rule, kind)]
    rules = [rule if isinstance(rule, kind) else own[0] for rule in lists.rules] if own else []
    numbers = list(lists.tensors.numbers)
    places = [k for k, i in enumerate(numbers) if isinstance(lists.rules[lists.groups[i]], kind)]
    names = ("params", "grads", "copies", *states, *(["changes"] * ("changes" in lists.tensors)))
    tensors = TensorLists(
        memory=lists.tensors.memory,
        numbers=[numbers[k] for k in places],
        size=lists.tensors.size,
        may_repeat=("copies", *optional),
        scalars=("steps",) if "steps" in states else (),
        sharded=False,
        **{name: [lists.tensors[name][k] for k in places] for name in names},
    )
    return UpdateLists(tensors, rules, lists.groups)


MUON = FusedMuonRule()
MUON_AND_ADAMW = FusedMuonAndAdamRule()
