"""Two gloo ranks on CPU decide alike, with hooks, accumulation, checkpointing and faults in DDP.

The ranks are this file run as a script, see two_ranks.py.
"""

import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import SCALE, Replica, joint_batches, outlying, scaler, share
from small_models import SmoothNet
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.checkpoint import checkpoint
from two_ranks import Pair, of_ranks, on_ranks, refused, serve

import tritonamp
from tritonamp.kernels.outliers import SIZE

pytestmark = of_ranks

STEPS = 6


class Branching(SmoothNet):
    """A model of which ranks may use other layers.

    With ``branches`` rank 0 leaves out ``first``, rank 1 ``second``, and both ``third``. ``part``
    calls the middle.
    """

    def __init__(self, branches: bool = False) -> None:
        super().__init__()
        self.branches = branches
        if branches:
            self.second, self.third = nn.Linear(6, 8), nn.Linear(6, 8)
        self.part: Callable[..., Tensor] = lambda function, *args: function(*args)

    def forward(self, x: Tensor) -> Tensor:
        first = self.second if self.branches and dist.get_rank() == 0 else self.first
        return self.last(self.part(lambda h: torch.tanh(self.norm(h)).softmax(-1), first(x)))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, eps=0.25)


def branching(level: str = "O2", branches: bool = False, **how: Any) -> Replica:
    torch.manual_seed(0)
    return Replica(Branching(branches), how.pop("optimizer", adamw), level, **how)


def on_rank_1(step: int, fault: str | None) -> dict[int, str | None]:
    return {step: fault} if dist.get_rank() == 1 else {}


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
    """Return the results of a step on one gradient of each rank."""
    net = nn.Linear(1, 1, bias=False)
    run = Replica(
        net,
        lambda params: torch.optim.SGD(params, lr=1.0),
        level,
        hook=HOOKS[hook] and (None, HOOKS[hook]),
        ddp={"gradient_as_bucket_view": view},
        scaler=scaler(1.0),
    )
    before = next(run.amp.master_params()).item()
    run.backward(run.model(torch.ones(1, 1)).sum() * gradients[dist.get_rank()])
    run.finish()
    moved = before - next(run.amp.master_params()).item()
    return [round(moved), *run.counts("skipped", "scale_overflows", "forward_faults", "scale")]


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
    run = branching("O1", hook=(state, hook))
    return run.walk(joint_batches(STEPS), on_rank_1(3, fault)).outcome()


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
def with_and_without(way: str, level: str, fault: str | None, **options: Any) -> list[Any]:
    """With a fault on rank 1 in the third batch; and without the batches of that decision."""
    found, micro = [], 2 if way == "no_sync" else 1
    static = options.pop("static_graph", False)
    ddp = {"find_unused_parameters": way == "branches", "static_graph": static}
    for plain in (False, True):
        run = branching(level, way == "branches", ddp=ddp, **options)
        if way == "checkpoint" and not plain:
            run.net.part = lambda *args: checkpoint(*args, use_reentrant=False)
        batches = joint_batches(STEPS)
        if plain:
            del batches[2 : 2 + micro]
        run.walk(batches, {} if plain else on_rank_1(2, fault), max_norm=1.0, micro=micro)
        found.append(run.outcome())
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
    (first, without), (second, _) = with_and_without(
        pair, way=way, level=level, fault=fault, **options
    )
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
    run = branching()
    for step, x in enumerate(joint_batches(STEPS)):
        run.backward(run.loss(x))
        if early:
            run.amp.clip_grad_norm_(1.0)
        run.amp.veto(step == 1 and dist.get_rank() == 1)
        if not early:
            run.amp.clip_grad_norm_(1.0)
        run.finish()
    return [run.outcome(), run.amp.explain(), *run.counts("vetoes")]


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
    run = branching()
    with run.model.join():
        run.backward(run.loss(joint_batches(1)[0]))
        text = refused(lambda: run.amp.veto(True))
        run.finish()
    assert run.counts("steps") == [1]
    return text


def test_no_veto_where_ranks_may_be_missing(pair: Pair) -> None:
    for text in vetoed_in_join(pair):
        assert text.startswith(
            "RuntimeError: amp.veto() inside of model.join(): expected all ranks"
        )


