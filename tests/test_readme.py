"""Every Python block of every page runs: the blocks of one page in order, in one namespace.

A block finds the names that its page takes for granted: those of ``_assumed``, and of ``ASSUMED``
for its page. Programs of the page of errors raise, and run in ``test_errors.py``. Where there is no
GPU, ``on_this_machine`` lets ``.cuda()`` stay on the CPU, and "nccl" be gloo with one process. A
block that opens with "```python notest" is left out; how many there are is counted. A block that
opens with "```diff" is the program after the change.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tritonamp

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "tritonamp", "kernels", "tests", "bench"
ERRORS = ROOT / "tritonamp" / "diagnosis" / "errors.md"
PAGES = [
    ROOT / "README.md",
    *sorted({path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")} - {ERRORS}),
]
LEFT_OUT = 0  # blocks marked "notest", of all pages
SMOKE = ROOT / "tritonamp" / "README.md"  # needs no other library
INTEGRATIONS = "tritonamp/integrations/README.md"
FORECAST = "tritonamp/forecast/README.md"
CASTS = "tritonamp/casts/README.md"
RL = "tritonamp/integrations/rl.md"
QUESTIONS = "tritonamp/questions.md"

BLOCK = re.compile(r"^```(python|diff)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]*)#?([^):]*)\)")  # to a file or heading, not to another site


class Block(NamedTuple):
    """A fenced Python block; ``line`` is that of its first line in the file, from 1."""

    line: int
    mark: str
    code: str


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    return [
        Block(
            text.count("\n", 0, found.start(3)) + 1, found[2].strip(), program(*found.group(1, 3))
        )
        for found in BLOCK.finditer(text)
    ]


def program(language: str, text: str) -> str:
    """Return a block's program; the lines that a change removes are empty."""
    if language == "python":
        return text
    lines = text.splitlines()
    assert all(line[:1] in ("", " ", "+", "-") for line in lines)
    return "\n".join("" if line.startswith("-") else line[1:] for line in lines)


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_page = pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.smoke if path == SMOKE else (), id=shown(path))
        for path in PAGES
    ],
)


class Net(nn.Module):
    """The model of the examples: eight numbers in, four classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.norm(x))


def _assumed() -> dict[str, Any]:
    """What every page takes for granted: a model that is not enabled yet, its data, its loss."""
    dataset = TensorDataset(torch.randn(256, 8), torch.randint(0, 4, (256,)))
    loader = DataLoader(dataset, batch_size=64)
    x, y = next(iter(loader))
    model = Net()
    return {
        "torch": torch,
        "nn": nn,
        "tritonamp": tritonamp,
        "Net": Net,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-4),
        "criterion": nn.functional.cross_entropy,
        "dataset": dataset,
        "loader": loader,
        "x": x,
        "y": y,
    }


def _of_integrations() -> dict[str, Any]:
    """A LightningModule, and a language model and its data for Hugging Face's Trainer."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported
    lightning = pytest.importorskip("lightning.pytorch")
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")

    class LitNet(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=3e-4)

    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    tokens = torch.randint(0, 17, (16, 8))
    return {
        "LitNet": LitNet,
        "language_model": transformers.GPT2LMHeadModel(config),
        "texts": [{"input_ids": row, "labels": row} for row in tokens],
        "manager": SimpleNamespace(start_quorum=lambda: None, should_commit=lambda: False),
    }


def _of_peft() -> dict[str, Any]:
    """PEFT, or a frozen half model with a head to train: there is no PEFT for Python 3.10."""
    half_model = Net().half()
    try:
        import peft
    except ImportError:
        half_model.requires_grad_(False).head.requires_grad_(True)
        return {
            "half_model": half_model,
            "LoraConfig": dict,
            "get_peft_model": lambda model, config: model,
        }
    names = {name: getattr(peft, name) for name in ("LoraConfig", "get_peft_model")}
    return {"half_model": half_model, **names}


