"""Unread tensors: operations that read them, that leave them unread, and that write to them."""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tritonamp import functional
from tritonamp.casts.model_losses import leaves_logits_unread
from tritonamp.casts.unread import Unread, unread, unread_call
from tritonamp.casts.unread_values import LayerCall, Memory
from tritonamp.functional import linear_head

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
SIZE, LENGTH, WORDS, WIDTH = 3, 4, 7, 8
FORMATS = [(FP16, FP32), (BF16, FP32), (FP16, FP16), (BF16, BF16)]


class Doubled(torch.autograd.Function):
    """A user's function, which Python's overrides do not reach."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


# Readers get logits [3, 4, 7] that no other reader has seen, and return a tensor.


def no_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        best = x.argmax(-1)
    return F.one_hot(best, WORDS) * x


def saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad / 2)
    return x * 2


def retained(x: Tensor) -> Tensor:
    x.retain_grad()
    (x * x).sum().backward(retain_graph=True)
    assert x.grad is not None
    return x.grad + x


READERS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "arithmetic": lambda x: torch.tanh(x / 30) * 30,
    "temperature": lambda x: F.cross_entropy((x / 2).view(-1, WORDS), torch.arange(12) % WORDS),
    "bias": lambda x: x + torch.arange(WORDS),
    "widened": lambda x: x.float().softmax(-1),
    "to float64": lambda x: x.to(torch.float64) ** 2,
    "to float16": lambda x: x.half() * 3,
    "to bfloat16": lambda x: x.bfloat16() * 3,
    "to another device": lambda x: x.to("cpu", FP32) * 1,
    "bits": lambda x: x.detach().view(torch.int16),
    "bits of half": lambda x: x.detach().view(torch.float16),
    "bytes": lambda x: x.detach().view(torch.uint8),
    "sliced": lambda x: x[..., :-1, :].reshape(-1, WORDS) + 1,
    "sliced, contiguous": lambda x: x[:, :-1].contiguous().view(-1, WORDS) * 2,
    "indexed": lambda x: x[torch.tensor([0, 2])],
    "masked": lambda x: x.masked_fill(x < 0, -1e4),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "selected": lambda x: x[x > 0],
    "gathered": lambda x: x.gather(-1, torch.zeros(SIZE, LENGTH, 1, dtype=torch.int64)),
    "transposed": lambda x: x.transpose(1, 2) * 1,
    "permuted": lambda x: x.permute(2, 0, 1).contiguous(),
    "as strided": lambda x: x.as_strided((2, 2), (WORDS, 1), 3) * 1,
    "split": lambda x: torch.cat([part * i for i, part in enumerate(x.split(3, -1))], -1),
    "iterated": lambda x: sum(row for row in x),
    "expanded": lambda x: x.unsqueeze(0).expand(2, -1, -1, -1) * 1,
    "stacked": lambda x: torch.stack([x, x.detach()]),
    "second argument": lambda x: torch.zeros(SIZE, LENGTH, WORDS).copy_(x),
    "product": lambda x: x @ x.transpose(-1, -2),
    "layer": lambda x: F.linear(x, torch.ones(2, WORDS, dtype=x.dtype)),
    "sorted": lambda x: x.topk(2, -1)[0],
    "log softmax": lambda x: x.log_softmax(-1),
    "sum": lambda x: x.float().sum((0, 1)),
    "twice": lambda x: x.exp() + x.float(),
    "cloned": lambda x: x.clone().mul_(2) + x,
    "function": lambda x: Doubled.apply(x),
    "checkpoint": lambda x: checkpoint(lambda y: y.sin() * y, x, use_reentrant=False),
    "no gradient": no_gradient,
    "hook": hooked,
    "retained gradient": retained,
    "gradient": lambda x: torch.autograd.grad((x**2).sum(), x, create_graph=True)[0],
    "vmap": lambda x: torch.vmap(lambda row: row.float().softmax(-1))(x.detach()),
    "item": lambda x: torch.tensor(x[0, 0, 0].item()),
    "list": lambda x: torch.tensor(x.tolist()),
    "array": lambda x: torch.tensor(numpy.asarray(x.detach().float())),
    "numpy": lambda x: torch.from_numpy(x.detach().float().numpy()),
    "capsule": lambda x: torch.from_dlpack(x.detach().float()),
    "text": lambda x: torch.tensor(float(f"{x.detach()[0, 0, 0]:.3f}")),
    "data": lambda x: x.data,
    "saved": saved,
    "pickled": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "copied": lambda x: copy.deepcopy(x.detach()),
    "shallow copy": lambda x: copy.copy(x) * 1,
    "like them": lambda x: torch.ones_like(x) * x + x.new_ones(1),
}


# Writers write to the logits, or to memory that the logits share.


def in_place(x: Tensor) -> Tensor:
    x[..., :3] = 0
    x /= 4
    return x.tanh()


def through_a_view(x: Tensor) -> Tensor:
    lines = x.view(-1, WORDS)
    lines[:, 0] = -5.0
    lines.mul_(2)
    return x * 1


def seen_by_a_view(x: Tensor) -> Tensor:
    view = x.transpose(1, 2)
    x.add_(1)
    return view * 3


def through_detached(x: Tensor) -> Tensor:
    x.detach().zero_()
    return x * 2


def after_a_read(x: Tensor) -> Tensor:
    total = x.sum()
    x.mul_(2)
    return x + total


def through_numpy(x: Tensor) -> Tensor:
    if x.dtype is not BF16:
        x.detach().numpy()[...] = 1
    return x * 1


def through_data(x: Tensor) -> Tensor:
    x.data.mul_(3)
    return x * 1


def as_result(x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.add(x, 1, out=x.detach())
    return x * 1


WRITERS = {
    f.__name__: f
    for f in (
        in_place,
        through_a_view,
        seen_by_a_view,
        through_detached,
        after_a_read,
        through_numpy,
        through_data,
        as_result,
    )
}


def read_two_ways(
    reader: Callable[[Tensor], Any], half: torch.dtype, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the result of a reader, and the gradient behind it, of a plain tensor and of ours."""
    for is_unread in (False, True):
        torch.manual_seed(1)
        leaf = torch.randn(SIZE, LENGTH, WORDS, requires_grad=True)
        values = (leaf * 1).to(half)
        x = unread(values, dtype) if is_unread else values.to(dtype)
        assert isinstance(x, Unread) is is_unread and x.dtype is dtype
        y = reader(x)
        if y.requires_grad:
            y.double().square().sum().backward()
        yield y, leaf.grad


