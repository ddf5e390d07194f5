"""One forward and backward of a copy of a model, as a policy would have it but in FP32 values."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from tritonamp.casts.inputs import signature_of
from tritonamp.casts.rounded_inputs import (
    Readers,
    RoundedInput,
    inputs_to_cast,
    remedy,
    roundings,
    worst_rounding,
)
from tritonamp.casts.tree import cast_tree, from_half
from tritonamp.casts.user_functions import disable_casts
from tritonamp.forecast.places import Location
from tritonamp.forecast.recording import Note, Recorder, TensorRecord, record_of
from tritonamp.forecast.running import Batch, LossFn, isolated, loss_of, named_failures
from tritonamp.forecast.twin import fp32_copy, named_tensors, widen
from tritonamp.forecast.unrounded import Unrounded, magnitudes, values_of
from tritonamp.policy import HALF_DTYPES, Policy
from tritonamp.runtime import enable

_BCE = (nn.functional.binary_cross_entropy, torch._C._nn.binary_cross_entropy)


class DryRun(NamedTuple):
    """What one dry run saw.

    Attributes:
        records: inputs, parameters, every op's result, and the gradients of parameters and loss.
        notes: what is wrong whatever the sizes.
        loss: its value.
        rounded: inputs that lose by their cast to half, and that no matmul or convolution reads
            first.
        cast_inputs: the policy's, without the arguments that these are in.
    """

    records: list[TensorRecord]
    notes: list[Note]
    loss: float
    rounded: list[RoundedInput]
    cast_inputs: bool | tuple[str | int, ...]


def dry_run(model: nn.Module, batch: Batch, loss_fn: LossFn | None, policy: Policy) -> DryRun:
    """Run a copy; model, batch, gradients and random states stay as they are, bit for bit.

    Args:
        model: its half parameters, if any, are taken as FP32.
        batch: of the model.
        loss_fn: gives a scalar for the model's output; None: as ``check`` says.
        policy: that the copy is enabled with.

    Raises:
        ValueError: the loss is no scalar.
        RuntimeError: model, loss or backward fail in FP32 already; the module is named.
    """
    recorder = Recorder(policy.dtype)
    with isolated(model), contextlib.ExitStack() as stack:
        twin = fp32_copy(model)
        wide = {name: tensor.data for name, tensor in named_tensors(twin)}
        stack.callback(enable(twin, policy=policy, backend="eager").disable)
        stack.enter_context(named_failures(recorder, "the dry run, in FP32"))
        widen(twin, wide)
        recorder.follow(twin)
        args, kwargs = tree_map_only(Tensor, lambda t: _input(t, recorder), tuple(batch))
        inputs = inputs_to_cast(args, kwargs, signature_of(model.forward), policy)
        rows = [worst_rounding(one.tensor, policy.dtype).tolist() for one in inputs]
        rounded = roundings(inputs, [number for row in rows for number in row])
        readers = Readers(inputs)
        params = {name: p for name, p in twin.named_parameters() if p.requires_grad}
        for name, tensor in twin.named_parameters():
            _mark(tensor, recorder, "parameter", name)
        with recorder, readers, _BceInFp32(recorder):
            loss = loss_of(twin(*args, **kwargs), loss_fn)
            grads = _backward(loss, list(params.values()), recorder)
        for name, grad in zip(params, grads, strict=True):
            if grad is not None:
                _mark(grad, recorder, "gradient", name, scaled=True)
        for path in recorder.threads:
            recorder.note("thread", "", Location(path, ""))
    rounded = [one for one in rounded if one.path in readers.only_others]
    return DryRun(
        recorder.records,
        list(recorder.notes),
        float(values_of(loss.detach())),
        rounded,
        remedy(inputs, rounded) if rounded else policy.cast_inputs,
    )


def _backward(loss: Tensor, params: list[Tensor], recorder: Recorder) -> Sequence[Tensor | None]:
    """Return the gradients of ``params``, None where the loss does not depend on one."""
    if not loss.requires_grad:
        return [None] * len(params)
    _find_functions(loss, recorder)
    one = torch.ones_like(loss)
    # private (torch 2.11 to 2.15): the recorder is not to see it as an op of the run
    with _disable_current_modes():
        _mark(one, recorder, "loss gradient", scaled=True)
    grads: Sequence[Tensor | None] = torch.autograd.grad(loss, params, one, allow_unused=True)
    return grads


def _mark(
    tensor: Tensor, recorder: Recorder, op: str, parameter: str = "", scaled: bool = False
) -> None:
    """Measure a tensor that no op of the run made.

    Args:
        tensor: the tensor.
        recorder: of the run.
        op: what the record says in place of an op.
        parameter: the full name, of a parameter or its gradient.
        scaled: it carries the loss scale.
    """
    values = values_of(tensor.detach())
    if values.dtype is torch.float32 and values.layout is torch.strided and values.numel():
        place = Location(parameter.rpartition(".")[0], "")
        half = isinstance(tensor, Unrounded) or isinstance(tensor.data, Unrounded)
        record = TensorRecord(
            place, op, tuple(values.shape), magnitudes(values), half, parameter, scaled, scaled
        )
        made_by = record_of(tensor)
        record.sources = [made_by] if made_by else []
        tensor._record = record  # type: ignore[attr-defined]
        recorder.records.append(record)


def _input(tensor: Tensor, recorder: Recorder) -> Tensor:
    copied = tensor.detach().clone()
    result: Tensor = (
        Unrounded(copied.float(), tensor.dtype) if tensor.dtype in HALF_DTYPES else copied
    )
    _mark(result, recorder, "input")
    return result.requires_grad_(tensor.requires_grad)


def _find_functions(loss: Tensor, recorder: Recorder) -> None:
    """Note the user's autograd Functions that autocast does not know of."""
    nodes, known = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in known:
            continue
        known.add(node)
        nodes += [function for function, _ in node.next_functions]
        # private (torch 2.11 to 2.15): the Function that a node of autograd belongs to
        function: Any = getattr(type(node), "_forward_cls", None)
        own = function is not None and not function.__module__.startswith(("torch.", "tritonamp."))
        # the name of what torch.amp.custom_fwd puts in its place
        if own and function.forward.__code__.co_name != "decorate_fwd":
            recorder.note("function", function.__qualname__, recorder.place_of(node))


class _BceInFp32(TorchFunctionMode):
    """Lets binary_cross_entropy run, which autocast refuses, and notes it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _BCE:
            return func(*args, **(kwargs or {}))
        self._recorder.note("bce", "binary_cross_entropy")
        args, kwargs = cast_tree((args, kwargs or {}), from_half(torch.float32))
        with disable_casts():
            return func(*args, **kwargs)
