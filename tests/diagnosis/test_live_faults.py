"""Under "explain" and "heal" a step is watched as it runs, to find a fault of the loss."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from runs import Training, batch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.diagnosis import live_faults, live_watch


def no_log(output: Tensor) -> Tensor:
    return (output.softmax(-1) * 0).log().mean()


def no_slope(output: Tensor) -> Tensor:
    return (output * 0).square().sum(-1).sqrt().mean()


def fine(output: Tensor) -> Tensor:
    return output.float().square().mean()


class Nothing(TorchDispatchMode):
    """Runs each op as it is, and counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


class OwnLoss(Training):
    """The loss is a function of the output; scales of 1 need no search for their level."""

    def __init__(self, **fields: Any) -> None:
        scaler = tritonamp.GradScaler("cpu", init_scale=1.0)
        super().__init__(**{"on_nonfinite": "explain", "scaler": scaler, **fields})

    def loss(self, x: Any = None) -> Tensor:
        return x(self.model(self.x))


@pytest.fixture
def run() -> Iterator[OwnLoss]:
    """Return a training whose next step is watched, because a fault of the loss came before."""
    with OwnLoss() as training:
        training.step(no_log)
        assert torch._C._len_torch_dispatch_stack() == 0
        yield training
        training.step(fine)
        assert torch._C._len_torch_dispatch_stack() == 0
        assert training.amp.scaler.on_loss is None
        assert not nn.modules.module._global_forward_hooks


