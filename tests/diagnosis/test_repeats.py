"""A skipped batch that runs again is called reproduced, not reproduced twice, or other bits."""

import collections
import itertools
import logging
import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from runs import Training, batch, started_on_cpu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.diagnosis.repeats import (
    Place,
    Repeat,
    Verdict,
    gradients_again,
    repeat_of_all,
    verdict_on,
)
from tritonamp.diagnosis.replay import nondeterministic_ops
from tritonamp.diagnosis.replay.nondeterministic_ops import nondeterministic
from tritonamp.diagnosis.replay.repeating import Bits, differing_outputs
from tritonamp.diagnosis.skips import Skip
from tritonamp.kernels._decision import OVERFLOW
from tritonamp.step import snapshots

FIELDS = {
    "O1": {"level": "O1", "init_scale": 16.0},
    "O1 bf16": {"level": "O1", "dtype": torch.bfloat16},
    "O2": {"level": "O2", "init_scale": 16.0},
    "O2 bf16": {"level": "O2", "dtype": torch.bfloat16},
}


@pytest.fixture(autouse=True)
def nothing_was_compiled() -> None:
    """Forget what earlier tests have compiled: then no bits are compared with the first run's."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()


LOSS = "If the loss is computed outside of the model", "Look in the model and the loss"


class Flip(torch.autograd.Function):
    """Flips a bit of the first element in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bit: int, backward: bool) -> Tensor:
        ctx.bit, ctx.backward_ = bit, backward
        return x.clone() if backward else flipped(x, bit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return flipped(grad, ctx.bit) if ctx.backward_ else grad, None, None


def flipped(x: Tensor, bit: int) -> Tensor:
    """Return a copy whose first element has inf's exponent with a set mantissa, or a flipped bit.

    bit: the number of the bit, from the highest exponent bit down; -1: all of the exponent.
    """
    x = x.detach().clone()
    kind = torch.int32 if x.dtype is torch.float32 else torch.int16
    bits, width = x.view(kind).view(-1), x.element_size() * 8
    exponents = {torch.float16: 5, torch.bfloat16: 8, torch.float32: 8}[x.dtype]
    if bit < 0:
        bits[0] |= ((1 << exponents) - 1) << (width - 1 - exponents)
    else:
        bits[0] ^= 1 << (width - 2 - bit)
    return x


class Norms(nn.Module):
    """A model with BatchNorm and dropout, in which a fault can be planted.

    checkpoints: whether the first layers are computed again in the backward.
    """

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.25), nn.Linear(16, 3)
        self.checkpoints = checkpoints
        self.plant: Callable[[Tensor], Tensor] | None = None

    def begin(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.first(x)).relu())

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.begin, x, use_reentrant=False) if self.checkpoints else self.begin(x)
        plant, self.plant = self.plant, None  # it fires once
        return self.last(plant(h) if plant is not None else h)


class Planted(Training):
    """Trains on the batch of a seed, with a fault in some steps."""

    def __init__(
        self, model: Any = Norms, level: str = "O2", optimizer: str = "SGD", **fields: Any
    ) -> None:
        given = {"on_nonfinite": "explain", **FIELDS.get(level, {}), **fields}
        super().__init__(model, optimizer, lr=1e-3, **{"level": level, **given})

    def steps(self, first: int, last: int) -> None:
        for seed in range(first, last):
            self.step(batch(seed))


start = started_on_cpu(Planted)


@pytest.fixture
def told(caplog: Any) -> Iterator[Callable[[], str]]:
    """The text of the last skip in the log, and no earlier one."""
    with caplog.at_level(logging.INFO, "tritonamp"):
        yield lambda: [text for text in caplog.messages if text.startswith("step ")][-1]


def is_other_bits(text: str) -> bool:
    """Whether the report suspects the hardware, and nothing else."""
    return "\nother bits" in text and not any(part in text for part in LOSS)


