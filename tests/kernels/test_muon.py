"""muon and optim.Muon against FP64 and torch, skips, masters, bytes, AdamW for the rest."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tests.kernels.conftest import Traffic, U, made
from tests.kernels.updates import Updates, check_bytes, check_skip, resumed
from tritonamp.kernels._muon_lists import MuonLists, MuonRule
from tritonamp.kernels._update_lists import UpdateLists
from tritonamp.kernels.muon import muon
from tritonamp.step.muon import MUON, MUON_AND_ADAMW
from tritonamp.step.rules import rule_of

SHAPES = [(3, 7), (16, 65), (3, 7), (70, 12), (1, 5)]
QUINTIC = 3.4445, -4.7750, 2.0315
PLAIN = MuonRule(0.125, 0.0, 0.95, False, QUINTIC, 1e-7, 2, None, torch.float32)
RULES = {
    "plain": PLAIN,
    "nesterov": PLAIN._replace(nesterov=True, weight_decay=0.25, lr=0.5),
    "low momentum": PLAIN._replace(nesterov=True, momentum=0.25, ns_steps=5),
    "match_rms_adamw": PLAIN._replace(adjust_lr_fn="match_rms_adamw"),
    "spectral_unclamped": PLAIN._replace(adjust_lr_fn="spectral_unclamped", eps=0.5),
}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def step_on(lists: UpdateLists, *rest: Any) -> None:
    muon(MuonLists(lists), *rest)


muons = partial(Updates, step_on, ["momentum_buffers"], shapes=SHAPES)


def reference(p: Tensor, m: Tensor, grad: Tensor, rule: MuonRule) -> tuple[Tensor, Tensor]:
    """torch.optim.Muon in FP64, as its documentation writes it."""
    a, b, c = rule.ns_coefficients
    rows, columns = p.shape
    m = rule.momentum * m + (1 - rule.momentum) * grad
    x = (1 - rule.momentum) * grad + rule.momentum * m if rule.nesterov else m
    x = x / x.norm().clamp(min=rule.eps)
    for _ in range(rule.ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    ratio = {
        None: max(1.0, rows / columns) ** 0.5,
        "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
        "spectral_unclamped": (rows / columns) ** 0.5,
    }[rule.adjust_lr_fn]
    return p * (1 - rule.lr * rule.weight_decay) - rule.lr * ratio * x, m


@each_rule
@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16], ids=str)
def test_against_fp64(
    rule: MuonRule, half: torch.dtype | None, backend: str, device: torch.device
) -> None:
    """The quintic's slope is at most 4: an error of 10 n U in a product grows by that a step.

    The momentum (values below 4) and the parameter add eight roundings.
    """
    run = muons(device, rule, half)
    for seed in (1, 2, 3):
        grads = made(SHAPES, device, half or torch.float32, seed)
        exact = [
            reference(p.double(), m.double(), grad.double() * 0.5, rule)
            for p, m, grad in zip(run.params, run.states["momentum_buffers"], grads, strict=True)
        ]
        run.step(grads, backend, torch.tensor(0.5, device=device), None)
        for k, (p, m) in enumerate(exact):
            of_products = 10 * max(p.shape) * 4**rule.ns_steps * rule.lr * max(p.shape) ** 0.5
            assert (run.states["momentum_buffers"][k].double() - m).abs().max() <= 8 * 4 * U
            assert (run.params[k].double() - p).abs().max() <= (8 * 8 + of_products) * U
    for param, rounded in zip(run.params, run.copies, strict=True):
        assert torch.equal(rounded, param.to(rounded.dtype))


@pytest.mark.parametrize("found_inf", [1.0, 2.0])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_skip_writes_nothing(
    found_inf: float, steps_before: int, backend: str, device: torch.device
) -> None:
    """Nor does a first one poison the momentum."""
    runs = [muons(device, RULES["nesterov"], torch.float16) for _ in range(2)]
    for run in runs[: 2 if steps_before else 0]:
        run.step(made(SHAPES, device, torch.float16, 1), backend)
    check_skip(runs[0], found_inf, backend)
    for run in runs:
        run.step(made(SHAPES, device, torch.float16, 3), backend)
    assert all(map(torch.equal, runs[0].everything(), runs[1].everything()))


def test_each_group_has_its_own_rule(backend: str, device: torch.device) -> None:
    """Matrices of one shape that lie in two groups are not stacked."""
    rules = list(RULES.values())[:2]
    mixed = muons(device, rules[0], torch.float16)
    mixed.share(rules, [0, 0, 1, 1, 0, 1])
    alone = [muons(device, rule, torch.float16) for rule in rules]
    for run in (mixed, *alone):
        run.step(made(SHAPES, device, torch.float16, 1), backend)
    for i, group in enumerate(mixed.groups):
        assert torch.equal(
            mixed.states["momentum_buffers"][i], alone[group].states["momentum_buffers"][i]
        )
        torch.testing.assert_close(mixed.params[i], alone[group].params[i], rtol=0, atol=1e-5)


def test_bytes(traffic: Traffic, device: torch.device) -> None:
    """Gradient 2, momentum 4 + 4, update 4 + 4, master 4 + 4, half copy 2."""
    run = muons(device, RULES["nesterov"], torch.float16)
    check_bytes(run, traffic, torch.float16, 14, 14, 256, 256)


class ThreeMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.third(self.second(x).relu())


def both(model: nn.Module, **options: Any) -> tritonamp.optim.Muon:
    """Muon on the matrices, and AdamW on the rest."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    adamw = [{"params": rest, "lr": 1e-2, "weight_decay": 0.1}]
    return tritonamp.optim.Muon(matrices, lr=1e-2, adamw_params=adamw, **options)


