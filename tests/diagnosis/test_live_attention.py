"""amp.watch and amp.ranges: the largest attention logits of each head."""

import gc
import logging
import math
import sys
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import take_step
from runs import LEVELS, Training, batch, started_on_cpu
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.diagnosis import live_attention
from tritonamp.diagnosis.attention_calls import calls
from tritonamp.diagnosis.live_ranges import RangeRecord

HEADS, WIDTH, LENGTH = 4, 8, 5
SIZE = HEADS * WIDTH
HALVES = [torch.float16, torch.bfloat16]


def masked(length: int = LENGTH, value: float = -math.inf) -> Tensor:
    return torch.full((length, length), value).triu(1)


class Attention(nn.Module):
    """Attention in one of the forms below; keeps queries and keys."""

    def __init__(self, form: str, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.form = form
        self.q = nn.Linear(SIZE, SIZE, bias=False)
        self.k = nn.Linear(SIZE, kv_heads * WIDTH, bias=False)
        self.v = nn.Linear(SIZE, kv_heads * WIDTH, bias=False)
        self.out, self.soft = nn.Linear(SIZE, SIZE), nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        self.kept = q.detach(), k.detach()
        result: Tensor = getattr(self, self.form)(q, k, v)
        return self.out(result.transpose(1, 2).flatten(2))

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def imported(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True)

    def scaled(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=-0.5)

    def grouped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def function(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * 0.5, dim=-1) @ v

    def of_torch(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(input=q @ k.mT * 0.5, dim=-1) @ v

    def method(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * 0.5).softmax(-1) @ v

    def module(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.soft(q @ k.mT * 0.5) @ v

    def wide(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * 0.5, dim=-1, dtype=torch.float32).to(v.dtype) @ v

    def written(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT * 0.5
        scores = scores.masked_fill(masked().isinf(), float("-inf"))
        return F.softmax(scores, dim=-1) @ v

    def added(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * 0.5 + masked(value=-10000.0).to(q.dtype), dim=-1) @ v

    def ours(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tritonamp.functional.masked_softmax(q @ k.mT, scale=0.5, causal=True) @ v

    def ours_masked(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = masked() == 0
        return tritonamp.functional.masked_softmax(q @ k.mT, mask, scale=0.5) @ v

    def ours_added(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tritonamp.functional.masked_softmax(q @ k.mT, masked(), scale=0.5) @ v


SCALES = {"sdpa": WIDTH**-0.5, "imported": WIDTH**-0.5, "scaled": 0.5, "grouped": WIDTH**-0.5}
UNMASKED = ["function", "of_torch", "method", "module", "wide"]
MASKED = ["written", "added", "ours", "ours_masked", "ours_added"]


class Watched(Training):
    def __init__(self, form: Any, **fields: Any) -> None:
        model = nn.Sequential(Attention(form)) if isinstance(form, str) else form
        super().__init__(model, "SGD", **fields)
        self.x = batch(0, 2, LENGTH, SIZE)

    def logits(self) -> list[RangeRecord]:
        return [r for r in self.amp.ranges() if r.direction == "attention"]


run = started_on_cpu(Watched)


@pytest.mark.parametrize("form", SCALES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_bound_of_each_head(run: Any, level: str, dtype: torch.dtype, form: str) -> None:
    """FP32 norms of 8 numbers round by less than 10 u, and their product with the scale by 2."""
    model = Attention(form, kv_heads=2 if form == "grouped" else HEADS)
    training = run(nn.Sequential(model), level=level, dtype=dtype)
    training.amp.watch()
    training.step()
    q, k = (t.double() for t in model.kept)
    k = k.repeat_interleave(HEADS // k.shape[1], 1)
    norms = q.norm(dim=-1).amax(-1) * k.norm(dim=-1).amax(-1) * SCALES[form]
    records = training.logits()
    assert [(r.module, r.head, r.step, r.is_bound) for r in records] == [
        ("0", head, 1, True) for head in range(HEADS)
    ]
    found = torch.tensor([r.absmax for r in records])
    torch.testing.assert_close(found.double(), norms.amax(0), rtol=2.0**-20, atol=0)
    exact = (q @ k.mT).abs().amax((0, 2, 3)) * SCALES[form]
    assert (found >= exact).all()
    assert {r.dtype for r in records} == {torch.float32 if level == "O0" else dtype}
    limit = torch.finfo(records[0].dtype).max
    assert records[0].headroom_bits == math.log2(limit / records[0].absmax)
    assert math.isnan(records[0].zeros) and records[0].elements == 0


@pytest.mark.parametrize("form", [*UNMASKED, *MASKED])
@pytest.mark.parametrize("level", LEVELS)
def test_exact_where_scores_exist(run: Any, level: str, form: str) -> None:
    training = run(form, level=level)
    training.amp.watch()
    training.step()
    q, k = (t.double() for t in training.model[0].kept)
    scores = q @ k.mT * 0.5
    scores = scores if form in UNMASKED else scores.tril()
    records = training.logits()
    name = "0.soft" if form == "module" else "0"
    assert [(r.module, r.head, r.is_bound) for r in records] == [
        (name, head, False) for head in range(HEADS)
    ]
    found = torch.tensor([r.absmax for r in records]).double()
    # scores are rounded to half once or twice
    rounded = 2.0**-9 if level != "O0" else 2.0**-20
    torch.testing.assert_close(found, scores.abs().amax((0, 2, 3)), rtol=rounded, atol=1e-6)


@pytest.mark.parametrize("form", ["sdpa", "imported", *UNMASKED, *MASKED])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_has_the_same_bits(run: Any, level: str, form: str) -> None:
    """Also that of a model that is enabled while another one is watched."""
    watched = run(form, level=level)
    watched.amp.watch(every=2)
    plain = run(form, level=level)
    for _ in range(3):
        watched.step()
        plain.step()
    watched.amp.disable()
    never = run(form, level=level)
    for _ in range(3):
        never.step()
    for other in (watched, plain):
        values = (each.model.state_dict().values() for each in (other, never))
        assert all(map(torch.equal, *values))


class Probabilities(nn.Module):
    """FP32 results in an enabled model, because its code is read; enabled in one test only."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.last(x), -1)


def test_code_of_a_model_that_is_enabled_meanwhile(run: Any) -> None:
    run("sdpa").amp.watch()
    assert hasattr(torch.softmax, "_tritonamp_original")
    result = run(Probabilities()).model(batch(0, 2, LENGTH, SIZE))
    assert not torch.equal(result, result.half().float())


def test_torch_is_put_back(run: Any) -> None:
    before = (F.scaled_dot_product_attention, torch.softmax, scaled_dot_product_attention)
    assert "softmax" not in vars(torch.Tensor)
    first, second = run("sdpa"), run("sdpa")
    handle = first.amp.watch()
    second.amp.watch()
    assert F.scaled_dot_product_attention is not before[0]
    handle.remove()
    handle.remove()
    first.step()
    second.step()
    assert second.logits() and not first.logits()
    second.amp.disable()
    assert (F.scaled_dot_product_attention, torch.softmax, scaled_dot_product_attention) == before
    assert "softmax" not in vars(torch.Tensor) and not calls.readers


def test_a_handle_that_is_dropped() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention("sdpa"))
    amp = tritonamp.enable(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O0")
    amp.watch()
    assert len(calls.readers) == 1
    del model, amp
    gc.collect()
    assert not calls.readers


def test_steps_between(run: Any) -> None:
    training = run("sdpa")
    watch = training.amp.watch(every=3)
    seen, new = [], []
    for number in range(7):
        training.step(batch(number, 2, LENGTH, SIZE))
        seen.append({record.step for record in training.logits()})
        new.append(bool((watch.logits()["0"] > 0).all()))
    assert seen == [{1}] * 3 + [{4}] * 3 + [{7}]
    assert new == [True, False, False, True, False, False, True]
    values = [record.absmax for record in training.logits()]
    assert watch.logits()["0"].tolist() == values


def test_reads_only_what_trains(run: Any) -> None:
    training = run("sdpa")
    training.amp.watch(every=1)
    training.step()
    once = training.logits()
    with torch.no_grad():
        training.model(1000.0 * training.x)
    q = torch.randn(2, HEADS, LENGTH, WIDTH) * 1000.0
    F.scaled_dot_product_attention(q, q, q)  # outside of the model
    training.amp.scaler.load_state_dict({**training.amp.scaler.state_dict(), "scale": 1.0})
    training.optimizer.param_groups[0]["lr"] = 0.0
    training.step()
    assert max(r.absmax for r in training.logits()) < 2 * max(r.absmax for r in once)


def test_captures_are_read_whatever_the_step(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device knows in which replays to read. Eager steps that are not due cost nothing."""
    training, read = run("sdpa"), list[int]()
    training.amp.watch(every=3)
    monkeypatch.setattr(live_attention, "add_logits", lambda *args: read.append(1))
    for _ in range(2):
        training.step()
    assert len(read) == 1
    monkeypatch.setattr(live_attention, "is_capturing", lambda device: True)
    training.step()
    assert len(read) == 2


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ((2, 4, 5, 8), (1, 1, 3, 8)),
        ((1, 1, 5, 8), (2, 4, 3, 8)),
        ((5, 8), (3, 8)),
        ((0, 4, 5, 8), (0, 4, 5, 8)),
        ((2, 130, 5, 8), (2, 130, 3, 8)),
        ((3, 2, 4, 5, 8), (3, 2, 2, 3, 8)),
    ],
)
def test_shapes(queries: tuple[int, ...], keys: tuple[int, ...]) -> None:
    q, k = batch(0, *queries), batch(1, *keys)
    heads = q.shape[-3] if q.dim() > 3 and q.shape[-3] <= live_attention.HEADS else 1
    row = torch.zeros(heads)
    live_attention.add_logits(row, torch.ones((), dtype=torch.int32), q, k, 0.5)
    if not q.numel():
        assert not row.any()
        return
    largest = row.max()
    expected = q.norm(dim=-1).max() * k.norm(dim=-1).max() * 0.5
    groups = q.shape[-3] // k.shape[-3] if q.dim() > 3 else 1
    k = k.repeat_interleave(groups, -3) if groups > 1 else k
    assert (q @ k.mT * 0.5).abs().max() <= largest <= expected * (1 + 2.0**-20)


def test_metrics(run: Any) -> None:
    training = run("sdpa")
    training.amp.watch()
    for number in range(2):
        training.step(batch(number, 2, LENGTH, SIZE))
    largest = max(record.absmax for record in training.logits())
    assert training.amp.metrics()["amp/attention_logit"] == largest


def test_micro_batches_are_one_step(run: Any) -> None:
    training = run("sdpa")
    watch = training.amp.watch()
    largest = []
    for factor in (3.0, 1.0):
        training.amp.backward(training.model(factor * training.x).float().sum())
        q, _ = training.model[0].kept
        largest.append(float(q.float().norm(dim=-1).max()))
    training.optimizer.step()
    assert largest[0] > 2 * largest[1]
    assert watch.logits()["0"].max() > 4 * WIDTH**-0.5


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.fails = Attention("sdpa"), False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError
        return self.attention(x)


def test_after_an_exception_in_a_forward(run: Any) -> None:
    model = nn.Sequential(Failing(), Failing())
    training = run(model)
    training.amp.watch()
    model[1].fails = True
    with pytest.raises(KeyError):
        training.step()
    model[1].fails = False
    running = training.amp._ranges._attention.running
    assert len(running._hooks) == 1
    loss = training.loss()
    assert not running._hooks
    training.backward(loss)
    training.finish()
    assert {r.module for r in training.logits()} == {"0.attention", "1.attention"}


class Checkpointed(nn.Module):
    use_reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention("sdpa")

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(self.attention, x, use_reentrant=self.use_reentrant)
        return output


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(run: Any, use_reentrant: bool) -> None:
    model = Checkpointed()
    model.use_reentrant = use_reentrant
    training = run(model)
    training.x.requires_grad_()
    training.amp.watch()
    training.step()
    q, k = (t.float().norm(dim=-1).amax(-1) for t in model.attention.kept)
    expected = (q * k).amax(0) * WIDTH**-0.5
    found = [record.absmax for record in training.logits()]
    torch.testing.assert_close(torch.tensor(found), expected)


def test_segments_that_end_early(run: Any) -> None:
    """torch stops the second forward by an exception, behind the last tensor that is wanted."""
    training = run(nn.Sequential(Checkpointed(), Checkpointed()))
    training.amp.watch(every=1)
    running = training.amp._ranges._attention.running
    lengths = list[int]()
    for block in training.model:
        enter = lambda *_: lengths.append(len(running._hooks))  # noqa: E731
        block.attention.register_forward_pre_hook(enter)
    training.backward()
    assert lengths == [2, 2, 1, 1]
    training.backward()
    assert lengths[4:] == [2, 2, 1, 1]
    training.finish()
    assert {r.module for r in training.logits()} == {"0.attention", "1.attention"}


class Waiting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_inside, self.may_leave = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.is_inside.set()
        self.may_leave.wait(10)
        return x


class Threaded(Attention):
    """Calls attention while another thread is inside of a module."""

    def __init__(self) -> None:
        super().__init__("sdpa")
        self.other = Waiting()

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        thread = threading.Thread(target=self.other, args=(q.detach(),))
        thread.start()
        self.other.is_inside.wait(10)
        y = F.scaled_dot_product_attention(q, k, v)
        self.other.may_leave.set()
        thread.join()
        return y


def test_another_thread(run: Any) -> None:
    """As under DataParallel: a call belongs to no module of another thread."""
    training = run(nn.Sequential(Threaded()))
    training.amp.watch(every=1)
    training.step()
    assert {r.module for r in training.logits()} == {"0"}


def test_a_replay_is_not_read(run: Any) -> None:
    training = run("sdpa", on_nonfinite="explain")
    watch = training.amp.watch(every=1)
    training.step(torch.full_like(training.x, 1e6))
    assert not watch.logits()["0"].isfinite().all()
    training.step()
    assert watch.logits()["0"].isfinite().all() and (watch.logits()["0"] > 0).all()


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("form", "backend"), [("sdpa", "aot_eager"), ("imported", "eager"), ("ours", "eager")]
)
def test_a_compiled_model_is_one_graph(run: Any, form: str, backend: str) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(Attention(form), Attention(form))

    training, plain = run(model()), run(model())
    for each in (training, plain):
        each.amp.watch(every=2)
    compiled = torch.compile(training.model, backend=backend, fullgraph=True)
    for _ in range(3):
        training.backward(compiled(training.x).float().square().mean())
        training.finish()
        plain.step()
    ours, theirs = training.logits(), plain.logits()
    assert [r[:3] for r in ours] == [r[:3] for r in theirs] and ours[0].step == 3
    assert [(r.head, r.is_bound, r.dtype) for r in ours] == [
        (r.head, r.is_bound, r.dtype) for r in theirs
    ]
    for a, b in zip(ours, theirs, strict=True):
        assert a.absmax == pytest.approx(b.absmax, rel=1e-2)
    torch._dynamo.reset()


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_share_a_graph(run: Any) -> None:
    """That of the first block, which says nothing of the others."""
    model = nn.Sequential(*(Attention("sdpa") for _ in range(10)))
    training = run(model)
    training.amp.watch()
    compiled = list[Any]()

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph

    for block in model:
        block.compile(backend=backend)
    training.step()
    for number, block in enumerate(model):
        q, k = (t.float().norm(dim=-1).amax(-1) for t in block.kept)
        found = [r.absmax for r in training.logits() if r.module == str(number)]
        expected = (q * k).amax(0) * WIDTH**-0.5
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-2, atol=0)
    assert len(compiled) <= 2  # the input of the first one requires no gradient
    torch._dynamo.reset()


def test_layers_of_torch(run: Any) -> None:
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, 16, 0.0, batch_first=True)
    training = run(nn.Sequential(layer))
    training.amp.watch()
    training.step()
    assert [(r.module, r.head) for r in training.logits()] == [
        ("0.self_attn", head) for head in range(HEADS)
    ]


def test_heads_that_count_as_one(run: Any) -> None:
    class OneHead(Attention):
        def sdpa(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            y = F.scaled_dot_product_attention(*(t.flatten(0, 1) for t in (q, k, v)))
            return y.unflatten(0, (-1, HEADS))

    training = run(nn.Sequential(OneHead("sdpa")))
    training.amp.watch()
    training.step()
    q, k = (t.float().norm(dim=-1).amax(-1) for t in training.model[0].kept)
    (record,) = training.logits()
    assert record.head is None
    assert record.absmax == pytest.approx(float((q * k).max()) * WIDTH**-0.5)


class Growing(nn.Module):
    """The logits of a head grow by 4 % a step."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.step = Attention("sdpa"), 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.attention(x * 30.0 * 1.02**self.step)


def test_a_warning_before_the_end_of_the_format(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tritonamp")
    training = run(nn.Sequential(Growing()))
    training.optimizer.param_groups[0]["lr"] = 0.0
    training.amp.watch(every=5)
    left: list[int] = []
    step = 0
    while max((r.absmax for r in training.logits()), default=0.0) < 65504:
        output = training.model(training.x)
        take_step(training.amp, training.optimizer, 1e-6 * output.float().mean())
        step += 1
        left += [step + r.steps_left for r in training.logits() if r.steps_left]
    said = [r.getMessage() for r in caplog.records if "attention logit" in r.message]
    assert (
        len(said) == 1 and "a bound of the largest attention logit of 0.attention, head" in said[0]
    )
    assert "will pass 65504, where float16 ends" in said[0] and "amp.after_step" in said[0]
    assert abs(left[0] - step) <= 0.2 * step


flex = pytest.importorskip("torch.nn.attention.flex_attention")
flex_attention = flex.flex_attention


def _doubled(score: Tensor, *_: Any) -> Tensor:
    return 2.0 * score


class Flex(Attention):
    """flex_attention of queries and keys without a gradient: a CPU has no backward of it."""

    def flex(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = flex_attention(q.detach(), k.detach(), v.detach(), score_mod=_doubled, scale=0.25)
        return y + q

    def positional(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = flex.flex_attention(q.detach(), k.detach(), v.detach(), None, None, 0.25)
        return y + q


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "how", ["eager", "positional", "compiled before", "compiled after", "whole"]
)
def test_flex_attention(run: Any, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before score_mod and block_mask; several modules with one graph."""
    with monkeypatch.context() as patched:
        if how == "compiled before":
            by = torch.compile(flex.flex_attention, backend="aot_eager")
            patched.setattr(sys.modules[__name__], "flex_attention", by)
        form = "positional" if how == "positional" else "flex"
        layers = 2 if how == "whole" else 10  # to compile takes long
        training = run(nn.Sequential(*(Flex(form) for _ in range(layers))))
        training.amp.watch()
        counts = torch._dynamo.utils.counters["stats"]
        before = counts["unique_graphs"]
        if how == "compiled after":
            by = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
            patched.setattr(sys.modules[__name__], "flex_attention", by)
        model = training.model
        if how == "whole":
            model = torch.compile(model, backend="aot_eager", fullgraph=True)
        training.backward(model(training.x).float().square().mean())
        training.finish()
        for number, block in enumerate(training.model):
            q, k = (t.float().norm(dim=-1).amax(-1) for t in block.kept)
            records = [r for r in training.logits() if r.module == str(number)]
            assert len(records) == HEADS and all(r.is_bound for r in records)
            found = torch.tensor([r.absmax for r in records])
            torch.testing.assert_close(found, (q * k).amax(0) * 0.25, rtol=1e-2, atol=0)
        assert counts["unique_graphs"] == before + 1
        training.amp.disable()
    torch._dynamo.reset()
