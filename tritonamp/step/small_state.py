"""Optimizer state in fewer bytes: from FP32 to each of ``policy.STATES``, and back."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.kernels._device_tables import memory_strides
from tritonamp.kernels._optimizers import OPTIMIZERS, in_words, keeping
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels._small_state import (
    BLOCK,
    SIGNED,
    UNSIGNED,
    codes_size,
    decode,
    encode,
    in_memory_of,
    in_order_of_memory,
    join_master,
    padded,
)
from tritonamp.kernels.cast import rounds_to
from tritonamp.policy import HALF_DTYPES, STATES
from tritonamp.step.fused_rule import FusedRule

PACKED = "moments"
"""Key of the moments of state "8bit", which are one uint8 tensor."""
ORDER = "strides"
"""Key of the strides (a tuple) whose order of memory the codes and remainders have."""
REMAINDER = "remainder"
"""Key, in optimizers of ``tritonamp.optim``, of the 16 bits that half parameters lack of FP32."""
HALF_DTYPE = "half_dtype"
"""Key of the dtype of the half values that the remainders belong to."""
IN_THE_FORMAT = frozenset({*HALF_DTYPES, torch.float32})
"""Dtypes of parameters whose state has the chosen format; state of others has their own dtype."""
_FORMATS = {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED}  # moments that "8bit" knows, in order


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
        small = keeping(*STATES)
        raise ValueError(
            f"state={state!r}: expected an optimizer whose step can keep such state, got a {kind}, "
            f"which can keep {', '.join(map(repr, states))}: tritonamp.optim.{in_words(small)}, "
            f"and torch's {in_words([name for name in small if OPTIMIZERS[name].in_torch])}, keep "
            f'"fp32", "bf16" and "8bit"; {in_words(keeping(*STATES[:2]))} "fp32" and "bf16"'
        )
    if state != "8bit":
        return
    for group in optimizer.param_groups:
        if group.get("amsgrad"):
            raise ValueError(
                f"state='8bit': expected amsgrad=False, got a group of {kind} with amsgrad=True: "
                "use state='bf16'"
            )
        if any(map(is_sharded, group["params"])):
            raise ValueError(
                "state='8bit': expected parameters in one piece, got sharded ones (FSDP2, "
                "DTensor), whose codes have no shape to shard: use state='bf16'"
            )


def packed_moments(moments: Iterable[Tensor | None], param: Tensor) -> Tensor:
    """Return FP32 moments as the codes of state "8bit", uint8 of shape (moments_size(...),).

    Codes hold some values exactly; other values lose their last bits.

    Args:
        moments: first and second moment of ``param``, or the first only; None: zeros.
        param: parameter whose order of memory the codes have.
    """
    given = list(moments)
    n, size = param.numel(), padded(param.numel())
    memory = torch.zeros(len(given) * codes_size(n), dtype=torch.uint8, device=param.device)
    parts = split_moments(memory, size, len(given))
    for moment, kind, targets in zip(given, _FORMATS.values(), parts, strict=False):
        # blocks of codes are whole: the last one is filled up by zeros, which change no exponent
        values = torch.zeros(size, device=param.device)
        if moment is not None:
            values[:n] = in_order_of_memory(moment.float(), like=param)
        for target, value in zip(targets, encode(values, None, kind), strict=True):
            target.copy_(value)
    return memory


def unpacked(memory: Tensor, param: Tensor, strides: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the moments of ``packed_moments`` by key, FP32 with the parameter's shape.

    Args:
        memory: codes of the moments.
        param: the parameter.
        strides: ``memory_strides`` of ``param`` when the codes were made.
    """
    n, size = param.numel(), padded(param.numel())
    # a parameter may have no elements, and codes of size 0
    count = memory.numel() // max(codes_size(n), 1)
    parts = split_moments(memory, size, count)
    return {
        key: decode(*part, kind)[:n].as_strided(param.shape, strides)
        for (key, kind), part in zip(_FORMATS.items(), parts, strict=False)
    }