@pytest.mark.parametrize("level", FIELDS)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_flip_in_the_forward_is_other_bits(
    start: Any, told: Any, level: str, checkpoints: bool
) -> None:
    run = start(lambda: Norms(checkpoints), level=level)
    run.steps(0, 3)
    run.model.plant = lambda h: Flip.apply(h, -1, False)
    run.steps(3, 4)
    text = told()
    assert text.startswith("step 4 skipped (1 of 4): forward fault: ") and is_other_bits(text)
    assert "two more runs of this batch agree, and differ from the first: output 0" in text
    assert "the hardware of this machine is suspected" in text
    assert run.amp.explain() == run.amp.explain(replay=True) == text
    run.steps(4, 6)
    assert run.causes == [None] * 3 + ["forward fault"] + [None] * 2


@pytest.mark.parametrize("level", FIELDS)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_flip_in_the_backward_is_other_bits(
    start: Any, told: Any, level: str, checkpoints: bool
) -> None:
    run = start(lambda: Norms(checkpoints), level=level)
    run.steps(0, 3)
    run.model.plant = lambda h: Flip.apply(h, -1, True)
    run.steps(3, 4)
    text = told()
    assert run.amp.history[-1].cause in ("scale overflow", "backward fault")
    assert is_other_bits(text) and "finds its level" not in text and "Look in" not in text
    assert "other bits: gradients of first.weight, first.bias, norm.weight, norm.bias were " in text
    assert "the hardware of this machine is suspected" in text
    assert run.amp.explain(replay=True) == text


def test_a_loop_with_a_scaler_is_told_so_too(start: Any, told: Any) -> None:
    run = start()
    for seed in range(4):
        run.model.plant = (lambda h: Flip.apply(h, -1, True)) if seed == 3 else None
        run.step(batch(seed), by_scaler=True)
    assert "\nother bits: gradients of first.weight" in told()
    assert pickle.loads(pickle.dumps(run.amp.scaler)).before_backward is None


@pytest.mark.parametrize("mode", ["explain", "heal", "raise"])
def test_each_answer_to_a_skip_says_so(start: Any, told: Any, mode: str) -> None:
    run = start(on_nonfinite=mode)
    run.steps(0, 2)
    run.model.plant = lambda h: Flip.apply(h, -1, False)
    if mode == "raise":
        with pytest.raises(tritonamp.NonFiniteError, match="other bits: two more runs"):
            run.steps(2, 3)
    else:
        run.steps(2, 3)
        assert is_other_bits(told())
    assert run.amp.stats()["healed"] == []


def test_a_flip_arms_no_watch_of_the_loss(start: Any) -> None:
    run = start()
    run.steps(0, 2)
    run.model.plant = lambda h: Flip.apply(h, -1, False)
    run.steps(2, 3)
    assert run.amp._parts.live_faults._steps_left == 0


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("fault", ["data", "model"])
def test_a_fault_of_batch_or_model_is_reproduced(
    start: Any, told: Any, level: str, fault: str
) -> None:
    run = start(level=level)
    if fault == "model":
        run.model.last.forward = lambda h: nn.Linear.forward(run.model.last, h) * 1e6
    run.step(batch(0) * (1e6 if fault == "data" else 1.0))
    assert "\n  replay:  reproduced" in told() and "other bits" not in told()


# Ops that torch calls nondeterministic


