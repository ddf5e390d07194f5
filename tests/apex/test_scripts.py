"""Scripts as they were written for apex, with one import changed: they run, and what they train
learns.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tritonamp.apex import amp
from tritonamp.apex.amp import _amp_state
from tritonamp.apex.optimizers import FusedAdam

LEVELS = ["O0", "O1", "O2", "O3"]


# one GPU: training, evaluation, a checkpoint


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.fc(nn.functional.max_pool2d(x, 2).flatten(1))


def quadrants(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images with one bright quarter, and which it is."""
    generator = torch.Generator().manual_seed(n)
    y = torch.randint(0, 4, (n,), generator=generator)
    x = 0.3 * torch.randn(n, 1, 8, 8, generator=generator)
    for image, quarter in zip(x, y.tolist(), strict=True):
        row, column = 4 * (quarter // 2), 4 * (quarter % 2)
        image[0, row : row + 4, column : column + 4] += 1
    return x.to(device), y.to(device)


@pytest.mark.smoke
@pytest.mark.steps
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, FusedAdam])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_single_gpu_script(
    opt_level: str, optimizer_class: Any, device: torch.device, tmp_path: Path
) -> None:
    model = Classifier().to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    if opt_level in ("O1", "O2"):
        _amp_state.loss_scalers[0]._loss_scale = 2.0**10  # as it is after the first steps

    for epoch in range(20):
        model.train()
        images, target = quadrants(64, device)
        optimizer.zero_grad()
        loss = criterion(model(images), target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
        optimizer.step()
        scheduler.step()

        model.eval()
        with torch.no_grad():
            images, target = quadrants(65, device)
            accuracy = (model(images).argmax(1) == target).float().mean().item()
        if epoch == 15:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "amp": amp.state_dict(),
            }
            torch.save(state, tmp_path / "checkpoint.pt")
    assert accuracy > 0.9

    checkpoint = torch.load(tmp_path / "checkpoint.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    plain = Classifier().to(device)
    plain.load_state_dict(checkpoint["model"])


# a GAN: two models, two optimizers, two or three losses


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (
            nn.ConvTranspose2d(4, 8, 4),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 4, 2, 1),
        )
        self.main = nn.Sequential(*layers, nn.Tanh())

    def forward(self, noise: Tensor) -> Tensor:
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = (
            nn.Conv2d(1, 8, 4, 2, 1),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 1, 4),
        )
        self.main = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return self.main(images).view(-1)


def gan(opt_level: str, num_losses: int, device: torch.device) -> Any:
    models = [Discriminator().to(device), Generator().to(device)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.005, betas=(0.5, 0.999)) for m in models]
    result = amp.initialize(
        models, optimizers, opt_level=opt_level, num_losses=num_losses, verbosity=0
    )
    if _amp_state.opt_properties.loss_scale == "dynamic":
        for i, scaler in enumerate(_amp_state.loss_scalers):
            scaler._loss_scale = 2.0 ** (8 + i)
    return result


@pytest.mark.steps
@pytest.mark.parametrize("opt_level", LEVELS)
def test_gan_with_two_losses(opt_level: str, device: torch.device) -> None:
    """Hinge losses; the fakes are made once, the discriminator learns first."""
    (net_d, net_g), (optimizer_d, optimizer_g) = gan(opt_level, 2, device)
    gaps, before = [], [p.detach().clone() for p in net_g.parameters()]
    for _ in range(30):
        real, noise = (
            torch.full((16, 1, 8, 8), 0.5, device=device),
            torch.randn(16, 4, 1, 1, device=device),
        )
        fake = net_g(noise)
        optimizer_d.zero_grad()
        out_real, out_fake = net_d(real), net_d(fake.detach())
        loss_d = torch.relu(1 - out_real).mean() + torch.relu(1 + out_fake).mean()
        with amp.scale_loss(loss_d, optimizer_d, loss_id=0) as scaled:
            scaled.backward()
        optimizer_d.step()
        optimizer_g.zero_grad()
        loss_g = -net_d(fake).mean()
        with amp.scale_loss(loss_g, optimizer_g, loss_id=1) as scaled:
            scaled.backward()
        optimizer_g.step()
        gaps.append((out_real.mean() - out_fake.mean()).item())
    assert gaps[-1] > gaps[0] and all(gap == gap for gap in gaps)
    assert not any(map(torch.equal, before, (p.detach() for p in net_g.parameters())))
    if opt_level in ("O1", "O2"):
        scales = [(s["loss_scale"], s["unskipped"]) for s in amp.state_dict().values()]
        assert scales == [(2.0**8, 30), (2.0**9, 30)]


