"""Bad input gets a clear error, and nothing is lost."""

import copy
import io
import logging
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tritonamp
from tritonamp.kernels import device as hardware


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        """As SAM has it."""


def two(model: nn.Module) -> list[Any]:
    optimizer = adamw(model)
    return [optimizer, optimizer]


def replaced_step(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = adamw(model)
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    return optimizer


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any], str]] = {
    "zero for O": (
        adamw,
        {"level": "02"},
        "level: expected 'O0', 'O1'.*got '02'.*capital letter O.*'O2'",
    ),
    "lower case": (adamw, {"level": "o1"}, "level: expected .*got 'o1'.*: 'O1'"),
    "level 7": (adamw, {"level": "O7"}, "level: expected 'O0'.*got 'O7'"),
    "dtype": (
        adamw,
        {"dtype": torch.float32},
        "dtype: expected torch.float16 or torch.bfloat16, got torch.float32",
    ),
    "backend": (
        adamw,
        {"backend": "cuda"},
        "unknown backend 'cuda': allowed are 'auto', 'triton', 'eager'",
    ),
    "field": (
        adamw,
        {"keep_batchnorm_fp32": True},
        "fields of Policy, got the unknown keep_batchnorm_fp32: did you mean keep_norms_fp32 for "
        r"keep_batchnorm_fp32\? The fields are batch_invariant, .*, track_lost_updates$",
    ),
    "apex's keyword": (
        adamw,
        {"opt_level": "O2", "lossscale": 1.0},
        r"got the unknown lossscale, opt_level: did you mean loss_scale for lossscale, level for "
        r"opt_level\? The fields are ",
    ),
    "more words than the field": (
        adamw,
        {"optimizer_state": "bf16", "half_dtype": None, "cast_model_outputs": None},
        "did you mean cast_outputs for cast_model_outputs, dtype for half_dtype, state for "
        "optimizer_state",
    ),
    "misspelt fields whose words are fields": (
        adamw,
        {"state_dict_type": None, "gradient_dtype": None, "state_dtype": None},
        "did you mean grad_dtype for gradient_dtype, state_dict_dtype for state_dict_type, state "
        "for state_dtype",
    ),
    "misspelt argument": (adamw, {"back_end": "eager"}, r"did you mean backend for back_end\? The"),
    "unknown keyword": (adamw, {"zzz": 1}, r"got the unknown zzz\. The fields are batch_"),
    "keywords of others": (
        adamw,
        {"enabled": True, "growth_interval": 9, "num_losses": 2, "precision": "16-mixed"},
        r"did you mean level='O0' for enabled, scaler=tritonamp.GradScaler\(\.\.\.\) for "
        "growth_interval, loss_id of amp.backward for num_losses, level and dtype for precision",
    ),
    "misspelt level": (adamw, {"level": "O-2"}, r"got 'O-2': did you mean 'O2'\?$"),
    "number of a level": (adamw, {"level": 2}, r"got 2: did you mean 'O2'\?$"),
    "space after a level": (adamw, {"level": "O2 "}, r"got 'O2 ': did you mean 'O2'\?$"),
    "float16 for a level": (adamw, {"level": "fp16"}, r": did you mean dtype=torch.float16\?$"),
    "dtype for a level": (
        adamw,
        {"level": torch.bfloat16},
        r"level: .*got torch.bfloat16: did you mean dtype=torch.bfloat16\?$",
    ),
    "bits for a level": (adamw, {"level": 16}, r"got 16: did you mean dtype=torch.float16\?$"),
    "FP32 for a level": (adamw, {"level": "fp32"}, r"got 'fp32': did you mean 'O0'\?$"),
    "misspelt backend": (adamw, {"backend": "tritn"}, r"'eager'\. Did you mean 'triton'\?$"),
    "case of a backend": (adamw, {"backend": "Eager"}, r"'eager'\. Did you mean 'eager'\?$"),
    "misspelt state": (adamw, {"state": "8bits"}, r"got '8bits': did you mean '8bit'\?$"),
    "long name of a state": (adamw, {"state": "bfloat16"}, r"did you mean 'bf16'\?$"),
    "misspelt masters": (adamw, {"masters": "pack"}, r"got 'pack': did you mean 'packed'\?$"),
    "case of a response": (adamw, {"on_nonfinite": "Heal"}, r"did you mean 'heal'\?$"),
    "misspelt response": (adamw, {"on_nonfinite": "explan"}, r"did you mean 'explain'\?$"),
    "misspelt offload": (adamw, {"offload": "states"}, r"got 'states': did you mean 'state'\?$"),
    "name for grad_dtype": (
        adamw,
        {"grad_dtype": "fp32"},
        r"or torch.float32, got 'fp32': did you mean torch.float32\?$",
    ),
    "name of a dtype that is no half": (
        adamw,
        {"dtype": "fp32"},
        r"got 'fp32' \(for FP32 training use level='O0'\)",
    ),
    "double": (adamw, {"dtype": torch.float64}, "expected torch.float16 or .*got torch.float64 "),
    "conflict": (
        adamw,
        {"level": "O1", "master_weights": True},
        "master_weights=True needs cast_model=True",
    ),
    "fp32_modules": (
        adamw,
        {"fp32_modules": "encoder"},
        "fp32_modules: expected names .*got 'encoder', which matches no module.*modules are 0, 1",
    ),
    "fp32_results": (
        adamw,
        {"fp32_results": "encoder"},
        "fp32_results: expected names .*got 'encoder', which matches no module.*modules are 0, 1",
    ),
    "torch's scaler": (
        adamw,
        {"scaler": torch.amp.GradScaler("cpu")},
        r"scaler: expected a tritonamp.GradScaler, .*got torch\.amp",
    ),
    "scaler that is off": (
        adamw,
        {"scaler": tritonamp.GradScaler("cpu", enabled=False)},
        "scaler: expected an enabled GradScaler, got a disabled one: .*loss_scale=1.0",
    ),
    "two scales": (
        adamw,
        {"scaler": tritonamp.GradScaler("cpu"), "loss_scale": 2.0},
        "expected a scaler or a fixed loss_scale, got both a scaler and loss_scale=2.0: drop one",
    ),
    "foreign": (
        lambda m: adamw(nn.Linear(3, 5)),
        {},
        r"2 parameter.* not the model's \(group 0, number 0, shape \(5, 3\)",
    ),
    "LBFGS": (
        lambda m: torch.optim.LBFGS(m.parameters()),
        {},
        "LBFGS calls its closure many times",
    ),
    "closure needed": (
        lambda m: NeedsClosure(m.parameters()),
        {},
        "step of this NeedsClosure needs a closure",
    ),
    "level and policy": (adamw, {"policy": tritonamp.O1}, "got both level='O2' and policy"),
    "the default level and policy": (
        adamw,
        {"level": "O1", "policy": tritonamp.O2},
        "expected a level or a policy, got both level='O1' and policy.*drop one",
    ),
    "not an optimizer": (
        lambda m: "adam",
        {},
        "optimizer: expected a torch.optim.Optimizer or a list of them, got str",
    ),
    "scheduler": (
        lambda m: torch.optim.lr_scheduler.StepLR(adamw(m), 1),
        {},
        "got StepLR: give its optimizer, and step the scheduler by amp.step_schedulers",
    ),
    "class of an optimizer": (
        lambda m: torch.optim.AdamW,
        {},
        r"got the class AdamW: make an instance of it, AdamW\(model.parameters\(\), lr=\.\.\.\)$",
    ),
    "parameters": (
        lambda m: m.parameters(),
        {},
        "got generator: give the optimizer that was built from model.parameters",
    ),
    "array": (lambda m: np.ones((2, 3)), {}, "got ndarray$"),
    "level for an optimizer": (
        lambda m: "O2",
        {},
        r"got str 'O2': the order is tritonamp.enable\(model, optimizer, level='O2'\), or .* for "
        "inference",
    ),
    "dtype for an optimizer": (
        lambda m: torch.float16,
        {},
        "got dtype: write dtype=torch.float16$",
    ),
    "scaler for an optimizer": (
        lambda m: tritonamp.GradScaler("cpu"),
        {},
        r"got GradScaler: the handle has a scaler, amp.scaler\. .*scaler=tritonamp.GradScaler",
    ),
    "model for an optimizer": (
        lambda m: net(),
        {},
        r"got Sequential: the order is .*, tritonamp.enable\(\[model, criterion\], \.\.\.\)$",
    ),
    "twice": (two, {}, "the same optimizer is in the list twice"),
    "replaced step": (replaced_step, {}, "step of this AdamW was replaced on the instance"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_changes(case: str) -> None:
    make_optimizer, arguments, text = REFUSED[case]
    model = net()
    optimizer = make_optimizer(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"(?s){text}"):
        tritonamp.enable(model, optimizer, **{"level": "O2", **arguments})
    assert type(model) is nn.Sequential
    assert all(
        v.dtype == torch.float32 and torch.equal(v, before[k])
        for k, v in model.state_dict().items()
    )


@pytest.mark.parametrize("model", [nn.Linear(2, 2).weight, [], [net(), "net"], None])
def test_models_that_are_none(model: Any) -> None:
    with pytest.raises(ValueError, match=r"model: expected a .*[mM]odule.*, got "):
        tritonamp.enable(model)


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        (adamw(net()), r"AdamW: the order is tritonamp.enable\(model, optimizer, level='O2'\)$"),
        ([net(), adamw(net())], "AdamW: the order is"),
        (net().parameters(), r"generator: give the model itself, not model.parameters\(\); "),
        (list(net().parameters()), "Parameter: give the model itself, "),
        ("resnet18", "str 'resnet18': build the model first, and give the object$"),
        (nn.Linear, r"the class Linear: make an instance of it, model = Linear\(\.\.\.\)$"),
        (net().state_dict(), r"OrderedDict: give the model itself, not its state_dict\(\)"),
        (3, "int$"),
    ],
    ids=["swapped", "a list of both", "parameters", "list", "name", "class", "state", "number"],
)
def test_what_is_no_model_is_told_its_place(model: Any, hint: str) -> None:
    text = f"^model: expected a torch.nn.Module or a list of them, got {hint}"
    with pytest.raises(ValueError, match=text):
        tritonamp.enable(model, adamw(net()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("prefix", ["", "torch.", "fp"])
def test_names_of_dtypes(dtype: torch.dtype, prefix: str) -> None:
    name = {"fp": "fp16" if dtype is torch.float16 else "bf16"}.get(
        prefix, f"{prefix}{str(dtype).removeprefix('torch.')}"
    )
    with pytest.raises(ValueError, match=rf"dtype: .*got '{name}': did you mean {dtype}\?$"):
        tritonamp.enable(net(), dtype=name)
    with pytest.raises(ValueError, match=r"got 'half': did you mean torch.float16\?$"):
        tritonamp.enable(net(), dtype="half")


def test_level_by_position() -> None:
    for level in ("O2", tritonamp.O2):
        model = net()
        with tritonamp.enable(model, adamw(model), level) as amp:
            assert amp.policy == tritonamp.O2


@pytest.mark.parametrize("max_norm", [-1.0, float("nan"), "1.0", None, iter(())])
def test_norms_to_clip_to(max_norm: Any) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tritonamp.enable(model, optimizer, level="O1") as amp:
        amp.backward(model(torch.ones(1, 4)).sum() * 1e-2)
        with pytest.raises(ValueError, match=r"max_norm: expected a number of 0 or more, got"):
            amp.clip_grad_norm_(max_norm)
        amp.clip_grad_norm_(float("inf"))  # which asks for the norm only
        optimizer.step()
        assert amp.stats()["skipped"] == 0


def test_models_without_values() -> None:
    for model in (nn.LazyLinear(3), nn.Linear(2, 2, device="meta")):
        with pytest.raises(ValueError, match="parameter 'weight' has no values yet"):
            tritonamp.enable(model)


def test_script_module() -> None:
    with pytest.warns((DeprecationWarning, FutureWarning)):
        model = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="ScriptModule"):
        tritonamp.enable(model)


def test_enabled_twice() -> None:
    model = net()
    optimizer = adamw(model)
    amp = tritonamp.enable(model, optimizer, fp32_modules="1")
    with pytest.raises(ValueError, match=r"submodule '0' is a part of a model that is enabled"):
        tritonamp.enable(nn.Sequential(model[1]))
    with pytest.raises(ValueError, match="AdamW is enabled already, with another model: build"):
        tritonamp.enable(net(), optimizer)
    for given in (nn.Sequential(model), model):
        where = "it" if given is model else "its submodule '0'"
        with pytest.raises(ValueError, match=f"{where} is enabled already: keep") as raised:
            tritonamp.enable(given)
        code = r"tritonamp\.handle\(.+?\)+(?:\.disable\(\))?"
        keep, disable = re.findall(code, str(raised.value))
        assert eval(keep, {"tritonamp": tritonamp, "model": given}) is amp
    assert eval(disable, {"tritonamp": tritonamp, "model": given}) is None
    with pytest.raises(RuntimeError, match=r"amp.backward\(\): this model was disabled"):
        amp.backward(model(torch.ones(1, 4)).sum() * 1e-2)
    with tritonamp.enable(model, optimizer, level="O2") as other:  # and again, at another level
        amp.disable()  # a second time, which does nothing
        assert tritonamp.handle(model) is other
    other.disable()
    assert type(model) is nn.Sequential


def test_a_handle_is_no_pair(run: Any) -> None:
    model, _, amp = run
    with pytest.raises(TypeError, match=r"write amp = tritonamp.enable\(\.\.\.\)\.") as raised:
        model, _optimizer = amp
    assert "amp = tritonamp.handle(model)" in str(raised.value)
    assert tritonamp.handle(model) is amp


def test_methods_of_torchs_scaler(run: Any) -> None:
    model, optimizer, amp = run
    loss = model(torch.ones(1, 4)).sum() * 1e-2
    with pytest.raises(AttributeError, match=r"no 'scale': write amp.backward\(loss\), or amp\.sc"):
        amp.scale(loss).backward()
    amp.scaler.scale(loss).backward()
    for name, code in (
        ("step", r"optimizer\.step\(\)"),
        ("update", r"optimizer\.step\(\), which "),
    ):
        with pytest.raises(AttributeError, match=f"an Amp has no '{name}': write {code}"):
            getattr(amp, name)
    optimizer.step()
    assert not hasattr(amp, "get_scale") and amp.stats()["scale"] == 2.0**16
    with pytest.raises(AttributeError, match="'Amp' object has no attribute 'nothing'"):
        amp.nothing()


@pytest.mark.parametrize(
    "function",
    [pickle.dumps, copy.copy, copy.deepcopy, lambda amp: torch.save({"amp": amp}, io.BytesIO())],
    ids=["pickle", "copy", "deepcopy", "torch.save"],
)
def test_what_is_saved_is_the_state(run: Any, function: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*save amp.state_dict\(\)"):
        function(run[2])


def test_triton_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    monkeypatch.setattr(hardware, "INTERPRETED", False)
    with pytest.raises(
        tritonamp.UnsupportedDeviceError,
        match="backend='triton' cannot run: cpu is not an NVIDIA GPU",
    ):
        tritonamp.enable(net(), backend="triton")


def test_bf16_on_a_device_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "capability", lambda device: (7, 5))
    with pytest.raises(
        tritonamp.UnsupportedDeviceError,
        match=r"needs compute capability 8.0, cpu has 7.5.*float16",
    ):
        tritonamp.enable(net(), dtype=torch.bfloat16)


@pytest.fixture
def run(handles: Callable[..., Any]) -> Any:
    model = net()
    optimizer = adamw(model)
    return model, optimizer, handles(model, optimizer, level="O2")


def test_closure(run: Any) -> None:
    model, optimizer, amp = run
    with pytest.raises(RuntimeError, match="a skipped step cannot run the closure again"):
        optimizer.step(lambda: None)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        amp.scaler.step(optimizer, lambda: None)
    amp.backward(model(torch.ones(1, 4)).sum() * 1e-2)
    optimizer.step(None)  # Accelerate passes one like this


def test_without_backward(run: Any) -> None:
    _, _, amp = run
    with pytest.raises(RuntimeError, match=r"unscale_\(\) before any backward"):
        amp.unscale_()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_\(\) before any backward.*A plain"):
        amp.clip_grad_norm_(1.0)


def test_plain_backward_is_explained_not_trained(run: Any) -> None:
    model, optimizer, amp = run
    before = [p.detach().clone() for p in amp.master_params()]
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(
        RuntimeError, match=r"4 parameter\(s\) have gradients, but no amp.backward\(loss\)"
    ):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(), strict=True))
    optimizer.zero_grad()
    amp.backward(model(torch.ones(1, 4)).sum() * 1e-2)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"call step\(\) once per backward"):
        optimizer.step()


