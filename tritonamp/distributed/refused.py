"""Checks of ``enable`` for models with sharded parameters."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tritonamp.distributed.fsdp import assumed_policies, fsdp2_modules, gathered_params, mp_policy
from tritonamp.distributed.sharding import find_sharding, meshes
from tritonamp.kernels._shards import is_sharded
from tritonamp.policy import HALF_DTYPES, Policy


def check_spread(models: Sequence[nn.Module], policy: Policy) -> None:
    """Refuse models whose parameters are spread over ranks in a way that cannot be trained.

    Raises:
        ValueError: parameters are offloaded to the CPU, are not sharded while others are, stay
            half, or are on meshes with no common one.
    """
    named: list[tuple[str, Any]] = [named for model in models for named in model.named_parameters()]
    offloaded = next(
        (p for _, p in named if is_sharded(p) and p.device.type != p.device_mesh.device_type), None
    )
    if offloaded is not None:
        raise ValueError(
            f"model: expected parameters on {offloaded.device_mesh.device_type}, where its "
            f"forwards run, got some on {offloaded.device.type} (CPUOffloadPolicy): call "
            "fully_shard without offload_policy"
        )
    sharded = [m for model in models for m in fsdp2_modules(model)]
    gathered = {id(param) for module in sharded for param in gathered_params(module)}
    left = [name for name, p in named if sharded and id(p) not in gathered]
    if left:
        raise ValueError(
            f"model: {len(left)} parameter(s) are not sharded by FSDP2 ({', '.join(left[:3])}), "
            "others are: call fully_shard on the whole model, too, so that all gradients are "
            "reduced"
        )
    half = [name for name, p in named if p.dtype in HALF_DTYPES and p.requires_grad]
    if half and policy.half_parameters:
        raise ValueError(
            "half_parameters=True: expected FP32 masters of sharded parameters that train, got "
            f"{half[0]!r} and {len(half) - 1} more in half: call model.float() first, or drop "
            "half_parameters"
        )
    _check_meshes(meshes(models))


def _check_meshes(found: Sequence[Any]) -> None:
    all_ranks = set(found[0].mesh.flatten().tolist())
    apart = [mesh for mesh in found if not all_ranks.issuperset(mesh.mesh.flatten().tolist())]
    if apart:
        raise ValueError(
            "model: expected parameters over one mesh or parts of it, whose ranks decide together, "
            f"got {found[0]} and {apart[0]}: make both of one init_device_mesh, or enable their "
            "models one by one"
        )


def check_gathered(models: Sequence[nn.Module], kept: Iterable[nn.Module], policy: Policy) -> None:
    """Refuse policies that sharded models cannot follow; ``kept`` modules stay FP32.

    Raises:
        ValueError: the policy is O3, replays batches under tensor parallelism, or contradicts a
            ``param_dtype`` of FSDP2.
    """
    kept = list(kept)
    if policy.cast_model and not policy.master_weights:
        raise ValueError(
            "level: expected one with FP32 masters for sharded parameters (FSDP2, tensor "
            "parallelism), got O3: use O2"
        )
    sharding = find_sharding(models)
    if policy.on_nonfinite != "skip" and sharding is not None and sharding.splits_layers:
        raise ValueError(
            f"on_nonfinite: expected 'skip', got {policy.on_nonfinite!r}: under tensor parallelism "
            "no rank can run a batch again by itself, since layers wait for the other ranks"
        )
    sharded = [m for model in models for m in fsdp2_modules(model)]
    if not sharded:
        return
    assumed = assumed_policies(models, kept, policy)
    dtypes = {m: assumed.get(m, mp_policy(m)).param_dtype for m in sharded}
    wrong = sorted({str(d) for d in dtypes.values() if d in HALF_DTYPES and d is not policy.dtype})
    if wrong or (policy.cast_model and policy.dtype not in dtypes.values()):
        got = ", ".join(wrong) or "no half param_dtype"
        raise ValueError(
            f"model: expected fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype="
            f"{policy.dtype})) before enable, got {got} in its MixedPrecisionPolicy"
        )
    around = policy.dtype if policy.dtype in dtypes.values() else torch.float32
    for module in kept:
        if dtypes.get(module, around) in HALF_DTYPES:
            raise ValueError(
                f"fp32_modules: FSDP2 gathers the parameters of {type(module).__name__} in "
                f"{around}: call fully_shard on it first, with "
                "mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32)"
            )
