"""Between a loss and its step: decisions, skips, clipping, unscaling, several losses and
optimizers.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Net, same, snapshot, take_step
from runs import LEVELS, Training, labelled, loss_of, named
from torch import Tensor, nn

import tritonamp

OPTIMIZERS = {
    **named("AdamW", "our AdamW", "SGD momentum"),
    "NAdam": partial(torch.optim.NAdam, eps=1e-3),  # steps by itself
}


@pytest.fixture
def enabled(device: torch.device, handles: Callable[..., Any]) -> Callable[..., Any]:
    def make(level: Any = "O2", optimizer: str = "AdamW", **fields: Any) -> Any:
        run = Training(
            Net, OPTIMIZERS.get(optimizer, optimizer), level, device, enable=handles, **fields
        )
        return run.model, run.optimizer, run.amp

    return make


@pytest.mark.steps
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_trajectory_follows_plain_fp32(
    enabled: Callable[..., Any], device: torch.device, level: str, optimizer: str
) -> None:
    torch.manual_seed(0)
    plain = Net().to(device)
    plain_opt = OPTIMIZERS[optimizer](plain.parameters(), lr=1e-2)
    model, opt, amp = enabled(level, optimizer)
    for i in range(30):
        data = labelled(i, device)
        expected = loss_of(plain, data)
        expected.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        plain_opt.step()
        plain_opt.zero_grad()
        loss = loss_of(model, data)
        amp.backward(loss)
        true_norm = amp.clip_grad_norm_(0.5)
        opt.step()
        opt.zero_grad()
        # O0 repeats FP32 up to the order of its sums; a half forward is off by a few 2**-11 of
        # values around one
        bound = 1e-5 if level == "O0" else 1e-2
        assert abs(loss - expected) <= bound
        assert abs(true_norm - norm) <= bound * 2
    assert amp.stats()["steps"] == 30
    assert amp.stats()["skipped"] == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("clip", ["", "masters", "model"])
def test_torch_amp_loop_gives_the_same_bits(
    enabled: Callable[..., Any], device: torch.device, level: str, optimizer: str, clip: str
) -> None:
    ours, theirs = enabled(level, optimizer), enabled(level, optimizer)
    for i in range(12):
        data = labelled(i, device)
        if i == 5:
            data[0][0, 0] = 60000.0  # overflows the gradients
        model, opt, amp = ours
        amp.backward(loss_of(model, data))
        if clip:
            amp.unscale_()
            nn.utils.clip_grad_norm_(amp.master_params(), 0.1)
        opt.step()
        opt.zero_grad()

        model, opt, amp = theirs
        opt.zero_grad()
        with amp.autocast():
            loss = loss_of(model, data)
        amp.scaler.scale(loss).backward()
        if clip:
            amp.scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(
                amp.master_params() if clip == "masters" else model.parameters(), 0.1
            )
        amp.scaler.step(opt)
        amp.scaler.update()
        assert same(snapshot(*ours[:2]), snapshot(*theirs[:2]))
        assert ours[2].stats() == theirs[2].stats()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_skipped_step_changes_no_bit(
    enabled: Callable[..., Any], device: torch.device, level: str, optimizer: str, fault: str
) -> None:
    model, opt, amp = enabled(level, optimizer)
    for i in range(3):
        take_step(amp, opt, loss_of(model, labelled(i, device)))
    before = snapshot(model, opt)
    scale = amp.stats()["scale"]
    loss = loss_of(model, labelled(9, device))
    amp.backward(loss * float("nan") if fault == "loss" else loss)
    if fault == "gradient":
        model.first.weight.grad[0, 0] = float("inf")
    opt.step()
    assert same(snapshot(model, opt), before)
    stats = amp.stats()
    assert (stats["steps"], stats["skipped"]) == (3, 1)
    if fault == "loss":
        assert stats["scale"] == scale
        assert stats["last_skip_reason"] == "forward fault"
        assert "loss itself was inf or NaN" in amp.explain()
    else:
        assert stats["scale"] == (scale / 2 if level in ("O1", "O2") else scale)
        assert stats["last_skip_reason"] == (
            "scale overflow" if level in ("O1", "O2") else "backward fault"
        )
        assert "1 parameter(s) were inf: first.weight" in amp.explain()
        assert "last.weight" not in amp.explain()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_scale_cancels_exactly(
    enabled: Callable[..., Any], device: torch.device, level: str, optimizer: str
) -> None:
    """bf16 has FP32's exponents, so gradients at two powers of two differ in nothing but the
    exponent.
    """
    runs = []
    for scale in (1.0, 2.0**13):
        model, opt, amp = enabled(level, optimizer, dtype=torch.bfloat16, loss_scale=scale)
        for i in range(10):
            amp.backward(loss_of(model, labelled(i, device)))
            amp.clip_grad_norm_(0.3)
            opt.step()
            opt.zero_grad()
        runs.append(snapshot(model, opt))
    # the clip coefficient divides by norm + 1e-6 where the norm went through the scale: an ulp
    assert all(
        torch.allclose(a.float(), b.float(), rtol=1e-6, atol=1e-8)
        for a, b in zip(*runs, strict=True)
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_inside_the_step_is_clipping_of_true_gradients(
    enabled: Callable[..., Any], device: torch.device, level: str, optimizer: str
) -> None:
    folded, by_hand = enabled(level, optimizer), enabled(level, optimizer)
    for i in range(5):
        data = labelled(i, device)
        model, opt, amp = folded
        amp.backward(loss_of(model, data))
        norm = amp.clip_grad_norm_(0.05)
        opt.step()
        opt.zero_grad()
        model, opt, amp = by_hand
        amp.backward(loss_of(model, data))
        amp.unscale_()
        expected = amp.clip_grad_norm_(0.05)
        opt.step()
        opt.zero_grad()
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        assert isinstance(norm, Tensor)
        for a, b in zip(snapshot(*folded[:2]), snapshot(*by_hand[:2]), strict=True):
            # grad * (coefficient / scale) against (grad / scale) * coefficient: an ulp of FP32
            # each, in half copies a rounding that may fall the other way
            torch.testing.assert_close(
                a.float(), b.float(), rtol=2e-3 if a.dtype == torch.float16 else 2e-5, atol=1e-7
            )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_unscale_gives_true_fp32_gradients(
    enabled: Callable[..., Any], device: torch.device, level: str, optimizer: str
) -> None:
    torch.manual_seed(0)
    plain = Net().to(device)
    loss_of(plain, labelled(0, device)).backward()
    model, opt, amp = enabled(level, optimizer)
    amp.backward(loss_of(model, labelled(0, device)))
    amp.unscale_()
    for p, q in zip(plain.parameters(), amp.master_params(), strict=True):
        assert q.dtype == q.grad.dtype == torch.float32
        torch.testing.assert_close(q.grad, p.grad, rtol=2e-2, atol=1e-3)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        amp.unscale_()
    before = [p.detach().clone() for p in amp.master_params()]
    for p in amp.master_params():
        p.grad.zero_()
    opt.step()
    decay = 1 - 1e-2 * 1e-2 if "AdamW" in optimizer else 1.0
    for p, q in zip(before, amp.master_params(), strict=True):
        torch.testing.assert_close(q.detach(), p * decay, rtol=1e-6, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_micro_batches_are_one_decision(
    enabled: Callable[..., Any], device: torch.device, level: str, optimizer: str
) -> None:
    model, opt, amp = enabled(level, optimizer)
    take_step(amp, opt, loss_of(model, labelled(4, device)))
    amp.backward(loss_of(model, labelled(0, device)) / 2)
    amp.backward(loss_of(model, labelled(1, device)) / 2 * float("inf"))
    before = snapshot(model, opt)
    opt.step()
    opt.zero_grad()
    assert same(snapshot(model, opt), before)
    assert amp.stats()["forward_faults"] == 1
    for i in (2, 3):
        amp.backward(loss_of(model, labelled(i, device)) / 2)
    opt.step()
    assert amp.stats()["steps"] == 2
    assert not same(snapshot(model, opt), before)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulating_after_unscale_adds_true_gradients(
    enabled: Callable[..., Any], device: torch.device, level: str
) -> None:
    model, opt, amp = enabled(level, "SGD momentum")
    amp.backward(loss_of(model, labelled(0, device)))
    amp.unscale_()
    first = [p.grad.clone() for p in amp.master_params()]
    amp.backward(loss_of(model, labelled(1, device)))
    amp.unscale_()
    both = [p.grad.clone() for p in amp.master_params()]
    opt.step()
    opt.zero_grad()
    model, opt, amp = enabled(level, "SGD momentum")
    amp.backward(loss_of(model, labelled(1, device)))
    amp.unscale_()
    second = [p.grad.clone() for p in amp.master_params()]
    assert same(both, [a + b for a, b in zip(first, second, strict=True)])


def test_bad_batch_dropped_with_zero_grad_leaves_no_trace(
    enabled: Callable[..., Any], device: torch.device
) -> None:
    model, opt, amp = enabled("O2")
    amp.backward(loss_of(model, labelled(0, device)) * float("nan"))
    opt.zero_grad()
    amp.backward(loss_of(model, labelled(1, device)))
    opt.step()
    assert amp.stats()["skipped"] == 0
    assert amp.stats()["steps"] == 1


def test_zero_grad_between_scaling_and_backward(
    enabled: Callable[..., Any], device: torch.device
) -> None:
    model, opt, amp = enabled("O2")
    with amp.scale_loss(loss_of(model, labelled(0, device))) as scaled:
        opt.zero_grad()
        scaled.backward()
    opt.step()
    assert amp.stats()["steps"] == 1


def test_unscaled_by_hand_then_dropped(enabled: Callable[..., Any], device: torch.device) -> None:
    for optimizer in OPTIMIZERS:
        model, opt, amp = enabled("O2", optimizer)
        for i in range(3):
            opt.zero_grad()
            amp.scaler.scale(
                loss_of(model, labelled(i, device)) * (float("nan") if i == 0 else 1.0)
            ).backward()
            amp.scaler.unscale_(opt)
            if i != 0:  # the user saw that something was wrong, and went on
                amp.scaler.step(opt)
            amp.scaler.update()
        assert amp.stats() == {**amp.stats(), "steps": 2, "skipped": 1, "scale": 2.0**16}


def test_failed_micro_batch_leaves_the_earlier_one(
    enabled: Callable[..., Any], device: torch.device
) -> None:
    model, opt, amp = enabled("O2")
    amp.backward(loss_of(model, labelled(0, device)))
    with (
        pytest.raises(ZeroDivisionError),
        amp.scale_loss(loss_of(model, labelled(1, device)) * float("nan")),
    ):
        raise ZeroDivisionError
    opt.step()
    assert amp.stats() == {**amp.stats(), "steps": 1, "skipped": 0}


def test_zero_grad_may_keep_the_tensors(enabled: Callable[..., Any], device: torch.device) -> None:
    model, opt, amp = enabled("O2")
    amp.backward(loss_of(model, labelled(0, device)))
    opt.step()
    opt.zero_grad(set_to_none=False)
    assert not model.first.weight.grad.any()
    assert model.first.weight.grad.dtype == torch.float16


def test_failed_backward_never_was(enabled: Callable[..., Any], device: torch.device) -> None:
    model, opt, amp = enabled("O2")
    loss = loss_of(model, labelled(0, device))
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss * float("nan")):
        raise ZeroDivisionError
    opt.zero_grad()
    amp.backward(loss_of(model, labelled(1, device)))
    opt.step()
    assert amp.stats() == {**amp.stats(), "steps": 1, "skipped": 0}


@pytest.fixture
def gan(device: torch.device) -> Iterator[Any]:
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 6).to(device), Net().to(device)
    opt_g = torch.optim.AdamW(generator.parameters(), lr=1e-2)
    opt_d = torch.optim.SGD(discriminator.parameters(), lr=1e-2)
    amp = tritonamp.enable([generator, discriminator], [opt_g, opt_d], level="O2")
    yield generator, discriminator, opt_g, opt_d, amp
    amp.disable()


def test_an_overflow_skips_exactly_the_optimizers_its_loss_feeds(
    gan: Any, device: torch.device
) -> None:
    generator, discriminator, opt_g, opt_d, amp = gan
    x, y = labelled(0, device)
    loss_d = nn.functional.cross_entropy(discriminator(x), y)
    amp.backward(loss_d * float("inf"), opt_d, loss_id=0)
    loss_g = generator(x[:, :4]).square().mean()
    amp.backward(loss_g, opt_g, loss_id=1)
    before_g, before_d = snapshot(generator, opt_g), snapshot(discriminator, opt_d)
    opt_d.step()
    opt_g.step()
    assert same(snapshot(discriminator, opt_d), before_d)
    assert not same(snapshot(generator, opt_g), before_g)


def test_two_losses_never_disturb_each_others_scale(gan: Any, device: torch.device) -> None:
    generator, _, opt_g, opt_d, amp = gan
    x, _ = labelled(0, device)
    amp.backward(generator(x[:, :4]).square().mean(), opt_g, loss_id=1)
    generator.weight.grad[0, 0] = float("inf")
    opt_g.step()
    opt_g.zero_grad()
    assert amp.stats()["scales"] == {0: 2.0**16, 1: 2.0**15}
    opt_d.step()  # no loss fed it: nothing to do, not an error


def test_one_loss_that_feeds_two_optimizers_is_one_decision(gan: Any, device: torch.device) -> None:
    generator, discriminator, opt_g, opt_d, amp = gan
    x, y = labelled(0, device)
    for i in range(2):
        before = snapshot(generator, opt_g) + snapshot(discriminator, opt_d)
        amp.backward(nn.functional.cross_entropy(discriminator(generator(x[:, :4])), y))
        if i == 1:
            generator.weight.grad[0, 0] = float("inf")
        opt_g.step()
        opt_d.step()
        opt_g.zero_grad()
        opt_d.zero_grad()
    assert same(snapshot(generator, opt_g) + snapshot(discriminator, opt_d), before)
    assert amp.stats()["skipped"] == 1
    assert amp.stats()["scale"] == 2.0**15


@pytest.mark.parametrize("overflow", [0, 1, None])
def test_two_losses_with_own_scales_step_together(
    gan: Any, device: torch.device, overflow: int | None
) -> None:
    """Without unscale_: both losses' gradients are in the step, and an overflow of either one skips
    it.
    """
    _, discriminator, _, opt_d, amp = gan
    before = [p.detach().clone() for p in opt_d.param_groups[0]["params"]]
    reference = Net().to(device)
    reference.load_state_dict(discriminator.state_dict())
    (loss_of(reference, labelled(0, device)) + loss_of(reference, labelled(1, device))).backward()
    for i in range(2):
        amp.backward(loss_of(discriminator, labelled(i, device)), opt_d, loss_id=i)
        if overflow == i:
            discriminator.first.weight.grad[0, 0] = float("inf")
    opt_d.step()
    after = opt_d.param_groups[0]["params"]
    if overflow is not None:
        assert same(before, list(after))
        return
    for p, q, r in zip(before, after, reference.parameters(), strict=True):
        torch.testing.assert_close((p - q.detach()) / 1e-2, r.grad, rtol=2e-2, atol=2e-3)


def test_two_losses_with_own_scales_into_one_optimizer(gan: Any, device: torch.device) -> None:
    """DCGAN's discriminator: the true gradients of a real and a fake loss add up, whatever their
    scales are.
    """
    _, discriminator, _, opt_d, amp = gan
    reference = Net().to(device)
    reference.load_state_dict(discriminator.state_dict())
    (loss_of(reference, labelled(0, device)) + loss_of(reference, labelled(1, device))).backward()
    # let scale 2 move first
    amp.backward(loss_of(discriminator, labelled(9, device)), opt_d, loss_id=2)
    discriminator.first.weight.grad[0, 0] = float("inf")
    opt_d.step()
    opt_d.zero_grad()
    amp.backward(loss_of(discriminator, labelled(0, device)), opt_d, loss_id=0)
    amp.backward(loss_of(discriminator, labelled(1, device)), opt_d, loss_id=2)
    amp.unscale_()
    for p, q in zip(reference.parameters(), opt_d.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=2e-2, atol=2e-3)
    opt_d.step()
    assert amp.stats()["scales"] == {0: 2.0**16, 2: 2.0**15}


@pytest.mark.steps
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_forty_bad_batches_leave_the_scale_alone(
    enabled: Callable[..., Any], device: torch.device, optimizer: str
) -> None:
    model, opt, amp = enabled("O2", optimizer)
    for i in range(40):
        x, y = labelled(i, device)
        x[3, 2] = float("inf")
        take_step(amp, opt, loss_of(model, (x, y)))
    assert amp.stats() == {**amp.stats(), "scale": 2.0**16, "skipped": 40, "forward_faults": 40}


def test_the_scale_stops_at_its_floor_and_says_so(
    enabled: Callable[..., Any], device: torch.device
) -> None:
    model, opt, amp = enabled(
        "O2", "AdamW", scaler=tritonamp.GradScaler(device.type, init_scale=4.0, min_scale=1.0)
    )
    for _ in range(5):
        amp.backward(loss_of(model, labelled(0, device)))
        model.first.weight.grad.fill_(float("nan"))
        opt.step()
        opt.zero_grad()
    assert amp.stats()["scale"] == 1.0
    assert "The scale is at its minimum" in amp.explain()
    assert "1 parameter(s) were NaN: first.weight" in amp.explain()


def test_a_fixed_scale_that_is_too_high_says_so(
    enabled: Callable[..., Any], device: torch.device
) -> None:
    model, opt, amp = enabled("O2", "AdamW", loss_scale=2.0**30)
    amp.backward(loss_of(model, labelled(0, device)))
    opt.step()
    assert amp.stats()["last_skip_reason"] == "scale exhausted"
    assert "The scale is fixed, so it cannot back off: give a lower loss_scale" in amp.explain()
    assert "minimum" not in amp.explain()


def test_no_host_reads_in_a_step(
    enabled: Callable[..., Any], device: torch.device, monkeypatch: Any
) -> None:
    fused = [enabled("O2", name) for name in ("AdamW", "SGD momentum")]
    own_model, own, own_amp = enabled("O2", "Adadelta")
    reads: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def read(self: Tensor, *args: Any) -> Any:
            if self.device == device:  # not what the interpreter reads for the GPU in software
                reads.append(name)
            return original(self, *args)

        return read

    data = labelled(0, device)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, counting(name))
    for model, opt, amp in fused:
        for _ in range(3):
            amp.backward(loss_of(model, data))
            amp.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
    assert reads == []
    own_amp.backward(loss_of(own_model, data))
    own.step()
    assert reads == ["__bool__"]  # what an optimizer costs that cannot skip on the device


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("level", LEVELS)
def test_no_synchronisation_on_cuda(
    enabled: Callable[..., Any], device: torch.device, level: str
) -> None:
    model, opt, amp = enabled(level, "AdamW")
    data = labelled(0, device)
    for warm in (False, True):
        torch.cuda.set_sync_debug_mode("error" if warm else "default")
        try:
            amp.backward(loss_of(model, data))
            amp.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_resume_is_bit_identical(
    enabled: Callable[..., Any], device: torch.device, level: str, optimizer: str
) -> None:
    def train(run: Any, steps: range) -> None:
        model, opt, amp = run
        for i in steps:
            amp.backward(loss_of(model, labelled(i, device)))
            if i == 3 and level != "O3":
                model.first.weight.grad[0, 0] = float("inf")
            opt.step()
            opt.zero_grad()

    straight = enabled(level, optimizer)
    train(straight, range(8))
    first = enabled(level, optimizer)
    train(first, range(4))
    saved = copy.deepcopy([first[0].state_dict(), first[1].state_dict(), first[2].state_dict()])
    resumed = enabled(level, optimizer)
    train(resumed, range(20, 22))  # somewhere else entirely
    for target, state in zip(resumed, saved, strict=True):
        target.load_state_dict(state)
    train(resumed, range(4, 8))
    assert same(snapshot(*straight[:2]), snapshot(*resumed[:2]))
    # the reason of the last skip is for people, and is not saved
    assert straight[2].stats() == {
        **resumed[2].stats(),
        "last_skip_reason": straight[2].stats()["last_skip_reason"],
    }


def test_clipping_leaves_out_what_is_skipped(gan: Any, device: torch.device) -> None:
    generator, discriminator, opt_g, opt_d, amp = gan
    x, y = labelled(0, device)
    amp.backward(generator(x[:, :4]).square().mean(), opt_g, loss_id=0)
    amp.backward(nn.functional.cross_entropy(discriminator(x), y) * float("nan"), opt_d, loss_id=1)
    before = snapshot(discriminator, opt_d)
    norm = amp.clip_grad_norm_(1e-3)
    opt_g.step()
    opt_d.step()
    assert torch.isfinite(norm)
    assert norm > 0
    assert same(snapshot(discriminator, opt_d), before)
    assert all(torch.isfinite(p).all() for p in generator.parameters())


def test_failed_backward_gives_true_gradients_back(
    enabled: Callable[..., Any], device: torch.device
) -> None:
    for level in ("O1", "O2"):
        model, opt, amp = enabled(level, "SGD momentum")
        amp.backward(loss_of(model, labelled(0, device)))
        amp.unscale_()
        true = [p.grad.clone() for p in amp.master_params()]
        with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model, labelled(1, device))):
            raise ZeroDivisionError
        assert same(true, [p.grad for p in amp.master_params()])
        before = [p.detach().clone() for p in amp.master_params()]
        opt.step()
        for p, q, g in zip(before, amp.master_params(), true, strict=True):
            torch.testing.assert_close(q.detach(), p - 1e-2 * g)


def test_model_zero_grad_drops_a_bad_batch(
    enabled: Callable[..., Any], device: torch.device
) -> None:
    model, opt, amp = enabled("O2")
    amp.backward(loss_of(model, labelled(0, device)) * float("nan"))
    model.zero_grad()
    amp.backward(loss_of(model, labelled(1, device)))
    opt.step()
    assert amp.stats() == {**amp.stats(), "steps": 1, "skipped": 0}


@pytest.mark.parametrize("between", ["nothing", "clip_grad_norm_", "unscale_"])
def test_scaled_by_hand_and_stepped_directly(
    enabled: Callable[..., Any], device: torch.device, between: str
) -> None:
    """No call of update(): the decision moves the scale itself, and a fault is forgotten with its
    step.
    """
    model, opt, amp = enabled("O2")
    for fault in ("loss", "gradient", ""):
        amp.scaler.scale(
            loss_of(model, labelled(0, device)) * (float("nan") if fault == "loss" else 1.0)
        ).backward()
        if fault == "gradient":
            model.first.weight.grad[0, 0] = float("inf")
        if between == "clip_grad_norm_":
            amp.clip_grad_norm_(1.0)
        elif between == "unscale_":
            amp.unscale_()
        opt.step()
        opt.zero_grad()
    assert amp.stats() == {
        **amp.stats(),
        "steps": 1,
        "forward_faults": 1,
        "scale_overflows": 1,
        "scale": 2.0**15,
    }


@pytest.mark.parametrize("change", [lambda grad: None, Tensor.clone], ids=["cleared", "replaced"])
def test_what_the_user_does_to_unscaled_gradients_stays(
    enabled: Callable[..., Any], device: torch.device, change: Callable[[Tensor], Tensor | None]
) -> None:
    """The backward's tensors come back only instead of those that unscaling has shown."""
    model, opt, amp = enabled("O2")
    amp.backward(loss_of(model, labelled(0, device)))
    amp.unscale_()
    given = [change(p.grad) for p in model.parameters()]
    for param, grad in zip(model.parameters(), given, strict=True):
        param.grad = grad
    opt.step()
    for param, grad in zip(model.parameters(), given, strict=True):
        assert param.grad is grad


