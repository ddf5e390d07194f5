"""The fault injector: each kind does what it says where it says, once, and leaves nothing."""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh_python import FreshPython
from runs import Training, batch
from torch import Tensor, nn

import tritonamp
from tritonamp.kernels import _launch
from tritonamp.kernels import device as hardware
from tritonamp.kernels.softmax import softmax
from tritonamp.testing import CAUSES, KINDS, Fault, FaultInjector, InjectedError, compile_failure

INF, NAN = math.inf, math.nan


class Injected(Training):
    def __init__(self, device: torch.device, level: str = "O2", **fields: Any) -> None:
        scaler = tritonamp.GradScaler(device.type, init_scale=2.0**8)
        super().__init__(
            lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)),
            level=level,
            device=device,
            lr=1e-3,
            scaler=scaler,
            **fields,
        )
        self.x = batch(0, 3, 4, device=device)

    def step(self, injector: FaultInjector, fault: Fault | None = None) -> None:
        self.zero_grad()
        with injector.step(fault):
            self.backward(injector.loss(self.loss()))
            self.optimizer.step()

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's state of the first parameter."""
        state: dict[str, Tensor] = self.optimizer.state[self.optimizer.param_groups[0]["params"][0]]
        return state

    def hooks(self) -> int:
        """Return the number of hooks, without those of ``enable`` on the first backwards."""
        modules = [
            h for m in self.model.modules() for h in (m._forward_hooks, m._forward_pre_hooks)
        ]
        self.amp._parts.stepper.plain_backwards.remove()
        tensors = [p._post_accumulate_grad_hooks or {} for p in self.model.parameters()]
        return sum(map(len, [*modules, *tensors, self.optimizer._optimizer_step_pre_hooks]))


@pytest.fixture
def run(device: torch.device) -> Iterator[Injected]:
    with Injected(device) as made:
        yield made


PLACES = {"overflow": "0", "scale": "2", "gradient": "2.weight", "missing gradient": "0.bias"}


@pytest.mark.parametrize("value", [INF, NAN])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not Fault(kind).may_pass])
def test_each_kind(run: Injected, kind: str, value: float) -> None:
    injector = FaultInjector(run.model, run.optimizer)
    run.step(injector)
    before = [p.detach().clone() for p in run.model.parameters()]
    fault = Fault(
        kind, PLACES.get(kind, "0" if "error in" in kind and "step" not in kind else ""), value
    )
    if fault.raises:
        error = torch.OutOfMemoryError if kind == "out of memory" else InjectedError
        with pytest.raises(error, match=f"injected: {kind}"):
            run.step(injector, fault)
    else:
        run.step(injector, fault)
    unchanged = [torch.equal(p, q) for p, q in zip(before, run.model.parameters(), strict=True)]
    assert unchanged == ([False, True, False, False] if kind == "missing gradient" else [True] * 4)
    assert [(f.kind, f.step) for f in injector.injected] == [(kind, 2)]
    assert run.hooks() == 0
    run.step(injector)
    causes = {record.step: record.cause for record in run.amp.history}
    decided = 2 if fault.raises else 3
    assert list(causes) == list(range(1, decided + 1))
    assert causes[2] in (CAUSES[kind] or (None,))
    assert causes[decided] is None


def test_the_gradient_that_is_named(run: Injected) -> None:
    injector = FaultInjector(run.model)
    run.step(injector, Fault("gradient", "2.bias", INF))
    assert run.amp.history[-1].parameters == ("2.bias",)
    assert run.amp.history[-1].cause == "scale overflow"


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def flipped_bits(before: Tensor, after: Tensor) -> dict[int, int]:
    """Return the flipped bits by element."""
    integers = INTEGERS[before.dtype.itemsize]
    changed = before.flatten().view(integers) ^ after.flatten().view(integers)
    mask = 2 ** (8 * before.dtype.itemsize) - 1  # not the sign of the integers
    return {int(i): int(changed[i]) & mask for i in changed.nonzero()}


