"""Measures every result of a run on FP32 values, with the place it comes from."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tritonamp.forecast.places import MOVES, Location, PlacedOps, is_view
from tritonamp.forecast.unrounded import (
    Magnitudes,
    Unrounded,
    magnitudes,
    rounds_to_inf,
    rounds_to_zero,
    unrounded,
    values_of,
)
from tritonamp.policy import HALF_DTYPES

FILLS = """
    masked_fill masked_fill_ fill fill_ full full_like new_full clamp clamp_ clamp_min clamp_min_
    clamp_max clamp_max_ hardtanh hardtanh_ threshold threshold_ constant_pad_nd index_fill
    index_fill_
""".split()
"""torch refuses their scalar where the dtype does not hold it, whatever the tensor's values are."""
ADDS = "add add_ sub sub_ rsub clamp clamp_ clamp_min clamp_min_".split()
"""What an eps is given to."""
AT_ZERO = "div div_ reciprocal rsqrt log log2 log10 sqrt".split()
"""The value or the slope is infinite where the last argument is zero."""
SOFTMAX = ("_softmax", "_log_softmax", "_safe_softmax")
EARLY = "torch_nn::_linear_cross_entropy_batch_chunked"
"""torch's linear cross entropy with ``options``, outside of enabled forwards (torch 2.13 to 2.15):
it makes gradients in the forward, in the dtype of its input.
"""
MARKED = ("input", "parameter", "gradient", "loss gradient")
"""What a record says in place of an op where no op of the run made the tensor."""
NORMS = (
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "cudnn_batch_norm",
    "_native_batch_norm_legit",
)


@dataclass(eq=False)
class TensorRecord:
    """One result of an op, an input, a parameter, or a parameter's gradient.

    Attributes:
        place: of the op; in backward, of the forward op that the gradient belongs to.
        op: its name in aten, or "input", "parameter", "gradient".
        shape: of the tensor.
        sizes: of its values.
        parameter: the full name, for a parameter and its gradient.
        backward: it was computed in backward.
        half: the policy stores it in half.
        scaled: it carries the loss scale.
        sources: records of the op's inputs.
        excused: its overflow does no harm: a mask that a softmax takes as -inf.
    """

    place: Location
    op: str
    shape: tuple[int, ...]
    sizes: Magnitudes
    half: bool = False
    parameter: str = ""
    backward: bool = False
    scaled: bool = False
    excused: bool = False
    sources: list["TensorRecord"] = field(default_factory=list, repr=False)


class Note(NamedTuple):
    """Something that is wrong whatever the sizes.

    Attributes:
        kind: "constant", "eps", "divisor", "refused", "bce", "early gradients", "thread"...
        place: where it is.
        detail: what it is, in words.
    """

    kind: str
    place: Location
    detail: str


class Recorder(PlacedOps):
    """Computes on FP32 values, measures results, and knows which gradients carry the loss scale.

    Attributes:
        records: what was measured, in order.
        notes: each once.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.records: list[TensorRecord] = []
        self.notes: dict[Note, None] = {}
        self._dtype = dtype

    def note(self, kind: str, detail: str, place: Location | None = None) -> None:
        """Note that something is wrong; ``place`` None: at the op that is running."""
        self.notes[Note(kind, place or self.place(), detail)] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, place = kwargs or {}, self.place()
        self.remember(place)
        result = unrounded(func, args, kwargs, lambda message: self.note("refused", message, place))
        name = func._schema.name.removeprefix("aten::")
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
        if is_view(func) or (name in MOVES and sources):
            for output in outputs:
                self._pass_on(output, sources, place)
        elif not name.startswith(("empty", "new_empty")):
            self._watch_divisors(name, inputs, place)
            self._excuse_mask(name, args, kwargs)
            for output in outputs[:1] if name in NORMS else outputs:
                self._measure(name, output, sources, place)
            self._watch_scalars(name, args, outputs, place)
        return result

    def _measure(
        self, op: str, output: Tensor, sources: list[TensorRecord], place: Location
    ) -> None:
        values, half = values_of(output), isinstance(output, Unrounded)
        if values.dtype is torch.float32 and values.layout is torch.strided and values.numel():
            scaled = any(source.scaled for source in sources)
            shape, sizes = tuple(values.shape), magnitudes(values)
            record = TensorRecord(
                place, op, shape, sizes, half, "", self.in_backward(), scaled, sources=sources
            )
            output._record = record  # type: ignore[attr-defined]
            self.records.append(record)

    def _pass_on(self, output: Tensor, sources: list[TensorRecord], place: Location) -> None:
        """Give an output that holds the values of an input, perhaps rounded, its record."""
        if not sources or record_of(output) is not None:
            return
        source = sources[0]
        if source.half or not isinstance(output, Unrounded):
            output._record = source  # type: ignore[attr-defined]
        elif source.place.module != place.module or source.backward != self.in_backward():
            self._measure("to", output, sources, place)
        else:  # what a module computes in FP32 to store it in half is one result
            self._measure(source.op, output, source.sources or sources, source.place)
            if source.op not in MARKED and source in self.records[-16:]:
                self.records.remove(source)

    def _watch_scalars(self, name: str, args: Any, outputs: list[Tensor], place: Location) -> None:
        if not any(isinstance(output, Unrounded) for output in outputs):
            return
        record = record_of(outputs[0])
        overflows = name in FILLS or (record is not None and record.sizes.overflows(self._dtype))
        for value in args:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                if overflows and rounds_to_inf(self._dtype) <= abs(value) < float("inf"):
                    self.note("constant", f"{name.strip('_')} with {value:g}", place)
                elif name in ADDS and 0 < abs(value) <= rounds_to_zero(self._dtype):
                    self.note("eps", f"{name.strip('_')} of {value:g}", place)

    def _watch_divisors(self, name: str, inputs: list[Tensor], place: Location) -> None:
        record = record_of(inputs[-1]) if name in AT_ZERO and inputs else None
        if (
            record is not None
            and record.half
            and not record.backward
            and record.sizes.vanishing(self._dtype)
        ):
            self.note("divisor", f"{name.strip('_')} of {record.sizes.amin:.2g}", place)

    def _excuse_mask(self, name: str, args: Any, kwargs: Any) -> None:
        """Excuse scores of a softmax that become -inf, if each row keeps a finite one."""
        scores = args[0] if name in SOFTMAX else None
        if "scaled_dot_product" in name:
            scores = kwargs.get("attn_mask")
        record, top = record_of(scores), rounds_to_inf(self._dtype)
        if scores is None or record is None:
            return
        if not record.sizes.overflows(self._dtype) or record.sizes.largest >= top:
            return
        if bool((values_of(scores) > -top).any(args[1] if name in SOFTMAX else -1).all()):
            for masked in (record, *record.sources):
                masked.excused |= masked.sizes.largest < top


def record_of(tensor: Tensor | None) -> TensorRecord | None:
    """Return what was measured of a tensor of the run."""
    return getattr(tensor, "_record", None)
