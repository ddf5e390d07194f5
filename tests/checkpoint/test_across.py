"""States saved at another level, by torch or by apex: they are converted exactly, or refused by
name.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Net, same_bits
from runs import OPTIMIZERS, named
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import tritonamp
from tritonamp.apex import amp as apex_amp
from tritonamp.apex.optimizers import FusedAdam

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]
FIXED = ["O0", "O3", "O4", "O5"]
ADAMS = named("AdamW", "our AdamW")
sgd = OPTIMIZERS["SGD momentum"]
Run = tuple[nn.Module, Optimizer, tritonamp.Amp]


def net(device: torch.device, seed: int, half: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(seed)
    return Net().to(device, half)


def loss_of(model: nn.Module, i: int) -> Tensor:
    param = next(model.parameters())
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).to(param.device, param.dtype)
    return F.cross_entropy(model(x).float(), torch.arange(8, device=param.device) % 3)


def train(run: Any, start: int, end: int) -> list[float]:
    """Steps of an enabled run, or of a plain model and its optimizer."""
    model, optimizer, *amps = run
    losses = []
    for i in range(start, end):
        loss = loss_of(model, i)
        if amps:
            amps[0].backward(loss)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def states(run: Any) -> list[dict[str, Any]]:
    return copy.deepcopy([part.state_dict() for part in run])


def load(run: Any, given: Any) -> None:
    """Copies of ``given``: torch's optimizers step on the very tensors that they are given."""
    for part, state in zip(run, copy.deepcopy(given), strict=True):
        part.load_state_dict(state)


@pytest.fixture
def enabled(device: torch.device, handles: Callable[..., Any]) -> Callable[..., Run]:
    def make(
        level: str = "O2", optimizer: Any = torch.optim.AdamW, seed: int = 0, **fields: Any
    ) -> Run:
        model = net(device, seed)
        made = optimizer(model.parameters(), lr=1e-2)
        return model, made, handles(model, made, level=level, **fields)

    return make


# levels


@pytest.mark.steps
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, sgd], ids=["AdamW", "SGD"])
@pytest.mark.parametrize(("saved", "level"), list(itertools.product(LEVELS, LEVELS)))
def test_from_level_to_level(
    enabled: Callable[..., Run], saved: str, level: str, optimizer: Any
) -> None:
    first = enabled(saved, optimizer)
    train(first, 0, 3)
    of_model, of_optimizer, of_amp = states(first)
    model, opt, amp = other = enabled(level, optimizer, seed=1)
    load(other[:2], (of_model, of_optimizer))
    assert {v.dtype for v in of_model.values()} == {torch.float32}
    assert same_bits(model.state_dict(), of_model)
    for name, param in model.named_parameters():
        assert torch.equal(param, of_model[name].to(param.dtype))
    if level in ("O2", "O5"):
        assert same_bits(list(amp.master_params()), list(of_model.values()))
    fp32 = saved != "O3" or optimizer is not sgd  # momenta of half parameters are half
    assert all(
        same_bits(
            loaded[name],
            value if fp32 or not isinstance(value, Tensor) else value.to(loaded[name].dtype),
        )
        for number, loaded in opt.state_dict()["state"].items()
        for name, value in of_optimizer["state"][number].items()
    )
    amp.load_state_dict(of_amp)
    assert amp.stats()["steps"] == 3
    assert amp.stats()["scale"] == (1.0 if level in FIXED else 2.0**16)
    train(other, 3, 4)
    assert all(torch.isfinite(p).all() for p in amp.master_params())


def test_counts_have_names(enabled: Callable[..., Run]) -> None:
    new, old = enabled("O2"), enabled("O2", seed=1)
    train(new, 0, 2)
    state = new[2].state_dict()
    assert state["counts"] == {
        "clean": 2,
        "scale_overflows": 0,
        "forward_faults": 0,
        "outliers": 0,
        "vetoes": 0,
        "huge_gradients": 0,
    }
    counts = {"clean": 5, "scale_overflows": 3, "forward_faults": 2}
    old[2].load_state_dict({**state, "counts": counts})
    assert old[2].state_dict()["counts"] == {
        **counts,
        "outliers": 0,
        "vetoes": 0,
        "huge_gradients": 0,
    }
    stats = old[2].stats()
    assert (stats["steps"], stats["skipped"]) == (5, 5)
    assert (stats["scale_overflows"], stats["forward_faults"]) == (3, 2)


