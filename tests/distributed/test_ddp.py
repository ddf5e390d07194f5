"""Two gloo ranks on CPU train one model under DistributedDataParallel: they decide alike, and end
up alike.

The ranks are this file run as a script, see two_ranks.py.
"""

import contextlib
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from two_ranks import RANKS, Pair, of_ranks, on_ranks, serve

import tritonamp
from tritonamp.distributed.parted import CHECK_EVERY
from tritonamp.runtime import parts
from tritonamp.step.offload import Offload

pytestmark = of_ranks

STEPS = 6


# What the ranks train


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=0.25, weight_decay=0.0),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
}
# by how much a step moves a parameter at most, for each unit of gradient: AdamW's lr / eps, twice
# for its two moments; SGD's lr / (1 - momentum)
STEP_SIZES = {"AdamW": 2 * 0.01 / 0.25, "SGD": 0.1 / (1 - 0.5)}
HOOK_CALLS: list[str] = []
HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


def batches(steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 6, generator=generator) for _ in range(steps)]


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def enabled_and_wrapped(
    order: str,
    optimizer: str,
    level: str,
    seed: int = 0,
    on_nonfinite: str = "skip",
    **options: Any,
) -> tuple[DistributedDataParallel, nn.Module, torch.optim.Optimizer, tritonamp.Amp]:
    torch.manual_seed(seed)
    net = Net()
    if not options.get("find_unused_parameters") and not options.get("static_graph"):
        del net.unused
    if options.pop("half_loaded", False):
        net.half()
    stepper = OPTIMIZERS[optimizer](net.parameters())
    hook = options.pop("hook", None)
    fields = {"level": level, "on_nonfinite": on_nonfinite}
    fields |= {name: options.pop(name) for name in ("state", "offload") if name in options}
    if order == "before":
        amp = tritonamp.enable(
            net, stepper, scaler=tritonamp.GradScaler("cpu", init_scale=2.0**10), **fields
        )
    model = DistributedDataParallel(net, **options)
    if hook is not None:
        model.register_comm_hook(
            HOOK_CALLS, lambda calls, bucket: calls.append(hook) or HOOKS[hook](None, bucket)
        )
    if order == "after":
        amp = tritonamp.enable(
            model, stepper, scaler=tritonamp.GradScaler("cpu", init_scale=2.0**10), **fields
        )
    return model, net, stepper, amp


def outcome(net: nn.Module, stepper: torch.optim.Optimizer, amp: tritonamp.Amp) -> dict[str, Any]:
    stats = amp.stats()
    keys = ("scale", "steps", "skipped", "scale_overflows", "forward_faults", "growth_tracker")
    return {
        "params": [p.detach().double().flatten().tolist() for p in net.parameters()],
        "masters": [p.detach().double().flatten().tolist() for p in amp.master_params()],
        "state": [
            t.double().flatten().tolist() for s in stepper.state.values() for t in s.values()
        ],
        **{key: stats[key] for key in keys},
    }


def alone(
    optimizer: str,
    level: str,
    accumulate: int = 1,
    unused: bool = False,
    half_loaded: bool = False,
) -> tuple[list[Any], float]:
    """Masters after the same steps on the joint batches in one process, and the largest gradient on
    the way.
    """
    torch.manual_seed(0)
    net, largest = Net(), 0.0
    if not unused:
        del net.unused
    if half_loaded:
        net.half().float()
    stepper = OPTIMIZERS[optimizer](net.parameters())
    amp = tritonamp.enable(
        net, stepper, level=level, scaler=tritonamp.GradScaler("cpu", init_scale=2.0**10)
    )
    for step, x in enumerate(batches()):
        amp.backward(loss_of(net(x)) / accumulate)
        if (step + 1) % accumulate == 0:
            grads = [p.grad for p in net.parameters() if p.grad is not None]
            largest = max([largest] + [float(g.float().abs().max()) / 2**10 for g in grads])
            amp.clip_grad_norm_(1.0)
            stepper.step()
            stepper.zero_grad()
    masters = [p.detach().double().flatten().tolist() for p in amp.master_params()]
    amp.disable()
    return masters, largest