def test_plain_backward_where_nothing_is_scaled() -> None:
    for fields in ({"level": "O0"}, {"level": "O2", "dtype": torch.bfloat16}, {"level": "O3"}):
        model = net()
        optimizer = adamw(model)
        amp = tritonamp.enable(model, optimizer, **fields)
        optimizer.step()  # as in torch: nothing to do
        model(torch.ones(1, 4)).sum().backward()
        amp.clip_grad_norm_(1.0)
        optimizer.step()
        assert amp.stats()["steps"] == 1
        amp.disable()


def test_backward_without_optimizer_and_with_a_foreign_one() -> None:
    model = net()
    amp = tritonamp.enable(model)
    with pytest.raises(RuntimeError, match="enabled without an optimizer"):
        amp.backward(model(torch.ones(1, 4)).sum() * 1e-2)
    for call in (amp.unscale_, lambda: amp.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match="enabled without an optimizer"):
            call()
    amp.disable()
    amp = tritonamp.enable(model, adamw(model))
    with pytest.raises(
        ValueError, match=r"optimizer 0: expected one given to tritonamp.enable, got AdamW, which"
    ):
        amp.backward(model(torch.ones(1, 4)).sum(), adamw(model))
    with pytest.raises(ValueError, match="loss_id: expected an int, got 'gen'"):
        amp.backward(model(torch.ones(1, 4)).sum(), loss_id="gen")
    with pytest.raises(ValueError, match="got Tensor, which was not: give an optimizer, a list"):
        amp.backward(model(torch.ones(1, 4)).sum(), torch.ones(()))
    amp.disable()


