"""Launches and memory traffic of ``optimizer.step()``, which a CUDA graph could capture."""

import dataclasses
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import more
from helpers import of_kernels, same
from runs import Training, grouped
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import tritonamp
from tritonamp.kernels import (
    _device_tables,
    _implementations,
    _launch,
    adamw,
)
from tritonamp.kernels import device as hardware

pytestmark = of_kernels
OF_STEPS = re.compile("grad_stats|decide|count_steps|update|cast|ema")
HALVES = [torch.float16, torch.bfloat16]
each_half = pytest.mark.parametrize("half", HALVES, ids=str)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Names and constants of the kernels that were launched."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    again = _launch.Launch.__call__

    def noted(launch: _launch.Launch, *given: Tensor) -> tuple[Tensor, ...]:
        if OF_STEPS.match(launch.kernel.__name__):
            calls.append((launch.kernel.__name__, launch.constants))
        return again(launch, *given)

    monkeypatch.setattr(_launch.Launch, "__call__", noted)
    return calls


def net(width: int = 16, layers: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        m for _ in range(layers) for m in (nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())
    ]
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 3))


def batches(n: int, device: torch.device, bad: tuple[int, ...] = ()) -> list[Tensor]:
    torch.manual_seed(1)
    xs = [torch.randn(4, 8, device=device) for _ in range(n)]
    for i in bad:
        xs[i][0, 0] = float("inf")
    return xs


class InUse(Training):
    def __init__(
        self,
        device: torch.device,
        backend: str,
        optimizer: str = "AdamW",
        layers: int = 1,
        level: str = "O2",
        **fields: Any,
    ) -> None:
        make = grouped(optimizer, lr=2e-2, weight_decay=0.1)
        fields["backend"] = backend
        super().__init__(lambda: net(layers=layers), make, level, device, **fields)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "our AdamW"])
@each_half
def test_both_backends_train_alike(
    device: torch.device, level: str, name: str, half: torch.dtype
) -> None:
    """Per step p may differ by 3 FP32 ulps, of the moments and of the update; the half copies are
    p, rounded.
    """
    if level == "O3" and name == "SGD":
        pytest.skip("torch's own step on half parameters")
    runs = [
        InUse(device, b, name, level=level, dtype=half, loss_scale=1024.0)
        for b in ("eager", "triton")
    ]
    xs = batches(5, device, bad=(2,))
    for x in xs:
        for run in runs:
            run.step(x, max_norm=0.5)
        norms = [run.norm for run in runs]
        torch.testing.assert_close(norms[1], norms[0], rtol=2**-20, atol=0, equal_nan=True)
        if half is torch.bfloat16 or level == "O3":
            break  # a half parameter that rounds the other way makes the next gradient another one
    stats = [run.amp.stats() for run in runs]
    assert stats[1]["steps"] == stats[0]["steps"] and stats[1]["skipped"] == stats[0]["skipped"]
    for eager, triton in zip(runs[0].amp.master_params(), runs[1].amp.master_params(), strict=True):
        allowed = 2**-20 if eager.dtype is torch.float32 else torch.finfo(half).eps
        torch.testing.assert_close(triton, eager, rtol=allowed, atol=2**-22)
    for run in runs:
        if level == "O2":
            for master, param in zip(run.amp.master_params(), run.model.parameters(), strict=True):
                assert torch.equal(param, master.to(param.dtype))
        run.amp.disable()


@pytest.mark.long
def test_a_handful_of_launches_whatever_the_number_of_tensors(
    device: torch.device, launched: list[Any]
) -> None:
    """Half and FP32 gradients: one launch each for statistics and update."""
    for layers in (1, 9):
        run = InUse(device, "triton", layers=layers)
        for x in batches(2, device):
            launched.clear()
            run.step(x, max_norm=1.0)
            names = [name for name, _ in launched]
            assert names == [
                *["grad_stats_kernel"] * 2,
                "decide_kernel",
                "count_steps_kernel",
                *["update_kernel"] * 2,
            ]
        run.amp.disable()


def test_a_schedule_compiles_nothing_new(device: torch.device, launched: list[Any]) -> None:
    run = InUse(device, "triton")
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    xs, seen = batches(4, device), []
    for x in xs:
        launched.clear()
        run.step(x)
        schedule.step()
        seen.append([*launched])
    assert seen[1] == seen[0] == seen[2] == seen[3]
    run.amp.disable()


