"""Tensors that report a half dtype and hold FP32 values, and the sizes of these values.

Autocast, the op table and torch's type promotion read the dtype that a tensor reports. So a model
runs with the dtypes of half precision, while nothing is rounded, overflows or vanishes.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tritonamp.policy import HALF_DTYPES

_SOFTMAX = (torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default)
_SAME_DTYPE = """
    mm bmm addmm baddbmm mv addmv dot convolution convolution_backward index_put index_put_
""".split()
"""Ops that refuse mixed dtypes, but only when they compute, not on the meta device."""


class Unrounded(Tensor):
    """A tensor that reports a half dtype; ``values`` are FP32, with its shape and strides."""

    values: Tensor  # type: ignore[assignment]  # for sparse tensors a method
    # private, and how torch's documentation writes it for subclasses that only dispatch (torch 2.11
    # to 2.15); so is _make_wrapper_subclass
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor, dtype: torch.dtype) -> "Unrounded":
        result: Unrounded = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=dtype,
            device=values.device,
        )
        result.values = values
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Unrounded({self.values!r}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return unrounded(func, args, kwargs or {})


def values_of(tensor: Tensor) -> Tensor:
    """Return the FP32 values of a half tensor; other tensors are returned unchanged."""
    if isinstance(tensor, Unrounded):
        return tensor.values
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def stored(tensor: Tensor) -> Tensor:
    """Return the stored values of a tensor, for a sparse one without its zeros."""
    tensor = tensor.detach()
    if tensor.layout is torch.strided:
        return tensor
    return (tensor.coalesce() if tensor.is_sparse else tensor).values()


def unrounded(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    refused: Callable[[str], None] | None = None,
) -> Any:
    """Compute an aten op in FP32 where it would compute in half.

    Results report the dtype that torch would give them. If torch would refuse the dtypes,
    ``refused`` is called with torch's message, and the op is computed nevertheless.
    """
    leaves = tree_flatten((args, kwargs))[0]
    if not any(map(_is_half, leaves)):
        return func(*args, **kwargs)
    # private (torch 2.11 to 2.15): for all device types at once, and without a change of what ops
    # see of autocast
    with torch._C._DisableAutocast():
        inner_args, inner_kwargs = tree_map(widened, (args, kwargs))
        if func in _SOFTMAX:
            inner_args = (*inner_args[:2], False)  # True asks for the FP32 result of half input
        flat, spec = tree_flatten(func(*inner_args, **inner_kwargs))
        if not any(isinstance(value, Tensor) and value.dtype is torch.float32 for value in flat):
            return tree_unflatten(flat, spec)
        dtypes = _dtypes(func, args, kwargs, refused) or [_promoted(leaves)] * len(flat)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        floating = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        name = func._schema.name.removeprefix("aten::")
        if refused is not None and len(floating) > 1 and name in _SAME_DTYPE:
            refused(" and ".join(sorted(map(str, floating))))
    outer = [_outer(value, dtype) for value, dtype in zip(flat, dtypes, strict=True)]
    result = tree_unflatten(outer, spec)
    if any(isinstance(leaf, Unrounded) for leaf in leaves):
        return return_and_correct_aliasing(func, args, kwargs, result)
    return result


def _is_half(leaf: Any) -> bool:
    dtype = leaf.dtype if isinstance(leaf, Tensor) else leaf
    return isinstance(dtype, torch.dtype) and dtype in HALF_DTYPES


def widened(leaf: Any) -> Any:
    """Return the FP32 counterpart of an op's argument: a half tensor's values, or float32."""
    if isinstance(leaf, torch.dtype):
        return torch.float32 if leaf in HALF_DTYPES else leaf
    return values_of(leaf) if isinstance(leaf, Tensor) else leaf


def _outer(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor) and value.dtype is torch.float32 and dtype in HALF_DTYPES:
        return Unrounded(value, dtype)
    return value


def _dtypes(
    func: Any, args: Any, kwargs: Any, refused: Callable[[str], None] | None
) -> list[torch.dtype | None] | None:
    """Return the dtypes that torch gives the results; None if the op fails on the meta device."""
    try:
        results = tree_flatten(func(*tree_map(_shape, args), **tree_map(_shape, kwargs)))[0]
    except NotImplementedError:
        return None
    except RuntimeError as error:
        if refused is not None and ("dtype" in str(error) or "scalar type" in str(error)):
            refused(str(error).splitlines()[0])
        return None
    return [result.dtype if isinstance(result, Tensor) else None for result in results]


def _shape(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if isinstance(leaf, Tensor):
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


def _promoted(leaves: list[Any]) -> torch.dtype:
    """Return the widest floating dtype; 0-d tensors count only if there are no others."""
    floating = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    dtypes = [leaf.dtype for leaf in floating if leaf.dim()] or [leaf.dtype for leaf in floating]
    asked = [leaf for leaf in leaves if isinstance(leaf, torch.dtype)][:1]
    return functools.reduce(torch.promote_types, dtypes or asked)


class Magnitudes(NamedTuple):
    """The sizes of a tensor's values.

    Attributes:
        amax: largest magnitude among the finite values.
        amin: smallest nonzero magnitude; 0.0 if all values are zero.
        largest: the largest finite value with its sign.
        nans: how many values are NaN.
        infs: how many values are inf.
        minus_infs: how many values are -inf.
        exponents: number of finite nonzero values x with 2^e <= |x| < 2^(e+1), by e.
    """

    amax: float
    amin: float
    largest: float
    nans: int
    infs: int
    minus_infs: int
    exponents: Counter[int]

    @property
    def broken(self) -> bool:
        """Whether a value is inf, -inf or NaN."""
        return bool(self.nans or self.infs or self.minus_infs)

    def overflows(self, dtype: torch.dtype) -> bool:
        """Return whether a value becomes inf in ``dtype``."""
        return self.amax >= rounds_to_inf(dtype)


def vanishing(exponents: Counter[int], dtype: torch.dtype, scale: float = 1.0) -> float:
    """Return the share of nonzero values that become zero in ``dtype`` times ``scale``.

    ``scale`` is a power of two.
    """
    return _share_below(exponents, rounds_to_zero(dtype) / scale)


def subnormal(exponents: Counter[int], dtype: torch.dtype) -> float:
    """Return the share of nonzero values that become subnormal in ``dtype``."""
    below_normal = _share_below(exponents, torch.finfo(dtype).smallest_normal)
    return below_normal - vanishing(exponents, dtype)


def _share_below(exponents: Counter[int], power: float) -> float:
    limit = math.log2(power)
    return sum(n for e, n in exponents.items() if e < limit) / max(exponents.total(), 1)


def rounds_to_inf(dtype: torch.dtype) -> float:
    """Return the smallest magnitude that rounds to inf, half an ulp above the largest number."""
    info = torch.finfo(dtype)
    return 2.0 ** math.ceil(math.log2(info.max)) * (1 - info.eps / 4)


def rounds_to_zero(dtype: torch.dtype) -> float:
    """Return the largest magnitude that rounds to zero, half the smallest subnormal."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps / 2


_INF_BITS = 0x7F800000


def magnitudes(values: Tensor) -> Magnitudes:
    """Measure a float32 tensor of at least one element. Waits for the device."""
    bits = values.detach().contiguous().view(torch.int32).flatten() & 0x7FFFFFFF
    sizes = torch.where(bits < _INF_BITS, bits, 0)
    counts = torch.bincount(sizes >> 23, minlength=255).tolist()
    counts[0] -= int((sizes == 0).sum())
    smallest = (
        torch.where(sizes == 0, _INF_BITS - 1, sizes).amin()
        if any(counts)
        else torch.zeros_like(sizes[0])
    )
    amax, amin = torch.stack([sizes.amax(), smallest]).view(torch.float32).tolist()
    largest = torch.where(values.isfinite(), values, -amax).amax().item()
    special = torch.stack([values.isnan().sum(), values.isposinf().sum(), values.isneginf().sum()])
    exponents = Counter({i - 127: n for i, n in enumerate(counts) if n})
    nans, infs, minus_infs = special.tolist()
    return Magnitudes(amax, amin, largest, nans, infs, minus_infs, exponents)
