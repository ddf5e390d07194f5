"""The results of two runs: the first run keeps them, the second compares its own with them."""

import functools
import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tritonamp.forecast.recording import NORMS
from tritonamp.forecast.running import WatchedCopy
from tritonamp.forecast.ulps import Difference, ulps_between
from tritonamp.forecast.unrounded import values_of, widened
from tritonamp.names import short
from tritonamp.policy import HALF_DTYPES, Policy
from tritonamp.watched.ops import OpCall
from tritonamp.watched.places import Place

CASTS = tuple(f"to {short(dtype)}" for dtype in HALF_DTYPES)
SUMS = ("sum", "mean", "add", "sub", "add_", "sub_")
# a sum this much smaller than its terms is what FP32 leaves of a zero: of terms that were rounded
# before, and of each term that is added (four times half an ulp)
NOISE, NOISE_OF_A_TERM = 2.0**-16, 2.0**-22


class Side(NamedTuple):
    """One of two levels that are compared."""

    name: str  # as the report calls it
    policy: Policy
    scale: float  # the loss scale of its backward, a power of two

    @property
    def is_half(self) -> bool:
        """Whether anything is computed in half."""
        return self.policy.cast_model or self.policy.op_policy


class Key(NamedTuple):
    """Identifies a result in both runs. Among results with one key, the n-th match each other."""

    place: Place
    op: str  # in aten; "to float16", "output" of a module, "input", "parameter", "gradient"
    numel: int  # of the result; a norm may have it in another shape
    backward: bool = False  # it was computed in backward
    parameter: str = ""  # the full name, for a parameter and its gradient


class Kept:
    """A result of the reference, and the same in half if the operation rounds it there."""

    def __init__(self, result: Tensor) -> None:
        self.result, self.rounded = result, result


class Carried(NamedTuple):
    """Facts about a tensor, for the operations that read the tensor."""

    key: Key | None = None  # of the result that it holds
    kept: Kept | None = None  # of the result that it holds, in the run of the reference
    reference: Tensor | None = None  # the counterpart, if there is one
    ulps: float = 0.0  # from the counterpart; without one, those of its sources
    largest: float = 0.0  # magnitude of the counterpart, or of its sources
    noise: bool = False  # it is zero, but for rounding in FP32
    scaled: bool = False  # it carries the loss scale

    @classmethod
    def of(cls, tensor: Tensor) -> "Carried":
        """Return the facts on ``tensor``, or empty ones."""
        return getattr(tensor, "_carried", cls())

    @classmethod
    def of_all(cls, tensors: Sequence[Tensor]) -> "Carried":
        """Return the facts about several operands together."""
        each = [cls.of(tensor) for tensor in tensors] or [cls()]
        return cls(
            ulps=max(known.ulps for known in each),
            largest=max(known.largest for known in each),
            noise=all(known.noise for known in each),
            scaled=any(known.scaled for known in each),
        )

    def put_on(self, tensor: Tensor) -> None:
        """Attach the facts to ``tensor``."""
        tensor._carried = self  # type: ignore[attr-defined]


