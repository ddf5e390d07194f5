"""``fp32_modules`` and ``fp32_results`` of several models: names with and without a number."""

from typing import Any

import pytest
import torch
from torch import nn

import tritonamp

FP16, FP32 = torch.float16, torch.float32


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def models() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Critic()]


def in_fp32(given: list[nn.Module]) -> set[str]:
    """Return the names of FP32 modules, which begin with the number of a model."""
    dtypes = {f"{i}.{n}": p.dtype for i, m in enumerate(given) for n, p in m.named_parameters()}
    assert {*dtypes.values()} <= {FP16, FP32}
    return {name.rpartition(".")[0] for name, dtype in dtypes.items() if dtype is FP32}


@pytest.mark.parametrize(
    ("selection", "kept"),
    [
        (["1.head"], {"1.head"}),
        (["head"], {"1.head"}),
        (["0.1"], {"0.1"}),
        (["1"], {"0.1"}),
        (["0.0", "head"], {"0.0", "1.head"}),
        ([nn.Linear], {"0.0", "0.1", "1.head"}),
    ],
)
def test_the_number_of_a_model_comes_first(selection: Any, kept: set[str]) -> None:
    given = models()
    with tritonamp.enable(given, level="O2", fp32_modules=selection):
        assert in_fp32(given) == kept


@pytest.mark.parametrize("field", ["fp32_modules", "fp32_results"])
@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("1.haed", ": did you mean '1.head'?"),
        ("2.tail", "; its modules are 0.0, 0.1, 1.head"),
        (nn.Conv2d, "; its modules are 0.0, 0.1, 1.head"),
    ],
)
def test_what_no_model_has_is_refused(field: str, wanted: Any, told: str) -> None:
    given = models()
    with pytest.raises(ValueError, match=rf"{field}: .* matches no module{told.strip('?')}"):
        tritonamp.enable(given, level="O2", **{field: [wanted]})
    assert type(given[1]) is Critic


@pytest.mark.parametrize("results", [False, True])
def test_a_healed_policy_enables_the_next_run(results: bool) -> None:
    given = models()
    with tritonamp.enable(given, level="O2") as amp:
        amp.heal("1.head", results=results)
        policy = amp.policy
    assert (policy.fp32_results if results else policy.fp32_modules) == ("1.head",)
    with tritonamp.enable(given, policy=policy):
        assert in_fp32(given) == (set() if results else {"1.head"})
        sums = given[1](torch.full((2, 4), 6e4))
        assert sums.dtype is FP32


def test_a_whole_model_is_not_in_the_policy() -> None:
    given = models()
    with tritonamp.enable(given, level="O2") as amp:
        amp.heal("1")
        assert given[1].head.weight.dtype is FP32
        policy = amp.policy
    assert policy.fp32_modules == ()
    tritonamp.enable(given, policy=policy).disable()


def test_an_already_half_model_is_named_by_its_number() -> None:
    """Its bfloat16 parameters do not count where they stay FP32."""
    given = models()
    with torch.no_grad():
        given[1].head.weight.fill_(1e5)
    given[1].bfloat16()
    with pytest.raises(ValueError, match="head"):
        tritonamp.enable(given, level="O2", dtype=FP16)
    tritonamp.enable(given, level="O2", dtype=FP16, fp32_modules=["1.head"]).disable()