@pytest.mark.parametrize("counts", [[5, 3, 2], {"clean": 5}, None])
def test_counts_of_other_names_are_refused(enabled: Callable[..., Run], counts: Any) -> None:
    amp = enabled("O2")[2]
    with pytest.raises(ValueError, match=r"expected counts of \['clean', .*, got "):
        amp.load_state_dict({**amp.state_dict(), "counts": counts})


def test_healed_modules_mean_nothing_where_all_is_fp32(enabled: Callable[..., Run]) -> None:
    first, last = enabled("O2", loss_scale=1.0), enabled("O0", seed=1)
    first[2].heal("last")
    load(last, states(first))
    assert last[2].stats()["healed"] == []
    assert same_bits(last[0].state_dict(), first[0].state_dict())
    train(last, 0, 1)


def test_nothing_to_heal_where_all_is_fp32(enabled: Callable[..., Run]) -> None:
    model, _, amp = enabled("O0")
    with pytest.raises(ValueError, match="without them everything is FP32 already"):
        amp.heal("last")
    assert amp.stats()["healed"] == []
    assert type(model.get_submodule("last")) is nn.Linear


# torch


@pytest.mark.parametrize(
    "kind", ["default", "foreach", "fused", "capturable", "numbers", "amsgrad"]
)
@pytest.mark.parametrize("level", LEVELS)
def test_from_plain_torch(
    enabled: Callable[..., Run], device: torch.device, level: str, kind: str
) -> None:
    """Step counts may be anywhere, and numbers, as old torch had them."""
    plain = net(device, 1)
    options = {kind: True} if kind in ("foreach", "fused", "amsgrad") else {}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, **options)
    train((plain, optimizer), 0, 3)
    of_model, of_optimizer = states((plain, optimizer))
    if kind == "capturable":
        of_optimizer["param_groups"][0]["capturable"] = True
    for state in of_optimizer["state"].values():
        state["step"] = (
            3.0 if kind == "numbers" else state["step"].to("cpu" if kind == "default" else device)
        )
    model, opt, amp = run = enabled(level)
    load(run[:2], (of_model, of_optimizer))
    assert same_bits(model.state_dict(), of_model)
    for name in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if kind == "amsgrad" else [])):
        loaded = [state[name] for state in opt.state_dict()["state"].values()]
        assert same_bits(loaded, [state[name] for state in of_optimizer["state"].values()])
    train(run, 3, 4)
    train((plain, optimizer), 3, 4)
    assert all(float(state["step"]) == 4 for state in opt.state.values())
    for ours, theirs in zip(amp.master_params(), plain.parameters(), strict=True):
        # the step is of 1e-2; half parameters are rounded by up to 2^-9 of at most 1, their
        # gradients by more
        torch.testing.assert_close(
            ours.float(), theirs, rtol=0, atol=1e-5 if level == "O0" else 2e-2
        )


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_from_a_half_model(
    enabled: Callable[..., Run], device: torch.device, level: str, half: torch.dtype
) -> None:
    state = net(device, 1, half).state_dict()
    model, _, amp = run = enabled(level)
    model.load_state_dict(state)
    assert same_bits(model.state_dict(), {name: value.float() for name, value in state.items()})
    if level in ("O2", "O5"):
        assert same_bits(list(amp.master_params()), [value.float() for value in state.values()])
    train(run, 0, 1)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, sgd], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("level", LEVELS)