@on_ranks
def run(
    order: str, optimizer: str, level: str, accumulate: int = 1, **options: Any
) -> tuple[dict[str, Any], list[Any], float]:
    rank = dist.get_rank()
    HOOK_CALLS.clear()
    # other weights on each rank: DDP makes them those of rank 0
    model, net, stepper, amp = enabled_and_wrapped(order, optimizer, level, seed=rank, **options)
    for step, x in enumerate(batches()):
        last = (step + 1) % accumulate == 0
        with contextlib.nullcontext() if last else model.no_sync():
            amp.backward(loss_of(model(x.chunk(RANKS)[rank])) / accumulate)
        if last:
            amp.clip_grad_norm_(1.0)
            stepper.step()
            stepper.zero_grad()
    found = {**outcome(net, stepper, amp), "hooked": len(HOOK_CALLS) > 0}
    amp.disable()
    unused = bool(options.get("find_unused_parameters") or options.get("static_graph"))
    half_loaded = bool(options.get("half_loaded"))
    return (found, *alone(optimizer, level, accumulate, unused, half_loaded))


@on_ranks
def wide_gradients(order: str, level: str, **options: Any) -> list[float]:
    """How far each gradient is from the mean, in FP32, of what the ranks' backwards give."""
    torch.manual_seed(0)
    net = Net()
    del net.unused
    model: nn.Module = net if order == "before" else DistributedDataParallel(net, **options)
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    fields = {"level": level, "loss_scale": 2.0**10, "grad_dtype": torch.float32}
    amp = tritonamp.enable(model, optimizer, **fields)
    if order == "before":
        model = DistributedDataParallel(net, **options)
    far = []
    for x in batches(4):
        exact = [torch.zeros_like(p, dtype=torch.float32) for p in net.parameters()]
        for part in x.chunk(RANKS):
            for micro in part.chunk(2):
                grads = torch.autograd.grad(2.0**10 * loss_of(net(micro)), [*net.parameters()])
                for total, grad in zip(exact, grads, strict=True):
                    total += grad.float() / RANKS
        first, last = x.chunk(RANKS)[dist.get_rank()].chunk(2)
        with model.no_sync():
            amp.backward(loss_of(model(first)))
        amp.backward(loss_of(model(last)))
        for param, total in zip(net.parameters(), exact, strict=True):
            assert param.grad is not None and param.grad.dtype is torch.float32
            far.append(float((param.grad - total).norm() / total.norm()))
        optimizer.step()
        optimizer.zero_grad()
    amp.disable()
    return far


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["", "view"])
def test_gradients_in_fp32_are_reduced_in_fp32(
    pair: Pair, order: str, level: str, options: dict[str, Any]
) -> None:
    """Four numbers are added up: at most three roundings of FP32; a half one is 4096 of them."""
    first, second = wide_gradients(pair, order=order, level=level, **options)
    assert first == second
    assert max(first) <= 3 * 2.0**-24


@on_ranks
def refused_buckets(order: str, option: str, half_loaded: bool) -> str:
    net = Net().half() if half_loaded else Net()
    optimizer = OPTIMIZERS["SGD"](net.parameters())
    dtypes = [p.dtype for p in net.parameters()]
    fields: dict[str, Any] = {"level": "O2", "grad_dtype": torch.float32}
    if half_loaded:
        fields |= {"level": "O1", "half_parameters": True, "master_weights": True}
    if order == "after":
        model = DistributedDataParallel(net, **{option: True})
        with pytest.raises(ValueError, match="grad_dtype") as refused:
            tritonamp.enable(model, optimizer, **fields)
        assert [p.dtype for p in net.parameters()] == dtypes
        return str(refused.value)
    with tritonamp.enable(net, optimizer, **fields):
        model = DistributedDataParallel(net, **{option: True})
        with pytest.raises(ValueError, match="grad_dtype") as refused:
            model(batches(1)[0])
    return str(refused.value)


