"""Copies of an enabled model: FP32 values of their own, the same forward, and no ``Amp``."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import more
from helpers import take_step
from runs import LEVELS, STATES, Training, named
from small_models import WrittenNorm
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import tritonamp
from tritonamp.casts import dispatch

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HALVES = [FP16, BF16]


class Adapted(nn.Module):
    """A frozen layer, half before ``enable``, and a trained adapter."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).half().requires_grad_(False)
        self.down = nn.Linear(size, 2, bias=False)
        self.up = nn.Linear(2, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(self.base.weight.dtype)) + self.up(self.down(x))


class Quantised(nn.Module):
    """Weights as integers, and half scales."""

    def __init__(self, size: int) -> None:
        super().__init__()
        codes = torch.randint(-8, 8, (size, size), dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(size, 1).half() / 32, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, (self.codes * self.scale).to(x.dtype))


class Tokens(nn.Module):
    """Each kind of tensor that levels store in different dtypes; the last layer is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Sequential(
            nn.Linear(8, 12), WrittenNorm(12), nn.Linear(12, 8), nn.LayerNorm(8)
        )
        self.adapted = Adapted(8)
        self.quantised = Quantised(8)
        self.head = nn.Linear(8, 16)
        self.register_buffer("table", torch.linspace(0, 1, 8))
        self.register_buffer("order", torch.arange(3))

        self.head.weight = self.embed.weight

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)
        self.head.weight = self.embed.weight  # a move to a GPU in software unties them
        return self

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(self.embed(ids) + self.table)
        return self.head(self.quantised(self.adapted(x)))


class Stepped(Training):
    """Has taken steps: its FP32 values are no half numbers."""

    def __init__(self, handles: Any, device: torch.device, steps: int = 2, **fields: Any) -> None:
        # one loss scale, so that nothing is skipped
        fields = {"loss_scale": 128.0, "enable": handles, **fields}
        super().__init__(Tokens, device=device, **fields)
        self.x = torch.randint(0, 16, (4, 5), device=device)
        for _ in range(steps):
            self.step()

    def loss(self, x: Any = None) -> Tensor:
        return loss_of(self.model, self.x)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def fields_of(level: str, state: str, half: torch.dtype) -> dict[str, Any]:
    if state == "8bit" and level == "O3":
        pytest.skip("O3 has no FP32 values to pack")
    return {"level": level, "state": state, "dtype": half}


def plain(model: nn.Module, device: torch.device) -> "Tokens":
    """The plain model with the values of a state."""
    found = Tokens().to(device)
    found.load_state_dict(model.state_dict())
    return found


def memory(*models: nn.Module) -> set[int]:
    return {t.untyped_storage().data_ptr() for m in models for t in m.state_dict().values()}


def assert_fp32_copy(copied: nn.Module, model: nn.Module, kept: set[torch.dtype]) -> None:
    """Assert that a copy holds FP32 values in memory of its own; ``kept`` are other dtypes."""
    expected, found = model.state_dict(), copied.state_dict()
    assert list(expected) == list(found)
    for name, value in expected.items():
        assert found[name].dtype is value.dtype and torch.equal(found[name], value), name
    own = dict(copied.named_parameters())
    assert {name: p.requires_grad for name, p in own.items()} == {
        name: p.requires_grad for name, p in model.named_parameters()
    }
    assert {p.dtype for p in own.values() if p.requires_grad} <= {FP32}
    assert {t.dtype for t in (*own.values(), *copied.buffers())} <= {FP32, *kept}
    assert not memory(copied) & {*memory(model), *(p.data_ptr() for p in model.parameters())}
    # a look at the state is no copy of it, so that loops over states move what they mean to
    assert memory(copied) == {p.data_ptr() for p in (*own.values(), *copied.buffers())}


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "copy of a shallow copy": lambda model: copy.deepcopy(copy.copy(model)),
    "in a list": lambda model: copy.deepcopy([model, 1])[0],
    "inside a module": lambda model: copy.deepcopy(nn.Sequential(model))[0],
    "in DataParallel": lambda model: copy.deepcopy(nn.DataParallel(model)).module,
    "compiled": lambda model: copy.deepcopy(torch.compile(model)),
    "AveragedModel": lambda model: AveragedModel(model).module,
    "copy of AveragedModel": lambda model: copy.deepcopy(AveragedModel(model)).module,
    "in inference mode": torch.inference_mode()(copy.deepcopy),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", WAYS)
def test_values_are_fp32(
    handles: Any, device: torch.device, way: str, level: str, half: torch.dtype, state: str
) -> None:
    run = Stepped(handles, device, **fields_of(level, state, half))
    run.model.register_forward_hook(lambda *_: None)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    copied = WAYS[way](run.model)
    assert isinstance(copied, Tokens)
    kept = {torch.int8, torch.int64, FP16}  # the last: frozen ones
    assert_fp32_copy(copied, run.model, kept)
    assert copied.head.weight is copied.embed.weight
    assert len(copied._forward_hooks) == 1
    assert not any(p.is_inference() for p in copied.parameters())
    assert tritonamp.handle(copied) is None and tritonamp.handle(run.model) is run.amp
    for tensor in copied.state_dict().values():
        tensor.zero_()
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    run.step()
    assert not any(tensor.any() for tensor in copied.state_dict().values())


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [name for name, _ in Tokens().named_modules()][1:])
def test_parts_that_are_copied_alone(
    handles: Any, device: torch.device, name: str, level: str, state: str
) -> None:
    run = Stepped(handles, device, **fields_of(level, state, FP16))
    copied = copy.deepcopy(run.model.get_submodule(name))
    front = f"{name}."
    expected = {
        name.removeprefix(front): value
        for name, value in run.model.state_dict().items()
        if name.startswith(front)
    }
    for key, value in copied.state_dict().items():
        assert value.dtype is expected[key].dtype and torch.equal(value, expected[key]), key
    assert tritonamp.handle(copied) is None


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_parts_compute(handles: Any, device: torch.device, level: str) -> None:
    """A part's copy is FP32 outside, and follows the op table inside an enabled forward.

    O3 has no op table: half inputs of a part inside of its model are torch's error.
    """
    run = Stepped(handles, device, level=level)
    body = copy.deepcopy(run.model.body)
    x = torch.randn(3, 8, device=device)
    expected = plain(run.model, device).body(x)
    torch.testing.assert_close(body(x), expected, rtol=1e-5, atol=1e-5)
    run.model.body = body  # as a teacher inside of the student
    output = run.model(run.x)
    assert output.dtype is FP32 and output.isfinite().all()


def test_a_parameter_that_is_copied_alone(handles: Any, device: torch.device) -> None:
    """As lists of averages are made."""
    run = Stepped(handles, device, level="O2")
    state = run.model.state_dict()
    copies = copy.deepcopy(list(run.model.parameters()))
    for copied, (name, param) in zip(copies, run.model.named_parameters(), strict=True):
        assert copied.dtype is state[name].dtype and torch.equal(copied, state[name]), name
        assert copied.requires_grad is param.requires_grad


def test_several_models(handles: Any, device: torch.device) -> None:
    """Of one Amp, and of two."""
    models = [nn.Linear(4, 4).to(device) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    both = handles(models[:2], optimizers[:2], level="O2")
    alone = handles(models[2], optimizers[2], level="O3", dtype=BF16)
    assert [tritonamp.handle(model) for model in models] == [both, both, alone]
    copies = copy.deepcopy(models)
    for copied, model in zip(copies, models, strict=True):
        assert_fp32_copy(copied, model, set())
    both.disable()
    assert_fp32_copy(copy.deepcopy(models[2]), models[2], set())
    assert copy.deepcopy(models[0]).weight.dtype is FP32
    half = copy.deepcopy(nn.Linear(4, 4).half())  # of no enabled model
    assert half.weight.dtype is FP16


@pytest.mark.parametrize("level", LEVELS)
def test_a_half_model_that_does_not_train(handles: Any, device: torch.device, level: str) -> None:
    """Where nothing has FP32 values the copy is as the model is, and shows what it holds."""
    model = nn.Linear(4, 4).to(device, FP16)
    handles(model, level=level)
    copied = copy.deepcopy(model)
    assert copied.weight.dtype is model.weight.dtype
    assert memory(copied) == {p.data_ptr() for p in copied.parameters()}
    x = torch.ones(2, 4, device=device)
    assert torch.equal(copied(x), model(x))


def test_a_half_model_that_was_disabled_is_copied_as_torch_does(
    handles: Any, device: torch.device
) -> None:
    model = nn.Linear(4, 4).to(device, FP16)
    other = handles(nn.Linear(4, 4).to(device), level="O2")
    amp = handles(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2")
    assert copy.deepcopy(model).weight.dtype is FP32
    amp.disable()
    assert copy.deepcopy(model).weight.dtype is FP16
    other.disable()


def test_torch_and_copy_are_left_as_they_were(handles: Any, device: torch.device) -> None:
    before = dict(copy._deepcopy_dispatch), AveragedModel.update_parameters
    model = nn.Linear(4, 4).to(device)
    amps = [handles(m, level="O2") for m in (model, nn.Linear(4, 4).to(device))]
    assert before != (copy._deepcopy_dispatch, AveragedModel.update_parameters)
    for amp in amps:
        amp.disable()
    assert before == (copy._deepcopy_dispatch, AveragedModel.update_parameters)


FORWARDS: list[tuple[str, dict[str, Any]]] = [
    *((level, {}) for level in LEVELS),
    *((level, {"cast_outputs": None}) for level in LEVELS),
    *((level, {"fp32_modules": ["body.0", "head"]}) for level in LEVELS[1:]),
    *((level, {"softmax_dtype": FP32}) for level in ("O1", "O2")),
    *((level, {"cast_inputs": cast}) for level in ("O1", "O2") for cast in (False, True)),
]


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("backend", ["eager", *more(["auto"])])
@pytest.mark.parametrize(("level", "fields"), FORWARDS, ids=str)
def test_the_forward_follows_the_same_policy(
    handles: Any,
    device: torch.device,
    level: str,
    fields: dict[str, Any],
    backend: str,
    half: torch.dtype,
) -> None:
    """The op table over FP32 weights is the forward of O1, bit for bit, for O3, too."""
    fields = {"dtype": half, "backend": backend, **fields}
    run = Stepped(handles, device, level=level, **fields)
    copied, other = copy.deepcopy(run.model), plain(run.model, device)
    # the frozen layer may be stored in another dtype
    other.adapted.base = copy.deepcopy(copied.adapted.base)
    handles(other, level="O0" if level == "O0" else "O1", **{"cast_outputs": FP32, **fields})
    found, expected, before = copied(run.x), other(run.x), run.model(run.x)
    assert found.dtype is expected.dtype and torch.equal(found, expected)
    # six layers after one another round to half, each by at most half an eps of its result
    scale = expected.abs().max().float()
    assert (found.float() - before.float()).abs().max() <= 6 * scale * torch.finfo(half).eps


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_outlives_the_enabled_model(handles: Any, device: torch.device, level: str) -> None:
    """Its forward stays as it was, functions that were registered by name included.

    torch is left as it was by ``disable``, and again once the copy is gone.
    """

    class Functions:
        @staticmethod
        def squared(x: Tensor) -> Tensor:
            return x * x

    class Squared(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Functions.squared(super().forward(x))

    original = Functions.squared
    tritonamp.register_float_function(Functions, "squared")
    model = Squared(4, 4).to(device)
    amp = handles(model, level=level)
    copied, x = copy.deepcopy(model), torch.randn(2, 4, device=device)
    expected = copied(x)
    amp.disable()
    assert not dispatch.is_registered() and Functions.squared is original
    for _ in range(2):
        assert torch.equal(copied(x), expected)
    assert dispatch.is_registered() is (Functions.squared is not original) is (level != "O0")
    del copied
    assert not dispatch.is_registered() and Functions.squared is original


@pytest.mark.parametrize("level", LEVELS)
def test_amps_of_model_and_copy_end_alone(handles: Any, device: torch.device, level: str) -> None:
    for first in (0, 1):
        run = Stepped(handles, device, level=level)
        copied = copy.deepcopy(run.model)
        amps = run.amp, handles(copied, level=level)
        models = run.model, copied
        values = [{k: v.clone() for k, v in m.state_dict().items()} for m in models]
        outputs = [m(run.x) for m in models]
        amps[first].disable()
        last = models[1 - first]
        assert torch.equal(last(run.x), outputs[1 - first])
        for m, before in zip(models, values, strict=True):
            assert all(torch.equal(v, before[k]) for k, v in m.state_dict().items())
        assert tritonamp.handle(models[first]) is None
        assert tritonamp.handle(last) is amps[1 - first]
        amps[1 - first].disable()
        assert type(run.model) is type(copied) is Tokens


# a copy is trained


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_trains_as_the_plain_model_does(
    handles: Any, device: torch.device, level: str, half: torch.dtype, state: str
) -> None:
    fields = {**fields_of(level, state, half), "loss_scale": 128.0}
    run = Stepped(handles, device, **fields)
    copied, other = copy.deepcopy(run.model), plain(run.model, device)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    losses: list[list[Tensor]] = []
    for model in (copied, other):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        amp = handles(model, optimizer, **fields)
        assert tritonamp.handle(model) is amp
        found: list[Tensor] = []
        for _ in range(3):
            loss = loss_of(model, run.x)
            take_step(amp, optimizer, loss)
            found.append(loss.detach())
        losses.append(found)
    assert torch.equal(*map(torch.stack, losses))
    for name, value in other.state_dict().items():
        assert torch.equal(copied.state_dict()[name], value), name
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    with pytest.raises(ValueError, match="enabled already"):
        tritonamp.enable(copied)
    tritonamp.handle(copied).disable()
    assert type(copied) is Tokens and not any(
        "tritonamp" in k for m in copied.modules() for k in vars(m)
    )


def test_a_module_around_a_copy_is_enabled(handles: Any, device: torch.device) -> None:
    run = Stepped(handles, device, level="O2", fp32_modules=["head"])
    around = nn.Sequential(copy.deepcopy(run.model))
    amp = handles(around, level="O1")
    assert amp.stats()["fused"] == ["0.body.1"]
    assert type(around[0].head) is nn.Linear
    with pytest.raises(ValueError, match="its submodule '0' is enabled already"):
        tritonamp.enable(nn.Sequential(run.model))


def test_a_copy_is_looked_at_by_check(handles: Any, device: torch.device) -> None:
    run = Stepped(handles, device, level="O2")
    reports = [
        str(tritonamp.check(model, None, (run.x,)))
        for model in (copy.deepcopy(run.model), plain(run.model, device))
    ]
    assert reports[0] == reports[1]


def test_a_copy_can_be_made_half_again(handles: Any, device: torch.device) -> None:
    """Where memory counts: a frozen reference of reinforcement learning."""
    run = Stepped(handles, device, level="O2")
    reference = copy.deepcopy(run.model).half().requires_grad_(False)
    assert {p.dtype for p in reference.parameters()} == {FP16, torch.int8}
    assert reference(run.x).isfinite().all()


def test_states_are_assigned_to_a_copy(handles: Any, device: torch.device) -> None:
    run = Stepped(handles, device, level="O2")
    copied, state = copy.deepcopy(run.model), run.model.state_dict()
    given = {name: value.clone() for name, value in state.items()}
    copied.load_state_dict(given, assign=True)
    assert memory(copied) == {value.data_ptr() for value in given.values()}
    assert torch.equal(copied(run.x), copy.deepcopy(run.model)(run.x))
    with pytest.raises(RuntimeError, match="load without assign"):
        run.model.load_state_dict(state, assign=True)


def test_a_pickle_of_a_copy_is_the_plain_model(handles: Any, device: torch.device) -> None:
    run = Stepped(handles, device, level="O2")
    copied = copy.deepcopy(run.model)
    for model in (run.model, copied, AveragedModel(run.model).module):
        loaded = pickle.loads(pickle.dumps(model))
        assert type(loaded) is Tokens
        assert all(torch.equal(v, copied.state_dict()[k]) for k, v in loaded.state_dict().items())


@pytest.mark.compiled
# in torch 2.11 and 2.12 torch.compile does so itself with any autograd function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_is_compiled(handles: Any, level: str) -> None:
    """Also where nothing is enabled any more."""
    run = Stepped(handles, torch.device("cpu"), level=level)
    copied = copy.deepcopy(run.model)
    expected = copied(run.x)
    run.amp.disable()
    compiled = torch.compile(copied, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(run.x), expected)
    torch._dynamo.reset()


# model and optimizer


class Trainer:
    """An object that holds both, as trainers of libraries do."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.model = optimizer, model