def test_into_plain_torch(
    enabled: Callable[..., Run], device: torch.device, level: str, optimizer: Any
) -> None:
    """Plain torch trains on in FP32 with the bits of an O0 that has loaded the state."""
    run = enabled(level, optimizer)
    train(run, 0, 3)
    of_model, of_optimizer, of_amp = states(run)
    plain = net(device, 1)
    theirs = plain, optimizer(plain.parameters(), lr=1e-2)
    load(theirs, (of_model, of_optimizer))
    assert same_bits(plain.state_dict(), of_model)
    ours = enabled("O0", optimizer, seed=1)
    load(ours[:2], (of_model, of_optimizer))
    losses = train(ours, 3, 6), train(theirs, 3, 6)
    # the arithmetic of torch's own SGD; that of kernels and of AdamW differs in the last bits
    if optimizer is sgd and device.type == "cpu":
        assert losses[0] == losses[1]
        assert same_bits(ours[0].state_dict(), plain.state_dict())
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-5, atol=0)
    scaler = torch.amp.GradScaler(device.type)
    scaler.load_state_dict(of_amp["loss_scalers"]["0"])
    assert scaler.state_dict()["scale"] == run[2].stats()["scale"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_names_with_a_prefix_are_refused_as_by_torch(
    enabled: Callable[..., Run], wrapped: bool
) -> None:
    """DistributedDataParallel puts a prefix in front; torch lists the keys and takes none."""
    model, _, _ = run = enabled()
    before = states(run)
    target = nn.ModuleDict({"module": model}) if wrapped else model
    given = {("" if wrapped else "module.") + name: value + 1 for name, value in before[0].items()}
    with pytest.raises(
        RuntimeError, match=r"(?s)Missing key\(s\) .*last.weight.*Unexpected key\(s\) .*last.weight"
    ):
        target.load_state_dict(given)
    assert same_bits(states(run), before)
    target.load_state_dict(
        {("module." if wrapped else "") + name: value + 1 for name, value in before[0].items()}
    )
    assert same_bits(model.state_dict(), {name: value + 1 for name, value in before[0].items()})


def test_a_shape_that_does_not_fit_leaves_masters_and_halves_at_one(
    enabled: Callable[..., Run],
) -> None:
    model, _, amp = run = enabled()
    state = {name: value + 1 for name, value in states(run)[0].items()}
    state["last.weight"] = torch.ones(3, 15)
    with pytest.raises(RuntimeError, match=r"size mismatch for last.weight.*\[3, 15\].*\[3, 16\]"):
        model.load_state_dict(state)
    for param, master in zip(model.parameters(), amp.master_params(), strict=True):
        assert torch.equal(param, master.to(param.dtype))
    assert torch.equal(model.state_dict()["first.weight"], state["first.weight"]), (
        "as in torch, what fits is taken"
    )


# masters in the state of tritonamp.optim


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ADAMS)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_masters_of_half_parameters(
    enabled: Callable[..., Run], device: torch.device, level: str, name: str, half: torch.dtype
) -> None:
    """The model holds the rounded masters, and is loaded first."""
    model = net(device, 1, half)
    alone = model, tritonamp.optim.AdamW(model.parameters(), lr=1e-2)
    train(alone, 0, 3)
    given = states(alone)
    masters = [state["master_param"] for state in given[1]["state"].values()]
    assert all((master != master.to(half)).any() for master in masters)
    run = enabled(level, ADAMS[name])
    train(run, 7, 8)
    load(run[:2], given)
    reference = enabled(level, ADAMS[name])  # from FP32 parameters that are these masters
    fp32 = dict(zip(given[0], masters, strict=True))
    load(reference[:2], (fp32, given[1]))
    assert same_bits(run[0].state_dict(), fp32)
    for param, master in zip(run[0].parameters(), masters, strict=True):
        assert torch.equal(param, master.to(param.dtype))
    assert train(run, 3, 5) == train(reference, 3, 5)
    assert same_bits(states(run)[:2], states(reference)[:2])
    assert "master_param" not in run[1].state_dict()["state"][0], "it would be stale by now"


def test_masters_of_another_model_do_not_count(
    enabled: Callable[..., Run], device: torch.device
) -> None:
    half = net(device, 1, torch.float16)
    alone = half, tritonamp.optim.AdamW(half.parameters(), lr=1e-2)
    train(alone, 0, 3)
    model, opt, amp = enabled("O2")
    other = {name: value + 1 / 3 for name, value in net(device, 2).state_dict().items()}
    model.load_state_dict(other)
    opt.load_state_dict(alone[1].state_dict())
    assert same_bits(list(amp.master_params()), list(other.values()))


def test_masters_in_plain_torch(device: torch.device) -> None:
    """It steps on the rounded parameters; the masters stay where they are in the state."""
    half = net(device, 1, torch.float16)
    alone = half, tritonamp.optim.AdamW(half.parameters(), lr=1e-2)
    train(alone, 0, 3)
    of_model, of_optimizer = states(alone)
    runs = []
    for with_masters in (True, False):
        plain = net(device, 2)
        run = plain, torch.optim.AdamW(plain.parameters())
        for state in of_optimizer["state"].values() if not with_masters else ():
            del state["master_param"]
        load(run, (of_model, of_optimizer))
        runs.append((train(run, 3, 5), plain.state_dict()))
    assert same_bits(*runs)


