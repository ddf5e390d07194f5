"""Every program of errors.md: the first of a section raises its text, the others train."""

import copy
import pickle
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import tritonamp
from tritonamp.commands.error_pages import Section, find, sections

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tritonamp/diagnosis/errors.md"
SECTIONS = sections()
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]*)#?([^)]*)\)")
OWN = (
    "step 17 skipped",
    "data: the input batch",
    "bad parameters",
    "divergence",
    "forward fault",
    "overflow, forward",
    "not reproduced",
    "other bits",
    "Healed",
    "backward fault",
    "outlier",
    "veto",
    "huge gradient",
    "torch.jit.script: expected a plain module",
    "is enabled already",
    "gradients of a plain",
    "gradients while they still carry",
    "steps on bare half weights",
    "found no gradient",
    "half values are not those",
    "a plain loss.backward() has added",
    "expected a call that keeps the dtypes",
    "expected an optimizer whose step",
    "amp.changes(): expected a policy",
)  # no programs: their README has
PROGRAMS = [page for page in SECTIONS if not page.title.startswith(OWN)]

CURES = [
    pytest.param(page, number, id=f"{page.title}-{number}")
    for page in PROGRAMS
    for number in range(1, len(BLOCK.findall(page.body)))
]
each_program = pytest.mark.parametrize("page", PROGRAMS, ids=lambda page: page.title)


def run(page: Section, number: int) -> dict[str, Any]:
    """Run a program of a section, and return its names."""
    code = BLOCK.findall(page.body)[number]
    if "LinearCrossEntropyLoss" in code and not hasattr(nn, "LinearCrossEntropyLoss"):
        pytest.skip("torch has LinearCrossEntropyLoss from 2.13 on")
    line = PAGE.read_text().index(code, PAGE.read_text().index(f"## {page.title}"))
    # a replay quotes the line that it names
    code = "\n" * PAGE.read_text().count("\n", 0, line) + code
    names: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    exec(compile(code, str(PAGE), "exec"), names)
    return names


@pytest.fixture(autouse=True)
def no_apex() -> Iterator[None]:
    """Undo ``tritonamp.apex.install()``."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("apex", "amp_C", "apex_C"):
            del sys.modules[name]


@pytest.fixture
def before_training() -> Iterator[dict[Tensor, Tensor]]:
    """Yield the values of parameters at their first forward."""
    values: dict[Tensor, Tensor] = {}

    def look(module: nn.Module, _: Any) -> None:
        for param in module.parameters():
            values.setdefault(param, param.detach().clone())

    handle = nn.modules.module.register_module_forward_pre_hook(look)
    yield values
    handle.remove()
    values.clear()


@pytest.mark.smoke
@each_program
def test_the_text_comes(
    page: Section, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run(page, 0).clear()
        except (Exception, SystemExit) as error:
            said.append(f"{type(error).__name__}: {error}")
    said = [*(str(w.message) for w in caught), capsys.readouterr().out, caplog.text, *said]
    given = " ".join("\n".join(said).replace("`", "").split())
    assert any(text in given for text in page.texts), given
    assert page in find("\n".join(said), SECTIONS)


@pytest.mark.parametrize(("page", "number"), CURES)
def test_the_cure_trains(page: Section, number: int, before_training: dict[Tensor, Tensor]) -> None:
    names = run(page, number)
    assert ("tritonamp" in names) == (number in (2, 4))
    assert names["loss"].isfinite()
    moved = [
        not torch.equal(p.detach().float(), before_training[p].float())
        for p in names["model"].parameters()
        if p in before_training
    ]
    names.clear()  # so that nothing stays enabled
    assert any(moved)


def test_sections_have_three_programs() -> None:
    more = [page.title for page in PROGRAMS if len(BLOCK.findall(page.body)) != 3]
    # and a Function of one's own, and a region without autocast
    assert more == ["expected scalar type Half but found Float"]
    assert len(PROGRAMS) == 29 and len(SECTIONS) == len(PROGRAMS) + len(OWN)


def half(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float16)


def attend(dtype: torch.dtype) -> Tensor:
    q, k = half(1, 1, 4, 4), half(1, 1, 4, 4).to(dtype)
    return functional.scaled_dot_product_attention(q, k, k)


def step_twice() -> None:
    scaler, optimizer = scaled()
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def scaled() -> tuple[torch.amp.GradScaler, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 2)).sum()).backward()
    return scaler, torch.optim.SGD(model.parameters())


def half_linear() -> tuple[tritonamp.Amp, torch.optim.Optimizer, Tensor]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    amp = tritonamp.enable(model, optimizer, level="O2")
    return amp, optimizer, model(torch.ones(2, 2)).sum()


def enable_twice() -> None:
    model = nn.Linear(2, 2)
    with tritonamp.enable(model):
        tritonamp.enable(nn.Sequential(model))


def enable_an_optimizer_twice() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with tritonamp.enable(model, optimizer):
        tritonamp.enable(nn.Linear(2, 2), optimizer)


def share(trains: bool, level: str) -> None:
    shared = nn.Linear(2, 2)
    model, other = nn.Sequential(shared), nn.Sequential(shared)
    optimizers = [torch.optim.SGD(m.parameters()) if trains else None for m in (model, other)]
    with tritonamp.enable(model, optimizers[0], level=level):
        tritonamp.enable(other, optimizers[1], level=level)


def enable_a_part() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with tritonamp.enable(model):
        tritonamp.enable(model[0])


def refused(make: Callable[..., torch.optim.Optimizer], **fields: Any) -> Callable[[], Any]:
    model = nn.Linear(2, 2)
    return lambda: tritonamp.enable(model, make(model.parameters()), **{"level": "O2", **fields})


def changes(level: str) -> None:
    model = nn.Linear(2, 2)
    with tritonamp.enable(model, torch.optim.SGD(model.parameters()), level=level) as amp:
        amp.changes()


def plain_backward() -> None:
    amp, optimizer, loss = half_linear()
    with amp:
        loss.backward()
        optimizer.step()


def unscale_twice() -> None:
    amp, optimizer, loss = half_linear()
    with amp:
        amp.backward(loss)
        amp.unscale_(optimizer)
        amp.unscale_(optimizer)


DTYPES = "expected scalar type Half"
INTO = "Index put"


def unsafe_on_cuda() -> None:
    """Call the rule that torch has for CUDA's autocast, which no tensor of a CPU comes by."""
    rules = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    torch.ops.aten.binary_cross_entropy.default.redispatch(rules, half(2), half(2))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.mT @ grad


