"""``amp.audit``: a backward runs twice; flipped bits are found, and clean steps are left alone."""

import copy
import gc
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flipped_bits import Flipping, flipped
from gpuless.real_cuda import AnyCuda
from helpers import same
from runs import LEVELS, Training, batch, in_two
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tritonamp import functional
from tritonamp.diagnosis import audit, audit_ops, audit_passes

KINDS: dict[str, dict[str, Any]] = {
    **{level: {"level": level} for level in LEVELS},
    "O2 bf16": {"level": "O2", "dtype": torch.bfloat16},
    "O2, FP32 gradients": {"level": "O2", "grad_dtype": torch.float32},
}


class Audited(Training):
    """A training at a low loss scale, audited at every step."""

    def __init__(self, *args: Any, every: int | None = 1, **how: Any) -> None:
        super().__init__(*args, **how)
        self.lower_scale()
        self.amp.audit(every=every)

    def audits(self) -> tuple[int, int, int]:
        """Return the numbers of clean, unclear and suspected audits."""
        counts = self.amp.stats()["audits"]
        return counts["clean"], counts["unclear"], counts["suspected"]

    def grads(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


@pytest.fixture
def start(handles: Any) -> Iterator[Callable[..., Audited]]:
    # an audit looks at all objects for activations, and other tests have left many
    gc.freeze()
    yield lambda model=Flipping, *args, **how: Audited(model, *args, enable=handles, **how)
    gc.unfreeze()


def plant(run: Audited, number: int, passes: tuple[int, ...] = (2,)) -> bool:
    """Take a step in which a bit flips; return whether it changes a gradient."""
    draw = random.Random(number)
    x = batch(number, device=run.device)
    run.backward(run.loss(x))
    clean = run.grads()
    run.zero_grad()
    run.model.flip.__dict__.update(
        passes=passes,
        site=draw.randrange(Flipping.SITES),
        element=draw.randrange(1 << 20),
        bit=draw.randrange(32),
    )
    run.backward(run.loss(x))
    run.model.flip.passes = ()
    changed = not same(clean, run.grads())
    run.finish()
    return changed


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_each_planted_flip_is_found(start: Any, kind: str, part: int) -> None:
    """In gradients of parameters and of activations: 40 of each kind, all skipped."""
    run, found = start(**KINDS[kind]), 0
    for number in range(15 * part, 15 * part + 15):
        before = run.masters()
        seen = run.audits()
        if plant(run, number):
            found += 1
            assert run.audits() == (seen[0], 0, seen[2] + 1), run.model.flip
            assert same(before, run.masters())
        else:
            assert run.audits() == (seen[0] + 1, 0, seen[2])
    assert found >= 10
    assert run.amp.stats()["vetoes"] == run.amp.stats()["skipped"] == found


@pytest.mark.parametrize("kind", KINDS)
def test_clean_steps_raise_no_alarm(start: Any, kind: str) -> None:
    """With the bits of a run without audits."""
    run, without = start(**KINDS[kind]), start(every=None, **KINDS[kind])
    for each in (run, without):
        each.train(range(20))
    assert run.audits() == (20, 0, 0) and without.audits() == (0, 0, 0)
    assert same(run.everything(), without.everything())


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_two_thousand_clean_steps_raise_no_alarm(start: Any, kind: str) -> None:
    run = start(**KINDS[kind])
    run.train(range(2000))
    assert run.audits() == (2000, 0, 0)
    assert run.amp.stats()["skipped"] == 0


@pytest.mark.parametrize("passes", [(1,), (2,), (1, 3), (2, 3)])
def test_two_of_three_alike_are_a_verdict(
    start: Any, caplog: pytest.LogCaptureFixture, passes: tuple[int, ...]
) -> None:
    """Whichever of the first two is the odd one: the step is skipped, for a reason with names."""
    run = start()
    run.step()
    run.model.flip.__dict__.update(passes=passes, site=4, element=5, bit=3)
    with caplog.at_level(logging.WARNING, "tritonamp"):
        run.step()
    (text,) = caplog.messages
    assert text == (
        "step 2: other bits: one of three backwards of the same graph differs in second.weight (at "
        "least 1 bit(s)) of 4 gradients. torch calls no op on the way there nondeterministic, so "
        "hardware is suspected. The step is skipped."
    )
    assert run.causes == [None, "veto"]
    assert "veto: other bits: one of three" in run.amp.explain()
    run.model.flip.passes = ()
    run.step()
    assert run.audits() == (2, 0, 1) and run.amp.stats()["steps"] == 2


@pytest.mark.parametrize("level", LEVELS)
def test_on_each_device(device: torch.device, start: Any, level: str) -> None:
    run = start(device=device, level=level)
    found = [plant(run, number) for number in range(3)]
    run.step()
    assert run.audits() == (1 + found.count(False), 0, found.count(True))


class Noisy(torch.autograd.Function):
    """The identity, whose backward gives other bits each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.passes = itertools.count(1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 + 0.25 * next(ctx.passes))


def test_three_results_are_no_verdict(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Said once; the steps are taken."""

    class Model(Flipping):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Noisy.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return out

    run = start(Model)
    with caplog.at_level(logging.WARNING, "tritonamp"):
        run.train(range(3))
    assert run.audits() == (0, 3, 0) and run.amp.stats()["steps"] == 3
    assert [text.split(":")[0] for text in caplog.messages] == ["amp.audit gives no verdict"]
    assert "three backwards of one graph have three results, in second.bias" in caplog.text


class Indexed(Flipping):
    """A model that reads its activations by an index, which torch differentiates in any order."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[torch.tensor([0, 2, 2])]


class IndexedInput(Flipping):
    """A model with such an op before its only other layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x * self.scale)[torch.tensor([0, 2, 2])])


