"""The half dtype that a model was loaded in, and its values that do not fit into float16."""

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonamp.casts.model import fp32_modules
from tritonamp.casts.model_dtypes import Castable, castable_tensors, is_quantised
from tritonamp.casts.norm_layers import is_norm
from tritonamp.casts.selection import own_policies
from tritonamp.kernels._shards import is_sharded, to_local
from tritonamp.kernels.device import takes_bfloat16, widened
from tritonamp.policy import HALF_DTYPES, Policy

logger = logging.getLogger("tritonamp")

HalfParameters = Mapping[nn.Module, Sequence[Castable]]
"""Half parameters of each model, without those of quantised modules."""

_SHOWN = 5  # parameters in a line


def half_parameters(models: Iterable[nn.Module]) -> HalfParameters:
    """Return the half parameters of models as they were loaded."""
    return {
        model: [
            stored
            for stored in castable_tensors(model)
            if stored.is_parameter and stored.tensor.dtype in HALF_DTYPES
        ]
        for model in models
    }


def loaded_dtype(half: HalfParameters, device: torch.device) -> torch.dtype | None:
    """Return the half dtype that models were loaded in; None: they have no half dtype.

    It is the most frequent dtype among trainable half parameters, else among all half parameters,
    else among the compute dtypes of quantised modules. On a device that does not compute in
    bfloat16, bfloat16 becomes float16, with a warning.
    """
    params = [s.tensor for s in itertools.chain(*half.values())]
    sizes: Counter[torch.dtype] = Counter()
    for param in [p for p in params if p.requires_grad] or params:
        sizes[param.dtype] += param.numel()
    if not sizes:
        sizes.update(_compute_dtypes(half))
    if not sizes:
        return None
    ((dtype, _),) = sizes.most_common(1)
    if dtype is torch.bfloat16 and not takes_bfloat16(device):
        logger.warning("loaded in bfloat16, which %s does not compute in: float16 is used", device)
        return torch.float16
    return dtype


def _compute_dtypes(models: Iterable[nn.Module]) -> list[torch.dtype]:
    """Return the half dtypes that quantised modules compute in, where they say one.

    Modules of bitsandbytes say one. The other modules of such a model may all be FP32.
    """
    quantised = [m for model in models for m in model.modules() if is_quantised(m)]
    said = [getattr(module, "compute_dtype", None) for module in quantised]
    return [dtype for dtype in said if dtype in HALF_DTYPES]


def check_half_dtypes(half: HalfParameters, policy: Policy) -> None:
    """Refuse several half dtypes among trainable parameters.

    Raises:
        ValueError: names one parameter of each dtype.
    """
    names: dict[torch.dtype, str] = {}
    for stored in itertools.chain(*half.values()):
        if stored.tensor.requires_grad and not policy.half_parameters:
            names.setdefault(stored.tensor.dtype, stored.name)
    if len(names) > 1:
        got = " and ".join(f"{dtype} ({name!r}, ...)" for dtype, name in names.items())
        raise ValueError(
            f"model: expected one half dtype among the parameters that train, got {got}: call "
            "model.float() or model.to(dtype) before tritonamp.enable"
        )


def check_own_memory(half: HalfParameters, policy: Policy) -> None:
    """Refuse half parameters that share memory, because each would get its own FP32 master.

    Raises:
        ValueError: names two such parameters.
    """
    found: dict[int, Castable] = {}
    for stored in itertools.chain(*half.values()):
        tensor = stored.tensor
        if not (policy.master_weights and tensor.requires_grad and to_local(tensor).numel()):
            continue
        other = found.setdefault(to_local(tensor).data_ptr(), stored)
        if other.tensor is not tensor:
            raise ValueError(
                f"model: expected parameters with memory of their own, got {other.name!r} and "
                f"{stored.name!r} in the same: tie them as one Parameter "
                "(a.weight = b.weight, not a.weight.data = b.weight.data)"
            )


