"""Loading the state of an optimizer: what torch would round, what apex counts by group, and what
does not fit.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.policy import HALF_DTYPES


def load_state(
    optimizer: Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    adam: bool = True,
) -> None:
    """``load(state_dict)``, which is the optimizer's own; FP32 state of half parameters stays FP32.

    Args:
        adam: an Adam or AdamW, which also takes a state of apex's FusedAdam.

    Raises:
        ValueError: it is no state of such an optimizer over such parameters; nothing was changed
            then.
    """
    if not isinstance(state_dict, Mapping):
        check_state(optimizer, state_dict, adam)
    taken: list[dict[str, Any]] = []  # what the user's own hooks make of it

    def take(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        check_state(optimizer, given, adam)
        taken.append(_with_step_counts(given) if adam else given)
        return taken[0]

    handle = optimizer.register_load_state_dict_pre_hook(take)
    try:
        load(state_dict)
    finally:
        handle.remove()
    if taken:  # else the optimizer has a way of its own
        keep_fp32_state(optimizer, taken[0])


def check_state(optimizer: Optimizer, state_dict: Any, adam: bool) -> None:
    """Raises ValueError for a state of something else, with what differs."""
    where = f"{type(optimizer).__name__}.load_state_dict: "
    keys = (
        sorted(map(str, state_dict))
        if isinstance(state_dict, Mapping)
        else [type(state_dict).__name__]
    )
    if not {"state", "param_groups"} <= set(keys):
        raise ValueError(
            f"{where}got {keys[:20]}; allowed are the keys of optimizer.state_dict(): state, param_groups"
        )
    groups, numbers = (
        state_dict["param_groups"],
        [len(group["params"]) for group in optimizer.param_groups],
    )
    saved = [len(group["params"]) for group in groups]
    if saved != numbers:
        raise ValueError(
            f"{where}got groups of {saved} parameters, this optimizer has groups of {numbers}"
        )
    if not adam:
        return
    missing = sorted(
        key
        for key in ("lr", "betas", "eps", "weight_decay")
        if any(key not in group for group in groups)
    )
    corrected = (
        all(group.get("bias_correction", True) for group in groups)
        or "bias_correction" in optimizer.defaults
    )
    problems = [f"the parameter groups have no {', '.join(missing)}"] * bool(missing)
    problems += ["bias_correction=False, which is FusedAdam's"] * (not corrected)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = state_dict["state"]
    numbered = [
        (number, _counts_steps(group, states)) for group in groups for number in group["params"]
    ]
    for (number, stepped), param in zip(numbered, params, strict=True):
        problems += _problems(states.get(number, {}), stepped, param, f"state {number}: ")
    if problems:
        more = f" and {len(problems) - 5} more" * (len(problems) > 5)
        raise ValueError(
            f"{where}got {'; '.join(problems[:5])}{more}; allowed is the state of an Adam or AdamW over parameters of "
            "the same shapes in the same order"
        )


def _counts_steps(group: Mapping[str, Any], states: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether the steps are counted by group, as apex's FusedAdam does."""
    return "step" in group and not any(
        "step" in states.get(number, {}) for number in group["params"]
    )


def _problems(state: Mapping[str, Any], stepped: bool, param: Tensor, where: str) -> Iterator[str]:
    names = {"exp_avg", "exp_avg_sq", *(() if stepped else ("step",))}
    if state and not names <= state.keys():
        yield f"{where}{sorted(state)} without {sorted(names - state.keys())}"
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param"):
        if name in state and state[name].shape != param.shape:
            yield f"{where}{name} of shape {tuple(state[name].shape)} for a parameter of {tuple(param.shape)}"


def _with_step_counts(state_dict: dict[str, Any]) -> dict[str, Any]:
    """``state_dict`` with the step counts of apex's FusedAdam, which has one for each group, at the
    parameters.
    """
    state, groups = dict(state_dict["state"]), []
    for group in state_dict["param_groups"]:
        if _counts_steps(group, state_dict["state"]):
            step = torch.as_tensor(group["step"], dtype=torch.float32).reshape(())
            state |= {
                number: {**state[number], "step": step.clone()}
                for number in group["params"]
                if number in state
            }
            group = {key: value for key, value in group.items() if key != "step"}
        groups.append(group)
    return {**state_dict, "state": state, "param_groups": groups}


def keep_fp32_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Puts back what ``Optimizer.load_state_dict`` has just cast to the dtype of half parameters."""
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        for name, value in state_dict["state"].get(number, {}).items():
            if (
                isinstance(value, Tensor)
                and value.dtype is torch.float32
                and param.dtype in HALF_DTYPES
            ):
                optimizer.state[param][name] = value.to(param.device, copy=True)


def settle_state(optimizer: Optimizer) -> None:
    """Puts the step counts of an Adam back where torch keeps them: in main memory, unless fused or
    capturable.
    """
    for group in optimizer.param_groups:
        if not group.get("fused") and not group.get("capturable"):
            for param in group["params"]:
                step = optimizer.state.get(param, {}).get("step")
                if isinstance(step, Tensor):
                    optimizer.state[param]["step"] = step.to("cpu")