@pytest.mark.parametrize(("model", "verdict"), [(Indexed, False), (IndexedInput, True)])
def test_ops_without_an_order_are_named(
    start: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    verdict: bool,
) -> None:
    """They explain the gradients behind them, and no others."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    run = start(model)
    run.model.flip.__dict__.update(passes=(2,), site=1, bit=3)
    with caplog.at_level(logging.WARNING, "tritonamp"):
        run.step()
    assert run.audits() == (0, not verdict, verdict)
    assert ("nondeterministic: IndexBackward0." in caplog.text) is not verdict
    run.model.flip.passes = ()
    run.step()
    assert run.audits()[0] == 1, "the same bits need no excuse"
    torch.use_deterministic_algorithms(True)
    try:
        run.model.flip.passes = (2,)
        run.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert run.audits()[2] == 1 + verdict, "torch has an order now"


class Node:
    """A node of a graph on a GPU."""

    def __init__(self, device: str) -> None:
        self._input_metadata = [type("Metadata", (), {"device": device})]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("IndexSelectBackward0", True),
        ("UpsampleBilinear2DAaBackward1", True),
        ("MaxPool3DWithIndicesBackward0", True),
        ("CumsumBackward0", True),
        ("ScaledDotProductFlashAttentionBackward0", True),
        ("ConvolutionBackward0", True),
        ("CompiledFunctionBackward", True),
        ("IndexBackward0", False),
        ("ScaledDotProductFlashAttentionForCpuBackward0", False),
        ("AddmmBackward0", False),
        ("AccumulateGrad", False),
    ],
)
def test_ops_by_device(name: str, expected: bool) -> None:
    node = type(name, (Node,), {})
    assert bool(audit_ops.unordered([node("cuda:0")])) is expected
    assert not audit_ops.unordered([node("cpu")]) or name == "IndexBackward0"


def test_torchs_warnings_name_ops() -> None:
    def put() -> None:
        torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.0]))

    assert audit_ops.warned_ops(put) == ["put_"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_hooks_of_parameters_run_once_and_in_their_order(start: Any) -> None:
    run, calls = start(), list[str]()
    weight = run.model.first.weight
    handle = weight.register_hook(lambda grad: calls.append("first"))
    weight.register_hook(lambda grad: calls.append("second") or flipped(grad, 0, 1))
    weight.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    before = list(weight._backward_hooks.values())
    run.step()
    assert calls == ["first", "second", "after"]
    assert list(weight._backward_hooks.values()) == before
    assert run.audits() == (1, 0, 0), "what hooks write is not the backward's"
    handle.remove()
    run.step()
    assert calls == ["first", "second", "after", "second", "after"]


@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_so_many_steps(start: Any, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all their micro-batches."""
    audited = list[int]()
    run_ahead, step = audit_passes.Passes.run_ahead, 0

    def counted(passes: audit_passes.Passes, keeps_graph: bool) -> None:
        audited.append(step)  # of the loop below
        run_ahead(passes, keeps_graph)

    monkeypatch.setattr(audit_passes.Passes, "run_ahead", counted)
    run = start(every=every)
    for _ in range(7):
        run.backward()
        run.backward()
        run.finish()
        step += 1
    assert audited == [step for step in range(0, 7, every) for _ in range(2)]
    assert run.audits() == (len(range(0, 7, every)), 0, 0)


