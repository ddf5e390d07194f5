"""One op as torch dispatched it: what it reads and writes, and what other inputs would give."""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

TORCH_CLASSES = {Tensor, nn.Parameter, nn.Buffer}  # tensors of a subclass may be no memory
# ops that ignore what they write over
OVERWRITES = {
    "copy",
    "fill",
    "zero",
    "normal",
    "uniform",
    "bernoulli",
    "random",
    "exponential",
    "log_normal",
}


def is_watched(value: Any) -> bool:
    """Return whether a value can hold inf: a floating, dense tensor of torch's own class."""
    return (
        isinstance(value, Tensor)
        and type(value) in TORCH_CLASSES
        and value.dtype.is_floating_point
        and value.layout is torch.strided
        and value.device.type != "meta"
        and value.numel() > 0
    )


def floats(value: Any) -> list[Tensor]:
    """Return the tensors in ``value`` that can hold inf."""
    return [leaf for leaf in tree_leaves(value) if is_watched(leaf)]


def is_finite(tensor: Tensor) -> bool:
    """Return whether all of a tensor is finite. Waits for the device."""
    return bool(torch.isfinite(tensor).all())


def amax(tensor: Tensor) -> float:
    """Return the largest finite magnitude; 0 where there is none."""
    magnitudes = tensor.detach().abs()
    return float(torch.where(torch.isfinite(magnitudes), magnitudes, 0).amax())


class Signature(NamedTuple):
    """What an op's schema says.

    Attributes:
        name: the op's, without underscores around it.
        written: the arguments that it writes to, by number or name.
        overwritten: those of them whose content it ignores.
        random: whether it draws random numbers.
    """

    name: str
    written: frozenset[int | str]
    overwritten: frozenset[int | str]
    random: bool


@functools.cache
def signature(func: Any) -> Signature:
    """Return which arguments an OpOverload writes and overwrites, and whether it is random."""
    name = func.overloadpacket.__name__.strip("_")
    written = {
        argument.name if argument.kwarg_only else i
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    overwritten = {key for key in written if isinstance(key, str) or name in OVERWRITES}
    return Signature(
        name,
        frozenset(written),
        frozenset(overwritten),
        torch.Tag.nondeterministic_seeded in func.tags,
    )


class Call(NamedTuple):
    """One op as it was dispatched.

    Attributes:
        func: the OpOverload.
        args: its arguments.
        kwargs: its arguments by name.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def signature(self) -> Signature:
        """What the op's schema says."""
        return signature(self.func)

    def pick(self, keys: frozenset[int | str], among: bool = True) -> list[Any]:
        """Return the arguments that are (``among=False``: that are not) among ``keys``."""
        named: dict[int | str, Any] = dict(enumerate(self.args))
        named.update(self.kwargs)
        return [value for key, value in named.items() if (key in keys) is among]

    def inputs(self) -> list[Tensor]:
        """Return the floating tensors that the op reads."""
        return floats(self.pick(self.signature.overwritten, among=False))

    def scalars(self) -> tuple[float, ...]:
        """Return the floating Python numbers among the arguments."""
        return tuple(v for v in tree_leaves([self.args, self.kwargs]) if type(v) is float)

    def map(self, change: Callable[[Any], Any], keys: frozenset[int | str] | None = None) -> "Call":
        """Return the call with ``change`` applied to every leaf of its arguments.

        With ``keys``, only of the arguments among these.
        """

        def changed(key: int | str, value: Any) -> Any:
            return tree_map(change, value) if keys is None or key in keys else value

        args = tuple(changed(i, value) for i, value in enumerate(self.args))
        return Call(
            self.func, args, {key: changed(key, value) for key, value in self.kwargs.items()}
        )

    def again(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Any:
        """Return the result for changed floating tensors, in ``dtype``.

        None where the op cannot be run again.
        """
        if self.signature.random:
            return None

        def changed(value: Any) -> Any:
            if is_watched(value):
                return change(value)
            if isinstance(value, Tensor):
                return value.clone() if self.signature.written else value
            floating = isinstance(value, torch.dtype) and value.is_floating_point
            return dtype if dtype is not None and floating else value

        try:
            call = self.map(changed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return call.func(*call.args, **call.kwargs)
        except (RuntimeError, NotImplementedError):  # no kernel for this dtype, or no memory
            return None

    def in_float64(self) -> list[Tensor]:
        """Return the floating results in float64; none where the op cannot be run again."""
        return floats(self.again(lambda t: t.to(torch.float64, copy=True), torch.float64))

    def exact(self, result: Tensor) -> float | None:
        """Return the largest magnitude in float64 where ``result`` is not finite.

        See ``Event.exact``.
        """
        found = next((t for t in self.in_float64() if t.shape == result.shape), None)
        if found is None:
            return None
        values = found[~torch.isfinite(result)].abs()
        if bool(torch.isfinite(values).any()):
            return amax(values)
        return math.nan if bool(values.isnan().any()) else math.inf