def of_trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    copied = copy.deepcopy(Trainer(model, optimizer))
    return copied.model, copied.optimizer


BOTH: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "model first": lambda model, optimizer: copy.deepcopy((model, optimizer)),
    "optimizer first": lambda *both: copy.deepcopy(both[::-1])[::-1],
    "an object": of_trainer,
}
OPTIMIZERS = named("AdamW", "our AdamW", "Lion", "SGD momentum", "NAdam")


def groups(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("way", BOTH)
def test_model_and_optimizer_stay_together(
    handles: Any, device: torch.device, way: str, kind: str, level: str, state: str
) -> None:
    """The copy of an optimizer is a plain one, over the FP32 parameters of the model's copy."""
    if kind == "NAdam" and state != "fp32":
        pytest.skip("its state has no other format")
    fields = {**fields_of(level, state, FP16), "loss_scale": 1.0}
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(device), None
    x = torch.randn(4, 6, device=device)
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=1e-3)
    amp = handles(model, optimizer, **fields)

    def train(model: Any, optimizer: Any, amp: Any) -> None:
        take_step(amp, optimizer, model(x).float().square().mean())

    for _ in range(2):
        train(model, optimizer, amp)
    copied, stepped = BOTH[way](model, optimizer)
    assert type(stepped) in (type(optimizer).__mro__)
    assert not hasattr(stepped, "_stepper")
    assert [id(p) for p in groups(stepped)] == [id(p) for p in copied.parameters()]
    assert set(stepped.state) == set(copied.parameters())
    assert_fp32_copy(copied, model, set())
    for of_param in stepped.state.values():
        assert all(v.dtype is not FP16 for v in of_param.values() if isinstance(v, Tensor))
    # plain torch goes on with it
    third, theirs = copy.deepcopy((copied, stepped))
    third(x).float().square().mean().backward()
    theirs.step()
    assert not torch.equal(third[0].weight, copied[0].weight)
    # and so does a second handle, with the same bits
    second = handles(copied, stepped, **fields)
    for _ in range(3):
        train(model, optimizer, amp)
        train(copied, stepped, second)
    if level != "O3":  # whose state was half, and is FP32 in the copy
        for name, value in model.state_dict().items():
            assert torch.equal(copied.state_dict()[name], value), name


