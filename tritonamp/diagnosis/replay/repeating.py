"""Run recorded forwards and their backwards again, for the bits of their results."""

import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from tritonamp.diagnosis.replay.backward import Backward
from tritonamp.diagnosis.replay.model_names import ModelNames
from tritonamp.diagnosis.replay.python_state import python_state
from tritonamp.diagnosis.replay.untouched import same_bits, untouched
from tritonamp.kernels.device import wide_dtype
from tritonamp.nested import leaves
from tritonamp.step.snapshots import Snapshot
from tritonamp.watched.bits import bit_sum
from tritonamp.watched.ops import OpCall, is_finite, is_watched

Writes = Mapping[str, tuple[Tensor, Tensor]]
"""Name of a parameter or buffer that a run writes to, to the tensor and its value before."""


class Bits(NamedTuple):
    """The results of one run.

    Attributes:
        outputs: for each forward, the checksum of each tensor that it returned; None: the tensor
            has no memory to read.
        gradients: by name of a parameter, the checksum of its gradient, summed over the forwards.
        largest: by name of a parameter, the largest magnitude in that sum, perhaps inf or NaN.
        norms: by name of a parameter, the norm of that sum. They carry the loss scale.
        limit: largest number of the narrowest format among these gradients.
    """

    outputs: Sequence[Sequence[int | None]]
    gradients: Mapping[str, int]
    largest: Mapping[str, float]
    norms: Mapping[str, float]
    limit: float

    def differences(self, other: "Bits") -> list[str]:
        """Return the outputs and gradients, in words, in which two runs differ."""
        pairs = zip(self.outputs, other.outputs, strict=True)
        outputs = [name for one, two in pairs for name in differing_outputs(one, two)]
        grads = [n for n, s in other.gradients.items() if self.gradients.get(n) != s]
        return [*dict.fromkeys(outputs), *(f"gradient of {name}" for name in grads)]


class Traits(NamedTuple):
    """Facts of a run that the bits of its results do not show.

    Attributes:
        forward_ops: each op that ran in a forward, and a type of a device that it ran on.
        backward_ops: the same of backwards.
        writes: parameters and buffers that ops wrote to.
        unlike_first: why the first run may have had other bits; "": it had the same inputs.
        keeps_state: whether attributes of modules change in a run, so that the next one differs.
    """

    forward_ops: Iterable[tuple[Any, str]]
    backward_ops: Iterable[tuple[Any, str]]
    writes: Writes
    unlike_first: str
    keeps_state: bool = False


def differing_outputs(one: Sequence[int | None], two: Sequence[int | None]) -> list[str]:
    """Return the outputs, in words, that have other checksums, where both are known."""
    if len(one) != len(two):
        return ["the number of outputs"]
    pairs = enumerate(zip(one, two, strict=True))
    return [f"output {i}" for i, (a, b) in pairs if None not in (a, b) and a != b]


def note_traits(models: list[nn.Module], batches: Sequence[Snapshot]) -> Traits:
    """Run forwards and backwards again, and return facts of the run.

    Raises:
        BatchGoneError: a batch is gone, or has changed.
        CollectiveError: a forward or backward communicates with other ranks.
    """
    noted, unlike = _Noted(ModelNames(models)), list[str]()
    forward, backward = dict[tuple[Any, str], None](), dict[tuple[Any, str], None]()
    state = python_state(models)
    for batch in batches:
        with untouched(models, noted.writes):
            buffers = _read_buffers(batch.model)
            numpy = _numpy_state()
            noted.ops = forward
            with noted:
                output = batch.run()
            noted.ops = backward
            unlike += _changed(batch, numpy, buffers)
            with noted:
                _gradients(models, batch, output)
    if _is_compiled(models):
        unlike.append("compiled code runs eagerly")
    keeps_state = python_state(models) != state
    if keeps_state:
        unlike.append("it changes attributes of modules")
    if any(isinstance(tensor, nn.Parameter) for tensor, _ in noted.writes.values()):
        unlike.append("it changes parameters")
    said = "; ".join(dict.fromkeys(unlike))
    return Traits(forward, backward, noted.writes, said, keeps_state)


