"""Two gloo ranks on CPU train one model under DistributedDataParallel: they decide alike, and end
up alike.

The ranks are this file run as a script, see two_ranks.py.
"""

import contextlib
import logging
import math
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import (
    SMALL_STEPS,
    STEP_SIZES,
    Replica,
    Shared,
    distance,
    joint,
    joint_batches,
    listening,
    share,
)
from small_models import SmoothNet
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from two_ranks import RANKS, Pair, enable, of_ranks, on_ranks, refused, serve, whole

import tritonamp
from tritonamp.distributed.parted import CHECK_EVERY
from tritonamp.runtime import parts
from tritonamp.step.offload import Offload

pytestmark = of_ranks

STEPS = 6


# What the ranks train


class PartlyUsed(SmoothNet):
    """A model with a layer that no forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


KINDS = "AdamW", "SGD"
HOOK_CALLS: list[str] = []
HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
OF_DDP = "static_graph", "find_unused_parameters", "gradient_as_bucket_view"


def seeded_net(seed: int = 0, half_loaded: bool = False, **options: Any) -> nn.Module:
    """Return a model; with these options of DDP one that has an unused layer."""
    torch.manual_seed(seed)
    net = PartlyUsed()
    if not options.get("find_unused_parameters") and not options.get("static_graph"):
        del net.unused
    return net.half() if half_loaded else net


def replica(
    order: str, optimizer: str, level: str, seed: int = 0, half_loaded: bool = False, **options: Any
) -> Replica:
    """Return a training under DDP; ``options`` are those of DDP and of ``enable``."""
    net = seeded_net(seed, half_loaded, **options)
    ddp = {name: options.pop(name) for name in OF_DDP if name in options}
    if kind := options.pop("hook", None):
        options["hook"] = (
            HOOK_CALLS,
            lambda calls, bucket: calls.append(kind) or HOOKS[kind](None, bucket),
        )
    return Replica(net, optimizer, level, order=order, ddp=ddp, **options)


class OneProcess(Shared):
    """A training of one process on the joint batches, which notes its ``largest`` gradient."""

    largest = 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, share=joint)

    def finish(self, max_norm: float | None = None, *how: Any) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.largest = max(self.largest, *(float(g.float().abs().max()) / 2**10 for g in grads))
        super().finish(max_norm, *how)


@on_ranks
def replicas_and_alone(
    order: str, optimizer: str, level: str, accumulate: int = 1, **options: Any
) -> tuple[dict[str, Any], list[Any], float]:
    HOOK_CALLS.clear()
    # other weights on each rank: DDP makes them those of rank 0
    run = replica(order, optimizer, level, seed=dist.get_rank(), **options)
    net = seeded_net(**{k: v for k, v in options.items() if k != "hook"})
    alone = OneProcess(net.float(), optimizer, level)
    for each in (run, alone):
        each.walk(joint_batches(STEPS), max_norm=1.0, micro=accumulate)
    return {**run.outcome(), "hooked": len(HOOK_CALLS) > 0}, alone.values(), alone.largest


@on_ranks
def wide_gradients(order: str, level: str, **options: Any) -> list[float]:
    """Return the distance of each gradient from the FP32 mean of the ranks' gradients."""
    how = {"loss_scale": 2.0**10, "grad_dtype": torch.float32, "share": joint}
    net = seeded_net()
    run = Replica(net, "SGD", level, order=order, ddp=options, **how)
    far = []
    for x in joint_batches(4):
        exact = [torch.zeros_like(p, dtype=torch.float32) for p in net.parameters()]
        for part in x.chunk(RANKS):
            for micro in part.chunk(2):
                loss = 2.0**10 * (net(micro) - 1).square().mean()
                grads = torch.autograd.grad(loss, [*net.parameters()])
                for total, grad in zip(exact, grads, strict=True):
                    total += grad.float() / RANKS
        first, last = share(x).chunk(2)
        with run.no_sync():
            run.backward(run.loss(first))
        run.backward(run.loss(last))
        for param, total in zip(net.parameters(), exact, strict=True):
            assert param.grad is not None and param.grad.dtype is torch.float32
            far.append(float((param.grad - total).norm() / total.norm()))
        run.finish()
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
    net = PartlyUsed().half() if half_loaded else PartlyUsed()
    optimizer = SMALL_STEPS["SGD"](net.parameters())
    dtypes = [p.dtype for p in net.parameters()]
    fields: dict[str, Any] = {"level": "O2", "grad_dtype": torch.float32}
    if half_loaded:
        fields |= {"level": "O1", "half_parameters": True, "master_weights": True}
    if order == "after":
        model = DistributedDataParallel(net, **{option: True})
        with pytest.raises(ValueError, match="grad_dtype") as refused:
            enable(model, optimizer, **fields)
        assert [p.dtype for p in net.parameters()] == dtypes
        return str(refused.value)
    with enable(net, optimizer, **fields):
        model = DistributedDataParallel(net, **{option: True})
        with pytest.raises(ValueError, match="grad_dtype") as refused:
            model(joint_batches(1)[0])
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
    net = PartlyUsed().half()
    for part in (net.first, net.norm, net.unused):
        part.requires_grad_(False)
    ddp = {"find_unused_parameters": True}
    run = Replica(net, "SGD", "O1", ddp=ddp, share=joint, grad_dtype=torch.float32)
    run.step(joint_batches(1)[0].half())
    return [*run.counts("steps"), [str(p.dtype) for p in net.parameters()]]


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_a_frozen_half_base_needs_no_buckets(pair: Pair) -> None:
    for steps, dtypes in frozen_half_base(pair):
        assert steps == 1 and dtypes.count("torch.float32") == 2  # of the layer that trains


