"""Two gloo ranks on CPU train the stages of one model by ``torch.distributed.pipelining``.

The ranks are this file run as a script, see two_ranks.py.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from pipelines import MICRO, SCALE, SCHEDULES, STEPS, Alone, Staged, batches, train
from two_ranks import Pair, on_ranks, serve

import tritonamp
from tritonamp.kernels.outliers import SIZE

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
]

NORM_ULPS = 8 * 2.0**-24  # a norm is a sum in another order; the masters behind it have the bits


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Dtypes come as names from the other process."""
    names = "dtype", "grad_dtype", "cast_outputs"
    return {k: getattr(torch, v) if k in names and v else v for k, v in options.items()}


@on_ranks
def run(kind: str, fault: str | None = None, **options: Any) -> list[Any]:
    options = {"level": "O2", **arguments(options)}
    found = train(Staged(kind, **options), fault)
    options |= {
        "traced": {"traced": True},
        "looped": {"last_first": True},  # its backwards
        "dual V": {"micro": 2 * MICRO},
    }.get(kind, {})
    return [found, train(Alone(**options), fault)]


VARIANTS: list[dict[str, Any]] = [
    *[{"kind": kind} for kind in SCHEDULES],
    *[{"kind": "1F1B", "level": level} for level in ("O0", "O1", "O3")],
    {"kind": "1F1B", "dtype": "bfloat16"},
    {"kind": "GPipe", "optimizer": "AdamW", "half": True},
    {"kind": "1F1B", "state": "bf16"},
    {"kind": "interleaved", "optimizer": "two"},
    {"kind": "1F1B", "optimizer": "NAdam"},
    {"kind": "1F1B", "grad_dtype": "float32"},
    {"kind": "1F1B", "cast_outputs": None},
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda o: " ".join(map(str, o.values())))
def test_as_one_process(pair: Pair, options: dict[str, Any]) -> None:
    answers = run(pair, **options)
    (first, alone), (second, _) = answers
    assert first["norms"] == second["norms"]
    assert first["norms"] == pytest.approx(alone["norms"], rel=NORM_ULPS)
    assert first["losses"] == alone["losses"] or second["losses"] == alone["losses"]
    assert first["values"] | second["values"] == alone["values"]
    assert first["state"] == second["state"] == alone["state"]
    assert alone["state"][0] == STEPS


if __name__ == "__main__":
    serve(*sys.argv[1:])