def faults_told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the second line of each text about a skip."""
    return [t.splitlines()[1] for t in caplog.messages if t.startswith("step ") and "\n" in t]


WATCHED = (
    "The next steps run watched, from the forward to the loss, until one has a fault: 4 at most."
)


@pytest.mark.parametrize("by_scaler", [False, True])
@pytest.mark.parametrize("mode", ["explain", "heal"])
@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (no_log, "domain error, forward: outside the model, op log at "),
        (no_slope, "backward nan, backward: outside the model, op sqrt at "),
    ],
)
def test_the_line_of_the_loss_is_named_at_the_second_fault(
    caplog: Any, loss: Callable[[Tensor], Tensor], named: str, mode: str, by_scaler: bool
) -> None:
    line = f"{__file__}:{loss.__code__.co_firstlineno + 1}"
    with OwnLoss(on_nonfinite=mode) as run, caplog.at_level(logging.INFO, "tritonamp"):
        for _ in range(2):
            run.step(loss, by_scaler=by_scaler)
        first, second = [t for t in caplog.messages if t.startswith("step ")]
        assert first.endswith(WATCHED) and "outside the model, op" not in first
        assert f"\n{named}{line}\n" in second and WATCHED not in second
        assert run.amp.explain() == second
        assert run.amp.explain(replay=True) == second, "a replay has no loss"
        assert run.amp.stats()["healed"] == []


def test_a_weight_from_before_the_forward_is_called_so(run: OwnLoss, caplog: Any) -> None:
    weights = torch.ones(8, 1) / torch.arange(8.0)[:, None]
    with caplog.at_level(logging.INFO, "tritonamp"):
        run.step(lambda output: (weights * output).mean())
    assert (
        "came in with the batch: a tensor of shape (8, 1) from before the forward, samples 0 of "
        "dim 0\n" in run.amp.explain()
    )


class PenaltyFirst(OwnLoss):
    """A term of the loss is computed from the weights, before the forward and so before a watch."""

    def loss(self, x: Any = None) -> Tensor:
        penalty = sum(x(p) for p in self.model.parameters())
        return fine(self.model(self.x)) + penalty


@pytest.mark.parametrize(
    ("penalty", "kind", "reason"),
    [
        (
            lambda p: (p * 0).sum() / p.detach().sum().mul(0),
            "propagated, forward: ",
            "why:     inf or NaN arrived with a tensor of shape () that was computed before this "
            "run began\n",
        ),
        (
            lambda p: (p * 0).square().sum().sqrt(),
            "backward nan, backward: outside the model, op sqrt",
            "the slope of sqrt at 0 is infinite",
        ),
    ],
    ids=["forward", "backward"],
)
def test_a_term_from_before_the_forward_is_no_data(
    caplog: Any, penalty: Any, kind: str, reason: str
) -> None:
    with PenaltyFirst() as run, caplog.at_level(logging.INFO, "tritonamp"):
        for _ in range(2):
            run.step(penalty)
        assert faults_told(caplog)[1].startswith(kind)
        assert reason in run.amp.explain()


def test_a_backward_of_one_own_inside_a_block(caplog: Any) -> None:
    with OwnLoss() as run, caplog.at_level(logging.INFO, "tritonamp"):
        for _ in range(2):
            with run.amp.scale_loss(no_slope(run.model(run.x))) as scaled:
                scaled.backward()
            run.finish()
        assert "outside the model, op sqrt" in faults_told(caplog)[1]


def test_steps_are_watched_after_powers_of_two(caplog: Any) -> None:
    with OwnLoss() as run, caplog.at_level(logging.INFO, "tritonamp"):
        for _ in range(8):
            run.step(no_log)
        told = faults_told(caplog)
    assert [i for i, text in enumerate(told) if text.startswith("domain error")] == [1, 3, 6]
    assert all(t.endswith(": as at step 2.") for t in (told[3], told[6]))
    assert told[4].startswith(
        "Run again, the model shows no fault. The last fault that was found, at step 2, is domain "
        "error, forward: outside the model, op log at "
    )


def test_the_watch_ends_after_four_good_steps(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    begin = live_watch.LiveWatch.begin
    monkeypatch.setattr(live_watch.LiveWatch, "begin", lambda w: begun.append(1) or begin(w))
    with OwnLoss() as run, caplog.at_level(logging.INFO, "tritonamp"):
        run.step(no_log)
        for _ in range(6):
            run.step(fine)
        assert len(begun) == live_faults.STEPS == 4
        run.step(no_log)
        assert "outside the model" not in faults_told(caplog)[1]


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_watched_step_has_the_bits_of_any_other(level: str) -> None:
    def ends(mode: str) -> list[Tensor]:
        with OwnLoss(level=level, on_nonfinite=mode) as run:
            for i in range(4):
                run.step(no_log if i == 1 else fine)
            return [p.clone() for p in run.amp.master_params()] + [torch.get_rng_state()]

    assert all(map(torch.equal, ends("skip"), ends("explain")))


def test_micro_batches_are_watched_one_by_one(run: OwnLoss, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "tritonamp"):
        for loss in (fine, fine, no_slope):
            run.backward(run.loss(loss))
            assert torch._C._len_torch_dispatch_stack() == 0
        run.finish()
    assert "outside the model, op sqrt" in faults_told(caplog)[0]


def test_forwards_without_gradients_do_not_matter(run: OwnLoss, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "tritonamp"):
        with torch.no_grad():
            run.model(run.x)
        assert torch._C._len_torch_dispatch_stack() == 0
        output = run.model(run.x)
        with torch.no_grad():
            run.model(run.x)
        run.backward(no_log(output))
        run.finish()
    assert "outside the model, op log" in faults_told(caplog)[0]


def test_a_forward_that_runs_again_begins_no_watch(run: OwnLoss) -> None:
    """Nor is it taken for one of the next step."""
    run.amp._parts.replays.run_in_fp32()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not run.amp._parts.forwards._snapshots


# A mode must leave no trace where the user's code does not go the usual way


def test_a_mode_of_the_user_around_the_loss_sees_all(run: OwnLoss, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "tritonamp"):
        output = run.model(run.x)
        with Nothing() as mode:
            loss = no_log(output)
        run.backward(loss)
        run.finish()
    assert mode.count > 3
    assert "outside the model, op log" in faults_told(caplog)[0]


def test_an_infinite_loss_is_no_matter_of_a_backward_that_overflows(caplog: Any) -> None:
    """The gradient of the loss is finite, and far too large for the model's backward."""

    def infinite(output: Tensor) -> Tensor:
        return (1e30 * output).half().float().sum()

    with OwnLoss() as run:
        run.step(infinite)
        assert "gradient overflow" not in caplog.text and "(tried:" not in caplog.text
        assert "the model's forward is finite" in caplog.text
        run.step(infinite)
        assert "outside the model, op to_copy at" in caplog.text


def test_a_loop_that_leaves_losses_out_is_not_watched_for_ever(run: OwnLoss) -> None:
    for i in range(live_faults.FORWARDS + 1):
        run.model(run.x)
        assert torch._C._len_torch_dispatch_stack() == 1, i
    run.model(run.x)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_compiled_loss_runs_in_a_watched_step(run: OwnLoss, caplog: Any) -> None:
    compiled = torch.compile(no_log, backend="eager", fullgraph=True)
    run.step(compiled)
    assert "outside the model, op log" in caplog.text
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_it_does_not_begin_inside_a_mode_of_the_user(run: OwnLoss, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "tritonamp"):
        with Nothing():
            output = run.model(run.x)
        assert torch._C._len_torch_dispatch_stack() == 0
        run.backward(no_log(output))
        run.finish()
    assert "outside the model" not in caplog.text