class Outputs(dict[str, Any]):
    """As transformers returns them."""


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda out: 1.0, "expected a Tensor, got float: give the loss itself$"),
        (
            lambda out: Outputs(loss=out),
            r"got Outputs: give the loss itself, such as outputs\.loss",
        ),
        (lambda out: out, r"only for scalar outputs, got a Tensor of shape \(3, 2\): reduce it"),
        (lambda out: out.sum().detach(), "got one that does not require grad and does not have a"),
        (
            lambda out: torch.tensor(out.sum().item()),
            r"look for torch\.no_grad\(\), \.detach\(\), ",
        ),
    ],
    ids=["float", "outputs", "rows", "detached", "made again"],
)
def test_losses_without_a_backward(run: Any, loss: Callable[[Any], Any], text: str) -> None:
    model, optimizer, amp = run
    given = loss(model(torch.ones(3, 4)))
    error = RuntimeError if isinstance(given, torch.Tensor) else ValueError  # as in torch
    with pytest.raises(error, match=f"^loss: .*{text}"):
        amp.backward(given)
    amp.backward(model(torch.ones(3, 4)).sum().reshape(1) * 1e-2)  # as torch has it
    optimizer.step()
    assert (amp.stats()["steps"], amp.stats()["skipped"]) == (1, 0)
    with amp.scale_loss(model(torch.ones(3, 4))) as scaled:  # as the message says
        scaled.backward(torch.full((3, 2), 1e-2))