@pytest.mark.steps
@pytest.mark.parametrize("opt_level", LEVELS)
def test_dcgan_with_three_losses(opt_level: str, device: torch.device) -> None:
    """Real and fake batches have a backward and a scale each, and one step takes both."""
    (net_d, net_g), (optimizer_d, optimizer_g) = gan(opt_level, 3, device)
    criterion = nn.BCEWithLogitsLoss()
    losses = []
    for _ in range(30):
        net_d.zero_grad()
        real = torch.full((16, 1, 8, 8), 0.5, device=device)
        label = torch.full((16,), 1.0, device=device)
        loss_real = criterion(net_d(real), label)
        with amp.scale_loss(loss_real, optimizer_d, loss_id=0) as scaled:
            scaled.backward()
        fake = net_g(torch.randn(16, 4, 1, 1, device=device))
        label.fill_(0.0)
        loss_fake = criterion(net_d(fake.detach()), label)
        with amp.scale_loss(loss_fake, optimizer_d, loss_id=1) as scaled:
            scaled.backward()
        optimizer_d.step()

        net_g.zero_grad()
        label.fill_(1.0)
        with amp.scale_loss(criterion(net_d(fake), label), optimizer_g, loss_id=2) as scaled:
            scaled.backward()
        optimizer_g.step()
        losses.append((loss_real + loss_fake).item())
    assert min(losses[-5:]) < losses[0] and all(loss == loss for loss in losses)
    if opt_level in ("O1", "O2"):
        scales = [(s["loss_scale"], s["unskipped"]) for s in amp.state_dict().values()]
        assert scales == [(2.0**8, 30), (2.0**9, 30), (2.0**10, 30)]


# data parallel: two processes


PARALLEL = """
import sys
import torch
from torch import nn
from tritonamp.apex import amp
from tritonamp.apex.parallel import DistributedDataParallel as DDP

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
store = f"file://{folder}/meeting"
torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)

for opt_level in ("O1", "O2"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=opt_level, verbosity=0)
    model = DDP(model)
    torch.manual_seed(rank)
    x, y = torch.randn(32, 16), torch.randn(32, 2)  # each rank its own
    losses = []
    for t in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        if t == 3 and rank == 1:
            loss = loss * float("inf")  # one rank alone overflows: both skip
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    masters = [p.detach() for p in amp.master_params(optimizer)]
    params = [p.detach() for p in model.parameters()], masters
    result = {"losses": losses, "params": params, "amp": amp.state_dict()}
    torch.save(result, f"{folder}/{opt_level}-rank{rank}.pt")
    amp._amp_state.handle._deactivate()

torch.distributed.destroy_process_group()
"""


@pytest.mark.ranks
@pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="two processes on the CPU meet through gloo"
)
def test_distributed_data_parallel(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PARALLEL, str(rank), str(tmp_path)],
            cwd=tmp_path,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    for opt_level in ("O1", "O2"):
        results = [torch.load(tmp_path / f"{opt_level}-rank{rank}.pt") for rank in range(2)]
        for of_first, of_second in zip(*(result["params"] for result in results), strict=True):
            assert all(map(torch.equal, of_first, of_second))
        params, masters = results[0]["params"]
        assert all(
            torch.equal(param, master.to(param.dtype))
            for param, master in zip(params, masters, strict=True)
        )
        assert {param.dtype for param in params} == {
            torch.float32 if opt_level == "O1" else torch.float16
        }
        states = [result["amp"] for result in results]
        assert states == [{"loss_scaler0": {"loss_scale": 32768.0, "unskipped": 16}}] * 2
        assert all(result["losses"][-1] < result["losses"][0] for result in results)