@pytest.mark.parametrize("half_loaded", [False, True])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("option", ["static_graph", "find_unused_parameters"])
def test_buckets_that_stay_half_are_refused(
    pair: Pair, order: str, option: str, half_loaded: bool
) -> None:
    for text in refused_buckets(pair, order=order, option=option, half_loaded=half_loaded):
        assert text.startswith(f"grad_dtype=torch.float32: expected a DDP without {option}=True")


@on_ranks
def frozen_half_base() -> list[Any]:
    net = Net().half()
    for part in (net.first, net.norm, net.unused):
        part.requires_grad_(False)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = OPTIMIZERS["SGD"](net.last.parameters())
    with tritonamp.enable(model, optimizer, level="O1", grad_dtype=torch.float32) as amp:
        amp.backward(loss_of(model(batches(1)[0].half())))
        optimizer.step()
        return [amp.stats()["steps"], [str(p.dtype) for p in net.parameters()]]


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_a_frozen_half_base_needs_no_buckets(pair: Pair) -> None:
    for steps, dtypes in frozen_half_base(pair):
        assert steps == 1 and dtypes.count("torch.float32") == 2  # of the layer that trains


PLAIN = [
    (order, o, level, {})
    for order in ("before", "after")
    for o in OPTIMIZERS
    for level in ("O1", "O2")
]
OPTIONS = [
    {"accumulate": 2},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"hook": "fp16"},
    {"hook": "bf16"},
    {"half_loaded": True},
]
RUNS = PLAIN + [
    (order, "AdamW", level, o)
    for order, level in (("before", "O1"), ("after", "O2"))
    for o in OPTIONS
]
RUNS += [("after", "AdamW", "O1", {"half_loaded": True})]  # which widens what DDP has seen


@pytest.mark.parametrize(("order", "optimizer", "level", "options"), RUNS)
def test_as_one_process_on_the_joint_batch(
    pair: Pair, order: str, optimizer: str, level: str, options: dict[str, Any]
) -> None:
    (first, joint, largest), (second, *_) = run(
        pair, order=order, optimizer=optimizer, level=level, **options
    )
    assert first == second
    assert first["hooked"] == ("hook" in options)
    assert first["steps"] == STEPS // options.get("accumulate", 1) and first["skipped"] == 0
    # half gradients are rounded on each rank, summed, and rounded by the hook: 4 roundings, doubled
    # for what a difference of one step adds in the later ones
    unit = 2.0**-8 if options.get("hook") == "bf16" else 2.0**-11
    bound = STEPS * STEP_SIZES[optimizer] * largest * 8 * unit
    difference = max(
        abs(a - b)
        for p, q in zip(first["masters"], joint, strict=True)
        for a, b in zip(p, q, strict=True)
    )
    assert difference <= bound
    assert math.isfinite(bound)


# Faults on one rank


def harm(kind: str, here: bool, output: Tensor) -> Tensor:
    """The loss of one rank goes bad, or all gradients do by what one rank adds to the sum."""
    if kind == "loss" and here:
        return loss_of(output) * math.nan
    if kind in ("gradient", "cleaned") and here:
        output.register_hook(lambda grad: grad * math.inf)
    return loss_of(output)


def meddle(kind: str, here: bool, net: nn.Module) -> None:
    """After the all-reduce: one rank cleans what all have, or has what the others do not."""
    if kind == "cleaned" and not here:
        for p in net.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
    if kind == "own" and here:
        next(iter(net.parameters())).grad[0] = math.inf


@on_ranks
def faults(
    kind: str, culprit: int, order: str, optimizer: str, level: str, by_hand: bool
) -> list[dict[str, Any]]:
    """What became of a run with a fault in the third step, and of one without that step."""
    rank, found = dist.get_rank(), []
    for faulty in (True, False):
        model, net, stepper, amp = enabled_and_wrapped(order, optimizer, level)
        for step, x in enumerate(batches()):
            here = step == 2 and rank == culprit
            if step == 2 and not faulty:
                continue
            loss = harm(kind, here, model(x.chunk(RANKS)[rank]))
            if by_hand:
                amp.scaler.scale(loss).backward()
            else:
                amp.backward(loss)
            if step == 2:
                meddle(kind, here, net)
            if by_hand:
                amp.scaler.step(stepper)
                amp.scaler.update()
            else:
                stepper.step()
            stepper.zero_grad()
        found.append({**outcome(net, stepper, amp), "explained": amp.explain()})
        amp.disable()
    return found