@pytest.mark.parametrize(("half", "dtype"), FORMATS)
@pytest.mark.parametrize("reader", [*READERS.values(), *WRITERS.values()], ids=READERS | WRITERS)
def test_who_reads_them_gets_the_same_bits(
    reader: Callable[[Tensor], Any], half: torch.dtype, dtype: torch.dtype
) -> None:
    (expected, expected_grad), (found, grad) = read_two_ways(reader, half, dtype)
    assert found.dtype is expected.dtype and found.stride() == expected.stride()
    assert found.requires_grad is expected.requires_grad
    assert torch.equal(found.detach(), expected.detach())
    assert (grad is None) is (expected_grad is None)
    assert grad is None or torch.equal(grad, expected_grad)


# Cross entropy


def lines(x: Tensor) -> Tensor:
    return x.view(-1, WORDS)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lines,
    "float": lambda x: lines(x.float()),
    "flatten": lambda x: x.flatten(0, 1),
    "reshape, to": lambda x: x.reshape(-1, WORDS).to(FP32),
    "permuted back": lambda x: lines(x.permute(2, 0, 1).contiguous().permute(1, 2, 0).clone()),
    "shifted": lambda x: lines(x[..., :-1, :].contiguous()),
    "one line": lambda x: x[0, 0],
    "classes second": lambda x: x.transpose(1, 2),
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "ignored": {"ignore_index": 0},
    "class weights": {"weight": torch.linspace(0.5, 2.0, WORDS)},
    "deprecated": {"size_average": False},
}