@pytest.mark.parametrize("level", LEVELS)
def test_an_optimizer_that_is_copied_alone(handles: Any, device: torch.device, level: str) -> None:
    """As in torch: it steps on parameters of its own."""
    run = Stepped(handles, device, level=level)
    stepped = copy.deepcopy(run.optimizer)
    assert type(stepped) is torch.optim.AdamW
    held = {id(p) for p in (*run.model.parameters(), *run.amp.master_params())}
    assert not held & {id(p) for p in groups(stepped)}
    for copied, value in zip(groups(stepped), run.amp.master_params(), strict=True):
        assert copied.dtype is FP32 and torch.equal(copied, value.float())
        assert not torch.equal(stepped.state[copied]["exp_avg"], torch.zeros_like(copied))


@pytest.mark.parametrize(
    "how", [copy.copy, copy.deepcopy, pickle.dumps, lambda amp: copy.deepcopy({"amp": amp})]
)
def test_an_amp_is_not_copied(
    handles: Any, device: torch.device, how: Callable[[Any], Any]
) -> None:
    run = Stepped(handles, device, level="O2")
    with pytest.raises(TypeError, match=r"copy.deepcopy\(\(model, optimizer\)\), and call"):
        how(run.amp)
    model, optimizer = copy.deepcopy((run.model, run.optimizer))  # as the error says
    amp = handles(model, optimizer, level="O2")
    take_step(amp, optimizer, loss_of(model, run.x))


