"""The process behind ``counts.py --models``: a step of each toy model on the GPU in software.

    TRITON_INTERPRET=1 python bench/model_counts.py rows.jsonl --only "GPT-2"

It writes a line of JSON for each model and way. The line of a model that is not counted has the
reason.
"""

import argparse
import contextlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import software_gpu  # noqa: F401  (before torch)
import torch
import toy_models
from gpuless import driver
from gpuless.fake_cuda import FakeCuda, in_software
from provenance import reason_of
from torch import Tensor, nn
from traffic import Traffic

import tritonamp

WAYS = "autocast", "O1", "O2", "O2 fuse_loss"
DTYPE = torch.float16
LOSS_SCALE = 1024.0

Row = dict[str, Any]


def counted(gpu: FakeCuda, model: nn.Module, batch: dict[str, Tensor], way: str) -> Traffic:
    """Return the traffic of one forward and backward of a model that is trained.

    The first forward and backward are not counted, because they create tensors that others reuse.

    Args:
        gpu: the GPU in software.
        model: FP32 model. Its forward returns the loss, or an object that has it.
        batch: arguments of the forward.
        way: one of ``WAYS``: ``torch.autocast``, or a level and a field of its policy.
    """
    model = model.cuda().train()
    batch = {name: x.cuda() for name, x in batch.items()}
    with as_if_large(), trained(model, way) as (forward, backward):

        def step() -> None:
            with forward():
                found = model(**batch)
            backward(found if isinstance(found, Tensor) else found.loss)

        step()
        model.zero_grad()
        traffic = Traffic(model.parameters())
        with mock.patch.object(gpu, "observer", traffic):
            step()
        traffic.add_gradients(model.parameters())
    return traffic


@contextlib.contextmanager
def as_if_large() -> Iterator[None]:
    """Have kernels take tensors of any size, as they take those of a model of full size."""
    with contextlib.ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("tritonamp.") and "MIN_NUMEL" in vars(module):
                stack.enter_context(mock.patch.object(module, "MIN_NUMEL", 0))
        yield


@contextlib.contextmanager
def trained(model: nn.Module, way: str) -> Iterator[Any]:
    """Yield the context of a forward, and the function of a backward."""
    if way == "autocast":
        yield (
            lambda: torch.autocast("cuda", dtype=DTYPE),
            lambda loss: (LOSS_SCALE * loss).backward(),
        )
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    level, *fields = way.split()
    settings: dict[str, Any] = dict.fromkeys(fields, True)
    amp = tritonamp.enable(model, optimizer, level=level, dtype=DTYPE, **settings)
    try:
        yield contextlib.nullcontext, amp.backward
    finally:
        amp.disable()


def row_of(name: str, way: str, traffic: Traffic) -> Row:
    """Return bytes by kind, the bound, and each operation with its line, the largest first."""
    works = sorted(traffic.bytes, key=lambda work: -traffic.bytes[work].total())
    ops = [
        work._asdict() | {"calls": traffic.calls[work], "bytes": dict(traffic.bytes[work])}
        for work in works
    ]
    return {
        "model": name, "way": way, "bytes": traffic.total(), "bound": traffic.bound, "ops": ops,
    }  # fmt: skip


def rows_of(gpu: FakeCuda, name: str) -> Iterator[Row]:
    """Count a model in every way; a failure ends in a row with the reason."""
    toy = toy_models.MODELS[name]
    if toy.package and importlib.util.find_spec(toy.package) is None:
        yield {"model": name, "reason": f"{toy.package} is not installed"}
        return
    for way in WAYS:
        torch.manual_seed(0)
        try:
            yield row_of(name, way, counted(gpu, *toy.build(), way))
        except Exception as error:
            yield {"model": name, "way": way, "reason": reason_of(error)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if reason := driver.obstacle():
        print(reason, file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    with in_software() as gpu, args.rows.open("w") as file:
        for name in toy_models.MODELS:
            if re.search(args.only, name):
                for row in rows_of(gpu, name):
                    print(json.dumps(row), file=file, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
