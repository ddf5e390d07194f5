"""Why a loaded state cannot be that of an optimizer: texts that name each misfit."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.class_swap import is_installed
from tritonamp.kernels._memory_order import BLOCK, memory_strides, padded
from tritonamp.kernels._optimizers import in_words
from tritonamp.kernels._state_formats import FORMATS, is_in_blocks
from tritonamp.policy import HALF_DTYPES
from tritonamp.step.fused_rule import FusedRule
from tritonamp.step.packed_masters import HALF_DTYPE, ORDER, REMAINDER, has_codes
from tritonamp.step.rule_table import RULES
from tritonamp.step.small_state import numbered_params

_ALL_KEYS = frozenset(key for rule in RULES for key in rule.state_keys.values())
_SHOWN = 5  # number of problems that an error lists


def check_loadable(optimizer: Optimizer, state_dict: Any, rule: FusedRule | None) -> None:
    """Raise ValueError, listing the differences, unless the state fits ``optimizer``."""
    kind = type(optimizer).__name__
    where = f"{kind}.load_state_dict: "
    keys = [type(state_dict).__name__]
    if isinstance(state_dict, Mapping):
        keys = sorted(map(str, state_dict))
    if not {"state", "param_groups"} <= set(keys):
        raise ValueError(
            f"{where}expected the keys of optimizer.state_dict() (state, param_groups), "
            f"got {keys[:20]}"
        )
    groups = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    got = [len(group["params"]) for group in groups]
    if got != sizes:
        raise ValueError(f"{where}expected groups of {sizes} parameters, got groups of {got}")
    if rule is None:
        refuse_codes(state_dict["state"], where)
        return
    problems = [*rule.group_problems(groups, optimizer.defaults)]
    states = state_dict["state"]
    counted = {i for group in groups if counts_by_group(group, states) for i in group["params"]}
    for number, param in numbered_params(optimizer, state_dict):
        state, is_counted = states.get(number, {}), number in counted
        found = _state_problems(rule, state, is_counted, param, is_installed(optimizer))
        problems += [f"state {number}: {problem}" for problem in found]
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"{where}expected the state of {rule.kinds} over parameters of the same shapes in the "
            f"same order, got {'; '.join(problems[:_SHOWN])}{more}"
        )


def refuse_codes(states: Mapping[Any, Mapping[str, Any]], where: str) -> None:
    """Raise ValueError if a fused step has put moments in codes, which no other step reads.

    Args:
        states: state of each parameter, by number.
        where: beginning of the message.
    """
    for number, state in states.items():
        # optimizers of other packages have codes of their own, without strides
        if ORDER in state and has_codes(state):
            raise ValueError(
                f"{where}expected state for the optimizer's own step, got state {number} in codes "
                "of a fused step: load a state_dict() without packed=True"
            )


def counts_by_group(group: Mapping[str, Any], states: Mapping[int, Mapping[str, Any]]) -> bool:
    """Tell whether steps are counted by group, as apex's FusedAdam does."""
    return "step" in group and not any("step" in states.get(i, {}) for i in group["params"])


def _state_problems(
    rule: FusedRule, state: Mapping[str, Any], counted: bool, param: Tensor, enabled: bool
) -> Iterator[str]:
    """Yield why one parameter's state cannot be loaded.

    Args:
        rule: fused rule of the optimizer.
        state: state of the parameter.
        counted: whether the group counts the steps.
        param: the parameter.
        enabled: whether the optimizer is enabled.
    """
    needed = {key for name, key in rule.state_keys.items() if name not in rule.optional}
    yield from code_problems(state, rule, param)
    if REMAINDER in state:
        yield from remainder_problems(state, param, enabled)
    if rule.counts_steps and not counted:
        needed.add("step")
    # An empty state is right: a parameter that never had a gradient has none.
    if state and not needed <= state.keys():
        yield f"{sorted(state)} without {sorted(needed - state.keys())}"
    # torch would keep the moments of another kind of optimizer, and its hyperparameters
    foreign = _ALL_KEYS.difference(rule.state_keys.values()).intersection(state)
    if foreign:
        yield f"{', '.join(sorted(foreign))}, which {rule.kinds} does not keep"
    for key in (*rule.state_keys.values(), "master_param"):
        value = state.get(key)
        if value is not None and not isinstance(value, Tensor):
            yield f"{key} of type {type(value).__name__}, where a tensor is needed"
        elif value is not None and value.shape != param.shape and not in_codes(value, param):
            yield f"{key} of shape {tuple(value.shape)} for a parameter of {tuple(param.shape)}"


