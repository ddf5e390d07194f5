"""Unusual gradients, parameters, batches, threads and processes: they train right, or are refused
clearly.
"""

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Net, same, snapshot, take_step
from runs import LEVELS
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

ADAM, SGD = torch.optim.AdamW, torch.optim.SGD
each_optimizer = pytest.mark.parametrize("kind", [ADAM, SGD])
each_level = pytest.mark.parametrize("level", LEVELS)
SCALED = ["O1", "O2"]


@pytest.fixture
def enable(handles: Callable[..., Any]) -> Callable[..., Any]:
    return handles


def net(device: torch.device, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(4, 6, 2).to(device)


def x(device: torch.device, seed: int = 1, rows: int = 5) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)).to(device)


# gradients


def expanded(grad: Tensor) -> Tensor:
    return grad[:1].clone().expand_as(grad)


def strided(grad: Tensor) -> Tensor:
    return torch.stack([grad, grad], -1)[..., 0]


def transposed(grad: Tensor) -> Tensor:
    return grad.mT.contiguous().mT


@pytest.mark.parametrize("form", [expanded, strided, transposed], ids=lambda form: form.__name__)
@each_optimizer
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_gradients_in_other_layouts(
    enable: Any, device: torch.device, level: str, kind: Any, form: Any
) -> None:
    """Assigned by hand; the numbers are those of contiguous memory. A bad one is found."""
    runs = []
    for lays_out in (form, lambda grad: form(grad).contiguous()):
        model = net(device)
        optimizer = kind(model.parameters(), lr=0.1)
        amp = enable(model, optimizer, level=level)
        for i in range(3):
            amp.backward(model(x(device, i)).square().mean())
            grad = model.first.weight.grad
            model.first.weight.grad = lays_out(
                torch.where(grad == grad[0, 0], torch.inf, grad) if i == 1 else grad
            )
            optimizer.step()
            optimizer.zero_grad()
        assert amp.stats() == {**amp.stats(), "steps": 2, "skipped": 1}
        runs.append(snapshot(model, optimizer))
    assert same(*runs)


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_another_dtype(
    enable: Any, device: torch.device, dtype: torch.dtype, kind: Any
) -> None:
    """Where torch lets them be assigned: ``grad_dtype`` allows it."""
    runs, backend = [], "auto" if dtype is not torch.float64 else "eager"  # no kernel takes it
    for given in (dtype, torch.float16):
        model = net(device)
        optimizer = kind(model.parameters(), lr=0.1)
        amp = enable(model, optimizer, level="O2", loss_scale=4.0, backend=backend)
        amp.backward(model(x(device)).square().mean())
        # exact in all of them
        weight = model.first.weight
        grad = torch.full_like(weight, 0.25)
        weight.grad = None
        weight.grad_dtype = given
        weight.grad = grad.to(given)
        optimizer.step()
        runs.append(snapshot(model, optimizer))
    assert same(*runs)


@each_optimizer
@each_level
def test_gradients_that_are_none(enable: Any, device: torch.device, level: str, kind: Any) -> None:
    model = net(device)
    optimizer = kind(model.parameters(), lr=0.1)
    amp = enable(model, optimizer, level=level)
    before = snapshot(model, optimizer)
    amp.backward(model(x(device)).square().mean())
    model.zero_grad()
    for p in model.parameters():
        p.grad = None
    optimizer.step()  # as in torch: nothing to do
    assert same(snapshot(model, optimizer)[: len(before)], before)
    amp.backward(model(x(device)).square().mean())
    kept = model.first.weight.detach().clone()
    model.first.weight.grad = None
    optimizer.step()
    assert torch.equal(model.first.weight, kept)
    assert not torch.equal(model.last.weight.float(), before[4].float())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [torch.finfo(torch.float16).max, 1.0])
