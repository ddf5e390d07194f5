"""FSDP2 (``fully_shard``): the dtypes in which parameters are gathered and gradients reduced.

The sharded parameters are FP32, and they are the masters. FSDP2's MixedPrecisionPolicy makes half
copies when it gathers them.
"""

import contextlib
import dataclasses
import logging
import sys
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tritonamp.policy import HALF_DTYPES, Policy

logger = logging.getLogger("tritonamp")


def fsdp2_modules(model: nn.Module) -> list[Any]:
    """Return the modules inside ``model`` that ``fully_shard`` was called on."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # None: no model uses it
    return [] if fsdp is None else [m for m in model.modules() if isinstance(m, fsdp.FSDPModule)]


# private from here on (torch 2.11 to 2.15): nothing public returns a MixedPrecisionPolicy, or gives
# another one to a module, or has FSDP2 look again at dtypes after the first forward


def mp_policy(module: Any) -> Any:
    """Return the MixedPrecisionPolicy of a module that ``fully_shard`` was called on."""
    return module._get_fsdp_state()._mp_policy


def groups_of(module: Any) -> Sequence[Any]:
    """Return the groups of parameters that FSDP2 gathers together for a module."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.12 and later
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def gathered_params(module: Any) -> list[nn.Parameter]:
    """Return the sharded parameters that FSDP2 gathers for a module."""
    return [param.sharded_param for group in groups_of(module) for param in group.fsdp_params]


def holds_layers_apart(module: Any) -> bool:
    """Return whether gathered parameters are still DTensors, because of tensor parallelism."""
    return any(param.is_dtensor for group in groups_of(module) for param in group.fsdp_params)


def assumed_policies(
    models: Iterable[nn.Module], kept: Collection[nn.Module], policy: Policy
) -> dict[Any, Any]:
    """Return the new MixedPrecisionPolicy of each module that needs one.

    A module without a ``param_dtype`` gathers in half if it has trainable half parameters. It also
    does if ``policy`` casts the model and no module has a half ``param_dtype``.

    A module with a half ``param_dtype`` no longer casts its inputs under an op policy, because
    each operation casts its own inputs.

    Args:
        models: the models.
        kept: modules that stay FP32, so they do not gather in half.
        policy: the policy of ``enable``.
    """
    if not (policy.cast_model or policy.op_policy):
        return {}
    sharded = [m for model in models for m in fsdp2_modules(model)]
    all_half = policy.cast_model and not any(
        mp_policy(m).param_dtype in HALF_DTYPES for m in sharded
    )
    # as gradients of FP32 parameters are under DDP, where the model is not cast
    reduce_dtype = policy.grad_dtype if policy.cast_model else torch.float32
    found = {}
    for module in sharded:
        given = mp_policy(module)
        trained = [p for p in gathered_params(module) if p.requires_grad]
        gathers_half = any(all_half or p.dtype in HALF_DTYPES for p in trained)
        if given.param_dtype is None and module not in kept and gathers_half:
            found[module] = dataclasses.replace(
                given,
                param_dtype=policy.dtype,
                reduce_dtype=reduce_dtype,
                cast_forward_inputs=False,  # the enabled forward casts its inputs
            )
        elif policy.op_policy and given.param_dtype in HALF_DTYPES and given.cast_forward_inputs:
            found[module] = dataclasses.replace(given, cast_forward_inputs=False)
    return found


class ShardedModules:
    """Changes policies of the modules that ``fully_shard`` was called on, and restores them.

    Args:
        models: the models that contain these modules.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._models = [weakref.ref(model) for model in models]
        self._given: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        # of those that are gathered in FP32 for a while: the policies before
        self._narrow: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def found(self) -> list[Any]:
        """Return the sharded modules, outer ones first, in the same order on all ranks."""
        models = (ref() for ref in self._models)
        return list(
            dict.fromkeys(m for model in models if model is not None for m in fsdp2_modules(model))
        )

    def assume(self, policies: Mapping[Any, Any]) -> None:
        """Set the result of ``assumed_policies`` until ``give_back``."""
        without = [m for m in policies if mp_policy(m).param_dtype is None]
        for module, policy in policies.items():
            self._given[module] = mp_policy(module)
            _set_mp_policy(module, policy)
        if without:
            assumed = policies[without[0]]
            logger.warning(
                "fully_shard was given no param_dtype for %d module(s) (%s): as if called with "
                "mp_policy=MixedPrecisionPolicy(param_dtype=%s, reduce_dtype=%s)",
                len(without),
                ", ".join(dict.fromkeys(type(m).__name__ for m in without)),
                assumed.param_dtype,
                assumed.reduce_dtype,
            )

    def gather_in_fp32(self, modules: Iterable[nn.Module]) -> None:
        """Make sharded modules inside of ``modules`` gather in FP32, and restore all others."""
        wide = {inner for module in modules for inner in fsdp2_modules(module)}
        for module in [m for m in self._narrow if m not in wide]:
            _set_mp_policy(module, self._narrow.pop(module))
        for module in wide - set(self._narrow):
            policy = mp_policy(module)
            if policy.param_dtype is not torch.float32:  # several modules may share one
                self._narrow[module] = policy
                _set_mp_policy(module, dataclasses.replace(policy, param_dtype=torch.float32))

    def give_back(self) -> None:
        """Restore the policies that the modules were sharded with."""
        self.gather_in_fp32(())
        for module, policy in self._given.items():
            _set_mp_policy(module, policy)
        self._given.clear()

    def refresh(self) -> None:
        """Make FSDP2 notice changed dtypes of shards."""
        for module in self.found():
            module.reshard()
            _refresh(module)


def _set_mp_policy(module: Any, policy: Any) -> None:
    module.reshard()
    module._get_fsdp_state()._mp_policy = policy
    for group in groups_of(module):
        group.mp_policy = policy
    _refresh(module)


def _refresh(module: Any) -> None:
    """Repeat the setup of FSDP2's first forward, with the present dtypes of the shards."""
    for group in groups_of(module):
        for param in group.fsdp_params:
            param.reset_sharded_param()
        if module._get_fsdp_state()._is_root is None:  # there was no forward yet
            continue
        # of half and FP32 parameters that train together it wants to know at the next forward
        with contextlib.suppress(AssertionError):
            group._init_mp_dtypes()
        for param in group.fsdp_params:
            gathered = getattr(param, "_unsharded_param", None)
            if gathered is not None and gathered.dtype is not (
                param.param_dtype or param.orig_dtype
            ):
                param.all_gather_outputs.clear()
                del param._unsharded_param