STORED: dict[str, Callable[[Any], Tensor]] = {
    "weight": lambda run: run.model[0].weight,
    "master": lambda run: dict(run.amp.named_master_params())["0.weight"],
    "exp_avg": lambda run: run.state()["exp_avg"],
    "exp_avg_sq": lambda run: run.state()["exp_avg_sq"],
}
FORMS: dict[str, dict[str, Any]] = {
    "O0": {"level": "O0"},
    "O2": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "8bit": {"state": "8bit"},
    "packed": {"state": "bf16", "masters": "packed"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", STORED)
def test_a_stored_bit_flips(device: torch.device, target: str, form: str) -> None:
    """The lowest and the highest bit of an element, and no other; torch counts no write."""
    with Injected(device, **FORMS[form]) as run:
        injector = FaultInjector(run.model, run.optimizer)
        run.step(injector)
        run.step(injector)
        before = STORED[target](run).detach().clone()
        version, highest = run.model[0].weight._version, 8 * before.dtype.itemsize - 1
        for bit in (0, highest):
            with injector.step(Fault("bitflip", "0.weight", target=target, bit=bit, element=5)):
                pass
        found = flipped_bits(before, STORED[target](run).detach())
        assert found == {5: 1 | 1 << highest}
        assert form in ("8bit", "packed") or run.model[0].weight._version == version
        assert [f.bit for f in injector.injected] == [0, highest]


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("target", ["master", "exp_avg"])
def test_masters_of_wrapped_and_of_several_models(
    device: torch.device, target: str, wrapped: bool
) -> None:
    """Their names are not those of the parameters."""
    models = [nn.Linear(4, 4).to(device) for _ in range(1 if wrapped else 2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    with tritonamp.enable(models, optimizers, level="O2", loss_scale=1.0) as amp:
        for model, optimizer in zip(models, optimizers, strict=True):
            amp.backward(model(torch.ones(1, 4, device=device)).square().mean(), optimizer)
            optimizer.step()
        model, name = (
            (nn.DataParallel(models[0]), "module.weight") if wrapped else (model, "weight")
        )
        injector = FaultInjector(model, optimizers[-1])
        with injector.step(Fault("bitflip", name, target=target, bit=31, element=5)):
            pass
        assert injector.injected[0].bit == 31  # which only FP32 has
        before, after = models[-1].weight, list(amp.master_params())[-2]
        changed = torch.signbit(before) != torch.signbit(after)
        assert changed.flatten().nonzero().tolist() == ([[5]] if target == "master" else [])


@pytest.mark.parametrize(("target", "bit", "stays"), [("weight", 11, False), ("master", 24, True)])
def test_a_step_ends_the_flip_of_a_half_weight(
    run: Injected, target: str, bit: int, stays: bool
) -> None:
    injector = FaultInjector(run.model, run.optimizer)
    run.step(injector)
    before = STORED["master"](run).detach().clone()
    run.step(injector, Fault("bitflip", "0.weight", target=target, bit=bit, element=5))
    after = STORED["master"](run).detach()
    assert bool((after - before).abs().max() > 0.01) is stays  # ten times the learning rate
    assert torch.equal(run.model[0].weight, after.half())
    assert run.causes == [None, None]


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("bit", [0, 9, 15])
def test_a_bit_of_a_gradient_flips_once(device: torch.device, level: str, bit: int) -> None:
    """In the gradient of a parameter after the first of two backwards, or in a backward."""
    found = {}
    for target, place in ((None, ""), ("gradient", "2.bias"), ("backward", "2")):
        with Injected(device, level) as run:
            run.x = run.x[:1]  # so that the bias has the gradient of the output
            injector = FaultInjector(run.model)
            fault = target and Fault("bitflip", place, target=target, bit=bit, element=1)
            with injector.step(fault or None):
                run.backward(run.loss())
                found[target] = run.model[2].bias.grad.clone()
                run.backward(run.loss())
                twice = run.model[2].bias.grad.clone()
            assert run.hooks() == 0
        if target:
            assert flipped_bits(found[None], found[target]) == {1: 1 << bit}
            assert torch.equal(twice, found[None] + found[target])


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_an_audit_sees_the_flip_of_a_backward(device: torch.device, level: str) -> None:
    """Of the backward that the hook meets first, and only there."""
    with Injected(device, level) as run:
        injector = FaultInjector(run.model)
        run.step(injector)
        run.amp.audit(every=1)
        run.step(injector, Fault("bitflip", "2", target="backward", bit=12, element=1))
        run.step(injector)
        assert run.causes == [None, "veto", None]
        assert run.causes[1] in injector.injected[0].causes


@pytest.mark.steps
def test_drawn_flips(device: torch.device) -> None:
    """Of every target once the optimizer has state; the same seed flips the same bits."""

    def flips(seed: int) -> list[Fault]:
        with Injected(device) as run:
            injector = FaultInjector(
                run.model, run.optimizer, rate=0.75, seed=seed, kinds=["bitflip"]
            )
            for _ in range(40):
                run.step(injector)
            for record in run.amp.history:
                assert record.cause in (None, *CAUSES["bitflip"])
        return injector.injected

    drawn = flips(0)
    assert repr(flips(0)) == repr(drawn) != repr(flips(1))
    assert {f.target for f in drawn} == {"gradient", "backward", *STORED}
    assert all(f.bit is not None and f.element is not None for f in drawn)


def test_flips_are_drawn_only_if_asked_for(run: Injected) -> None:
    injector = FaultInjector(run.model, run.optimizer, rate=1.0)
    kinds = set()
    for _ in range(100):
        with injector.step() as due:
            assert due is not None
            kinds.add(due.kind)
    assert kinds == set(KINDS) - {"bitflip"}


def test_no_state_yet(run: Injected) -> None:
    injector = FaultInjector(run.model, run.optimizer)
    with (
        pytest.raises(RuntimeError, match=r"'exp_avg'.* did not happen"),
        injector.step(Fault("bitflip", "0.weight", target="exp_avg")),
    ):
        pass
    assert injector.injected == []


@pytest.mark.steps
def test_the_same_seed_gives_the_same_faults(device: torch.device) -> None:
    def faults(seed: int) -> list[Fault]:
        run = Injected(device)
        injector = FaultInjector(run.model, run.optimizer, rate=0.5, seed=seed)
        for _ in range(40):
            with contextlib.suppress(InjectedError, torch.OutOfMemoryError):
                run.step(injector)
        assert [r.step for r in run.amp.history if r.cause] == [
            f.step for f in injector.injected if f.causes
        ]
        run.amp.disable()
        return injector.injected

    drawn = faults(0)
    assert repr(faults(0)) == repr(drawn) != repr(faults(1))  # NaN is not equal to itself
    assert 8 < len(drawn) < 32  # of 40 with a probability of 1/2: 3.8 standard deviations


def test_random_numbers_of_torch_are_left_alone(run: Injected) -> None:
    injector = FaultInjector(run.model, rate=1.0, kinds=["batch", "gradient"])
    before = torch.get_rng_state()
    run.step(injector)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_tritonamp(device: torch.device) -> None:
    """For plain loops too; a half output overflows, an FP32 one holds more."""
    model = nn.Linear(2, 1, bias=False).to(device)
    injector = FaultInjector(model)
    x = torch.ones(1, 2, device=device)
    with injector.step(Fault("scale", "")):
        model(x).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[131009.0] * 2]
    model.half().zero_grad()
    with injector.step(Fault("scale", "")):
        model(x.half()).sum().backward()
    assert model.weight.grad.isinf().all()


def test_structures_and_keywords(device: torch.device) -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, ids: Tensor, *, data: dict[str, Tensor]) -> dict[str, Any]:
            return {"ids": ids, "out": (self.linear(data["x"]), None)}

    model = Keywords().to(device)
    injector = FaultInjector(model)
    ids, x = torch.ones(3, dtype=torch.int64, device=device), torch.zeros(3, 2, device=device)
    for fault in (Fault("batch", value=INF), Fault("overflow", "", INF)):
        with injector.step(fault):
            out = model(ids, data={"x": x})
        assert torch.equal(out["ids"], ids)
        assert not out["out"][0].isfinite().all()
        assert x.eq(0).all()


def test_what_cannot_happen_is_said(run: Injected) -> None:
    injector = FaultInjector(run.model)
    with (
        pytest.raises(RuntimeError, match="did not happen: nothing came by there in this step"),
        injector.step(Fault("overflow", "0", INF)),
    ):
        pass
    assert injector.injected == []
    place = next(name for name, _ in run.model.named_parameters())
    flips = FaultInjector(run.model, run.optimizer)
    with (
        pytest.raises(RuntimeError, match="its target can be 'gradient', 'backward', 'weight', "),
        flips.step(Fault("bitflip", place, target="grad")),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"^place: expected for 'bitflip' of target 'backward' one"),
        flips.step(Fault("bitflip", place, target="backward")),
    ):
        pass
    drawing = FaultInjector(run.model, rate=1.0, kinds=["loss"])
    with drawing.step() as due:
        assert due is not None and due.kind == "loss"
    assert drawing.injected == []


def test_a_graph_that_outlives_its_step(run: Injected) -> None:
    injector = FaultInjector(run.model)
    with (
        pytest.raises(RuntimeError, match="did not happen"),
        injector.step(Fault("error in backward", "0")),
    ):
        loss = run.model(run.x).square().mean()
    run.amp.backward(loss)
    assert run.model[0].weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: FaultInjector(model, rate=1.5), "rate: expected 0 to 1, got 1.5"),
        (
            lambda model: FaultInjector(model, kinds=["lost"]),
            "kind: expected one of 'batch', 'loss', 'overfl.*got 'lost'",
        ),
        (
            lambda model: FaultInjector(model, kinds=["out of memory"]),
            "needs the optimizer: FaultInjector.model, opt",
        ),
        (
            lambda model: FaultInjector(model).step(Fault("gradient", "head")).__enter__(),
            r"for 'gradient' one of \['0.weight', '0.bias', '2.weight', '2.bias'\], got 'head'",
        ),
        (
            lambda model: FaultInjector(model).step(Fault("bitflip", "", target="m")).__enter__(),
            "a bit of 'm' needs the optimizer: FaultInjector.model, opt",
        ),
        (
            lambda model: (
                FaultInjector(model).step(Fault("bitflip", "0", target="weight")).__enter__()
            ),
            r"for 'bitflip' of target 'weight' one of \['0.weight', .*, got '0'",
        ),
        (
            lambda model: (
                FaultInjector(model)
                .step(Fault("bitflip", "0.weight", target="weight", bit=16))
                .__enter__()
            ),
            "bit: expected 0 to 15 for torch.float16, got 16",
        ),
        (
            lambda model: (
                FaultInjector(model)
                .step(Fault("bitflip", "0.bias", target="weight", element=8))
                .__enter__()
            ),
            r"element: expected 0 to 7 for shape .8,., got 8",
        ),
    ],
)
def test_misuse(run: Injected, call: Callable[[nn.Module], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(run.model)


def test_compile_failure_changes_nothing_outside(device: torch.device) -> None:
    x = torch.randn(4, 8, device=device)
    if not hardware.INTERPRETED and hardware.why_not_triton(device) is not None:
        pytest.skip("kernels run neither on this device nor in the interpreter")
    expected = softmax(x, 1, torch.float32, False, "triton")
    with compile_failure(), pytest.raises(_launch.KernelError, match="cannot be compiled"):
        softmax(x, 1, torch.float32, False, "triton")
    assert torch.equal(softmax(x, 1, torch.float32, False, "triton"), expected)


def test_imported_only_when_asked_for(fresh_python: FreshPython, tmp_path: Path) -> None:
    code = (
        "import sys, tritonamp; assert 'tritonamp.testing' not in sys.modules; "
        "import tritonamp.testing"
    )
    done = fresh_python.run(code, tmp_path)
    assert done.returncode == 0, done.stderr