def masters_after(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    level: str,
    skip: int = 2,
    clip: float | None = 0.1,
) -> list[Tensor]:
    device = next(model.parameters()).device
    amp = tritonamp.enable(model, list(optimizers), level=level)
    for seed in range(6):
        for part in range(2):  # two micro-batches
            generator = torch.Generator().manual_seed(2 * seed + part)
            loss = model(torch.randn(8, 6, generator=generator).to(device)).float().square().mean()
            amp.backward(loss * float("nan") if seed == skip else loss)
        if clip is not None:
            amp.clip_grad_norm_(clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert amp.stats()["steps"] == 5
    found = [p.detach().clone() for _, p in amp.named_master_params()]
    amp.disable()
    return found


@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_levels_train_and_skip(level: str, skip: int, device: torch.device) -> None:
    """As in FP32, to the products' bfloat16: 2**-7 of a step of at most 1.2 lr an element."""
    model, plain = ThreeMatrices().to(device), ThreeMatrices().to(device)
    params = masters_after(model, [both(model)], level, skip)
    exact = masters_after(plain, [both(plain)], "O0", skip)
    for a, b in zip(params, exact, strict=True):
        assert (a.float() - b).abs().max() <= (2e-2 if level == "O3" else 1e-2)
    moved = [
        (a - b.detach()).abs().max()
        for a, b in zip(exact, ThreeMatrices().to(device).parameters(), strict=True)
    ]
    assert max(moved) > 2e-2


def test_one_optimizer_is_two(device: torch.device) -> None:
    """``adamw_params`` gives the bits of a Muon and an AdamW, enabled together."""
    runs = []
    for together in (True, False):
        model = ThreeMatrices().to(device)
        optimizers: list[torch.optim.Optimizer] = [both(model)]
        if not together:
            groups = [group["params"] for group in optimizers[0].param_groups]
            optimizers = [
                tritonamp.optim.Muon(groups[0], lr=1e-2),
                tritonamp.optim.AdamW(groups[1], lr=1e-2, weight_decay=0.1),
            ]
        runs.append(masters_after(model, optimizers, "O2"))
    assert all(map(torch.equal, *runs))


def test_torchs_muon_steps_like_itself(device: torch.device) -> None:
    """Five products in bfloat16, each 2**-8 off, grow by 4 a step: the distance stays below that
    of two updates whose signs agree.
    """
    torch.manual_seed(0)
    start = nn.Linear(24, 16, bias=False).to(device)
    grads = [torch.randn(16, 24, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    moved = []
    for kind in (torch.optim.Muon, tritonamp.optim.Muon):
        model = copy.deepcopy(start)
        optimizer = kind(model.parameters(), lr=1e-2)
        for grad in grads:
            model.weight.grad = grad.to(device)
            optimizer.step()
        moved.append(model.weight.detach() - start.weight)
    assert (moved[0] - moved[1]).norm() <= 0.03 * moved[0].norm()
    model = copy.deepcopy(start)
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-2)
    assert rule_of(optimizer) is MUON
    assert rule_of(both(ThreeMatrices())) is MUON_AND_ADAMW


def test_sharded_matrices_are_left_to_torch() -> None:
    param = nn.Parameter(torch.zeros(2, 2))
    ours, torchs = tritonamp.optim.Muon([param]), torch.optim.Muon([param])
    param._local_tensor = param.data  # type: ignore[attr-defined]  # as a DTensor has it
    assert rule_of(torchs) is None
    with pytest.raises(RuntimeError, match="a parameter is sharded"):
        MUON.hyperparameters(ours, ours.param_groups[0])


@pytest.mark.parametrize("with_adamw", [False, True])
def test_state_is_saved_and_loaded_bit_for_bit(with_adamw: bool, device: torch.device) -> None:
    def optimizer_of(model: nn.Module, lr: float) -> tritonamp.optim.Muon:
        if with_adamw:
            return both(model, momentum=0.9)
        return tritonamp.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=lr)

    model, ends = ThreeMatrices().to(device).half(), []
    for stops in (False, True):
        end, optimizer = resumed(optimizer_of, copy.deepcopy(model), stops)
        ends.append(end)
        buffers = [s["momentum_buffer"] for s in optimizer.state.values() if "exp_avg" not in s]
        assert len(buffers) == 3 and all(b.dtype is torch.float32 for b in buffers)
    assert all(map(torch.equal, *ends))


def test_states_are_torchs(device: torch.device) -> None:
    """A state of torch's Muon continues here, and the other way."""
    params = [nn.Parameter(torch.randn(4, 6, device=device))]
    ours, torchs = tritonamp.optim.Muon(params), torch.optim.Muon(params)
    for a, b in ((ours, torchs), (torchs, ours)):
        params[0].grad = torch.randn(4, 6, device=device)
        a.step()
        b.load_state_dict(a.state_dict())
        assert b.state[params[0]].keys() == {"momentum_buffer"}
        assert a.state_dict()["param_groups"] == b.state_dict()["param_groups"]


def test_updates_are_memory_of_the_step(device: torch.device, backend: str) -> None:
    """Of matrices that have gradients now and then, in any number, nothing is left."""
    run = muons(device, PLAIN, None)
    params, buffers, copies = run.params, run.states["momentum_buffers"], run.copies
    for k in range(1, len(SHAPES)):
        run.params, run.copies = params[:k], copies[:k]
        run.states["momentum_buffers"] = buffers[:k]
        run.step(made(SHAPES, device, torch.float32, k)[:k], backend)
    kept = sum(t.numel() for t in run.memory._kept.values())
    assert kept < min(p.numel() for p in run.params if p.numel() > 100)


def test_adamws_group_does_not_come_after_a_step(device: torch.device) -> None:
    weight, bias = nn.Parameter(torch.ones(4, 3, device=device)), nn.Parameter(torch.ones(3))
    optimizer = tritonamp.optim.Muon([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(ValueError, match=r'a group with "betas".*adamw_params= when the optimizer'):
        optimizer.add_param_group({"params": [bias], "betas": (0.9, 0.99)})
    assert len(optimizer.param_groups) == 1
    optimizer.step()


def test_a_parameter_that_is_no_matrix_is_named() -> None:
    named = list(ThreeMatrices().named_parameters())
    with pytest.raises(ValueError, match=r"two dimensions, got parameter first.bias of shape \(16"):
        tritonamp.optim.Muon(named)
    optimizer = tritonamp.optim.Muon([named[0][1]])
    with pytest.raises(ValueError, match=r"got parameter 0 of shape .*adamw_params="):
        optimizer.add_param_group({"params": [named[1][1]]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=r"got parameter 0 of shape .*complex64"):
        tritonamp.optim.Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match="more than one parameter group"):
        tritonamp.optim.Muon([named[0][1]], adamw_params=[named[0][1]])
    optimizer.param_groups[0]["params"][0].grad = torch.ones(16, 6).to_sparse()
    with pytest.raises(RuntimeError, match="Muon does not support sparse gradients"):
        optimizer.step()