def test_a_scaler_moves_once_for_gradients_that_amp_has_clipped(
    enabled: Callable[..., Any], device: torch.device
) -> None:
    """A torch.amp loop in which only the clipping is ours."""
    model, opt, amp = enabled("O2")
    for fault in (1.0, 1e30, 1.0, float("nan"), 1.0):
        amp.scaler.scale(loss_of(model, labelled(0, device)) * fault).backward()
        amp.clip_grad_norm_(1.0)
        amp.scaler.step(opt)
        amp.scaler.update()
        opt.zero_grad()
    expected = {"steps": 3, "forward_faults": 1, "scale_overflows": 1, "scale": 2.0**15}
    assert amp.stats() == amp.stats() | expected


@pytest.mark.parametrize("scaler", [tritonamp.GradScaler, torch.amp.GradScaler])
def test_foreign_scalers_are_refused(
    enabled: Callable[..., Any], device: torch.device, scaler: Any
) -> None:
    for level, fields in (("O0", {}), ("O1", {}), ("O2", {"dtype": torch.bfloat16})):
        model, opt, _ = enabled(level, "SGD momentum", **fields)
        other = scaler(device.type)
        other.scale(loss_of(model, labelled(0, device))).backward()
        with pytest.raises(
            RuntimeError,
            match=r"this optimizer was enabled with another GradScaler: use amp.scaler",
        ):
            other.step(opt)


def test_disable_between_backward_and_step(
    enabled: Callable[..., Any], device: torch.device
) -> None:
    model, opt, amp = enabled("O2", "SGD momentum")
    amp.backward(loss_of(model, labelled(0, device)))
    amp.disable()
    before = model.first.weight.detach().clone()
    opt.step()
    assert torch.equal(model.first.weight, before)


def test_an_optimizer_that_no_loss_fed_decides_nothing(device: torch.device) -> None:
    """Without a scale its step is torch's: nothing happens, and nothing is counted."""
    models = [Net().to(device), Net().to(device)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    with tritonamp.enable(models, optimizers, level="O0") as amp:
        before = [p.detach().clone() for p in models[1].parameters()]
        amp.backward(loss_of(models[0], labelled(0, device)), optimizers[0])
        for optimizer in optimizers:
            optimizer.step()
        assert amp.stats()["steps"] == 1
        assert same(before, list(models[1].parameters()))