class Scattering(nn.Module):
    """Adds up in another order each time, as scatter_add on a GPU; the first order gives inf."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.runs = -1  # no fault

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h = torch.zeros_like(h).scatter_add(1, torch.arange(6).expand(8, 6), h)
        if self.runs < 0:
            return h
        self.runs += 1
        return h + (math.inf if self.runs == 1 else 0.01 * self.runs)


def test_ops_without_an_order_are_named(
    start: Any, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(nondeterministic_ops.DEVICES, "scatter_add", frozenset(["cpu"]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    run = start(Scattering)
    run.steps(0, 2)
    run.model.runs = 0
    run.steps(2, 3)
    assert "\nnot reproduced twice: two more runs of this batch differ from each other" in told()
    assert "Ops that torch lists as nondeterministic ran: scatter_add. " in told()
    assert "suspected" not in told() and not any(part in told() for part in LOSS)


def test_ops_of_the_backward_do_not_explain_another_output(
    start: Any, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(nondeterministic_ops.DEVICES, "threshold_backward", frozenset(["cpu"]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for where in ("backward", "forward"):
        run = start(skip_outliers=6.0)
        run.steps(0, 66)
        at = (lambda h: torch.cat([h[:1] + 100.0, h[1:]])) if where == "forward" else Scaled.apply
        run.model.plant = at
        run.steps(66, 67)
        assert is_other_bits(told()) is (where == "forward")
        assert ("ran: threshold_backward." in told()) is (where == "backward")


RUNS = 6  # the first, one that explains it, one that notes ops, and three whose bits are compared


@pytest.mark.parametrize(("odd", "is_fault"), [({4}, True), ({3}, True), ({3, 4}, False)])
def test_runs_that_differ_without_such_an_op_are_other_bits(
    start: Any, told: Any, odd: set[int], is_fault: bool
) -> None:
    """If two of three agree: a clock, or a state in other objects, makes each another one."""
    runs = itertools.count()

    def plant(h: Tensor) -> Tensor:
        run = next(runs)
        assert run < RUNS
        return h + (math.inf if run == 0 else run if run in odd else 0)

    model = start(lambda: Norms())
    model.steps(0, 2)
    forward = model.model.last.forward
    model.model.last.forward = lambda h: plant(forward(h))
    model.steps(2, 3)
    seen = "\nother bits: two more runs of this batch differ from each other: output 0"
    assert (seen in told()) is is_fault


def test_which_ops_are_nondeterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    aten, many = torch.ops.aten, 2
    ops = [(aten.mm.default, "cuda"), (aten.scatter_add_.default, "cuda")]
    ops += [(aten.scatter_add_.default, "cpu"), (aten._index_put_impl_.default, "cpu")]
    monkeypatch.setattr(torch, "get_num_threads", lambda: many)
    assert nondeterministic(ops) == ["scatter_add", "index_put_impl"]
    many = 1
    assert nondeterministic(ops) == ["scatter_add"]
    assert nondeterministic([(aten.convolution.default, "cuda")]) == ["convolution"]
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert nondeterministic([(aten.convolution.default, "cuda")]) == []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert nondeterministic(ops) == []


def test_each_listed_op_exists() -> None:
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    known = {name.partition("::")[2].strip("_") for name in names if name.startswith("aten::")}
    assert {*nondeterministic_ops.DEVICES, *nondeterministic_ops._OF_CUDNN} <= known


# Outliers


@pytest.mark.parametrize("level", FIELDS)
def test_an_outlier_of_the_batch_is_reproduced(start: Any, told: Any, level: str) -> None:
    run = start(level=level, skip_outliers=6.0)
    run.model.norm = nn.Identity()
    run.steps(0, 66)
    run.step(batch(66) * 40.0)
    assert run.causes == [None] * 66 + ["outlier"]
    text, _, ending = told().partition(" Later skips of this kind are INFO lines: ")
    assert text.endswith("gives the same result, so look at the batch and the weights.")
    assert "\nreproduced: run again, the batch gives the same result" in text and ending
    assert run.amp.explain() == run.amp.explain(replay=True) == text


@pytest.mark.parametrize("level", FIELDS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_outlier_of_a_flip_is_other_bits(start: Any, told: Any, level: str, where: str) -> None:
    run = start(level=level, skip_outliers=6.0)
    run.steps(0, 66)

    def plant(h: Tensor) -> Tensor:
        if where == "forward":
            return torch.cat([h[:1] + 100.0, h[1:]])
        return Scaled.apply(h)

    run.model.plant = plant
    run.steps(66, 67)
    assert run.causes == [None] * 66 + ["outlier"] and is_other_bits(told())
    part = "output 0" if where == "forward" else "the gradient norm was "
    assert part in told() and "Look at the batch" not in told()


class Scaled(torch.autograd.Function):
    """Multiplies one row of the gradient, as a flipped bit of an exponent may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.cat([grad[:1] * 256.0, grad[1:]])