def code_problems(state: Mapping[str, Any], rule: FusedRule, param: Tensor) -> Iterator[str]:
    """Yield why moments in codes, or strides of packed state, cannot be those of ``param``."""
    yield from order_problems(state, param)
    sizes = _code_sizes(param)
    for key in rule.value_kinds:
        codes = state.get(key)
        if not isinstance(codes, Tensor) or not in_codes(codes, param):
            continue
        if codes.ndim != 1:
            yield f"{key} of shape {tuple(codes.shape)}, where codes have one dimension"
            continue
        if sizes.get(codes.dtype) != codes.numel():
            takes = in_words([f"{size} {dtype}" for dtype, size in sizes.items()], "or")
            yield (
                f"{key} of {codes.numel()} {codes.dtype}, where {param.numel()} elements, in "
                f"blocks of {BLOCK}, take {takes}"
            )


def order_problems(state: Mapping[str, Any], param: Tensor) -> Iterator[str]:
    """Yield why codes and remainders in a state cannot be those of ``param``, given their strides.

    Codes and remainders have one dimension, so only their strides show a parameter of another
    shape.
    """
    strides = state.get(ORDER)
    if strides is None or not (REMAINDER in state or has_codes(state)):
        return
    fits = isinstance(strides, (tuple, list)) and len(strides) == param.ndim
    if fits:
        like = torch.empty_strided(param.shape, strides, device="meta")
        fits = memory_strides(like) == tuple(strides)
    if not fits:
        yield f"{ORDER} {strides}, which no dense tensor of shape {tuple(param.shape)} has"


def remainder_problems(state: Mapping[str, Any], param: Tensor, enabled: bool) -> Iterator[str]:
    """Yield why the remainder in a state cannot be that of ``param``.

    Args:
        state: state of one parameter, with the key ``REMAINDER``.
        param: the parameter.
        enabled: whether the optimizer is enabled. Half parameters have FP32 values then, which hold
            values of either half dtype.
    """
    remainder, n = state[REMAINDER], param.numel()
    if not isinstance(remainder, Tensor) or remainder.ndim != 1:
        yield f"{REMAINDER} that is no tensor of one dimension"
    elif remainder.dtype is not torch.int16 or remainder.numel() != padded(n):
        yield (
            f"{REMAINDER} of {remainder.numel()} {remainder.dtype}, where {n} elements, in whole "
            f"blocks, take {padded(n)} torch.int16"
        )
    half_dtype = state.get(HALF_DTYPE, param.dtype)
    if half_dtype not in HALF_DTYPES:
        yield f"{REMAINDER} without {HALF_DTYPE}, the dtype of the half values that it belongs to"
    elif not enabled and param.dtype in HALF_DTYPES and param.dtype is not half_dtype:
        yield (
            f"{REMAINDER} of {half_dtype} values for a parameter of {param.dtype} (load it after "
            "tritonamp.enable, or a state_dict() without packed=True)"
        )


def in_codes(moment: Tensor, param: Tensor) -> bool:
    """Tell whether a moment of ``param`` is in codes, or was before torch has cast it."""
    # no parameter has the shape of its codes
    sizes = _code_sizes(param).values()
    cast = moment.shape != param.shape and moment.ndim == 1 and len(moment) in sizes
    return is_in_blocks(moment.dtype) or cast


def _code_sizes(param: Tensor) -> dict[torch.dtype, int]:
    """Return the length of a moment of ``param`` in codes, by the dtype of the codes."""
    return {f.dtype: f.size(param.numel()) for f in FORMATS.values() if f.in_blocks}
