"""One forward and backward of a copy of a model, as a policy would have it but in FP32 values."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from tritonamp.casts.rounded_inputs import RoundedInput, remedy
from tritonamp.forecast.recording import Hazard, Recorder, TensorRecord
from tritonamp.forecast.running import Batch, LossFn, run_copy
from tritonamp.forecast.unrounded import values_of
from tritonamp.policy import Policy
from tritonamp.watched.graph import nodes
from tritonamp.watched.places import Place


class DryRun(NamedTuple):
    """What one dry run saw.

    Attributes:
        records: inputs, parameters, every op's result, and the gradients of parameters and loss.
        hazards: what is wrong whatever the sizes.
        loss: its value.
        rounded: inputs that lose by their cast to half, and that no matmul or convolution reads
            first.
        cast_inputs: the policy's, without the arguments that these are in.
    """

    records: list[TensorRecord]
    hazards: list[Hazard]
    loss: float
    rounded: list[RoundedInput]
    cast_inputs: bool | tuple[str | int, ...]


def dry_run(model: nn.Module, batch: Batch, loss_fn: LossFn | None, policy: Policy) -> DryRun:
    """Run a copy on FP32 values; see ``run_copy``."""
    recorder = Recorder(model, policy)
    loss = run_copy(model, batch, loss_fn, policy, recorder)
    for path in recorder.threads:
        recorder.note("thread", "", Place(path))
    _find_functions(loss, recorder)
    rounded = recorder.rounded()
    return DryRun(
        recorder.records,
        list(recorder.hazards),
        float(values_of(loss.detach())),
        rounded,
        remedy(recorder.inputs, rounded) if rounded else policy.cast_inputs,
    )


def _find_functions(loss: Tensor, recorder: Recorder) -> None:
    """Note the user's autograd Functions that autocast does not know of."""
    for node in nodes(loss):
        # private (torch 2.11 to 2.15): the Function that a node of autograd belongs to
        function: Any = getattr(type(node), "_forward_cls", None)
        own = function is not None and not function.__module__.startswith(("torch.", "tritonamp."))
        # the name of what torch.amp.custom_fwd puts in its place
        if own and function.forward.__code__.co_name != "decorate_fwd":
            recorder.note("function", function.__qualname__, recorder.place_of(node) or Place())
