"""Logits that are widened, or computed at all, only when an operation reads them.

An ``Unread`` looks like the tensor that a model would return: its shape, its dtype, a node of
autograd. Behind it are half values, or the call of the layer that computes them::

    logits = unread(half, torch.float32)         # FP32 for the caller; no copy yet
    lines = logits.float().view(-1, classes)     # views and casts stay unread
    loss = F.cross_entropy(lines, target)        # reads the half values
    logits.argmax(-1)                            # any other operation reads an FP32 copy

``__torch_function__`` sees the call of ``cross_entropy``. ``__torch_dispatch__`` sees all
operations below autograd, so torch records their graph, and notices writes, as for any tensor. The
gradient of such a loss is half and unread, too, and passes through the views as half.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from tritonamp import functional
from tritonamp.casts.unread_values import LayerCall, Memory, Source
from tritonamp.functional.inputs import is_under_transforms
from tritonamp.kernels._dynamo import between_graphs

aten = torch.ops.aten
_COPIES = (aten.clone.default, aten._to_copy.default)
_MOVES = (aten._unsafe_view.default, aten.slice_backward.default, aten.select_backward.default)
"""Operations whose results hold elements of their input, and zeros, in new memory."""
_OF_MEMORY = {
    *(Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.storage, Tensor.share_memory_),
    *(Tensor.__array__, Tensor.__dlpack__, Tensor.__cuda_array_interface__.__get__),
    *(Tensor.__reduce_ex__, Tensor.__deepcopy__, Tensor.__repr__, Tensor.__format__),
}
"""Functions that ask for memory without an operation."""
_WATCHERS = {Tensor.register_hook, Tensor.retain_grad}
_LINEAR = {"ignore_index", "reduction", "label_smoothing"}
"""Arguments of ``cross_entropy`` that ``linear_cross_entropy`` also takes."""


class Unread(Tensor):
    """A tensor without memory, whose values are computed when an operation reads them.

    Attributes:
        memory: values of this tensor and its views.
        place: meta tensor, whose strides and offset say which values these are.
    """

    memory: Memory
    place: Tensor
    has_no_memory = True  # for our kernels

    @staticmethod
    def __new__(cls, memory: Memory, place: Tensor) -> "Unread":
        source = memory.source
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            place.size(),
            strides=place.stride(),
            storage_offset=place.storage_offset(),
            dtype=memory.dtype,
            device=(source if isinstance(source, Tensor) else source.rows).device,
        )
        made.memory, made.place = memory, place
        return made

    @classmethod
    def of(cls, source: Source, dtype: torch.dtype) -> "Unread":
        """Return unread values of ``source`` in ``dtype``, without a node of autograd."""
        if isinstance(source, Tensor):
            return cls(Memory(source.detach(), dtype), torch.empty_like(source, device="meta"))
        return cls(Memory(source, dtype), torch.empty(source.shape, device="meta"))

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return a storage without values, which all tensors that share memory have."""
        return self.place.untyped_storage()

    def half_values(self) -> Tensor:
        """Return the half values, without a copy and without a graph."""
        return self._placed(self.memory.half())

    def read(self, writes: bool) -> Tensor:
        """Return the values in this tensor's dtype, without a graph; see ``Memory.read``."""
        return self._placed(self.memory.read(writes))

    def _placed(self, values: Tensor) -> Tensor:
        place = self.place
        offset = values.storage_offset() + place.storage_offset()
        return values.as_strided(place.size(), place.stride(), offset)

    @classmethod
    @between_graphs
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.cross_entropy and args and isinstance(args[0], cls):
            loss = args[0]._loss(*args[1:], **kwargs)
            if loss is not None:
                return loss
        if func in _WATCHERS and isinstance(call := args[0].memory.source, LayerCall):
            call.is_watched = True
        if func in _OF_MEMORY:
            args, kwargs = tree_map_only(cls, _Plain.apply, (args, kwargs))
        # private (torch 2.11 to 2.15): ``super`` would make results ``Unread``
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _loss(self, target: Any, **kwargs: Any) -> Tensor | None:
        """Return the cross entropy of the half values; None where it would not be the same."""
        if self.memory.were_written or is_under_transforms():
            return None
        if self._are_all_lines_of_a_call(target, kwargs):
            call: Any = self.memory.source
            given = {name: kwargs[name] for name in _LINEAR if name in kwargs}
            rows = call.rows.reshape(-1, call.rows.shape[-1])
            return functional.linear_cross_entropy(rows, call.weight, target, call.bias, **given)
        return functional.cross_entropy(_Half.apply(self), target, **kwargs)

    def _are_all_lines_of_a_call(self, target: Any, kwargs: Any) -> bool:
        """Return whether ``linear_cross_entropy`` computes the loss, without logits."""
        call = self.memory.source
        if not isinstance(call, LayerCall) or not isinstance(target, Tensor):
            return False
        shape = call.rows.shape[:-1].numel(), len(call.weight)
        others = {name for name, value in kwargs.items() if value is not None} - _LINEAR
        return (
            self.shape == shape
            and self.place.is_contiguous()
            and target.dtype is torch.int64
            and target.shape == shape[:1]
            and not others
            and not call.is_watched
        )

    @classmethod
    @between_graphs
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if isinstance(first, cls):
            found = first._still_unread(func, args[1:], dict(kwargs))
            if found is not None:
                return found
        if torch.Tag.inplace_view in func.tags:
            raise RuntimeError(
                f"{func}: expected an operation that leaves the shape of its tensor alone, because "
                "logits of an enabled model with fuse_loss=True are unread: use the operation that "
                "returns another tensor, or fuse_loss=False"
            )
        writes = func._schema.is_mutable
        read = functools.partial(tree_map_only, cls, lambda unread: unread.read(writes))
        return func(*read(args), **read(kwargs))

    def _still_unread(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the unread result of an operation that computes nothing; None for others."""
        memory, place = self.memory, self.place
        if func is aten.view.dtype:
            return None  # the bits as another dtype
        if func.is_view:
            found = func(place, *args, **kwargs)
            return tree_map_only(Tensor, functools.partial(Unread, memory), found)
        if memory.were_written:
            return None
        if func in _MOVES:
            return Unread.of(func(self.half_values(), *args, **kwargs), memory.dtype)
        if func not in _COPIES:
            return None
        how = {"memory_format": kwargs.pop("memory_format", None)}
        dtype = kwargs.pop("dtype", None) or memory.dtype
        others = any(value and value != getattr(self, name) for name, value in kwargs.items())
        if others or dtype not in (torch.float32, memory.source.dtype):
            return None
        is_alike = aten.clone(place, **how).stride() == place.stride()
        if is_alike and not place.storage_offset():  # also of DDP, which clones all outputs
            return Unread(Memory(memory.source, dtype), place)
        return Unread.of(aten.clone(self.half_values(), **how), dtype)


def unread(half: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``half.to(dtype)``, unread if a loss may train ``half``.

    Args:
        half: any half tensor.
        dtype: FP32 or the tensor's own.
    """
    if not may_be_unread() or not _may_be_unread(half, dtype):
        return half.to(dtype)
    return _OfHalf.apply(half, dtype)


def may_be_unread() -> bool:
    """Return whether the code that runs may get unread tensors: eager code that trains."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    # private (torch 2.11 to 2.15): a dispatch mode, such as a diagnosis, reads all operands
    return not torch._C._len_torch_dispatch_stack() and not is_under_transforms()


def _may_be_unread(half: Tensor, dtype: torch.dtype) -> bool:
    return (
        half.requires_grad
        and not half.is_leaf
        and half.dim() > 1
        and half.layout is torch.strided
        and dtype in (torch.float32, half.dtype)
        and not half.is_meta
        and not isinstance(half, Unread)
        and not is_traceable_wrapper_subclass(half)
        and half.stride() == torch.empty_like(half, device="meta").stride()  # as of a copy
    )


def unread_call(call: LayerCall) -> Tensor:
    """Return the logits of a layer's call, unread and half."""
    return _OfCall.apply(call.rows, call.weight, call.bias, call)


def _in_half(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient in a half dtype, of an unread one the half values."""
    if isinstance(grad, Unread) and not grad.memory.were_written and not grad.requires_grad:
        half = grad.half_values()
        if half.dtype is dtype:
            return half
    return grad.to(dtype)


class _OfHalf(torch.autograd.Function):
    """A half tensor as an ``Unread``."""

    @staticmethod
    def forward(ctx: Any, half: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtype = half.dtype
        return Unread.of(half, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        return None if grads[0] is None else _in_half(grads[0], ctx.dtype), None


class _OfCall(torch.autograd.Function):
    """The logits of a ``LayerCall`` as an ``Unread``, and their gradients if they were read."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, call: LayerCall
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias)
        ctx.set_materialize_grads(False)
        ctx.dtype = call.dtype
        return Unread.of(call, call.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:  # nothing has read them: DDP passes all outputs through one function
            return None, None, None, None
        given = ctx.saved_tensors
        rows, weight, bias = given
        with torch.autocast(rows.device.type, enabled=False):
            head = functional.LinearHead(ctx.dtype, weight, bias)
            grad, lines = _in_half(grads[0], ctx.dtype), head.rows(rows).flatten(0, -2)
            found = head.gradients(grad.flatten(0, -2), lines, ctx.needs_input_grad[:3])
        of_given = (
            None if g is None else g.view(t.shape).to(t.dtype)
            for g, t in zip(found, given, strict=True)
        )
        return *of_given, None


class _Half(torch.autograd.Function):
    """The half values of an ``Unread``, for a loss. Their gradient becomes unread."""

    @staticmethod
    def forward(ctx: Any, logits: Unread) -> Tensor:
        ctx.dtype = logits.dtype
        return logits.half_values()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if torch.is_grad_enabled() or grads[0].dtype is ctx.dtype:  # it may have a graph
            return grads[0].to(ctx.dtype)
        return Unread.of(grads[0], ctx.dtype)


class _Plain(torch.autograd.Function):
    """An ``Unread`` as a plain tensor. Whoever has its memory may write to it."""

    @staticmethod
    def forward(ctx: Any, logits: Unread) -> Tensor:
        return logits.read(writes=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]