@torch.no_grad()
def joined(held: Tensor, remainder: Tensor, strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return FP32 masters, joined from half values and remainders; other values stay as they are.

    Args:
        held: half values of ``dtype``, in any floating dtype.
        remainder: the 16 bits that the half values lack, int16 of shape (padded(n),) or longer.
        strides: ``memory_strides`` of the half values when the remainders were made.
        dtype: dtype of the half values.
    """
    half = held.to(dtype)
    lower = remainder.to(held.device)[: held.numel()].as_strided(held.shape, strides)
    flat = join_master(in_order_of_memory(half), in_order_of_memory(lower, like=half))
    # Values that are no half values were written since, by a checkpoint or the user. Remainders of
    # other values must not be added to them.
    return torch.where(half.float() == held, in_memory_of(half, flat), held.float())


def has_master(state: Mapping[str, Any]) -> bool:
    """Tell whether one parameter's loaded state has an FP32 master, packed or not."""
    return REMAINDER in state or "master_param" in state


@torch.no_grad()
def take_master(state: dict[str, Any], held: Tensor) -> Tensor:
    """Take the FP32 master out of one parameter's loaded state, and return it.

    Args:
        state: a state with a master; the keys of the master are removed.
        held: the parameter, or its FP32 value, loaded before. Its values are returned where the
            master does not round to them.
    """
    if REMAINDER in state:
        # moments in codes still need the strides
        strides = state[ORDER] if PACKED in state else state.pop(ORDER)
        dtype = state.pop(HALF_DTYPE, held.dtype)
        return joined(held, state.pop(REMAINDER), strides, dtype)
    master = state.pop("master_param").to(held.device, torch.float32)
    # The master may have been saved in a run of the other half dtype, so both are tried.
    fits = torch.zeros_like(held, dtype=torch.bool)
    for half in map(held.to, HALF_DTYPES):
        fits |= rounds_to(master, half) & (half == held)
    return torch.where(fits, master, held.float())


def packing_problems(
    state: Mapping[str, Any], moments: int, param: Tensor, enabled: bool
) -> Iterator[str]:
    """Yield why the codes in a state of "8bit" cannot be those of ``param``.

    Args:
        state: state of one parameter, with the key ``PACKED``.
        moments: number of moments that the optimizer has.
        param: the parameter.
        enabled: whether the optimizer is enabled. Half parameters have FP32 values then, which hold
            values of either half dtype.
    """
    n, expected = param.numel(), moments * codes_size(param.numel())
    for key, dtype, size in (PACKED, torch.uint8, expected), (REMAINDER, torch.int16, padded(n)):
        codes = state.get(key)
        if codes is not None and (codes.dtype is not dtype or codes.numel() != size):
            yield (
                f"{key} of {codes.numel()} {codes.dtype}, where {moments} moments of {n} elements, "
                f"in blocks of {BLOCK}, take {size} {dtype}"
            )
    half_dtype = state.get(HALF_DTYPE, param.dtype)
    if REMAINDER in state and half_dtype not in HALF_DTYPES:
        yield f"{REMAINDER} without {HALF_DTYPE}, the dtype of the half values that it belongs to"
    elif (
        REMAINDER in state
        and not enabled
        and param.dtype in HALF_DTYPES
        and param.dtype is not half_dtype
    ):
        yield (
            f"{REMAINDER} of {half_dtype} values for a parameter of {param.dtype} (load it after "
            "tritonamp.enable, or a state_dict() without packed=True)"
        )


def in_fp32(state: Mapping[str, Any], rule: FusedRule, param: Tensor) -> dict[str, Any]:
    """Return one parameter's state with moments in FP32, by the keys of torch's optimizers."""
    wide = dict(state)
    strides = wide.pop(ORDER, None) or memory_strides(param)
    if PACKED in wide:
        wide |= unpacked(wide.pop(PACKED), param, strides)
    if REMAINDER in wide:
        remainder, dtype = wide.pop(REMAINDER), wide.pop(HALF_DTYPE, param.dtype)
        wide["master_param"] = joined(param, remainder, strides, dtype)
    for key in rule.state_keys.values():
        moment = wide.get(key)
        if isinstance(moment, Tensor) and moment.dtype is torch.bfloat16:
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
            f"state={wanted!r}: expected one format for each optimizer, got a "
            f"{type(optimizer).__name__} that was built with state={own!r}: give it in one place"
        )
    return own if wanted == STATES[0] else wanted