@pytest.mark.parametrize("name", ADAMS)
def test_into_half_parameters_alone(
    enabled: Callable[..., Run], device: torch.device, name: str
) -> None:
    """FP32 moments come along; parameters begin as rounded, which is all such a model has."""
    run = enabled("O2", ADAMS[name])
    train(run, 0, 3)
    given = states(run)[:2]
    half = net(device, 1, torch.float16)
    alone = half, tritonamp.optim.AdamW(half.parameters(), lr=1e-2)
    load(alone, given)
    for number, state in alone[1].state_dict()["state"].items():
        assert all(
            same_bits(state[key], given[1]["state"][number][key])
            for key in ("exp_avg", "exp_avg_sq")
        )
    train(alone, 3, 4)
    assert all(state["master_param"].dtype is torch.float32 for state in alone[1].state.values())


# apex


def of_apex(**scales: float) -> dict[str, dict[str, Any]]:
    return {name: {"loss_scale": scale, "unskipped": 17} for name, scale in scales.items()}


def test_loss_scales_of_apex(enabled: Callable[..., Run]) -> None:
    *_, amp = run = enabled("O2", scaler=tritonamp.GradScaler(growth_interval=500, hysteresis=2))
    amp.backward(loss_of(run[0], 0), loss_id=5)
    amp.load_state_dict(of_apex(loss_scaler0=1024.0, loss_scaler1=32.0))
    assert amp.stats() == {
        **amp.stats(),
        "scales": {0: 1024.0, 1: 32.0},
        "growth_tracker": 17,
        "steps": 0,
    }
    for state in amp.state_dict()["loss_scalers"].values():
        assert state["_growth_tracker"] == 17
        assert (state["growth_interval"], state["_hysteresis_tracker"]) == (500, 2), (
            "settings stay those of this run"
        )


@pytest.mark.parametrize(
    "state", [of_apex(loss_scaler0=1.0), {**torch.amp.GradScaler("cpu", 1.0).state_dict()}]
)
def test_a_fixed_scale_that_is_the_same(enabled: Callable[..., Run], state: dict[str, Any]) -> None:
    *_, amp = enabled("O3")
    amp.load_state_dict(state)
    assert amp.stats()["scale"] == 1.0


def fused_adam_of_apex(of_torch: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The same as apex's FusedAdam saves it: one step count for a group."""
    state = {
        n: {"exp_avg": s["exp_avg"], "exp_avg_sq": s["exp_avg_sq"]}
        for n, s in of_torch["state"].items()
    }
    groups = []
    for group in of_torch["param_groups"]:
        kept = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "params")}
        groups.append({**kept, "bias_correction": True, "step": 3, **options})
    return {"state": state, "param_groups": groups}


