"""The blocks of questions.md, each after the page's first one, and what the page claims."""

import copy
import importlib.util
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import tensors_of
from test_readme import Block, _assumed, _of_questions, blocks
from test_readme import on_this_machine as on_this_machine
from torch import Tensor, nn

import tritonamp

# before the page puts a stand-in in its place
needs_safetensors = pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None, reason="could not import 'safetensors'"
)

PAGE = Path(tritonamp.__file__).parent / "questions.md"
FIRST, *BLOCKS = blocks(PAGE)
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def find(text: str) -> Block:
    """Return the one block of the page that contains a text."""
    (block,) = (block for block in BLOCKS if text in block.code)
    return block


class Page:
    """The page's first block at one level and dtype; attributes are the names of its programs."""

    def __init__(self, level: str, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.level, self.dtype = level, dtype
        self.names = {"__name__": "__main__", **_assumed(), **_of_questions()}
        self.run(FIRST)

    def run(self, block: Block | str) -> None:
        """Run a block, or the one with this text, at this page's level and dtype."""
        block = find(block) if isinstance(block, str) else block
        code = block.code.replace('level="O2"', f'level="{self.level}"')
        code = re.sub(r'level="O\d"(?!, dtype)', rf"\g<0>, dtype=torch.{self.name}", code)
        exec(compile("\n" * (block.line - 1) + code, str(PAGE), "exec"), self.names)

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __getattr__(self, name: str) -> Any:
        return self.names[name]

    def taken(self, amp: Any = None) -> list[str | None]:
        """Return the cause of each step, None where it was taken."""
        return [record.cause for record in (amp or self.amp).history]

    def step(self) -> None:
        self.amp.backward(self.criterion(self.model(self.x), self.y))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def skip(self) -> None:
        """Take a step that is skipped."""
        self.amp.backward(self.criterion(self.model(self.x), self.y))
        self.amp.veto(True)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self, model: Any = None) -> dict[str, Tensor]:
        """Return a copy of the FP32 values of a model."""
        return {name: v.clone() for name, v in (model or self.model).state_dict().items()}

    def half(self) -> torch.dtype:
        """The dtype of weights."""
        return self.dtype if self.level == "O2" else torch.float32