class Results(WatchedCopy):
    """Sees each floating result of an operation. Every level draws the same random numbers.

    Modules at the paths ``wholes`` show only their output, because each level computes it with
    other operations.
    """

    def __init__(self, side: Side, wholes: Collection[str]) -> None:
        super().__init__(f"the run in {side.name}", side.scale)
        self.wholes = wholes
        self._side = side

    def begin(self, twin: nn.Module) -> None:
        super().begin(twin)
        for path in self.wholes:
            twin.get_submodule(path).register_forward_hook(functools.partial(self._whole, path))

    def in_its_dtype(self, tensor: Tensor) -> Tensor:
        return tensor if self._side.is_half else values_of(tensor)

    def marked(self, op: str, tensor: Tensor, parameter: str = "") -> None:
        if op == "loss gradient":
            Carried(scaled=True).put_on(tensor)
            return
        is_gradient = op == "gradient"
        place = Place(parameter.rpartition(".")[0])
        key = Key(place, op, tensor.numel(), is_gradient, parameter)
        self.seen(key, tensor, [tensor] if is_gradient else ())

    def _whole(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        # private (torch 2.11 to 2.15): operations here are not those of the run
        with _disable_current_modes():
            for result in floating(output):
                self.seen(Key(Place(path), "output", result.numel()), result, floating(args))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = OpCall(func, args, kwargs or {})
        name = call.schema.aten
        place = self.place(name)
        result = _drawn(call) if call.schema.random else call.run()
        if call.allocates:
            return result
        inputs, outputs = floating((args, kwargs)), floating(result)
        moves = bool(inputs) and call.moves
        for output in outputs[:1] if name in NORMS else outputs:
            if moves and output.dtype == inputs[0].dtype:
                same = all(t.is_contiguous() and t.numel() == output.numel() for t in inputs)
                known = Carried.of(inputs[0]) if same else Carried.of_all(inputs)
                known.put_on(output)
            elif place.module in self.wholes:
                Carried.of_all(inputs).put_on(output)
            else:
                op = f"to {short(output.dtype)}" if moves else name
                self.seen(Key(place, op, output.numel(), self.in_backward()), output, inputs)
        return result

    def seen(self, key: Key, output: Tensor, inputs: Sequence[Tensor] = ()) -> None:
        """Record a result, and its operands."""
        raise NotImplementedError


class Reference(Results):
    """Keeps a copy of every result by its key, in the order of computation."""

    def __init__(self, side: Side, wholes: Collection[str]) -> None:
        super().__init__(side, wholes)
        self.kept: dict[Key, deque[Kept]] = defaultdict(deque)

    def seen(self, key: Key, output: Tensor, inputs: Sequence[Tensor] = ()) -> None:
        kept = Kept(output.detach().clone())
        self.kept[key].append(kept)
        before = Carried.of(inputs[0]) if key.op in CASTS else Carried()
        if before.kept is not None and _is_of(key, before.key):
            before.kept.rounded = kept.result
        Carried(key, kept).put_on(output)

    def left(self) -> int:
        """Return the number of results without a counterpart, not counting casts."""
        return sum(len(kept) for key, kept in self.kept.items() if key.op not in CASTS)


class Compared(Results):
    """Compares every result with its counterpart, and frees the counterpart."""

    def __init__(self, side: Side, reference: Reference, dtype: torch.dtype) -> None:
        """Prepare to compare with ``reference``, which has run, in ulps of ``dtype``."""
        super().__init__(side, reference.wholes)
        self.differences: list[Difference] = []  # in the order in which they were computed
        self.unmatched = 0  # how many results have no counterpart
        self._kept, self._dtype = reference.kept, dtype
        self._rescale = side.scale / reference.scale

    def seen(self, key: Key, output: Tensor, inputs: Sequence[Tensor] = ()) -> None:
        known = Carried.of_all(inputs)
        kept = self._kept.get(key)
        reference = _kept_for(self._side, kept.popleft()) if kept else None
        if reference is not None and known.scaled:
            reference = reference * self._rescale
        if key.op.startswith("to ") and reference is None:
            known = Carried.of(inputs[0])
            reference = known.reference if key.op in CASTS else None
        elif reference is None:
            self.unmatched += 1
        if reference is not None:
            known = self._compared(key, output, inputs, reference.reshape(output.shape), known)
        known.put_on(output)

    def _compared(
        self, key: Key, output: Tensor, inputs: Sequence[Tensor], reference: Tensor, known: Carried
    ) -> Carried:
        """Add the difference from ``reference``, and return the facts about ``output``."""
        sizes = reference.abs()[reference.isfinite()]
        largest = float(sizes.max()) if sizes.numel() else math.inf
        noise = known.noise or largest <= _noise(key.op, output, inputs) * min(
            known.largest, torch.finfo(torch.float32).max
        )
        known = known._replace(reference=reference, largest=largest, noise=noise)
        if noise:
            return known
        ulps, worst = ulps_between(output.detach(), reference, self._dtype)
        cast_of = Carried.of(inputs[0]).key if key.op in CASTS else None
        op = cast_of.op if cast_of and math.isinf(ulps) and _is_of(key, cast_of) else key.op
        where = key.place, op, tuple(output.shape), key.backward, key.parameter
        self.differences.append(Difference(*where, ulps, worst, known.ulps))
        return known._replace(ulps=ulps, key=key)


def _is_of(cast: Key, made: Key | None) -> bool:
    """Return whether a cast is of the same line and direction as the result that it casts."""
    return made is not None and (made.place, made.backward) == (cast.place, cast.backward)


def _kept_for(side: Side, kept: Kept) -> Tensor:
    """Return the counterpart for a side: half results are those of an operation for FP32."""
    return kept.result if side.is_half else kept.rounded


def _noise(op: str, output: Tensor, inputs: Sequence[Tensor]) -> float:
    """Return the share of its largest term below which a sum is mere rounding; 0 for other ops."""
    bias_gradient = op == "convolution_backward" and output.dim() == 1
    if op not in SUMS and not bias_gradient:
        return 0.0
    terms = max((tensor.numel() for tensor in inputs), default=0) / output.numel()
    return max(NOISE, terms * NOISE_OF_A_TERM)


def floating(values: Any) -> list[Tensor]:
    """Return the tensors in ``values`` that are floating or complex, dense and not empty."""
    return [
        leaf
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor)
        and (leaf.is_floating_point() or leaf.is_complex())
        and leaf.layout is torch.strided
        and leaf.numel()
    ]


def _drawn(call: OpCall) -> Any:
    """Draw in FP32 and round, because a generator's numbers depend on the dtype."""
    halves = {leaf.dtype for leaf in floating((call.args, call.kwargs))} & set(HALF_DTYPES)
    asked = call.kwargs.get("dtype") or next(iter(halves), None)
    if asked not in HALF_DTYPES:
        return call.run()
    drawn = tree_map_only(
        Tensor,
        lambda t: t.to(asked) if t.dtype is torch.float32 else t,
        call.map_arguments(widened).run(),
    )
    return call.args[0].copy_(drawn) if call.schema.written else drawn
