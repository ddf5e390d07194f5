"""What users put around DDP: hooks, accumulation, checkpointing, faults; two gloo ranks on CPU
decide alike.

The ranks are this file run as a script, see two_ranks.py.
"""

import contextlib
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from two_ranks import RANKS, Pair, of_ranks, on_ranks, serve

import tritonamp
from tritonamp.kernels.outliers import SIZE

pytestmark = of_ranks

STEPS = 6
SCALE = 2.0**10


class Net(nn.Module):
    """Rank 0 may leave out ``first``, rank 1 ``second``, both ``third``; ``part``: the middle."""

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.branches = branches
        if branches:
            self.second, self.third = nn.Linear(6, 8), nn.Linear(6, 8)
        self.part: Callable[..., Tensor] = lambda function, *args: function(*args)

    def forward(self, x: Tensor) -> Tensor:
        first = self.second if self.branches and dist.get_rank() == 0 else self.first
        return self.last(self.part(lambda h: torch.tanh(self.norm(h)).softmax(-1), first(x)))


def batches() -> list[Tensor]:
    """Of this rank."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(8, 6, generator=generator).chunk(RANKS)[dist.get_rank()] for _ in range(STEPS)
    ]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=0.25)


def enabled(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: str,
    hook: Any = None,
    state: Any = None,
    **options: Any,
) -> tuple[DistributedDataParallel, tritonamp.Amp]:
    scale = options.pop("scale", SCALE)
    mode = options.pop("on_nonfinite", "skip")
    model = DistributedDataParallel(net, **options)
    if hook is not None:
        model.register_comm_hook(state, hook)
    scaler = tritonamp.GradScaler("cpu", init_scale=scale)
    return model, tritonamp.enable(model, optimizer, level=level, scaler=scaler, on_nonfinite=mode)


def harmed(output: Tensor, fault: str | None) -> Tensor:
    """The loss, after a fault of that kind."""
    if fault == "gradient":
        output.register_hook(lambda grad: grad * math.inf)
    return (output - 1).square().mean() * (math.nan if fault == "loss" else 1.0)


def outcome(amp: tritonamp.Amp) -> dict[str, Any]:
    keys = ("scale", "steps", "skipped", "scale_overflows", "forward_faults", "growth_tracker")
    stats = amp.stats()
    masters = [p.detach().double().flatten().tolist() for p in amp.master_params()]
    amp.disable()
    return {"masters": masters, **{key: stats[key] for key in keys}}


# How gradients are reduced


def in_fp32(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    mean = bucket.buffer().float() / dist.get_world_size(group)
    future = dist.all_reduce(mean, group=group, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def summed_first(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """In the gradients' own dtype, and divided when it may be too late."""
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0].div_(dist.get_world_size(group)))


