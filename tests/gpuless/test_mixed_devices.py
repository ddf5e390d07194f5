"""Parameters, losses and loss scales on the CPU and on the GPU together.

What the CPU reads of the GPU's results it has to wait for.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpuless import driver
from gpuless.interpreter import FUSES
from gpuless.steps import by_scaler, clipped, plain, unscaled
from runs import OPTIMIZERS, Training
from torch import Tensor, nn

import tritonamp
from tritonamp.kernels import reduce, softmax


class HostEmbedding(nn.Module):
    """A large embedding in main memory, the rest on a device."""

    def __init__(self, device: str, loss_on: str, embedding_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding, linear = nn.Embedding(16, 8), nn.Linear(8, 4).to(device)
        parts = {"embedding": embedding, "linear": linear}
        for name in parts if embedding_first else reversed(parts):
            self.add_module(name, parts[name])
        self.device, self.loss_on = device, loss_on

    def forward(self, indices: Tensor) -> Tensor:
        output = self.linear(self.embedding(indices).to(self.device))
        return output.to(self.loss_on).square().sum()


Step = Callable[[Any], None]
FACTORS = 1.0, 1.0, float("inf"), 1.0


class OnBoth(Training):
    """A model that stays where its parts are, and the losses of one batch after another."""

    def __init__(self, model: HostEmbedding, kind: str) -> None:
        self.model, self.optimizer = model, OPTIMIZERS[kind](model.parameters(), lr=0.1)
        self.optimizers = [self.optimizer]
        scaler = tritonamp.GradScaler(model.loss_on)
        self.amp = tritonamp.enable(model, self.optimizer, level="O0", scaler=scaler)
        self.losses = (model(torch.tensor([i, i + 1])) * factor for i, factor in enumerate(FACTORS))

    def loss(self, x: Tensor | None = None) -> Tensor:
        return next(self.losses)

    def clip(self) -> None:
        """No clipping, because torch adds norms on two devices in another order."""


def trained(model: HostEmbedding, kind: str, step: Step) -> list[Any]:
    with OnBoth(model, kind) as run:
        for _ in FACTORS:
            step(run)
            run.zero_grad()
        scale = run.amp.scaler.get_scale()
    return [scale, model.embedding.weight.tolist(), model.linear.weight.tolist()]


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Rprop"])
@pytest.mark.parametrize("step", [plain, clipped, unscaled, by_scaler])
@pytest.mark.parametrize("loss_on", ["cpu", "cuda"])
@pytest.mark.parametrize("embedding_first", [True, False])
def test_parameters_on_both(
    cuda: torch.device, kind: str, step: Step, loss_on: str, embedding_first: bool
) -> None:
    expected = trained(HostEmbedding("cpu", "cpu", embedding_first), kind, step)
    found = trained(HostEmbedding("cuda", loss_on, embedding_first), kind, step)
    # CUDA adds products up in another order, and each step passes a few ulps on
    allowed = 0.0 if driver.is_loaded() else 1e-5
    torch.testing.assert_close(found, expected, rtol=allowed, atol=allowed)


def test_losses_on_both(cuda: torch.device, compiled: bool) -> None:
    """The scale stays where the first loss was."""

    def losses_on(device: str, places: list[str]) -> tuple[float, Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = tritonamp.GradScaler(init_scale=4.0)
        amp = tritonamp.enable(model, optimizer, level="O0", scaler=scaler)
        for place, factor in zip(places, FACTORS, strict=True):
            loss = model(torch.ones(2, 4, device=device)).sum().to(place) * factor
            amp.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        scale = scaler.get_scale()
        amp.disable()
        return scale, model.weight.detach().cpu()

    expected = losses_on("cpu", ["cpu"] * 4)
    for places in ["cuda", "cpu", "cpu", "cuda"], ["cpu", "cuda", "cuda", "cpu"]:
        allowed = 1e-6 if compiled or FUSES else 0.0
        found = losses_on("cuda", places)
        torch.testing.assert_close(found, expected, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("function", [softmax.softmax, reduce.sum])
def test_an_explicit_kernel_on_the_cpu(cuda: torch.device, function: Any) -> None:
    args = (
        (1, torch.float16, False) if function is softmax.softmax else ((1,), False, torch.float16)
    )
    message = (
        "backend='triton' cannot run: cpu is not an NVIDIA GPU. Use backend='auto' or "
        "backend='eager'"
    )
    with pytest.raises(tritonamp.UnsupportedDeviceError, match=message):
        function(torch.ones(2, 4).half(), *args, "triton")