@pytest.mark.parametrize("until", ["loss", "step", "forward"])
def test_it_gives_up_under_a_mode_that_was_entered_since(
    run: OwnLoss, caplog: Any, until: str
) -> None:
    with caplog.at_level(logging.INFO, "tritonamp"):
        output = run.model(run.x)
        with Nothing():
            run.backward(no_log(output))
            if until != "loss":
                run.finish()
            if until == "forward":
                run.model(run.x)
        if until == "loss":
            run.finish()
            assert torch._C._len_torch_dispatch_stack() == 0
    assert "outside the model, op" not in caplog.text


def test_an_error_of_the_loss_that_the_loop_catches(run: OwnLoss, caplog: Any) -> None:
    """The next step is watched instead."""

    def broken(output: Tensor) -> Tensor:
        raise KeyError

    with pytest.raises(KeyError):
        run.loss(broken)
    with caplog.at_level(logging.INFO, "tritonamp"):
        run.step(no_log)
    assert "outside the model, op log" in faults_told(caplog)[0]


def test_an_error_of_the_forward_ends_it(run: OwnLoss) -> None:
    with pytest.raises(RuntimeError):
        run.model(batch(0, 2, 3))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_an_error_that_leaves_the_loop() -> None:
    """The mode passes ops through at once, and is gone at the next forward."""

    def loop(run: OwnLoss) -> None:
        run.step(no_log)
        run.model(run.x)
        raise KeyError

    with OwnLoss() as run:
        with pytest.raises(KeyError):
            loop(run)
        watch: Any = run.amp._parts.live_faults._watch
        assert watch is not None
        torch.ones(3) * 2
        assert watch.passive and not nn.modules.module._global_forward_hooks
        with torch.no_grad():
            run.model(run.x)
        assert torch._C._len_torch_dispatch_stack() == 0


def test_disable_ends_it() -> None:
    with OwnLoss() as run:
        run.step(no_log)
        run.model(run.x)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not nn.modules.module._global_forward_hooks


def test_no_failure_of_the_watch_reaches_the_program(
    run: OwnLoss, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(live_watch.LiveWatch, "_note_results", fail)
    with caplog.at_level(logging.INFO, "tritonamp"):
        run.step(no_log)
    assert "outside the model, op" not in caplog.text


class Once(torch.autograd.Function):
    """Its backward writes to what it has saved, in a way that autograd does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.full_like(x, 2.0))
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        result = grad * saved
        saved.data.zero_()
        return result


@pytest.mark.parametrize(
    "through",
    [
        lambda model, x: Once.apply(model(x)),
        lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True),
    ],
)
def test_a_backward_that_may_run_only_once_does(
    run: OwnLoss, through: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    run.amp.backward(through(run.model, run.x.clone()).float().square().mean())
    grads = [p.grad.clone() for p in run.model.parameters()]
    run.zero_grad()
    run.amp._parts.live_faults._steps_left = 0
    run.amp.backward(through(run.model, run.x.clone()).float().square().mean())
    assert all(map(torch.equal, grads, [p.grad for p in run.model.parameters()]))
    run.zero_grad()


def test_a_reentrant_checkpoint_adds_to_gradients_once(run: OwnLoss) -> None:
    """Its backward cannot leave ``.grad`` alone, and DDP waits for each addition."""
    added = []
    for p in run.model.parameters():
        p.register_post_accumulate_grad_hook(added.append)
    run.backward(checkpoint(fine, run.model(run.x), use_reentrant=True))
    assert len(added) == len(list(run.model.parameters()))
    run.finish()


def test_two_optimizers_that_take_turns(caplog: Any) -> None:
    generator, discriminator = nn.Linear(4, 4), nn.Linear(4, 1)
    opt_g, opt_d = (torch.optim.AdamW(m.parameters()) for m in (generator, discriminator))
    with (
        tritonamp.enable(
            [generator, discriminator], [opt_g, opt_d], level="O2", on_nonfinite="explain"
        ) as amp,
        caplog.at_level(logging.INFO, "tritonamp"),
    ):
        for _ in range(3):
            fake = generator(batch(0, 8, 4))
            amp.backward(fine(discriminator(fake.detach())), opt_d, loss_id=0)
            opt_d.step()
            amp.backward(no_log(discriminator(fake)), opt_g, loss_id=1)
            opt_g.step()
            for optimizer in (opt_g, opt_d):
                optimizer.zero_grad()
        assert torch._C._len_torch_dispatch_stack() == 0
