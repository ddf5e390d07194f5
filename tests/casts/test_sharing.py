"""Models that share tensors: refused where two ``Amp`` would scale or cast them, else both work."""

import gc
import weakref
from typing import Any

import pytest
import torch
from outputs import relative_error
from small_models import LlamaRMSNorm
from torch import Tensor, nn

import tritonamp

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)


class OnBase(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.head = base, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


class OnTrunk(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.out = trunk, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.trunk(x))


class Pair:
    """Two models that share a part, on which the first one's optimizer steps."""

    def __init__(self, dtype: torch.dtype = torch.float32, frozen: bool = False) -> None:
        torch.manual_seed(0)
        self.shared = nn.Sequential(nn.Linear(4, 4, dtype=dtype)).requires_grad_(not frozen)
        self.a, self.b = OnBase(self.shared), OnTrunk(self.shared)
        self.models = self.a, self.b

    def optimizers(self) -> list[torch.optim.SGD]:
        of_a = [p for p in self.a.parameters() if p.requires_grad]
        return [torch.optim.SGD(params, lr=0.1) for params in (of_a, self.b.out.parameters())]

    def looks(self) -> list[Any]:
        """What ``enable`` changes."""
        modules = [m for model in self.models for m in model.modules()]
        tensors = [p for model in self.models for p in model.parameters()]
        return [*map(type, modules), *[(t.dtype, t.data_ptr(), t._version) for t in tensors]]


class OneWeight(Pair):
    """One parameter in modules of their own."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        own = nn.Sequential(nn.Linear(4, 4, dtype=self.shared[0].weight.dtype))
        own[0].weight = self.shared[0].weight
        self.b.trunk = own.requires_grad_(self.shared[0].weight.requires_grad)


LEVELS: dict[str, dict[str, Any]] = {
    "O0": {"level": "O0"},
    "O1": {"level": "O1"},
    "O1 bf16": {"level": "O1", "dtype": torch.bfloat16},
    "O2": {"level": "O2"},
    "O3": {"level": "O3"},
}


@pytest.mark.parametrize("pair", [Pair, OneWeight])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("steps", ["first", "second", "as a list"])
def test_what_an_optimizer_steps_on_is_refused(pair: Any, level: str, steps: str) -> None:
    """With both names, and with nothing changed."""
    models = pair()
    of_a, of_b = models.optimizers()
    (a, b), names = models.models, ["base.0.weight", "trunk.0.weight"]
    kinds = ["OnBase", "OnTrunk"]
    if steps == "second":
        (a, b), (of_a, of_b), names, kinds = (b, a), (of_b, of_a), names[::-1], kinds[::-1]
    with tritonamp.enable(a, of_a, **LEVELS[level]):
        before = models.looks()
        with pytest.raises(
            ValueError,
            match=rf"'{names[1]}' of this {kinds[1]} is '{names[0]}' of the {kinds[0]} that is "
            r"enabled already, and both would decide.*amp.disable\(\).*enable\(\[a, b\], ",
        ):
            tritonamp.enable([b, nn.Linear(2, 2)] if steps == "as a list" else b, of_b)
        assert models.looks() == before
    with tritonamp.enable(b, of_b, **LEVELS[level]):
        pass  # the first is disabled


@pytest.mark.parametrize("fields", [{}, {"fp32_modules": [nn.Linear]}], ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pair", [Pair, OneWeight])
def test_the_remedy_trains_both(pair: Any, level: str, fields: dict[str, Any]) -> None:
    """In one call the gradients of the shared weight add up as in FP32, to half precision."""
    if level == "O0" and fields:
        pytest.skip("all of it is FP32")
    models = pair()
    models.shared.append(LlamaRMSNorm(4))
    weight = models.shared[0].weight
    sum(m(X).square().mean() for m in models.models).backward()
    expected, weight.grad = weight.grad, None
    classes = [type(m) for model in models.models for m in model.modules()]
    optimizers = models.optimizers()
    amp = tritonamp.enable([models.a, models.b], optimizers, **LEVELS[level] | fields)
    for model in models.models:
        amp.backward(model(X).float().square().mean())
    amp.unscale_()
    found = next(iter(amp.master_params())).grad
    assert relative_error(found, expected) < (
        1e-6 if level == "O0" else 2e-2 if "bf16" in level else 4e-3
    )
    for optimizer in optimizers:
        optimizer.step()
    amp.disable()
    assert [type(m) for model in models.models for m in model.modules()] == classes


FROZEN = {
    "O0": (torch.float32, {"level": "O0"}),
    "O1": (torch.float32, {"level": "O1"}),
    "O1 of half": (torch.float16, {"level": "O1"}),
    "O2 of half": (torch.float16, {"level": "O2"}),
}


def check_trains(amp: Any, model: nn.Module, optimizer: Any) -> None:
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    amp.backward(model(X).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()
    after = optimizer.param_groups[0]["params"]
    assert all(bool((p != q).any()) for p, q in zip(before, after, strict=True))


@pytest.mark.parametrize("first_ends", [True, False])
@pytest.mark.parametrize("pair", [Pair, OneWeight])
@pytest.mark.parametrize("case", FROZEN)
def test_a_frozen_base_that_keeps_its_dtype_is_shared(
    case: str, pair: Any, first_ends: bool
) -> None:
    """As two sets of adapters on one base: both train, also after one of them has ended."""
    dtype, level = FROZEN[case]
    models = pair(dtype=dtype, frozen=True)
    before = models.looks()
    optimizers = models.optimizers()
    made = [
        (tritonamp.enable(model, optimizer, **level), model, optimizer)
        for model, optimizer in zip(models.models, optimizers, strict=True)
    ]
    for one in made:
        check_trains(*one)
    made.pop(0 if first_ends else 1)[0].disable()
    check_trains(*made[0])
    made[0][0].disable()
    assert models.shared[0].weight.dtype is dtype
    assert models.looks()[: len(before) // 2] == before[: len(before) // 2], "classes"


@pytest.mark.parametrize("level", [{"level": "O2"}, {"level": "O3"}], ids=str)
def test_a_frozen_base_that_is_cast_is_refused(level: dict[str, str]) -> None:
    models = Pair(frozen=True)
    of_a, of_b = models.optimizers()
    for first, second in (("O1", level), (level["level"], {"level": "O1"})):
        with tritonamp.enable(models.a, of_a, level=first):
            before = models.looks()
            with pytest.raises(ValueError, match=r"'trunk\.0\..*, and enabling changes its dtype"):
                tritonamp.enable(models.b, of_b, **second)
            assert models.looks() == before


def test_a_frozen_base_that_one_of_two_models_keeps_in_fp32_is_shared() -> None:
    """The number of a model in ``fp32_modules`` counts where the base is looked at, too."""
    models, other = Pair(frozen=True), nn.Linear(2, 2)
    of_a, of_b = models.optimizers()
    with tritonamp.enable(models.a, of_a, level="O1"):
        with pytest.raises(ValueError, match=r"'trunk\.0\..*, and enabling changes its dtype"):
            tritonamp.enable([other, models.b], of_b, level="O2")
        with tritonamp.enable([other, models.b], of_b, level="O2", fp32_modules=["1.trunk"]):
            assert models.shared[0].weight.dtype is torch.float32


def test_a_model_without_an_optimizer_shares_what_keeps_its_dtype() -> None:
    """As one that only evaluates: there is no second loss scale."""
    models = Pair()
    of_a, _ = models.optimizers()
    train = tritonamp.enable(models.a, of_a, level="O1")
    evaluate = tritonamp.enable(models.b, level="O1")
    with torch.no_grad():
        expected = models.b(X)
    train.disable()
    with torch.no_grad():
        assert torch.equal(models.b(X), expected)
    evaluate.disable()


def test_norms_that_an_amp_has_given_a_class() -> None:
    """Only their own Amp takes the class off again."""
    models = Pair(frozen=True)
    models.shared.append(LlamaRMSNorm(4).requires_grad_(False))
    of_a, of_b = models.optimizers()
    first = tritonamp.enable(models.a, of_a, level="O1", fuse_norms=False, keep_norms_fp32=False)
    second = tritonamp.enable(models.b, of_b, level="O1")
    installed = type(models.shared[1])
    first.disable()
    assert type(models.shared[1]) is installed is not LlamaRMSNorm
    second.disable()
    assert type(models.shared[1]) is LlamaRMSNorm


def test_a_part_of_an_enabled_model_is_refused() -> None:
    models = Pair()
    refused = pytest.raises(ValueError, match="is the submodule 'base' of the OnBase that is")
    with tritonamp.enable(models.a, level="O1"), refused:
        tritonamp.enable(models.shared, level="O1")


def test_modules_without_tensors_are_shared() -> None:
    relu = nn.ReLU()
    models = [nn.Sequential(nn.Linear(4, 4), relu) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    made = [tritonamp.enable(m, o) for m, o in zip(models, optimizers, strict=True)]
    for amp in made:
        amp.disable()


def test_models_that_are_gone_share_nothing() -> None:
    models = Pair()
    tritonamp.enable(models.a, models.optimizers()[0], level="O1")
    gone = weakref.ref(models.a)
    del models.a, models.models
    gc.collect()
    assert gone() is None
    tritonamp.enable(models.b, torch.optim.SGD(models.b.parameters())).disable()
