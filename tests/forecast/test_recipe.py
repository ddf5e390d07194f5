"""The README's recipe for a pipeline in float16, on a stand-in and on a tiny one of diffusers;
inputs and weights in bfloat16.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion import StandIn, Transformer, tiny_flux
from torch import Tensor, nn

import tritonamp
from tritonamp.casts import loaded

README = Path(tritonamp.__file__).parent / "forecast" / "README.md"
FP16, BF16 = torch.float16, torch.bfloat16


def recipe() -> list[str]:
    """Return the Python blocks of the README's recipe."""
    _, _, section = README.read_text().partition("## A pipeline that generates")
    return re.findall(r"^```python\n(.*?)^```$", section.partition("\n## ")[0], re.M | re.S)


@pytest.mark.filterwarnings("ignore:::diffusers", "ignore:::transformers")
@pytest.mark.parametrize(
    "make", [StandIn, pytest.param(tiny_flux, marks=pytest.mark.clients)], ids=["stand-in", "Flux"]
)
def test_the_recipe_makes_images_in_float16(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "blocks.0.down"
    if make is tiny_flux:
        pytest.importorskip("diffusers")
        module = "transformer_blocks.0.ff.net.2"
    monkeypatch.chdir(tmp_path)
    pipe = make()
    expected = pipe("a lighthouse").images[0]
    names = {"torch": torch, "tritonamp": tritonamp, "pipe": pipe, "prompt": "a lighthouse"}
    find, generate, explain, heal = recipe()
    exec(find, names)
    exec(generate, names)
    policy, forecast = names["policy"], names["forecast"]
    assert (policy.fp32_results, policy.fp32_modules) == ((module,), ())
    assert policy == forecast.policy and policy.cast_inputs
    # bfloat16 has 8 bits: some roundings of it
    assert (names["image"] - expected).abs().max() < 2.0**-4 * expected.abs().max()
    fields = {"cast_inputs": True, "cast_outputs": BF16}
    with tritonamp.enable(pipe.transformer, dtype=FP16, **fields):
        assert not pipe("a lighthouse").images[0].isfinite().all()
    exec(explain, names)
    exec(heal.replace("blocks.0.down", module), names)
    assert tritonamp.Policy.from_json(Path("policy.json").read_text()).fp32_results == (module,)


class Joined(nn.Module):
    """Joins an input and the result of a layer, which autocast refuses in two half formats."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, other: Tensor, *rest: Tensor) -> Tensor:
        return torch.cat([self.layer(x), other, *rest])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_inputs_in_the_other_half_format_are_cast(level: str) -> None:
    model, x, other = Joined(), torch.randn(2, 4), torch.randn(2, 4).to(BF16)
    forecast = tritonamp.check(model, None, (x, other), level=level, dtype=FP16)
    assert forecast.policy.cast_inputs == ("other",) and not forecast.asked.cast_inputs
    (finding,) = [finding for finding in forecast.findings if finding.kind == "other half"]
    assert finding.where == "other" and not finding.problem
    assert finding.why == "bfloat16 inputs of a forward in float16, which cannot be joined"
    assert "cast_inputs=('other',) (tried: the batch runs)" in finding.advice
    text = forecast.policy.to_json()
    with tritonamp.enable(model, policy=tritonamp.Policy.from_json(text)):
        assert model(x, other).isfinite().all()
    asked = tritonamp.policy.resolve(level, FP16, cast_inputs=("x",))
    assert tritonamp.check(model, None, (x, other), level=asked).policy.cast_inputs == (
        "x",
        "other",
    )
    for policy, given in ((forecast.asked, other.float()), (forecast.policy, other)):
        found = tritonamp.check(model, None, (x, given), level=policy)
        assert "other half" not in [finding.kind for finding in found.findings]


def test_an_input_beyond_float16_in_the_other_half_format() -> None:
    """Its cast overflows, and without the cast nothing runs."""
    model, x, other = Joined(), torch.randn(2, 4), torch.full((2, 4), 1e6).to(BF16)
    forecast = tritonamp.check(model, None, (x, other), dtype=FP16)
    assert [finding.where for finding in forecast.problems][:1] == ["the batch"]
    assert forecast.policy == tritonamp.O0 or forecast.policy.dtype is BF16


def test_float16_is_the_default_for_bfloat16_weights_on_a_gpu_without_bfloat16(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loaded, "takes_bfloat16", lambda device: False)
    model = Transformer().to(BF16).requires_grad_(False)
    batch = {
        "hidden_states": torch.randn(1, 8, 4).to(BF16),
        "prompt_embeds": torch.randn(1, 3, 16).to(BF16),
        "timestep": torch.ones(1).to(BF16),
    }
    forecast = tritonamp.check(model, None, batch)
    assert "loaded in bfloat16, which cpu does not compute in: float16 is used" in caplog.text
    assert forecast.policy.dtype is FP16 and forecast.policy.fp32_results == ("blocks.0.down",)
    with tritonamp.enable(model, policy=tritonamp.Policy.from_json(forecast.policy.to_json())):
        assert model(**batch).isfinite().all()
