"""Every operation's samples, and a short training, for ``results.py``."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.kernels._implementations import Implementations, operations
from tritonamp.kernels._sample import Call, Sample, as_list

Outputs = dict[str, Tensor]
Case = Callable[[str], Outputs]
"""What takes a backend and returns results by name."""

LINES = {  # one of each way in which lines are cut, as small as it can be
    "short": ((33, 5), 1),
    "whole": ((5, 1000), 1),
    "aligned": ((2, 4096), 1),
    "odd": ((3, 1001), 1),
    "split": ((2, 65539), 1),
    "columns": ((300, 5), 0),
    "inner": ((2, 300, 24), 1),
    "shared inner": ((1, 3000, 40), 1),
    "long inner": ((130, 1100, 3), 1),
}


def cases() -> Iterator[tuple[str, Case]]:
    """Yield names and cases; an operation's samples take the ways of cutting lines in turn."""
    for operation in operations().values():
        of_lines = [s for s in operation.samples if isinstance(s, Sample)]
        for sample, (where, (shape, dim)) in zip(itertools.cycle(of_lines[::-1]), _lines(of_lines)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
            name = " ".join(filter(None, (operation.name, sample.variant, where)))
            yield name, partial(_line, operation, sample.args(x, dim))
        for listed in operation.samples:
            if isinstance(listed, Sample):
                continue
            name = " ".join(filter(None, (operation.name, listed.variant)))
            for call in listed.calls(torch.device("cpu"), (torch.float16, torch.bfloat16)):
                yield f"{name} {call.what}", partial(_list, operation, call)


def _lines(samples: Sequence[Sample]) -> Iterator[tuple[str, tuple[tuple[int, ...], int]]]:
    """Yield the ways of cutting lines that samples of an operation can take."""
    rows_only = any(sample.rows_only for sample in samples)
    for where, (shape, dim) in LINES.items() if samples else ():
        if not rows_only or dim == len(shape) - 1:
            yield where, (shape, dim)


def _line(operation: Implementations, args: tuple[Any, ...], backend: str) -> Outputs:
    results = as_list(_function(operation, backend)(*args))
    return {str(i): result for i, result in enumerate(results)}


def _list(operation: Implementations, call: Call, backend: str) -> Outputs:
    results = call.run(_function(operation, backend))
    return {str(i): result.clone() for i, result in enumerate(results)}


def _function(operation: Implementations, backend: str) -> Callable[..., Any]:
    return operation.torch_function if backend == "eager" else operation.triton_function


def train(level: str, backend: str) -> Outputs:
    """Train a model on the GPU in software for four steps, one of them skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.GELU(), nn.LayerNorm(300), nn.Linear(300, 300))
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    amp = tritonamp.enable(model, optimizer, level=level, backend=backend)
    x, y = torch.randn(64, 8).cuda(), torch.randint(300, (64,)).cuda()
    for step in range(4):
        loss = nn.functional.cross_entropy(model(x), y) * (1e30 if step == 1 else 1.0)
        amp.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    amp.disable()
    return {name: x.detach().float().cpu() for name, x in model.state_dict().items()}
