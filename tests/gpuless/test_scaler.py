"""The GradScaler where nothing is enabled: what its steps wait for."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpuless.fake_cuda import FakeCuda
from torch import nn

import tritonamp

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "ours": tritonamp.optim.AdamW,
    "fused": lambda params: torch.optim.AdamW(params, fused=True),
    "torch's own": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
READS = {"ours": 0, "fused": 0, "torch's own": 1, "sgd": 1}  # of found_inf: who cannot skip by flag


@pytest.mark.parametrize(
    ("kind", "dtype", "clip"),
    [
        # nobody else takes half gradients
        *[
            ("ours", half, clip)
            for half in (torch.float16, torch.bfloat16)
            for clip in (False, True)
        ],
        *[(kind, torch.float32, clip) for kind in OPTIMIZERS for clip in (False, True)],
    ],
)
def test_a_step_waits_for_found_inf_at_most(
    fake_cuda: FakeCuda, kind: str, dtype: torch.dtype, clip: bool
) -> None:
    model = nn.Linear(8, 4).cuda().to(dtype)
    optimizer, scaler = OPTIMIZERS[kind](model.parameters()), tritonamp.GradScaler("cuda")
    x = torch.ones(4, 8, device="cuda", dtype=model.weight.dtype)
    for i in range(4):
        with fake_cuda.watch() as records:
            scaler.scale(model(x).float().square().mean()).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert i == 0 or len(records) == READS[kind], records


def test_gradients_are_let_go(fake_cuda: FakeCuda) -> None:
    model = nn.Linear(8, 4).cuda()
    optimizer, scaler = tritonamp.optim.AdamW(model.parameters()), tritonamp.GradScaler("cuda")
    scaler.scale(model(torch.ones(4, 8, device="cuda")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    held = [weakref.ref(model.weight.grad), weakref.ref(optimizer)]
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def test_a_copy_knows_no_gradients(fake_cuda: FakeCuda) -> None:
    model = nn.Linear(8, 4).cuda()
    optimizer, scaler = tritonamp.optim.AdamW(model.parameters()), tritonamp.GradScaler("cuda")
    for _ in range(2):
        scaler.scale(model(torch.ones(4, 8, device="cuda")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scaler = copy.deepcopy(scaler)
    assert scaler.get_scale() == 65536.0