def test_a_fault_in_any_micro_batch_skips_the_step(start: Any) -> None:
    run = start()
    for passes in ((2,), ()):
        run.model.flip.__dict__.update(passes=passes, site=4, bit=3)
        run.backward()
    run.finish()
    assert run.audits() == (0, 0, 1) and run.causes == ["veto"]


def test_gradients_that_were_cleared_are_forgotten(start: Any) -> None:
    run = start()
    run.model.flip.__dict__.update(passes=(2,), site=4, bit=3)
    run.backward()
    run.zero_grad()
    run.model.flip.passes = ()
    run.step()
    assert run.audits() == (1, 0, 0) and run.causes == [None]


def test_optimizers_that_take_turns_have_turns_of_their_own(start: Any) -> None:
    run = start(Flipping, in_two, every=2)
    for optimizer in run.optimizers * 4:
        run.amp.backward(run.loss(), optimizer)
        optimizer.step()
        run.zero_grad()
    assert run.audits() == (4, 0, 0)
    run.model.flip.__dict__.update(passes=(2,), site=4, bit=3)
    run.amp.backward(run.loss(), loss_id=1)
    run.finish()
    assert run.audits() == (4, 0, 1)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_backward_of_the_users_own(start: Any, keeps: bool) -> None:
    """Inside of ``scale_loss``, which runs two passes before it; by the scaler no audit."""
    run = start()
    run.step(by_scaler=True)
    assert run.audits() == (0, 0, 0)
    for passes, expected in (((), (1, 0, 0)), ((3,), (1, 0, 1)), ((1,), (1, 0, 2))):
        run.model.flip.__dict__.update(passes=passes, site=4, bit=3)
        with run.amp.scale_loss(run.loss()) as scaled:
            scaled.backward(retain_graph=keeps)
        run.finish()
        assert run.audits() == expected
    run.model.flip.passes = ()
    run.backward()
    with run.amp.scale_loss(run.loss()):
        pass
    run.finish()
    assert run.audits() == (1, 1, 2)


class Checkpointed(Flipping):
    """A model that computes its activations again in the backward, after a dropout."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        def layers(x: Tensor) -> Tensor:
            return nn.functional.dropout(super(Checkpointed, self).forward(x), 0.25)

        x = x.requires_grad_()
        out: Tensor = checkpoint(layers, x, use_reentrant=self.reentrant)
        return out


class Reentrant(Checkpointed):
    reentrant = True


def test_checkpointed_graphs(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = start(Checkpointed)
    run.train(range(3))
    assert run.audits() == (3, 0, 0)
    run = start(Reentrant)
    with caplog.at_level(logging.WARNING, "tritonamp"):
        run.train(range(3))
    assert run.audits() == (0, 3, 0) and run.amp.stats()["steps"] == 3
    (text,) = caplog.messages
    assert text.startswith("amp.audit gives no verdict: the graph is checkpointed with use_reentra")


class Once(torch.autograd.Function):
    """The identity, whose backward runs only once, as one with donated buffers does."""

    error: Exception

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise Once.error
        return grad


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("donated buffers need it\nand more"), "donated buffers need it"),
        (KeyError(), "KeyError"),
    ],
)
def test_graphs_that_run_once(
    start: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    told: str,
) -> None:
    """Their steps are taken."""
    monkeypatch.setattr(Once, "error", error, raising=False)

    class Model(Flipping):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Once.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return out

    run = start(Model)
    with caplog.at_level(logging.WARNING, "tritonamp"):
        run.train(range(2))
    assert run.audits() == (0, 2, 0) and run.amp.stats()["steps"] == 2
    text = f"amp.audit gives no verdict: the backward cannot run twice: {told}"
    assert caplog.messages == [text]


class Hidden(nn.Module):
    """A model whose loss takes its outputs as hidden states."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), norm)
        self.head = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def masked(h: Tensor, head: nn.Linear, y: Tensor) -> Tensor:
    return functional.masked_softmax(head(h), causal=True).float().square().mean()


