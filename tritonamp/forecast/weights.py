"""Findings in parameters and buffers: values, formats, averaged copies."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from tritonamp.casts.loaded import bfloat16_in_float16, describe_small, half_parameters
from tritonamp.casts.model import fp32_modules
from tritonamp.casts.model_dtypes import wanted_dtypes
from tritonamp.casts.norm_layers import is_norm
from tritonamp.forecast.findings import Finding
from tritonamp.forecast.unrounded import magnitudes, rounds_to_inf, stored, vanishing
from tritonamp.names import short
from tritonamp.policy import HALF_DTYPES, Policy


def parameters(model: nn.Module, policy: Policy) -> Iterator[Finding]:
    """Yield parameters that are stored or used in half and that the half format cannot hold."""
    dtype, top = policy.dtype, torch.finfo(policy.dtype).max
    fp32 = {id(p) for p in fp32_parameters(model, policy)}
    for name, param in model.named_parameters():
        values = stored(param) if param.is_floating_point() else None
        if values is None or not values.numel():
            continue
        owner, sizes = name.rpartition(".")[0], magnitudes(values.float())
        if not bool(values.isfinite().all()):
            why, advice = "it holds inf or NaN already", "load or initialise it again"
            yield Finding("non-finite", name, why, advice, True, 1e30)
        elif id(param) in fp32 or not (policy.cast_model or policy.op_policy):
            continue
        elif sizes.overflows(dtype):
            ratio = sizes.amax / top
            why = (
                f"its largest value is {sizes.amax:.3g}, {ratio:.3g} times the largest "
                f"{short(dtype)}"
            )
            yield Finding("overflow", name, why, "", weight=ratio, modules=(owner,))
        elif sizes.amax and vanishing(sizes.exponents, dtype) > 0.99:
            why = f"its largest value is {sizes.amax:.2g}, which is zero in {short(dtype)}"
            yield Finding("vanishing", name, why, "", modules=(owner,))


def fp32_parameters(model: nn.Module, policy: Policy) -> Iterator[Tensor]:
    """Yield the parameters that stay FP32, or are used in FP32, under a policy."""
    kept = fp32_modules(model, policy)
    norms = [m for m in model.modules() if is_norm(m)] if policy.op_policy else []
    for module in (*kept, *norms):
        yield from module.parameters()


def loaded_half(model: nn.Module, policy: Policy) -> Iterator[Finding]:
    """Yield findings about parameters that are half before ``enable``."""
    half = half_parameters([model])
    found = bfloat16_in_float16(half, policy)
    if small := describe_small(found):
        worst = max(found, key=lambda row: row.zero + row.subnormal).name
        advice = "dtype=torch.bfloat16 keeps them"
        if any(p.requires_grad for p in model.parameters()):
            advice += "; trainable parameters have FP32 values, which keep them at any dtype"
        reason = "float16 was asked for"
        yield Finding("bfloat16", worst, small, advice, problem=False, untried=reason)
    wanted = wanted_dtypes(model, policy)
    norms = [
        s.name
        for s in half[model]
        if is_norm(s.module) and not policy.op_policy and s.tensor not in wanted
    ]
    if norms:
        some = ", ".join(norms[:3]) + (", ..." if len(norms) > 3 else "")
        why = f"{len(norms)} parameters of normalisation layers are half ({some})"
        yield Finding(
            "half norm", norms[0].rpartition(".")[0], why, "keep them in FP32, as level O2 does"
        )


def averages(modules: dict[str, nn.Module], policy: Policy) -> Iterator[Finding]:
    """Yield averaged copies: each AveragedModel, and frozen modules that equal a trained one."""
    found: list[str] = []
    for path, module in modules.items():
        averaged = isinstance(module, torch.optim.swa_utils.AveragedModel)
        half = policy.cast_model or any(p.dtype in HALF_DTYPES for p in module.parameters())
        inside = any(path.startswith(f"{other}.") for other in found)
        if inside or not half:
            continue
        if averaged or any(_is_copy(module, other) for other in modules.values()):
            found.append(path)
            kind = "a copy that is averaged" if averaged else "a frozen copy of a trained module"
            why = f"{kind}: if it follows in small steps, these round away in half"
            advice = (
                f'keep it in FP32 (fp32_modules=["{path}"]), and update it from amp.master_params()'
            )
            cures = (path,) if averaged and path else ()
            yield Finding("average", path, why, advice, averaged, modules=cures)


def _is_copy(module: nn.Module, original: nn.Module) -> bool:
    if type(module) is not type(original) or module is original:
        return False
    copies, originals = list(module.parameters()), list(original.parameters())
    if not copies or len(copies) != len(originals) or any(p.requires_grad for p in copies):
        return False
    pairs = list(zip(copies, originals, strict=True))
    return any(p.requires_grad for p in originals) and all(
        a is not b and a.shape == b.shape and torch.equal(stored(a), stored(b)) for a, b in pairs
    )


def buffers(modules: dict[str, nn.Module], policy: Policy) -> Iterator[Finding]:
    """Yield buffers with values that are inf in the half format."""
    top = rounds_to_inf(policy.dtype)
    for path, module in modules.items():
        for name, buffer in module.named_buffers(recurse=False):
            values = stored(buffer) if buffer.is_floating_point() else None
            if is_norm(module) or values is None or not values.numel():
                continue
            amax = magnitudes(values.float()).amax
            if amax >= top:
                why = f"the buffer holds {amax:.3g}, which is inf in {short(policy.dtype)}"
                half = policy.cast_model and not policy.op_policy
                if not half:
                    why += "; at this level it stays FP32, but a cast would reach it"
                advice = 'use float("-inf") or torch.finfo(x.dtype).min for masks'
                yield Finding("constant", f"{path}.{name}".lstrip("."), why, advice, half)
