"""What several test files share."""

import contextlib
import gc
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Two layers with a norm between them: parameters of each kind that levels tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class Killed(BaseException):
    """In the place of a SIGKILL, where a test stays in one process."""


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Tell whether two lists of tensors hold equal values."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


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


def storage_bytes() -> int:
    """Return how many bytes the tensors hold that Python sees."""
    gc.collect()
    found = {}
    for x in gc.get_objects():
        if issubclass(type(x), Tensor) and x.layout is torch.strided:
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
