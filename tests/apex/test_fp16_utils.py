"""tritonamp.apex.fp16_utils: half models, masters and loss scales by hand."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tritonamp.apex.fp16_utils import (
    BN_convert_float,
    DynamicLossScaler,
    FP16_Optimizer,
    FP16Model,
    LossScaler,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)

INF, NAN = float("inf"), float("nan")


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, affine=False),
        nn.Flatten(),
        nn.Linear(16, 2),
    )


@pytest.mark.parametrize("how", ["network_to_half", "convert_network", "FP16Model"])
def test_half_networks_keep_batch_norms(how: str, device: torch.device) -> None:
    net = conv_net().to(device)
    x = torch.randn(5, 3, 4, 4, device=device)
    expected = copy.deepcopy(net)(x)
    make: Any = {"network_to_half": network_to_half, "FP16Model": FP16Model}
    model = make[how](net) if how in make else convert_network(net, torch.half)
    dtypes = [p.dtype for p in net.parameters()]
    assert dtypes == [torch.float16] * 2 + [torch.float32] * 2 + [torch.float16] * 2
    assert net[1].running_mean.dtype is torch.float32
    assert net[2].running_mean.dtype is torch.float16
    y = model(x.half() if how == "convert_network" else x)
    assert y.dtype is torch.float16
    # of outputs of size 1 through four layers whose weights and activations are rounded
    torch.testing.assert_close(
        y.float(), expected, rtol=0, atol=32 * torch.finfo(torch.float16).eps
    )


def test_small_conversions(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(2, 2)).to(device)
    net(torch.ones(1, 2, device=device)).sum().backward()
    convert_module(net, torch.half)  # has no parameters of its own
    assert net[0].weight.dtype is torch.float32
    convert_module(net[0], torch.half)
    assert net[0].weight.dtype is net[0].weight.grad.dtype is torch.float16
    assert BN_convert_float(nn.BatchNorm1d(2).half()).weight.dtype is torch.float32
    assert tofp16()(torch.ones(1)).dtype is torch.float16
    assert to_python_float(torch.tensor(2.0)) == to_python_float([2.0]) == 2.0


@pytest.mark.parametrize("flat", [False, True])
def test_masters_by_hand(flat: bool, device: torch.device) -> None:
    """The loop of apex's documentation, against FP32."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(device)
    x = torch.randn(8, 3, device=device)
    net[1].bias.requires_grad_(False)
    net.half()
    reference = copy.deepcopy(net).float()
    params, masters = prep_param_lists(net, flat_master=flat)
    assert len(params) == 3 and len(masters) == (1 if flat else 3)
    optimizer, plain = (
        torch.optim.SGD(masters, lr=0.1),
        torch.optim.SGD(reference.parameters(), lr=0.1),
    )
    for _ in range(3):
        net.zero_grad()
        (net(x.half()).float().square().mean() * 128).backward()
        model_grads_to_master_grads(params, masters, flat_master=flat)
        for master in masters:
            master.grad = master.grad / 128
        clip_grad_norm(masters, 100.0)
        optimizer.step()
        master_params_to_model_params(params, masters, flat_master=flat)
        plain.zero_grad()
        reference(x.half().float()).square().mean().backward()
        plain.step()
    values = torch.cat([m.detach().reshape(-1) for m in masters])
    expected = torch.cat(
        [p.detach().reshape(-1) for p in reference.parameters() if p.requires_grad]
    )
    torch.testing.assert_close(values, expected, rtol=0, atol=8 * torch.finfo(torch.float16).eps)
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in params]), values.half())


def test_flat_masters_are_of_one_dtype() -> None:
    with pytest.raises(
        ValueError,
        match=r"flat_master=True: expected .*one dtype, got torch\.float16, torch\.float32",
    ):
        prep_param_lists(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).half()), flat_master=True)


