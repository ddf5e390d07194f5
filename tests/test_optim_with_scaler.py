"""Optimizers of ``tritonamp.optim`` with a GradScaler, nothing enabled: true FP32 gradients of half
parameters from ``unscale_`` to the step, and both scalers in every combination.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import agree, odd_parameters, same
from runs import batch
from torch import Tensor, nn
from torch.nn import Parameter

import tritonamp
from tritonamp import GradScaler, optim
from tritonamp.apex.parallel.LARC import LARC

INF = float("inf")
SCALE = 2.0**12  # float16 holds the gradients below, scaled
KINDS: dict[str, Any] = {
    "AdamW": optim.AdamW,
    "Adam": optim.Adam,
    "SGD": lambda groups, **options: optim.SGD(groups, momentum=0.9, **options),
    "Lion": optim.Lion,
}
SCALERS: dict[str, type[torch.amp.GradScaler]] = {"torch": torch.amp.GradScaler, "ours": GradScaler}
HALVES = [torch.float16, torch.bfloat16]

each_kind = pytest.mark.parametrize("kind", KINDS)
each_half = pytest.mark.parametrize("half", HALVES, ids=str)


def parameters(device: torch.device, half: torch.dtype) -> list[Parameter]:
    """Half ones of several shapes, one in FP32, and one that never has a gradient."""
    others = batch(2, 2, 3, device=device), batch(3, 7, device=device, dtype=half)
    return [*odd_parameters(device, half), *map(Parameter, others)]


def gradients(params: Sequence[Tensor], steps: int) -> list[list[Tensor]]:
    """From 1e-9, which is 0 in float16, to 1; of the last parameter none."""
    generator = torch.Generator().manual_seed(2)
    return [
        [
            torch.randn(p.shape, generator=generator).to(p.device)
            * 10.0 ** -(9 * torch.rand(p.shape, generator=generator).to(p.device))
            for p in params[:-1]
        ]
        for _ in range(steps)
    ]


def backward(scaler: torch.amp.GradScaler, params: Sequence[Tensor], grads: list[Tensor]) -> None:
    """Give each parameter its gradient, in its own precision."""
    loss = sum((p.float() * g).sum() for p, g in zip(params, grads, strict=False))
    scaler.scale(loss).backward()


def groups_of(params: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.05, "weight_decay": 0.1}]


class ByHand:
    """FP32 masters written by hand: no half parameter reaches the optimizer."""

    def __init__(self, params: Sequence[Parameter], make: Callable[..., Any]) -> None:
        self.params = [Parameter(p.detach().clone()) for p in params]
        self.masters = [Parameter(p.detach().float()) for p in self.params]
        self.optimizer = make(groups_of(self.masters), lr=0.01)

    def step(self, scale: float, clip: float | None) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float() * (1 / scale)
            param.grad = None
        grads = [m.grad for m in self.masters if m.grad is not None]
        if not all(bool(g.isfinite().all()) for g in grads):
            return
        if clip:
            nn.utils.clip_grad_norm_(self.masters, clip)
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [dict(optimizer.state.get(p, {})) for p in params]
    for state in states:
        state.pop("master_param", None)
    return [value for state in states for _, value in sorted(state.items())]


def masters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [optimizer.state.get(p, {}).get("master_param", p.detach().float()) for p in params]


def assert_half_again(params: Sequence[Tensor]) -> None:
    for param in params:
        assert param.grad_dtype == param.dtype
        assert param.grad is None or param.grad.dtype == param.dtype


# the recipe


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("clip", [0.1, None])
@each_half
@each_kind
def test_the_recipe_is_that_of_masters_by_hand(
    device: torch.device,
    kind: str,
    half: torch.dtype,
    clip: float | None,
    micro_batches: int,
    compiled: bool,
) -> None:
    """Bit for bit, with an overflow at the third step, saved and continued after the fifth."""
    exactly = device.type == "cpu" or not compiled
    params, make = parameters(device, half), KINDS[kind]
    hand = ByHand(params, make)
    optimizer, scaler = make(groups_of(params), lr=0.01), GradScaler(device.type, init_scale=SCALE)
    unused = GradScaler(device.type, init_scale=1.0)  # scales by hand
    for i, grads in enumerate(gradients(params, 8)):
        start = [p.detach().clone() for p in params]
        for _ in range(micro_batches):
            backward(scaler, params, grads)
            scale = scaler.get_scale()
            backward(unused, hand.params, [g * scale for g in grads])
        if i == 2:
            params[0].grad[0, 0] = hand.params[0].grad[0, 0] = INF
        scaler.unscale_(optimizer)
        for param, other in zip(params, hand.params, strict=True):
            if param.grad is not None:
                assert param.grad.dtype is torch.float32
                assert torch.equal(param.grad, other.grad.float() / scale)
        if clip:
            nn.utils.clip_grad_norm_(params, clip)
        scaler.step(optimizer)
        scaler.update()
        hand.step(scale, clip)
        assert_half_again(params)
        optimizer.zero_grad()
        agree(exactly, [p.detach() for p in params], [p.detach() for p in hand.params])
        agree(exactly, masters_of(optimizer), [m.detach() for m in hand.masters])
        agree(exactly, state_of(optimizer), state_of(hand.optimizer))
        assert same(start, params) == (i == 2)
        if i == 4:
            params = [Parameter(p.detach().clone()) for p in params]
            saved = copy.deepcopy((optimizer.state_dict(), scaler.state_dict()))
            optimizer, scaler = (
                make(groups_of(params), lr=9.0),
                GradScaler(device.type, init_scale=SCALE),
            )
            optimizer.load_state_dict(saved[0])
            scaler.load_state_dict(saved[1])
    assert params[-1] not in optimizer.state


def test_a_model_in_half(device: torch.device) -> None:
    """As people write it; the parameters are the model's, on any path of autograd."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    opt = optim.AdamW(model.half().parameters(), lr=0.05)
    scaler = GradScaler(device.type, init_scale=SCALE)
    x = torch.randn(16, 6, device=device)
    y = x[:, :3] * 0.5
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(model(x.half()).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        losses.append(loss.item())
        assert norm.dtype is torch.float32 and norm < 65536
    assert losses[-1] < losses[0] / 4


# back to half


def zero_grad_of_a_model(set_to_none: bool) -> Callable[..., None]:
    def clear(params: list[Parameter], optimizer: Any, scaler: GradScaler) -> None:
        nn.ParameterList(params).zero_grad(set_to_none)
        scaler.update()

    return clear


ENDS: dict[str, Callable[[list[Parameter], Any, GradScaler], object]] = {
    "step": lambda params, optimizer, scaler: scaler.step(optimizer),
    "step alone": lambda params, optimizer, scaler: optimizer.step(),
    "update": lambda params, optimizer, scaler: scaler.update(),
    "update(new_scale)": lambda params, optimizer, scaler: scaler.update(8.0),
    "zero_grad": lambda params, optimizer, scaler: optimizer.zero_grad(),
    "zeros": lambda params, optimizer, scaler: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": zero_grad_of_a_model(True),
    "model's zeros": zero_grad_of_a_model(False),
}
CLEAR = ["zero_grad", "zeros", "model.zero_grad", "model's zeros"]


@pytest.mark.parametrize(
    ("end", "bad"), [*((end, False) for end in ENDS), ("step", True), ("update", True)]
)
@each_half
def test_half_gradients_are_back(
    device: torch.device, half: torch.dtype, end: str, bad: bool
) -> None:
    params = parameters(device, half)
    optimizer, scaler = optim.AdamW(params), GradScaler(device.type, init_scale=2.0**8)
    first, second = gradients(params, 2)
    backward(scaler, params, first)
    if bad:
        params[0].grad[0, 0] = INF
    own = [p.grad for p in params]
    scaler.unscale_(optimizer)
    if end not in CLEAR:
        nn.utils.clip_grad_norm_(params[3:], 0.5)
    true = [p.grad.clone() for p in params[:-1]]
    ENDS[end](params, optimizer, scaler)
    assert_half_again(params)
    for param, grad, written in zip(params, true, own, strict=False):
        if "zero_grad" not in end:  # in the tensor that a CUDA graph of the backward writes
            assert param.grad is written or param.dtype is torch.float32
            expected = torch.zeros_like(grad) if end in CLEAR else grad
            assert torch.equal(param.grad, expected.to(param.dtype))
    if end in CLEAR:
        scaler.update(1.0)
        backward(scaler, params, second)
        assert_half_again(params)
        for param, grad in zip(params, second, strict=False):
            assert torch.equal(param.grad, grad.to(param.dtype))


def test_a_model_that_clears_its_gradients_at_once(device: torch.device) -> None:
    """Without ``update`` in between the scaler knows nothing of it; the backward does."""
    params = parameters(device, torch.float16)
    optimizer, scaler = optim.AdamW(params), GradScaler(device.type, init_scale=SCALE)
    for grads in gradients(params, 2):
        backward(scaler, params, grads)
    scaler.unscale_(optimizer)
    nn.ParameterList(params).zero_grad()
    backward(scaler, params, grads)
    assert all(p.grad.dtype == p.dtype for p in params[:-1])


def test_gradients_that_the_user_replaces(device: torch.device) -> None:
    params = parameters(device, torch.float16)[:1]
    optimizer, scaler = optim.SGD(params, lr=1.0), GradScaler(device.type, init_scale=SCALE)
    backward(scaler, params, [torch.ones(3, 5, device=device)])
    scaler.unscale_(optimizer)
    params[0].grad = params[0].grad * 2.0**-20
    scaler.step(optimizer)
    start = parameters(device, torch.float16)[0].float()
    assert torch.equal(optimizer.state[params[0]]["master_param"], start - 2.0**-20)
    assert_half_again(params)


def test_grad_dtype_of_the_user_stays(device: torch.device) -> None:
    params = parameters(device, torch.float16)[:1]
    params[0].grad_dtype = torch.float32
    optimizer, scaler = optim.SGD(params, lr=1.0), GradScaler(device.type, init_scale=SCALE)
    backward(scaler, params, [torch.full((3, 5), 1e-9, device=device)])
    scaler.unscale_(optimizer)
    torch.testing.assert_close(params[0].grad, torch.full((3, 5), 1e-9, device=device))
    scaler.step(optimizer)
    assert params[0].grad_dtype is torch.float32
    assert params[0].grad.dtype is torch.float32


def test_a_step_that_raises_can_be_repeated(device: torch.device) -> None:
    params, others = (parameters(device, torch.float16) for _ in range(2))
    optimizer, scaler = optim.AdamW(params), GradScaler(device.type, init_scale=SCALE)
    hand = ByHand(others, optim.AdamW)
    hand.optimizer = optim.AdamW(hand.masters)
    grads = gradients(params, 1)[0]
    backward(scaler, params, grads)
    backward(scaler, hand.params, grads)
    scaler.unscale_(optimizer)

    def fails(*_: Any) -> None:
        raise MemoryError

    hook = optimizer.register_step_pre_hook(fails)
    with pytest.raises(MemoryError):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
    assert params[0].grad.dtype is torch.float32
    hook.remove()
    scaler.step(optimizer)
    hand.step(scaler.get_scale(), None)
    assert same(params, hand.params)


def test_misuse_is_torchs(device: torch.device) -> None:
    params = parameters(device, torch.float16)
    optimizer, scaler = optim.AdamW(params), GradScaler(device.type, init_scale=SCALE)
    backward(scaler, params, gradients(params, 1)[0])
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optim"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last upda"):
        scaler.step(optimizer)


