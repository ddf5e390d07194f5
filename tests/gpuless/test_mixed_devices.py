"""Parameters, losses and loss scales on the CPU and on the GPU together.

What the CPU reads of the GPU's results it has to wait for.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpuless import driver
from gpuless.interpreter import FUSES
from torch import Tensor, nn

import tritonamp
from tritonamp.kernels import reduce, softmax


class Net(nn.Module):
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


def plain(amp: Any, loss: Tensor, optimizer: Any) -> None:
    amp.backward(loss)
    optimizer.step()


def clipped(amp: Any, loss: Tensor, optimizer: Any) -> None:
    amp.backward(loss)
    amp.clip_grad_norm_(0.5)
    optimizer.step()


def unscaled(amp: Any, loss: Tensor, optimizer: Any) -> None:
    amp.backward(loss)
    amp.unscale_()
    optimizer.step()


def by_scaler(amp: Any, loss: Tensor, optimizer: Any) -> None:
    amp.scaler.scale(loss).backward()
    amp.scaler.unscale_(optimizer)
    amp.scaler.step(optimizer)
    amp.scaler.update()


Step = Callable[[Any, Tensor, Any], None]
FACTORS = 1.0, 1.0, float("inf"), 1.0


def train(net: Net, kind: str, step: Step) -> list[Any]:
    makers = {
        "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
        "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
        "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    }
    optimizer = makers[kind](net.parameters())
    scaler = tritonamp.GradScaler(net.loss_on)
    amp = tritonamp.enable(net, optimizer, level="O0", scaler=scaler)
    for i, factor in enumerate(FACTORS):
        step(amp, net(torch.tensor([i, i + 1])) * factor, optimizer)
        optimizer.zero_grad()
    scale = scaler.get_scale()
    amp.disable()
    return [scale, net.embedding.weight.tolist(), net.linear.weight.tolist()]


@pytest.mark.parametrize("kind", ["adamw", "sgd", "rprop"])
@pytest.mark.parametrize("step", [plain, clipped, unscaled, by_scaler])
@pytest.mark.parametrize("loss_on", ["cpu", "cuda"])
@pytest.mark.parametrize("embedding_first", [True, False])
def test_parameters_on_both(
    cuda: torch.device, kind: str, step: Step, loss_on: str, embedding_first: bool
) -> None:
    expected = train(Net("cpu", "cpu", embedding_first), kind, step)
    found = train(Net("cuda", loss_on, embedding_first), kind, step)
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
    args = (1, torch.float16) if function is softmax.softmax else ((1,), False, torch.float16)
    message = (
        "backend='triton' cannot run: cpu is not an NVIDIA GPU. Use backend='auto' or "
        "backend='eager'"
    )
    with pytest.raises(tritonamp.UnsupportedDeviceError, match=message):
        function(torch.ones(2, 4).half(), *args, "triton")
