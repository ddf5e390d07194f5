"""torch's attention functions and softmax, replaced while attention logits are watched.

Names that other files have imported (``from torch.nn.functional import
scaled_dot_product_attention``, ``flex = torch.compile(flex_attention)``) are replaced, too.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

# private: all that torch._dynamo.eval_frame.skip_code needs in torch 2.11 to 2.15
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from tritonamp.functional import masked_rows
from tritonamp.functional.inputs import is_under_transforms
from tritonamp.kernels._dynamo import never_alone

_FLEX = "torch.nn.attention.flex_attention"
_MASKED = -9000.0  # scores below it are masked, as by adding -1e4


class Reader(Protocol):
    """An object that reads attention logits."""

    def is_called(self) -> bool:
        """Return whether a call that is made now belongs to one of its modules."""

    def read_bound(self, query: Tensor, key: Tensor, scale: float) -> None:
        """Read a bound of the scaled products of queries and keys, [..., heads, length, width]."""

    def read_scores(self, scores: Tensor) -> None:
        """Read scores of the shape [..., heads, queries, keys]; 0 where a score is masked."""


class _Calls:
    """The readers of this process, and the functions that are replaced for them."""

    def __init__(self) -> None:
        self.readers: list[Reader] = []
        self._undo = contextlib.ExitStack()

    def add(self, reader: Reader) -> None:
        """Have a reader see all calls, until ``remove``."""
        self.readers.append(reader)
        if len(self.readers) == 1:
            for owner, name, function in list(_places()):
                if name in vars(owner):
                    self._undo.callback(setattr, owner, name, vars(owner)[name])
                else:  # it is inherited
                    self._undo.callback(delattr, owner, name)
                setattr(owner, name, function)

    def remove(self, reader: Reader) -> None:
        """Undo ``add``. The last call restores torch's functions."""
        if reader in self.readers:
            self.readers.remove(reader)
            if not self.readers:
                self._undo.close()


calls = _Calls()


def _places() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Yield owner, name and wrapper of each function."""
    yield torch.Tensor, "softmax", _of_softmax(torch.Tensor.softmax)
    wraps: dict[int, Callable[..., Any]] = {
        id(torch.nn.functional.scaled_dot_product_attention): _of_attention,
        id(torch.softmax): _of_softmax,
        id(masked_rows.softmax_of_scores): _of_scores,
    }
    if _FLEX in sys.modules:  # to import it takes long
        wraps[id(sys.modules[_FLEX].flex_attention)] = _of_flex_attention
    owners = "torch", "torch.nn.functional", _FLEX
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "torch" and module_name not in owners:
            continue
        for name, value in list(vars(module).items() if hasattr(module, "__dict__") else ()):
            known = id(value)
            if isinstance(value, FunctionType):  # it may be a result of torch.compile
                known = id(vars(value).get("_torchdynamo_orig_callable", value))
            if known in wraps:
                yield module, name, wraps[known](value)


@never_alone
def _readers() -> list[Reader]:
    """Return the readers of a call that is made now."""
    if not calls.readers or not torch.is_grad_enabled() or is_under_transforms():
        return []
    return [reader for reader in calls.readers if reader.is_called()]


def _of_attention(function: Callable[..., Any]) -> Callable[..., Any]:
    @_instead_of(function)
    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        for reader in _readers():
            _read_bound(reader, query, key, kwargs.get("scale"))
        return function(query, key, value, *args, **kwargs)

    return _around(attention)


def _of_flex_attention(function: Callable[..., Any]) -> Callable[..., Any]:
    @_instead_of(function)
    def flex_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        for reader in _readers():
            # after score_mod and block_mask
            _read_bound(reader, query, key, args[2] if len(args) > 2 else kwargs.get("scale"))
        return function(query, key, value, *args, **kwargs)

    return _around(flex_attention)


def _instead_of(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a decorator that makes a wrapper look like ``function``."""

    def decorate(wrapper: Any) -> Any:
        functools.update_wrapper(wrapper, function)
        wrapper._tritonamp_original = function  # for models that are enabled meanwhile
        return wrapper

    return decorate


def _around(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``torch.compile(wrapper)`` compile the function inside, and not the reading.

    A graph of both would depend on the module, and would be compiled again for each one.
    """
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)
    set_code_exec_strategy(wrapper.__code__, skip)
    return wrapper


@never_alone
def _read_bound(reader: Reader, query: Any, key: Any, scale: float | None) -> None:
    if isinstance(query, Tensor) and isinstance(key, Tensor):  # else a proxy of torch.fx
        scale = query.shape[-1] ** -0.5 if scale is None else abs(scale)
        reader.read_bound(query, key, scale)


def _of_softmax(function: Callable[..., Any]) -> Callable[..., Any]:
    @_instead_of(function)
    def softmax(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            dim = args[0] if args else kwargs.get("dim")
            for reader in _readers():
                # [batch, heads, queries, keys]
                if isinstance(input, Tensor) and input.dim() == 4 and dim in (-1, 3):
                    reader.read_scores(unmasked(input))
        return function(input, *args, **kwargs)

    return softmax


def _of_scores(function: Callable[..., Any]) -> Callable[..., Any]:
    @_instead_of(function)
    def softmax_of_scores(
        x: Any, mask: Any, scale: Any, causal: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        for reader in _readers():
            if isinstance(x, Tensor) and x.dim() == 4:
                keep = args[1] if len(args) > 1 else kwargs.get("keep", True)
                reader.read_scores(unmasked(x, mask, scale, causal, keep))
        return function(x, mask, scale, causal, *args, **kwargs)

    return softmax_of_scores


def unmasked(
    x: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    causal: bool = False,
    keep: bool = True,
) -> Tensor:
    """Return scores, and 0 where they are masked. Arguments as for ``softmax_of_scores``."""
    x = x.detach()
    x = x if scale == 1.0 else x.float() * scale
    if mask is not None:
        mask = mask.detach()
        hides = mask.dtype is torch.bool
        x = x.masked_fill(~mask if keep else mask, 0.0) if hides else x.float() + mask
    if causal:
        x = x.tril(x.shape[-1] - x.shape[-2])
    return x.masked_fill(x <= _MASKED, 0.0)