def test_sparse_gradients_with_duplicates(
    enable: Any, device: torch.device, level: str, value: float
) -> None:
    """The sum of an index's gradients counts: two of 65504 are inf in half, and skip the step
    there.
    """
    model = nn.Embedding(6, 2, sparse=True).to(device)
    optimizer = SGD(model.parameters(), lr=0.5)
    amp = enable(model, optimizer, level=level, loss_scale=1.0)
    before = snapshot(model)[0]
    amp.backward((model(torch.tensor([1, 4, 1], device=device)) * value).sum())
    half = model.weight.dtype is torch.float16
    assert model.weight.grad.is_sparse
    optimizer.step()
    if half and value != 1.0:
        assert amp.stats()["skipped"] == 1
        assert same(snapshot(model), [before])
    else:
        moved = (
            before.float()
            - 0.5 * value * torch.tensor([0, 2.0, 0, 0, 1, 0], device=device)[:, None]
        )
        torch.testing.assert_close(
            model.weight.float(), moved, rtol=1e-3 if half else 1e-6, atol=1e-3 if half else 0
        )


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_sparse_adam_trains_and_adamw_refuses(
    enable: Any, device: torch.device, level: str
) -> None:
    for kind in (torch.optim.SparseAdam, ADAM):
        model = nn.Embedding(6, 2, sparse=True).to(device)
        optimizer = kind(list(model.parameters()), lr=0.5)
        amp = enable(model, optimizer, level=level, loss_scale=8.0)
        before = snapshot(model)[0]
        amp.backward(model(torch.tensor([1, 4, 1], device=device)).sum())
        if kind is ADAM:
            with pytest.raises(
                RuntimeError, match="does not support sparse gradients, please consider SparseAdam"
            ):
                optimizer.step()
            assert same(snapshot(model), [before])
            assert amp.stats()["steps"] == 0
        else:
            optimizer.step()
            moved = (snapshot(model)[0] != before).any(1).tolist()
            assert moved == [False, True, False, False, True, False]


# parameters