PLAIN = [
    (order, o, level, {}) for order in ("before", "after") for o in KINDS for level in ("O1", "O2")
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
    (first, expected, largest), (second, *_) = replicas_and_alone(
        pair, order=order, optimizer=optimizer, level=level, **options
    )
    assert first == second
    assert first["hooked"] == ("hook" in options)
    assert first["steps"] == STEPS // options.get("accumulate", 1) and first["skipped"] == 0
    # half gradients are rounded on each rank, summed, and rounded by the hook: 4 roundings, doubled
    # for what a difference of one step adds in the later ones
    unit = 2.0**-8 if options.get("hook") == "bf16" else 2.0**-11
    bound = STEPS * STEP_SIZES[optimizer] * largest * 8 * unit
    difference = distance(first["masters"], expected)
    assert difference <= bound
    assert math.isfinite(bound)


# Faults on one rank


def meddle(kind: str, here: bool, net: nn.Module) -> None:
    """After the all-reduce, clean the gradients of one rank, or spoil those of one rank alone."""
    if kind == "cleaned" and not here:
        for p in net.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
    if kind == "own" and here:
        next(iter(net.parameters())).grad[0] = math.inf


@on_ranks
def in_the_third_step(kind: str, culprit: int, by_hand: bool, **how: Any) -> list[dict[str, Any]]:
    """Return the ends of a run with a fault in the third step, and of one without that step."""
    here, found = dist.get_rank() == culprit, []
    fault = {"cleaned": "gradient"}.get(kind, kind) if here else None
    for faulty in (True, False):
        run = replica(**how)
        for step, x in enumerate(joint_batches(STEPS)):
            if step == 2 and not faulty:
                continue
            loss = run.loss(x, fault if step == 2 else None)
            run.amp.scaler.scale(loss).backward() if by_hand else run.backward(loss)
            if step == 2:
                meddle(kind, here, run.net)
            if by_hand:
                run.amp.scaler.step(run.optimizer)
                run.amp.scaler.update()
                run.optimizer.zero_grad()
            else:
                run.finish()
        found.append({**run.outcome(), "explained": run.amp.explain()})
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
    (first, without), (second, _) = in_the_third_step(pair, kind=kind, culprit=culprit, **arguments)
    texts = first.pop("explained"), second.pop("explained")
    assert first == second
    if kind == "loss":
        assert all(
            f"the loss itself was inf or NaN (loss scale 1024) on rank {culprit}, and" in t
            for t in texts
        )
    if kind == "own":  # the others see good gradients
        assert f"the gradients of rank {culprit} were not" in texts[1 - culprit]
        assert "parameter(s) were inf" in texts[culprit]
    assert first["steps"] == without["steps"] == STEPS - 1 and first["skipped"] == 1
    assert first["forward_faults"] == (kind == "loss")
    assert first["scale"] == (2.0**10 if kind == "loss" else 2.0**9)
    # another scale rounds half gradients alike, but for subnormal ones
    if kind == "loss" or level == "O1":
        assert (first["masters"], first["state"]) == (without["masters"], without["state"])


@on_ranks
def heals(order: str) -> dict[str, Any]:
    run = replica(order, "AdamW", "O2", on_nonfinite="heal")
    for step, x in enumerate(joint_batches(STEPS)):
        # more than float16 holds
        run.step(x * 60000 if step in (1, 3) and dist.get_rank() == 1 else x)
        if step == 2:  # one fault seen, by rank 1
            counted = run.amp.state_dict()["faults"]
    found = {**run.outcome(), "healed": run.amp.stats()["healed"], "counted": counted}
    found["dtype"] = str(run.net.first.weight.dtype)
    run.amp.unheal("first")
    return found


@pytest.mark.parametrize("order", ["before", "after"])
def test_all_ranks_heal_what_one_has_found(pair: Pair, order: str) -> None:
    first, second = heals(pair, order=order)
    assert first == second
    assert (first["skipped"], first["healed"], first["dtype"]) == (2, ["first"], "torch.float32")
    assert sum(first["counted"]["by_module"].values()) == first["counted"]["seen"] == 1


# Wrapping and unwrapping


@on_ranks
def small_state(order: str, **fields: Any) -> dict[str, Any]:
    """Train from different seeds, and save; return the state of this rank at the end."""
    run = replica(order, "AdamW", "O2", seed=dist.get_rank(), **fields)
    run.walk(joint_batches(STEPS))
    values = [v for s in run.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    kinds = sorted({str(v.dtype) for v in values if v.dim()})
    packed = run.optimizer.state_dict(packed=True)["state"].values()
    state_of = [v.double().tolist() for s in packed for v in s.values() if isinstance(v, Tensor)]
    masters = [whole(m) for _, m in run.amp.named_master_params()]
    halves = [whole(p) for p in run.net.parameters()]
    return {"losses": run.losses, "kinds": kinds, "same": [state_of, masters, halves]}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"state": "bf16"}, "torch.bfloat16"),
        ({"state": "8bit"}, "torch.uint8"),
        ({"masters": "packed"}, "torch.float32"),
    ],
)
@pytest.mark.parametrize("order", ["before", "after"])
def test_small_state_is_alike_on_all_ranks(
    pair: Pair, order: str, fields: dict[str, str], kind: str
) -> None:
    first, second = small_state(pair, order=order, **fields)
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
    """Return the state after the same steps, one of them a skip, without and with ``offload``."""
    rank, found = dist.get_rank(), []
    for fields in ({}, {"offload": "state"}):
        with offload_on_cpu():
            run = replica(order, "AdamW", "O2", seed=rank, state=state, **fields)
            run.walk(joint_batches(STEPS), {2: "loss"} if rank == 1 else {}, max_norm=1.0)
            packed = run.optimizer.state_dict(packed=True)["state"]
            moments = [s[key] for _, s in sorted(packed.items()) for key in sorted(s)]
            masters = [m for _, m in run.amp.named_master_params()]
            values = [*moments, *run.net.parameters(), *masters]
            found.append([whole(x) for x in values if isinstance(x, Tensor)])
            assert run.counts("skipped") == [1]
            run.end()
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
    run, (x,) = replica(order, "SGD", "O2"), joint_batches(1)
    if order == "before":
        run.model(x)
    run.end()
    run.loss(x).backward()
    reduced = [p.grad for p in run.net.parameters()]
    run.net.zero_grad()
    (run.net(x) - 1).square().mean().backward()
    pairs = zip(reduced, run.net.parameters(), strict=True)
    return all(torch.allclose(r, p.grad, atol=1e-6) for r, p in pairs)


