"""Activations as people write them, and code that is almost one.

Each function takes tensors and has its activation in this file, because recognition reads source.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import gelu as gelu_of_torch
from torch.nn.functional import silu

CONSTANT = 0.044715
EXACT: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {}
"""Function and its formula for float64, by name of the function."""
LEFT: dict[str, Callable[..., Any]] = {}
"""Functions without an activation that could be one op."""


def gelu64(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def swish64(x: Tensor, slope: float = 1.0) -> Tensor:
    return x * torch.sigmoid(slope * x)


def computes(formula: Callable[..., Tensor]) -> Callable[[Any], Any]:
    """Decorator: the function computes ``formula``, and is recognised."""

    def register(function: Any) -> Any:
        EXACT[function.__name__] = function, formula
        return function

    return register


def left(function: Any) -> Any:
    """Decorator: nothing in the function is one op."""
    LEFT[function.__name__] = function
    return function


@computes(gelu64)
def with_pow(x):
    cubic = x + 0.044715 * torch.pow(x, 3.0)
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubic))


@computes(gelu64)
def with_products(x):
    return 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))


@computes(gelu64)
def with_operator(x):
    return x * 0.5 * ((0.79788456 * (x + 0.044715 * x**3)).tanh() + 1)


@computes(gelu64)
def in_steps(x):
    c = math.sqrt(2 / math.pi)
    inner = c * (x + 0.044715 * x**3)
    cdf = 0.5 * (1.0 + torch.tanh(inner))
    return x * cdf


@computes(gelu64)
def in_steps_of_one_name(x):
    y = x * x * x
    y = 0.7978845608 * (x + 0.044715 * y)
    y = 0.5 * x * (1 + torch.tanh(y))
    return y


@computes(gelu64)
def by_sigmoid(x):
    return x * torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x.pow(3)))


@computes(lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.05 * x**3))))
def of_other_constants(x):
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.05 * x**3)))


@computes(lambda x: F.gelu(x))
def by_erf(x):
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@computes(lambda x: F.gelu(x))
def by_erf_in_steps(x):
    cdf = (1 + (x * 0.7071067811865476).erf()) / 2
    return cdf * x


@computes(functools.partial(swish64, slope=1.702))
def quick(x):
    return x * torch.sigmoid(1.702 * x)


@computes(functools.partial(swish64, slope=0.5))
def slow_swish(x):
    return x * torch.sigmoid(x / 2)


@computes(swish64)
def swish(x):
    return x.sigmoid() * x


@computes(swish64)
def swish_by_exp(x):
    return x / (1 + torch.exp(-x))


@computes(functools.partial(swish64, slope=2.5))
def scaled_silu(x):
    return F.silu(2.5 * x) / 2.5


@computes(lambda x: torch.relu(x) ** 2)
def squared_relu(x):
    positive = F.relu(x)
    squared = torch.square(positive)
    return squared


@computes(lambda x: torch.relu(x) ** 2)
def squared_relu_at_once(x):
    return torch.relu(x).pow(2)


@computes(lambda x: torch.relu(x) ** 2)
def relu_times_relu(x):
    return F.relu(x) * x.relu()


@computes(lambda a, b: F.silu(a) * b)
def swiglu(a, b):
    return F.silu(a) * b


@computes(lambda a, b: F.silu(b) * a)
def swiglu_from_the_right(a, b):
    return a * silu(b)


@computes(lambda x, _: F.silu(x[:, :4]) * x[:, 4:])
def swiglu_of_halves(x, _):
    a, b = x.chunk(2, -1)
    return torch.mul(nn.functional.silu(a), b)


@computes(lambda x, _: F.silu(x[:, :4]) * x[:, 4:])
def swiglu_of_slices(x, _):
    return F.silu(x[:, :4]) * x[:, 4:]


@computes(lambda a, b: F.silu(a) * b * b)
def swiglu_times_more(a, b):
    return F.silu(a) * b * b


@computes(lambda a, b: F.gelu(a) * b)
def geglu(a, b):
    return gelu_of_torch(a) * b


@computes(lambda a, b: b * gelu64(a))
def geglu_tanh(a, b):
    return b * F.gelu(a, approximate="tanh")


@computes(lambda a, b: torch.relu(a) ** 2 * b)
def squared_reglu(a, b):
    return F.relu(a).square() * b


@computes(lambda a, b: a * torch.sigmoid(a) * b)
def gated_by_hand(a, b):
    gate = torch.sigmoid(a)
    product = a * gate
    return product * b


@computes(lambda x: gelu64(x.neg()) + 1)
def inside_of_more(x):
    y = x.neg()
    for _ in range(1):
        if y is not None:
            z = [1 + 0.5 * y * (1 + torch.tanh(0.7978845608 * (y + 0.044715 * y * y * y)))]
    return z[0]


@computes(lambda x: gelu64(gelu64(x)))
def twice(x):
    for _ in range(2):
        x = 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return x


# Code in which nothing may be replaced.


@left
def a_factor_too_much(x):
    return 1.001 * 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


@left
def another_sign(x):
    return 0.5 * x * (1.0 - torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


@left
def a_square(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**2)))


@left
def a_shift(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.1)))


@left
def without_x(x):
    return 0.5 * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


@left
def another_input_outside(x, y):
    return 0.5 * y * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))


@left
def another_input_inside(x, y):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * y**3)))


@left
def detached(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)).detach())


@left
def by_numpy(x):
    return 0.5 * x * (1.0 + torch.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@left
def of_a_global(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + CONSTANT * x**3)))


@left
def of_an_argument(x, c):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + c * x**3)))


@left
def in_place(x):
    return 0.5 * x * (1.0 + (0.7978845608 * (x + 0.044715 * x**3)).tanh_())


@left
def relu_in_place(x):
    return F.relu(x, inplace=True) ** 2


@left
def a_step_is_read_again(x):
    cdf = 0.5 * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))
    y = x * cdf
    return y, cdf


@left
def x_changes_between(x):
    cdf = 0.5 * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))
    x = x.clamp(-1, 1)
    return x * cdf


@left
def x_changes_in_place_between(x):
    cdf = 0.5 * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))
    x.add_(1)
    return x * cdf


@left
def two_calls(x, f):
    return 0.5 * f(x) * (1.0 + torch.tanh(0.7978845608 * (f(x) + 0.044715 * f(x) ** 3)))


@left
def a_call_between(x, f):
    cdf = 0.5 * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))
    f(x)
    return x * cdf


@left
def erf_of_another_scale(x):
    return x * 0.5 * (1.0 + torch.erf(x / 1.5))


@left
def half_erf(x):
    return x * (1.0 + torch.erf(x / math.sqrt(2.0)))


@left
def sigmoid_of_the_negative(x):
    return x * torch.sigmoid(-x)


@left
def sigmoid_squared(x):
    return x * torch.sigmoid(x) ** 2


@left
def x_squared_sigmoid(x):
    return x * x * torch.sigmoid(x)


@left
def mish(x):
    return x * torch.tanh(F.softplus(x))


@left
def silu_plus(x, y):
    return F.silu(x) + y


@left
def silu_times_a_number(x):
    return F.silu(x) * 2.0


@left
def silu_times_itself(x):
    return F.silu(x) * x


@left
def silu_times_silu(x, y):
    return F.silu(x) * F.silu(y)


@left
def three_factors(x, y, z):
    return y * z * F.silu(x)


@left
def relu_cubed(x):
    return F.relu(x) ** 3


@left
def relu_of_the_negative_squared(x):
    return F.relu(-x) ** 2


@left
def relu_times_x(x, y):
    return F.relu(x) * F.relu(y)


@left
def one_op_already(x):
    return F.gelu(F.silu(x), approximate="tanh")


@left
def in_a_lambda(x):
    return (lambda y: y * torch.sigmoid(y))(x)


@left
def divided(x):
    return x / (2 + torch.exp(-x))


@left
def of_another_tanh(x):
    return 0.5 * x * (1.0 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def silu_of_an_argument(silu: Any) -> Callable[..., Tensor]:
    """Return a function whose silu is another one than that of this file."""

    def shadowed(x, y):
        return silu(x) * y + torch.exp(y)

    return shadowed


LEFT["silu_of_an_argument"] = silu_of_an_argument(torch.cos)


@left
def silu_of_a_cell(x, y):
    silu = torch.cos
    return silu(x) * y + torch.exp(y), lambda: silu


@left
def a_name_like_ours(x, y):
    _0 = x.neg()
    return _0 * torch.sigmoid(torch.cos(_0))


@left
def a_number_of_another_module(x):
    return x * torch.sigmoid(np.e * x)


class Chosen:
    """Functions that may be replaced by others."""

    silu = F.silu
    sigmoid = torch.sigmoid


@left
def functions_of_a_class(x, y):
    return Chosen.silu(x) * y, x * Chosen.sigmoid(x)


@left
def of_an_unknown_form(x, y, form):
    return F.gelu(x, approximate=form) * y


@left
def the_gate_changes_x(x):
    return F.silu(x) * x.add_(1)


@left
def the_gate_changes_x_by_a_keyword(x):
    return F.silu(x) * F.relu(x, inplace=True)


@left
def a_step_is_read_by_name(x):
    gate = torch.sigmoid(x)
    y = x * gate
    return y, locals()


@left
def a_step_is_read_by_vars(x):
    gate = torch.sigmoid(x)
    y = x * gate
    return y, vars()


@left
def a_step_is_read_by_eval(x):
    gate = torch.sigmoid(x)
    y = x * gate
    return y, eval("gate")


@left
def a_step_is_read_by_exec(x):
    gate = torch.sigmoid(x)
    y = x * gate
    exec("gate.sum()")
    return y


@left
def over_one_plus_relu(x):
    return x / (1 + torch.relu(-x))


@left
def over_one_plus_a_square(x):
    return x / (1 + torch.exp(-x) ** 2)


@left
def of_another_power(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3.5)))


@left
def times_a_power(x):
    return x**1.5 * torch.sigmoid(x)


@left
def of_a_cube_alone(x):
    return x * torch.sigmoid(x**3)


@left
def of_a_tiny_slope(x):
    return x * torch.sigmoid(0.001 * x)


@left
def of_a_huge_slope(x):
    return x * torch.sigmoid(1000 * x)


@left
def of_a_huge_cube(x):
    return x * torch.sigmoid(x + 1000 * x**3)


@left
def a_step_changes_behind(x):
    gate = torch.sigmoid(x)
    y = x * gate
    gate += 1
    return y


@left
def a_gate_of_another_name_later(x, y, f):
    return y * F.silu(f(y := x)), y


@left
def x_changes_behind(x):
    y = F.relu(x) ** 2
    x += y
    return x


@left
def x_changes_behind_steps(x):
    h = F.relu(x)
    y = h * h
    x += y
    return x