class Odd(nn.Module):
    """A 0-d, an empty and a strided parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.strided = nn.Parameter(torch.arange(12.0).reshape(3, 4).mT / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.scalar * (x @ self.strided).sum() + self.empty.sum()


@each_optimizer
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_odd_shapes(enable: Any, device: torch.device, level: str, kind: Any) -> None:
    plain, model = Odd().to(device), Odd().to(device)
    data = torch.ones(2, 4, device=device) / 4  # exact in half
    optimizers = [kind(m.parameters(), lr=2.0**-6) for m in (plain, model)]
    amp = enable(model, optimizers[1], level=level, loss_scale=8.0)
    for _ in range(2):
        plain(data).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        take_step(amp, optimizers[1], model(data))
    for p, q in zip(plain.parameters(), amp.master_params(), strict=True):
        torch.testing.assert_close(q, p, rtol=2e-3, atol=2e-3)  # gradients rounded to half
    assert amp.stats()["steps"] == 2


@pytest.mark.parametrize("level", SCALED)
def test_complex_parameters(enable: Any, device: torch.device, level: str) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.last = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.phase * x).abs())

    model = Complex().to(device)
    optimizer = ADAM(model.parameters(), lr=0.1)
    amp = enable(model, optimizer, level=level, loss_scale=8.0)
    amp.backward(model(torch.randn(4, 3, device=device)).square().mean())
    optimizer.step()
    assert model.phase.dtype is torch.complex64
    assert not torch.equal(model.phase, torch.ones_like(model.phase))


@each_optimizer
@pytest.mark.parametrize("level", SCALED)
def test_parameters_that_come_later(
    enable: Any, device: torch.device, level: str, kind: Any
) -> None:
    """By ``add_param_group``, or appended to a group by hand: they train, and are judged."""
    model = net(device)
    optimizer = kind([*model.first.parameters()], lr=0.1)
    amp = enable(model, optimizer, level=level)

    def step(factor: float = 1.0) -> None:
        take_step(amp, optimizer, model(x(device)).square().mean() * factor)

    step()
    optimizer.add_param_group({"params": [model.last.weight], "lr": 0.2})
    optimizer.param_groups[0]["params"].append(model.last.bias)
    before = snapshot(model)
    step()
    after = snapshot(model)
    moved = [not torch.equal(p, q) for p, q in zip(before, after, strict=True)]
    assert moved == [True, True, False, False, True, True]  # the norm is in no group
    amp.backward(model(x(device)).square().mean())
    model.last.bias.grad.fill_(float("nan"))
    optimizer.step()
    assert same(snapshot(model), after)
    assert all(p.dtype is torch.float32 for g in optimizer.param_groups for p in g["params"])


@pytest.mark.parametrize("level", SCALED)
def test_a_module_that_comes_later(enable: Any, device: torch.device, level: str) -> None:
    model = net(device)
    optimizer = ADAM(model.parameters(), lr=0.1)
    amp = enable(model, optimizer, level=level)
    extra = nn.Linear(2, 2).to(device)
    model.last = nn.Sequential(model.last, extra)
    optimizer.add_param_group({"params": list(extra.parameters())})
    before = extra.weight.detach().clone()
    amp.backward(model(x(device)).square().mean())
    optimizer.step()
    assert extra.weight.dtype is torch.float32
    assert not torch.equal(extra.weight, before)
    assert amp.history[-1].cause is None


@each_optimizer
@pytest.mark.parametrize("level", SCALED)
def test_frozen_and_thawed(enable: Any, device: torch.device, level: str, kind: Any) -> None:
    model = net(device)
    optimizer = kind(model.parameters(), lr=0.1)
    amp = enable(model, optimizer, level=level)
    moved = []
    for frozen in (False, True, False):
        model.first.weight.requires_grad_(not frozen)
        before = model.first.weight.detach().clone()
        take_step(amp, optimizer, model(x(device)).square().mean())
        moved.append(not torch.equal(model.first.weight, before))
    assert moved == [True, False, True]


@pytest.mark.parametrize("level", SCALED)
def test_one_optimizer_of_two_overflows(enable: Any, device: torch.device, level: str) -> None:
    model = net(device)
    optimizers = [ADAM(model.first.parameters(), lr=0.1), SGD(model.last.parameters(), lr=0.1)]
    amp = enable(model, optimizers, level=level)
    before = snapshot(model)
    amp.backward(model(x(device)).square().mean())
    model.last.weight.grad[0, 0] = float("inf")
    for optimizer in optimizers:
        optimizer.step()
    assert same(snapshot(model), before)
    assert amp.stats() == {**amp.stats(), "steps": 0, "skipped": 1, "scale": 2.0**15}


# batches and losses


@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("rows", [1, 4096])
def test_batches_of_other_sizes(enable: Any, device: torch.device, level: str, rows: int) -> None:
    model = net(device)
    optimizer = ADAM(model.parameters(), lr=0.1)
    amp = enable(model, optimizer, level=level)
    amp.backward(model(x(device, rows=rows)).square().mean())
    optimizer.step()
    assert amp.stats()["steps"] == 1


@pytest.mark.parametrize(("reduce", "skips"), [("mean", True), ("sum", False)])
@pytest.mark.parametrize("level", SCALED)
def test_an_empty_batch(
    enable: Any, device: torch.device, level: str, reduce: str, skips: bool
) -> None:
    """Its mean is NaN: a fault, and the scale stays. Its sum is 0, with gradients of 0."""
    model = net(device)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp = enable(model, optimizer, level=level)
    before = snapshot(model)
    amp.backward(getattr(model(x(device, rows=0)).square(), reduce)())
    optimizer.step()
    assert same(snapshot(model), before)
    assert amp.stats() == {
        **amp.stats(),
        "skipped": int(skips),
        "forward_faults": int(skips),
        "scale": 2.0**16,
    }


@pytest.mark.parametrize("level", SCALED)
def test_a_loss_of_one_element_and_one_of_many(
    enable: Any, device: torch.device, level: str
) -> None:
    model = net(device)
    optimizer = SGD(model.parameters(), lr=0.1)
    amp = enable(model, optimizer, level=level)
    take_step(amp, optimizer, model(x(device)).square().mean().reshape(1))
    before = snapshot(model)
    with pytest.raises(
        RuntimeError, match="grad can be implicitly created only for scalar outputs"
    ):
        amp.backward(model(x(device)).square())
    assert same(snapshot(model), before)
    with pytest.raises(RuntimeError, match="does not require grad"):
        amp.backward(torch.ones((), device=device))  # depends on no parameter
    amp.backward(model(x(device)).square().mean())
    optimizer.step()
    assert amp.stats()["steps"] == 2


@each_optimizer
@pytest.mark.parametrize("level", SCALED)
def test_backward_twice_and_step_twice(
    enable: Any, device: torch.device, level: str, kind: Any
) -> None:
    once, twice = net(device), net(device)
    optimizers = [kind(m.parameters(), lr=0.1) for m in (once, twice)]
    amps = [
        enable(m, o, level=level, loss_scale=2.0**8)
        for m, o in zip((once, twice), optimizers, strict=True)
    ]
    amps[0].backward(once(x(device)).square().mean() * 2)
    loss = twice(x(device)).square().mean()
    amps[1].backward(loss, retain_graph=True)
    amps[1].backward(loss)
    for optimizer in optimizers:
        optimizer.step()
    # sums of two equal halves are exact, and so is twice a half, unless it was subnormal
    assert all(
        torch.allclose(p, q, rtol=1e-3, atol=1e-4)
        for p, q in zip(snapshot(once), snapshot(twice), strict=True)
    )
    with pytest.raises(RuntimeError, match=r"call step\(\) once per backward"):
        optimizers[1].step()


@each_optimizer
@pytest.mark.parametrize("level", SCALED)
def test_rates_that_change(enable: Any, device: torch.device, level: str, kind: Any) -> None:
    """lr=0 moves no weight; a tensor as lr and another weight decay count from the next step."""
    model = net(device)
    optimizer = kind(model.parameters(), lr=0.0)
    amp = enable(model, optimizer, level=level)
    group = optimizer.param_groups[0]

    def moved() -> bool:
        before = snapshot(model)
        take_step(amp, optimizer, model(x(device)).square().mean() * 0)
        return not same(snapshot(model), before)

    assert not moved()
    group["weight_decay"] = 0.5
    assert not moved()
    group["lr"] = torch.tensor(0.1, device=device) if kind is ADAM else 0.1
    assert moved()  # by decay alone
    group["weight_decay"] = 0.0
    assert not moved() or kind is ADAM  # Adam's moments remember nothing: the gradients were 0
    group["lr"] = 0.0
    assert not moved()


@pytest.mark.parametrize("level", SCALED)
def test_inference_then_training(enable: Any, device: torch.device, level: str) -> None:
    runs = []
    for looks in (True, False):
        model = net(device)
        optimizer = ADAM(model.parameters(), lr=0.1)
        amp = enable(model, optimizer, level=level)
        for i in range(3):
            if looks:
                model.eval()
                with torch.inference_mode():
                    model(x(device, 50 + i) * float("inf"))
                with torch.no_grad():
                    model(x(device, 60 + i))
                model.train()
            amp.backward(model(x(device, i)).square().mean())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        runs.append((snapshot(model, optimizer), amp.stats()))
    assert same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("level", SCALED)
def test_integers_only(enable: Any, device: torch.device, level: str) -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2)).to(device)
    optimizer = ADAM(model.parameters(), lr=0.1)
    amp = enable(model, optimizer, level=level)
    amp.backward(
        model(torch.tensor([[1, 6], [0, 1]], device=device)).square().mean() * float("nan")
    )
    optimizer.step()
    assert amp.history[-1].cause == "forward fault"


# threads and processes


@pytest.mark.steps
@pytest.mark.parametrize("level", SCALED)
def test_two_models_train_in_two_threads(enable: Any, device: torch.device, level: str) -> None:
    def train(run: Any, steps: range) -> None:
        model, optimizer, amp = run
        for i in steps:
            take_step(
                amp,
                optimizer,
                model(x(device, i)).square().mean() * (float("inf") if i == 5 else 1.0),
            )

    def run(seed: int, other: str) -> Any:
        model = net(device, seed)
        optimizer = ADAM(model.parameters(), lr=0.01)
        return model, optimizer, enable(model, optimizer, level=other)

    together, alone = [[run(0, level), run(1, "O0")] for _ in range(2)]
    failed: list[BaseException] = []

    def work(one: Any) -> None:
        try:
            train(one, range(20))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(one,)) for one in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for one, other in zip(alone, together, strict=True):
        train(one, range(20))
        assert same(snapshot(*one[:2]), snapshot(*other[:2]))
        assert one[2].stats() == {**other[2].stats(), "steps": 19, "skipped": 1}


class Squares(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Tensor:
        return torch.full((4,), i / 8)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_data_loader_workers(enable: Any, device: torch.device) -> None:
    """Workers are forked while the model is enabled; a worker's own tensors know nothing of it."""
    runs = []
    for workers in (0, 2):
        model = net(device)
        optimizer = ADAM(model.parameters(), lr=0.1)
        amp = enable(model, optimizer, level="O2", loss_scale=8.0)
        for data in DataLoader(
            Squares(), batch_size=4, num_workers=workers, multiprocessing_context=_context(workers)
        ):
            take_step(amp, optimizer, model(data.to(device)).square().mean())
        runs.append((snapshot(model, optimizer), amp.stats()["steps"]))
    assert same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1] == 2


def _context(workers: int) -> str | None:
    return "fork" if workers else None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_runs_a_forward(enable: Any) -> None:
    model = net(torch.device("cpu"))
    enable(model, level="O2")
    data = x(torch.device("cpu"))
    with torch.no_grad():
        expected = model(data)
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if torch.equal(model(data), expected) else 1)
            except BaseException:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
