"""One forward and backward of a copy of a model, under a policy but with FP32 values."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp.casts.inputs import input_tensors, signature_of
from tritonamp.casts.saved import named_tensors
from tritonamp.casts.tree import cast_tree, from_half
from tritonamp.casts.user_functions import disable_casts
from tritonamp.diagnosis.replay.user_calls import Patch, UserCalls
from tritonamp.forecast.recording import Recorder, TensorRecord, record_of
from tritonamp.forecast.running import Batch, LossFn, run_copy
from tritonamp.forecast.twin import widen
from tritonamp.forecast.unrounded import values_of
from tritonamp.policy import Policy
from tritonamp.watched.graph import nodes
from tritonamp.watched.places import Place, Way

_BCE = (nn.functional.binary_cross_entropy, torch._C._nn.binary_cross_entropy)


class DryRun(Recorder):
    """A run of a copy of the model (``run_copy``), with its records, hazards and loss."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        loss_fn: LossFn | None,
        policy: Policy,
        patch: Patch | None = None,
    ) -> None:
        super().__init__(policy.dtype)
        self._model, self._patch = model, patch
        # the floating inputs, and the arguments that they came in, see ``input_tensors``
        self.inputs: list[tuple[TensorRecord, str | int]] = []
        loss = run_copy(model, batch, loss_fn, policy, self)
        self.loss, self.end = float(values_of(loss.detach())), record_of(loss)
        for path in self.threads:
            self.note("thread", "", Place(path))
        self._note_functions(loss)
        self.names = {}  # the copy goes

    def begin(self, twin: nn.Module) -> None:
        super().begin(twin)
        widen(twin, {name: values_of(t.detach()) for name, t in named_tensors(self._model)})

    def given(self, batch: Batch) -> Batch:
        batch = super().given(batch)
        for argument, tensor in input_tensors(*batch, signature_of(self._model.forward)):
            record = record_of(tensor)
            if record is not None:
                self.inputs.append((record, argument))
        return batch

    def __enter__(self) -> "DryRun":
        super().__enter__()
        self._hooks.enter_context(_Calls(self, self._patch))
        return self

    def _note_functions(self, loss: Tensor) -> None:
        """Note the user's autograd Functions that autocast does not know of."""
        for node in nodes(loss):
            # private (torch 2.11 to 2.15): the Function that a node of autograd belongs to
            function: Any = getattr(type(node), "_forward_cls", None)
            theirs = ("torch.", "tritonamp.")
            if function is None or function.__module__.startswith(theirs):
                continue
            # the name of the wrapper that torch.amp.custom_fwd makes
            if function.forward.__code__.co_name != "decorate_fwd":
                self.note("function", function.__qualname__, self.place_of_node(node) or Place())


class _Calls(UserCalls):
    """Also runs binary_cross_entropy in FP32, because autocast refuses it."""

    def __init__(self, run: Recorder, patch: Patch | None) -> None:
        super().__init__(run, patch)
        self._recorder = run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _BCE:
            return super().__torch_function__(func, types, args, kwargs)
        here = self._recorder.place_now("binary_cross_entropy", Way.out_of(sys._getframe(1)))
        self._recorder.note("bce", "binary_cross_entropy", here)
        args, kwargs = cast_tree((args, kwargs or {}), from_half(torch.float32))
        with disable_casts():
            return func(*args, **kwargs)
