"""The GradScaler where nothing is enabled: what its steps wait for."""

import contextlib
import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from gpuless.real_cuda import AnyCuda
from helpers import same
from runs import OPTIMIZERS
from torch import nn

import tritonamp

# reads of found_inf in a step: the last two optimizers cannot skip by a flag on the device
READS = {"our AdamW": 0, "fused AdamW": 0, "AdamW": 1, "SGD": 1}


@pytest.mark.parametrize(
    ("kind", "dtype", "clip"),
    [
        # no other optimizer takes half gradients
        *[
            ("our AdamW", half, clip)
            for half in (torch.float16, torch.bfloat16)
            for clip in (False, True)
        ],
        *[(kind, torch.float32, clip) for kind in READS for clip in (False, True)],
    ],
)
def test_a_step_waits_for_found_inf_at_most(
    gpu: AnyCuda, kind: str, dtype: torch.dtype, clip: bool
) -> None:
    model = nn.Linear(8, 4).cuda().to(dtype)
    optimizer, scaler = OPTIMIZERS[kind](model.parameters()), tritonamp.GradScaler("cuda")
    x = torch.ones(4, 8, device="cuda", dtype=model.weight.dtype)
    for i in range(4):
        with gpu.watch() as records:
            scaler.scale(model(x).float().square().mean()).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert i == 0 or len(records) == READS[kind], records


@pytest.mark.parametrize("captured", ["backward", "all"])
def test_half_gradients_of_a_graph(gpu: AnyCuda, captured: str) -> None:
    """A replay writes the half gradients where they were at the capture, and ``unscale_`` finds
    them there; or all of it is captured.
    """
    runs = []
    for captures in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(8, 4).cuda().half()
        optimizer = tritonamp.optim.AdamW(model.parameters(), lr=torch.tensor(0.125).cuda())
        scaler, x = tritonamp.GradScaler("cuda", init_scale=2.0**8), torch.zeros(4, 8).cuda().half()

        def backward(model: Any = model, scaler: Any = scaler, x: Any = x) -> None:
            scaler.scale(model(x).float().square().mean()).backward()

        def step(model: Any = model, scaler: Any = scaler, optimizer: Any = optimizer) -> None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)

        for part in (backward, step):
            part()
        graph = contextlib.nullcontext()
        if captures:
            with gpu.capture() as graph:
                backward()
                if captured == "all":
                    step()
        for i in range(4):
            x.copy_(torch.randn(4, 8, generator=torch.Generator().manual_seed(i)))
            if i == 2:
                x[0, 0] = 60000.0
            graph.replay() if captures else backward()
            if not (captures and captured == "all"):
                step()
        runs.append([p.detach().cpu() for p in model.parameters()])
    assert same(*runs)
    assert all(p.isfinite().all() for p in runs[0])


def test_gradients_are_let_go(cuda: torch.device) -> None:
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


def test_a_copy_knows_no_gradients(cuda: torch.device) -> None:
    model = nn.Linear(8, 4).cuda()
    optimizer, scaler = tritonamp.optim.AdamW(model.parameters()), tritonamp.GradScaler("cuda")
    for _ in range(2):
        scaler.scale(model(torch.ones(4, 8, device="cuda")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scaler = copy.deepcopy(scaler)
    assert scaler.get_scale() == 65536.0
