"""Measures every result of a run with FP32 values, with the place that computed it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tritonamp.diagnosis.replay.verdicts import Eps, Event
from tritonamp.forecast.running import WatchedCopy
from tritonamp.forecast.unrounded import (
    Magnitudes,
    Unrounded,
    magnitudes,
    rounds_to_inf,
    rounds_to_zero,
    stored,
    unrounded,
    values_of,
    vanishing,
)
from tritonamp.policy import HALF_DTYPES
from tritonamp.watched.ops import ADDS_A_NUMBER, OpCall
from tritonamp.watched.places import Place
from tritonamp.watched.products import Products

FILLS = """
    masked_fill fill full full_like new_full clamp clamp_min clamp_max hardtanh threshold
    constant_pad_nd index_fill
""".split()
"""Ops whose scalar torch refuses if the dtype cannot hold it."""
AT_ZERO = "div reciprocal rsqrt log log2 log10 sqrt".split()
"""Ops whose result or gradient is infinite where the last argument is zero."""
SOFTMAX = ("softmax", "log_softmax", "safe_softmax")
EARLY = "_linear_cross_entropy_batch_chunked"
"""torch's linear cross entropy with ``options`` (torch 2.13 to 2.15), as it runs outside of enabled
forwards. Its forward computes gradients, in the dtype of its input.
"""
MARKED = ("input", "parameter", "gradient", "loss gradient")
"""``TensorRecord.op`` of tensors that no op of the run computed."""
NORMS = """
    native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm _native_batch_norm_legit