HOOKS = {
    "none": None,
    "in FP32": in_fp32,
    "summed first": summed_first,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


@on_ranks
def reduced(level: str, hook: str, gradients: list[float], view: bool) -> list[Any]:
    """What a step makes of one gradient on each rank."""
    net = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model, amp = enabled(
        net, optimizer, level, HOOKS[hook], scale=1.0, gradient_as_bucket_view=view
    )
    before = next(amp.master_params()).item()
    amp.backward(model(torch.ones(1, 1)).sum() * gradients[dist.get_rank()])
    optimizer.step()
    moved = before - next(amp.master_params()).item()
    found = outcome(amp)
    return [
        round(moved),
        found["skipped"],
        found["scale_overflows"],
        found["forward_faults"],
        found["scale"],
    ]


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize(
    ("level", "hook", "gradients", "mean"),
    [
        ("O2", "none", [40000.0, 40000.0], 40000),  # torch divides before it sums
        ("O2", "in FP32", [40000.0, 40000.0], 40000),
        ("O2", "summed first", [40000.0, 40000.0], None),  # the sum is beyond 65504
        ("O1", "none", [60000.0, 8.0], 30004),  # not a float16 number
        ("O1", "fp16", [60000.0, 40000.0], 49984),  # of those next to 50000, 32 apart, the even one
        ("O1", "bf16", [60000.0, 40000.0], 49920),  # 256 apart: halves of 59904 and 39936
    ],
)
def test_gradients_are_reduced_as_the_hook_says(
    pair: Pair, level: str, hook: str, gradients: list[float], mean: int | None, view: bool
) -> None:
    expected = [0, 1, 1, 0, 0.5] if mean is None else [mean, 0, 0, 0, 1.0]
    assert reduced(pair, level=level, hook=hook, gradients=gradients, view=view) == [
        expected,
        expected,
    ]


@on_ranks
def compressed(kind: str, fault: str | None) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net()
    state: Any = None
    if kind == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(
            None,
            1,
            start_powerSGD_iter=2,
            min_compression_rate=0.1,
            use_error_feedback=False,
            warm_start=False,
        )
    hook = powerSGD_hook.powerSGD_hook if kind == "PowerSGD" else HOOKS[kind]
    optimizer = adamw(net.parameters())
    model, amp = enabled(net, optimizer, "O1", hook, state)
    for step, x in enumerate(batches()):
        amp.backward(harmed(model(x), fault if step == 3 and dist.get_rank() == 1 else None))
        optimizer.step()
        optimizer.zero_grad()
    return outcome(amp)


@pytest.mark.parametrize("fault", ["loss", "gradient"])
@pytest.mark.parametrize("kind", ["PowerSGD", "fp16"])
def test_a_fault_goes_through_compression_once(pair: Pair, kind: str, fault: str) -> None:
    first, second = compressed(pair, kind=kind, fault=fault)
    assert first == second
    assert (first["steps"], first["skipped"], first["forward_faults"]) == (
        STEPS - 1,
        1,
        fault == "loss",
    )
    assert all(math.isfinite(x) for values in first["masters"] for x in values)


# Ways to train


@on_ranks
def trained(way: str, level: str, fault: str | None, **options: Any) -> list[dict[str, Any]]:
    """With a fault on rank 1 in the third batch; and without the batches of that decision."""
    rank, found = dist.get_rank(), []
    micro = 2 if way == "no_sync" else 1
    for plain in (False, True):
        torch.manual_seed(0)
        net = Net(way == "branches")
        if way == "checkpoint" and not plain:
            net.part = lambda *args: checkpoint(*args, use_reentrant=False)
        optimizer = adamw(net.parameters())
        model, amp = enabled(
            net, optimizer, level, find_unused_parameters=way == "branches", **options
        )
        for step, x in enumerate(batches()):
            if plain and step // micro == 2 // micro:
                continue
            last = (step + 1) % micro == 0
            with contextlib.nullcontext() if last else model.no_sync():
                amp.backward(harmed(model(x), fault if step == 2 and rank == 1 else None) / micro)
            if last:
                amp.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        found.append(outcome(amp))
    return found


@pytest.mark.parametrize("fault", ["loss", "gradient"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("no_sync", {}),
        ("branches", {}),  # each rank has gradients of other parameters
        ("checkpoint", {}),
        ("checkpoint", {"static_graph": True}),
        ("plain", {"on_nonfinite": "explain"}),
    ],
)
def test_a_fault_on_one_rank_is_skipped_by_all(
    pair: Pair, way: str, options: dict[str, Any], level: str, fault: str
) -> None:
    (first, without), (second, _) = trained(pair, way=way, level=level, fault=fault, **options)
    assert first == second
    assert first["steps"] == without["steps"] == (STEPS // 2 - 1 if way == "no_sync" else STEPS - 1)
    assert (first["skipped"], first["forward_faults"]) == (1, fault == "loss")
    assert first["scale"] == (SCALE if fault == "loss" else SCALE / 2)
    # another scale rounds half gradients alike, but for subnormal ones
    if fault == "loss" or level == "O1":
        assert first["masters"] == without["masters"]


@on_ranks
def vetoed(early: bool) -> Any:
    """By rank 1 alone, in the second step; ``early``: after the gradients were clipped."""
    net = Net()
    optimizer = adamw(net.parameters())
    model, amp = enabled(net, optimizer, "O2")
    for step, x in enumerate(batches()):
        amp.backward(model(x).square().mean())
        if early:
            amp.clip_grad_norm_(1.0)
        amp.veto(step == 1 and dist.get_rank() == 1)
        if not early:
            amp.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [outcome(amp), amp.explain(), amp.stats()["vetoes"]]


def test_a_veto_of_one_rank_is_everybodys(pair: Pair) -> None:
    first, second = vetoed(pair, early=False)
    assert first == second
    found, text, vetoes = first
    assert (found["steps"], found["skipped"], vetoes) == (STEPS - 1, 1, 1)
    assert (found["scale"], found["growth_tracker"]) == (SCALE, STEPS - 1)
    assert "veto: amp.veto was called with True on rank 1." in text


def test_a_veto_after_ranks_have_decided_is_the_same(pair: Pair) -> None:
    assert vetoed(pair, early=True) == vetoed(pair, early=False)


@on_ranks
def vetoed_in_join() -> str:
    net = Net()
    optimizer = adamw(net.parameters())
    model, amp = enabled(net, optimizer, "O2")
    with model.join():
        amp.backward(model(batches()[0]).square().mean())
        with pytest.raises(RuntimeError, match="veto") as refused:
            amp.veto(True)
        optimizer.step()
    assert amp.stats()["steps"] == 1
    return str(refused.value)


def test_no_veto_where_ranks_may_be_missing(pair: Pair) -> None:
    for text in vetoed_in_join(pair):
        assert text.startswith("amp.veto() inside of model.join(): expected all ranks")


@on_ranks
def outlying(bad: str) -> list[Any]:
    """In the last step rank 1 has an outlier: the loss, or the gradient, which DDP shares."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    model = DistributedDataParallel(net)
    amp = tritonamp.enable(model, optimizer, level="O2", loss_scale=16.0, skip_outliers=6.0)
    x = batches()[0]
    for step in range(SIZE + 1):
        loss = (1.0 + 0.02 * (step % 5)) * model(x).square().mean()
        if step == SIZE and dist.get_rank() == 1:
            extra = loss.detach() if bad == "loss" else loss - loss.detach()
            loss = loss + 100.0 * extra
        amp.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    last, window = amp.history[-1], amp.state_dict()["outliers"]["0"]
    state = amp.stats()
    amp.disable()
    return [last.cause, last.detail, state["steps"], state["skipped"], window]


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_an_outlier_of_one_rank_is_everybodys(pair: Pair, bad: str) -> None:
    """Ranks judge the mean of their losses, and one norm: the same numbers to the last bit."""
    first, second = outlying(pair, bad=bad)
    assert first == second
    assert (first[0], *first[2:4]) == ("outlier", SIZE, 1)


@on_ranks
def with_muon() -> list[Any]:
    net = Net()
    matrices = [p for p in net.parameters() if p.dim() == 2]
    rest = [p for p in net.parameters() if p.dim() != 2]
    optimizer = tritonamp.optim.Muon(matrices, lr=0.01, adamw_params=rest)
    model, amp = enabled(net, optimizer, "O2")
    for step, x in enumerate(batches()):
        bad = step == 2 and dist.get_rank() == 1
        amp.backward(model(x).square().mean() * (math.nan if bad else 1.0))
        optimizer.step()
        optimizer.zero_grad()
    masters = [p.detach().double().flatten().tolist() for p in amp.master_params()]
    return [outcome(amp), masters]


def test_muon_steps_alike(pair: Pair) -> None:
    first, second = with_muon(pair)
    assert first == second
    assert (first[0]["steps"], first[0]["skipped"]) == (STEPS - 1, 1)


@on_ranks
def buffers() -> list[Any]:
    """Of a norm that rank 1 alone has shown NaN, after the next forward."""
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = adamw(net.parameters())
    model, amp = enabled(net, optimizer, "O2")
    for step, x in enumerate(batches()):
        amp.backward(harmed(model(x * math.nan if step == 2 and dist.get_rank() == 1 else x), None))
        optimizer.step()
        optimizer.zero_grad()
    norm: Any = net[1]
    norm.momentum = 0.0
    model(x)
    found = [norm.running_mean.tolist(), norm.running_var.tolist(), str(norm.running_mean.dtype)]
    return [*found, outcome(amp)["forward_faults"]]


def test_buffers_are_those_of_rank_0(pair: Pair) -> None:
    first, second = buffers(pair)
    assert first == second
    assert first[2:] == ["torch.float32", 1]
    assert all(math.isfinite(x) for values in first[:2] for x in values)


@on_ranks
def raised() -> str:
    net = Net()
    optimizer = adamw(net.parameters())
    model, amp = enabled(net, optimizer, "O2", on_nonfinite="raise")
    amp.backward(harmed(model(batches()[0]), "loss" if dist.get_rank() == 1 else None))
    try:
        optimizer.step()
    except tritonamp.NonFiniteError as error:
        return str(error)
    finally:
        amp.disable()
    return "stepped"


def test_all_ranks_raise(pair: Pair) -> None:
    for text in raised(pair):
        assert text.startswith(
            "step 1 skipped (1 of 1): forward fault: the loss itself was inf or NaN"
        )


# ZeroRedundancyOptimizer


@on_ranks
def divided(level: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, as it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    found = []
    for zero in (True, False):
        torch.manual_seed(0)
        net = Net()
        settings = {"lr": 0.1, "momentum": 0.5}
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), **settings)
        if zero:
            optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, **settings)
        try:
            model, amp = enabled(net, optimizer, level)
        except ValueError as error:
            return str(error)
        for step, x in enumerate(batches()):
            amp.backward(
                harmed(model(x), "gradient" if step == 2 and dist.get_rank() == 1 else None)
            )
            amp.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(outcome(amp))
    return found


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_an_optimizer_divided_among_the_ranks(pair: Pair, level: str) -> None:
    first, second = divided(pair, level=level)
    assert first == second
    assert first[0] == first[1]
    assert first[0]["skipped"] == 1


def test_divided_half_parameters_are_refused(pair: Pair) -> None:
    for text in divided(pair, level="O2"):
        assert text.startswith(
            "optimizer: ZeroRedundancyOptimizer has divided the parameters among the ranks already"
        )


if __name__ == "__main__":
    serve(*sys.argv[1:])