class Seen(list[Any]):
    """Class and dtype of the logits that our cross entropy was given.

    Attributes:
        reads: how often values were read, those of gradients included.
    """

    reads = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found, original, read = Seen(), functional.cross_entropy, Memory.read

    def counting(memory: Memory, writes: bool) -> Tensor:
        found.reads += 1
        return read(memory, writes)

    monkeypatch.setattr(Memory, "read", counting)

    def noting(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append((type(logits), logits.dtype))
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(functional, "cross_entropy", noting)
    return found


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.parametrize(("half", "dtype"), FORMATS)
@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_loss_reads_half_values(
    shape: Callable[[Tensor], Tensor],
    arguments: dict[str, Any],
    half: torch.dtype,
    dtype: torch.dtype,
    seen: Seen,
) -> None:
    torch.manual_seed(0)
    values = (4 * torch.randn(SIZE, LENGTH, WORDS)).to(half)
    dim = min(1, shape(values).dim() - 1)
    target = torch.randint(WORDS - 1, shape(values).select(dim, 0).shape)
    exact, leaf = (values.to(d).requires_grad_() for d in (torch.float64, half))

    logits = shape(unread(leaf * 1, dtype))
    loss = F.cross_entropy(logits, target, **arguments)
    (2.0**15 * loss.sum()).backward()
    assert isinstance(logits, Unread) and seen == [(Tensor, half)] and loss.dtype is FP32
    assert seen.reads == 0

    wide = {k: v.double() if isinstance(v, Tensor) else v for k, v in arguments.items()}
    lines = shape(exact).double()  # "to" made them FP32
    expected = F.cross_entropy(lines, target, **wide)
    (2.0**15 * expected.sum()).backward()
    # FP32: a few roundings of numbers up to the largest logit, 16; each element is a sum of 12
    torch.testing.assert_close(loss.double(), expected, rtol=2.0**-22, atol=12 * 16 * 2.0**-23)
    grad, exact_grad = leaf.grad, exact.grad
    assert grad is not None and grad.dtype is half and exact_grad is not None
    # rounded once, after FP32 errors of 2**-20 in a probability, times the scale
    torch.testing.assert_close(
        grad.double(), exact_grad, rtol=torch.finfo(half).eps, atol=2.0 ** (15 - 20)
    )


def test_what_has_no_classes_as_targets_is_torchs() -> None:
    """Probabilities; and cross entropy of written logits."""
    torch.manual_seed(0)
    leaf = torch.randn(SIZE, WORDS)
    shares = torch.rand(SIZE, WORDS).softmax(-1)
    for target in (shares, unread((shares * 1).half().requires_grad_() * 1, FP32)):
        values = leaf.clone().requires_grad_()
        wide = (values * 1).half().float()
        expected = F.cross_entropy(wide, torch.as_tensor(target).detach().float())
        found = F.cross_entropy(unread((values * 1).half(), FP32), target)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_a_loss_of_written_logits_is_of_what_was_written(
    writer: Callable[[Tensor], Tensor], dtype: torch.dtype, seen: Seen
) -> None:
    def loss(x: Tensor) -> Tensor:
        writer(x)
        return F.cross_entropy(lines(x).float(), torch.arange(SIZE * LENGTH) % WORDS)

    (expected, expected_grad), (found, grad) = read_two_ways(loss, FP16, dtype)
    assert torch.equal(found, expected) and not seen
    assert grad is not None and expected_grad is not None and torch.equal(grad, expected_grad)


def test_a_read_before_the_loss_changes_nothing(seen: Seen) -> None:
    def loss(x: Tensor) -> Tensor:
        x.detach().sum()
        return F.cross_entropy(lines(x), torch.arange(SIZE * LENGTH) % WORDS)

    (expected, expected_grad), (found, grad) = read_two_ways(loss, FP16, FP32)
    assert torch.equal(found, expected) and seen == [(Tensor, FP16)]
    assert grad is not None and expected_grad is not None and torch.equal(grad, expected_grad)


def test_gradients_of_two_losses_add_up_in_fp32() -> None:
    def loss(x: Tensor) -> Tensor:
        target = torch.arange(SIZE * LENGTH) % WORDS
        half_of_it = F.cross_entropy(lines(x), target) + F.cross_entropy(lines(x * 1), target)
        return half_of_it + F.cross_entropy(x.transpose(1, 2), target.view(SIZE, LENGTH))

    (expected, expected_grad), (found, grad) = read_two_ways(loss, FP16, FP32)
    assert torch.equal(found, expected)
    # each of two is rounded by half an ulp more
    torch.testing.assert_close(grad, expected_grad, rtol=2 * torch.finfo(FP16).eps, atol=2.0**-24)


def test_hooks_and_gradients_between_model_and_loss() -> None:
    target, found = torch.arange(SIZE * LENGTH) % WORDS, []
    for is_unread in (False, True):
        torch.manual_seed(1)
        leaf = torch.randn(SIZE, LENGTH, WORDS, requires_grad=True)
        half = (leaf * 1).half()
        x = unread(half, FP32) if is_unread else half.float()
        kinds: list[type] = []
        x.register_hook(lambda grad, kinds=kinds: kinds.append(type(grad)) or grad * 2)
        x.retain_grad()
        loss = F.cross_entropy(lines(x), target)
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        assert x.grad is not None and leaf.grad is not None and x.grad.dtype is FP32
        assert set(kinds) == {Unread if is_unread else Tensor}  # half in memory
        found.append([torch.as_tensor(g) * 1 for g in (first, x.grad, leaf.grad)])
    for a, b in zip(*found, strict=True):
        # rounded to half before the hooks
        torch.testing.assert_close(a, b, rtol=torch.finfo(FP16).eps, atol=2.0**-24)


def test_a_gradient_of_the_gradient() -> None:
    def squared(x: Tensor) -> Tensor:
        loss = F.cross_entropy(lines(x), torch.arange(SIZE * LENGTH) % WORDS)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + 100 * grad.square().sum()

    (expected, expected_grad), (found, grad) = read_two_ways(squared, FP16, FP32)
    eps = torch.finfo(FP16).eps
    torch.testing.assert_close(found, expected, rtol=2 * eps, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=4 * eps, atol=4 * eps)


# What they are


def test_nothing_is_computed_to_ask_what_they_are() -> None:
    call = LayerCall(torch.randn(SIZE, WIDTH), torch.randn(WORDS, WIDTH), None, FP16)
    logits = unread_call(call)
    wide = logits.float()
    assert isinstance(wide, Unread) and wide.dtype is FP32 and wide.float() is wide
    assert (wide.size(-1), wide.dim(), wide.device) == (WORDS, 2, call.rows.device)
    clone = wide.clone()
    for x in (logits, wide, clone):
        assert isinstance(x, Unread) and x.memory.source is call
    assert torch.equal(wide + 0, call.logits().float())


@pytest.mark.parametrize(
    "plain",
    [
        lambda: torch.ones(2, 3).half(),
        lambda: torch.ones(2, 3).half().requires_grad_(),
        lambda: torch.ones(3, requires_grad=True).half(),
        lambda: torch.ones(2, 3, requires_grad=True).half()[:, :2],
        lambda: torch.ones(2, 3, requires_grad=True, device="meta").half(),
    ],
    ids=["no gradient", "leaf", "vector", "part of memory", "meta"],
)
def test_tensors_that_are_cast_at_once(plain: Callable[[], Tensor]) -> None:
    assert type(unread(plain(), FP32)) is Tensor
    with torch.no_grad():
        assert type(unread(torch.ones(2, 3, requires_grad=True).half(), FP32)) is Tensor


def test_shapes_in_place_are_refused() -> None:
    logits = unread(torch.ones(2, 3, requires_grad=True).half(), FP32)
    with pytest.raises(RuntimeError, match="an operation that leaves the shape"):
        logits.transpose_(0, 1)


def test_values_that_were_overwritten_are_refused() -> None:
    half = torch.ones(2, 3, requires_grad=True).half()
    logits = unread(half, FP32)
    with torch.no_grad():
        half.mul_(2)
    with pytest.raises(
        RuntimeError, match="changed in place, as an optimizer's step does: compute"
    ):
        logits.sum()


class Cloned(torch.autograd.Function):
    """What DistributedDataParallel does to all that a model returns."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(t.clone() for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def test_a_function_of_all_outputs_computes_nothing() -> None:
    weight = torch.randn(WORDS, WIDTH).requires_grad_()
    call = LayerCall(torch.randn(12, WIDTH), weight, None, FP16)
    loss, logits = Cloned.apply(weight.sum(), unread_call(call).float())
    loss.backward()
    assert isinstance(logits, Unread) and logits.memory.source is call
    assert torch.equal(weight.grad, torch.ones(WORDS, WIDTH))


# A layer's logits that are not computed yet


@pytest.fixture
def few_rows_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few: 16, twice the width."""
    monkeypatch.setattr(linear_head, "MIN_ROWS", 5)


@pytest.mark.parametrize("half", [FP16, BF16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reader", [*READERS.values(), *WRITERS.values()], ids=READERS | WRITERS)
def test_who_reads_a_layers_logits_gets_them_and_their_gradients(
    reader: Callable[[Tensor], Any],
    bias: bool,
    half: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_head.LinearHead, "chunk_rows", lambda features: 5)
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WORDS, bias=bias), torch.randn(SIZE, LENGTH, WIDTH)
    results = []
    for is_unread in (False, True):
        given = x.clone().requires_grad_()
        left = leaves_logits_unread(layer) if is_unread else contextlib.nullcontext()
        with left, torch.autocast("cpu", half):
            logits = layer(given)
        assert isinstance(logits, Unread) is is_unread and logits.dtype is half
        assert logits.shape == (SIZE, LENGTH, WORDS) and logits.requires_grad
        y = reader(logits)
        if y.requires_grad:
            y.double().square().sum().backward()
        grads = given.grad, *(p.grad for p in layer.parameters())
        results.append((y.dtype, y.detach().double(), *grads))
        layer.zero_grad()
    (dtype, *expected), (found_dtype, *found) = results
    assert found_dtype is dtype and "forward" not in vars(layer)
    eps = torch.finfo(half).eps
    for a, b in zip(found, expected, strict=True):
        assert (a is None) is (b is None)
        if b is not None and reader is not READERS["bits"]:
            # sums of few products, each rounded to half: another order, another neighbour
            torch.testing.assert_close(a, b, rtol=4 * eps, atol=4 * eps * b.abs().max().item())


@pytest.mark.parametrize("part", [slice(None), slice(1, 3)], ids=["all", "some"])
def test_a_loss_of_a_layers_logits(part: slice) -> None:
    torch.manual_seed(0)
    layer, target = nn.Linear(WIDTH, WORDS), torch.randint(WORDS, (SIZE, LENGTH))[part].flatten()
    rows, found = torch.randn(SIZE, LENGTH, WIDTH), []
    for is_unread in (False, True):
        call = LayerCall(rows.clone().requires_grad_(), layer.weight, layer.bias, BF16)
        x = (
            unread_call(call)
            if is_unread
            else F.linear(call.rows, call.weight, call.bias).bfloat16()
        )
        loss = F.cross_entropy(x.float()[part].view(-1, WORDS), target, label_smoothing=0.1)
        found.append((loss, *torch.autograd.grad(loss, (call.rows, layer.weight, layer.bias))))
    for a, b in zip(*found, strict=True):
        eps = torch.finfo(BF16).eps  # operands and logits are rounded
        torch.testing.assert_close(a, b, rtol=4 * eps, atol=4 * eps * b.abs().max().item())


def test_a_loss_of_transposed_logits() -> None:
    """Of as many rows as classes, so that the shape does not tell."""
    torch.manual_seed(0)
    target = torch.arange(WORDS).roll(1)
    layer, rows = nn.Linear(WIDTH, WORDS), torch.randn(WORDS, WIDTH)
    call = LayerCall(rows.requires_grad_(), layer.weight, layer.bias, BF16)
    loss = F.cross_entropy(unread_call(call).T, target)
    expected = F.cross_entropy(layer(rows).T, target)
    eps = torch.finfo(BF16).eps  # operands and logits are rounded
    torch.testing.assert_close(loss, expected, rtol=4 * eps, atol=0)


def test_a_layer_whose_forward_raises_has_its_own_again() -> None:
    layer = nn.Linear(WIDTH, WORDS)
    message = "shapes cannot be multiplied"
    with pytest.raises(RuntimeError, match=message), leaves_logits_unread(layer):
        layer(torch.zeros(1, WIDTH + 1))
    assert "forward" not in vars(layer)


@pytest.mark.usefixtures("few_rows_are_many")
@pytest.mark.parametrize("how", ["FP32", "no gradients", "few"])
def test_when_they_are_computed_at_once(how: str) -> None:
    layer, x = nn.Linear(WIDTH, WORDS), torch.randn(16 if how == "few" else 17, WIDTH)
    autocast = torch.autocast("cpu", BF16, enabled=how != "FP32")
    with autocast, leaves_logits_unread(layer), torch.set_grad_enabled(how != "no gradients"):
        assert type(layer(x)) is Tensor
