"""What a model and its optimizers tell about mixed precision before any data is seen."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp import optim
from tritonamp.casts.model import NORMS, fp32_modules
from tritonamp.checks import check_optimizers
from tritonamp.forecast.unrounded import magnitudes, rounds_to_inf, rounds_to_zero
from tritonamp.policy import HALF_DTYPES, Policy

_SHARE = 0.01  # of the model's parameters; a smaller layer is not worth advice on speed
_SMALL = 16  # features; fewer are padded, and cost little


@dataclass(frozen=True)
class Finding:
    """One thing to know before training.

    Attributes:
        kind: "overflow", "vanishing", "constant", "adam eps"...
        where: path of a module, full name of a parameter, or what else it is about; "" is the
            model's own forward.
        why: what happens.
        advice: what to do.
        problem: training would fail or lose accuracy; otherwise it is advice.
        weight: by which findings are sorted, worst first.
        modules: paths of modules whose computing in FP32 cures it.
        line: of the user's code, "file:number", where one is to blame.
    """

    kind: str
    where: str
    why: str
    advice: str
    problem: bool = True
    weight: float = 1.0
    modules: tuple[str, ...] = ()
    line: str = ""


def look(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    loss_fn: Callable[..., Any] | None,
    policy: Policy,
) -> list[Finding]:
    """Everything that can be said without data."""
    modules = dict(model.named_modules())
    return [
        *parameters(model, policy),
        *_already_half(modules, policy),
        *_averages(modules, policy),
        *_buffers(modules, policy),
        *_refused(model, optimizers),
        *_optimizers(model, optimizers, policy),
        *_sparse(modules, optimizers),
        *_bce(modules, loss_fn),
        *_parallel(modules),
        *_sizes(modules, policy),
    ]


def parameters(model: nn.Module, policy: Policy) -> Iterator[Finding]:
    """Values that the half format cannot hold, in parameters that are stored or used in half."""
    dtype, top = policy.dtype, torch.finfo(policy.dtype).max
    fp32 = {id(p) for p in _fp32_parameters(model, policy)}
    for name, param in model.named_parameters():
        if not param.is_floating_point() or not param.numel():
            continue
        owner, sizes = name.rpartition(".")[0], magnitudes(param.detach().float())
        if not bool(param.detach().isfinite().all()):
            yield Finding(
                "non-finite",
                name,
                "it holds inf or NaN already",
                "load or initialise it again",
                True,
                1e30,
            )
        elif id(param) in fp32 or not (policy.cast_model or policy.op_policy):
            continue
        elif sizes.overflows(dtype):
            why = f"its largest value is {sizes.amax:.3g}, {sizes.amax / top:.3g} times the largest {short(dtype)}"
            yield Finding(
                "overflow", name, why, keep(owner), weight=sizes.amax / top, modules=(owner,)
            )
        elif sizes.amax and sizes.vanishing(dtype) > 0.99:
            why = f"its largest value is {sizes.amax:.2g}, which is zero in {short(dtype)}"
            yield Finding("vanishing", name, why, keep(owner), modules=(owner,))


def _fp32_parameters(model: nn.Module, policy: Policy) -> Iterator[Tensor]:
    kept = fp32_modules(model, policy)
    norms = [m for m in model.modules() if isinstance(m, NORMS)] if policy.op_policy else []
    for module in (*kept, *norms):
        yield from module.parameters()


def _already_half(modules: dict[str, nn.Module], policy: Policy) -> Iterator[Finding]:
    half = [
        (f"{path}.{name}".lstrip("."), module, p.dtype)
        for path, module in modules.items()
        for name, p in module.named_parameters(recurse=False)
        if p.dtype in HALF_DTYPES
    ]
    if half and not policy.half_parameters:
        yield Finding(
            "half model",
            half[0][0],
            f"{len(half)} parameters are {short(half[0][2])} already ({_some([name for name, _, _ in half])}): the "
            "values that FP32 master weights would hold are lost",
            "load the model in FP32, or call model.float() before building the optimizer; enable makes the half copies",
            weight=1e20,
        )
    norms = [name for name, module, _ in half if isinstance(module, NORMS)]
    if norms:
        why = f"{len(norms)} parameters of normalisation layers are half ({_some(norms)})"
        yield Finding(
            "half norm", norms[0].rpartition(".")[0], why, "keep them in FP32, as level O2 does"
        )


def _averages(modules: dict[str, nn.Module], policy: Policy) -> Iterator[Finding]:
    """Averaged copies: an AveragedModel, or a frozen module with the values of one that is trained."""
    found: list[str] = []
    for path, module in modules.items():
        averaged = isinstance(module, torch.optim.swa_utils.AveragedModel)
        half = policy.cast_model or any(p.dtype in HALF_DTYPES for p in module.parameters())
        inside = any(path.startswith(f"{other}.") for other in found)
        if (
            half
            and not inside
            and (averaged or any(_is_copy(module, other) for other in modules.values()))
        ):
            found.append(path)
            why = (
                "a copy that is averaged"
                if averaged
                else "a frozen copy of a module that is trained"
            )
            yield Finding(
                "average",
                path,
                f"{why}: if it follows in small steps, these round away in half",
                f'keep it in FP32 (fp32_modules=["{path}"]), and update it from amp.master_params()',
                problem=averaged,
                modules=(path,) if averaged and path else (),
            )


def _is_copy(module: nn.Module, original: nn.Module) -> bool:
    if type(module) is not type(original) or module is original:
        return False
    copies, originals = list(module.parameters()), list(original.parameters())
    if not copies or len(copies) != len(originals) or any(p.requires_grad for p in copies):
        return False
    pairs = list(zip(copies, originals, strict=True))
    return any(p.requires_grad for p in originals) and all(
        a is not b and torch.equal(a, b) for a, b in pairs
    )


def _buffers(modules: dict[str, nn.Module], policy: Policy) -> Iterator[Finding]:
    top = rounds_to_inf(policy.dtype)
    for path, module in modules.items():
        for name, buffer in module.named_buffers(recurse=False):
            if isinstance(module, NORMS) or not buffer.is_floating_point() or not buffer.numel():
                continue
            sizes = magnitudes(buffer.detach().float())
            if sizes.amax >= top:
                half = policy.cast_model and not policy.op_policy
                yield Finding(
                    "constant",
                    f"{path}.{name}".lstrip("."),
                    f"the buffer holds {sizes.amax:.3g}, which is inf in {short(policy.dtype)}"
                    + ("" if half else "; at this level it stays FP32, but a cast would reach it"),
                    'use float("-inf") or torch.finfo(x.dtype).min for masks',
                    problem=half,
                )


def _refused(model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Finding]:
    """What ``enable`` would raise about the optimizers."""
    try:
        check_optimizers(optimizers, [model])
    except ValueError as error:
        why, _, advice = str(error).partition(": ")[2].rpartition(": ")
        yield Finding(
            "optimizer",
            type(optimizers[0]).__name__,
            f"enable refuses it: {why}",
            advice,
            weight=1e12,
        )


def _optimizers(
    model: nn.Module, optimizers: Sequence[Optimizer], policy: Policy
) -> Iterator[Finding]:
    names = {p: name for name, p in model.named_parameters()}
    becomes_half = policy.cast_model and not policy.master_weights
    kept = {id(p) for p in _fp32_parameters(model, policy)} if becomes_half else set()
    for optimizer in optimizers:
        kind, with_masters = (
            type(optimizer).__name__,
            isinstance(optimizer, (optim.Adam, optim.AdamW)),
        )
        params = [(p, group) for group in optimizer.param_groups for p in group["params"]]
        half = [
            (p, g)
            for p, g in params
            if p.dtype in HALF_DTYPES or (becomes_half and id(p) not in kept and p in names)
        ]
        if not half or with_masters:
            continue
        name = names.get(half[0][0], f"a parameter of shape {tuple(half[0][0].shape)}")
        why = f"{kind} steps on {len(half)} half parameters without FP32 master weights ({name}, ...): small updates "
        yield Finding(
            "no masters",
            name,
            why + "round away",
            'use level "O2", or tritonamp.optim.AdamW',
            weight=1e10,
        )
        eps = min(
            (group["eps"] for _, group in half if isinstance(group.get("eps"), float)), default=1.0
        )
        dtype = half[0][0].dtype if half[0][0].dtype in HALF_DTYPES else policy.dtype
        if 0 < eps <= rounds_to_zero(dtype):
            why = f"{kind} has eps={eps:g} on half parameters: it is zero in {short(dtype)}, so the step divides by zero"
            yield Finding(
                "adam eps", name, why, 'use level "O2" (FP32 masters), or eps=1e-4', weight=1e11
            )


def _sparse(modules: dict[str, nn.Module], optimizers: Sequence[Optimizer]) -> Iterator[Finding]:
    adams = (torch.optim.Adam, torch.optim.AdamW, optim.Adam, optim.AdamW)
    refusing = [type(o).__name__ for o in optimizers if isinstance(o, adams)]
    for path, module in modules.items():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            why = "its gradients are sparse" + (
                f", which {refusing[0]} refuses" if refusing else ""
            )
            advice = "give it torch.optim.SparseAdam or SGD, or build it with sparse=False (then steps are fused)"
            yield Finding("sparse", path, why, advice, problem=bool(refusing))


def _bce(modules: dict[str, nn.Module], loss_fn: Any) -> Iterator[Finding]:
    named = [*modules.items(), ("loss_fn", loss_fn)]
    yield from (bce(path) for path, module in named if isinstance(module, nn.BCELoss))


def bce(where: str, line: str = "") -> Finding:
    why = "binary_cross_entropy takes probabilities: in half they round to 0 and 1, and autocast refuses it"
    return Finding(
        "BCELoss",
        where,
        why,
        "use BCEWithLogitsLoss and leave out the sigmoid",
        weight=1e6,
        line=line,
    )


def _parallel(modules: dict[str, nn.Module]) -> Iterator[Finding]:
    for path, module in modules.items():
        if isinstance(module, nn.DataParallel):
            why = "DataParallel runs replicas in threads of their own, which autocast around it does not reach"
            yield Finding(
                "data parallel",
                path,
                why,
                "enable the module inside it, or use DistributedDataParallel",
            )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        why = "torch.autocast is on around tritonamp.check: an enabled model enters its own"
        yield Finding(
            "autocast", "the caller", why, "leave it out of the training loop", problem=False
        )


def _sizes(modules: dict[str, nn.Module], policy: Policy) -> Iterator[Finding]:
    """Matrix sizes that Tensor Cores do not take as they are."""
    total = sum(p.numel() for p in modules[""].parameters())
    for path, module in modules.items():
        weight = getattr(module, "weight", None)
        if (
            not isinstance(weight, Tensor)
            or weight.numel() < _SHARE * total
            or not (policy.op_policy or policy.cast_model)
        ):
            continue
        odd = [f"{name}={size}" for name, size in _matrix(module) if size >= _SMALL and size % 8]
        if odd:
            rounded = ", ".join(
                f"{n}={math.ceil(int(s) / 8) * 8}" for n, s in (text.split("=") for text in odd)
            )
            why = f"{', '.join(odd)}: not a multiple of 8, so Tensor Cores run slower or not at all"
            yield Finding(
                "tensor cores",
                path,
                why,
                f"pad to {rounded}",
                problem=False,
                weight=weight.numel() / total,
            )


def _matrix(module: nn.Module) -> list[tuple[str, int]]:
    if isinstance(module, nn.Linear):
        return [("in_features", module.in_features), ("out_features", module.out_features)]
    if isinstance(module, nn.Embedding):
        return [("num_embeddings", module.num_embeddings), ("embedding_dim", module.embedding_dim)]
    if isinstance(module, nn.modules.conv._ConvNd):
        groups = module.groups
        return [
            ("in_channels", module.in_channels // groups),
            ("out_channels", module.out_channels // groups),
        ]
    return []


def keep(module: str) -> str:
    """Advice for what a module cannot do in half."""
    if module:
        return f'keep it in FP32: fp32_modules=["{module}"]'
    return "make this part a module of its own and keep it in FP32, or compute it on x.float() in disable_casts()"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def short(dtype: torch.dtype) -> str:
    """ "float16"."""
    return str(dtype).removeprefix("torch.")