def test_masters_without_a_gradient() -> None:
    net = nn.Linear(2, 2).half()
    params, masters = prep_param_lists(net)
    masters[0].grad = torch.ones(2, 2)
    params[1].grad = torch.ones(2).half()
    model_grads_to_master_grads(params, masters)
    assert masters[0].grad is None
    assert masters[1].grad is not None and masters[1].grad.dtype is torch.float32


def test_loss_scalers(device: torch.device) -> None:
    fixed, dynamic = LossScaler(8.0), DynamicLossScaler(init_scale=4.0, scale_window=2)
    param = nn.Parameter(torch.ones(2, device=device))
    fixed.backward(param.sum())
    assert param.grad is not None and param.grad.tolist() == [8.0, 8.0]
    assert not dynamic.has_overflow([param])
    param.grad[0] = NAN
    assert dynamic.has_overflow([param]) and not fixed.has_overflow([param])
    scales = []
    for overflow in (True, True, True, False, False, False, False):
        dynamic.update_scale(overflow)
        scales.append(dynamic.loss_scale)
    assert scales == [2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0]  # not below 1
    fixed.update_scale(True)
    assert fixed.loss_scale == 8.0
    assert dynamic.scale_gradient(None, [torch.ones(1)], None)[0].item() == 4.0


def half_net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return BN_convert_float(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(device).half()
    )


SCALES: dict[str, dict[str, Any]] = {
    "1": {},
    "static": {"static_loss_scale": 128.0},
    "dynamic": {
        "dynamic_loss_scale": True,
        "dynamic_loss_args": {"init_scale": 1024.0, "scale_window": 6},
    },
}


def loss_of(net: nn.Module, batch: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(16, 4, generator=generator).to(next(net.parameters()).device)
    return (net(x.half()).float() - x.sum(1, keepdim=True)).square().mean()


@pytest.mark.parametrize("scale", SCALES)
def test_fp16_optimizer_trains(scale: str, device: torch.device) -> None:
    net = half_net(device)
    optimizer = FP16_Optimizer(
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), **SCALES[scale]
    )
    losses = []
    for _ in range(15):
        loss = loss_of(net)
        optimizer.zero_grad()
        optimizer.backward(loss)
        norm = optimizer.clip_master_grads(5.0)
        assert 0 < float(norm) < INF
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(
        p.dtype is torch.float32 for group in optimizer.param_groups for p in group["params"]
    )
    for half, master in zip(
        optimizer.fp16_groups[0], optimizer.fp32_from_fp16_groups[0], strict=True
    ):
        assert torch.equal(half, master.half())
    # doubled after 5 and 11
    assert optimizer.loss_scale == {"1": 1.0, "static": 128.0, "dynamic": 4096.0}[scale]


def test_fp16_optimizer_takes_over_half_state(device: torch.device) -> None:
    param = nn.Parameter(torch.ones(3, dtype=torch.float16, device=device))
    inner = torch.optim.SGD([param], lr=0.1, momentum=0.9)
    param.grad = torch.full_like(param, 0.1)
    inner.step()
    momentum = inner.state[param]["momentum_buffer"]
    (master,) = FP16_Optimizer(inner, verbose=False).fp32_from_fp16_groups[0]
    assert momentum.dtype is torch.float16 and list(inner.state) == [master]
    widened = inner.state[master]["momentum_buffer"]
    assert widened.dtype is torch.float32 and torch.equal(widened, momentum.float())


@pytest.mark.parametrize("together", [True, False])
def test_fp16_optimizer_accumulates_true_gradients(together: bool, device: torch.device) -> None:
    net = half_net(device)
    optimizer = FP16_Optimizer(torch.optim.SGD(net.parameters(), lr=0.05), static_loss_scale=64.0)
    optimizer.backward(loss_of(net, 1), update_master_grads=together)
    optimizer.backward(loss_of(net, 2), update_master_grads=together)
    if not together:
        optimizer.update_master_grads()
    data = optimizer.inspect_master_grad_data()
    reference = half_net(device)
    reference[1].load_state_dict(half_net(device)[1].state_dict())
    (loss_of(reference, 1) + loss_of(reference, 2)).backward()
    assert data is not None
    for grad, param in zip(data[0], reference.parameters(), strict=True):
        assert grad is not None and param.grad is not None and grad.dtype is torch.float32
        size = param.grad.float().abs().max().item()  # sums of half gradients of this size
        torch.testing.assert_close(
            grad, param.grad.float(), rtol=0, atol=4 * size * torch.finfo(torch.float16).eps
        )


