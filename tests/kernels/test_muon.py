"""muon and optim.Muon against FP64 and torch, skips, masters, bytes, AdamW for the rest."""

import copy
from typing import Any

import pytest
import torch
from runs import Training, batch
from torch import Tensor, nn

import tritonamp
from tests.kernels.conftest import Traffic, U
from tests.kernels.update_rows import NAN, Row
from tests.kernels.updates import Updates
from tritonamp.kernels._codes import SIGNED
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


class Operation:
    """``muon`` with the names of an ``Update``."""

    name, states, value_kinds = "muon", ("momentum_buffers",), (SIGNED,)
    optional, counts_steps = dict[str, str](), False

    def has(self, name: str, rule: Any) -> bool:
        return True

    def __call__(self, lists: UpdateLists, *rest: Any) -> None:
        muon(MuonLists(lists), *rest)


ROW = Row(Operation(), list(RULES.values()), torch.optim.Muon, {})


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
@pytest.mark.parametrize("form", ["fp32", "masters", "masters bfloat16"])
def test_against_fp64(rule: MuonRule, form: str, backend: str, device: torch.device) -> None:
    """The quintic's slope is at most 4: an error of 10 n U in a product grows by that a step.

    The momentum (values below 4) and the parameter add eight roundings.
    """
    run = Updates(ROW, device, form, [rule], SHAPES)
    params, buffers, copies = (run.lists[n] for n in ("params", "momentum_buffers", "copies"))
    for _ in range(3):
        rows = zip(params, buffers, run.lists["grads"], strict=True)
        exact = [reference(p.double(), m.double(), g.double() * 0.5, rule) for p, m, g in rows]
        run.step(backend, 0.5)
        for k, (p, m) in enumerate(exact):
            of_products = 10 * max(p.shape) * 4**rule.ns_steps * rule.lr * max(p.shape) ** 0.5
            assert (buffers[k].double() - m).abs().max() <= 8 * 4 * U
            assert (params[k].double() - p).abs().max() <= (8 * 8 + of_products) * U
    for param, rounded in zip(params, copies, strict=True):
        assert torch.equal(rounded, param.to(rounded.dtype))


@pytest.mark.parametrize("found_inf", [1.0, 2.0])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_skip_writes_nothing(
    found_inf: float, steps_before: int, backend: str, device: torch.device
) -> None:
    """Nor does a first one poison the momentum."""
    run = Updates(ROW, device, "masters", [RULES["nesterov"]], SHAPES)
    for _ in range(steps_before):
        run.step(backend)
    other, before, grads = run.clone(), run.bits(), run.lists["grads"]
    run.lists["grads"] = [torch.full_like(g, NAN) for g in grads]
    run.step(backend, None, found_inf)
    assert all(map(torch.equal, run.bits(), before))
    run.lists["grads"] = grads
    assert all(map(torch.equal, run.step(backend).bits(), other.step(backend).bits()))


def test_each_group_has_its_own_rule(backend: str, device: torch.device) -> None:
    """Matrices of one shape that lie in two groups are not stacked."""
    rules = list(RULES.values())[:2]
    mixed = Updates(ROW, device, "masters", rules[:1], SHAPES)
    alone = [mixed.clone() for _ in rules]
    mixed.rules, mixed.groups = rules, [0, 0, 1, 1, 0, 1]
    mixed.step(backend)
    for run, rule in zip(alone, rules, strict=True):
        run.rules = [rule]
        run.step(backend)
    for i, group in enumerate(mixed.groups):
        mine, others = mixed.lists, alone[group].lists
        assert torch.equal(mine["momentum_buffers"][i], others["momentum_buffers"][i])
        torch.testing.assert_close(mine["params"][i], others["params"][i], rtol=0, atol=1e-5)


def test_bytes(traffic: Traffic, device: torch.device) -> None:
    """Gradient 2, momentum 4 + 4, update 4 + 4, master 4 + 4, half copy 2; a skip writes none."""
    run = Updates(ROW, device, "masters", [RULES["nesterov"]], [(256, 256)])
    run.lists = {name: own[:1] for name, own in run.lists.items()}
    run.step("triton")
    for moved in (traffic.read, traffic.written):
        assert 14 * 256 * 256 <= moved <= 1.01 * 14 * 256 * 256
    traffic.written = 0
    run.step("triton", None, 1.0)
    assert traffic.written == 0


class ThreeMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.third(self.second(x).relu())


