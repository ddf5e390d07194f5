"""Errors of what peers compute, against FP64, at two loss scales."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpuless import tensors
from peer_cases import CHECKED, GRADIENT, HALF, Question
from peer_machine import CHECKING, CUDA, Machine
from torch import Tensor

SCALES = 1.0, 2.0**16

Row = dict[str, Any]
Inputs = list[Tensor | None]


def given(question: Question, elements: int, half_weights: bool) -> Inputs:
    """Return the inputs on the CPU, as the peer takes them."""
    torch.manual_seed(0)
    return [
        x.to(HALF) if half_weights and x is not None and x.is_floating_point() else x
        for x in question.inputs(elements)
    ]


def leaves(found: Inputs, move: Callable[[Tensor], Tensor]) -> Inputs:
    return [None if x is None else move(x).requires_grad_(x.is_floating_point()) for x in found]


def wanted(inputs: Inputs) -> list[Tensor]:
    return [x for x in inputs if x is not None and x.requires_grad]


def results_of(forward: Any, inputs: Inputs, loss: bool) -> list[Tensor]:
    """Return what a peer computes; a loss in FP32, as what is scaled is."""
    found = listed(forward(tuple(inputs)))
    return [found[0].float()] if loss else found


def listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple | list) else [results]


def gradients(results: list[Tensor], scale: float, loss: bool) -> list[Tensor]:
    """Return what comes from above, in the dtypes of results: the same for everybody."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for y in results:
        above = torch.ones(()) if loss else torch.randn(y.shape, generator=generator) * GRADIENT
        found.append(tensors.wrap((above * scale).to(y.dtype)))  # no copy that would be counted
    return found


def checked(question: Question, peer: str, machine: Machine) -> Row:
    """Hold results and gradients of all programs against FP64."""
    make, half = question.peers[peer]
    host, machine.emulator.options = given(question, CHECKED, half), CHECKING
    exact_inputs = leaves(host, lambda x: x.double() if x.is_floating_point() else x)
    exact = listed(question.exact(tuple(exact_inputs)))
    rows = wanted(exact_inputs)[0].shape[0]
    row: Row = {"case": question.name, "peer": peer, "rows": rows}
    for scale in SCALES:
        inputs = leaves(host, lambda x: x.to(CUDA))
        results = results_of(make(CUDA), inputs, question.loss)
        row["forward"] = max(
            largest_error(y.detach().cpu(), z.detach()) for y, z in zip(results, exact, strict=True)
        )
        if question.op == "sum":
            continue
        above = gradients(results, scale, question.loss)
        same = [g.cpu().double() for g in above]  # before somebody writes into them
        should = torch.autograd.grad(exact, wanted(exact_inputs), same, retain_graph=True)
        got = [g.cpu() for g in torch.autograd.grad(results, wanted(inputs), above)]
        rounded = [s.to(g.dtype) for g, s in zip(got, should, strict=True)]
        row[f"scale {scale:g}"] = {
            "not_finite": 1 - share(got, torch.isfinite),
            "zeroed": zeroed(got, should),
            "zeroed_by_rounding": zeroed(rounded, should),
            "error": max(map(largest_error, got, should)),
            "error_by_rounding": max(map(largest_error, rounded, should)),
        }
    machine.clear()
    return row


def share(found: Sequence[Tensor], test: Callable[[Tensor], Tensor]) -> float:
    return sum(int(test(x).sum()) for x in found) / sum(x.numel() for x in found)


def zeroed(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the share of entries that are 0 where FP64 is not."""
    lost = sum(int(((g == 0) & (s != 0)).sum()) for g, s in zip(got, exact, strict=True))
    return lost / max(1, sum(int((s != 0).sum()) for s in exact))


def largest_error(got: Tensor, exact: Tensor) -> float:
    """Return the largest relative error among entries of at least the median magnitude."""
    size = exact.abs()
    large = size >= size.median()
    error = ((got.double() - exact).abs() / size.clamp(min=1e-300))[large]
    return float(error.nan_to_num(nan=float("inf"), posinf=float("inf")).max())