def test_disabled_it_leaves_half_gradients(device: torch.device) -> None:
    params = parameters(device, torch.float16)
    optimizer, scaler = optim.AdamW(params), GradScaler(device.type, enabled=False)
    backward(scaler, params, gradients(params, 1)[0])
    scaler.unscale_(optimizer)
    assert_half_again(params)
    scaler.step(optimizer)
    assert "master_param" in optimizer.state[params[0]]


@each_half
def test_sparse_gradients(device: torch.device, half: torch.dtype) -> None:
    """Rows that occur twice are added in FP32: their sum would be inf in float16."""
    table = nn.Embedding(6, 4, sparse=True, device=device).to(half)
    scaler = GradScaler(device.type, init_scale=2.0**16)
    optimizer = optim.SGD(table.parameters(), lr=0.5, momentum=0.5)
    master = Parameter(table.weight.detach().float())
    by_hand = optim.SGD([master], lr=0.5, momentum=0.5)
    rows = torch.tensor([1, 1, 4], device=device)
    for _ in range(3):
        scaler.scale(table(rows).float().sum() * 0.75).backward()
        master.grad = table.weight.grad.float().to_dense() / scaler.get_scale()
        scaler.unscale_(optimizer)
        assert table.weight.grad.is_sparse and table.weight.grad.dtype is torch.float32
        assert torch.equal(table.weight.grad.to_dense(), master.grad)
        scaler.step(optimizer)
        assert_half_again([table.weight])
        scaler.update()
        optimizer.zero_grad()
        by_hand.step()
        assert torch.equal(table.weight, master.to(half))
    assert scaler.get_scale() == 2.0**16