def matrices(params: list[nn.Parameter], **options: Any) -> tritonamp.optim.Muon:
    return tritonamp.optim.Muon([p for p in params if p.dim() == 2], **options)


def rest(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in params if p.dim() != 2]


def both(params: list[nn.Parameter], **options: Any) -> tritonamp.optim.Muon:
    adamw = [{"params": rest(params), "lr": 1e-2, "weight_decay": 0.1}]
    return matrices(params, lr=1e-2, adamw_params=adamw, **options)


def in_two(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    adamw = tritonamp.optim.AdamW(rest(params), lr=1e-2, weight_decay=0.1)
    return [matrices(params, lr=1e-2), adamw]


def masters_after(make: Any, level: str, device: torch.device, skip: int = 2) -> list[Tensor]:
    """Return the masters after five steps of two micro-batches, and a skipped one."""
    with Training(ThreeMatrices, make, level, device, lr=None) as run:
        for seed in range(6):
            for part in range(2):
                loss = run.loss(batch(2 * seed + part, device=device))
                run.backward(loss * (NAN if seed == skip else 1.0))
            run.finish(0.1)
        assert run.amp.stats()["steps"] == 5
        return run.masters()


@pytest.mark.parametrize("skip", [0, 3])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_levels_train_and_skip(level: str, skip: int, device: torch.device) -> None:
    """As in FP32, to the products' bfloat16: 2**-7 of a step of at most 1.2 lr an element."""
    params, exact = (masters_after(both, at, device, skip) for at in (level, "O0"))
    for a, b in zip(params, exact, strict=True):
        assert (a.float() - b).abs().max() <= (2e-2 if level == "O3" else 1e-2)
    start = ThreeMatrices().to(device).parameters()
    assert max((a - b.detach()).abs().max() for a, b in zip(exact, start, strict=True)) > 2e-2


def test_one_optimizer_is_two(device: torch.device) -> None:
    """``adamw_params`` gives the bits of a Muon and an AdamW, enabled together."""
    assert all(map(torch.equal, *(masters_after(make, "O2", device) for make in (both, in_two))))


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
    assert rule_of(both([*ThreeMatrices().parameters()])) is MUON_AND_ADAMW


class Sharded(torch.Tensor):
    """A class like DTensor: its instances hold the part of this rank."""


def test_sharded_matrices_are_left_to_torch() -> None:
    param: Any = nn.Parameter(torch.zeros(2, 2).as_subclass(Sharded))
    param._local_tensor = torch.zeros(2, 2)
    ours, torchs = tritonamp.optim.Muon([param]), torch.optim.Muon([param])
    assert rule_of(torchs) is None
    with pytest.raises(RuntimeError, match="a parameter is sharded"):
        MUON.hyperparameters(ours.param_groups[0])


def lion(params: list[nn.Parameter], **options: Any) -> tritonamp.optim.Lion:
    return tritonamp.optim.Lion(params, weight_decay=0.1, **options)


@pytest.mark.parametrize("make", [matrices, both, lion])
def test_state_is_saved_and_loaded_bit_for_bit(make: Any, device: torch.device) -> None:
    """After two of four steps, into an optimizer with another momentum or learning rate."""
    start, ends = ThreeMatrices().to(device).half(), []
    for stops in (False, True):
        model = copy.deepcopy(start)
        optimizer = make([*model.parameters()])
        for seed in range(4):
            if stops and seed == 2:
                state = copy.deepcopy(optimizer.state_dict())
                model = copy.deepcopy(model)
                other = {"momentum": 0.9} if make is both else {"lr": 1.0}
                optimizer = make([*model.parameters()], **other)
                optimizer.load_state_dict(state)
            for k, p in enumerate(model.parameters()):
                p.grad = batch(10 * seed + k, *p.shape, device=device, dtype=p.dtype)
            optimizer.step()
        ends.append([p.detach().clone() for p in model.parameters()])
        buffers = [s["momentum_buffer"] for s in optimizer.state.values() if "exp_avg" not in s]
        assert len(buffers) == (0 if make is lion else 3)
        assert all(b.dtype is torch.float32 for b in buffers)
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
    run = Updates(ROW, device, "fp32", [PLAIN], SHAPES)
    lists = run.lists
    for k in range(1, len(SHAPES)):
        run.lists = {name: own[:k] for name, own in lists.items()}
        run.step(backend)
    kept = sum(t.numel() for t in run.memory._kept.values())
    assert kept < min(p.numel() for p in run.lists["params"] if p.numel() > 100)


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
