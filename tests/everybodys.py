"""Everybody's optimizers under ``enable``, tried on the CPU: the table in
tritonamp/step/optimizers.md.

    PYTHONPATH=tests python tests/everybodys.py

writes it. Rows of packages that are not installed stay as they were.
"""

import contextlib
import importlib
import importlib.metadata
import inspect
import io
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from gpuless import driver

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported
driver.load()  # before torch

import torch  # noqa: E402
from runs import Training, batch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

TABLE = Path(__file__).parents[1] / "tritonamp/step/optimizers.md"
COLUMNS = "trains", "skips", "resumes", "clips", "half model"
STEPS = 12


class Kind(NamedTuple):
    """An optimizer to try.

    Attributes:
        name: how the table calls it.
        package: the distribution that has it.
        path: module and class.
        options: its arguments.
    """

    name: str
    package: str
    path: str
    options: dict[str, Any]

    @property
    def version(self) -> str | None:
        """The installed version; None: it is not installed."""
        try:
            return importlib.metadata.version(self.package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            return None

    def make(self, params: Any) -> torch.optim.Optimizer:
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)(params, **self.options)


def _torchs(name: str, lr: float = 1e-2, **options: Any) -> Kind:
    return Kind(name, "torch", f"torch.optim.{name}", {"lr": lr, **options})


KINDS = [
    _torchs("Adadelta", 1.0),
    _torchs("Adafactor"),
    _torchs("Adagrad"),
    _torchs("Adam"),
    _torchs("Adamax"),
    _torchs("AdamW"),
    _torchs("ASGD"),
    _torchs("Muon"),
    _torchs("NAdam"),
    _torchs("RAdam"),
    _torchs("RMSprop", 1e-3),
    _torchs("Rprop", 1e-3),
    _torchs("SGD", momentum=0.9),
    _torchs("LBFGS"),
    _torchs("SparseAdam"),
    Kind("AdamWScheduleFree", "schedulefree", "schedulefree.AdamWScheduleFree", {"lr": 1e-2}),
    Kind("SGDScheduleFree", "schedulefree", "schedulefree.SGDScheduleFree", {"lr": 1e-1}),
    Kind("Prodigy", "prodigyopt", "prodigyopt.Prodigy", {}),
    Kind("SOAP", "pytorch-optimizer", "pytorch_optimizer.SOAP", {"lr": 1e-2}),
    Kind("AdamW8bit", "bitsandbytes", "bitsandbytes.optim.AdamW8bit", {"lr": 1e-2}),
    Kind("AdamW8bit", "torchao", "torchao.optim.AdamW8bit", {"lr": 1e-2}),
    Kind("AdamW", "torch-optimi", "optimi.AdamW", {"lr": 1e-2}),
    Kind("FlashAdamW", "flashoptim", "flashoptim.FlashAdamW", {"lr": 1e-2}),
]


class Tried(Training):
    """A small model in training, in FP32 as torch does it (level None) or enabled."""

    def __init__(
        self, kind: Kind, level: str | None = "O2", half: bool = False, device: str = "cpu"
    ) -> None:
        def model() -> nn.Module:
            layers = [nn.Linear(8, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False)]
            made = nn.Sequential(*layers, nn.Tanh(), nn.Linear(64, 4, bias=False))
            return (made.half() if level else made.half().float()) if half else made

        super().__init__(model, kind.make, level, device, lr=None)
        self._batches = batch(0, STEPS, 32, 8, device=device)
        with contextlib.suppress(AttributeError):
            self.optimizer.train()  # which schedule-free ones have

    def loss(self, x: Any = 0) -> Tensor:
        x = self._batches[x]
        return (self.model(x).float() - x[:, :4]).square().mean()

    def state(self) -> Any:
        return _saved([self.model.state_dict(), self.optimizer.state_dict()])


def follows(kind: Kind, max_norm: float | None = None, half: bool = False) -> bool:
    """Tell whether O2 ends where FP32 does, to a tenth of the way."""
    ends = []
    for level in (None, "O2"):
        with Tried(kind, level, half) as t:
            start = _flat(t.model.parameters())
            for number in range(STEPS):
                t.step(number, max_norm=max_norm)
            ends.append(_flat(t.masters()))
    way = (ends[0] - start).norm()
    return bool((ends[0] - ends[1]).norm() <= 0.1 * way) and bool(way > 0)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


def same_bits(a: Any, b: Any, new_zeros: bool = False) -> bool:
    """Tell whether two states have the same bits; ``new_zeros``: b may have zeros in addition."""
    if isinstance(a, dict):
        same = a.keys() <= b.keys() and all(same_bits(a[key], b[key], new_zeros) for key in a)
        added = [b[key] for key in b.keys() - a.keys()]
        return same and (all(map(_is_zero, added)) if new_zeros else not added)
    if isinstance(a, list | tuple):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(same_bits(x, y, new_zeros) for x, y in pairs)
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(_plain(a), _plain(b))
    return bool(a == b) or "object at 0x" in repr(a)