@pytest.mark.parametrize("order", ["before", "after"])
def test_disabled_gradients_are_reduced_again(pair: Pair, order: str) -> None:
    assert reduced_gradients(pair, order=order) == [True, True]


@on_ranks
def compiled_ddp(how: str) -> dict[str, Any]:
    torch.compiler.reset()
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    run = Shared(net, "SGD")
    if how == "inside":
        run.model = DistributedDataParallel(torch.compile(net, backend="aot_eager", fullgraph=True))
    else:
        run.model = torch.compile(DistributedDataParallel(net), backend="aot_eager")
    run.walk(joint_batches(4), {2: "loss"} if dist.get_rank() == 1 else {})
    return {**run.outcome(), "saved": run.saved()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["inside", "around"])
def test_compiled(pair: Pair, how: str) -> None:
    first, second = compiled_ddp(pair, how=how)
    assert first == second
    assert (first["steps"], first["forward_faults"], first["scale"]) == (3, 1, 2.0**10)


@on_ranks
def with_sync_batch_norm(order: str) -> list[Any]:
    net: Any = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    stepper = SMALL_STEPS["SGD"](net.parameters())
    if order == "convert first":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    amp = enable(net, stepper, level="O2")
    if order == "enable first":
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    norm = net[1]
    dtypes = [str(x.dtype) for x in (norm.weight, norm.running_mean, net[0].weight)]
    return [type(norm).__name__, *dtypes, any(p is norm.weight for p in amp.master_params())]