def test_a_scale_that_finds_its_level_runs_one_batch_again(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(init_scale=2.0**12)
    run.steps(0, 2)
    ran = []
    repeat = run.amp._parts.replays.repeat
    monkeypatch.setattr(
        run.amp._parts.replays, "repeat", lambda **how: ran.append(how) or repeat(**how)
    )
    for _ in range(3):
        run.backward(run.loss(batch(2)) * 1e4)
        run.finish()
    assert run.causes[2:] == ["scale overflow"] * 3 and ran == [{"at_skip": True}]


def test_an_outlier_runs_again_on_request(start: Any) -> None:
    run = start(skip_outliers=6.0, on_nonfinite="skip")
    run.model.norm = nn.Identity()
    run.steps(0, 66)
    x = batch(66) * 40.0
    run.step(x)
    assert run.amp.explain(replay=True) == run.amp.explain()
    run.model.forward = lambda x: run.model.last(run.model.begin(x)) + np.random.rand()
    assert "\nother bits: " not in run.amp.explain(replay=True)


# No false alarm


class Numpy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + float(np.random.rand())


class Remembers(nn.Linear):
    """Its output depends on a buffer that it changes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("past", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.past += 1.0
        return super().forward(x) + self.past


class Counts(nn.Linear):
    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return super().forward(x) + self.runs


class Draws(nn.Linear):
    """It draws from a generator of its own."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.drawn = torch.Generator().manual_seed(0), np.random.default_rng(0), random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        ours, numpys, pythons = self.drawn
        drawn = float(torch.rand((), generator=ours)) + numpys.random() + pythons.random()
        return super().forward(x) + drawn


class Queues(nn.Linear):
    """It adds its last output, of which later runs of one batch have the same."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.past: Any = collections.deque(maxlen=1)

    def forward(self, x: Tensor) -> Tensor:
        out, last = super().forward(x), sum(self.past)
        self.past.append(out.detach())
        return out + last


class Shrinks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("layer", [Numpy, Remembers, Counts, Draws, Queues, Shrinks])
def test_a_first_run_with_other_inputs_is_not_compared(
    start: Any, told: Any, layer: type[nn.Module]
) -> None:
    run = start(lambda: layer(6, 3))
    run.steps(0, 2)
    run.step(batch(2), bad=True)
    assert "other bits" not in told() and "The loss is computed from it outside" in told()


def test_an_output_that_is_written_to_is_compared_as_it_was_returned(start: Any, told: Any) -> None:
    run = start(lambda: nn.Linear(6, 3))
    run.steps(0, 2)
    output = run.model(batch(2))
    loss = output.float().square().mean() * math.inf
    run.backward(loss)
    with torch.no_grad():
        output.zero_()
    run.finish()
    assert "other bits" not in told() and "The loss is computed from it outside" in told()


class Drawing(nn.Linear):
    """Draws random numbers from some forward on."""

    draws = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, self.draws))


def test_numbers_that_were_not_recorded_are_not_compared(start: Any, told: Any) -> None:
    """Generators that never move are read seldom, so the second forward that draws is inexact."""
    run = start(lambda: Drawing(6, 3))
    run.steps(0, 12)
    run.model.draws = True
    run.steps(12, 14)
    run.step(batch(14), bad=True)
    assert "other bits" not in told()


def term(run: Any, x: Tensor) -> Tensor:
    """A term of the loss that reads a parameter, with a root that has no slope."""
    return run.model(x).float().square().mean() + (run.model.last.bias.float() * 0).sum().sqrt()


def penalty(run: Any, x: Tensor) -> Tensor:
    """A penalty of gradients, with such a root: only its own backward gives NaN."""
    output = run.model(x.requires_grad_()).float()
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.square().mean() + (grad * 0).sum().sqrt()


@pytest.mark.parametrize("loss", [term, penalty])
@pytest.mark.parametrize("level", ["O1", "O2 bf16"])
def test_a_loss_around_the_model_is_no_fault_of_the_hardware(
    start: Any, level: str, loss: Callable[[Any, Tensor], Tensor]
) -> None:
    run = start(level=level)
    run.steps(0, 2)
    run.backward(loss(run, batch(2)))
    run.finish()
    assert run.amp.stats()["skipped"] == 1
    assert "other bits" not in run.amp.explain()


def test_micro_batches_whose_sum_overflows_are_reproduced(start: Any, told: Any) -> None:
    run = start(lambda: nn.Linear(6, 3), level="O2", init_scale=2.0**15)
    run.steps(0, 2)
    for _ in range(2):  # each gradient fits, their sum does not
        run.backward(4.0 * run.model(torch.ones(8, 6)).float().sum() / 12.0)
    run.finish()
    assert run.causes[-1] == "scale overflow" and "other bits" not in told()


def test_a_step_between_forward_and_skip_is_known(start: Any) -> None:
    run = start()
    forwards = run.amp._parts.forwards
    run.model(batch(0))
    (snapshot,) = forwards._snapshots
    forwards.pop_all()
    assert not forwards.ran_before_last(snapshot)
    forwards.pop_all()
    assert forwards.ran_before_last(snapshot)


def test_nothing_changes_in_a_run_that_repeats_a_batch(start: Any) -> None:
    ends = []
    for mode in ("skip", "explain"):
        run = start(on_nonfinite=mode)
        run.steps(0, 2)
        run.model.plant = lambda h: Flip.apply(h, -1, True)
        run.steps(2, 6)
        ends.append([*run.everything(), *run.model.buffers(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_plain_run_takes_no_checksums(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    for name in ("bit_sum", "sequence_number"):
        monkeypatch.setattr(snapshots, name, fail)
    monkeypatch.setattr("tritonamp.step.forwards.reads_leaves", fail)
    run = start(on_nonfinite="skip", skip_outliers=6.0)
    run.steps(0, 3)
    assert run.amp.stats()["steps"] == 3


# Verdicts of ranks


def smaller(share: float, ops: tuple[str, ...] = ()) -> Repeat:
    return Repeat(Verdict.SMALLER, "gradients were inf", share, 10.0, ops)


def test_ranks_that_explain_the_gradients_together_are_not_suspected() -> None:
    assert repeat_of_all({0: smaller(5.0), 1: smaller(5.0)}) is None
    assert repeat_of_all({0: smaller(1.0), 1: None}) is None
    assert repeat_of_all({0: smaller(1.0), 1: Repeat(Verdict.REPRODUCED)}) is None
    found = repeat_of_all({0: smaller(1.0), 3: smaller(5.0)})
    assert found is not None and found.verdict is Verdict.OTHER_BITS
    assert found.words.startswith("other bits on one of ranks 0, 3: gradients were inf, on each ra")
    found = repeat_of_all({0: smaller(1.0), 3: smaller(5.0, ("scatter_add",))})
    assert found is not None and found.verdict is Verdict.NOT_TWICE


def overflowed(**amax: float) -> Skip:
    return Skip(OVERFLOW, 3, True, 1, 3, 16.0, 1.0, False, amax, 1.0, 65504.0)


def again_by(limit: float = 65504.0, **largest: float) -> Bits:
    return Bits([], {}, largest, largest, limit)


def test_only_parameters_of_the_decision_count() -> None:
    """A generator's loss gives gradients to the discriminator, too."""
    again = again_by(a=1.0, b=math.inf)
    found = gradients_again(overflowed(a=math.inf), [], again, Place(0, 1))
    assert found is not None and found.verdict is Verdict.SMALLER and "of a were" in found.words
    found = gradients_again(overflowed(a=math.inf, b=math.inf), [], again, Place(0, 1))
    assert found == Repeat(Verdict.REPRODUCED)
    assert gradients_again(overflowed(c=math.inf), [], again, Place(0, 1)) is None


@pytest.mark.parametrize("limit", [65504.0, 3e38])
def test_ranks_may_add_up_to_the_largest_number_of_their_format(limit: float) -> None:
    skip, again = overflowed(a=math.inf), again_by(limit, a=60000.0)
    shares = {rank: gradients_again(skip, [], again, Place(rank, 2)) for rank in (0, 1)}
    assert (repeat_of_all(shares) is None) is (limit == 65504.0)


def test_a_rank_with_other_bits_comes_first() -> None:
    other = verdict_on("output 0", (), Place(1, 2).on_rank)
    twice = verdict_on("output 0", ["scatter_add"], Place(0, 2).on_rank)
    assert repeat_of_all({0: twice, 1: other, 2: None}) == other
    assert other.words.startswith("other bits on rank 1: output 0. Torch lists no op")
    assert "the hardware of rank 1 is suspected" in other.words


def test_outputs_without_memory_are_not_compared() -> None:
    assert differing_outputs([1, None, 3], [1, 2, 4]) == ["output 2"]
    assert differing_outputs([1], [1, 2]) == ["the number of outputs"]