@pytest.mark.parametrize("scale", SCALES)
def test_fp16_optimizer_skips(
    scale: str, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    net = half_net(device)
    optimizer = FP16_Optimizer(
        torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), **SCALES[scale]
    )
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.backward(loss_of(net) * INF)
    assert optimizer.overflow and optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    assert optimizer.loss_scale == {"1": 1.0, "static": 128.0, "dynamic": 512.0}[scale]
    moves = "reducing loss scale to" if scale == "dynamic" else "loss scale stays"
    line = f"Gradient overflow.  Skipping step, {moves} {optimizer.loss_scale}\n"
    assert capsys.readouterr().out == line
    optimizer.zero_grad(set_grads_to_None=True)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("bad", [1, 30])
@pytest.mark.parametrize("scale", SCALES)
def test_fp16_optimizer_closure(scale: str, bad: int, device: torch.device) -> None:
    """Called again at a lower scale; where that does not help, there is no step."""
    net = half_net(device)
    optimizer = FP16_Optimizer(
        torch.optim.SGD(net.parameters(), lr=0.05), verbose=False, **SCALES[scale]
    )
    before, calls = [p.detach().clone() for p in net.parameters()], 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(net)
        optimizer.backward(loss * INF if calls <= bad else loss)
        return loss

    optimizer.step(closure)
    moved = any(not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    assert moved == (scale == "dynamic" and bad == 1)
    assert calls == (1 if scale != "dynamic" else 2 if bad == 1 else 11)  # from 1024 down to 1


@pytest.mark.parametrize("scale", SCALES)
def test_fp16_optimizer_resumes_bit_for_bit(scale: str, device: torch.device) -> None:
    def build() -> tuple[nn.Module, FP16_Optimizer]:
        net = half_net(device)
        return net, FP16_Optimizer(
            torch.optim.Adam(net.parameters(), lr=0.01), verbose=False, **SCALES[scale]
        )

    def train(net: nn.Module, optimizer: FP16_Optimizer, batches: range) -> None:
        for batch in batches:
            optimizer.zero_grad()
            optimizer.backward(loss_of(net, batch) * (INF if batch == 1 else 1.0))
            optimizer.step()

    net, optimizer = build()
    train(net, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(net, optimizer, range(3, 6))
    file.seek(0)
    saved = torch.load(file)
    other_net, other = build()
    other_net.load_state_dict(saved["net"])
    other.load_state_dict(saved["optimizer"])
    train(other_net, other, range(3, 6))
    assert all(
        torch.equal(a, b) for a, b in zip(net.parameters(), other_net.parameters(), strict=True)
    )
    assert other.loss_scale == optimizer.loss_scale


def test_fp16_optimizer_passes_on_what_is_the_optimizers(device: torch.device) -> None:
    inner = torch.optim.SGD(half_net(device).parameters(), lr=0.5)
    optimizer = FP16_Optimizer(inner)
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.loss_scale = 4.0
    assert inner.param_groups[0]["lr"] == 0.25 and optimizer.loss_scaler.loss_scale == 4.0
    assert optimizer.state is inner.state
    with pytest.raises(RuntimeError, match=r"save state_dict\(\)"):
        copy.copy(optimizer)
    with pytest.raises(
        TypeError, match=r"expected parameters of float32.*got one of torch\.float64"
    ):
        FP16_Optimizer(torch.optim.SGD([nn.Parameter(torch.ones(1).double())], lr=0.1))