def _of_rl() -> dict[str, Any]:
    """A language model and prompts for TRL, and a stand-in for verl's engine."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before it is imported
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("trl")
    import tiny_models
    import verl_stand_in

    tokenizer = tiny_models.make_tokenizer()
    return {
        "language_model": tiny_models.make_llama(tokenizer),
        "tokenizer": tokenizer,
        "dataset": datasets.Dataset.from_dict({"prompt": tiny_models.LINES * 2}),
        "reward": lambda completions, **_: [float(c.count("cat")) for c in completions],
        "engine": verl_stand_in.FSDPEngine(tiny_models.make_llama(tokenizer), torch.float16),
        "verl_rollout": verl_stand_in.Rollout(),
        "batch": verl_stand_in.data_of(len(tokenizer)),
        "ppo_loss": verl_stand_in.ppo_loss,
    }


def _of_forecast() -> dict[str, Any]:
    """A pipeline that generates; one of diffusers runs in ``tests/forecast/test_recipe.py``."""
    import diffusion

    return {"pipe": diffusion.StandIn(), "prompt": "a lighthouse"}


def _of_questions() -> dict[str, Any]:
    """A writer of TensorBoard; safetensors, or a stand-in for its one function."""
    try:
        import safetensors.torch  # noqa: F401
    except ImportError:
        stand_in = ModuleType("safetensors.torch")
        vars(stand_in)["save_file"] = torch.save
        sys.modules["safetensors"] = sys.modules["safetensors.torch"] = stand_in
    return {"writer": SimpleNamespace(add_scalar=lambda name, value, step: None)}


ASSUMED: dict[str, Callable[[], dict[str, Any]]] = {
    INTEGRATIONS: _of_integrations,
    RL: _of_rl,
    CASTS: _of_peft,
    FORECAST: _of_forecast,
    QUESTIONS: _of_questions,
}


@pytest.fixture
def on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files land in ``tmp_path``; without a GPU the CPU takes its place; a group of one process."""
    monkeypatch.chdir(tmp_path)
    start, backend = dist.init_process_group, "nccl"
    if not torch.cuda.is_available():
        backend = "gloo"
        monkeypatch.setattr(nn.Module, "cuda", lambda self: self)
        monkeypatch.setattr(Tensor, "cuda", lambda self: self)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def start_alone(_: str) -> None:
        monkeypatch.setenv("LOCAL_RANK", "0")  # as torchrun does
        start(backend, store=dist.HashStore(), rank=0, world_size=1)

    monkeypatch.setattr(dist, "init_process_group", start_alone)
    modules = set(sys.modules)
    logger = logging.getLogger("tritonamp")
    level = logger.level
    yield
    logger.setLevel(level)
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in set(sys.modules) - modules:
        first = name.partition(".")[0]
        stands_in = first == "safetensors" and sys.modules[name].__spec__ is None
        # what tritonamp.apex.install() put there, and what a page did
        if stands_in or first in ("apex", "amp_C", "apex_C"):
            del sys.modules[name]
    if "accelerate" in sys.modules:  # keeps one state for the process
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for shared in (AcceleratorState, GradientState, PartialState):
            shared._reset_state()


@pytest.mark.usefixtures("on_this_machine")
@pytest.mark.filterwarnings(
    "ignore:::lightning",  # advice about loaders and loggers
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",  # Lightning 2.6 with torch 2.15
    "ignore:'pin_memory' argument:UserWarning",  # Trainer's loader, where there is no GPU
    "ignore:`(is_)?gradient_checkpointing.*` is deprecated",  # of TRL to transformers
)
@each_page
def test_blocks_run(path: Path) -> None:
    found = [block for block in blocks(path) if not block.mark]
    if not found:
        return
    namespace = {"__name__": "__main__", **_assumed(), **ASSUMED.get(shown(path), dict)()}
    try:
        for block in found:
            # tracebacks, and replays that quote a line, point into the README
            code = "\n" * (block.line - 1) + block.code
            exec(compile(code, str(path), "exec"), namespace)
    finally:
        namespace.clear()  # a registered function lives on, and with it these, its globals


def headings(path: Path) -> set[str]:
    """Return the fragments that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_links_lead_to_files_and_headings(path: Path) -> None:
    missing = []
    for file, heading in LINK.findall(BLOCK.sub("", path.read_text())):
        target = path.parent / file if file else path
        if not target.exists() or (heading and heading not in headings(target)):
            missing.append(f"{file}#{heading}")
    assert not missing


def test_few_blocks_are_left_out() -> None:
    marks = [block.mark for path in PAGES for block in blocks(path) if block.mark]
    assert marks == ["notest"] * LEFT_OUT


def test_every_package_has_a_readme() -> None:
    packages = {path.parent for path in (ROOT / "tritonamp").glob("*/__init__.py")}
    assert packages <= {path.parent for path in PAGES if path.name == "README.md"}
