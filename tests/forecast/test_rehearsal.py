"""check(): the policy that it returns has run, on copies, and the report says how it went."""

import copy

import pytest
import torch
from small_models import Apply, around
from torch import Tensor, nn

import tritonamp
from tritonamp.forecast.rehearsal import STEPS, _copied, rehearse


def squares(output: Tensor) -> Tensor:
    return (output.float() - 1).square().mean()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def losses_of_training(model, optimizer, policy, x, loss_fn):
    model, optimizer = copy.deepcopy((model, optimizer))
    amp = tritonamp.enable(model, optimizer, policy=policy)
    losses = []
    for _ in range(STEPS):
        loss = loss_fn(model(x))
        amp.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    amp.disable()
    return losses


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "ours": lambda params: tritonamp.optim.AdamW(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_steps_are_those_of_training(name, level, device):
    model, x = around(nn.Tanh()).to(device), torch.randn(4, 16, device=device)
    optimizer = OPTIMIZERS[name](model.parameters())
    squares(model(x)).backward()  # its state is copied, too
    optimizer.step()
    optimizer.zero_grad()
    policy = tritonamp.policy.resolve(level)
    expected = losses_of_training(model, optimizer, policy, x, squares)
    done = rehearse(model, [optimizer], ((x,), {}), squares, policy)
    assert done.losses == tuple(expected)
    assert done.went_well
    text = f"the policy ran 3 steps on this batch: loss {expected[0]:.4g} -> {expected[-1]:.4g}"
    assert str(done) == text


def test_the_report_says_so():
    model, x = around(), torch.randn(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forecast = tritonamp.check(model, optimizer, (x,), squares)
    assert forecast.rehearsal.losses[0] > forecast.rehearsal.losses[-1]
    assert str(forecast).splitlines()[-1] == str(forecast.rehearsal)
    faulty = tritonamp.check(around(Apply(lambda h: h * h)), None, (1e3 * x,), squares)
    assert faulty.policy.fp32_modules
    assert str(faulty.rehearsal) in " ".join(str(faulty).split())


def test_without_an_optimizer_forward_and_backward_run():
    forecast = tritonamp.check(around(), None, (torch.randn(4, 16),), squares)
    (loss,) = forecast.rehearsal.losses
    assert str(forecast.rehearsal) == (
        f"the policy ran forward and backward on this batch: loss {loss:.4g}"
    )


def test_fp32_needs_no_rehearsal():
    assert tritonamp.check(around(), None, (torch.randn(4, 16),), level="O0").rehearsal is None


def test_steps_that_fail_in_fp32_as_well():
    """The learning rate is the fault, and no precision helps."""
    model, x = around(), torch.randn(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    forecast = tritonamp.check(model, optimizer, (x,), squares)
    assert not forecast.problems
    assert str(forecast.rehearsal).startswith("the policy fails on this batch: loss ")
    assert "2 of 3 steps skipped. FP32 fails as well: loss " in str(forecast.rehearsal)
    assert str(forecast.rehearsal).endswith("so look at the learning rate")


class Unforeseen(nn.Module):
    """Raises in half alone, which no dry run shows: its values are FP32."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x):
        y = self.inner(x)
        if type(y) is Tensor and y.dtype is torch.float16:
            raise TypeError("no kernel for half\non this device")
        return y


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_steps_that_fail_in_half_alone_are_a_problem(with_optimizer):
    model = nn.Sequential(nn.Linear(16, 16), Unforeseen(), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters()) if with_optimizer else None
    forecast = tritonamp.check(model, optimizer, (torch.randn(4, 16),), squares)
    (problem,) = forecast.problems
    assert (problem.kind, problem.where) == ("failed steps", "forecast.policy")
    assert problem.why == "TypeError: no kernel for half"
    assert problem.advice.startswith('level="O0" (tried: loss ')
    assert str(forecast.rehearsal).startswith(
        "the policy fails on this batch: TypeError: no kernel for half. FP32 passes: loss "
    )


def test_gradients_that_are_not_finite_fail():
    fixed = tritonamp.policy.resolve("O2", loss_scale=2.0**24)
    batch = (torch.randn(4, 16),), {}
    done = rehearse(around(), [], batch, lambda y: y.sum(), fixed)
    assert not done.went_well
    assert "gradients are inf or NaN. FP32 passes" in str(done)


def test_nothing_outside_of_the_copies_changes(caplog):
    """A scheduler puts a step on the optimizer, and the loss has a parameter of its own."""
    model, head, x = around(nn.BatchNorm1d(16), nn.Dropout()), nn.Linear(8, 1), torch.randn(4, 16)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    optimizer.register_step_post_hook(lambda *args: pytest.fail("a hook of the user's ran"))
    trained = [*model.parameters(), head.weight]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    grads = [(parameter.grad, parameter.grad._version) for parameter in trained]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    policy = tritonamp.policy.resolve("O2", init_scale=2.0**8)
    batch = (x,), {}
    done = rehearse(model, [optimizer], batch, lambda y: squares(head(y.float())), policy)
    assert done.went_well
    for parameter, (grad, version) in zip(trained, grads, strict=True):
        assert parameter.grad is grad and grad._version == version
    assert head.bias.grad is None
    assert not optimizer.state
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not caplog.records


def test_a_copy_has_what_an_optimizer_keeps_and_no_step_of_a_scheduler():
    model = around()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = tritonamp.optim.AdamW(model.parameters())
    ours.launches = object()
    assert not hasattr(_copied(ours, {}), "launches")  # they would write to the user's tensors
    torch.optim.lr_scheduler.LinearLR(optimizer)
    optimizer.extra = [next(model.parameters())]
    twin, memo = copy.deepcopy(model), {}
    memo.update({id(p): q for p, q in zip(model.parameters(), twin.parameters(), strict=True)})
    copied = _copied(optimizer, memo)
    assert copied.extra[0] is copied.param_groups[0]["params"][0] is next(twin.parameters())
    # torch's wrapper would step the user's own optimizer
    assert "step" in vars(optimizer) and "step" not in vars(copied)


def test_ranks_do_not_wait_for_one_another(monkeypatch):
    for name, value in (("is_initialized", True), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    done = rehearse(around(), [], ((torch.randn(4, 16),), {}), squares, tritonamp.O2)
    assert str(done) == "the policy was not run: its steps would wait for other ranks"


# The loss


class Returns(nn.Module):
    def __init__(self, returns):
        super().__init__()
        self.inner, self.returns = nn.Linear(16, 8), returns

    def forward(self, x):
        return self.returns(self.inner(x))


TAKEN = {
    "output[1]": lambda y: (y, squares(y)),
    "output[0]": lambda y: [squares(y), y, y.detach().mean()],
    "output[2]": lambda y: (y, y.detach().mean(), squares(y)),  # a metric comes first
    'output["loss"]': lambda y: {"loss": squares(y), "logits": y},
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_loss_in_the_models_output(name):
    model, x = Returns(TAKEN[name]), torch.randn(4, 16)
    forecast = tritonamp.check(model, None, (x,))
    assert forecast.loss == pytest.approx(squares(model.inner(x)).item(), rel=1e-6)
    assert forecast.loss_name == name
    assert str(forecast).endswith(f"; the loss is {name}")


def test_a_loss_that_the_model_returns_in_a_tuple_is_watched():
    """Its gradients leave float16, which the mean of the output does not show."""
    model = Returns(lambda y: (y, 1e6 * y.float().sum()))
    forecast = tritonamp.check(model, None, (torch.randn(4, 16),))
    assert [f.kind for f in forecast.problems] == ["loss scale"]


def test_a_mean_as_the_loss_is_said():
    model, x = Returns(lambda y: (y, y * 2)), torch.randn(4, 16)
    forecast = tritonamp.check(model, None, (x,))
    text = " ".join(str(forecast).split())
    assert text.endswith("; the loss is the mean of the output, because loss_fn is None")
    assert "the loss is" not in str(tritonamp.check(model, None, (x,), lambda y: squares(y[0])))
