"""Models under FSDP2 (``fully_shard``): what can be enabled of them, and how their parameters are
spread.

The sharded parameters are FP32 and the masters; FSDP2's MixedPrecisionPolicy makes the half copies
as it gathers them.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.casts.model import fp32_modules
from tritonamp.policy import HALF_DTYPES, Policy


class Sharding(NamedTuple):
    """How each parameter is spread: over the ranks of ``group``, which hold ``copies`` of it in
    all.
    """

    group: Any
    copies: int


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which each rank has a part."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of it; the tensor itself where it is not sharded."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def whole(tensor: Any) -> Tensor:
    """The tensor of all ranks' parts; the tensor itself where it is not sharded. All ranks take
    part.
    """
    result: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return result


def find_sharding(models: Sequence[nn.Module]) -> Sharding | None:
    """How the parameters are spread; None: they are not."""
    sharded: Any = next((p for model in models for p in model.parameters() if is_sharded(p)), None)
    if sharded is None:
        return None
    mesh = sharded.device_mesh
    copies = 1
    for size, placement in zip(mesh.shape, sharded.placements, strict=True):
        copies *= size if placement.is_replicate() else 1
    return Sharding((mesh if mesh.ndim == 1 else mesh._flatten()).get_group(), copies)


def fsdp2_modules(model: nn.Module) -> list[Any]:
    """Those that ``fully_shard`` was called on."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # nobody has used it if it is not there
    return [] if fsdp is None else [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]


def check_sharding(
    models: Sequence[nn.Module], policy: Policy, optimizers: Sequence[Optimizer] = ()
) -> None:
    """Refuses what cannot work under FSDP, or with an optimizer that divides its parameters among
    the ranks.

    Raises:
        ValueError: FSDP1, parameters that are spread differently or kept in main memory, a policy
            that FSDP2 does not carry out, or a ZeroRedundancyOptimizer of half parameters.
    """
    if policy.cast_model and policy.master_weights:
        _check_optimizers(optimizers)
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    if any(
        isinstance(m, fsdp.FullyShardedDataParallel) for model in models for m in model.modules()
    ):
        raise ValueError(
            "model: FullyShardedDataParallel (FSDP1) flattens the parameters, which leaves nothing to keep masters of: "
            "use FSDP2, torch.distributed.fsdp.fully_shard(model, mp_policy=MixedPrecisionPolicy(...))"
        )
    params: list[Any] = [p for model in models for p in model.parameters()]
    if any(map(is_sharded, params)):
        _check_params(models)
        kept = [m for model in models for m in fp32_modules(model, policy)]
        _check_policy([m for model in models for m in fsdp2_modules(model)], kept, policy)


def _check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    zero: Any = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", ())
    if any(isinstance(optimizer, zero) for optimizer in optimizers):
        raise ValueError(
            "optimizer: ZeroRedundancyOptimizer has divided the parameters among the ranks already, and would go on "
            "stepping on the half ones: allowed are O0 and O1; O2 shards its masters under FSDP2, fully_shard(model)"
        )


def _check_params(models: Sequence[nn.Module]) -> None:
    named: list[tuple[str, Any]] = [named for model in models for named in model.named_parameters()]
    offloaded = next(
        (p for _, p in named if is_sharded(p) and p.device.type != p.device_mesh.device_type), None
    )
    if offloaded is not None:
        raise ValueError(
            f"model: its parameters are on {offloaded.device.type} (CPUOffloadPolicy), its forwards run on "
            f"{offloaded.device_mesh.device_type}: allowed is one device, call fully_shard without offload_policy"
        )
    plain = [name for name, p in named if not is_sharded(p)]
    if plain:
        raise ValueError(
            f"model: {len(plain)} parameter(s) are not sharded ({', '.join(plain[:3])}), others are: call "
            "fully_shard on the whole model, too, so that all gradients are reduced"
        )
    if (
        len(
            {
                (p.device_mesh, tuple(placement.is_replicate() for placement in p.placements))
                for _, p in named
            }
        )
        > 1
    ):
        spread = sorted({f"{p.placements} over {p.device_mesh}" for _, p in named})
        raise ValueError(
            f"model: its parameters are spread in several ways ({'; '.join(spread)}): allowed are one mesh, and "
            "dimensions of it that either shard all parameters or copy them all"
        )


def _check_policy(sharded: Sequence[Any], kept: Sequence[nn.Module], policy: Policy) -> None:
    dtypes = {m: m._get_fsdp_state()._mp_policy.param_dtype for m in sharded}
    wrong = sorted({str(d) for d in dtypes.values() if d in HALF_DTYPES and d is not policy.dtype})
    needed = f"fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype={policy.dtype}))"
    if policy.cast_model and not policy.master_weights:
        raise ValueError(
            "level: under FSDP2 the sharded FP32 parameters are the masters, so O3 is not there: use O2"
        )
    if wrong or (policy.cast_model and policy.dtype not in dtypes.values()):
        got = ", ".join(wrong) or "no half param_dtype"
        raise ValueError(
            f"model: got {got} in its MixedPrecisionPolicy, this level needs {needed} before enable"
        )
    if policy.on_nonfinite != "skip":
        raise ValueError(
            f"on_nonfinite={policy.on_nonfinite!r}: running a batch again takes all ranks of an FSDP2 model; allowed "
            "is 'skip'"
        )
    around = policy.dtype if policy.dtype in dtypes.values() else torch.float32
    for module in kept:
        if dtypes.get(module, around) in HALF_DTYPES:
            raise ValueError(
                f"fp32_modules: FSDP2 gathers the parameters of {type(module).__name__} in {around}: call fully_shard "
                "on it first, with mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)"
            )
