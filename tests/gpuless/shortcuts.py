"""Shortcuts for Triton's interpreter, which otherwise makes equal types again for each result."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic

OVERFLOWS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
"""NumPy's functions for operations that the interpreter checks for overflow, by Triton's names."""


def take() -> None:
    """Have the interpreter take the shortcuts."""
    tl.tensor.__init__ = _once_for_each_shape(tl.tensor.__init__)
    tl.block_type.__init__ = _once_for_each_type(tl.block_type.__init__)
    tl.dtype.__eq__ = _by_name(tl.dtype.__eq__)
    semantic: Any = TritonSemantic
    semantic.broadcast_impl_value = _if_shapes_differ(semantic.broadcast_impl_value)
    check = semantic.binary_op_sanitize_overflow_impl
    semantic.binary_op_sanitize_overflow_impl = _if_it_overflows(check)


def _once_for_each_shape(make: Callable[..., None]) -> Any:
    """Let tensors of a shape share all attributes that depend on the shape alone."""
    known: dict[Any, dict[str, Any]] = {}

    def __init__(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        shape = tuple(type.shape) if type.is_block() else ()
        if shape in known:
            self.__dict__.update(known[shape])
            self.handle, self.type, self.dtype = handle, type, type.scalar
            return
        make(self, handle, type)
        own = {"handle", "type", "dtype"}
        known[shape] = {key: value for key, value in vars(self).items() if key not in own}

    return __init__


def _once_for_each_type(make: Callable[..., None]) -> Any:
    """Let types of blocks share all attributes that depend on the shape and on names."""
    known: dict[Any, dict[str, Any]] = {}

    def __init__(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = element_ty.name, sizes
        if key in known:
            self.__dict__.update(known[key])
            self.element_ty = element_ty
            return
        make(self, element_ty, shape)
        known[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}

    return __init__


def _by_name(equal: Callable[..., Any]) -> Any:
    def __eq__(self: tl.dtype, other: Any) -> Any:
        return self.name == other.name if type(other) is tl.dtype else equal(self, other)

    return __eq__


def _if_shapes_differ(broadcast: Callable[..., Any]) -> Any:
    def broadcast_impl_value(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> Any:
        blocks = lhs.type.is_block() and rhs.type.is_block()
        if blocks and lhs.handle.data.shape == rhs.handle.data.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return broadcast_impl_value


def _if_it_overflows(check: Callable[..., None]) -> Any:
    """Run Triton's check, which raises, only where NumPy finds an overflow."""

    def binary_op_sanitize_overflow_impl(
        self: Any, lhs: tl.tensor, rhs: tl.tensor, binary_op: Any
    ) -> None:
        kind = lhs.type.scalar
        if kind.int_bitwidth < 64:
            wide = [x.handle.data.astype(np.int64) for x in (lhs, rhs)]
            result = OVERFLOWS[binary_op.__name__](*wide)
            low, high = kind.get_int_min_value(), kind.get_int_max_value()
            if low <= result.min() and result.max() <= high:
                return
        check(self, lhs, rhs, binary_op)

    return binary_op_sanitize_overflow_impl