@on_ranks
def outlier_on_rank_1(bad: str) -> list[Any]:
    """In the last step rank 1 has an outlier: the loss, or the gradient, which DDP shares."""

    def worse(loss: Tensor) -> Tensor:
        extra = loss.detach() if bad == "loss" else loss - loss.detach()
        return loss + 100.0 * extra if dist.get_rank() == 1 else loss

    sgd = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.0)}
    run = branching(loss_scale=16.0, skip_outliers=6.0, **sgd)
    found = outlying(run, share(joint_batches(1)[0]), worse)
    return [*found, run.amp.history[-1].detail]


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_an_outlier_of_one_rank_is_everybodys(pair: Pair, bad: str) -> None:
    """Ranks judge the mean of their losses, and one norm: the same numbers to the last bit."""
    first, second = outlier_on_rank_1(pair, bad=bad)
    assert first == second
    assert first[:3] == ["outlier", SIZE, 1]


@on_ranks
def with_muon() -> dict[str, Any]:
    def muon(params: list[Any]) -> torch.optim.Optimizer:
        matrices = [p for p in params if p.dim() == 2]
        rest = [p for p in params if p.dim() != 2]
        return tritonamp.optim.Muon(matrices, lr=0.01, adamw_params=rest)

    run = branching(optimizer=muon).walk(joint_batches(STEPS), on_rank_1(2, "loss"))
    return run.outcome()


def test_muon_steps_alike(pair: Pair) -> None:
    first, second = with_muon(pair)
    assert first == second
    assert (first["steps"], first["skipped"]) == (STEPS - 1, 1)


@on_ranks
def buffers() -> list[Any]:
    """Of a norm that rank 1 alone has shown NaN, after the next forward."""
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    run = Replica(net, adamw)
    for step, x in enumerate(joint_batches(STEPS)):
        run.step(x * math.nan if step == 2 and dist.get_rank() == 1 else x)
    norm: Any = net[1]
    norm.momentum = 0.0
    run.model(share(x))
    found = [norm.running_mean.tolist(), norm.running_var.tolist(), str(norm.running_mean.dtype)]
    return [*found, *run.counts("forward_faults")]


def test_buffers_are_those_of_rank_0(pair: Pair) -> None:
    first, second = buffers(pair)
    assert first == second
    assert first[2:] == ["torch.float32", 1]
    assert all(math.isfinite(x) for values in first[:2] for x in values)


@on_ranks
def raised() -> str:
    run = branching(on_nonfinite="raise")
    return refused(lambda: run.walk(joint_batches(1), on_rank_1(0, "loss")))


def test_all_ranks_raise(pair: Pair) -> None:
    for text in raised(pair):
        assert text.startswith(
            "NonFiniteError: step 1 skipped (1 of 1): forward fault: the loss itself was inf or NaN"
        )


# ZeroRedundancyOptimizer


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


def divided_sgd(params: Any) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, as it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1, momentum=0.5)


@on_ranks
def divided_and_whole(level: str) -> list[dict[str, Any]]:
    found = []
    for optimizer in (divided_sgd, sgd):
        run = branching(level, optimizer=optimizer)
        run.walk(joint_batches(STEPS), on_rank_1(2, "gradient"), max_norm=1.0)
        found.append({**run.outcome(), "state": None})  # each rank has a part
    return found


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_an_optimizer_divided_among_the_ranks(pair: Pair, level: str) -> None:
    first, second = divided_and_whole(pair, level=level)
    assert first == second
    assert first[0] == first[1]
    assert first[0]["skipped"] == 1


@on_ranks
def divided_at_o2() -> str:
    return refused(lambda: branching("O2", optimizer=divided_sgd))


def test_divided_half_parameters_are_refused(pair: Pair) -> None:
    for text in divided_at_o2(pair):
        assert text.startswith(
            "ValueError: optimizer: ZeroRedundancyOptimizer has divided the parameters among the "
            "ranks already"
        )


if __name__ == "__main__":
    serve(*sys.argv[1:])