def test_a_skipped_step_changes_no_bit(device: torch.device) -> None:
    run = InUse(device, "triton")
    good, bad, _ = batches(3, device, bad=(1,))
    run.step(good)
    before = run.everything()
    run.step(bad)
    assert same(run.everything(), before)
    assert run.amp.stats()["forward_faults"] == 1
    run.amp.disable()


@pytest.mark.parametrize("powers", [(2.0**4, 2.0**12)])
def test_the_scale_leaves_no_trace(device: torch.device, powers: tuple[float, float]) -> None:
    """Unless a scaled gradient leaves the normal range of its format; bfloat16's is wide."""
    runs = [InUse(device, "triton", dtype=torch.bfloat16, loss_scale=scale) for scale in powers]
    for x in batches(3, device):
        for run in runs:
            run.step(x)
    assert same(runs[0].everything(), runs[1].everything())
    for run in runs:
        run.amp.disable()


def test_parameters_without_a_gradient_stay(device: torch.device) -> None:
    run = InUse(device, "triton")
    xs = batches(3, device)
    run.step(xs[0])
    frozen = [run.model[0].weight, run.model[-1].bias]
    for absent in (frozen, [], frozen[:1]):
        for param in run.model.parameters():
            param.requires_grad_(not any(param is f for f in absent))
        before = {param: param.detach().clone() for param in run.model.parameters()}
        run.step(xs[1])
        for param, values in before.items():
            assert torch.equal(param, values) == any(param is f for f in absent)
    masters = list(run.amp.master_params())
    assert [int(run.optimizer.state[m]["step"]) for m in (masters[0], masters[-1], masters[1])] == [
        2,
        3,
        4,
    ]
    run.amp.disable()


@pytest.mark.usefixtures("plans")
def test_tables_are_sent_only_when_memory_moves(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = InUse(device, "triton")
    xs = batches(4, device)
    for x in xs[:2]:
        run.step(x)
    built: list[Any] = []
    original = _device_tables.DeviceTables.__init__
    monkeypatch.setattr(
        _device_tables.DeviceTables,
        "__init__",
        lambda *args: (built.append(args), original(*args))[1],
    )
    run.step(xs[2])
    assert built == []
    state = run.optimizer.state[next(run.amp.master_params())]
    state["exp_avg"] = state["exp_avg"].clone()  # as code does that offloads by itself
    moved = state["exp_avg"].clone()
    run.step(xs[3])
    assert not torch.equal(state["exp_avg"], moved), "the step works on what the state holds now"
    run.amp.disable()


@pytest.mark.parametrize("name", ["exp_avg", *more(["exp_avg_sq", "step"])])
def test_a_replaced_state_counts(device: torch.device, name: str) -> None:
    run, by_hand = InUse(device, "triton"), InUse(device, "triton")
    xs = batches(3, device)
    for x in xs[:2]:
        run.step(x)
        by_hand.step(x)
    for master, other in zip(run.amp.master_params(), by_hand.amp.master_params(), strict=True):
        run.optimizer.state[master][name] = run.optimizer.state[master][name] + 1
        by_hand.optimizer.state[other][name].add_(1)
    run.step(xs[2])
    by_hand.step(xs[2])
    assert same(run.everything(), by_hand.everything())
    for each in (run, by_hand):
        each.amp.disable()


def test_amsgrad_may_be_one_groups(device: torch.device) -> None:
    model = nn.Linear(4, 4, device=device)
    groups = [{"params": [model.weight], "amsgrad": True}, {"params": [model.bias]}]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    amp = tritonamp.enable(model, optimizer, level="O2", loss_scale=2.0**8)
    amp.backward(model(torch.ones(2, 4, device=device)).square().mean())
    optimizer.step()
    found = ["max_exp_avg_sq" in state for state in optimizer.state.values()]
    amp.disable()
    assert found == [True, False]


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_sgd_has_buffers_where_it_has_momentum(device: torch.device, momentum: float) -> None:
    model = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=momentum)
    amp = tritonamp.enable(model, optimizer, level="O2", loss_scale=2.0**8)
    amp.backward(model(torch.ones(2, 4, device=device)).square().mean())
    optimizer.step()
    buffers = [state.get("momentum_buffer") for state in optimizer.state.values()]
    amp.disable()
    assert sum(buffer is not None for buffer in buffers) == 2 * (momentum != 0)


