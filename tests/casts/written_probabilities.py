"""Losses that read probabilities, as people write them, and code that does not read them.

Each function takes half logits and has its softmax or sigmoid in this file.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributions as D
import torch.nn.functional as F
from torch.distributions import Categorical

FOUND: dict[str, Callable[..., Any]] = {}
SIGMOIDS: dict[str, Callable[..., Any]] = {}
RETURNED: dict[str, Callable[..., Any]] = {}
LEFT: dict[str, Any] = {}


def reads(function: Any) -> Any:
    """Decorator: the softmax that the function reads is FP32."""
    FOUND[function.__name__] = function
    return function


def reads_sigmoid(function: Any) -> Any:
    """Decorator: the sigmoid that the function reads is FP32."""
    SIGMOIDS[function.__name__] = function
    return function


def returns(function: Any) -> Any:
    """Decorator: the probabilities are FP32 if the function is the forward of a model."""
    RETURNED[function.__name__] = function
    return function


def left(function: Any) -> Any:
    """Decorator: the function stays as it is."""
    LEFT[function.__name__] = function
    return function


@reads
def log_of_softmax(x):
    return torch.log(F.softmax(x, dim=-1))


@reads
def log_of_a_method(x):
    return x.softmax(-1).log()


@reads
def log_of_an_expression(x):
    return torch.log(torch.softmax(x * 1.0, -1))


@reads
def log_of_special(x):
    return torch.special.softmax(x, 1).log()


@reads
def log_of_softmin(x):
    return F.softmin(-x, dim=1).log()


@reads
def log_of_a_name(x):
    p = F.softmax(x, dim=-1)
    return torch.log(p)


@reads
def log2_of_a_name(x):
    p = x.softmax(dim=-1)
    return p.log2()


@reads
def log10_of_a_cast(x):
    p = F.softmax(x, dim=-1, dtype=None)
    return torch.log10(p.float().double())


@reads
def log_of_a_wide_cast(x):
    p = F.softmax(x, dim=-1).to(torch.float32)
    return torch.log(p.to(x.device))


@reads
def log_with_eps(x):
    p = torch.softmax(x, dim=-1)
    return torch.log(p + 1e-8)


@reads
def log_with_a_named_eps(x, eps: float = 1e-8):
    return F.softmax(x, dim=-1).add(eps).log()


@reads
def log_of_a_clamp(x):
    p = torch.softmax(x, dim=-1)
    return p.clamp(min=1e-9).log()


@reads
def log_of_an_index(x):
    p = torch.softmax(x, dim=-1)
    return -torch.log(p[range(len(x)), 3])


@reads
def log_of_a_gather(x):
    p = torch.softmax(x, dim=-1)
    found = p.gather(1, torch.full((len(x), 1), 5, device=x.device)).squeeze(1)
    return -found.log().mean()


@reads
def log_of_a_slice_of_a_list(x):
    parts = torch.softmax(x, dim=-1).chunk(2, dim=-1)
    return torch.cat([torch.log(part) for part in parts], -1)


@reads
def log1p_of_the_others(x):
    """The largest probability is 1 in half."""
    p = torch.softmax(x, dim=-1)
    return torch.log1p(-p[:, 1:])


@reads
def log_of_the_others(x):
    p = torch.softmax(x, dim=-1)
    return torch.log(1 - p[:, 1:])


@reads
def entropy(x):
    p = F.softmax(x, dim=-1)
    return -(p * p.log()).sum(-1)


@reads
def entropy_in_one_row(x):
    return -((p := x.softmax(-1)) * torch.log(p)).sum(-1)


@reads
def entropy_of_xlogy(x):
    p = x.softmax(-1)
    return torch.xlogy(p, p).sum(-1)


@reads
def entropy_of_special(x):
    p = x.softmax(-1)
    return torch.special.entr(p).sum(-1)


@reads
def marginal_entropy(x):
    p = F.softmax(x, dim=-1).mean(0)
    return (p * p.log()).sum()


@reads
def divergence(x):
    p = F.softmax(x, dim=-1)
    other = torch.full_like(x, 0.125, dtype=torch.float32)
    return F.kl_div(p.log(), other, reduction="sum")


@reads
def divergence_of_a_target(x):
    other = torch.full_like(x, 0.125, dtype=torch.float32).log()
    return F.kl_div(other, x.softmax(-1), reduction="none")


@reads
def reciprocal(x):
    p = x.softmax(-1)
    return 1e-9 / p


@reads
def reciprocal_in_a_function(x):
    return 1e-6 * torch.rsqrt(F.softmax(x, dim=-1))


@reads
def a_negative_power(x):
    return 1e-9 * F.softmax(x, dim=-1) ** -1


@reads
def normalised_again(x):
    """The mask keeps the small ones."""
    p = F.softmax(x, dim=-1) * (x < -15)
    return p / (p.sum(-1, keepdim=True) + 1e-13)


@reads
def normalised_in_place(x):
    p = F.softmax(x, dim=-1)
    p = p[:, 5:]
    p = p / 1.0
    q = p.clone()
    q /= p.sum(-1, keepdim=True)
    return q


@reads
def normalised_by_a_method(x):
    p = F.softmax(x, dim=-1)[:, 5:]
    return p.div(p.sum(-1, keepdim=True))


@reads
def of_two_names(x):
    p, scale = F.softmax(x, dim=-1), 2.0
    return scale * torch.log(p)


@reads
def in_a_branch(x):
    p = F.softmax(x, dim=-1)
    if x.dim() == 3:
        p = x
    elif x.dim() == 2:
        p = p + 1e-9
    return p.log()


@reads
def in_a_loop(x):
    p, total = None, 0
    for part in (x, x):
        if p is not None:
            total = total + p.log()
        p = part.softmax(-1)
    return total


@reads
def in_a_block(x):
    with torch.enable_grad():
        p = F.softmax(x, dim=-1)
    try:
        q = p.log()
    finally:
        q = p.log2()
    return q


@reads
def of_a_distribution(x):
    return D.Categorical(F.softmax(x, dim=-1)[:, 1:]).probs


@reads
def of_a_named_distribution(x):
    probs = F.softmax(x, dim=-1)
    return Categorical(probs=probs[:, 5:]).probs


@reads
def of_scaled_scores(x):
    """The steps in front of the softmax are one pass with it."""
    scores = x * 1.0
    scores = scores + torch.zeros_like(x)
    scores = F.softmax(scores, dim=-1)
    return torch.log(scores)


@reads_sigmoid
def by_hand(x):
    p = torch.sigmoid(x)
    t = x > 0
    return -(t * torch.log(p) + ~t * torch.log(1 - p))


@reads_sigmoid
def by_hand_with_eps(x, eps: float = 1e-7):
    p = x.sigmoid()
    return torch.log(1 - p + eps)


@reads_sigmoid
def odds(x):
    p = F.sigmoid(x)
    return p / (1 - p)


@reads_sigmoid
def logit(x):
    return torch.logit(torch.special.expit(x))


@returns
def softmax(x):
    return F.softmax(x, dim=-1)


@returns
def a_name(x):
    p = x.softmax(-1)
    p = p.view(-1, 4)
    return p


@returns
def sigmoid(x):
    """Docstring."""
    return torch.sigmoid(x)


@returns
def a_method_of_an_expression(x):
    return (2 * x).sigmoid().squeeze(-1)


@returns
def pair(x):
    return x, torch.softmax(x, 1)


@returns
def names(x):
    return {"logits": x, "probs": torch.softmax(x, 1)}


class Result(NamedTuple):
    probs: Any
    logits: Any


@dataclasses.dataclass
class Output:
    probs: Any
    logits: Any = None


@returns
def named_tuple(x):
    return Result(F.softmin(x, dim=1), x)


@returns
def dataclass(x):
    return Output(logits=x, probs=torch.softmax(x, 1)[:, :2])


@returns
def the_others(x):
    return 1 - torch.sigmoid(x)


@returns
def one_of_two(x):
    return x.softmax(-1) if x.dim() == 2 else x


@left
def attention(x):
    return F.softmax(x @ x.mT, dim=-1) @ x


@left
def attention_with_dropout(x):
    weights = F.softmax(x @ x.mT / 8, dim=-1)
    weights = F.dropout(weights, 0.1)
    return torch.matmul(weights, x)


@left
def pooled(x):
    weights = torch.softmax(x, dim=0)
    return (weights * x).sum(0)


@left
def overwritten(x):
    p = F.softmax(x, dim=-1)
    out = p @ x.mT
    p = x.exp()
    return out, p.log()


@left
def read_before(x):
    p = x.exp().log()
    p = F.softmax(p, dim=-1)
    return p @ x.mT


@left
def a_logarithm_of_others(x):
    return F.softmax(torch.log(x.abs() + 1), dim=-1) @ x.mT


@left
def log_of_a_product_of_matrices(x):
    return torch.log(F.softmax(x, dim=-1) @ x.mT)


@left
def divided_by_a_number(x):
    p = F.softmax(x, dim=-1) / 2.0
    return p @ x.mT / p.shape[0] / len(p)


@left
def divided_by_others(x):
    return (F.softmax(x, dim=-1) / x.abs().sum()) @ x.mT


@left
def of_a_dtype(x):
    return F.softmax(x, dim=-1, dtype=torch.float32).log()


@left
def of_a_dtype_by_position(x):
    return torch.softmax(x, -1, torch.float32).log()


@left
def cast_to_half(x):
    p = F.softmax(x, dim=-1).to(x.dtype)
    return p.log()


@left
def cast_like_another(x):
    return F.softmax(x, dim=-1).type_as(x).log()


@left
def cast_to_a_half_by_name(x):
    return F.softmax(x, dim=-1).half().log()


@left
def log_softmax(x):
    return F.log_softmax(x, dim=-1)


@left
def of_another_module(x, F: Any = torch.nn.functional):
    return F.softmax(x, dim=-1).argmax(-1)


@left
def a_log_of_another(x, logger: Any = print):
    p = F.softmax(x, dim=-1)
    logger("log", p.mean())
    return p @ x.mT


class Logger:
    def log(self, name, value):
        pass


@left
def a_method_called_log(x):
    p = F.softmax(x, dim=-1)
    Logger().log("mean", p.mean())
    return p @ x.mT


@left
def a_comparison(x):
    p = F.softmax(x, dim=-1)
    return torch.log((p > 0.5).float() + 1)


@left
def an_index_of_others(x):
    p = F.softmax(x, dim=-1)
    return torch.log(x[p.argmax(-1)])


@left
def in_an_inner_function(x):
    p = F.softmax(x, dim=-1)

    def inner():
        return p.log()

    return inner() + 0


@left
def of_an_attribute(x):
    x.p = F.softmax(x, dim=-1)
    return x.p.log()


@left
def log1p(x):
    return torch.log1p(F.softmax(x, dim=-1))


@left
def a_power(x):
    return F.softmax(x, dim=-1) ** 2 + 0 * x.sum()


@left
def starred(x, *args):
    return F.softmax(x, *args).log()


@left
def by_keyword(x):
    return F.softmax(input=x, dim=-1).log()


@left
def gates(x):
    gate = torch.sigmoid(x)
    return gate * x, (1 - gate) * x


@left
def normalised_gates(x):
    gate = torch.sigmoid(x)
    return gate / gate.sum(-1, keepdim=True)


@left
def gated_logarithm(x):
    return torch.log(torch.sigmoid(x) * x.abs() + 1)


@left
def half_of_a_pair(x):
    p, q = F.softmax(x, dim=-1), x.abs()
    return p @ q.log().mT


@left
def through_a_module(x, drop: Any = torch.nn.Dropout(0.0)):  # noqa: B008
    return torch.log(drop(F.softmax(x, dim=-1)))


@left
def through_a_function(x):
    return logarithm(F.softmax(x, dim=-1))


def logarithm(p):
    return torch.log(p)