def _is_zero(state: Any) -> bool:
    if isinstance(state, dict):
        return all(map(_is_zero, state.values()))
    return not torch.as_tensor(state).any()


def _plain(tensor: Tensor) -> Tensor:
    """Return the values of a tensor of torchao's own class, or the tensor."""
    return tensor.dequantize() if type(tensor).__module__.startswith("torchao") else tensor


def _saved(state: Any) -> Any:
    """Return the state as a file gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def skips(kind: Kind) -> bool:
    """Tell whether a skip, the first step or a later one, leaves every bit."""
    with Tried(kind) as t:
        for seed in range(3):
            before = t.state()
            t.step(seed, factor=math.inf)
            if not same_bits(before, t.state(), new_zeros=True):
                return False
            t.step(seed)
        return True


def resumes(kind: Kind) -> bool:
    """Tell whether save, load and continue has the bits of never stopping."""
    with Tried(kind) as t:
        for seed in range(3):
            t.step(seed)
        saved = {name: _saved(part.state_dict()) for name, part in t.objects().items()}
        for seed in range(3, 6):
            t.step(seed)
        expected = t.state()
    with Tried(kind) as other:
        other.load(saved)
        for seed in range(3, 6):
            other.step(seed)
        return same_bits(expected, other.state())


TRIALS: dict[str, Callable[[Kind], bool]] = {
    "trains": follows,
    "skips": skips,
    "resumes": resumes,
    "clips": lambda kind: follows(kind, 0.05),
    "half model": lambda kind: follows(kind, half=True),
}


def reads(kind: Kind) -> str:
    """Return the waits for the device in one enabled step, on the software GPU."""
    from gpuless.fake_cuda import in_software

    with in_software() as gpu, Tried(kind, device="cuda") as t:
        for seed in range(2):
            t.step(seed)
        with gpu.watch() as records:
            t.step(2)
        return str(len(records))


def row(kind: Kind) -> str:
    """Return the optimizer's line of the table."""
    cells, reason = [], ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Tried(kind):
                pass
        except Exception as error:
            reason = _told(error)
        for name in COLUMNS:
            try:
                cells.append("yes" if TRIALS[name](kind) else "no")
            except Exception as error:
                cells.append("refused")
                reason = reason or _told(error)
        refused = set(cells) == {"refused"}
        try:
            cells.append("-" if refused else reads(kind))
        except Exception:
            cells.append("not tried")
    return f"| {kind.name} | {kind.package} {kind.version} | {' | '.join(cells)} | {reason} |"


def _told(error: Exception) -> str:
    return re.sub(r"\s+", " ", str(error)).replace("|", "/")[:160]


def key(line: str) -> tuple[str, str]:
    """Return the optimizer and package of a line, without the version."""
    name, package = (cell.strip() for cell in line.split("|")[1:3])
    return name, package.split(" ")[0]


def committed() -> dict[tuple[str, str], str]:
    """Return the lines of the table by optimizer and package."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = [line for line in lines if line.startswith("| ")][1:]
    return {key(line): line for line in rows}


def main() -> None:
    rows = committed()
    for kind in KINDS:
        if kind.version is not None:
            line = row(kind)
            rows[key(line)] = line
            print(line, flush=True)
    order = [(kind.name, kind.package) for kind in KINDS]
    head = "| optimizer | from | " + " | ".join((*COLUMNS, "host reads a step", "reason")) + " |"
    rule = "|---" * (len(COLUMNS) + 4) + "|"
    text = inspect.cleandoc(INTRODUCTION) + "\n\n" + "\n".join([head, rule])
    TABLE.write_text(text + "\n" + "\n".join(rows[k] for k in order if k in rows) + "\n")


INTRODUCTION = """
# Everybody's optimizers under O2

Written by `PYTHONPATH=tests python tests/everybodys.py`, which tries each optimizer on the
CPU, on a small model of three matrices; `tests/step/test_everybodys.py` checks the lines of those
that are installed. None of the packages is a dependency. Schedule-free optimizers need their
`train()` and `eval()`, as without tritonamp.

- trains: after twelve steps the weights are those of FP32, to a tenth of the way there; clips: the
  same with `clip_grad_norm_(0.05)`; half model: the same for a model that comes in float16;
- skips: a step whose loss is inf, the first or a later one, changes no bit of parameters and state
  (zeros that a first step begins with may be there);
- resumes: save, load and continue has the bits of not stopping;
- host reads a step: waits for the device, counted on the software GPU of `tests/gpuless`.
"""

if __name__ == "__main__":
    sys.exit(main())
