"""The algebra of RMSNorms: terms of an input, its mean square and a weight.

It proves over the real numbers the formula of a norm, for every input. It knows the operations that
can be part of an RMSNorm. Anything else raises ``Unproved``.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

ROUNDING = 1e-12  # relative, of the few float64 factors in a norm
RMS_EPS = torch.finfo(torch.float32).eps  # torch's, where eps is None
GIVEN = object()
"""The dtype of a tensor: that of the input or the weight, or the one that half was cast to."""


class Unproved(Exception):
    """The code may compute something other than an RMSNorm."""


@dataclasses.dataclass(frozen=True)
class Term:
    """A tensor: ``scale * x**x * (mean(x*x) + eps)**mean * (parameter + offset)**weight``.

    Attributes:
        n: number of elements in a row, over which the mean is taken.
        scale: factor from 1e-6 to 1e6 in magnitude, not 0.
        x: exponent of the input: 0, 1 or 2.
        mean: exponent of the mean square, from -0.5 to 1.
        eps: number from 0 to 1 added to the mean square; not 0 where ``mean`` is negative, and 0
            where ``mean`` is 0.
        weight: exponent of the weight: 0 or 1.
        offset: number from -1 to 1 added to the parameter; 0 where ``weight`` is 0.
    """

    n: int
    scale: float = 1.0
    x: int = 0
    mean: float = 0.0
    eps: float = 0.0
    weight: int = 0
    offset: float = 0.0

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape. An ellipsis stands for the dimensions in front of the last one."""
        if self.x:
            return (..., self.n)
        if self.mean or not self.weight:
            raise Unproved("a shape that is not the input's or the weight's")
        return (self.n,)


def _checked(term: Term) -> Term:
    """Return the term, or raise ``Unproved`` out of the bounds, where rounding differs."""
    scale = 1.0 if math.isclose(term.scale, 1, rel_tol=ROUNDING) else term.scale
    eps, offset = term.eps if term.mean else 0.0, term.offset if term.weight else 0.0
    is_bounded = term.x in (0, 1, 2) and -0.5 <= term.mean <= 1 and term.weight in (0, 1)
    is_close = 1e-6 <= abs(scale) <= 1e6 and 0 <= eps <= 1 and abs(offset) <= 1
    if not is_bounded or not is_close or (term.mean < 0 and not eps):
        raise Unproved(term)
    return dataclasses.replace(term, scale=scale, eps=eps, offset=offset)


def is_number(value: Any) -> bool:
    """Return whether a value is a number of Python. Bools and numpy's numbers are not."""
    return type(value) in (int, float)


def _term(value: Any) -> Term:
    if not isinstance(value, Term):
        raise Unproved(value)
    return value


def _square(value: Any) -> Term:
    """Return a term if it is the input's square, neither scaled nor weighted."""
    term = _term(value)
    if term != Term(term.n, x=2):
        raise Unproved(term)
    return term


def multiply(a: Any, b: Any) -> Any:
    if is_number(a) and is_number(b):
        return a * b
    if is_number(a) or is_number(b):
        term, number = (b, a) if is_number(a) else (a, b)
        return _checked(dataclasses.replace(_term(term), scale=_term(term).scale * number))
    a, b = _term(a), _term(b)
    if (a.mean and b.mean and a.eps != b.eps) or (a.weight and b.weight):
        raise Unproved((a, b))
    product = Term(
        n=a.n,
        scale=a.scale * b.scale,
        x=a.x + b.x,
        mean=a.mean + b.mean,
        eps=a.eps or b.eps,
        weight=a.weight + b.weight,
        offset=a.offset or b.offset,
    )
    return _checked(product)


def power(a: Any, exponent: Any) -> Any:
    if is_number(a) and is_number(exponent) and (a > 0 or exponent == 2):
        return a**exponent
    term = _term(a)
    if not is_number(exponent) or term.weight or term.scale <= 0:
        raise Unproved((a, exponent))
    if term.x and exponent != 2:  # the root of a square is no longer the input
        raise Unproved((a, exponent))
    scale, x, mean = term.scale**exponent, term.x * int(exponent), term.mean * exponent
    return _checked(dataclasses.replace(term, scale=scale, x=x, mean=mean))


def divide(a: Any, b: Any) -> Any:
    if is_number(b) and b:
        return a / b if is_number(a) else multiply(a, 1 / b)
    return multiply(a, power(_term(b), -1))


def add(a: Any, b: Any) -> Any:
    """Return ``a + b`` of two numbers, or of a number and a mean square or a weight."""
    if is_number(a) and is_number(b):
        return a + b
    term, number = (b, a) if is_number(a) else (a, b)
    term = _term(term)
    if not is_number(number):
        raise Unproved((a, b))
    if (term.x, term.mean, term.weight) == (0, 1, 0):
        return _checked(dataclasses.replace(term, eps=term.eps + number / term.scale))
    if (term.x, term.mean, term.weight) == (0, 0, 1):
        return _checked(dataclasses.replace(term, offset=term.offset + number / term.scale))
    raise Unproved(term)


def subtract(a: Any, b: Any) -> Any:
    return add(a, multiply(-1, b))


def _same(a: Any, dtype: Any) -> Term:
    """Return a tensor's term after a cast to FP32 or back: the same term."""
    if dtype is not GIVEN and dtype is not torch.float32:
        raise Unproved(dtype)
    return _term(a)


def _mean(a: Any, dim: Any, keepdim: Any = False) -> Term:
    if dim not in (-1, (-1,)) or keepdim is not True:
        raise Unproved(dim)
    return Term(_square(a).n, mean=1.0)


def _sum(a: Any, dim: Any, keepdim: Any = False) -> Term:
    return _checked(dataclasses.replace(_mean(a, dim, keepdim), scale=float(_term(a).n)))


def _norm(a: Any, p: Any = 2, dim: Any = None, keepdim: Any = False) -> Any:
    if p != 2:
        raise Unproved(p)
    return power(_sum(power(a, 2), dim, keepdim), 0.5)


def _rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> Any:
    if input != Term(_term(input).n, x=1) or normalized_shape != (input.n,):
        raise Unproved((input, normalized_shape))
    eps = RMS_EPS if eps is None else eps
    normed = multiply(input, power(add(_mean(power(input, 2), -1, True), eps), -0.5))
    return normed if weight is None else multiply(normed, weight)


def _size(a: Any, dim: Any) -> int:
    if dim != -1:
        raise Unproved(dim)
    n: int = _term(a).shape[-1]
    return n


OPS: dict[str, Callable[..., Any]] = {
    "add": add,
    "div": divide,
    "float": lambda a: _term(a),
    "mean": _mean,
    "mul": multiply,
    "norm": _norm,
    "pow": power,
    "reciprocal": lambda a: power(_term(a), -1),
    "rms_norm": _rms_norm,
    "rsqrt": lambda a: power(_term(a), -0.5),
    "size": _size,
    "sqrt": lambda a: power(_term(a), 0.5),
    "square": lambda a: power(_term(a), 2),
    "sub": subtract,
    "sum": _sum,
    "to": _same,
    "type_as": lambda a, other: _same(a, GIVEN if _term(other) else None),
}
"""Operations that code may call, as methods of tensors or functions of torch, with torch's
arguments.
"""
