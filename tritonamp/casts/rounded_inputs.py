"""Inputs that lose more by their cast to half than an activation would, and are not multiplied.

A half format of p significant bits holds whole numbers up to 2^p; 11 bits in float16, 8 in
bfloat16. From 2^(p - 3) on its steps are a quarter or more: a fraction is lost. To what a matmul or
a convolution reads that is the noise of any activation, as both round what they read. A target, a
box or a coordinate is compared as it is.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tritonamp.ambient import is_traced
from tritonamp.casts.inputs import InputTensor, Signature, input_tensors, wanted_names
from tritonamp.kernels._launch import has_torch_dispatch
from tritonamp.kernels.device import is_capturing
from tritonamp.names import short
from tritonamp.policy import Policy
from tritonamp.readback import Readback
from tritonamp.watched.ops import schema_of

logger = logging.getLogger("tritonamp")

PRODUCTS = """
    mm bmm addmm baddbmm addbmm mv addmv addr dot vdot matmul linear einsum prelu _cudnn_rnn
    mkldnn_rnn_layer _trilinear
""".split()
PRODUCT_PARTS = ("conv", "scaled_dot_product", "lstm", "gru", "rnn", "_addmm", "_mm")
"""Parts of names: ``mkldnn_convolution``, ``_scaled_dot_product_flash_attention``..."""
CARRIES = """
    _to_copy _unsafe_view clone contiguous lift_fresh copy_ cat stack constant_pad_nd index
    index_select mul mul_ div div_ add add_ sub sub_ rsub neg neg_
""".split()
"""What they make of an input is as precise as the input: sizes, order, and normalising."""


class RoundedInput(NamedTuple):
    """An input that the cast to half rounds."""

    argument: str | int  # that it is in, by name or position
    path: str  # to the tensor, "targets[0]['boxes']"
    value: float  # one that is rounded most
    rounded: float  # what it becomes


def worst_rounding(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how far off the value is that loses most, the value, and what becomes of it.

    Float64 of shape (3,) on the tensor's device; how far off is 0.0 where nothing is lost that
    counts. What becomes inf does not count: that is an overflow.

    Args:
        tensor: float32, not empty.
        dtype: a half format.
    """
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    values = tensor.detach().flatten()
    rounded = values.to(dtype).float()
    limit = torch.where(values == values.trunc(), 2.0**bits, 2.0 ** (bits - 3))
    counts = (values.abs() > limit) & rounded.isfinite()
    error = torch.where(counts, (rounded - values).abs(), 0.0)
    worst = error.argmax().view(1)  # an index on the host would wait for the device
    return torch.cat([one.index_select(0, worst) for one in (error, values, rounded)]).double()


def inputs_to_cast(
    args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature, policy: Policy
) -> list[InputTensor]:
    """Return the FP32 tensors among the arguments of a forward that ``policy.cast_inputs`` casts.

    None without an op policy: there half layers need half inputs, whatever they lose.
    """
    wanted = policy.cast_inputs
    if not policy.op_policy or not wanted:
        return []
    names = set() if isinstance(wanted, bool) else {*wanted, *wanted_names(wanted, signature)}
    return [
        found
        for found in input_tensors(args, kwargs, signature)
        if (wanted is True or names & {found.argument, signature.name_of(found.argument)})
        and not has_torch_dispatch(found.tensor)
        and found.tensor.dtype is torch.float32
        and found.tensor.layout is torch.strided
        and found.tensor.numel()
    ]


def roundings(found: Sequence[InputTensor], numbers: Sequence[float]) -> list[RoundedInput]:
    """Return those that lose something; ``numbers`` has the ``worst_rounding`` of each in a row."""
    rows = [numbers[i : i + 3] for i in range(0, len(numbers), 3)]
    return [
        RoundedInput(one.argument, one.path, row[1], row[2])
        for one, row in zip(found, rows, strict=True)
        if row[0]
    ]


def remedy(
    found: Iterable[InputTensor], rounded: Iterable[RoundedInput]
) -> bool | tuple[str | int, ...]:
    """Return the ``cast_inputs`` under which rounded inputs stay FP32, and the others are cast."""
    kept = {one.argument for one in rounded}
    return tuple(dict.fromkeys(one.argument for one in found if one.argument not in kept)) or False


def describe(rounded: Sequence[RoundedInput], dtype: torch.dtype) -> str:
    """Return what becomes of inputs, in words: "targets[0]['boxes'] holds 1280.7, ..."."""
    worst = max(rounded, key=lambda one: abs(one.rounded - one.value))
    more = f" ({len(rounded) - 1} more)" if len(rounded) > 1 else ""
    return (
        f"{worst.path}{more} holds {worst.value:.7g}, which is {worst.rounded:.7g} in "
        f"{short(dtype)}, and no matmul or convolution reads it first"
    )


