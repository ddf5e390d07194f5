"""Models with one product beyond float16, trained at O2 to FP32's loss by each tier of repair."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp

F = nn.functional
N, STEPS = 32, 30
TIERS = {"FP32 results": "fp32_results", "FP32 module": "fp32_modules"}


class SwiGLU(nn.Module):
    """The MLP of a Llama: large activations meet in ``down``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(N, 2 * N, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * N, N, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    """A residual block with RMSNorms around a SwiGLU."""

    wrong = "mlp.down"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.mlp = nn.Linear(8, N), nn.RMSNorm(N), SwiGLU()
        self.final, self.head = nn.RMSNorm(N), nn.Linear(N, 4)
        with torch.no_grad():
            for layer in (self.mlp.gate, self.mlp.up):
                layer.weight.mul_(40)
            self.mlp.down.weight.mul_(2e3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.mlp(self.norm(x))
        return self.head(self.final(x))


class T5LayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(N))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            x = x.to(self.weight.dtype)
        return self.weight * x


class T5(nn.Module):
    """T5's feed-forward layers: ``wo`` leaves float16 in pretrained models."""

    wrong = "wo"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, N), T5LayerNorm()
        self.wi, self.wo = (
            nn.Linear(N, 4 * N, bias=False),
            nn.Linear(4 * N, N, bias=False),
        )
        self.final, self.head = T5LayerNorm(), nn.Linear(N, 4)
        with torch.no_grad():
            self.wi.weight.mul_(300)
            self.wo.weight.mul_(3e3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.wo(torch.relu(self.wi(self.norm(x))))
        return self.head(self.final(x))


class DiT(nn.Module):
    """A DiT block: adaptive LayerNorms without weights, and gates from a condition."""

    wrong = "fc2"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.condition = nn.Linear(8, N), nn.Linear(8, 6 * N)
        self.qkv, self.proj = nn.Linear(N, 3 * N), nn.Linear(N, N)
        self.fc1, self.fc2 = nn.Linear(N, 4 * N), nn.Linear(4 * N, N)
        self.norm1, self.norm2, self.final = (
            nn.LayerNorm(N, elementwise_affine=False) for _ in range(3)
        )
        self.head = nn.Linear(N, 4)
        with torch.no_grad():
            self.fc1.weight.mul_(200)
            self.fc2.weight.mul_(4e3)

    def forward(self, x: Tensor) -> Tensor:
        given, x = x.mean(1), self.first(x)
        parts = self.condition(F.silu(given))[:, None].chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        q, k, v = self.qkv(self.norm1(x) * (1 + scale1) + shift1).chunk(3, -1)
        x = x + gate1 * self.proj(F.scaled_dot_product_attention(q, k, v))
        h = self.norm2(x) * (1 + scale2) + shift2
        x = x + gate2 * self.fc2(F.gelu(self.fc1(h), approximate="tanh"))
        return self.head(self.final(x))


def trained(model: nn.Module, level: str, **fields: Any) -> tuple[list[float], Any]:
    """Return the losses of a training, and facts of the handle."""
    adamw = torch.optim.AdamW(model.parameters(), 1e-2)
    if level != "O0":
        fields["init_scale"] = 2.0**10
    amp = tritonamp.enable(model, adamw, level=level, **fields)
    data, losses = torch.Generator().manual_seed(1), []
    kept = torch.randn(8, 4, generator=data)
    for _ in range(STEPS):
        x = torch.randn(16, 6, 8, generator=data)
        loss = (model(x).float() - x @ kept).pow(2).mean()
        amp.backward(loss)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    facts = amp.stats()["skipped"], sum(p.nbytes for p in model.parameters())
    amp.disable()
    return losses, facts


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("kind", [Llama, T5, DiT])
def test_each_tier_trains_to_the_loss_of_fp32(kind: Any, tier: str) -> None:
    torch.manual_seed(0)
    model = kind()
    expected, _ = trained(copy.deepcopy(model), "O0")
    plain, (skipped, held_before) = trained(copy.deepcopy(model), "O2")
    assert skipped > STEPS // 2  # there is something to repair
    assert math.isnan(plain[-1]) or math.isinf(plain[-1])
    found, (skipped, held) = trained(copy.deepcopy(model), "O2", **{TIERS[tier]: [kind.wrong]})
    assert skipped <= 2
    assert sum(expected[-5:]) < 0.7 * sum(expected[:5])
    assert sum(found[-5:]) == pytest.approx(sum(expected[-5:]), rel=0.05)
    wide = sum(p.numel() for p in model.get_submodule(kind.wrong).parameters())
    more = 2 * wide if tier == "FP32 module" else 0
    assert held == held_before + more  # FP32 results keep no FP32 weights
