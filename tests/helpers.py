"""What several test files share."""

import contextlib
import copy
import gc
import importlib
import io
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.checkpoint import durable
from tritonamp.kernels.device import INTERPRETED

of_kernels = [
    # the interpreter computes with inf and NaN in NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()), reason="kernels cannot run here"
    ),
]
"""The marks of a test file that looks at launches."""


class Net(nn.Module):
    """Two layers with a norm between them: levels treat their parameters differently."""

    def __init__(self, width: int = 6, hidden: int = 16, outputs: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.last = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def take_step(amp: tritonamp.Amp, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Train on ``loss`` as the README does: backward, step, and no gradient is left."""
    amp.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def disabled_after(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The body of a fixture that yields ``make``; its results' ``amp`` are disabled at the end."""
    made: list[Any] = []

    def noted(*args: Any, **fields: Any) -> Any:
        made.append(make(*args, **fields))
        return made[-1]

    yield noted
    for run in made:
        if run.amp is not None and run.amp._enabled:
            run.amp.disable()


def warnings_with(words: str) -> Any:
    """Return a fixture: a function that returns our warnings so far in which ``words`` occur."""

    @pytest.fixture
    def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
        caplog.set_level(logging.WARNING, "tritonamp")
        return lambda: [message for message in caplog.messages if words in message]

    return warned


class Resumable:
    """A run of which a checkpoint holds states.

    Attributes:
        parts: names of the attributes that have a state.
    """

    parts: tuple[str, ...] = "model", "optimizer", "amp"

    def objects(self) -> dict[str, Any]:
        """Return ``parts`` by name, as ``tritonamp.save`` and ``load`` take them."""
        return {name: getattr(self, name) for name in self.parts}

    def states(self) -> dict[str, Any]:
        """Return copies of the states of ``parts``."""
        return {name: copy.deepcopy(part.state_dict()) for name, part in self.objects().items()}

    def load(self, states: dict[str, Any]) -> Any:
        for name, state in states.items():
            getattr(self, name).load_state_dict(state)
        return self


class Killed(BaseException):
    """Raised instead of a SIGKILL, where a test stays in one process."""


class Faults:
    """Numbers every system call that a save makes, and raises at the chosen one.

    As a kill (the default) no later call succeeds either, so that no clean-up runs; a write stops
    half-way.

    Attributes:
        log: the names of the calls.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        calls: tuple[str, ...],
        at: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        self._at, self._error, self.log = at, error, list[str]()
        faults = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                half = len(data) // 2
                written = super().write(memoryview(data)[:half])
                faults._call("write")
                return written + super().write(memoryview(data)[half:])

        def opened(path: str, mode: str) -> File:
            return File(path, mode.replace("b", ""))

        monkeypatch.setattr(io, "FileIO", File)
        monkeypatch.setattr(durable, "open", opened, raising=False)
        for name in calls:
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._call(name)
            return function(*args, **kwargs)

        return call

    def _call(self, name: str) -> None:
        self.log.append(name)
        if self._at is None:
            return
        if self._error is None and len(self.log) >= self._at:
            raise Killed
        if len(self.log) == self._at and self._error is not None:
            raise self._error


def snapshot(*holders: nn.Module | torch.optim.Optimizer) -> list[Tensor]:
    """Return copies of parameters and of the state of optimizers, which a step may change."""
    found: list[Tensor] = []
    for holder in holders:
        if isinstance(holder, nn.Module):
            found += holder.parameters()
        else:
            params = [p for group in holder.param_groups for p in group["params"]]
            found += params
            state = [holder.state.get(p, {}) for p in params]
            found += [v for own in state for v in own.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in found]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Tell whether two lists of tensors hold equal values."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def on_cpu(tree: Any) -> Any:
    """Return a copy of a tree in which tensors are on the CPU."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda x: x.detach().cpu().clone(), tree)


def same_bits(a: Any, b: Any) -> bool:
    """Tell whether two trees have the same paths, dtypes and values, on whatever devices."""
    left, right = (dict(torch.utils._pytree.tree_leaves_with_path(x)) for x in (a, b))
    return left.keys() == right.keys() and all(
        x.dtype is y.dtype and torch.equal(x.cpu(), y.cpu()) if isinstance(x, Tensor) else x == y
        for x, y in ((left[path], right[path]) for path in left)
    )


def agree(exactly: bool, found: list[Tensor], expected: list[Tensor]) -> None:
    """Assert that two lists of tensors are equal, or, where not ``exactly``, within 4 eps."""
    if exactly:
        assert same(found, expected)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=4 * torch.finfo(x.dtype).eps, atol=1e-7)


def assert_same(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert that two state dicts have the same keys and equal tensors."""
    assert set(state) == set(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def storage_bytes(*device_types: str) -> int:
    """Return how many bytes the tensors hold that Python sees, on any device or on these."""
    gc.collect()
    found = {}
    for x in gc.get_objects():
        if not issubclass(type(x), Tensor) or x.layout is not torch.strided:
            continue
        if not device_types or x.device.type in device_types:
            storage = x.untyped_storage()
            with contextlib.suppress(RuntimeError, UserWarning):  # fake ones have no memory
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def op_of_linear(device: torch.device) -> str:
    """Return what torch calls F.linear with a bias, of rows: a CPU has an operator for it."""
    return "linear" if device.type == "cpu" else "addmm"


def torchs_database(module: str, name: str) -> Any:
    """Return cases of torch's own tests; skip the test where expecttest, which they need, is not
    installed.
    """
    pytest.importorskip("expecttest", reason=f"needs expecttest: torch's own cases, {name}")
    # the import would forbid changing torch.backends to every later test
    with torch.backends.__allow_nonbracketed_mutation():
        return getattr(importlib.import_module(f"torch.testing._internal.{module}"), name)


def dispatch_tables() -> dict[str, str]:
    """Return torch's dispatch table of every aten op, as text."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    return {name: torch._C._dispatch_dump(name) for name in names}


def odd_parameters(device: torch.device, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Return a matrix, a number, an empty parameter, and a matrix that is not contiguous."""
    generator = torch.Generator().manual_seed(1)
    shapes: list[tuple[int, ...]] = [(3, 5), (), (0,), (4, 6)]
    real = dtype.to_real()
    data = [
        torch.randn(shape + (2,) * dtype.is_complex, generator=generator).to(real)
        for shape in shapes
    ]
    data = [torch.view_as_complex(d) for d in data] if dtype.is_complex else data
    data[-1] = data[-1].t()
    return [nn.Parameter(d.to(device)) for d in data]