""".split()

NAMES = {
    "addmm": "linear",
    "mm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "to": "the cast to half",
}
IN_BACKWARD = " in backward"
ON_THE_WAY = "to add clamp clamp_min sum mean index gather select mul masked_fill".split()
"""Ops that may stand between a softmax and a reader of its zeros; some add an eps."""


@dataclass(eq=False)
class TensorRecord:
    """One result of an op, an input, a parameter, or a parameter's gradient.

    Attributes:
        place: place of the op; in a backward, place of the forward op of the gradient.
        op: aten name of the op, or "input", "parameter", "gradient".
        shape: shape of the tensor.
        sizes: exponents of the tensor's values.
        parameter: full name of the parameter, for a parameter or its gradient.
        backward: whether a backward computed the tensor.
        half: whether the policy stores the tensor in half.
        scaled: whether the tensor is multiplied by the loss scale.
        sources: records of the op's inputs.
        excused: whether an overflow is harmless, such as a mask that a softmax takes as -inf.
        replaced: whether the record of the tensor's cast to half replaces this record.
        made_broken: whether the op made inf or NaN of the tensor from finite numbers.
    """

    place: Place
    op: str
    shape: tuple[int, ...]
    sizes: Magnitudes
    half: bool = False
    parameter: str = ""
    backward: bool = False
    scaled: bool = False
    excused: bool = False
    replaced: bool = False
    made_broken: bool = False
    sources: list["TensorRecord"] = field(default_factory=list, repr=False)

    @property
    def module(self) -> str:
        """Path of the tensor's module; "" for the model's own forward and for the loss."""
        return self.place.module or ""

    @property
    def name(self) -> str:
        """The op in words."""
        name = NAMES.get(self.op, self.op.strip("_").removeprefix("native_"))
        return name + (IN_BACKWARD if self.backward else "")


@dataclass(frozen=True)
class Hazard:
    """A problem that does not depend on the size of values."""

    kind: str  # "constant", "eps", "divisor", "refused", "bce", "early gradients", "thread"...
    place: Place
    detail: str  # in words
    event: Event | None = field(default=None, compare=False)  # that edits of the code may cure


class Recorder(WatchedCopy):
    """Computes with FP32 values, and records each result and whether it carries the loss scale."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__("the dry run, in FP32")
        # inputs, parameters, every op's result, and the gradients of parameters and loss, each
        # after its sources
        self.made: list[TensorRecord] = []
        self.hazards: dict[Hazard, None] = {}  # faults that do not depend on sizes, each once
        self.products = Products()  # of the forward
        self._dtype = dtype

    @property
    def records(self) -> list[TensorRecord]:
        """All that the run made, without FP32 results that their module has also cast to half."""
        return [record for record in self.made if not record.replaced]

    def in_its_dtype(self, tensor: Tensor) -> Tensor:
        half = tensor.dtype in HALF_DTYPES
        return Unrounded(tensor.float(), tensor.dtype) if half else tensor

    def note(self, kind: str, detail: str, place: Place, event: Event | None = None) -> None:
        """Add a hazard."""
        self.hazards[Hazard(kind, place, detail, event)] = None

    def _event(self, place: Place, half: bool, **fields: Any) -> Event:
        phase = "backward" if self.in_backward() else "forward"
        return Event(place, phase, self._dtype if half else torch.float32, **fields)

    def marked(self, op: str, tensor: Tensor, parameter: str = "") -> None:
        half = isinstance(tensor, Unrounded) or isinstance(tensor.data, Unrounded)
        made_by, scaled = record_of(tensor), "gradient" in op
        fields = {"half": half, "parameter": parameter, "backward": scaled, "scaled": scaled}
        sources = [made_by] if made_by else []
        self._record(tensor, Place(parameter.rpartition(".")[0]), op, sources=sources, **fields)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = OpCall(func, args, kwargs or {})
        name = call.schema.aten
        place = self.place(name)
        result = unrounded(
            func, args, call.kwargs, lambda message: self.note("refused", message, place)
        )
        if not self.in_backward():
            self.products.add(call, result, place.module)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(
            t.dtype in HALF_DTYPES and not isinstance(t, Unrounded) and bool(t.isposinf().any())
            for t in inputs
        ):
            self.note("infinite", "a tensor made in half holds inf", place)
        if name == EARLY and any(t.dtype is torch.float16 for t in inputs):
            self.note("early gradients", "torch's linear_cross_entropy with options", place)
        sources = [record for record in map(record_of, inputs) if record is not None]
        if call.schema.is_view or (call.moves and sources):
            for output in outputs:
                self._pass_on(output, sources, place)
        elif not call.allocates:
            self._watch_divisors(call, inputs, outputs, place)
            self._excuse_mask(call)
            for output in outputs[:1] if name in NORMS else outputs:
                self._measure(name, output, sources, place)
                self._note_broken(call, output, inputs)
            self._watch_scalars(call, outputs, place)
        return result

    def _measure(self, op: str, output: Tensor, sources: list[TensorRecord], place: Place) -> None:
        self._record(
            output,
            place,
            op,
            half=isinstance(output, Unrounded),
            backward=self.in_backward(),
            scaled=any(source.scaled for source in sources),
            sources=sources,
        )

    def _record(self, tensor: Tensor, place: Place, op: str, **fields: Any) -> None:
        values = values_of(tensor.detach())
        if values.dtype is torch.float32 and values.layout is torch.strided and values.numel():
            record = TensorRecord(place, op, tuple(values.shape), magnitudes(values), **fields)
            tensor._record = record  # type: ignore[attr-defined]
            self.made.append(record)

    def _note_broken(self, call: OpCall, output: Tensor, inputs: list[Tensor]) -> None:
        """Note whether inf or NaN of a result came from finite inputs."""
        record = record_of(output)
        if record is None or not record.sizes.broken:
            return
        finite = ~values_of(output).isfinite()
        for tensor in inputs:
            if tensor is output:  # written in place: its values are gone
                known = not any(source.sizes.broken for source in record.sources)
                finite = finite & known
            elif torch.Tag.pointwise in call.func.tags and tensor.layout is torch.strided:
                finite = finite & values_of(tensor).isfinite()
            else:
                finite = finite & bool(stored(values_of(tensor)).isfinite().all())
        record.made_broken = bool(finite.any())

    def _pass_on(self, output: Tensor, sources: list[TensorRecord], place: Place) -> None:
        """Give the output of a view, copy or cast the record of its input.

        A cast to half gets a record of its own; within one module it replaces the input's record.
        """
        if not sources or record_of(output) is not None:
            return
        source = sources[0]
        if source.half or not isinstance(output, Unrounded):
            output._record = source  # type: ignore[attr-defined]
        elif source.place.module != place.module or source.backward != self.in_backward():
            self._measure("to", output, sources, place)
        else:  # a module's FP32 result and its cast to half are one result
            self._measure(source.op, output, source.sources or sources, source.place)
            if record := record_of(output):
                record.made_broken = source.made_broken
            source.replaced = source.op not in MARKED

    def _watch_scalars(self, call: OpCall, outputs: list[Tensor], place: Place) -> None:
        if not any(isinstance(output, Unrounded) for output in outputs):
            return
        record = record_of(outputs[0])
        name = call.schema.name
        overflows = name in FILLS or (record is not None and record.sizes.overflows(self._dtype))
        for value in call.args:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                if overflows and rounds_to_inf(self._dtype) <= abs(value) < float("inf"):
                    event = self._event(place, True, scalars=(float(value),))
                    self.note("constant", f"{name} with {value:g}", place, event)
                elif name in ADDS_A_NUMBER and 0 < abs(value) <= rounds_to_zero(self._dtype):
                    event = self._event(place, True, eps=Eps(value, self._dtype, place))
                    self.note("eps", f"{name} of {value:g}", place, event)

    def _watch_divisors(
        self, call: OpCall, inputs: list[Tensor], outputs: list[Tensor], place: Place
    ) -> None:
        name = call.schema.name
        record = record_of(inputs[-1]) if name in AT_ZERO and inputs else None
        if record is None or not record.half or record.backward:
            return
        if vanishing(record.sizes.exponents, self._dtype):
            softmax = softmax_behind(record)
            kind = "softmax" if softmax else "divisor"
            known = any((seen.kind, seen.place) == (kind, place) for seen in self.hazards)
            if not (known and self.in_backward()):  # else the forward has noted these values
                half = any(isinstance(output, Unrounded) for output in outputs)
                event = self._event(place, half, softmax=softmax)
                self.note(kind, f"{name} of {record.sizes.amin:.2g}", place, event)

    def _excuse_mask(self, call: OpCall) -> None:
        """Excuse scores of a softmax that become -inf, if each row keeps a finite one."""
        scores, dim = call.kwargs.get("attn_mask"), -1
        if call.schema.name in SOFTMAX:
            scores, dim = call.args[:2]
        record, top = record_of(scores), rounds_to_inf(self._dtype)
        if scores is None or record is None or record.sizes.largest >= top:
            return
        masks = record.sizes.overflows(self._dtype)
        if masks and bool((values_of(scores) > -top).any(dim).all()):
            for masked in (record, *record.sources):
                masked.excused |= masked.sizes.largest < top


def softmax_behind(record: TensorRecord) -> Place | None:
    """Return the place of the softmax that made the tensor, or the tensors that its op reads."""
    todo, seen = [record], set[int]()
    while todo:
        at = todo.pop()
        name = at.op.strip("_")
        if name in ("softmax", "safe_softmax"):
            return at.place
        if id(at) not in seen and (at is record or name in ON_THE_WAY):
            todo += at.sources
        seen.add(id(at))
    return None


def record_of(tensor: Tensor | None) -> TensorRecord | None:
    """Return the record of a tensor of the run; None if it has none."""
    return getattr(tensor, "_record", None)