def test_adam_refuses_sparse_gradients_as_torch(device: torch.device) -> None:
    table = nn.Embedding(6, 4, sparse=True, device=device).half()
    optimizer, scaler = optim.AdamW(table.parameters()), GradScaler(device.type, init_scale=8.0)
    scaler.scale(table(torch.tensor([1], device=device)).float().sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        scaler.step(optimizer)


@pytest.mark.parametrize("scaler", SCALERS)
def test_who_keeps_no_fp32_values_is_refused(device: torch.device, scaler: str) -> None:
    params = parameters(device, torch.float16)
    makes: list[Any] = [
        torch.optim.AdamW,
        lambda params: LARC(torch.optim.SGD(params, lr=0.1)),
        lambda params: optim.AdamW(params, differentiable=True),
    ]
    ours = r'FP16 gradients: .*enable\(model, optimizer, level="O2"\) .*; tritonamp\.optim\.AdamW'
    text = ours if scaler == "ours" else r"Attempting to unscale FP16 gradients\."
    for make in [*makes, *([optim.AdamW] if scaler == "torch" else [])]:
        fresh = SCALERS[scaler](device.type)
        backward(fresh, params, gradients(params, 1)[0])
        optimizer = make(params)
        with pytest.raises(ValueError, match=text):
            fresh.unscale_(optimizer)
        assert_half_again(params)


# both scalers


class Watcher:
    """What Accelerate puts on an optimizer, to see whether the scaler calls its step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.called = False
        step = optimizer.step

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.called = True
            return step(*args, **kwargs)

        optimizer.step = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("watched", [False, True], ids=["", "watched"])
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "inf"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize(
    ("kind", "dtype", "before"),
    [
        (kind, dtype, before)
        for kind in SCALERS
        for dtype in (*HALVES, torch.float32)
        for before in ("", "unscale_", "clip")
        # torch's scaler refuses to unscale float16, and unscales bfloat16 in bfloat16
        if not (kind == "torch" and before and dtype in HALVES)
    ],
)
def test_both_scalers_step_and_skip(
    device: torch.device,
    kind: str,
    dtype: torch.dtype,
    fused: bool,
    before: str,
    bad: bool,
    watched: bool,
) -> None:
    def make(params: Any, **options: Any) -> Any:
        return optim.AdamW(params, fused=fused, **options)

    params = parameters(device, dtype)
    hand = ByHand(params, make)
    optimizer, scaler = (
        make(groups_of(params), lr=0.01),
        SCALERS[kind](device.type, init_scale=SCALE),
    )
    watcher = Watcher(optimizer) if watched else None
    for i, grads in enumerate(gradients(params, 3)):
        backward(scaler, params, grads)
        backward(scaler, hand.params, grads)
        skipped = bad and i == 1
        if skipped:
            params[0].grad[0, 0] = hand.params[0].grad[0, 0] = INF
        scale = scaler.get_scale()
        if before:
            scaler.unscale_(optimizer)
        if before == "clip":
            nn.utils.clip_grad_norm_(params, 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        hand.step(scale, 0.1 if before == "clip" else None)
        assert same(params, hand.params)
        assert scaler.get_scale() == (scale / 2 if skipped else scale)
        assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
        if watcher is not None:
            skips_unseen = kind == "torch" and (fused or dtype in HALVES)
            assert watcher.called == (skips_unseen or not skipped)
            watcher.called = False


@pytest.mark.parametrize(
    ("kind", "dtype", "fused", "reads"),
    [
        ("torch", torch.float32, False, 1),
        ("torch", torch.float32, True, 0),
        ("torch", torch.float16, False, 0),
        ("torch", torch.bfloat16, False, 0),
        *[("ours", dtype, fused, 0) for dtype in (*HALVES, torch.float32) for fused in (0, 1)],
    ],
)
def test_what_the_host_reads(
    device: torch.device,
    kind: str,
    dtype: torch.dtype,
    fused: bool,
    reads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = parameters(device, dtype)
    optimizer = optim.AdamW(params, fused=bool(fused))
    assert optimizer._step_supports_amp_scaling == (fused or dtype in HALVES)
    scaler, (first, second) = SCALERS[kind](device.type, init_scale=SCALE), gradients(params, 2)
    backward(scaler, params, first)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    backward(scaler, params, second)
    seen: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(Tensor, name)
        return lambda self, *args: (seen.append(name), original(self, *args))[1]

    for name in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, counting(name))
    scaler.step(optimizer)
    assert len(seen) == reads


def test_torchs_attribute_follows_the_parameters(device: torch.device) -> None:
    """Also through a pickle or ``half()`` after the optimizer was made."""
    model = nn.Linear(3, 2, device=device)
    optimizer = optim.AdamW(model.parameters())
    assert not optimizer._step_supports_amp_scaling
    model.half()
    assert optimizer._step_supports_amp_scaling
    assert copy.deepcopy(optimizer)._step_supports_amp_scaling
    wide, half = (Parameter(torch.ones(2, device=device, dtype=d)) for d in (None, torch.float16))
    assert copy.deepcopy(optim.AdamW([wide], fused=True))._step_supports_amp_scaling
    optimizer = optim.AdamW([wide])
    optimizer.add_param_group({"params": [half]})
    assert optimizer._step_supports_amp_scaling


class Doubling(optim.SGD):
    """A step of its own, on what it takes for true gradients."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.clamp_(-0.5, 0.5).mul_(2.0)
        return super().step(closure)


@pytest.mark.parametrize("kind", SCALERS)
@pytest.mark.parametrize("wrapped", ["derived", "LARC"])
def test_another_step_around_ours_gets_true_gradients(
    device: torch.device, wrapped: str, kind: str
) -> None:
    """Who steps in another way takes the ordinary route; LARC hands our attributes on."""
    runs = []
    for scaler in (SCALERS[kind](device.type, init_scale=SCALE), None):
        params = [Parameter(torch.ones(3, device=device))]
        optimizer: Any = (
            Doubling(params, lr=0.125)
            if wrapped == "derived"
            else LARC(optim.SGD(params, lr=0.125), clip=False)
        )
        for bad in (False, True, False):
            loss = (params[0] * (INF if bad else 1.0)).sum()
            if scaler is None:
                if bad:
                    continue
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        runs.append(params[0].detach())
    assert torch.equal(*runs)
    assert not torch.equal(runs[0], torch.ones(3, device=device))


def test_half_parameters_of_a_derived_optimizer(device: torch.device) -> None:
    param = Parameter(torch.ones(3, device=device).half())
    optimizer, scaler = Doubling([param], lr=0.125), GradScaler(device.type, init_scale=SCALE)
    scaler.scale(param.float().sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.equal(param, torch.full((3,), 0.875, device=device).half())
    assert_half_again([param])


def test_half_parameters_behind_larc(device: torch.device) -> None:
    """It hands our attributes on, and adapts true gradients, too."""
    results = []
    for dtype in (torch.float16, torch.float32):
        param = Parameter(torch.ones(3, device=device, dtype=dtype))
        optimizer = LARC(optim.SGD([param], lr=0.125))
        scaler = GradScaler(device.type, init_scale=SCALE)
        scaler.scale(param.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert_half_again([param])
        results.append(param.detach().half())
    assert torch.equal(*results)


def test_a_differentiable_step_takes_the_ordinary_route(device: torch.device) -> None:
    results = []
    for scale in (1.0, SCALE):
        param = torch.ones(3, device=device, requires_grad=True).clone()
        optimizer = optim.AdamW([param], lr=0.125, differentiable=True)
        scaler = GradScaler(device.type, init_scale=scale)
        for bad in (False, True):
            scaler.scale(torch.ones((), device=device))
            param.grad = torch.full((3,), INF if bad else scale, device=device)
            scaler.step(optimizer)
            scaler.update()
        results.append(param.detach())
    assert torch.equal(*results)
    assert not torch.equal(results[0], torch.ones(3, device=device))


def test_an_optimizer_goes_on_enabled(device: torch.device) -> None:
    """From the stand-alone recipe to ``enable``, with the state as it is."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(device)
    optimizer, scaler = optim.AdamW(model.parameters()), GradScaler(device.type, init_scale=SCALE)
    x = torch.randn(8, 4, device=device)
    with tritonamp.enable(model, optimizer, level="O2", scaler=scaler):
        for _ in range(2):
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert optimizer.state[model.weight]["step"] == 2