@pytest.mark.parametrize(
    ("level", "optimizer"),
    [
        *itertools.product(["O1", "O2"], [*ADAMS.values(), FusedAdam]),
        *itertools.product(["plain"], [tritonamp.optim.AdamW, FusedAdam]),
    ],
)
def test_state_of_fused_adam(
    enabled: Callable[..., Run], device: torch.device, level: str, optimizer: Any
) -> None:
    plain = net(device, 1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train((plain, theirs), 0, 3)
    of_model, of_optimizer = states((plain, theirs))
    runs = []
    for given in (of_optimizer, fused_adam_of_apex(of_optimizer)):
        model = net(device, 2)
        run = (
            (model, optimizer(model.parameters()))
            if level == "plain"
            else enabled(level, optimizer)
        )
        load(run[:2], (of_model, given))
        runs.append(
            (
                train(run, 3, 5),
                run[0].state_dict(),
                [float(s["step"]) for s in run[1].state.values()],
            )
        )
    assert same_bits(*runs)
    assert set(runs[0][2]) == {5.0}


def test_without_bias_correction(enabled: Callable[..., Run]) -> None:
    _, opt, _ = run = enabled("O2")
    train(run, 0, 1)
    before = states(run)
    with pytest.raises(
        ValueError,
        match=r"AdamW\.load_state_dict: expected .*, "
        r"got bias_correction=False, which is FusedAdam's$",
    ):
        opt.load_state_dict(fused_adam_of_apex(before[1], bias_correction=False))
    assert same_bits(states(run), before)


def test_apex_drop_in_takes_states_of_apex(
    device: torch.device, enabled: Callable[..., Run]
) -> None:
    model = net(device, 0)
    model, optimizer = apex_amp.initialize(
        model, FusedAdam(model.parameters()), "O2", num_losses=2, verbosity=0
    )
    state = of_apex(loss_scaler0=1024.0, loss_scaler1=32.0)
    apex_amp.load_state_dict(state)
    assert apex_amp.state_dict() == state
    *_, amp = enabled("O2")
    amp.load_state_dict(apex_amp.state_dict())
    assert amp.stats()["scales"] == {0: 1024.0, 1: 32.0}
    with pytest.raises(
        RuntimeError, match=r'Unexpected key\(s\) in state_dict: "counts", "loss_scale"'
    ):
        apex_amp.load_state_dict(amp.state_dict())
    assert apex_amp.state_dict() == state
    with apex_amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    apex_amp._amp_state.handle._deactivate()


# states of something else


def changed(
    of_optimizer: dict[str, Any], change: Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    state = copy.deepcopy(of_optimizer)
    change(state)
    return state


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "of a model": (
        lambda run: run[0].state_dict(),
        r"expected .*state, param_groups.* got \['first.bias', ",
    ),
    "of amp": (
        lambda run: run[2].state_dict(),
        r"expected .*state, param_groups.* got \['counts', ",
    ),
    "a list": (lambda run: [run[1].state_dict()], r"expected the keys .* got \['list'\]$"),
    "of fewer parameters": (
        lambda run: changed(run[1].state_dict(), lambda s: s["param_groups"][0]["params"].pop()),
        r"expected groups of \[6\] parameters, got groups of \[5\]$",
    ),
    "of more groups": (
        lambda run: changed(
            run[1].state_dict(), lambda s: s["param_groups"].append({"params": []})
        ),
        r"expected groups of \[6\] parameters, got groups of \[6, 0\]$",
    ),
    "of other shapes": (
        lambda run: changed(
            run[1].state_dict(), lambda s: s["state"][0].update(exp_avg=torch.ones(6, 16))
        ),
        r"expected the state of an Adam .*, "
        r"got state 0: exp_avg of shape \(6, 16\) for a parameter of \(16, 6\)",
    ),
    "without moments": (
        lambda run: changed(run[1].state_dict(), lambda s: s["state"][4].pop("exp_avg_sq")),
        r"expected .*, got state 4: \['exp_avg', 'step'\] without \['exp_avg_sq'\]$",
    ),
    "without step counts": (
        lambda run: changed(run[1].state_dict(), lambda s: s["state"][4].pop("step")),
        r"expected .*, got state 4: \['exp_avg', 'exp_avg_sq'\] without \['step'\]$",
    ),
    "of SGD": (
        lambda run: sgd(Net().parameters(), lr=0.1).state_dict(),
        r"expected the state of an Adam .*, got the parameter groups have no betas, eps",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    ("level", "optimizer"),
    [*itertools.product(["O1", "O2"], ADAMS), ("plain", "our AdamW")],
)
def test_optimizers_refuse_what_is_not_theirs(
    enabled: Callable[..., Run], device: torch.device, level: str, optimizer: str, wrong: str
) -> None:
    run = enabled("O2" if level == "plain" else level, ADAMS[optimizer])
    train(run, 0, 1)
    given, text = WRONG[wrong][0](run), WRONG[wrong][1]
    target: Any = run
    if level == "plain":
        model = net(device, 0, torch.float16)
        target = model, tritonamp.optim.AdamW(model.parameters())
        train(target, 0, 1)
    before = states(target)
    with pytest.raises(ValueError, match=rf"^AdamW.load_state_dict: {text}"):
        target[1].load_state_dict(given)
    assert same_bits(states(target), before)


def test_other_optimizers_refuse_other_counts(enabled: Callable[..., Run]) -> None:
    run = enabled("O2", sgd)
    train(run, 0, 1)
    before = states(run)
    with pytest.raises(
        ValueError,
        match=r"SGD.load_state_dict: expected groups of \[6\] parameters, got groups of \[1\]$",
    ):
        run[1].load_state_dict(sgd([nn.Parameter(torch.ones(1))], lr=0.1).state_dict())
    assert same_bits(states(run), before)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            lambda run: run[0].state_dict(),
            r"expected the keys .*of apex.amp \(loss_scaler0, .*got the keys \['first.bias', ",
        ),
        (
            lambda run: {str(n): n for n in range(50)},
            r"expected the keys .*got the keys \['0', .* and 30 more$",
        ),
        (lambda run: run[1].state_dict(), r"expected .*got the keys \['param_groups', 'state'\]$"),
        (lambda run: [run[2].state_dict()], "expected the keys .*got list$"),
        (
            lambda run: {},
            r"expected the keys .*got the keys \[\]: an empty state is that of a GradScaler",
        ),
        (
            lambda run: {"loss_scaler0": {"loss_scale": 1.0}},
            r"expected the keys .*got the keys \['loss_scaler0'\]$",
        ),
        (
            lambda run: {**run[2].state_dict(), "healed": ["gone"]},
            r"module: expected one of the model's, .*got 'gone'",
        ),
        (
            lambda run: {**run[2].state_dict(), "counts": [1, 2]},
            r"expected counts of \['clean', 'scale_overflows', .*\], got \[1, 2\]",
        ),
        (
            lambda run: {**run[2].state_dict(), "counts": {"clean": 1}},
            r"expected counts of \['clean', .*, got \{'clean': 1\}",
        ),
        (
            lambda run: {**run[2].scaler.state_dict(), "scale": float("nan")},
            "expected finite scales, got nan for loss_id 0",
        ),
    ],
)
def test_amp_refuses_what_is_not_its_own(
    enabled: Callable[..., Run], given: Any, text: str
) -> None:
    run = enabled()
    train(run, 0, 2)
    run[2].heal("last")
    before, state = states(run), given(run)
    # what comes before the healed modules is good
    if isinstance(state, dict) and "loss_scalers" in state:
        state["loss_scalers"]["0"]["scale"] = 2.0
    with pytest.raises(ValueError, match=text):
        run[2].load_state_dict(state)
    assert same_bits(states(run), before)