@pytest.mark.parametrize(
    ("culprit", "order", "optimizer", "level", "by_hand"),
    [
        (0, "before", "AdamW", "O2", False),
        (1, "after", "SGD", "O1", False),
        (1, "before", "AdamW", "O2", True),
    ],
)
@pytest.mark.parametrize("kind", ["loss", "gradient", "cleaned", "own"])
def test_a_fault_on_one_rank_is_skipped_by_all(
    pair: Pair, kind: str, culprit: int, order: str, optimizer: str, level: str, by_hand: bool
) -> None:
    arguments = {"order": order, "optimizer": optimizer, "level": level, "by_hand": by_hand}
    (first, without), (second, _) = faults(pair, kind=kind, culprit=culprit, **arguments)
    texts = first.pop("explained"), second.pop("explained")
    assert first == second
    if kind == "loss":
        assert all(
            f"the loss itself was inf or NaN (loss scale 1024) on rank {culprit}, and" in t
            for t in texts
        )
    if kind == "own":  # the others see good gradients
        assert f"the gradients of rank {culprit} were not" in texts[1 - culprit]
        assert "parameter(s) were not" in texts[culprit]
    assert first["steps"] == without["steps"] == STEPS - 1 and first["skipped"] == 1
    assert first["forward_faults"] == (kind == "loss")
    assert first["scale"] == (2.0**10 if kind == "loss" else 2.0**9)
    # another scale rounds half gradients alike, but for subnormal ones
    if kind == "loss" or level == "O1":
        assert (first["masters"], first["state"]) == (without["masters"], without["state"])


@on_ranks
def heals(order: str) -> dict[str, Any]:
    rank = dist.get_rank()
    model, net, stepper, amp = enabled_and_wrapped(order, "AdamW", "O2", on_nonfinite="heal")
    for step, x in enumerate(batches()):
        x = x.chunk(RANKS)[rank]
        if step in (1, 3) and rank == 1:
            x = x * 60000  # more than float16 holds
        amp.backward(loss_of(model(x)))
        stepper.step()
        stepper.zero_grad()
        if step == 2:  # one fault seen, by rank 1
            counted = amp.state_dict()["faults"]
    found = {**outcome(net, stepper, amp), "healed": amp.stats()["healed"], "counted": counted}
    found["dtype"] = str(net.first.weight.dtype)
    amp.unheal("first")
    amp.disable()
    return found


@pytest.mark.parametrize("order", ["before", "after"])
def test_all_ranks_heal_what_one_has_found(pair: Pair, order: str) -> None:
    first, second = heals(pair, order=order)
    assert first == second
    assert (first["skipped"], first["healed"], first["dtype"]) == (2, ["first"], "torch.float32")
    assert sum(first["counted"]["by_module"].values()) == first["counted"]["seen"] == 1


# Wrapping and unwrapping


@on_ranks
def small_state(order: str, state: str) -> dict[str, Any]:
    """Train from different seeds, and save; what each rank has at the end."""
    rank, losses = dist.get_rank(), []
    model, net, stepper, amp = enabled_and_wrapped(order, "AdamW", "O2", seed=rank, state=state)
    for x in batches():
        loss = loss_of(model(x.chunk(RANKS)[rank]))
        losses.append(float(loss.detach()))
        amp.backward(loss)
        stepper.step()
        stepper.zero_grad()
    values = [v for s in stepper.state.values() for v in s.values() if isinstance(v, Tensor)]
    kinds = sorted({str(v.dtype) for v in values if v.dim()})
    packed = stepper.state_dict(packed=True)["state"].values()
    state_of = [v.double().tolist() for s in packed for v in s.values() if isinstance(v, Tensor)]
    masters = [m.detach().double().flatten().tolist() for _, m in amp.named_master_params()]
    halves = [p.detach().double().flatten().tolist() for p in net.parameters()]
    amp.disable()
    return {"losses": losses, "kinds": kinds, "same": [state_of, masters, halves]}


