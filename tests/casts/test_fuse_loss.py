"""``fuse_loss``: losses of a model's outputs, and of ``labels=``, in plain loops."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.casts.unread import Unread

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SIZE, LENGTH, WIDTH, WORDS = 6, 4, 5, 11


def tagger() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.ReLU(), nn.Linear(7, WORDS))


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(SIZE, LENGTH, WIDTH), torch.randint(WORDS, (SIZE, LENGTH))


class Run(NamedTuple):
    """The results of a step with ``fuse_loss``, or without."""

    results: Any
    changes: list[Tensor]  # of the parameters


Step = Callable[[Any, Any, Any], Any]


def run(
    step: Step,
    fuse: bool,
    build: Callable[[], nn.Module] = tagger,
    level: str = "O2",
    **fields: Any,
) -> Run:
    model = build()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with tritonamp.enable(
        model, optimizer, level=level, fuse_loss=fuse, loss_scale=2.0**15, **fields
    ) as amp:
        results = step(model, optimizer, amp)
    return Run(results, [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])


def trained(loss: Tensor, optimizer: Any, amp: Any) -> float:
    amp.backward(loss)
    optimizer.step()
    assert amp.stats()["skipped"] == 0
    return loss.item()


def by_criterion(model: Any, optimizer: Any, amp: Any) -> Any:
    x, y = batch()
    loss = nn.CrossEntropyLoss()(model(x).transpose(1, 2), y)
    return trained(loss, optimizer, amp)


def language(model: Any, optimizer: Any, amp: Any) -> Any:
    x, y = batch()
    logits = model(x).float()[..., :-1, :].contiguous()
    loss = F.cross_entropy(logits.view(-1, WORDS), y[..., 1:].reshape(-1), label_smoothing=0.1)
    return trained(loss, optimizer, amp)


def with_accuracy(model: Any, optimizer: Any, amp: Any) -> Any:
    """Reads the logits before the loss, and after the step."""
    x, y = batch()
    logits = model(x)
    with torch.no_grad():
        before = logits.argmax(-1).tolist()
    loss = trained(F.cross_entropy(logits.flatten(0, 1), y.flatten()), optimizer, amp)
    return loss, before, (logits.argmax(-1) == y).float().mean().item(), logits.sum().item()


def with_bias(model: Any, optimizer: Any, amp: Any) -> Any:
    x, y = batch()
    logits = model(x) / 2 + torch.arange(WORDS)
    return trained(F.cross_entropy(logits.flatten(0, 1), y.flatten()), optimizer, amp)


def edited(model: Any, optimizer: Any, amp: Any) -> Any:
    x, y = batch()
    logits = model(x)
    logits[..., 0] -= 3
    return trained(F.cross_entropy(logits.flatten(0, 1), y.flatten()), optimizer, amp)


def masked(model: Any, optimizer: Any, amp: Any) -> Any:
    x, y = batch()
    keeps = torch.arange(SIZE) % 2 == 0
    return trained(F.cross_entropy(model(x)[keeps].transpose(1, 2), y[keeps]), optimizer, amp)


def accumulated(model: Any, optimizer: Any, amp: Any) -> Any:
    x, y = batch()
    for of_x, of_y in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.cross_entropy(model(of_x).transpose(1, 2), of_y) / 2
        amp.backward(loss)
    optimizer.step()
    return loss.item()


def checkpointed(model: Any, optimizer: Any, amp: Any) -> Any:
    x, y = batch()
    logits = checkpoint(model, x, use_reentrant=False)
    return trained(F.cross_entropy(logits.transpose(1, 2), y), optimizer, amp)


def reentrant(model: Any, optimizer: Any, amp: Any) -> Any:
    x, y = batch()
    logits = checkpoint(model, x.requires_grad_(), use_reentrant=True)
    return trained(F.cross_entropy(logits.transpose(1, 2), y), optimizer, amp)


def under_autocast(model: Any, optimizer: Any, amp: Any) -> Any:
    x, y = batch()
    with amp.autocast():
        loss = F.cross_entropy(model(x).transpose(1, 2), y)
    return trained(loss, optimizer, amp)


def compiled(model: Any, optimizer: Any, amp: Any) -> Any:
    x, y = batch()
    torch.compiler.reset()  # levels share the code of ``forward``
    logits = torch.compile(model, backend="eager")(x)
    assert type(logits) is Tensor
    return trained(F.cross_entropy(logits.transpose(1, 2), y), optimizer, amp)


def with_compiled_loss(model: Any, optimizer: Any, amp: Any) -> Any:
    x, y = batch()
    torch.compiler.reset()

    @torch.compile(backend="eager")
    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().view(-1, WORDS), y.flatten())

    with warnings.catch_warnings():  # Dynamo asks for ``grad`` of a tensor of another class
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        return trained(loss(model(x), y), optimizer, amp)


STEPS = {
    step.__name__: step
    for step in (
        by_criterion,
        language,
        with_accuracy,
        with_bias,
        edited,
        masked,
        accumulated,
        checkpointed,
        reentrant,
        under_autocast,
        compiled,
        with_compiled_loss,
    )
}


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_is_that_without(step: Step, level: str) -> None:
    """To the bit, because one loss of half logits rounds where a cast would."""
    expected, found = (run(step, fuse, level=level) for fuse in (False, True))
    assert found.results == expected.results
    half = BF16 if level in ("O4", "O5") else FP16
    for a, b in zip(found.changes, expected.changes, strict=True):
        # FP32 arithmetic in another order puts single gradients on the other side of a tie
        torch.testing.assert_close(a, b, rtol=0, atol=torch.finfo(half).eps * b.abs().max().item())


@pytest.mark.parametrize("dtype", [None, FP32, FP16])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_which_outputs_are_unread(level: str, dtype: Any) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tagger()

        def forward(self, x: Tensor) -> Any:
            logits = self.net(x)
            others = logits.float(), x, None, [logits.argmax(-1)], logits.bfloat16()
            return {"logits": logits, "others": others}

    def look(model: Any, optimizer: Any, amp: Any) -> Any:
        x, _ = batch()
        found = model(x)
        with torch.no_grad():
            assert type(model(x)["logits"]) is Tensor
        others = found["others"]
        assert [type(t) for t in (*others[:2], others[3][0])] == [Tensor] * 3
        assert others[4].dtype is (dtype or BF16)
        return type(found["logits"]), found["logits"].dtype

    for fuse, kind in ((False, Tensor), (True, Unread)):
        found = run(look, fuse, Several, level, cast_outputs=dtype)
        assert found.results == (kind, dtype or FP16)


def test_the_loss_of_half_outputs_is_fp32() -> None:
    def dtypes(model: Any, optimizer: Any, amp: Any) -> Any:
        x, y = batch()
        loss = F.cross_entropy(model(x).transpose(1, 2), y)
        trained(loss, optimizer, amp)
        return loss.dtype

    assert run(dtypes, True, cast_outputs=None).results is FP32


def test_where_nothing_can_be_fused_nothing_changes() -> None:
    x, _ = batch()
    model = tagger()
    expected = model(x)
    with tritonamp.enable(model, level="O0", fuse_loss=True):
        assert type(model(x)) is Tensor and torch.equal(model(x), expected)
    with tritonamp.enable(model, level="O2", fuse_loss=True, fp32_modules=["2"]):
        assert type(model(x)) is Tensor


def test_labels_of_a_model_without_a_loss() -> None:
    class Labelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = tagger()

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x).transpose(1, 2), labels)

    (x, y), model = batch(), Labelled()
    expected = model(x, labels=y)
    with tritonamp.enable(model, level="O2", fuse_loss=True):
        # logits of about 1, rounded to half
        torch.testing.assert_close(model(x, labels=y), expected, rtol=0, atol=2.0**-9)


@pytest.mark.parametrize("response", ["explain", "heal"])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_fault_is_named(fuse: bool, response: str) -> None:
    def overflowed(model: Any, optimizer: Any, amp: Any) -> Any:
        x, y = batch()
        with torch.no_grad():
            model[2].weight.fill_(3e4)
        amp.backward(F.cross_entropy(model(x).transpose(1, 2), y))
        optimizer.step()
        return str(amp.explain())

    text = run(overflowed, fuse, on_nonfinite=response).results
    assert "matmul overflow, forward: 2, op linear" in text and "the output has inf" in text


@pytest.mark.parametrize("fuse", [False, True])
def test_a_swallowed_overflow_is_compared_with_fp32(fuse: bool) -> None:
    class Swallows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.up(x) * 6e4 / 9e4)

    model, x = Swallows(), torch.full((4, 1), 1.2)
    with tritonamp.enable(model, level="O2", fuse_loss=fuse) as amp:
        text = amp.explain(replay=lambda: model(x))
    assert "the result differs from FP32's by up to" in text


def test_an_output_is_not_the_data_of_the_next_model() -> None:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    nn.init.ones_(first.weight)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    with tritonamp.enable([first, second], optimizer, level="O2", fuse_loss=True) as amp:
        features = first(torch.full((SIZE, WIDTH), 6e4)).detach()
        assert isinstance(features, Unread)
        amp.backward(second(features).square().sum())
        optimizer.step()
        assert "forward fault" in str(amp.explain())


def test_copies_pickles_and_json() -> None:
    x, _ = batch()
    model = tagger()
    with tritonamp.enable(model, level="O2", fuse_loss=True) as amp:
        assert isinstance(copy.deepcopy(model)(x), Unread)
        assert type(pickle.loads(pickle.dumps(model))(x)) is Tensor
        assert tritonamp.Policy.from_json(amp.policy.to_json()).fuse_loss
    assert type(model(x)) is Tensor
