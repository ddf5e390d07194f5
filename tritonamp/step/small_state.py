"""Optimizer state in fewer bytes: from FP32 to each of ``policy.STATES``, and back."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._memory_order import BLOCK, memory_strides
from tritonamp.kernels._optimizers import in_words, keeping
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels._state_formats import FORMATS, STATE_DTYPES, format_of, is_in_blocks
from tritonamp.policy import HALF_DTYPES, STATES
from tritonamp.step.fused_rule import FusedRule
from tritonamp.step.packed_masters import (
    HALF_DTYPE,
    ORDER,
    REMAINDER,
    has_codes,
    joined,
    order_problems,
)


def check_state(state: str, optimizer: Optimizer, rule: FusedRule | None) -> None:
    """Raise ValueError unless ``optimizer`` can keep its state in the format ``state``.

    Args:
        state: one of ``STATES``.
        optimizer: optimizer whose groups are checked.
        rule: fused rule of the optimizer; None: the optimizer runs its own step.
    """
    kind = type(optimizer).__name__
    states = ("fp32",) if rule is None else rule.states
    if state not in states:
        raise ValueError(
            f"state={state!r}: expected an optimizer whose step can keep such state, "
            f"{in_words(keeping(state), 'or')}, got {kind}, which can keep "
            f"{', '.join(map(repr, states))}: leave state out, or give it to other optimizers "
            f"alone, tritonamp.optim.AdamW(..., state={state!r})"
        )
    if rule is not None:
        for group in optimizer.param_groups:
            rule.check_format(state, group)
    if FORMATS[state].in_blocks and any(
        is_sharded(p) for group in optimizer.param_groups for p in group["params"]
    ):
        raise ValueError(
            f"state={state!r}: expected parameters in one piece, got sharded ones (FSDP2, "
            "DTensor), whose codes have no shape to shard: use state='bf16'"
        )


def moment_dtype(state: str, param: Tensor) -> torch.dtype:
    """Return the dtype of a moment of ``param`` in the format ``state``.

    State of parameters that are neither half nor FP32 (float64, complex) has their own dtype, as in
    torch.
    """
    if param.dtype not in (*HALF_DTYPES, torch.float32):
        return param.dtype
    return FORMATS[state].dtype


def coded(moment: Tensor | None, param: Tensor, kind: int, state: str) -> Tensor:
    """Return an FP32 moment in codes.

    Codes hold some values exactly; other values lose their last bits.

    Args:
        moment: moment of ``param``; None: zeros.
        param: parameter whose order of memory the codes have.
        kind: kind of the moment's values, SIGNED or UNSIGNED.
        state: name of a format in blocks.
    """
    values = torch.zeros_like(param, dtype=torch.float32) if moment is None else moment.float()
    return FORMATS[state].write(values, param, kind, None)


def decoded(codes: Tensor, param: Tensor, kind: int, strides: tuple[int, ...]) -> Tensor:
    """Return a moment from the codes that ``coded`` makes, FP32 with the parameter's shape.

    Args:
        codes: codes of the moment.
        param: the parameter.
        kind: kind of the moment's values.
        strides: ``memory_strides`` of ``param`` when the codes were made.
    """
    like = torch.empty_strided(param.shape, strides, device="meta")
    return format_of(codes.dtype, True).read(codes, like, kind, torch.float32)


def in_codes(moment: Tensor, param: Tensor) -> bool:
    """Tell whether a moment of ``param`` is in codes, or was before torch has cast it."""
    # no parameter has the shape of its codes
    sizes = _code_sizes(param).values()
    cast = moment.shape != param.shape and moment.ndim == 1 and len(moment) in sizes
    return is_in_blocks(moment.dtype) or cast


def _code_sizes(param: Tensor) -> dict[torch.dtype, int]:
    """Return the length of a moment of ``param`` in codes, by the dtype of the codes."""
    return {f.dtype: f.size(param.numel()) for f in FORMATS.values() if f.in_blocks}


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


def in_fp32(state: Mapping[str, Any], rule: FusedRule, param: Tensor) -> dict[str, Any]:
    """Return one parameter's state with moments in FP32, by the keys of torch's optimizers."""
    wide = dict(state)
    strides = wide.pop(ORDER, None) or memory_strides(param)
    if REMAINDER in wide:
        remainder, dtype = wide.pop(REMAINDER), wide.pop(HALF_DTYPE, param.dtype)
        wide["master_param"] = joined(param, remainder, strides, dtype)
    for key in rule.state_keys.values():
        moment = wide.get(key)
        if isinstance(moment, Tensor) and is_in_blocks(moment.dtype):
            wide[key] = decoded(moment, param, rule.value_kinds[key], strides)
        elif isinstance(moment, Tensor) and moment.dtype in STATE_DTYPES:
            wide[key] = moment.float()
    return wide


def fp32_state_dict(
    state_dict: dict[str, Any], optimizer: Optimizer, rule: FusedRule | None
) -> dict[str, Any]:
    """Return a result of ``optimizer.state_dict()`` with FP32 moments, which every format loads."""
    # an optimizer around another one may have a format of its own
    if rule is None or not {"state", "param_groups"} <= state_dict.keys():
        return state_dict
    state = dict(state_dict["state"])
    for number, param in numbered_params(optimizer, state_dict):
        if number in state:
            state[number] = in_fp32(state[number], rule, param)
    return {**state_dict, "state": state}


def numbered_params(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> Iterator[tuple[int, Tensor]]:
    """Yield each parameter of an optimizer with its number in a state dict of the same groups."""
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return zip(numbers, params, strict=True)


def state_format(optimizer: Optimizer, wanted: str) -> str:
    """Return the format of an optimizer's state.

    Args:
        optimizer: the optimizer; one of ``tritonamp.optim`` may have been built with a format.
        wanted: format of the policy.

    Raises:
        ValueError: both name a format, and the two differ.
    """
    own: str = getattr(optimizer, "_state_format", STATES[0])
    if STATES[0] not in (own, wanted) and own != wanted:
        raise ValueError(
            f"state={wanted!r}: expected one format for each optimizer, got "
            f"{type(optimizer).__name__}, which was built with state={own!r}: give it in one place"
        )
    return own if wanted == STATES[0] else wanted
