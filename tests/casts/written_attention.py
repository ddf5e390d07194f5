"""Attention as people write it: functions of scores' operands, with and without one pass.

Each function takes query, key, value and a mask, and has its softmax in this file.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

FOUND: dict[str, Callable[..., Any]] = {}
LEFT: dict[str, Callable[..., Any]] = {}


def found(function: Any) -> Any:
    """Decorator: scores and softmax of the function are one pass."""
    FOUND[function.__name__] = function
    return function


def left(function: Any) -> Any:
    """Decorator: the function stays as it is."""
    LEFT[function.__name__] = function
    return function


@found
def llama(q, k, v, mask, scaling: float = 0.25):
    weights = torch.matmul(q, k.transpose(2, 3)) * scaling
    if mask is not None:
        weights = weights + mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = nn.functional.dropout(weights, p=0.0, training=True)
    return torch.matmul(weights, v)


@found
def albert(q, k, v, mask, scaling: float = 0.25):
    weights = torch.matmul(q, k.transpose(2, 3)) * scaling
    if mask is not None:
        weights = weights + mask
    weights = nn.functional.softmax(weights, dim=-1)
    return torch.matmul(weights, v)


@found
def bert(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + mask
    probs = nn.functional.softmax(scores, dim=-1)
    return torch.matmul(probs, v)


@found
def nano(q, k, v, mask):
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(mask[:, :, : q.size(2), : k.size(2)] < 0, float("-inf"))
    att = F.softmax(att, dim=-1)
    return att @ v


@found
def in_place(q, k, v, mask):
    scores = q @ k.mT
    scores *= 0.25
    scores += mask.to(scores.dtype)
    return scores.softmax(-1) @ v


@found
def filled_in_place(q, k, v, mask):
    scores = torch.matmul(q, k.mT)
    scores.masked_fill_(mask < 0, torch.finfo(scores.dtype).min)
    weights = F.softmax(scores.float(), dim=-1).type_as(scores)
    return weights @ v


@found
def where(q, k, v, mask):
    scores = 0.25 * (q @ k.mT)
    keep = mask.to(q.dtype) == 0
    scores = torch.where(keep, scores, -1e4)
    scores = torch.softmax(scores, -1)
    return scores @ v


@found
def two_masks(q, k, v, mask):
    scores = q @ k.mT
    scores = scores * 0.25
    scores = mask.half().to(scores.dtype) * 0.5 + scores
    scores = scores + mask.to(scores.dtype)
    scores = F.softmax(scores, dim=-1)
    return scores @ v


@found
def with_an_else(q, k, v, mask):
    scores = q @ k.mT
    if mask is None:
        scores = scores / 4
    else:
        size = mask.size(-1)
        scores = scores / 4
        scores = scores + mask[..., :size]
    return F.softmax(scores, dim=-1, dtype=torch.float32).type(q.dtype) @ v


@found
def scale_alone(q, k, v, mask):
    scores = q @ k.mT * 0.25
    scores = F.softmax(scores, dim=-1)
    return scores @ v


@found
def size_by_keyword(q, k, v, mask):
    scores = q @ k.mT * 0.25
    size = scores.size(dim=-1)
    scores = scores.masked_fill(torch.ones(size, size, device=q.device).triu(1) == 1, -1e4)
    return F.softmax(scores, dim=-1).type(torch.HalfTensor if q.is_cpu else q.dtype) @ v.half()


@found
def shapes_of_scores(q, k, v, mask):
    scores = q @ k.mT * 0.25
    if scores.ndim > 3 and scores.dim() > 3 and scores.shape[-1] > 2:
        scores = scores / 2
    scores = scores.masked_fill(
        torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1), -1e4
    )
    return F.softmax(scores, dim=-1) @ v


@found
def a_factor_in_a_tensor(q, k, v, mask):
    scores = q @ k.mT
    scores = scores / 2
    scores = scores * torch.tensor(0.25, device=q.device)
    return F.softmax(scores, dim=-1) @ v


@found
def a_bias_without_dimensions(q, k, v, mask):
    scores = q @ k.mT * 0.25
    scores = scores + torch.tensor(0.3, device=q.device)
    return F.softmax(scores.float(), dim=-1).type_as(scores) @ v


@found
def two_masks_of_one_number(q, k, v, mask):
    """Rows that both fill together; half dtypes round the number."""
    scores = q @ k.mT * 0.25
    scores = scores.masked_fill(torch.ones(5, 5, device=q.device).tril() > 0, -10001.0)
    scores = scores.masked_fill(torch.ones(5, 5, device=q.device).triu() > 0, -10001.0)
    return F.softmax(scores, dim=-1) @ v


# Code in which nothing may be noted.


@left
def scores_are_returned(q, k, v, mask):
    scores = q @ k.mT * 0.25
    probs = F.softmax(scores, dim=-1)
    return probs @ v, scores


@left
def scores_are_printed(q, k, v, mask):
    scores = q @ k.mT * 0.25
    print(scores)
    return F.softmax(scores, dim=-1) @ v


@left
def scores_are_kept(q, k, v, mask):
    scores = q @ k.mT * 0.25
    q.seen = scores
    return F.softmax(scores, dim=-1) @ v


@left
def scores_are_read_by_the_mask(q, k, v, mask):
    scores = q @ k.mT * 0.25
    top = scores.amax(-1, keepdim=True)
    return F.softmax(scores, dim=-1) @ v + 0 * top


@left
def scores_are_clamped(q, k, v, mask):
    scores = q @ k.mT * 0.25
    scores = scores.clamp(-10, 10)
    return F.softmax(scores, dim=-1) @ v


@left
def soft_cap(q, k, v, mask):
    scores = q @ k.mT / 30.0
    scores = 30.0 * torch.erfinv(torch.erf(scores))
    return F.softmax(scores.abs(), dim=-1) @ v


@left
def along_queries(q, k, v, mask):
    scores = q @ k.mT * 0.25
    return F.softmax(scores, dim=-2) @ v


@left
def along_a_variable(q, k, v, mask, dim: int = -1):
    scores = q @ k.mT * 0.25
    return F.softmax(scores, dim=dim) @ v


@left
def log(q, k, v, mask):
    scores = q @ k.mT * 0.25
    return F.log_softmax(scores, dim=-1).exp() @ v


@left
def of_a_sum(q, k, v, mask):
    scores = q @ k.mT * 0.25
    return F.softmax(scores + mask, dim=-1) @ v


@left
def used_twice(q, k, v, mask):
    scores = q @ k.mT * 0.25
    return F.softmax(scores, dim=-1) @ v + F.softmax(scores, dim=-1) @ v


@left
def a_product_of_scores(q, k, v, mask):
    scores = q @ k.mT * 0.25
    scores = scores * scores
    return F.softmax(scores, dim=-1) @ v


@left
def a_mask_of_scores(q, k, v, mask):
    scores = q @ k.mT * 0.25
    scores = scores.masked_fill(scores < 0, float("-inf"))
    return F.softmax(scores, dim=-1).nan_to_num() @ v


@left
def a_call_between(q, k, v, mask, seen: Any = len):
    scores = q @ k.mT * 0.25
    seen([])
    return F.softmax(scores, dim=-1) @ v


@left
def a_mask_that_changes(q, k, v, mask):
    mask = mask.clone()
    scores = q @ k.mT * 0.25
    scores = scores + mask
    mask.zero_()
    return F.softmax(scores, dim=-1) @ v


@left
def an_argument_that_changes(scores, k, v, mask):
    scores *= 0.25
    return F.softmax(scores, dim=-1) @ k


@left
def an_alias_that_changes(q, k, v, mask):
    scores = q
    scores += 1.0
    return F.softmax(scores, dim=-1) @ k + 0 * q


@left
def read_by_an_inner_function(q, k, v, mask):
    scores = q @ k.mT * 0.25

    def inner():
        return scores

    probs = F.softmax(scores, dim=-1)
    return probs @ v + 0 * inner().sum()


@left
def read_after_an_error(q, k, v, mask):
    try:
        scores = q @ k.mT * 0.25
        scores = scores + mask
        scores = F.softmax(scores, dim=-1)
    except RuntimeError:
        return scores
    return scores @ v


@left
def read_in_the_next_round(q, k, v, mask):
    scores = q @ k.mT
    total = 0
    for _ in range(2):
        total = total + scores.sum() * 0
        scores = q @ k.mT * 0.25
        probs = F.softmax(scores, dim=-1)
    return probs @ v + total


@left
def a_loop_of_masks(q, k, v, mask):
    scores = q @ k.mT * 0.25
    for _ in range(2):
        scores = scores + mask
    return F.softmax(scores, dim=-1) @ v


@left
def another_softmax(q, k, v, mask, F: Any = F):
    scores = q @ k.mT * 0.25
    return F.softmax(scores, dim=-1) @ v


@left
def no_steps(q, k, v, mask):
    scores = q @ k.mT
    return F.softmax(scores, dim=-1) @ v


@left
def of_a_slice(q, k, v, mask):
    scores = q @ k.mT * 0.25
    return F.softmax(scores[..., :2], dim=-1) @ v[..., :2, :]


@left
def a_temperature_in_the_call(q, k, v, mask):
    scores = q @ k.mT
    return F.softmax(scores / 4.0, dim=-1) @ v


@left
def in_a_lambda(q, k, v, mask):
    scores = q @ k.mT * 0.25
    return (lambda: F.softmax(scores, dim=-1))() @ v


@left
def a_nonlocal_walrus(q, k, v, mask):
    scores = q @ k.mT * 0.25
    scores = scores + (m := mask)
    return F.softmax(scores, dim=-1) @ v + 0 * m.sum()


@left
def an_index_that_is_written(q, k, v, mask):
    scores = q @ k.mT * 0.25
    scores[..., 0] = 0
    return F.softmax(scores, dim=-1) @ v


@left
def subtracted(q, k, v, mask):
    scores = q @ k.mT
    scores = scores - scores.amax(-1, keepdim=True)
    return F.softmax(scores, dim=-1) @ v


@left
def a_power(q, k, v, mask):
    scores = q @ k.mT
    scores = scores**3
    return F.softmax(scores, dim=-1) @ v


@left
def scores_are_global(q, k, v, mask):
    global seen
    seen = q @ k.mT * 0.25
    return F.softmax(seen, dim=-1) @ v


@left
def scores_are_read_by_name(q, k, v, mask):
    scores = q @ k.mT * 0.25
    probs = F.softmax(scores, dim=-1)
    return probs @ v + 0 * locals()["scores"].sum()


@left
def scores_change_behind(q, k, v, mask):
    scores = q @ k.mT * 0.25
    probs = F.softmax(scores, dim=-1)
    scores += 1
    return probs @ v


@left
def a_mask_that_an_argument_changes(q, k, v, mask):
    keep = mask < 0
    scores = q @ k.mT
    scores = scores.masked_fill(keep, -1e4)
    keep = torch.logical_not(keep, out=keep)
    return F.softmax(scores, dim=-1) @ v


@left
def scores_in_memory_of_others(q, k, v, mask):
    memory = torch.empty(2, 3, 5, 5, dtype=q.dtype)
    scores = torch.matmul(q, k.mT, out=memory)
    scores *= 0.25
    return F.softmax(scores, dim=-1) @ v + 0 * memory.sum()


@left
def probabilities_change_behind_a_cast(q, k, v, mask):
    scores = q @ k.mT * 0.25
    probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    probs = F.dropout(probs, 0.1, training=True, inplace=True)
    return probs @ v


@left
def scores_of_a_tuple(q, k, v, mask):
    """The mask changes in place, too."""
    scores = q @ k.mT * 0.25
    size, scores = 5, mask
    scores *= 2
    scores = F.softmax(scores, dim=-1)
    return scores @ v, size


@left
def into_a_buffer(q, k, v, mask):
    scores = q @ k.mT * 0.25
    probs = torch.empty_like(scores)
    torch.softmax(scores, dim=-1, out=probs)
    scores = torch.softmax(scores, dim=-1, out=probs)
    return scores @ v, probs


@left
def symmetric(q, k, v, mask):
    scores = q @ k.mT
    scores = scores + scores.mT
    return F.softmax(scores, dim=-1) @ v


def doubled(mask):
    return mask.mul_(2).size(-1)


@left
def a_mask_that_a_function_changes(q, k, v, mask):
    scores = q @ k.mT
    scores = scores + mask
    size = doubled(mask)
    scores = F.softmax(scores, dim=-1)
    return scores @ v, size
