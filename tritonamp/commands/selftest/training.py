"""Checks of training at every level, a skipped step, a resumed run and a captured step."""

import functools
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tritonamp
from tritonamp.commands.selftest.check import Check, Found, NotHereError, require

STEPS = 30
LAST = 5  # number of last losses whose mean counts
CLOSE = 0.1  # largest error, as a share of the fall of the loss in FP32
LEVELS = [("O0", torch.float16)] + [
    (level, dtype) for dtype in (torch.float16, torch.bfloat16) for level in ("O1", "O2", "O3")
]


class Net(nn.Module):
    """A classifier with attention over 8 items, in which a forward runs every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32, bias=False)
        self.query = nn.Linear(32, 32, bias=False)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.embed(x))
        x = self.norm(x + torch.softmax(self.query(x) @ x.mT, -1) @ x)
        return torch.log_softmax(self.head(x.sum(1) / x.shape[1]), -1)


class SmallTraining:
    """A net, its optimizer and one batch, with the same values on every device."""

    def __init__(self, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = Net()
            x = torch.randn(32, 8, 8)
            y = (x.mean(1) @ torch.randn(8, 5)).argmax(1)
        self.model.to(device)
        self.x, self.y = x.to(device), y.to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.amp: tritonamp.Amp | None = None

    def step(self) -> Tensor:
        """Train one step."""
        self.optimizer.zero_grad()
        loss = F.nll_loss(self.model(self.x), self.y)
        if self.amp is None:
            loss.backward()
        else:
            self.amp.backward(loss)
        self.optimizer.step()
        return loss.detach()

    def tensors(self) -> list[Tensor]:
        """Return copies of parameters, masters and optimizer state."""
        masters = () if self.amp is None else self.amp.master_params()
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        found = [*self.model.parameters(), *masters, *states]
        return [x.detach().clone() for x in found if isinstance(x, Tensor)]


@contextmanager
def enabled(
    device: torch.device, backend: str, level: str = "O2", dtype: torch.dtype = torch.float16
) -> Iterator[SmallTraining]:
    """Yield a new run at ``level``, with a first loss scale at which nothing overflows."""
    run = SmallTraining(device)
    scaler = tritonamp.GradScaler(device.type, init_scale=2.0**8)
    with tritonamp.enable(
        run.model, run.optimizer, level=level, dtype=dtype, backend=backend,
        scaler=scaler if level in ("O1", "O2") and dtype is torch.float16 else None,
    ) as run.amp:  # fmt: skip
        yield run


def checks(device: torch.device, backend: str) -> Iterator[Check]:
    place = device, backend
    for level, dtype in LEVELS:
        run = functools.partial(_train, *place, level, dtype)
        name = level if level == "O0" else f"{level} {str(dtype).removeprefix('torch.')}"
        yield Check(name, run)
    yield Check("a skip", functools.partial(_skip, *place))
    yield Check("save and resume", functools.partial(_resume, *place))
    yield Check("a CUDA graph", functools.partial(_capture, *place))


def _train(device: torch.device, backend: str, level: str, dtype: torch.dtype) -> Found:
    first, expected = _losses(SmallTraining(device))
    try:
        with enabled(device, backend, level, dtype) as run:
            _, loss = _losses(run)
    except tritonamp.UnsupportedDeviceError as error:  # as an old GPU is for bfloat16
        raise NotHereError(str(error)) from error
    shown = f"loss {first:.3f} to {loss:.3f}, in FP32 to {expected:.3f}"
    require(math.isfinite(loss) and loss < first, f"the loss does not fall: {shown}")
    require(abs(loss - expected) <= CLOSE * (first - expected), f"far from FP32: {shown}")
    return Found(f"{STEPS} steps, {shown}", {"first_loss": first, "loss": loss, "fp32": expected})


def _losses(run: SmallTraining) -> tuple[float, float]:
    """Return the first loss, and the mean of the last losses."""
    losses = torch.stack([run.step() for _ in range(STEPS)]).tolist()
    return losses[0], sum(losses[-LAST:]) / LAST


def _skip(device: torch.device, backend: str) -> Found:
    """Let a gradient overflow while the loss is finite."""
    with enabled(device, backend) as run:
        assert run.amp is not None
        run.step()
        before, scale = run.tensors(), run.amp.stats()["scale"]
        handle = run.model.head.weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
        run.step()
        handle.remove()
        stats, skipped = run.amp.stats(), run.tensors()
        run.step()
        after, count = run.tensors(), run.amp.stats()["skipped"]
    require(stats["skipped"] == 1, "a step whose gradients are inf was not skipped")
    require(_equal(before, skipped), "a skipped step changed parameters or optimizer state")
    require(stats["scale"] == scale / 2, f"the scale went from {scale:g} to {stats['scale']:g}")
    require(count == 1 and not _equal(after, skipped), "the step after the skip was not taken")
    return Found(f"nothing was changed, scale {scale:g} to {stats['scale']:g}")


def _resume(device: torch.device, backend: str) -> Found:
    """Save and train on; load the file into a new run, and train on to the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.pt"
        with enabled(device, backend) as run:
            _steps(run, 5)
            tritonamp.save(path, model=run.model, optimizer=run.optimizer, amp=run.amp)
            _steps(run, 5)
            expected = run.tensors()
        with enabled(device, backend) as run:
            tritonamp.load(path, model=run.model, optimizer=run.optimizer, amp=run.amp)
            _steps(run, 5)
            require(_equal(run.tensors(), expected), "after 5 more steps the bits are others")
    return Found("the same bits after 5 more steps")


def _capture(device: torch.device, backend: str) -> Found:
    """Compare a step in a CUDA graph with the same steps without a graph."""
    if device.type != "cuda":
        raise NotHereError("CUDA graphs need a GPU")
    with enabled(device, backend) as run:
        _steps(run, 8)
        expected, plain = run.tensors(), float(run.step())
    with enabled(device, backend) as run:
        warm_up = torch.cuda.Stream(device)
        warm_up.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(warm_up):
            _steps(run, 3)
        torch.cuda.current_stream(device).wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = run.step()
        for _ in range(5):
            graph.replay()
        same = _equal(run.tensors(), expected)
        graph.replay()
        replayed = float(loss)
    shown = f"loss {replayed:.4f} from replays, {plain:.4f} without"
    require(abs(replayed - plain) <= 1e-2 * plain, shown)
    return Found(f"{shown}; {'the same' if same else 'other'} bits", {"loss": replayed})


def _steps(run: SmallTraining, count: int) -> None:
    for _ in range(count):
        run.step()


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