def product_without_custom_fwd() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = Product.apply(nn.Linear(2, 2)(torch.ones(2, 2)), weight).sum()
    loss.backward()


def average_made_before() -> None:
    """An AveragedModel of torch's, where nothing is enabled."""
    model = nn.Linear(2, 2)
    average = AveragedModel(model)
    model.half()
    for _ in range(2):
        average.update_parameters(model)


def load_wide_state() -> None:
    """Step with the FP32 state of a model that was cast since."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    for x in (torch.ones(2, 2), half(2, 2)):
        model.to(x.dtype)
        optimizer.zero_grad()
        model(x).float().sum().backward()
        optimizer.step()


def compressed() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the format is in beta
        return half(2, 2).to_sparse_csr()


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2, 2)


def copy_average() -> None:
    amp, _, _ = half_linear()
    with amp:
        copy.deepcopy(amp.ema(0.9))


def pickle_average() -> None:
    amp, _, _ = half_linear()
    with amp:
        pickle.dumps(amp.ema(0.9))


def pickle_handle() -> None:
    amp, _, _ = half_linear()
    with amp:
        pickle.dumps(amp)


NANS = torch.full((2,), torch.nan)
STATE = "expected an optimizer whose step"
LERP = "expected dtype float for end"
INFERENCE = "Inference tensors cannot be saved"
PICKLE = "cannot pickle"

ALSO: list[tuple[str, Callable[[], Any]]] = [
    (DTYPES, lambda: nn.Linear(4, 4)(half(2, 4))),
    (DTYPES, lambda: half(2, 4) @ torch.ones(4, 4)),
    (DTYPES, lambda: torch.bmm(torch.ones(1, 4, 4), half(1, 4, 4))),
    (DTYPES, lambda: torch.addmm(torch.ones(2, 2), half(2, 2), half(2, 2))),
    (DTYPES, lambda: torch.dot(half(3), torch.ones(3))),
    (DTYPES, lambda: attend(torch.float32)),
    (DTYPES, lambda: nn.LayerNorm(4).half()(torch.ones(2, 4))),
    (DTYPES, lambda: nn.LSTM(4, 4)(half(2, 1, 4))),
    (DTYPES, lambda: torch.baddbmm(torch.ones(1, 2, 2), half(1, 2, 2), half(1, 2, 2))),
    (DTYPES, product_without_custom_fwd),
    (INTO, lambda: torch.zeros(4).scatter(0, torch.arange(2), half(2))),
    (INTO, lambda: torch.zeros(4).scatter_reduce(0, torch.arange(2), half(2), "sum")),
    (INTO, lambda: torch.zeros(4).index_add(0, torch.arange(2), half(2))),
    (INTO, lambda: torch.zeros(4).index_copy(0, torch.arange(2), half(2))),
    (INTO, lambda: torch.zeros(2).masked_scatter(torch.ones(2).bool(), half(2))),
    ("probability", lambda: torch.multinomial(torch.zeros(2), 1)),
    ("probability", lambda: torch.distributions.Categorical(logits=NANS, validate_args=True)),
    (LERP, lambda: torch.zeros(2).lerp_(half(2).bfloat16(), 0.1)),
    (LERP, lambda: half(2).lerp_(torch.zeros(2), 0.1)),
    (LERP, lambda: torch._foreach_lerp_([torch.zeros(2)], [half(2)], 0.1)),
    (LERP, average_made_before),
    (LERP, lambda: torch.zeros(2).lerp(torch.zeros(2), half(2))),
    (LERP, load_wide_state),
    (DTYPES, lambda: torch.mv(torch.ones(2, 2), half(2))),
    (DTYPES, lambda: torch.sparse.mm(torch.eye(2).to_sparse(), half(2, 2))),
    ("not implemented", lambda: torch.sparse.mm(compressed(), half(2, 2))),
    (INFERENCE, lambda: nn.Linear(2, 2)(inference_tensor())),
    (INFERENCE, lambda: inference_tensor().add_(1.0)),
    (PICKLE, lambda: pickle.dumps(weakref.ref(nn.Linear(2, 2)))),
    (PICKLE, copy_average),
    (PICKLE, pickle_average),
    (PICKLE, pickle_handle),
    ("Input type", lambda: nn.Conv2d(3, 4, 3).half()(torch.ones(1, 3, 4, 4))),
    ("Input type", lambda: nn.Conv2d(3, 4, 3)(half(1, 3, 4, 4))),
    ("not implemented", lambda: torch.cdist(half(3, 3), half(3, 3))),
    ("not implemented", lambda: torch.linalg.inv(half(3, 3))),
    ("not implemented", lambda: torch.fft.fft(half(3))),
    ("value cannot", lambda: torch.full((2,), 1e9, dtype=torch.float16)),
    ("value cannot", lambda: half(2).clamp(min=-1e9)),
    ("No inf checks", lambda: scaled()[0].update()),
    ("Attempted step", lambda: torch.amp.GradScaler("cpu").unscale_(scaled()[1])),
    ("Attempted step", lambda: torch.amp.GradScaler("cpu").update()),
    ("binary_cross_entropy", unsafe_on_cuda),
    ("torch.cuda.amp", lambda: torch.cuda.amp.autocast(enabled=False)),
    ("torch.cuda.amp", lambda: torch.cuda.amp.custom_bwd(print)),
    ("step() has", step_twice),
    ("unscale_() has", unscale_twice),
    ("is enabled already", enable_twice),
    ("is enabled already", enable_an_optimizer_twice),
    ("is enabled already", lambda: share(True, "O1")),
    ("is enabled already", lambda: share(False, "O2")),
    ("is enabled already", enable_a_part),
    ("gradients of a plain", plain_backward),
    *[
        (STATE, refused(partial(torch.optim.RMSprop, centered=True), state=state))
        for state in ("bf16", "8bit")
    ],
    (STATE, refused(partial(torch.optim.SGD, differentiable=True), state="bf16")),
    (STATE, refused(torch.optim.NAdam, state="8bit")),
    (STATE, refused(torch.optim.NAdam, masters="packed")),
    *[("amp.changes()", partial(changes, level)) for level in ("O0", "O1", "O2", "O3")],
    *[
        ("amp.changes()", refused(torch.optim.SGD, level="O1", **{name: True}))
        for name in ("track_changes", "track_lost_updates")
    ],
]


@pytest.mark.parametrize(("title", "program"), ALSO)
def test_other_texts_lead_to_their_section(title: str, program: Callable[[], Any]) -> None:
    """As torch at hand, and tritonamp, word them."""
    kinds = RuntimeError, ValueError, AssertionError, FutureWarning, TypeError, AttributeError
    with pytest.raises(kinds) as caught:
        program()
    (page,) = find(f"{caught.type.__name__}: {caught.value}", SECTIONS)
    assert page.title.startswith(title)


def test_an_lstm_that_this_cpu_has_not() -> None:
    """Its kernel for half depends on the CPU, so the text may not come."""
    model, x = nn.LSTM(4, 4), torch.ones(2, 1, 4)
    try:
        with torch.autocast("cpu", dtype=torch.float16):
            model(x)
    except RuntimeError as error:
        (page,) = find(str(error), SECTIONS)
        assert page.title == "not implemented for 'Half'"
    with tritonamp.enable(model, level="O1"):
        assert model(x)[0].isfinite().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU says neither")
@pytest.mark.parametrize(
    "program", [lambda: torch.autocast("cuda"), lambda: torch.amp.GradScaler("cuda")]
)
def test_no_gpu(program: Callable[[], Any]) -> None:
    with pytest.warns(UserWarning, match="CUDA is not available") as caught:
        program()
    (page,) = find(str(caught[0].message), SECTIONS)
    assert page.title.startswith("In CPU autocast")


def anchor(title: str) -> str:
    """The fragment that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def clamp(amp: tritonamp.Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    amp.backward(model(torch.randn(8, 8)).square().mean())
    for param in model.parameters():
        assert param.grad is not None
        param.grad.clamp_(-1, 1)
    optimizer.step()


def step_on_halves(amp: tritonamp.Amp, model: nn.Module, optimizer: Any) -> None:
    amp.disable()
    with tritonamp.enable(model, level="O2"):
        model(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()


def step_without_gradients(amp: tritonamp.Amp, model: nn.Module, optimizer: Any) -> None:
    for _ in range(3):
        optimizer.step()


def clip_late(amp: tritonamp.Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    amp.backward(model(torch.randn(8, 8)).square().mean())
    optimizer.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def clip_late_by_amp(amp: tritonamp.Amp, model: nn.Module, optimizer: Any) -> None:
    amp.backward(model(torch.randn(8, 8)).square().mean())
    optimizer.step()
    amp.clip_grad_norm_(1.0)


def train_nothing(amp: tritonamp.Amp, model: nn.Module, optimizer: Any) -> None:
    for _ in range(3):
        amp.backward(0.0 * model(torch.randn(8, 8)).square().mean())
        optimizer.step()


def write_data(amp: tritonamp.Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.data.clamp_(-0.01, 0.01)
    amp.backward(model(torch.randn(8, 8)).square().mean())
    optimizer.step()


def mix_backwards(amp: tritonamp.Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(8, 8)).square().mean().backward()
    amp.backward(model(torch.randn(8, 8)).square().mean())
    optimizer.step()


def cast(amp: tritonamp.Amp, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.double()


@pytest.mark.parametrize(
    ("program", "title"),
    [
        (clamp, "gradients while they still carry the loss scale"),
        (step_on_halves, "steps on bare half weights"),
        (step_without_gradients, "found no gradient 3 times"),
        (clip_late, "found no gradient 3 times"),
        (clip_late_by_amp, "found no gradient 3 times"),
        (train_nothing, "found no gradient 3 times"),
        (write_data, "half values are not those"),
        (mix_backwards, "a plain loss.backward() has added"),
        (cast, "expected a call that keeps the dtypes"),
    ],
)
def test_what_is_warned_of_leads_to_its_section(
    program: Callable[..., None], title: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    said = ""
    with tritonamp.enable(model, optimizer, level="O2") as amp:
        try:
            program(amp, model, optimizer)
        except RuntimeError as error:
            said = str(error)
    (page, *_) = find(said or caplog.messages[-1], SECTIONS)
    assert page.title.startswith(title)


def test_links_lead_to_files_and_headings() -> None:
    wrong = []
    for path, fragment in LINK.findall(PAGE.read_text()):
        file = (PAGE.parent / path).resolve() if path else PAGE
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if file.exists() else ()
        if not headings or (fragment and fragment not in map(anchor, headings)):
            wrong.append(f"{path}#{fragment}")
    assert wrong == []


@pytest.mark.parametrize("readme", ["README.md", "tritonamp/apex/README.md"])
def test_readmes_link_to_sections(readme: str) -> None:
    fragments = re.findall(r"errors\.md#([^)]*)\)", (ROOT / readme).read_text())
    assert set(fragments) <= {anchor(page.title) for page in SECTIONS}
    assert "errors.md" in (ROOT / readme).read_text()