def test_torchs_arguments_of_clipping(run: Any) -> None:
    model, _, amp = run
    amp.backward(model(torch.ones(3, 4)).sum() * 1e-2)
    text = r"max_norm: expected a number .*, got generator and 1 more: amp.clip_grad_norm_\(1\.0\)"
    with pytest.raises(ValueError, match=text):
        amp.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ValueError, match=r"got 1\.0 and 1 more: "):
        amp.clip_grad_norm_(1.0, 2.0)
    with pytest.raises(ValueError, match="got Parameter and 1 more: "):
        amp.clip_grad_norm_(model[0].weight, 1.0)


def test_the_numbers_of_a_run_while_it_sleeps(run: Any) -> None:
    model, optimizer, amp = run
    amp.backward(model(torch.ones(3, 4)).sum() * 1e-2)
    optimizer.step()
    before = amp.metrics()
    amp.sleep()
    assert amp.metrics() == before != {}
    with pytest.raises(RuntimeError, match=r"Call amp\.wake\(\) first"):
        amp.stats()
    amp.wake()


def test_raise_on_nonfinite() -> None:
    model = net()
    optimizer = adamw(model)
    amp = tritonamp.enable(model, optimizer, level="O2", on_nonfinite="raise")
    before = [p.detach().clone() for p in amp.master_params()]
    amp.backward(model(torch.ones(1, 4)).sum() * float("inf"))
    with pytest.raises(
        tritonamp.NonFiniteError, match="forward fault: the loss itself was inf or NaN"
    ):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, amp.master_params(), strict=True))
    optimizer.zero_grad()
    for _ in range(8):  # overflows at the initial scale are how it finds its level, no error
        amp.backward(model(torch.full((1, 4), 100.0)).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert 0 < amp.stats()["scale_overflows"] < 8
    amp.disable()


def test_explain_on_nonfinite(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = adamw(model)
    amp = tritonamp.enable(model, optimizer, level="O2", on_nonfinite="explain", loss_scale=4.0)
    assert amp.explain() == "No step was skipped."
    for bad in (False, True):
        amp.backward(model(torch.ones(1, 4)).sum() * 1e-2)
        if bad:
            model[0].weight.grad.fill_(float("nan"))
        optimizer.step()
        optimizer.zero_grad()
    assert ["parameter(s) were NaN: 0.weight" in record.message for record in caplog.records] == [
        True
    ]
    amp.disable()


def test_states_of_another_kind(run: Any) -> None:
    _, _, amp = run
    with pytest.raises(
        ValueError,
        match=r"expected the keys of .*'counts', 'loss_scale', 'loss_s.*, "
        r"got the keys \['model', 's",
    ):
        amp.load_state_dict({"model": {}, "step": 3})
    with pytest.raises(ValueError, match="that of a GradScaler with enabled=False, leave it out"):
        amp.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    amp.load_state_dict({**torch.amp.GradScaler("cpu").state_dict(), "scale": 128.0})
    assert amp.stats()["scale"] == 128.0
    dynamic = amp.state_dict()
    counts = {**dynamic["counts"], "clean": 9}
    for name in ("faults", "schedulers", "outliers"):
        with pytest.raises(TypeError):
            amp.load_state_dict({**dynamic, "counts": counts, name: 3})
        assert amp.state_dict() == dynamic
    model = net()
    fixed = tritonamp.enable(model, adamw(model), level="O2", dtype=torch.bfloat16)
    fixed.load_state_dict(dynamic)
    assert fixed.stats()["scale"] == 1.0
    fixed.load_state_dict({**dynamic, "loss_scale": 1024.0})  # another fixed one
    assert fixed.stats()["scale"] == 1.0
    amp.load_state_dict(fixed.state_dict())  # no reason to begin at 1
    assert amp.stats()["scale"] == 128.0
    fixed.disable()


def test_arguments_by_habit(run: Any) -> None:
    model, _, amp = run
    with pytest.raises(ValueError, match=r"module: expected a name, got Linear: write '1'$"):
        amp.heal(model[1])
    with pytest.raises(ValueError, match=r"module: expected a name, got Linear$"):
        amp.heal(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"decay: .*, got Sequential: amp\.ema\(0\.999\) averages"):
        amp.ema(model)
    with pytest.raises(ValueError, match=r"replay: .*, got Tensor: amp\.explain\(replay=lambda: "):
        amp.explain(model(torch.ones(1, 4)).sum())
    # as torch.cuda.amp.GradScaler takes it
    with pytest.raises(ValueError, match=r"device: .*, got 65536\.0: write init_scale=65536\.0$"):
        tritonamp.GradScaler(65536.0)
    with pytest.raises(ValueError, match=r"device: .*: write init_scale=np\.float32\(8\.0\)$"):
        tritonamp.GradScaler(np.float32(8))


def test_assign_would_cut_the_optimizer_off(run: Any) -> None:
    model, _, _ = run
    with pytest.raises(RuntimeError, match="load without assign"):
        model.load_state_dict(model.state_dict(), assign=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="in software .cuda() makes parameters")
def test_moved_after_enable(run: Any, cuda: torch.device) -> None:
    model, optimizer, amp = run
    model.cuda()
    amp.backward(model(torch.ones(1, 4, device="cuda")).sum())
    with pytest.raises(
        RuntimeError, match=r"is on cuda:0, its FP32 master on cpu: move the model .* before"
    ):
        optimizer.step()
    model.cpu()


def test_a_loop_of_torchs_goes_on_after_it_caught_the_error(device: torch.device) -> None:
    model = nn.Linear(4, 3).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    amp = tritonamp.enable(model, optimizer, level="O1", on_nonfinite="raise")
    errors = 0
    for i in range(4):
        loss = model(torch.ones(2, 4, device=device)).mean() * (float("nan") if i == 1 else 1.0)
        optimizer.zero_grad()
        amp.scaler.scale(loss).backward()
        try:
            amp.scaler.step(optimizer)
            amp.scaler.update()
        except tritonamp.NonFiniteError:
            errors += 1
    stats = amp.stats()
    amp.disable()
    assert (errors, stats["steps"], stats["skipped"]) == (1, 3, 1)


@pytest.mark.parametrize("response", ["skip", "explain"])
def test_users_without_logging_see_the_first_skips(
    response: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    model = net()
    optimizer = adamw(model)
    with tritonamp.enable(model, optimizer, "O2", on_nonfinite=response) as amp:
        for i in range(9):
            amp.backward(model(torch.full((1, 4), 100.0)).sum())
            if i > 6:
                amp.veto(True)
            optimizer.step()
            optimizer.zero_grad()
        stats = amp.stats()
    assert stats["scale_overflows"] > 1 and stats["vetoes"] == 2
    overflow, veto = capsys.readouterr().err.splitlines()
    advised = overflow.partition("INFO lines: ")[2].partition(" shows them")[0]
    logger = logging.getLogger("tritonamp")
    before = logger.level
    try:
        exec(advised, {"logging": logging})  # as it is printed
        assert logger.level == logging.INFO and logging.getLogger().handlers
    finally:
        logger.setLevel(before)
    assert overflow.startswith("step 1 skipped (1 of 1): scale overflow: the loss was finite, ")
    assert "That is normal in the first steps. Later skips of this kind are INFO" in overflow
    assert "veto: amp.veto was called with True" in veto and "'ERROR' hides all" in veto