# handle


def test_handle(handles: Any, device: torch.device) -> None:
    run = Stepped(handles, device, level="O2", fp32_modules=["head"])
    for wrapped in (run.model, torch.compile(run.model), nn.DataParallel(run.model)):
        assert tritonamp.handle(wrapped) is run.amp
    parts = [module for module in run.model.modules() if module is not run.model]
    for other in (*parts, nn.Sequential(run.model), copy.deepcopy(run.model), nn.Linear(2, 2)):
        assert tritonamp.handle(other) is None
    for wrong in (None, run.optimizer, [run.model]):
        with pytest.raises(ValueError, match=r"model: expected a torch.nn.Module, got "):
            tritonamp.handle(wrong)
    shallow = copy.copy(run.model)  # of the same parameters
    assert tritonamp.handle(shallow) is run.amp
    run.amp.disable()
    assert tritonamp.handle(run.model) is None and tritonamp.handle(shallow) is None


def test_the_handle_of_a_model_whose_amp_was_dropped(device: torch.device) -> None:
    model = Tokens().to(device)
    tritonamp.enable(model, level="O2")
    assert model(torch.zeros(1, 2, dtype=torch.int64, device=device)).isfinite().all()
    found = tritonamp.handle(model)
    assert found.policy.cast_model
    found.disable()
    assert type(model) is Tokens
