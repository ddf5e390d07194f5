"""FP32 masters kept as the half parameter and 16 more bits: who can keep them, and their files."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._memory_order import in_memory_of, in_order_of_memory
from tritonamp.kernels._packed_masters import join_master
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels._state_formats import FORMATS, is_in_blocks
from tritonamp.kernels.cast import rounds_to
from tritonamp.policy import HALF_DTYPES, Policy
from tritonamp.step.fused_rule import FusedRule

ORDER = "strides"
"""Key of the strides (a tuple) whose order of memory the codes and remainders have."""
REMAINDER = "remainder"
"""Key, in optimizers of ``tritonamp.optim``, of the 16 bits that half parameters lack of FP32."""
HALF_DTYPE = "half_dtype"
"""Key of the dtype of the half values that the remainders belong to."""


def masters_form(optimizer: Optimizer, policy: Policy) -> str | None:
    """Return the form of an enabled optimizer's masters, among ``policy.MASTERS``.

    Args:
        optimizer: the optimizer; one of ``tritonamp.optim`` may have been built with a form.
        policy: policy of the ``Amp``.

    Raises:
        ValueError: both name a form, and the two differ; or the optimizer was built with packed
            masters, and the policy has no masters.
    """
    own: str | None = getattr(optimizer, "_masters", None)
    kind = type(optimizer).__name__
    if None not in (own, policy.masters) and own != policy.masters:
        raise ValueError(
            f"masters={policy.masters!r}: expected one form for each optimizer, got {kind}, which "
            f"was built with masters={own!r}: give it in one place"
        )
    if own == "packed" and not policy.master_weights:
        raise ValueError(
            "masters='packed': expected a level with FP32 masters of half parameters, got "
            f"{kind}, which was built with packed masters: use level='O2', or leave masters out"
        )
    return own or policy.masters


def check_masters(
    masters: str | None, state: str, optimizer: Optimizer, rule: FusedRule | None
) -> None:
    """Raise ValueError unless ``optimizer`` can keep its masters in the form ``masters``.

    Args:
        masters: one of ``policy.MASTERS``.
        state: format of the optimizer's state.
        optimizer: optimizer whose groups are checked.
        rule: fused rule of the optimizer; None: the optimizer runs its own step.
    """
    kind = type(optimizer).__name__
    if masters == "fp32" and FORMATS[state].in_blocks:
        raise ValueError(
            f"masters='fp32': expected state='fp32' or 'bf16', got state={state!r}, whose masters "
            "are packed: leave masters out, or use state='bf16'"
        )
    if masters != "packed":
        return
    if rule is None:
        raise ValueError(
            "masters='packed': expected an optimizer with a fused step, got "
            f"{kind}, which runs its own step on FP32 tensors: leave masters out, or give it to "
            "other optimizers alone, tritonamp.optim.AdamW(..., masters='packed')"
        )
    if any(is_sharded(p) for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "masters='packed': expected parameters in one piece, got sharded ones (FSDP2, "
            "DTensor), whose 16 bits have no shape to shard: leave masters out"
        )


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


@torch.no_grad()
def load_master(state: dict[str, Any], param: Tensor, fp32_values: Fp32Values) -> None:
    """Move the FP32 master in one parameter's loaded state, packed or not, into the FP32 value.

    Args:
        state: state of the parameter; the keys of a master are removed.
        param: parameter of the model, loaded before.
        fp32_values: FP32 values of the models' half tensors.
    """
    if REMAINDER not in state and "master_param" not in state:
        return
    held = fp32_values.get(param) if param in fp32_values else param
    held.copy_(take_master(state, held))
    # Packing rounds ties of bfloat16 away from 0, a step rounds them to even: the half parameter
    # follows its master, as after a step.
    if held is not param:
        param.copy_(held)
        fp32_values.mark_rounded(fp32_values.indices([param]))


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
        strides = state[ORDER] if has_codes(state) else state.pop(ORDER)
        dtype = state.pop(HALF_DTYPE, held.dtype)
        return joined(held, state.pop(REMAINDER), strides, dtype)
    master = state.pop("master_param").to(held.device, torch.float32)
    # The master may have been saved in a run of the other half dtype, so both are tried.
    fits = torch.zeros_like(held, dtype=torch.bool)
    for half in map(held.to, HALF_DTYPES):
        fits |= rounds_to(master, half) & (half == held)
    return torch.where(fits, master, held.float())


def has_codes(state: Mapping[str, Any]) -> bool:
    """Tell whether one parameter's state has moments in codes."""
    return any(isinstance(x, Tensor) and is_in_blocks(x.dtype) for x in state.values())