def test_state_moved_through_data_is_found(device: torch.device) -> None:
    """The snippet that people use to move an optimizer to another device."""
    runs = [InUse(device, "triton") for _ in range(2)]
    xs = batches(3, device)
    for x in xs[:2]:
        for run in runs:
            run.step(x)
    for state in runs[0].optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()
    for run in runs:
        run.step(xs[2])
    assert same(runs[0].everything(), runs[1].everything())
    for run in runs:
        run.amp.disable()


def test_two_optimizers_step_or_skip_together(device: torch.device) -> None:
    model = net().to(device)
    optimizers = [
        torch.optim.AdamW(model[:2].parameters()),
        torch.optim.Adam(model[2:].parameters()),
    ]
    amp = tritonamp.enable(model, optimizers, level="O2", backend="triton")
    for x, moves in zip(batches(3, device, bad=(1,)), (True, False, True), strict=True):
        before = [p.detach().clone() for p in amp.master_params()]
        amp.backward(model(x).square().mean())
        norm = amp.clip_grad_norm_(0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        stayed = [torch.equal(a, b) for a, b in zip(amp.master_params(), before, strict=True)]
        assert stayed == [not moves] * len(before)
        assert bool(norm.isfinite()) == moves
    assert amp.stats()["steps"] == 2 and amp.stats()["skipped"] == 1
    amp.disable()


def test_the_skip_is_reported_a_step_later(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    run = InUse(device, "triton")
    good, bad, again = batches(3, device, bad=(1,))
    with caplog.at_level(logging.INFO, "tritonamp"):
        run.step(good)
        caplog.clear()
        run.step(bad)
        assert not caplog.records
        run.step(again)
    (line,) = caplog.messages
    assert line.startswith("step 2 skipped (1 of 2): data: the input batch itself held inf or NaN")
    run.amp.disable()


def test_an_overflow_names_its_parameters(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    run = InUse(device, "triton")
    xs = batches(2, device)
    run.optimizer.zero_grad()
    run.backward(run.loss(xs[0]))
    grad = run.model[1].weight.grad
    assert grad is not None
    grad[3, 5] = float("inf")
    with caplog.at_level(logging.INFO, "tritonamp"):
        run.finish()
        run.step(xs[1])
    assert "the gradients of 1 parameter(s) were inf: 1.weight" in caplog.text
    assert run.amp.stats()["scale"] == 2.0**15
    run.amp.disable()


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_weight_beyond_its_format_is_named(
    device: torch.device, backend: str, optimizer: str
) -> None:
    run = InUse(device, backend, optimizer)
    run.step(*batches(1, device))
    assert run.amp.stats()["overflowed_parameters"] == []
    with torch.no_grad():
        next(run.amp.master_params())[0, 0] = 1e5
    run.optimizer.zero_grad()
    run.amp.backward(torch.zeros((), device=device, requires_grad=True))  # of no use to the model
    run.model[0].weight.grad = torch.zeros_like(run.model[0].weight)
    run.optimizer.step()
    assert run.model[0].weight[0, 0] == float("inf")
    assert run.amp.stats()["overflowed_parameters"] == ["0.weight"]
    run.amp.disable()


def test_a_kernel_that_does_not_compile_gives_way(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise _launch.KernelError("update_kernel cannot be compiled: no")

    monkeypatch.setattr(_implementations, "failures", {})
    monkeypatch.setitem(hardware._answers, device, True)
    runs = [InUse(device, "eager"), InUse(device, "auto")]
    (x,) = batches(1, device)
    monkeypatch.setattr(adamw.ADAMW, "triton_function", fails)
    runs[0].step(x)
    with pytest.warns(
        RuntimeWarning,
        match="adamw runs in eager torch from now on: update_kernel cannot be compiled",
    ):
        runs[1].step(x)
    assert same(runs[0].everything(), runs[1].everything())
    assert "adamw" in runs[1].amp.stats()["kernel_failures"]
    for run in runs:
        run.amp.disable()


# what a CUDA graph would do


class Tape(TorchDispatchMode):
    """Records operations, and runs them again on the same memory, as a CUDA graph does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._again: list[Callable[[], None]] = []
        self._records = False
        original = _launch.Launch.__call__

        def recorded(launch: _launch.Launch, *given: Tensor) -> tuple[Tensor, ...]:
            tensors = launch.all_tensors(given)
            results = _launch.allocate(tensors[0], launch.results)
            into_them = dataclasses.replace(launch, tensors=None, results=())

            def run() -> None:
                with _disable_current_modes():
                    original(into_them, *tensors, *results)

            run()
            if self._records:
                self._again.append(run)
            return results

        monkeypatch.setattr(_launch.Launch, "__call__", recorded)

    def __enter__(self) -> "Tape":
        self._records = True
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._records = False
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert "_local_scalar_dense" not in str(func), "a number is read on the host"
        results = func(*args, **kwargs)
        inputs = {
            t.untyped_storage().data_ptr()
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, Tensor)
        }
        fresh = [
            i
            for i, t in enumerate(torch.utils._pytree.tree_leaves(results))
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in inputs
        ]

        def run() -> None:
            new = torch.utils._pytree.tree_leaves(func(*args, **kwargs))
            for i in fresh:
                torch.utils._pytree.tree_leaves(results)[i].copy_(new[i])

        self._again.append(run)
        return results

    def replay(self) -> None:
        with torch.no_grad():
            for run in self._again:
                run()


@pytest.mark.long
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_captured_step_goes_on_with_other_rates_and_scales(
    monkeypatch: pytest.MonkeyPatch, max_norm: float | None
) -> None:
    """Forward, backward and step, recorded once. On a GPU test_trajectories.py does it."""
    device = torch.device("cpu")
    xs, rates = batches(9, device, bad=(5,)), [1e-2 * 0.7**i for i in range(9)]
    scaler = {"growth_interval": 2, "init_scale": 2.0**10}
    runs = [InUse(device, "triton", scaler=tritonamp.GradScaler("cpu", **scaler)) for _ in range(2)]
    for run in runs:
        for group in run.optimizer.param_groups:
            group["lr"] = torch.tensor(rates[0])
    eager, captured = runs
    static = xs[0].clone()
    tape = Tape(monkeypatch)
    for i, (x, rate) in enumerate(zip(xs, rates, strict=True)):
        for run in runs:
            for group in run.optimizer.param_groups:
                group["lr"].fill_(rate)
        eager.step(x, max_norm=max_norm)
        static.copy_(x)
        if i < 3:
            captured.step(static, max_norm=max_norm)
        elif i == 3:
            with tape:
                captured.step(static, max_norm=max_norm)
        else:
            tape.replay()
        assert same(captured.everything(), eager.everything()), i
    stats = [run.amp.stats() for run in runs]
    # a replay has no batch to show
    assert [s.pop("last_skip_reason") for s in stats] == [
        "data",
        "forward fault",
    ]
    assert stats[0] == stats[1]
    assert stats[0]["forward_faults"] == 1 and stats[0]["scale"] > 2.0**10
    for run in runs:
        run.amp.disable()


def test_no_step_waits_for_the_device(cuda: torch.device) -> None:
    run = InUse(cuda, "triton")
    xs = batches(6, cuda)
    for x in xs[:3]:
        run.step(x, max_norm=1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in xs[3:]:
            run.step(x, max_norm=1.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.amp.disable()


@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_updates_that_do_nothing_are_counted_by_group(
    device: torch.device, backend: str, state: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8)).to(device)
    groups = [
        {"params": m.parameters(), "lr": lr}
        for m, lr in zip(model, (1e-7, 1e-7, 1e-2), strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    fields = {"backend": backend, "track_lost_updates": True, "state": state}
    amp = tritonamp.enable(model, optimizer, level="O2", **fields)
    amp.backward(model(torch.randn(4, 16, device=device)).square().mean())
    optimizer.step()
    first, norm, last = amp.stats()["lost_updates"]
    assert first > 0.9 and norm == 0.0 and last < 0.1, "the norm's parameters are FP32"
    amp.disable()
