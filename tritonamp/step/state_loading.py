"""Loading the state of an optimizer: FP32 state stays FP32, and misfits are named."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._state_formats import STATE_DTYPES, is_in_blocks
from tritonamp.nested import map_leaves
from tritonamp.policy import HALF_DTYPES, STATES
from tritonamp.step.fused_rule import FusedRule
from tritonamp.step.packed_masters import REMAINDER, take_master
from tritonamp.step.rules import has_half_state, keeps_fp32_state, rule_of
from tritonamp.step.small_state import in_fp32, numbered_params
from tritonamp.step.state_problems import (
    check_loadable,
    code_problems,
    counts_by_group,
    remainder_problems,
)


def load_state(
    optimizer: Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    rule: FusedRule | None,
    pin: Callable[[Tensor], Tensor] | None = None,
    state: str = STATES[0],
) -> None:
    """Call ``load(state_dict)``, and keep FP32 state of half parameters in FP32.

    Args:
        optimizer: optimizer that loads.
        load: the optimizer's own ``load_state_dict``.
        state_dict: a state of such an optimizer. Step counts may stand in the groups, as in apex's
            FusedAdam.
        rule: fused rule of the optimizer; None: the optimizer runs its own step.
        pin: function that returns a copy of a tensor in the host memory where state stays; None:
            state stays on the device.
        state: format in which the optimizer keeps its state.

    Raises:
        ValueError: ``state_dict`` is no state of such an optimizer over such parameters; nothing
            was changed then.
    """
    pinned_keys = rule.state_keys.values() if rule is not None and pin is not None else ()
    if not isinstance(state_dict, Mapping):
        check_loadable(optimizer, state_dict, rule)
    checked: list[dict[str, Any]] = []

    # A hook, registered last: it runs after the user's hooks, and sees the state that they return.
    def check(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        check_loadable(optimizer, given, rule)
        if rule is not None:
            for group in given["param_groups"]:
                rule.check_format(state, group)
        given = {**given, "state": map_leaves(_written_outside, given["state"])}
        counts_steps = rule is not None and rule.counts_steps
        checked.append(_with_step_counts(given) if counts_steps else given)
        # torch would bring these tensors to the device, which may have no room for them
        return _without(checked[0], pinned_keys)

    handle = optimizer.register_load_state_dict_pre_hook(check)
    try:
        load(state_dict)
    finally:
        handle.remove()
    # Without a checked state ``load`` ran no hook of torch's, because the optimizer loads in its
    # own way.
    for param, key, value in _loaded(optimizer, checked[0]) if checked else ():
        if key in pinned_keys and pin is not None:
            optimizer.state[param][key] = pin(value) if isinstance(value, Tensor) else value
        elif isinstance(value, Tensor) and _is_cast_by_torch(value, param):
            optimizer.state[param][key] = value.to(param.device, copy=True)


def _is_cast_by_torch(value: Tensor, param: Tensor) -> bool:
    """Tell whether ``Optimizer.load_state_dict`` has cast state to the dtype of its parameter.

    torch casts the state of every floating parameter: codes and remainders become floats, and FP32
    or bfloat16 state of half parameters is rounded.
    """
    is_rounded = value.dtype in STATE_DTYPES and param.dtype in HALF_DTYPES
    return is_rounded or is_in_blocks(value.dtype) or value.dtype is torch.int16


def _written_outside(value: Any) -> Any:
    """Return ``value`` in a form that a step can write to.

    A tensor of a file that was read in inference mode is copied, because it could not be written
    to.
    """
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _without(state_dict: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """Return a state dict without some keys of each parameter's state."""
    states = {
        number: {key: value for key, value in state.items() if key not in keys}
        for number, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _with_step_counts(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the groups' step counts (apex's FusedAdam) moved to parameters."""
    state, groups = dict(state_dict["state"]), []
    for group in state_dict["param_groups"]:
        if counts_by_group(group, state_dict["state"]):
            step = torch.as_tensor(group["step"], dtype=torch.float32).reshape(())
            for number in group["params"]:
                if number in state:
                    # each parameter has a tensor of its own, because steps count in place
                    state[number] = {**state[number], "step": step.clone()}
            group = {key: value for key, value in group.items() if key != "step"}
        groups.append(group)
    return {**state_dict, "state": state, "param_groups": groups}


def _loaded(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[Tensor, str, Any]]:
    """Yield parameter, key and value of each entry of the states in a state dict."""
    for number, param in numbered_params(optimizer, state_dict):
        for key, value in state_dict["state"].get(number, {}).items():
            yield param, key, value


def widen_state(optimizer: Optimizer, params: Iterable[Tensor]) -> bool:
    """Widen half state to FP32, because these parameters get FP32 values.

    Returns:
        whether there was any half state.
    """
    found = False
    for param in params:
        state = _copy_state(optimizer, param)
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dtype in HALF_DTYPES:
                state[key], found = value.float(), True
    return found


def check_codes(optimizer: Optimizer, rule: FusedRule | None) -> None:
    """Raise ValueError if torch has rounded packed state while the optimizer was not enabled."""
    for param in [p for group in optimizer.param_groups for p in group["params"]]:
        state = optimizer.state.get(param, {})
        if rule is None or not state:
            continue
        problems = [*code_problems(state, rule, param)]
        if REMAINDER in state:
            problems += remainder_problems(state, param, enabled=False)
        problem = next(iter(problems), None)
        if problem is not None:
            raise ValueError(
                f"optimizer: expected state as its own load_state_dict makes it, got "
                f"{type(optimizer).__name__} with {problem}, which torch casts to the dtype of the "
                "parameter: load a packed state after tritonamp.enable, or save a state_dict() "
                "without packed=True"
            )


def widen_masters(optimizer: Optimizer) -> None:
    """Turn packed masters in the state of an optimizer into FP32 masters.

    A cast of the parameters would separate half values from their remainders.
    """
    for param in [p for group in optimizer.param_groups for p in group["params"]]:
        if REMAINDER in optimizer.state.get(param, {}):
            state = _copy_state(optimizer, param)
            state["master_param"] = take_master(state, param.detach())


def _copy_state(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    """Replace the state of ``param`` by a copy, and return the copy."""
    # The old dictionary may be part of a result of ``optimizer.state_dict()``, which the user still
    # holds.
    if param not in optimizer.state:
        return {}
    optimizer.state[param] = dict(optimizer.state[param])
    return optimizer.state[param]


def settle_state(optimizer: Optimizer, fp32_values: Mapping[Tensor, Tensor]) -> None:
    """Put the state of a disabled optimizer into the form that its own step takes.

    torch's optimizers get step counts in main memory (unless fused or capturable) and half state of
    half parameters. Optimizers of ``tritonamp.optim`` get masters.

    Args:
        optimizer: optimizer after ``disable``.
        fp32_values: half parameter to the FP32 value that it was rounded from.
    """
    rule = rule_of(optimizer)
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = _copy_state(optimizer, param)
            if rule is not None and state:
                state = optimizer.state[param] = in_fp32(state, rule, param)
            step = state.get("step")
            if isinstance(step, Tensor) and not (group.get("fused") or group.get("capturable")):
                state["step"] = step.to("cpu")
            if param.dtype not in HALF_DTYPES:
                continue
            if has_half_state(optimizer):
                _round_state(state, param)
            elif keeps_fp32_state(optimizer) and state and param in fp32_values:
                state["master_param"] = fp32_values[param].to(param.device)


def _round_state(state: dict[str, Any], param: Tensor) -> None:
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.dtype is not torch.float32 or key == "step":
            continue
        # torch keeps numbers such as NAdam's ``mu_product`` as 0-d FP32 tensors, whatever the dtype
        # of the parameter
        if value.dim() or not param.dim():
            state[key] = value.to(param.dtype)