LOSSES: dict[str, Callable[[Tensor, nn.Linear, Tensor], Tensor]] = {
    "cross_entropy": lambda h, head, y: functional.cross_entropy(head(h), y),
    "linear_cross_entropy": lambda h, head, y: functional.linear_cross_entropy(
        h, head.weight, y, head.bias
    ),
    "linear_token_log_probs": lambda h, head, y: (
        -functional.linear_token_log_probs(h, head.weight, y, head.bias).mean()
    ),
    "token_log_probs": lambda h, head, y: -functional.token_log_probs(head(h), y).mean(),
    "masked_softmax": masked,
    "torch's": lambda h, head, y: nn.functional.cross_entropy(head(h), y),
}
NORMS = [nn.LayerNorm(16), nn.RMSNorm(16), nn.GroupNorm(4, 16), nn.Softmax(-1), nn.GELU()]


class WithLoss(Audited):
    """A training on one of ``LOSSES``."""

    name = "torch's"

    def loss(self, x: Any = None) -> Tensor:
        h = self.model(self.x)
        with self.amp.autocast():
            return LOSSES[self.name](h, self.model.head, torch.arange(len(h)))


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)
@pytest.mark.parametrize("name", LOSSES)
def test_our_backwards_run_twice(handles: Any, name: str, norm: nn.Module) -> None:
    """They keep what they have saved as it was."""
    run = WithLoss(lambda: Hidden(copy.deepcopy(norm)), enable=handles, fuse_loss=True)
    run.name = name
    for _ in range(2):
        run.step()
    assert run.audits() == (2, 0, 0)