@pytest.fixture(params=["O1", "O2"])
def level(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=HALVES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return HALVES[request.param]


@pytest.fixture
def page(level: str, dtype: torch.dtype, on_this_machine: None) -> Iterator[Page]:
    page = Page(level, dtype)
    yield page
    for handle in [v for v in page.names.values() if isinstance(v, tritonamp.Amp) and v._enabled]:
        handle.disable()
    page.names.clear()


def close(a: Tensor, b: Tensor, share: float) -> bool:
    """Whether the error of a tensor is at most this share of the other's norm."""
    return bool((a.double() - b.double()).norm() <= share * b.double().norm())


def test_every_block_has_a_test() -> None:
    mine = Path(__file__).read_text()
    texts = re.findall(r'page\.run\("(.+?)"\)|page\.run\(\'(.+?)\'\)', mine)
    assert {find(a or b).line for a, b in texts} == {block.line for block in BLOCKS}


def test_a_dtype_has_its_digits_and_its_loss_scale(page: Page) -> None:
    assert page.amp.policy.scales_loss == (page.dtype is torch.float16)
    page.run("dtype=torch.bfloat16)")
    assert page.amp.policy.dtype is torch.bfloat16 and not page.amp.policy.scales_loss
    page.step()
    assert page.taken() == [None]
    more = math.log2(torch.finfo(torch.bfloat16).eps / torch.finfo(torch.float16).eps)
    text = PAGE.read_text()
    assert more == 3 and "three more bits of precision" in text
    assert f"values pass\n{torch.finfo(torch.float16).max:.0f}" in text


def test_a_timer_takes_steps(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    page.run("blocked_autorange")
    assert len(page.amp.history) > 1 and "step()" in capsys.readouterr().out
    assert set(page.taken()) == {None}


def test_o0_is_plain_fp32(page: Page) -> None:
    page.run('level = "O2" if torch.cuda.is_available() else "O0"')
    plain = page.Net()
    plain.load_state_dict(page.values())
    adamw = torch.optim.AdamW(plain.parameters(), lr=3e-4)
    page.criterion(plain(page.x), page.y).backward()
    adamw.step()
    page.step()
    if not torch.cuda.is_available():
        assert all(map(torch.equal, page.model.parameters(), plain.parameters()))


def test_small_state_is_small(page: Page) -> None:
    page.run('state="8bit"')
    page.step()
    assert page.taken() == [None]
    moments = [s[name] for s in page.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert {m.dtype for m in moments} == {torch.uint8}


def test_bytes_are_those_of_other_pages() -> None:
    page, memory, bench = (
        (PAGE.parent / name).read_text()
        for name in ("questions.md", "step/memory.md", "../bench/README.md")
    )
    for state, size in ("fp32", "16"), ("bf16", "12"), ("8bit", "8.02"):
        assert re.search(rf'^\| `state="{state}".*\| {size} \(', memory, re.MULTILINE)
        assert f"{size} bytes" in page or f'`state="{state}"` {size}' in page
    assert '| `offload="state"` | 4 |' in memory and '`offload="state"` leaves 4' in page
    assert "| AdamW | **tritonamp** | default | 16 | **30** |" in bench
    assert "| AdamW | torch.amp | fused, FP32 parameters | 18 | 54 (28) |" in bench
    assert "30 per parameter, torch.amp\n54" in page


def test_a_layer_stays_in_fp32(page: Page) -> None:
    seen: list[torch.dtype] = []
    page.model.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    page.model(page.x)
    page.amp.heal("head")
    page.model(page.x)
    page.run('fp32_modules=["head"]')
    page.model(page.x)
    assert seen == [page.dtype, torch.float32, torch.float32]
    weights = page.model.head.weight, page.model.norm.weight, page.model.layers[0].weight
    assert [w.dtype for w in weights] == [torch.float32, torch.float32, page.half()]
    page.step()
    assert page.taken() == [None]


@pytest.mark.compiled
def test_compiled_loops_are_the_same(page: Page) -> None:
    page.run("torch.compile(model)")
    assert tritonamp.handle(page.compiled) is page.amp
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(page.compiled(page.x), page.model(page.x))


def test_micro_batches_are_one_step(page: Page) -> None:
    page.run("if i % 4 == 0")
    assert page.taken() == [None]


def test_a_bad_micro_batch_skips_the_step_of_all(page: Page) -> None:
    before = page.values()
    page.names["loader"] = [*[*page.loader][:3], (page.x * torch.inf, page.y)]
    page.run("if i % 4 == 0")
    (cause,) = page.taken()
    assert cause == "data"
    assert all(map(torch.equal, page.values().values(), before.values()))


def test_losses_of_one_step_add_up(page: Page) -> None:
    logits = page.model(page.x)
    page.amp.backward(page.criterion(logits, page.y) + 0.01 * logits.square().mean())
    page.amp.unscale_()
    norm = torch.stack([p.grad.norm() for p in page.amp.master_params()])
    page.optimizer.zero_grad()
    grads: list[Tensor] = []

    def note(*_: Any) -> None:
        page.amp.unscale_()
        grads.extend(p.grad.norm() for p in page.amp.master_params())

    noting = page.optimizer.register_step_pre_hook(note)
    page.run("retain_graph=True")
    noting.remove()
    assert page.taken() == [None]
    assert close(torch.stack(grads), norm, 2 * torch.finfo(page.dtype).eps)


def test_a_gan_has_two_scales(page: Page) -> None:
    page.run("opt_g = ")
    # the bias of the last layer has the gradient 65536 at first
    assert set(page.taken(page.gan)) <= {None, "scale overflow"}
    assert page.gan.fed_by(page.discriminator(page.x).mean()) == [page.opt_d]

    def step(optimizer: Any, loss: Tensor, loss_id: int) -> str | None:
        optimizer.zero_grad()
        page.gan.backward(loss, optimizer, loss_id=loss_id)
        optimizer.step()
        return page.taken(page.gan)[-1]

    def fake() -> Tensor:
        return page.generator(torch.randn(64, 4)).square().mean()

    assert step(page.opt_g, fake(), 1) is None
    assert step(page.opt_d, page.discriminator(page.x).mean() * 1e38 * 100, 0) is not None
    assert step(page.opt_g, fake(), 1) is None
    scales = [s["scale"] for s in page.gan.state_dict()["loss_scalers"].values()]
    assert scales == ([2.0**15, 2.0**16] if page.dtype is torch.float16 else [1.0, 1.0])


def test_a_gradient_penalty_is_that_of_fp32(page: Page) -> None:
    page.run("create_graph=True")
    assert page.grad.dtype is torch.float32
    assert set(page.taken(page.wgan)) <= {None, "scale overflow"}
    page.wgan.disable()
    plain = copy.deepcopy(page.critic)

    def gradient(critic: nn.Module, backward: Callable[[Tensor], None]) -> Tensor:
        mixed = page.mixed.detach().requires_grad_()
        (grad,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        backward((grad.norm(dim=1) - 1).square().mean())
        return grad.detach()

    expected = gradient(plain, torch.Tensor.backward)
    scale = {"init_scale": 256.0} if page.dtype is torch.float16 else {}
    page.opt_c.zero_grad()
    with tritonamp.enable(
        page.critic, page.opt_c, level=page.level, dtype=page.dtype, **scale
    ) as wgan:
        got = gradient(page.critic, wgan.backward)
        wgan.unscale_()
        grads = [p.grad for p in wgan.master_params()]
        page.opt_c.step()
        assert page.taken(wgan) == [None]
        eps = torch.finfo(page.dtype).eps
        assert close(got, expected, 4 * eps)
        for grad, param in zip(grads, plain.parameters(), strict=True):
            if param.grad is not None and grad is not None:
                assert close(grad, param.grad, 8 * eps)


def test_schedules_leave_out_skips(page: Page) -> None:
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=3e-4)
    warmup = torch.optim.lr_scheduler.LinearLR(plain, 0.1, total_iters=2)
    assert warmup.get_last_lr() == [pytest.approx(3e-5)]
    page.run("SequentialLR")
    rates = page.scheduler.get_last_lr()
    assert page.scheduler.last_epoch == 4
    page.skip()
    page.amp.step_schedulers(page.scheduler)
    assert page.scheduler.last_epoch == 4 and page.scheduler.get_last_lr() == rates


def test_one_cycle_never_runs_past_its_end(page: Page) -> None:
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(page.optimizer, 1e-3, total_steps=3)
    page.skip()
    for _ in range(2):
        page.amp.step_schedulers(one_cycle)
        page.step()
    page.amp.step_schedulers(one_cycle)
    assert one_cycle.last_epoch == 2  # a fourth call of its own step would be an error


def test_own_losses_run_outside(page: Page) -> None:
    assert page.model(page.x).dtype is torch.float32
    page.run("model.head(x)")
    assert page.taken() == [None] and page.loss.dtype is torch.float32
    with page.amp.autocast():
        assert page.model.head(page.x).dtype is page.dtype
    if page.level == "O2":
        with pytest.raises(RuntimeError, match="dtype"):
            page.model.head(page.x)


def test_clamped_weights_have_clamped_masters(page: Page) -> None:
    page.run("p.clamp_(-0.25, 0.25)")
    assert page.model.head.weight.abs().max() == 0.25
    page.optimizer.param_groups[0]["lr"] = 0.0
    page.step()
    assert max(p.abs().max() for n, p in page.values().items() if "norm" not in n) == 0.25
    with torch.no_grad():
        dict(page.amp.named_master_params())["head.weight"].mul_(0.9999)
    assert page.values()["head.weight"].abs().max() == torch.tensor(0.25) * 0.9999


def test_frozen_layers_keep_their_values(page: Page) -> None:
    torch.manual_seed(2)
    page.run("tuned.add_param_group")
    torch.manual_seed(2)
    first = page.Net().state_dict()
    values = page.values(page.net)
    assert [n for n in values if not torch.equal(values[n], first[n])] == [
        "head.weight",
        "head.bias",
    ]
    page.tuning.backward(page.criterion(page.net(page.x), page.y))
    page.tuned.step()
    moved = (page.values(page.net)["layers.0.weight"] - first["layers.0.weight"]).abs().max()
    assert moved == pytest.approx(1e-5, rel=0.1)


def test_an_average_of_masters(page: Page) -> None:
    before = page.values()["head.weight"]
    page.run("ema.update()")
    assert page.averaged.head.weight.dtype is torch.float32
    assert not torch.equal(page.averaged.head.weight, before)
    tritonamp.save("run.pt", model=page.model, ema=page.ema)
    assert torch.equal(tritonamp.load("run.pt")["ema"]["head.weight"], page.averaged.head.weight)
    page.skip()
    page.ema.update()
    after = page.Net()
    page.ema.copy_to(after)
    assert torch.equal(after.head.weight, page.averaged.head.weight)


def test_a_target_follows_fp32_values(page: Page) -> None:
    page.run("copy.deepcopy(model)")
    assert tritonamp.handle(page.target) is None
    first = page.values()
    assert all(map(torch.equal, page.values(page.target).values(), first.values()))
    page.optimizer.param_groups[0]["lr"] = 1e-2
    page.step()
    code = find("copy.deepcopy(model)").code
    exec(code[code.index("with torch") :], page.names)
    expected = {n: first[n].lerp(v, 0.005) for n, v in page.values().items()}
    target = page.values(page.target)
    assert all(torch.equal(target[n], v) and v.dtype is torch.float32 for n, v in expected.items())
    page.target.load_state_dict(page.model.state_dict())
    assert all(map(torch.equal, page.values(page.target).values(), page.values().values()))


def test_evaluation_is_no_step(page: Page) -> None:
    page.run("model.eval()")
    assert page.right[0].dtype is torch.float32 and len(page.amp.history) == 0
    assert page.model.training
    with torch.inference_mode():
        page.model(page.x)
    page.step()
    assert page.taken() == [None]


def test_skips_are_seen(
    page: Page, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = page.amp.stats()["scale"]
    assert scale == (2.0**16 if page.dtype is torch.float16 else 1.0)
    out: list[str] = []
    page.names["print"] = lambda *args: out.append(args[1])
    monkeypatch.setattr(caplog.handler, "level", logging.INFO)
    page.skip()
    page.skip()
    assert "veto" in page.amp.explain()
    first, *others = caplog.records
    assert first.levelname == "WARNING" and "step 1 skipped" in first.getMessage() and not others
    page.run("logging.basicConfig()")
    assert out == ["veto", "veto"]
    page.skip()
    assert "veto" in page.amp.explain() and "step 3 skipped" in caplog.text


def test_first_skips_halve_the_scale(page: Page) -> None:
    if page.dtype is torch.bfloat16:
        pytest.skip("bfloat16 has no loss scale")
    large = torch.full((), 1000.0)
    for _ in range(3):
        page.amp.backward(page.criterion(page.model(page.x), page.y) * large)
        page.optimizer.step()
        page.optimizer.zero_grad()
    assert page.taken()[0] == "scale overflow"
    assert [r.scale for r in page.amp.history][:2] == [2.0**16, 2.0**15]


def test_metrics_reach_a_writer(page: Page) -> None:
    written: list[tuple[str, float, int]] = []
    page.names["writer"] = SimpleNamespace(add_scalar=lambda *args: written.append(args))
    page.run("add_scalar")
    assert {name for name, _, step in written if step == 3} >= {"amp/scale", "amp/grad_norm"}


def test_a_nan_is_explained_at_once(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    page.model.register_forward_hook(lambda module, args, out: out / (out - out))
    page.run("amp.explain(replay=lambda")
    assert page.taken() == ["forward fault"]
    out = capsys.readouterr().out
    assert "op div" in out


def test_a_nan_of_the_loss_is_explained_too(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    page.names["criterion"] = lambda out, y: (out - out).sqrt().sum() + (out - out).log().mean()
    page.run("amp.explain(replay=lambda")
    assert "op log" in capsys.readouterr().out


@pytest.mark.usefixtures("on_this_machine")
def test_seeds_repeat_a_run(level: str, dtype: torch.dtype) -> None:
    runs = []
    for _ in range(2):
        page = Page(level, dtype)
        with page.amp:
            page.run("if i % 4 == 0")
            runs.append(page.values())
    assert all(map(torch.equal, runs[0].values(), runs[1].values()))


def test_an_interrupted_run_resumes(page: Page) -> None:
    class Interrupted(list):
        def __iter__(self) -> Iterator[Any]:
            yield from [*super().__iter__()][:2]
            raise KeyboardInterrupt

    loader = page.loader
    page.names["loader"] = Interrupted(loader)
    with pytest.raises(KeyboardInterrupt):
        page.run("finally:")
    assert page.epoch == 0 and len(page.amp.history) == 2
    reached = page.values()
    page.amp.disable()

    page = Page(page.level, page.dtype)
    with page.amp:
        page.names["loader"] = [*loader]
        page.names["tritonamp"] = SimpleNamespace(
            **{**vars(tritonamp), "save": tritonamp.save, "RNGState": tritonamp.RNGState},
        )
        loaded: list[dict[str, Tensor]] = []

        def load(*args: Any, **objects: Any) -> Any:
            values = tritonamp.load(*args, **objects)
            loaded.append(page.values())
            return values

        page.names["tritonamp"].load = load
        page.run("finally:")
        assert all(map(torch.equal, loaded[0].values(), reached.values()))
        assert page.epoch == 3 and page.amp.stats()["steps"] == 2 + 3 * len(loader)
        page.run("finally:")  # a third run has nothing left to do
        assert page.amp.stats()["steps"] == 2 + 3 * len(loader)


@pytest.mark.clients
@needs_safetensors
def test_files_for_others_are_plain(page: Page) -> None:
    import safetensors.torch as safetensors

    page.run("save_file(")
    saved = safetensors.load_file("model.safetensors")
    assert {v.dtype for v in saved.values()} == {torch.float32}
    page.Net().load_state_dict(saved)
    halves = safetensors.load_file("model.fp16.safetensors")
    assert {v.dtype for v in halves.values()} == {torch.float16}
    assert all(torch.equal(saved[name], value) for name, value in page.values().items())


@pytest.mark.clients
@needs_safetensors
def test_tied_weights_go_to_a_file_after_disable(page: Page) -> None:
    import safetensors.torch as safetensors

    tied = page.Net()
    tied.layers[1].weight = tied.layers[0].weight
    shares = pytest.raises(RuntimeError, match="share memory")
    with tritonamp.enable(tied, level=page.level, dtype=page.dtype), shares:
        safetensors.save_file(tied.state_dict(), "tied.safetensors")
    safetensors.save_model(tied, "tied.safetensors")
    other = copy.deepcopy(tied)
    nn.init.zeros_(other.head.weight)
    safetensors.load_model(other, "tied.safetensors")
    assert torch.equal(other.head.weight, tied.head.weight)


def test_bfloat16_weights_answer_in_float16(page: Page) -> None:
    seen: list[torch.dtype] = []

    class Noting(page.Net):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.head.register_forward_hook(lambda module, args, out: seen.append(out.dtype))

    page.names["Net"] = Noting
    page.run("loaded = Net()")
    assert page.loaded.head.weight.dtype is torch.bfloat16 and seen[-1] is torch.float16
    assert page.answers.isfinite().all()


def test_a_cell_enables_again(page: Page) -> None:
    page.step()
    values, first = page.values(), page.amp
    with pytest.raises(ValueError, match="enabled already"):
        tritonamp.enable(page.model, level=page.level)
    for _ in range(2):
        page.run("(old := tritonamp.handle(model))")
        assert page.amp is not first and tritonamp.handle(page.model) is page.amp
    after = page.values()
    half = torch.finfo(page.dtype).eps if page.level == "O2" else 0.0
    assert all(close(after[name], values[name], half) for name in values)
    page.step()
    assert page.taken() == [None]


def test_a_with_block_ends_after_an_error(level: str, dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(KeyError), tritonamp.enable(model, level=level, dtype=dtype):
        raise KeyError
    assert tritonamp.handle(model) is None


def test_the_state_of_an_optimizer_is_fp32_in_files(page: Page) -> None:
    page.step()
    assert {t.dtype for t in tensors_of(page.optimizer.state_dict())} == {torch.float32}
