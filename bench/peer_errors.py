"""Errors of peers' results and gradients against FP64, at two loss scales."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from gpuless import tensors
from op_cases import HALF, LOSS_SCALE, Inputs, Shape, leaves, results_of, wanted
from peer_cases import Question
from peer_machine import CHECKING, CUDA, Machine
from torch import Tensor

SCALES = 1.0, LOSS_SCALE
GRADIENT = 2.0**-20  # of a mean over so many

Row = dict[str, Any]


def host_inputs(question: Question, peer: str, shape: Shape) -> Inputs:
    """Return the inputs on the CPU in the peer's dtypes, equal for all peers with half inputs."""
    torch.manual_seed(0)
    return question.op.inputs_of(peer, shape, HALF, "cpu")


def moved(inputs: Inputs, move: Callable[[Tensor], Tensor]) -> Inputs:
    return leaves([None if x is None else move(x) for x in inputs])


def gradients(results: list[Tensor], scale: float) -> list[Tensor]:
    """Return gradients of the results in their dtypes, the same for every peer."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for y in results:
        is_loss = y.dim() == 0
        above = torch.ones(()) if is_loss else torch.randn(y.shape, generator=generator) * GRADIENT
        found.append(tensors.wrap((above * scale).to(y.dtype)))  # no copy that would be counted
    return found


def checked(question: Question, peer: str, machine: Machine) -> Iterator[Row]:
    """Compare results and gradients of all programs with FP64."""
    host = host_inputs(question, peer, question.checked)
    machine.emulator.options = CHECKING
    exact_inputs = moved(host, lambda x: x.double() if x.is_floating_point() else x)
    exact = question.exact(*exact_inputs)
    exact = list(exact) if isinstance(exact, tuple) else [exact]
    row: Row = {"case": question.name, "peer": peer, "rows": question.checked[0]}
    for scale in SCALES:
        inputs = moved(host, lambda x: x.to(CUDA))
        results = results_of(question.op.forward_of(peer, CUDA), inputs)
        row["forward"] = max(
            largest_error(y.detach().cpu(), z.detach()) for y, z in zip(results, exact, strict=True)
        )
        if not question.has_backward:
            continue
        above = gradients(results, scale)
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
    yield row


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