@pytest.mark.parametrize("sparse", [False, True])
def test_embeddings(start: Any, sparse: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.flipping = nn.Embedding(5, 6, sparse=sparse), Flipping()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.flipping(self.table((x[:, 0] > 0).long()))
            return out

    run = start(Model, "SGD")
    run.step()
    run.model.flipping.flip.__dict__.update(passes=(2,), site=0, bit=9)
    run.step()
    assert run.audits() == (1, 0, 1)


@pytest.mark.parametrize("level", LEVELS)
def test_only_audited_steps_read_the_device(gpu: AnyCuda, start: Any, level: str) -> None:
    run = start(device="cuda", level=level, every=4)
    for step in range(9):
        with gpu.watch() as records:
            run.step()
        # the first steps look for mistakes of the loop
        assert step % 4 == 0 or step < 4 or records == []
    assert run.audits() == (3, 0, 0)


@pytest.mark.parametrize("every", [-1, 1.5, True, "500"])
def test_every_is_a_number_of_steps(start: Any, every: Any) -> None:
    run = start()
    with pytest.raises(
        ValueError, match=r"^every: expected a number of steps, 1 or more, or None, got "
    ):
        run.amp.audit(every=every)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_backwards_that_no_audit_sees_are_told_once(
    start: Any, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    run = start(level=level)
    for number in range(4):
        loss = run.loss(batch(number))
        (loss if level == "O0" else run.amp.scaler.scale(loss)).backward()
        run.finish()
        told = [r for r in caplog.messages if r.startswith("amp.audit has seen no backward: ")]
        assert len(told) == (number > 0)
    assert run.audits() == (0, 0, 0)


@pytest.mark.parametrize("every", [None, 0])
def test_audits_end(start: Any, every: int | None) -> None:
    run = start()
    run.step()
    run.amp.audit(every=every)
    run.model.flip.__dict__.update(passes=(2,), site=4, bit=3)
    run.step()
    assert run.audits() == (1, 0, 0)


def test_a_model_without_an_optimizer(handles: Any) -> None:
    amp = handles(Flipping(), level="O2")
    with pytest.raises(RuntimeError, match="this model was enabled without an optimizer"):
        amp.audit()


def test_a_cuda_graph_cannot_be_audited(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    monkeypatch.setattr(audit, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"^amp.audit: a CUDA graph cannot compare bits on the"):
        run.backward()
    monkeypatch.undo()
    run.step()
    assert run.audits() == (1, 0, 0)


@pytest.mark.parametrize(
    ("difference", "flips"), [(1, 1), (-1, 1), (1 << 63, 1), (-(1 << 63), 1), (5, 2), (7, 2)]
)
def test_the_least_number_of_flips(difference: int, flips: int) -> None:
    assert audit_passes._flips(difference) == flips


class InPlace(torch.autograd.Function):
    """The mean of squares, whose backward scales a gradient in place that its forward has made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
        x = x.detach().float()
        grad = 2 * x / x.numel()
        if where == "saved":
            ctx.save_for_backward(grad)
        else:
            ctx.grad = [grad] if where == "list" else grad
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.saved_tensors:
            (made,) = ctx.saved_tensors
        elif isinstance(ctx.grad, list):
            made = ctx.grad.pop()
        else:
            made, ctx.grad = ctx.grad, None
        return made.mul_(grad), None


@pytest.mark.parametrize("where", ["saved", "list", "attribute"])
def test_functions_that_write_to_what_they_saved(start: Any, where: str) -> None:
    """Each backward finds it as the forward left it."""
    run, without = start(), start(every=None)
    for each in (run, without):
        for number in range(3):
            y = each.model(batch(number))
            each.amp.backward(InPlace.apply(y, where))
            each.finish()
    assert run.audits() == (3, 0, 0)
    assert same(run.everything(), without.everything())


class Drawing(torch.autograd.Function):
    """The identity, whose backward rounds at random."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (1 + 1e-2 * torch.randn_like(grad) + 1e-2 * random.random())


@pytest.mark.parametrize("flips", [False, True])
def test_a_backward_that_draws(start: Any, flips: bool) -> None:
    """Each one draws the same numbers, also the third."""

    class Model(Flipping):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Drawing.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return out

    runs = start(Model), start(Model, every=None)
    for run in runs:
        torch.manual_seed(1)
        random.seed(1)
        run.train(range(3))
        drawn = torch.rand(()), random.random()
        if run is runs[0]:
            first = drawn
    assert first == drawn
    assert runs[0].audits() == (3, 0, 0)
    assert same(runs[0].everything(), runs[1].everything())
    if flips:
        runs[0].model.flip.__dict__.update(passes=(2,), site=4, element=5, bit=3)
        runs[0].step()
        assert runs[0].audits() == (3, 0, 1)


class Labelled(Tensor):
    """A class of a library's own."""


@pytest.mark.parametrize("kind", [Tensor, Labelled])
def test_gradients_of_activations_that_are_retained(start: Any, kind: type[Tensor]) -> None:
    run, without = start(), start(every=None)
    for each in (run, without):
        y = each.model(each.x).as_subclass(kind)
        y.retain_grad()
        for _ in range(2):
            each.amp.backward(y.square().mean(), retain_graph=True)
        each.retained = y.grad
    assert torch.equal(run.retained, without.retained)


class CheckpointedNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def test_a_checkpointed_batch_norm_counts_as_without_audits(start: Any) -> None:
    run, without = start(CheckpointedNorm), start(CheckpointedNorm, every=None)
    for each in (run, without):
        each.train(range(3))
    assert run.audits() == (3, 0, 0)
    assert same([*run.model.buffers()], [*without.model.buffers()])
