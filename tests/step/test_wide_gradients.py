"""grad_dtype=torch.float32: gradients of half parameters are added up in FP32, in every loop."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import more
from helpers import Net, snapshot
from runs import Training, started_on_cpu
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tritonamp

WIDE = torch.float32
HALF_DTYPES = torch.float16, torch.bfloat16
BATCH = 256


class WideGradients(Training):
    """Steps on parts of a batch, with a copy of the model in FP64."""

    def __init__(self, model: Any = None, optimizer: Any = "AdamW", **fields: Any) -> None:
        torch.manual_seed(0)
        model = Net() if model is None else model
        x, self.y = torch.randn(BATCH, 6), torch.randn(BATCH, 3)
        self.exact = copy.deepcopy(model).double()
        super().__init__(model, optimizer, lr=1e-3, **{"grad_dtype": WIDE, **fields})
        self.x = x

    def losses(self, parts: int) -> Iterator[Tensor]:
        for x, y in zip(self.x.chunk(parts), self.y.chunk(parts), strict=True):
            yield F.mse_loss(self.model(x).float(), y) / parts

    def halves(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.dtype in HALF_DTYPES]

    def weights(self) -> list[Tensor]:
        return snapshot(self.model) + self.masters()

    def miss(self) -> float:
        """How far the true gradients are from FP64, after ``unscale_``."""
        F.mse_loss(self.exact(self.x.double()), self.y.double()).backward()
        pairs = zip(self.amp.master_params(), self.exact.parameters(), strict=True)
        return max(float((m.grad - e.grad).norm() / e.grad.norm()) for m, e in pairs)


run = started_on_cpu(WideGradients)


Loop = Callable[[WideGradients, int], None]


def plain(r: WideGradients, parts: int) -> None:
    for loss in r.losses(parts):
        r.amp.backward(loss)


def scaled(r: WideGradients, parts: int) -> None:
    for loss in r.losses(parts):
        with r.amp.scale_loss(loss) as scaled_loss:
            scaled_loss.backward()


def by_scaler(r: WideGradients, parts: int) -> None:
    for loss in r.losses(parts):
        r.amp.scaler.scale(loss).backward()


def unscaled_between(r: WideGradients, parts: int) -> None:
    for i, loss in enumerate(r.losses(parts)):
        if i:
            r.amp.unscale_()
        r.amp.backward(loss)


def cleared_in_place(r: WideGradients, parts: int) -> None:
    plain(r, 1)
    r.optimizer.zero_grad(set_to_none=False)
    plain(r, parts)


def cleared_while_shown(r: WideGradients, parts: int) -> None:
    plain(r, 1)
    r.amp.unscale_()
    r.optimizer.zero_grad()
    plain(r, parts)


def assigned(r: WideGradients, parts: int) -> None:
    """Half gradients of the user's own take the place of shown ones, and are cleared."""
    plain(r, 1)
    r.amp.unscale_()
    for p in r.halves():
        p.grad = torch.zeros_like(p)
    r.optimizer.step()
    r.optimizer.zero_grad()
    for p, e in zip(r.amp.master_params(), r.exact.parameters(), strict=True):
        e.data = p.detach().double()
    plain(r, parts)


def two_losses(r: WideGradients, parts: int) -> None:
    for i, loss in enumerate(r.losses(parts)):
        r.amp.backward(loss, loss_id=2 * i // parts)


LOOPS = [plain, by_scaler, unscaled_between, two_losses, assigned]
LOOPS += more([scaled, cleared_in_place, cleared_while_shown])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_many_micro_batches_are_as_exact_as_one(run: Any, dtype: torch.dtype, loop: Loop) -> None:
    one, many = run(dtype=dtype), run(dtype=dtype)
    plain(one, 1)
    loop(many, BATCH)
    assert all(p.grad.dtype is WIDE for p in many.halves())
    for r in (one, many):
        r.amp.unscale_()
    assert many.miss() <= 1.3 * one.miss()


def test_half_gradients_would_not_be(run: Any) -> None:
    """So the test above can fail."""
    one, many = run(dtype=torch.bfloat16), run(dtype=torch.bfloat16, grad_dtype=None)
    plain(one, 1)
    plain(many, BATCH)
    for r in (one, many):
        r.amp.unscale_()
    assert many.miss() > 1.3 * one.miss()


KINDS = ["AdamW", "SGD", *more(["Adagrad", "Lion"])]


def steps(r: WideGradients, step: str) -> None:
    for _ in range(3):
        plain(r, 1)
        if step == "unscale":
            r.amp.unscale_()
            nn.utils.clip_grad_norm_(r.model.parameters(), 0.01)
        r.finish(max_norm=0.01 if step == "clip" else None, by_scaler=step == "scaler")


@pytest.mark.parametrize("step", ["plain", "clip", *more(["unscale", "scaler"])])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_one_batch_gives_the_same_bits(run: Any, level: str, kind: str, step: str) -> None:
    """FP32 holds half gradients exactly."""
    fields = {"level": level, "optimizer": kind if level != "O3" else "SGD"}
    wide, half = run(**fields), run(grad_dtype=None, **fields)
    for r in (wide, half):
        steps(r, step)
    assert all(map(torch.equal, wide.weights(), half.weights()))


def test_a_skip(run: Any) -> None:
    r = run()
    before = r.weights()
    r.x[0, 0] = float("inf")
    plain(r, 2)
    r.optimizer.step()
    assert r.amp.stats()["skipped"] == 1
    assert all(map(torch.equal, r.weights(), before))


def test_accumulation_that_is_saved_in_the_middle(run: Any) -> None:
    """Gradients are no state: they continue from their values."""
    whole, stopped = run(), run()
    plain(whole, 4)
    losses = stopped.losses(4)
    stopped.amp.backward(next(losses))
    stopped.load(stopped.states())
    for loss in losses:
        stopped.amp.backward(loss)
    for r in (whole, stopped):
        r.optimizer.step()
    assert all(map(torch.equal, whole.weights(), stopped.weights()))


def test_parameters_that_train_later(run: Any) -> None:
    model = Net()
    model.last.requires_grad_(False)
    r = run(model, lambda _, **rest: torch.optim.AdamW(model.parameters(), **rest))
    model.last.requires_grad_(True)
    plain(r, 2)
    assert model.last.weight.grad is not None and model.last.weight.grad.dtype is WIDE
    r.optimizer.step()
    assert model.last.weight.dtype is torch.float16


def test_groups_that_come_later() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.first.parameters())
    with tritonamp.enable(model, optimizer, level="O2", grad_dtype=WIDE) as amp:
        optimizer.add_param_group({"params": list(model.last.parameters())})
        before = [p.detach().clone() for p in amp.master_params()][-2]
        for x in torch.randn(4, 5, 6):
            amp.backward(model(x).mean() / 8)
        assert model.last.weight.grad is not None and model.last.weight.grad.dtype is WIDE
        optimizer.step()
        assert not torch.equal([*amp.master_params()][-2], before)


