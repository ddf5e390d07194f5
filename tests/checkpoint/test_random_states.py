"""`RNGState`: what is drawn after a resume is what would have been drawn.

The ranks are this file run as a script, see two_ranks.py.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from two_ranks import Pair, on_ranks, serve

import tritonamp
from tritonamp import RNGState


@pytest.fixture(autouse=True)
def _own_seeds() -> Iterator[None]:
    before = RNGState().state_dict()
    seed(0)
    yield
    RNGState().load_state_dict(before)


def seed(number: int) -> None:
    for function in (random.seed, np.random.seed, torch.manual_seed):
        function(number)


def draw() -> list[float]:
    """From every generator, odd numbers of values that come in pairs included."""
    values = [random.random(), random.gauss(0.0, 1.0), np.random.rand(), np.random.randn()]
    return [*values, *torch.rand(3).tolist(), *torch.randn(1).tolist()]


def epoch(loader: Any, model: nn.Module) -> list[float]:
    return [value for (x,) in loader for value in model(x).flatten().tolist()]


def load_plain(path: str | Path, rng: RNGState) -> None:
    rng.load_state_dict(tritonamp.load(path)["rng"])


def load_sharded(path: str | Path, rng: RNGState) -> None:
    tritonamp.load_sharded(path, rng=rng)


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (tritonamp.save, load_plain),
        (tritonamp.save_sharded, load_sharded),
    ],
    ids=["save", "save_sharded"],
)
def test_what_is_drawn_is_bit_identical(tmp_path: Path, save: Any, load: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5))
    loader = DataLoader(TensorDataset(torch.randn(20, 3)), batch_size=4, shuffle=True)
    draw()  # leaves the second of a pair behind
    epoch(loader, model)
    save(tmp_path / "x", rng=RNGState())
    expected = [draw(), epoch(loader, model), draw()]
    assert [draw(), epoch(loader, model), draw()] != expected
    load(tmp_path / "x", RNGState())
    assert [draw(), epoch(loader, model), draw()] == expected


def test_numpy_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    state = RNGState().state_dict()
    assert state["ranks"][0]["numpy"] is None
    expected = random.random()
    RNGState().load_state_dict(state)
    assert "numpy" not in sys.modules
    assert random.random() == expected


def test_asking_does_not_initialise_cuda() -> None:
    before = torch.cuda.is_initialized()
    assert bool(RNGState().state_dict()["ranks"][0]["cuda"]) == before
    assert torch.cuda.is_initialized() == before


def test_cuda(cuda: torch.device) -> None:
    torch.rand(1, device="cuda")
    state = RNGState().state_dict()
    expected = torch.rand(5, device="cuda")
    RNGState().load_state_dict(state)
    assert torch.equal(torch.rand(5, device="cuda"), expected)


@pytest.mark.parametrize("what", ["keys", "ranks", "devices"])
def test_states_that_do_not_fit_are_refused_and_change_nothing(what: str) -> None:
    state = RNGState().state_dict()
    if what == "keys":
        state, text = {"scale": 1.0}, r"expected the keys \['ranks'\] of .*, got \['scale'\]"
    elif what == "ranks":
        state["ranks"] *= 3
        text = (
            r"expected the .* of 1 rank\(s\), got those of 3: .*leave them out and seed each rank"
        )
    else:
        state["ranks"][0]["cuda"] = [torch.empty(16, dtype=torch.uint8)] * (
            torch.cuda.device_count() + 1
        )
        text = (
            r"expected the .* of \d CUDA device\(s\), got those of \d: "
            r"show this process as many \(CUDA_VISIBLE_DEVICES\), or leave them out"
        )
    draw()
    before = RNGState().state_dict()
    with pytest.raises(ValueError, match=text):
        RNGState().load_state_dict(state)
    expected = draw()
    RNGState().load_state_dict(before)
    assert draw() == expected


# Two ranks


@on_ranks
def saved_and_resumed(path: str, sharded: bool) -> list[Any]:
    seed(dist.get_rank())
    draw()
    (tritonamp.save_sharded if sharded else tritonamp.save)(
        path, rng=RNGState(), rank=dist.get_rank()
    )
    expected = draw()
    seed(7)
    (load_sharded if sharded else load_plain)(path, RNGState())
    return [expected, draw()]


@pytest.mark.ranks
@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
@pytest.mark.parametrize("sharded", [False, True], ids=["save", "save_sharded"])
def test_each_rank_takes_its_own(pair: Pair, tmp_path: Path, sharded: bool) -> None:
    (first, again), (second, again_too) = saved_and_resumed(
        pair, path=str(tmp_path / "x"), sharded=sharded
    )
    assert (first, second) == (again, again_too)
    assert first != second
    load: Any = load_sharded if sharded else load_plain
    with pytest.raises(ValueError, match=r"of 1 rank\(s\), got those of 2"):
        load(tmp_path / "x", RNGState())
    if sharded:
        assert tritonamp.load_sharded(tmp_path / "x", rng=None) == {"rank": 0}


@on_ranks
def fails_on_one(path: str) -> str:
    """Before the states are gathered."""
    try:
        tritonamp.save(path, other=print if dist.get_rank() == 1 else 1, rng=RNGState())
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.ranks
@pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")
def test_an_error_on_one_rank_is_one_on_all(pair: Pair, tmp_path: Path) -> None:
    first, second = fails_on_one(pair, path=str(tmp_path / "x"))
    assert "failed on rank 1: ValueError: cannot save other" in first
    assert second.startswith("ValueError: cannot save other")


if __name__ == "__main__":
    serve(*sys.argv[1:])