@pytest.mark.parametrize(("state", "kind"), [("bf16", "torch.bfloat16"), ("8bit", "torch.uint8")])
@pytest.mark.parametrize("order", ["before", "after"])
def test_small_state_is_alike_on_all_ranks(pair: Pair, order: str, state: str, kind: str) -> None:
    first, second = small_state(pair, order=order, state=state)
    assert first["same"] == second["same"]
    assert first["kinds"] == second["kinds"] == [kind]
    masters, halves = first["same"][1:]
    assert masters != halves
    assert sum(first["losses"][-2:]) < sum(first["losses"][:2])


class OffloadOnCpu(Offload):
    """The same without a bus: host memory is whatever ``pin`` has returned."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pinned: dict[int, Tensor] = {}

    def pin(self, tensor: Tensor) -> Tensor:
        pinned = tensor.detach().clone()
        self._pinned[id(pinned)] = pinned
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        return id(tensor) in self._pinned

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def wait(self) -> None:
        pass


@contextlib.contextmanager
def offload_on_cpu() -> Iterator[None]:
    """Inside, ``offload="state"`` takes a model on the CPU."""
    streams = {name: mock.MagicMock() for name in ("Stream", "Event", "stream", "current_stream")}
    with (
        mock.patch.multiple(torch.cuda, **streams),
        mock.patch.multiple(parts, Offload=OffloadOnCpu, check_offload=lambda *given: None),
    ):
        yield


@on_ranks
def offloaded(order: str, state: str) -> list[Any]:
    """What a rank has after the same steps without and with ``offload``, one of them a skip."""
    rank, found = dist.get_rank(), []
    for fields in ({}, {"offload": "state"}):
        with offload_on_cpu():
            how = {"seed": rank, "state": state, **fields}
            model, net, stepper, amp = enabled_and_wrapped(order, "AdamW", "O2", **how)
            for step, x in enumerate(batches()):
                amp.backward(harm("loss", step == 2 and rank == 1, model(x.chunk(RANKS)[rank])))
                amp.clip_grad_norm_(1.0)
                stepper.step()
                stepper.zero_grad()
            packed = stepper.state_dict(packed=True)["state"]
            moments = [s[key] for _, s in sorted(packed.items()) for key in sorted(s)]
            halves = [p.detach() for p in net.parameters()]
            masters = [m.detach() for _, m in amp.named_master_params()]
            values = [x for x in (*moments, *halves, *masters) if isinstance(x, Tensor)]
            found.append([x.double().flatten().tolist() for x in values])
            assert amp.stats()["skipped"] == 1
            amp.disable()
    return found


@pytest.mark.parametrize("state", ["fp32", "8bit"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_offloaded_state_is_alike_on_all_ranks(pair: Pair, order: str, state: str) -> None:
    """And has the bits of a run without offload, though the ranks begin with other weights."""
    first, second = offloaded(pair, order=order, state=state)
    assert first == second
    plain, streamed = first
    assert plain == streamed


@on_ranks
def reduced_gradients(order: str) -> bool:
    """Whether DDP still reduces the gradients of all parameters after disable()."""
    rank = dist.get_rank()
    model, net, _, amp = enabled_and_wrapped(order, "SGD", "O2")
    if order == "before":
        model(batches()[0])
    amp.disable()
    loss_of(model(batches()[0].chunk(RANKS)[rank])).backward()
    reduced = [p.grad for p in net.parameters()]
    net.zero_grad()
    loss_of(net(batches()[0])).backward()
    return all(
        torch.allclose(r, p.grad, atol=1e-6) for r, p in zip(reduced, net.parameters(), strict=True)
    )


@pytest.mark.parametrize("order", ["before", "after"])
def test_disabled_gradients_are_reduced_again(pair: Pair, order: str) -> None:
    assert reduced_gradients(pair, order=order) == [True, True]


@on_ranks
def compiled(how: str) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.compiler.reset()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    stepper = OPTIMIZERS["SGD"](net.parameters())
    amp = tritonamp.enable(
        net, stepper, level="O2", scaler=tritonamp.GradScaler("cpu", init_scale=2.0**10)
    )
    if how == "inside":
        model = DistributedDataParallel(torch.compile(net, backend="aot_eager", fullgraph=True))
    else:
        model = torch.compile(DistributedDataParallel(net), backend="aot_eager")
    for step, x in enumerate(batches(4)):
        amp.backward(harm("loss", step == 2 and rank == 1, model(x.chunk(RANKS)[rank])))
        stepper.step()
        stepper.zero_grad()
    found = outcome(net, stepper, amp)
    amp.disable()
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["inside", "around"])
def test_compiled(pair: Pair, how: str) -> None:
    first, second = compiled(pair, how=how)
    assert first == second
    assert (first["steps"], first["forward_faults"], first["scale"]) == (3, 1, 2.0**10)


@on_ranks
def converted(order: str) -> list[Any]:
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    stepper = OPTIMIZERS["SGD"](net.parameters())
    if order == "convert first":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    amp = tritonamp.enable(net, stepper, level="O2")
    if order == "enable first":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    norm = net[1]
    stepped = list(amp.master_params())
    found = [
        type(norm).__name__,
        str(norm.weight.dtype),
        str(norm.running_mean.dtype),
        str(net[0].weight.dtype),
    ]
    found.append(any(p is norm.weight for p in stepped))
    amp.disable()
    return found


@pytest.mark.parametrize("order", ["convert first", "enable first"])
def test_sync_batch_norm_stays_fp32(pair: Pair, order: str) -> None:
    """Its forward needs a GPU, and so does DDP around it."""
    expected = ["SyncBatchNorm", "torch.float32", "torch.float32", "torch.float16", True]
    assert converted(pair, order=order) == [expected, expected]


# Uneven inputs


@on_ranks
def uneven(order: str, optimizer: str, level: str, fault: str) -> list[dict[str, Any]]:
    """Two epochs in which rank 1 has two batches more than rank 0, then an even one without
    ``join``.
    """
    rank, found = dist.get_rank(), []
    model, net, stepper, amp = enabled_and_wrapped(order, optimizer, level)
    for epoch in range(3):
        count = 4 + 2 * rank if epoch < 2 else 3
        with model.join() if epoch < 2 else contextlib.nullcontext():
            for step, x in enumerate(batches()[:count]):
                here = step == 1 and rank == 1 and epoch > 0
                kind = fault if epoch < 2 else "loss"
                amp.backward(harm(kind, here, model(x.chunk(RANKS)[rank])))
                stepper.step()
                stepper.zero_grad()
        found.append(outcome(net, stepper, amp))
    amp.disable()
    return found


@pytest.mark.parametrize("fault", ["", "loss", "gradient"])
@pytest.mark.parametrize(
    ("order", "optimizer", "level"), [("before", "AdamW", "O2"), ("after", "SGD", "O1")]
)
def test_uneven_inputs(pair: Pair, order: str, optimizer: str, level: str, fault: str) -> None:
    """In ``join`` a rank that has run out has no say: decisions rest on reduced gradients."""
    first, second = uneven(pair, order=order, optimizer=optimizer, level=level, fault=fault)
    assert first == second
    skipped = int(fault != "")
    assert [epoch["steps"] for epoch in first] == [6, 12 - skipped, 14 - skipped]
    assert first[-1]["forward_faults"] == 1
    assert first[-1]["scale"] == 2.0 ** (10 - skipped)


# The cross-check


@on_ranks
def parted(how: str, steps: int) -> list[str]:
    """What goes wrong on rank 1 between the first and the second step, and what is said about it
    and when.
    """
    rank, said = dist.get_rank(), []
    model, net, stepper, amp = enabled_and_wrapped("before", "SGD", "O1")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("tritonamp").addHandler(handler)
    try:
        for step in range(steps):
            x = torch.randn(8, 6).chunk(RANKS)[rank]
            bypassed = how == "bypassed" and step > 0
            amp.backward(loss_of((net if bypassed else model)(x)))
            stepper.step()
            stepper.zero_grad()
            if rank == 1 and step == 1 and how == "scale":
                amp.scaler.update(2.0**7)
            if rank == 1 and step == 1 and how == "steps":
                counts = {"clean": 7, "scale_overflows": 0, "forward_faults": 0}
                amp.load_state_dict({**amp.state_dict(), "counts": counts})
    except RuntimeError as error:
        said.append(f"{step}: {error}")
    logging.getLogger("tritonamp").removeHandler(handler)
    amp.disable()
    return said


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (
            "scale",
            "(rank 0: loss scale 1024, 100 steps taken; rank 1: loss scale 128, 100 steps taken)",
        ),
        (
            "steps",
            "(rank 0: loss scale 1024, 100 steps taken; rank 1: loss scale 1024, 105 steps taken)",
        ),
    ],
)
def test_ranks_that_have_parted_are_told(pair: Pair, how: str, told: str) -> None:
    for said in parted(pair, how=how, steps=CHECK_EVERY + 2):
        assert said == [
            f"{CHECK_EVERY + 1}: rank 1 parted from the others {told}, so their parameters "
            "differ: load a checkpoint, amp.load_state_dict included, on all ranks alike, and set "
            "the scale and call step() on all or none"
        ]


def test_gradients_that_are_not_reduced_are_told(pair: Pair) -> None:
    for said in parted(pair, how="bypassed", steps=2 * CHECK_EVERY + 2):
        assert len(said) == 1
        assert re.match(
            r"the ranks step with different gradients, of norms \S+, \S+, and will part: "
            "call the DDP",
            said[0],
        )


def test_nothing_is_said_of_ranks_that_agree(pair: Pair) -> None:
    assert parted(pair, how="", steps=CHECK_EVERY + 2) == [[], []]


# Without DDP


@on_ranks
def independent() -> tuple[float, int]:
    """Two models of their own: rank 1's faults are none of rank 0's business."""
    rank = dist.get_rank()
    net = Net()
    stepper = OPTIMIZERS["SGD"](net.parameters())
    amp = tritonamp.enable(
        net, stepper, level="O2", scaler=tritonamp.GradScaler("cpu", init_scale=2.0**10)
    )
    for _ in range(2 + rank):
        amp.backward(harm("gradient", rank == 1, net(batches()[0])))
        stepper.step()
        stepper.zero_grad()
    found = amp.scaler.get_scale(), amp.stats()["skipped"]
    amp.disable()
    return found


def test_models_of_their_own_decide_alone(pair: Pair) -> None:
    assert independent(pair) == [[2.0**10, 0], [2.0**7, 3]]


@on_ranks
def two_groups() -> str:
    nets = [nn.Linear(6, 3), nn.Linear(6, 3)]
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    models = [
        DistributedDataParallel(net, process_group=group)
        for net, group in zip(nets, groups, strict=True)
    ]
    try:
        tritonamp.enable(models, OPTIMIZERS["SGD"]([p for net in nets for p in net.parameters()]))
    except ValueError as error:
        return str(error)
    return "enabled"


def test_models_of_several_groups_are_refused(pair: Pair) -> None:
    for text in two_groups(pair):
        assert text.startswith(
            "model: the models of one tritonamp.enable run under several process groups"
        )


def test_threads_run_one_enabled_model(device: torch.device) -> None:
    """What nn.DataParallel does with replicas."""
    net = Net().to(device)
    amp = tritonamp.enable(net, level="O2")
    inputs = [x.to(device) for x in batches(8)]
    expected = [net(x) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(net, inputs))
    amp.disable()
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.dtype is torch.float32 and torch.equal(output, wanted)


if __name__ == "__main__":
    serve(*sys.argv[1:])