def run_again(models: list[nn.Module], batches: Sequence[Snapshot], writes: Writes) -> Bits:
    """Run forwards again, and backwards from the gradients that arrived at their outputs.

    The gradients are tensors of their own. Parameters, buffers, ``.grad`` and generators do not
    change. No dispatch mode is active, so that the same kernels run as in training.

    Args:
        models: the enabled models.
        batches: the forwards.
        writes: those of ``note_traits``, which are undone.
    """
    outputs = list[list[int | None]]()
    total = dict[str, Tensor]()
    for batch in batches:
        with untouched(models, writes, refuses_collectives=False):
            output = batch.run()
            outputs.append(read([bit_sum(t) for t in leaves(output) if isinstance(t, Tensor)]))
            for name, grad in _gradients(models, batch, output).items():
                total[name] = total[name] + grad if name in total else grad
    largest = {name: float(grad.abs().max()) for name, grad in total.items() if grad.numel()}
    norms = {
        name: float(torch.linalg.vector_norm(grad, dtype=wide_dtype(grad.device)))
        for name, grad in total.items()
    }
    limit = min((torch.finfo(grad.dtype).max for grad in total.values()), default=0.0)
    sums = {name: read([bit_sum(grad)])[0] for name, grad in total.items()}
    known = {name: s for name, s in sums.items() if s is not None}
    return Bits(outputs, known, largest, norms, limit)


def read(sums: Sequence[Tensor | None]) -> list[int | None]:
    """Return checksums as numbers. Waits for the device."""
    return [None if s is None else int(s) for s in sums]


def has_gradients(batch: Snapshot) -> bool:
    """Return whether finite gradients arrived at the outputs of a forward."""
    grads = batch.grad_outputs
    return grads is not None and all(g is None or is_finite(g) for g in grads)


def _gradients(models: Sequence[nn.Module], batch: Snapshot, output: Any) -> dict[str, Tensor]:
    if not has_gradients(batch):
        return {}
    backward = Backward(output, batch.grad_outputs, 1.0, _params(models))
    return backward.gradients(1.0) if backward.is_possible else {}


def _params(models: Sequence[nn.Module]) -> dict[str, Tensor]:
    return {n: t for n, t in ModelNames(models).weights() if t.is_leaf and t.requires_grad}


def _read_buffers(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the buffers that the output of a forward may depend on, each with a copy."""
    # in training a norm writes to its statistics, and does not read them
    found = [
        b
        for module in model.modules()
        if not (isinstance(module, _NormBase) and module.training)
        for b in module._buffers.values()
    ]
    return [(b, b.detach().clone()) for b in found if b is not None]


def _changed(batch: Snapshot, numpy: Any, buffers: Iterable[tuple[Tensor, Tensor]]) -> list[str]:
    """Return why a forward that has just run again may have had other inputs the first time."""
    found, recorded = [], batch.ambient.generators
    if _numpy_state() != numpy:
        found.append("it draws from numpy's generator, whose state is not recorded")
    drawn = recorded is not None and (
        random.getstate() != recorded.python or not torch.equal(torch.get_rng_state(), recorded.cpu)
    )
    if drawn and not batch.is_exact:
        found.append("the generators were not read before it")
    if not all(same_bits(b, copy) for b, copy in buffers):
        found.append("it changes buffers")
    return found


def _numpy_state() -> str:
    numpy = sys.modules.get("numpy")
    return "" if numpy is None else repr(numpy.random.get_state(legacy=False)["state"])


def _is_compiled(models: Sequence[nn.Module]) -> bool:
    """Return whether torch.compile has compiled code in this process, or is to compile a module."""
    # private (torch 2.11 to 2.15): nothing public tells which functions are compiled
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and dynamo.counters["frames"]["ok"]:
        return True
    modules = (module for model in models for module in model.modules())
    return any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in modules)


class _Noted(TorchDispatchMode):
    """Notes the ops of a run, and the parameters and buffers that they write to."""

    def __init__(self, names: ModelNames) -> None:
        super().__init__()
        self._names = names
        self.ops: dict[tuple[Any, str], None] = {}
        self.writes: dict[str, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **(kwargs or {}))
        call = OpCall(func, args, kwargs or {})
        inputs = [t for t in leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        self.ops.update(dict.fromkeys((func, t.device.type) for t in inputs))
        for tensor in leaves(call.written_arguments()) if call.schema.written else ():
            weight = self._names.weight(tensor) if is_watched(tensor) else None
            if weight is not None:
                self.writes.setdefault(weight[0], (weight[1], weight[1].detach().clone()))
        return call.run()