def test_models_that_come_in_half(run: Any) -> None:
    for level in ("O1", "O2"):
        r = run(Net().half(), level=level)
        plain(r, 4)
        assert all(p.grad.dtype is WIDE for p in r.model.parameters())
        r.optimizer.step()
        r.amp.disable()
        assert {p.dtype for p in r.model.parameters()} == {torch.float16}
        assert {p.grad_dtype for p in r.model.parameters()} == {torch.float16}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_disable_leaves_nothing_of_it(run: Any, level: str) -> None:
    r = run(level=level, optimizer="SGD")
    plain(r, 2)
    r.optimizer.step()
    r.amp.disable()
    r.model(r.x).sum().backward()
    assert {p.grad.dtype for p in r.model.parameters()} == {WIDE}
    assert {p.dtype for p in r.model.parameters()} == {WIDE}


@pytest.mark.parametrize("own", [None, WIDE])
def test_disable_puts_back_a_grad_dtype_of_the_user(run: Any, own: Any) -> None:
    model = Net().half()
    model.first.bias.grad_dtype = own
    r = run(model)
    plain(r, 2)
    r.optimizer.step()
    r.optimizer.zero_grad()
    r.amp.disable()
    assert model.first.bias.grad_dtype is own
    assert model.last.bias.grad_dtype is torch.float16


def test_a_half_gradient_in_the_place_of_a_shown_one(run: Any) -> None:
    r = run()
    weight = r.model.first.weight
    plain(r, 1)
    r.amp.unscale_()
    weight.grad = torch.zeros_like(weight)
    r.optimizer.step()
    assert weight.grad.dtype is WIDE
    weight.grad = None
    plain(r, 1)
    assert weight.grad.dtype is WIDE


def test_a_healed_module_and_back(run: Any) -> None:
    r = run()
    r.amp.heal("first")
    plain(r, 2)
    r.optimizer.zero_grad()
    r.amp.unheal("first")
    plain(r, 2)
    assert all(p.grad.dtype is WIDE for p in r.model.parameters())


def test_a_replay_leaves_the_gradients(run: Any) -> None:
    r = run()
    plain(r, 2)
    before = [p.grad.clone() for p in r.model.parameters()]
    r.amp.explain(replay=lambda: next(r.losses(1)))
    assert all(map(torch.equal, before, [p.grad for p in r.model.parameters()]))


def test_a_moving_average(run: Any) -> None:
    wide, half = run(), run(grad_dtype=None)
    averages = [r.amp.ema(0.9) for r in (wide, half)]
    for r, ema in zip((wide, half), averages, strict=True):
        steps(r, "plain")
        ema.update()
    states = [
        [t for t in tree_leaves(ema.state_dict()) if isinstance(t, Tensor)] for ema in averages
    ]
    assert all(map(torch.equal, *states))


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float64, "float32", 1])
def test_bad_values(given: Any) -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"grad_dtype: expected None .* or torch.float32, got"):
        tritonamp.enable(model, level="O2", grad_dtype=given)
    assert {p.dtype for p in model.parameters()} == {WIDE}


def test_a_policy_as_text() -> None:
    policy = tritonamp.Policy(op_policy=True, grad_dtype=WIDE)
    assert tritonamp.Policy.from_json(policy.to_json()) == policy
