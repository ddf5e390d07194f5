"""One op as torch dispatched it: its inputs, written arguments, and results for other inputs."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tritonamp.kernels.device import wide_dtype

TORCH_CLASSES = {Tensor, nn.Parameter, nn.Buffer}
READ_NO_VALUES = frozenset(
    """zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full
    new_empty empty_like""".split()
)
"""Ops that read the shape and the dtype of their input, and no values."""
OVERWRITES = frozenset(
    "copy fill zero normal uniform bernoulli random exponential log_normal".split()
)
"""Ops that ignore the values that they overwrite."""
UNWRITTEN = frozenset(
    "empty new_empty empty_strided new_empty_strided empty_like empty_permuted resize".split()
)
"""Ops that return uninitialized memory."""
ADDS_A_NUMBER = frozenset("add sub rsub clamp clamp_min".split())
"""Ops that may take an eps, as a summand or as a lower limit."""
MOVES = frozenset("_unsafe_view clone _reshape_alias expand_copy lift_fresh _to_copy".split())
"""Ops other than views whose result has the values of the input."""


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor is of torch's own class. One of a subclass may be no memory."""
    return type(tensor) in TORCH_CLASSES


def is_watched(value: Any) -> bool:
    """Return whether a value can hold inf: a floating, dense tensor of torch's class or unread."""
    return (
        isinstance(value, Tensor)
        and (has_memory(value) or hasattr(type(value), "has_no_memory"))
        and value.dtype.is_floating_point
        and value.dtype.itemsize > 1  # few ops know the formats of 8 bits
        and value.layout is torch.strided
        and value.device.type != "meta"
        and value.numel() > 0
        # private (torch 2.11 to 2.15): inside of torch.func's transforms there is no memory to read
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def floats(value: Any) -> list[Tensor]:
    """Return the tensors in ``value`` that can hold inf."""
    return [leaf for leaf in tree_leaves(value) if is_watched(leaf)]


def storage_id(tensor: Tensor) -> int:
    """Return the same number for all views of one memory."""
    # private (torch 2.11 to 2.15): the identity of the storage that views share
    return tensor.untyped_storage()._cdata


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite. Waits for the device."""
    return bool(torch.isfinite(tensor).all())


def nonfinite_samples(tensor: Tensor) -> list[int]:
    """Return the indices along dimension 0 that hold inf or NaN. Waits for the device."""
    bad = ~torch.isfinite(tensor.detach())
    if tensor.dim() > 1:
        bad = bad.flatten(1).any(1)
    found: list[int] = bad.reshape(-1).nonzero().flatten().tolist()
    return found


def amax(tensor: Tensor) -> float:
    """Return the largest finite magnitude, or 0.0. Waits for the device."""
    magnitudes = tensor.detach().abs()
    return float(torch.where(torch.isfinite(magnitudes), magnitudes, 0).amax())


def float64_copy(tensor: Tensor) -> Tensor:
    """Return a copy in float64, on the CPU if the tensor's device has no float64."""
    if _lacks_float64(tensor.device):
        tensor = tensor.cpu()
    return tensor.to(torch.float64, copy=True)


def _lacks_float64(device: torch.device) -> bool:
    return wide_dtype(device) is not torch.float64


class Schema(NamedTuple):
    """An op's declaration in torch."""

    aten: str  # the op's name, "_softmax" or "add_"
    written: frozenset[int | str]  # the arguments that it writes to, by number or name
    overwritten: frozenset[int | str]  # of these, the arguments whose values it ignores
    random: bool  # whether it draws random numbers
    is_view: bool  # whether its results share memory with its inputs

    @property
    def name(self) -> str:
        """The op's name without leading and trailing underscores."""
        return self.aten.strip("_")


@functools.cache
def schema_of(func: Any) -> Schema:
    """Return the schema of an OpOverload."""
    aten = func._schema.name.partition("::")[2]
    written = {
        argument.name if argument.kwarg_only else i
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    overwritten = {k for k in written if isinstance(k, str) or aten.strip("_") in OVERWRITES}
    aliases = [returned.alias_info for returned in func._schema.returns]
    return Schema(
        aten,
        frozenset(written),
        frozenset(overwritten),
        torch.Tag.nondeterministic_seeded in func.tags,
        bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases),
    )


class OpCall(NamedTuple):
    """One call of an op, as torch dispatched it."""

    func: Any  # the OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def schema(self) -> Schema:
        """The op's declaration."""
        return schema_of(self.func)

    @property
    def moves(self) -> bool:
        """Whether the result has the values of the first input, perhaps in another dtype."""
        return self.schema.is_view or self.schema.aten in MOVES

    @property
    def allocates(self) -> bool:
        """Whether the op returns uninitialized memory."""
        return self.schema.name in UNWRITTEN

    def _arguments(self) -> dict[int | str, Any]:
        """Return the arguments by position, or by name if given by name, as in ``Schema``."""
        arguments: dict[int | str, Any] = dict(enumerate(self.args))
        return arguments | self.kwargs

    def run(self) -> Any:
        """Run the op, and return its result."""
        return self.func(*self.args, **self.kwargs)

    def inputs(self) -> list[Tensor]:
        """Return the floating tensors that the op reads."""
        ignored = self.schema.overwritten
        return floats([value for key, value in self._arguments().items() if key not in ignored])

    def written_arguments(self) -> list[Any]:
        """Return the arguments that the op writes to."""
        return [value for key, value in self._arguments().items() if key in self.schema.written]

    def scalars(self) -> tuple[float, ...]:
        """Return the floating Python numbers among the arguments."""
        return tuple(v for v in tree_leaves([self.args, self.kwargs]) if type(v) is float)

    def map_arguments(
        self, change: Callable[[Any], Any], keys: frozenset[int | str] | None = None
    ) -> "OpCall":
        """Return the call with ``change`` applied to every leaf of its arguments.

        ``keys`` limits the change to these arguments, by position or name.
        """

        def changed(key: int | str, value: Any) -> Any:
            return tree_map(change, value) if keys is None or key in keys else value

        args = tuple(changed(i, value) for i, value in enumerate(self.args))
        return OpCall(
            self.func, args, {key: changed(key, value) for key, value in self.kwargs.items()}
        )

    def in_float64(self, widened: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
        """Return the floating results in float64, or none if the op cannot run again.

        On a device without float64 it runs on the CPU, where the results are. ``widened`` returns
        the float64 counterpart of a floating input; None: ``float64_copy``.
        """
        if self.schema.random:
            return []

        def changed(value: Any) -> Any:
            if is_watched(value):
                return (widened or float64_copy)(value)
            if isinstance(value, Tensor):
                value = value.cpu() if _lacks_float64(value.device) else value
                return value.clone() if self.schema.written else value
            if isinstance(value, torch.device):
                return torch.device("cpu") if _lacks_float64(value) else value
            floating = isinstance(value, torch.dtype) and value.is_floating_point
            return torch.float64 if floating else value

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return floats(self.map_arguments(changed).run())
        except (RuntimeError, NotImplementedError):  # no kernel for this dtype, or no memory
            return []

    def exact_magnitude(self, result: Tensor, position: int = 0) -> float | None:
        """Return the largest float64 magnitude among the elements where ``result`` is not finite.

        ``position`` is the number of ``result`` among the op's floating results.
        It is inf or NaN if float64 is not finite either, and None if the op cannot run again.
        """
        exact = self.in_float64()
        ordered = [*exact[position : position + 1], *exact]
        found = next((t for t in ordered if t.shape == result.shape), None)
        if found is None:
            return None
        values = found[~torch.isfinite(result).to(found.device)].abs()
        if bool(torch.isfinite(values).any()):
            return amax(values)
        return math.nan if bool(values.isnan().any()) else math.inf