class InFloat16(NamedTuple):
    """The effect of a cast to float16 on a parameter that was loaded in bfloat16."""

    name: str
    largest: float  # finite magnitude
    subnormal: int  # number of values that become subnormal
    zero: int  # number of other values that become 0


def bfloat16_in_float16(half: HalfParameters, policy: Policy) -> list[InFloat16]:
    """Measure the bfloat16 parameters that forwards under ``policy`` use in float16.

    Reads the device once.
    """
    policies = own_policies([*half], policy)
    each = zip(half.items(), policies, strict=True)
    used = [s for (model, found), own in each for s in _to_float16(model, found, own)]
    if not used:
        return []
    device = used[0].tensor.device
    wholes: Iterable[Any] = (s.tensor.detach() for s in used)
    wholes = (w.full_tensor() if is_sharded(w) else w for w in wholes)  # all ranks take part
    rows = torch.stack([_extremes_in_float16(w).to(device) for w in wholes]).tolist()
    return [
        InFloat16(s.name, largest, int(subnormal), int(zero))
        for s, (largest, subnormal, zero) in zip(used, rows, strict=True)
    ]


def _to_float16(model: nn.Module, half: Sequence[Castable], policy: Policy) -> list[Castable]:
    half_forward = policy.cast_model or policy.op_policy
    if not half_forward or policy.dtype is not torch.float16 or policy.half_parameters:
        return []
    in_bfloat16 = [s for s in half if s.tensor.dtype is torch.bfloat16]
    if not in_bfloat16:
        return []
    kept: set[Tensor] = {p for outer in fp32_modules(model, policy) for p in outer.parameters()}
    kept |= {s.tensor for s in in_bfloat16 if policy.op_policy and is_norm(s.module)}
    return [s for s in in_bfloat16 if s.tensor not in kept]


def _extremes_in_float16(x: Tensor) -> Tensor:
    """Return largest finite magnitude, number of subnormals and number of zeros, (3,).

    Only values that become subnormal, or 0, by the cast to float16 are counted.
    """
    sizes = x.float().abs()
    sizes = torch.where(sizes.isfinite(), sizes, 0)
    rounded = sizes.half()
    zero = (sizes > 0) & (rounded == 0)
    subnormal = (rounded > 0) & (sizes < torch.finfo(torch.float16).tiny)
    largest = sizes.amax() if sizes.numel() else sizes.new_zeros(())
    return torch.stack([widened(x) for x in (largest, subnormal.sum(), zero.sum())])


def check_range(found: Sequence[InFloat16]) -> None:
    """Refuse bfloat16 values beyond float16, and log how many become subnormal or 0.

    Raises:
        ValueError: names the parameter of the largest value.
    """
    beyond = [row for row in found if row.largest > torch.finfo(torch.float16).max]
    if beyond:
        worst = max(beyond, key=lambda row: row.largest)
        module = worst.name.rpartition(".")[0]
        kept = f", or keep such modules in FP32, fp32_modules=[{module!r}]" if module else ""
        raise ValueError(
            "model: expected bfloat16 parameters up to 65504, where float16 ends, got "
            f"{worst.largest:g} in {worst.name!r}{_more(len(beyond) - 1)}: use "
            f"dtype=torch.bfloat16{kept}"
        )
    if small := describe_small(found):
        logger.warning("%s", small)


def describe_small(found: Sequence[InFloat16]) -> str:
    """Return a line that counts values which are subnormal or 0 in float16; "" for none."""
    small = [row for row in found if row.subnormal or row.zero]
    if not small:
        return ""
    listed = ", ".join(f"{row.name} {row.subnormal} and {row.zero}" for row in small[:_SHOWN])
    return (
        f"loaded in bfloat16 for float16, in which {sum(row.subnormal for row in small)} values "
        f"are subnormal and {sum(row.zero for row in small)} are 0: "
        f"{listed}{_more(len(small) - _SHOWN)}"
    )


def _more(number: int) -> str:
    return f" and {number} more" if number > 0 else ""