def test_a_step_of_the_users_own_in_a_group_stays(device: torch.device) -> None:
    model = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "step": 7}])
    amp = tritonamp.enable(model, optimizer, level="O0")
    for _ in range(3):
        amp.backward(model(torch.ones(2, 4, device=device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    steps = [float(state["step"]) for state in optimizer.state.values()]
    amp.disable()
    assert steps == [3.0, 3.0] and optimizer.param_groups[0]["step"] == 7


class Restored(torch.optim.SGD):
    """An optimizer with a format of its own."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"mine": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mine = state_dict["mine"]


def test_an_optimizer_with_a_format_of_its_own(device: torch.device) -> None:
    model = nn.Linear(4, 4, device=device)
    optimizer = Restored(model.parameters(), lr=0.1)
    amp = tritonamp.enable(model, optimizer, level="O2")
    optimizer.load_state_dict(optimizer.state_dict())
    amp.disable()
    assert optimizer.mine == 1


# what torch.distributed.checkpoint.state_dict, and clients through it, make of an optimizer


def fresh(level: str, kind: str, seed: int) -> Run:
    model = net(torch.device("cpu"), seed)
    optimizer = ADAMS[kind](model.parameters(), lr=1e-2)
    return model, optimizer, tritonamp.enable(model, optimizer, level=level)


@pytest.mark.parametrize("kind", ADAMS)
@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
def test_state_goes_through_torchs_functions(level: str, kind: str) -> None:
    """They have a fresh optimizer step on zeros first, which is no step of the run."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    run, again = fresh(level, kind, 0), fresh(level, kind, 1)
    train(run, 0, 2)
    model, optimizer, amp = again
    model.load_state_dict(run[0].state_dict())
    amp.load_state_dict(run[2].state_dict())  # first, as Accelerate does
    state = copy.deepcopy(get_optimizer_state_dict(run[0], run[1]))
    set_optimizer_state_dict(model, optimizer, state)
    assert amp.stats()["steps"] == 2 and len(amp.history) == 0
    assert train(again, 2, 4) == train(run, 2, 4)
    assert amp.stats()["steps"] == 4
    for run_ in (run, again):
        run_[2].disable()


def test_masters_are_unknown_to_torchs_functions() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer, amp = fresh("O2", "AdamW", 0)
    with pytest.raises(KeyError):
        get_optimizer_state_dict(model, optimizer)
    amp.disable()


def test_a_step_on_zeros_of_the_users_own_is_a_step() -> None:
    model, optimizer, amp = fresh("O1", "AdamW", 0)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    with pytest.raises(RuntimeError, match=r"no amp\.backward\(loss\) fed this optimizer"):
        optimizer.step()
    amp.disable()