class Readers(TorchDispatchMode):
    """Notes what reads inputs first: matmuls and convolutions, or others.

    First: as they are, or moved, joined, and normalised by plain arithmetic. What torch.compile has
    made of a part of the model is not seen.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work under this mode: private (torch 2.11 to 2.15)."""
        return True

    def __init__(self, found: Iterable[InputTensor]) -> None:
        super().__init__()
        # with the tensors, so that no other gets the id of one that is gone
        self._carriers = {id(one.tensor): (one.tensor, {one.path}) for one in found}
        self._multiplied: set[str] = set()
        self._others: set[str] = set()

    @property
    def only_others(self) -> set[str]:
        """Paths of the inputs that others read, and no matmul or convolution."""
        return self._others - self._multiplied

    def returned(self, output: Any) -> None:
        """Note that the forward has returned this: the caller reads it."""
        self._others |= self._carried(output)

    def _carried(self, values: Any) -> set[str]:
        found = [self._carriers.get(id(leaf)) for leaf in tree_leaves(values)]
        return {path for carrier in found if carrier is not None for path in carrier[1]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        carried = self._carried((args, kwargs))
        result = func(*args, **kwargs)
        if not carried or not isinstance(func, torch._ops.OpOverload):
            return result
        schema = schema_of(func)
        if schema.aten in PRODUCTS or any(part in schema.aten for part in PRODUCT_PARTS):
            self._multiplied |= carried
        elif schema.aten in CARRIES or schema.is_view:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._carriers[id(leaf)] = leaf, carried
        else:
            self._others |= carried
        return result


class _Waiting(NamedTuple):
    """Inputs whose roundings are on their way from the device."""

    kind: Any  # of the forward that they were given to
    found: list[InputTensor]  # without their values
    readback: Readback


def types_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what tells forwards of different kinds apart, at less than the price of their kind."""
    given = type(model), *map(type, args)
    return (*given, *kwargs, *map(type, kwargs.values())) if kwargs else given


class InputLook:
    """Says in the log, once, which inputs lose by their cast: at the first forward of each kind.

    Of a kind are forwards of one class that are given the same arguments, with gradients. Nothing
    waits for the device: numbers of a GPU are read in a later forward. Only where an input loses
    something is one forward watched, operation by operation.

    Attributes:
        settled: ``types_of`` forwards in which there is nothing to look at any more.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.settled: set[Any] = set()
        self._seen: set[Any] = set()
        self._waiting: list[_Waiting] = []
        self._rounded: dict[Any, list[RoundedInput]] = {}
        self._lock = threading.Lock()  # replicas of DataParallel run in threads of their own

    @contextlib.contextmanager
    def around(
        self, model: nn.Module, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Readers | None]:
        """Look at a forward of ``model`` that runs in the ``with`` block.

        ``args`` and ``kwargs`` are as they were before the cast. Yields what is told the output,
        or None: nobody wants it.
        """
        found, rounded = self._before(model, signature, args, kwargs)
        if not rounded:
            yield None
            return
        with Readers(found) as readers:
            yield readers
        lost = [one for one in rounded if one.path in readers.only_others]
        if lost:
            wanted = remedy(found, lost)
            logger.warning(
                "%s.forward: %s. If it is a target, a box or a coordinate, "
                "tritonamp.enable(..., cast_inputs=%r) leaves it in FP32",
                type(model).__name__,
                describe(lost, self._policy.dtype),
                list(wanted) if isinstance(wanted, tuple) else wanted,
            )

    def _before(
        self, model: nn.Module, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[InputTensor], list[RoundedInput]]:
        """Return the inputs, and those that lose something, where this forward is to be watched."""
        given = [i for i, value in enumerate(args) if value is not None]
        named = [name for name, value in kwargs.items() if value is not None]
        kind = (type(model), *given, *named)
        if kind in self._seen and kind not in self._rounded and not self._waiting:
            self.settled.add(types_of(model, args, kwargs))
            return [], []
        if not torch.is_grad_enabled() or is_traced():
            return [], []
        found = inputs_to_cast(args, kwargs, signature, self._policy)
        if any(is_capturing(one.tensor.device) for one in found):
            return [], []
        with self._lock:
            if kind not in self._seen:
                self._seen.add(kind)
                self._start(kind, found)
            self._read()
            return found, self._rounded.pop(kind, [])

    def _start(self, kind: Any, found: list[InputTensor]) -> None:
        for device in {one.tensor.device for one in found}:
            here = [one for one in found if one.tensor.device == device]
            rows = [worst_rounding(one.tensor, self._policy.dtype) for one in here]
            readback = Readback(torch.cat(rows), most=1)
            readback.start(torch.cat(rows), None)
            named = [one._replace(tensor=rows[0]) for one in here]  # the batch is not kept
            self._waiting.append(_Waiting(kind, named, readback))

    def _read(self) -> None:
        for waiting in list(self._waiting):
            for reading in waiting.readback.ready():
                self._waiting.remove(waiting)
                rounded = roundings(waiting.found, reading.values)
                if rounded:
                    self._rounded.setdefault(waiting.kind, []).extend(rounded)