@pytest.mark.parametrize("order", ["convert first", "enable first"])
def test_sync_batch_norm_stays_fp32(pair: Pair, order: str) -> None:
    """Its forward needs a GPU, and so does DDP around it."""
    expected = ["SyncBatchNorm", "torch.float32", "torch.float32", "torch.float16", True]
    assert with_sync_batch_norm(pair, order=order) == [expected, expected]


# Uneven inputs


@on_ranks
def uneven(order: str, optimizer: str, level: str, fault: str) -> list[dict[str, Any]]:
    """Two epochs in which rank 1 has two batches more than rank 0, then an even one without
    ``join``.
    """
    rank, found = dist.get_rank(), []
    run = replica(order, optimizer, level)
    for epoch in range(3):
        count = 4 + 2 * rank if epoch < 2 else 3
        kind = fault if epoch < 2 else "loss"
        faults = {1: kind} if rank == 1 and epoch > 0 else {}
        with run.model.join() if epoch < 2 else contextlib.nullcontext():
            run.walk(joint_batches(STEPS)[:count], faults)
        found.append(run.outcome())
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
    """Part rank 1 from the others between the first and the second step; return the messages."""
    run = replica("before", "SGD", "O1")
    wrapped = run.model
    with listening(logging.WARNING) as said:
        try:
            for step in range(steps):
                run.model = run.net if how == "bypassed" and step > 0 else wrapped
                run.step(torch.randn(8, 6))
                if dist.get_rank() == 1 and step == 1 and how == "scale":
                    run.amp.scaler.update(2.0**7)
                if dist.get_rank() == 1 and step == 1 and how == "steps":
                    counts = {"clean": 7, "scale_overflows": 0, "forward_faults": 0}
                    run.amp.load_state_dict({**run.amp.state_dict(), "counts": counts})
        except RuntimeError as error:
            said.append(f"{step}: {error}")
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
    rank, (x,) = dist.get_rank(), joint_batches(1)
    run = Shared(PartlyUsed(), "SGD", share=joint)
    run.walk([x] * (2 + rank), dict.fromkeys(range(3), "gradient") if rank == 1 else {})
    return run.amp.scaler.get_scale(), run.amp.stats()["skipped"]


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
    optimizer = SMALL_STEPS["SGD"]([p for net in nets for p in net.parameters()])
    return refused(lambda: enable(models, optimizer))


def test_models_of_several_groups_are_refused(pair: Pair) -> None:
    for text in two_groups(pair):
        assert text.startswith(
            "ValueError: model: the models of one tritonamp.enable run under several process groups"
        )


def test_threads_run_one_enabled_model(device: torch.device) -> None:
    """Threads run the model as nn.DataParallel runs replicas."""
    net = PartlyUsed().to(device)
    amp = tritonamp.enable(net, level="O2")
    inputs = [x.to(device) for x in joint_batches(8)]
    expected = [net(x) for x in inputs]
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(net, inputs))
    amp.disable()
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.dtype is torch.float32 and torch.equal(output, wanted)


if __name__ == "__main__":
    serve(*sys.argv[1:])
