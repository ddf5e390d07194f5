"""The algebra of activations: polynomials of variables and of functions of polynomials.

It proves over the real numbers that an expression is an activation, or an activation times a gate.
tanh(u) becomes 2 * sigmoid(2 * u) - 1, so that all ways to write one formula have one form.
Anything else raises ``Unproved``.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from tritonamp.casts.norm_terms import Unproved, is_number
from tritonamp.kernels.activation import KINDS

CLOSE = 1e-6  # relative: code gives constants with 7 digits or more
MOST = 32  # monomials of a polynomial

Atom = tuple[str, Any]
"""A variable, ("variable", name); or a function of a polynomial, ("sigmoid", polynomial)."""

Monomial = tuple[tuple[Atom, int], ...]
"""Atoms with their exponents, sorted."""


class Polynomial(NamedTuple):
    """A sum of monomials with coefficients that are not 0, sorted."""

    terms: tuple[tuple[Monomial, float], ...]


class Activation(NamedTuple):
    """An activation of a variable, times another one if there is a gate.

    Attributes:
        kind, a, b: arguments of ``kernels.activation``.
        x: name of the variable.
        gate: name of the gate, or None.
    """

    kind: str
    a: float
    b: float
    x: str
    gate: str | None = None


def variable(name: str) -> Polynomial:
    return _atom(("variable", name))


def _atom(atom: Atom) -> Polynomial:
    return Polynomial(((((atom, 1),), 1.0),))


def _polynomial(value: Any) -> Polynomial:
    """Return a number or a polynomial as a polynomial."""
    if is_number(value):
        if not math.isfinite(value):
            raise Unproved(value)
        return _sum([((), float(value))])
    if not isinstance(value, Polynomial):
        raise Unproved(value)
    return value


def _sum(terms: Iterable[tuple[Monomial, float]]) -> Polynomial:
    total: dict[Monomial, float] = {}
    for monomial, coefficient in terms:
        total[monomial] = total.get(monomial, 0.0) + coefficient
    kept = {m: c for m, c in total.items() if c}
    if len(kept) > MOST:
        raise Unproved("too many terms")
    return Polynomial(tuple(sorted(kept.items(), key=repr)))


def add(a: Any, b: Any) -> Any:
    if is_number(a) and is_number(b):
        return a + b
    return _sum([*_polynomial(a).terms, *_polynomial(b).terms])


def multiply(a: Any, b: Any) -> Any:
    if is_number(a) and is_number(b):
        return a * b
    pairs = [(m, n) for m in _polynomial(a).terms for n in _polynomial(b).terms]
    return _sum((_product(m, n), c * d) for (m, c), (n, d) in pairs)


def _product(a: Monomial, b: Monomial) -> Monomial:
    powers = dict(a)
    for atom, exponent in b:
        powers[atom] = powers.get(atom, 0) + exponent
    return tuple(sorted(powers.items(), key=repr))


def subtract(a: Any, b: Any) -> Any:
    return add(a, multiply(-1, b))


def divide(a: Any, b: Any) -> Any:
    """Return a / b, where b is a number or 1 + exp(u)."""
    if is_number(b) and b:
        return a / b if is_number(a) else multiply(a, 1 / b)
    rest = subtract(b, 1)
    if isinstance(rest, Polynomial) and len(rest.terms) == 1:
        ((monomial, coefficient),) = rest.terms
        if coefficient == 1 and len(monomial) == 1:
            ((kind, inner), exponent) = monomial[0]
            if kind == "exp" and exponent == 1:
                return multiply(a, sigmoid(multiply(-1, inner)))
    raise Unproved(b)


def power(a: Any, exponent: Any) -> Any:
    if is_number(a) and is_number(exponent) and a > 0:
        return a**exponent
    if not is_number(exponent) or exponent not in (1, 2, 3, 4):
        raise Unproved(exponent)
    result = a
    for _ in range(int(exponent) - 1):
        result = multiply(result, a)
    return result


def _function(name: str) -> Callable[[Any], Polynomial]:
    def function(u: Any) -> Polynomial:
        return _atom((name, _polynomial(u)))

    return function


sigmoid, erf, relu, exp = map(_function, ("sigmoid", "erf", "relu", "exp"))


def tanh(u: Any) -> Any:
    return subtract(multiply(2, sigmoid(multiply(2, u))), 1)


def silu(u: Any) -> Any:
    return multiply(u, sigmoid(u))


def gelu(u: Any, approximate: Any = "none") -> Any:
    if approximate == "none":
        return multiply(multiply(0.5, u), add(1, erf(multiply(0.5**0.5, u))))
    if approximate != "tanh":
        raise Unproved(approximate)
    _, a, b = KINDS["gelu tanh"]
    return multiply(u, sigmoid(add(multiply(a, u), multiply(b, power(u, 3)))))


def activation(value: Any) -> Activation:
    """Return the activation that a polynomial equals, with or without a gate.

    Raises:
        Unproved: the polynomial is no activation.
    """
    terms = _polynomial(value).terms
    atoms = _atoms(terms)
    outer = {of for (kind, of) in atoms if kind == "variable"}
    functions = [of for (kind, of) in atoms if kind != "variable"]
    inner = {name for of in functions for (_, name) in _atoms(of.terms)}
    if len(inner) != 1:
        raise Unproved(value)
    (x,), gates = inner, outer - inner
    if not gates:
        return _of_one(terms, x)
    if len(gates) > 1:
        raise Unproved(value)
    (gate,) = gates
    ungated = [(_without(monomial, ("variable", gate)), c) for monomial, c in terms]
    return _of_one(_sum(ungated).terms, x)._replace(gate=gate)


def _atoms(terms: Iterable[tuple[Monomial, float]]) -> set[Atom]:
    return {atom for monomial, _ in terms for atom, _ in monomial}


def _without(monomial: Monomial, atom: Atom) -> Monomial:
    """Return a monomial divided by an atom."""
    if (atom, 1) not in monomial:
        raise Unproved(monomial)
    return tuple(part for part in monomial if part[0] != atom)


def _of_one(terms: tuple[tuple[Monomial, float], ...], x: str) -> Activation:
    """Return the activation of ``x`` that a sum of terms equals."""
    functions = _atoms(terms) - {("variable", x)}
    if len(functions) != 1:
        raise Unproved(terms)
    ((kind, inner),) = functions
    found = {
        (powers.get(("variable", x), 0), powers.get((kind, inner), 0)): coefficient
        for powers, coefficient in ((dict(m), c) for m, c in terms)
    }
    if kind == "sigmoid" and _close(found, {(1, 1): 1.0}):
        a, b = _odd(inner, x)
        return Activation("sigmoid", a, b, x)
    argument = _coefficients(inner, x)
    is_half = _close(found, {(1, 0): 0.5, (1, 1): 0.5})
    if kind == "erf" and is_half and _close(argument, {1: 0.5**0.5}):
        return Activation(*KINDS["gelu"], x)
    if kind == "relu" and _close(found, {(0, 2): 1.0}) and argument == {1: 1.0}:
        return Activation(*KINDS["squared relu"], x)
    raise Unproved(terms)


def _coefficients(polynomial: Polynomial, x: str) -> dict[int, float]:
    """Return the coefficient of each power of ``x`` in a polynomial of ``x`` alone."""
    found = {}
    for monomial, coefficient in polynomial.terms:
        if len(monomial) != 1 or monomial[0][0] != ("variable", x):
            raise Unproved(polynomial)
        found[monomial[0][1]] = coefficient
    return found


def _odd(polynomial: Polynomial, x: str) -> tuple[float, float]:
    """Return a and b of the polynomial a * x + b * x**3; of known activations, exact values."""
    found = _coefficients(polynomial, x)
    if not found.keys() <= {1, 3}:
        raise Unproved(polynomial)
    a, b = found.get(1, 0.0), found.get(3, 0.0)
    for _, known_a, known_b in KINDS.values():
        if known_a and _close({1: a, 3: b}, {1: known_a, 3: known_b}):
            return known_a, known_b
    if not 0.01 <= a <= 100 or not 0 <= b <= 100:  # beyond, roundings differ
        raise Unproved(polynomial)
    return a, b


def _close(found: dict[Any, float], expected: dict[Any, float]) -> bool:
    keys = found.keys() | expected.keys()
    return all(math.isclose(found.get(k, 0.0), expected.get(k, 0.0), rel_tol=CLOSE) for k in keys)
