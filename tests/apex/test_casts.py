"""The casts that amp.init and level O1 put around torch's functions: apex's lists, everywhere in
the process.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tritonamp.apex import amp
from tritonamp.apex.amp import _amp_state

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Function = Callable[..., Tensor]


def square(n: int = 8) -> Tensor:
    return torch.eye(n) + 0.1


# looked up when they are called: names that a script has imported before amp.init stay what they
# were
HALF: dict[str, Function] = {
    "F.linear": lambda x: F.linear(x, square().to(x.device), torch.ones(8, device=x.device)),
    "F.conv1d": lambda x: F.conv1d(x[None], torch.ones(4, 8, 3, device=x.device)),
    "F.conv2d": lambda x: F.conv2d(x[None, None], torch.ones(4, 1, 3, 3, device=x.device)),
    "F.conv_transpose2d": lambda x: F.conv_transpose2d(
        x[None, None], torch.ones(1, 4, 3, 3, device=x.device)
    ),
    "F.prelu": lambda x: F.prelu(x, torch.full((1,), 0.25, device=x.device)),
    "torch.matmul": lambda x: torch.matmul(x, square().to(x.device)),
    "torch.mm": lambda x: torch.mm(square().to(x.device), x),
    "torch.mv": lambda x: torch.mv(x, torch.ones(8, device=x.device)),
    "torch.bmm": lambda x: torch.bmm(x[None], square().to(x.device)[None]),
    "torch.addmm": lambda x: torch.addmm(torch.zeros(8, device=x.device), x, square().to(x.device)),
    "torch.baddbmm": lambda x: torch.baddbmm(
        torch.zeros(1, 8, 8, device=x.device), x[None], x[None]
    ),
    "torch.einsum": lambda x: torch.einsum("ij,kj->ik", x, square().to(x.device)),
    "Tensor.matmul": lambda x: x.matmul(square().to(x.device)),
    "@": lambda x: x @ square().to(x.device),
    "reflected @": lambda x: square().to(x.device) @ x,
    "Tensor.mm": lambda x: x.mm(square().to(x.device)),
    "attention": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], square().to(x.device)[None]
    ),
}
FLOAT: dict[str, Function] = {
    "F.softmax": lambda x: F.softmax(x, -1),
    "F.log_softmax": lambda x: F.log_softmax(x, -1),
    "F.softmin": lambda x: F.softmin(x, -1),
    "Tensor.softmax": lambda x: x.softmax(-1),
    "F.softplus": lambda x: F.softplus(x),
    "F.gelu": lambda x: F.gelu(x),
    "F.layer_norm": lambda x: F.layer_norm(x, (8,), torch.ones(8, device=x.device)),
    "F.group_norm": lambda x: F.group_norm(x, 4, torch.ones(8, device=x.device)),
    "F.normalize": lambda x: F.normalize(x),
    "F.local_response_norm": lambda x: F.local_response_norm(x[None], 2),
    "F.cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0)),
    "F.interpolate": lambda x: F.interpolate(x[None], scale_factor=2.0),
    "F.cross_entropy": lambda x: F.cross_entropy(x, torch.arange(8, device=x.device)),
    "F.nll_loss": lambda x: F.nll_loss(x, torch.arange(8, device=x.device)),
    "F.mse_loss": lambda x: F.mse_loss(x, x.flip(0)),
    "F.l1_loss": lambda x: F.l1_loss(x, x.flip(0)),
    "F.smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.flip(0)),
    "F.kl_div": lambda x: F.kl_div(x, x.flip(0).abs(), reduction="batchmean"),
    "with logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "torch.exp": lambda x: torch.exp(x),
    "torch.pow": lambda x: torch.pow(x, 2.0),
    "**": lambda x: x**2,
    "reflected **": lambda x: 2**x,
    "Tensor.log": lambda x: x.abs().log(),
    "torch.rsqrt": lambda x: torch.rsqrt(x.abs()),
    "torch.sum": lambda x: torch.sum(x),
    "Tensor.sum": lambda x: x.sum(0),
    "Tensor.prod": lambda x: x.prod(),
    "Tensor.cumsum": lambda x: x.cumsum(0),
    "Tensor.norm": lambda x: x.norm(),
    "torch.norm": lambda x: torch.norm(x),
    "Tensor.std": lambda x: x.std(),
    "Tensor.var": lambda x: x.var(0),
    "Tensor.cpu": lambda x: x.cpu(),
}
AS_GIVEN: dict[str, Function] = {
    "F.relu": lambda x: F.relu(x),
    "mean": lambda x: torch.mean(x),
    "max": lambda x: x.max(),
    "dropout": lambda x: F.dropout(x),
    "batch_norm": lambda x: F.batch_norm(
        x, torch.zeros(8, device=x.device), torch.ones(8, device=x.device)
    ),
}
LISTS = [
    *(pytest.param(f, {FP16: FP16, FP32: FP16}, id=name) for name, f in HALF.items()),
    *(pytest.param(f, {FP16: FP32, FP32: FP32}, id=name) for name, f in FLOAT.items()),
    *(pytest.param(f, {FP16: FP16, FP32: FP32}, id=name) for name, f in AS_GIVEN.items()),
]


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize(("function", "expected"), LISTS)
def test_lists(
    function: Function, expected: dict[torch.dtype, torch.dtype], dtype: torch.dtype, device: Any
) -> None:
    """Dtype, value and gradient: as FP64 computes them from the rounded inputs, to a few roundings
    of the result.
    """
    torch.manual_seed(0)
    x = torch.randn(8, 8).to(device, dtype).requires_grad_()
    amp.init()
    torch.manual_seed(0)  # dropout
    result = function(x)
    assert result.dtype is expected[dtype]
    result.float().sum().backward()
    assert x.grad is not None and x.grad.dtype is dtype
    with amp.disable_casts():
        exact = x.detach().to(expected[dtype]).to(FP32)
        torch.manual_seed(0)
        wanted = function(exact)
        eps = torch.finfo(min((dtype, expected[dtype]), key=lambda d: torch.finfo(d).bits)).eps
        # sums of at most 64 numbers of a few units
        assert (result.float() - wanted).abs().max() <= 4 * eps * wanted.abs().max() + 8 * eps


BINARY = {
    "+": lambda x, y: x + y,
    "torch.mul": lambda x, y: torch.mul(x, y),
    "/": lambda x, y: x / y,
    "atan2": lambda x, y: torch.atan2(x, y),
    "Tensor.atan2": lambda x, y: x.atan2(y),
    "dot": lambda x, y: torch.dot(x, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack((x, y)),
    "0-d": lambda x, y: x * y[0],
}


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize(
    ("left", "right"), [(FP16, FP16), (FP16, FP32), (FP32, FP16), (FP32, FP32)]
)
def test_promotion(name: str, left: torch.dtype, right: torch.dtype, device: torch.device) -> None:
    amp.init()
    x = torch.full((4,), 3.0, device=device, dtype=left).requires_grad_()
    y = torch.full((4,), 0.5, device=device, dtype=right)
    result = BINARY[name](x, y)
    assert result.dtype is (FP16 if left is right is FP16 else FP32)
    result.float().sum().backward()
    assert x.grad is not None and x.grad.dtype is left


def test_comparisons_and_equal_take_mixed_arguments(device: torch.device) -> None:
    amp.init()
    half, full = torch.ones(3, device=device, dtype=FP16), torch.ones(3, device=device)
    assert torch.equal(half, full) and bool((half == full).all()) and not bool((half < full).any())


@pytest.mark.parametrize("name", ["exp_", "log_", "pow_", "cumsum_"])
def test_in_place_functions_of_the_fp32_list_refuse_half(name: str, device: torch.device) -> None:
    amp.init()
    arguments = {"pow_": (2,), "cumsum_": (0,)}.get(name, ())
    x = torch.ones(4, device=device)
    assert getattr(x, name)(*arguments).dtype is FP32
    with pytest.raises(
        NotImplementedError,
        match=rf"{name} in place on a half tensor.*Use {name[:-1]} out of place",
    ):
        getattr(x.half(), name)(*arguments)


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_other_in_place_functions_keep_the_dtype_of_the_tensor(
    dtype: torch.dtype, device: torch.device
) -> None:
    amp.init()
    other = FP32 if dtype is FP16 else FP16
    x, y = (
        torch.ones(2, 2, device=device, dtype=dtype),
        torch.ones(2, 2, device=device, dtype=other),
    )
    same = x
    for result in (x.add_(y), x.mul_(y), x.addmm_(y, y), x.addcmul_(y, y)):
        assert result is same and result.dtype is dtype
    assert x.tolist() == [[5.0, 5.0], [5.0, 5.0]]  # (1 + 1) * 1 + 2 + 1


@pytest.mark.parametrize(
    "call", [lambda *a: F.binary_cross_entropy(*a), nn.BCELoss()], ids=["function", "module"]
)
def test_binary_cross_entropy_is_banned_on_half(call: Any, device: torch.device) -> None:
    x, target = torch.full((4,), 0.25, device=device), torch.ones(4, device=device)
    amp.init()
    with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits"):
        call(x.half(), target)
    assert call(x, target).dtype is FP32
    amp.init(allow_banned=True)
    assert torch.equal(call(x.half(), target), call(x, target))


CELLS = [nn.RNNCell, nn.GRUCell, nn.LSTMCell]
LAYERS = [functools.partial(nn.RNN, nonlinearity="relu"), nn.RNN, nn.GRU, nn.LSTM]


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_cells(cell: Any, dtype: torch.dtype, device: torch.device) -> None:
    amp.init()
    x = torch.randn(4, 8).to(device, dtype).requires_grad_()
    module = cell(8, 8).to(device)
    output = module(x)
    output = output[0] if isinstance(output, tuple) else output
    assert output.dtype is FP16
    output.float().sum().backward()
    assert x.grad is not None and x.grad.dtype is dtype and module.weight_hh.grad is not None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_recurrent_layers(
    layer: Any, dtype: torch.dtype, packed: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    module = layer(8, 8, num_layers=2, bidirectional=True).to(device)
    x = torch.randn(5, 3, 8).to(device, dtype).requires_grad_()
    given = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 2])) if packed else x
    wanted, _ = module(
        nn.utils.rnn.pack_padded_sequence(x.float(), torch.tensor([5, 4, 2]))
        if packed
        else x.float()
    )
    amp.init()
    output, _ = module(given)
    values, exact = (output.data, wanted.data) if packed else (output, wanted)
    assert values.dtype is FP16
    # weights and inputs rounded to 11 bits, ten steps
    assert (values.float() - exact).abs().max() < 0.02
    values.float().sum().backward()
    assert x.grad is not None and x.grad.dtype is dtype


def test_fp64_integers_and_disabled_casts_are_left_alone(device: torch.device) -> None:
    amp.init()
    double, number = (
        torch.ones(2, 2, device=device, dtype=FP64),
        torch.ones(2, 2, device=device, dtype=torch.int64),
    )
    assert (
        (double @ double).dtype is FP64
        and double.sum().dtype is FP64
        and number.sum().dtype is torch.int64
    )
    full = torch.ones(2, 2, device=device)
    with amp.disable_casts():
        assert torch.mm(full, full).dtype is FP32 and full.half().sum().dtype is FP16
        with pytest.raises(ZeroDivisionError), amp.disable_casts():
            raise ZeroDivisionError
        assert torch.mm(full, full).dtype is FP32
    assert torch.mm(full, full).dtype is FP16


def test_deactivate_and_a_second_init_leave_nothing_stacked() -> None:
    originals = (
        F.linear,
        torch.Tensor.__matmul__,
        torch.nn.RNNBase.check_input,
        dict(vars(torch._VF)),
    )
    for _ in range(3):
        handle = amp.init()
    # one wrapper that casts, one that computes
    assert F.linear.__wrapped__.__wrapped__ is originals[0]
    handle._deactivate()
    handle._deactivate()
    assert (
        F.linear,
        torch.Tensor.__matmul__,
        torch.nn.RNNBase.check_input,
        dict(vars(torch._VF)),
    ) == originals
    assert torch.ones(2, 2).half().sum().dtype is FP16


def test_disabled_init_does_nothing() -> None:
    handle = amp.init(enabled=False)
    assert not handle.is_active() and torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is FP32
    loss = torch.ones(())
    with handle.scale_loss(loss, torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)) as scaled:
        assert scaled is loss


def test_bfloat16_fork(device: torch.device) -> None:
    amp.init(patch_type=BF16)
    x = torch.ones(2, 2, device=device)
    assert torch.mm(x, x).dtype is BF16 and x.bfloat16().sum().dtype is FP32
    assert (x.bfloat16() + x).dtype is FP32

    @amp.bfloat16_function
    def dtype_of(x: Tensor) -> torch.dtype:
        return x.dtype

    assert dtype_of(x) is BF16


# the user's own functions


class Mine:
    @staticmethod
    def dtypes(*tensors: Tensor) -> list[torch.dtype]:
        return [t.dtype for t in tensors]


DECORATORS = [
    (amp.half_function, [FP16, FP16]),
    (amp.bfloat16_function, [BF16, BF16]),
    (amp.float_function, [FP32, FP32]),
    (amp.promote_function, [FP32, FP32]),
]


@pytest.mark.parametrize(("decorator", "expected"), DECORATORS)
def test_decorators(decorator: Any, expected: list[torch.dtype], device: torch.device) -> None:
    function = decorator(Mine.dtypes)
    tensors = torch.ones(2, device=device), torch.ones(2, device=device, dtype=FP16)
    assert function(*tensors) == [FP32, FP16]
    amp.init()
    assert function(*tensors) == expected
    with amp.disable_casts():
        assert function(*tensors) == [FP32, FP16]


@pytest.mark.parametrize("kind", ["half", "bfloat16", "float", "promote"])
def test_registered_functions_are_cast_from_the_next_init(kind: str) -> None:
    module = type("module", (), {"dtypes": staticmethod(Mine.dtypes)})
    getattr(amp, f"register_{kind}_function")(module, "dtypes")
    tensors = torch.ones(2), torch.ones(2, dtype=FP16)
    assert module.dtypes(*tensors) == [FP32, FP16]
    handle = amp.init()
    assert module.dtypes(*tensors) == {"half": [FP16, FP16], "bfloat16": [BF16, BF16]}.get(
        kind, [FP32, FP32]
    )
    handle._deactivate()
    assert module.dtypes(*tensors) == [FP32, FP16]
    with pytest.raises(ValueError, match="No function named nothing in module"):
        getattr(amp, f"register_{kind}_function")(module, "nothing")


def test_two_calls_of_initialize_wrap_registered_functions_once() -> None:
    def mine(*tensors: Tensor) -> list[torch.dtype]:
        return Mine.dtypes(*tensors)

    module = type("module", (), {"mine": staticmethod(mine)})
    tensors = torch.ones(2), torch.ones(2, dtype=FP16)
    models = []
    for _ in range(2):
        amp.register_half_function(module, "mine")
        amp.register_half_function(module, "mine")
        models.append(amp.initialize(nn.Linear(2, 2), verbosity=0))
        assert module.mine(*tensors) == [FP16, FP16] and module.mine.__wrapped__ is mine
    models.append(amp.initialize(nn.Linear(2, 2), verbosity=0))  # one that registers nothing
    assert module.mine(*tensors) == [FP16, FP16] and module.mine.__wrapped__ is mine
    assert F.linear.__wrapped__.__wrapped__ is not None
    assert not hasattr(F.linear.__wrapped__.__wrapped__, "__wrapped__")
    _amp_state.handle._deactivate()
    assert module.mine is mine
    amp.init()
    assert module.mine is mine


def test_a_registered_function_takes_precedence_over_the_lists(device: torch.device) -> None:
    amp.register_float_function(torch, "sigmoid")
    amp.init()
    x = torch.zeros(4, device=device, dtype=FP16)
    assert F.binary_cross_entropy(torch.sigmoid(x), torch.ones(4, device=device)).dtype is FP32


# one cast per parameter and iteration


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The FP32 parameters that were cast to half, in order."""
    casts: list[Tensor] = []
    to = torch.Tensor.to

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(tensor, nn.Parameter) and args[:1] == (FP16,):
            casts.append(tensor)
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", counting)
    return casts


def test_a_parameter_is_cast_once_an_iteration(counted: list[Tensor], device: torch.device) -> None:
    model = nn.Linear(4, 4, bias=False).to(device)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0
    )
    x = torch.ones(2, 4, device=device)
    _amp_state.loss_scalers[0]._loss_scale = 4.0
    for iteration in (1, 2):
        loss = (model(model(x)) + x @ model.weight).sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        assert len(counted) == iteration
        assert not _amp_state.handle.cache
        optimizer.step()
        optimizer.zero_grad()
    amp.init(enable_caching=False)
    del counted[:]
    model(model(x))
    assert len(counted) == 2


def test_the_cached_copy_is_renewed_when_gradients_are_wanted_or_the_weight_changed(
    counted: list[Tensor],
) -> None:
    amp.init()
    weight, x = nn.Parameter(torch.eye(4)), torch.ones(2, 4)
    with torch.no_grad():
        assert not F.linear(x, weight).requires_grad
        F.linear(x, weight)
    assert len(counted) == 1
    # an evaluation came first: its copy has no gradients to hand on
    F.linear(x, weight).sum().backward()
    assert weight.grad is not None and len(counted) == 2
    with torch.no_grad():  # and without gradients any copy will do
        F.linear(x, weight)
    assert len(counted) == 2
    weight.requires_grad_(False)
    assert not F.linear(x, weight).requires_grad and len(counted) == 3
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(F.linear(x, weight), 2 * x.half()) and len(counted) == 4
    with torch.inference_mode():
        F.linear(x, nn.Parameter(torch.eye(4), requires_grad=False))
    weight.requires_grad_(True)
    F.linear(x, weight).sum().backward()


class Twice(nn.Module):
    """apex's three kinds of functions, each with the weight used twice."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.arange(16.0).view(4, 4).to(dtype) / 8), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "half":
            return x.mm(self.weight).mm(self.weight).sum()
        if self.kind == "float":
            return (x + torch.pow(self.weight, 2) + torch.pow(self.weight, 2)).sum()
        return ((x * self.weight) * self.weight).sum()


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("kind", ["half", "float", "promote"])
def test_training_after_an_evaluation(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    _amp_state.allow_incoming_model_not_fp32 = True
    model = Twice(kind, dtype).to(device)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), verbosity=0
    )
    _amp_state.allow_incoming_model_not_fp32 = False
    x = torch.ones(4, 4, device=device)
    for _ in range(2):
        model.zero_grad()
        loss = model(x)
        _amp_state.loss_scalers[0]._loss_scale = 4.0
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        with amp.disable_casts():
            exact = Twice(kind, FP32).to(device)
            exact.weight.data.copy_(model.weight.data)
            exact(x).backward()
        assert model.weight.grad is not None and model.weight.grad.dtype is dtype
        assert torch.equal(model.weight.grad.float(), exact.weight.grad)  # eighths: all is exact
        model.weight.data -= 1.0
        with torch.no_grad():
            model(x)


# how far the casts of amp.initialize reach


def test_initialize_casts_outside_of_the_model_and_in_the_step_not(device: torch.device) -> None:
    seen: list[torch.dtype] = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            seen.append(
                torch.mm(torch.ones(2, 2, device=device), torch.ones(2, 2, device=device)).dtype
            )
            super().step()

    model = nn.Linear(4, 4).to(device)
    model, optimizer = amp.initialize(
        model, Spy(model.parameters(), lr=0.1), opt_level="O1", verbosity=0
    )
    x = torch.ones(2, 4, device=device)
    assert model(x).dtype is FP16 and (x @ x.T).dtype is FP16 and model(x).softmax(-1).dtype is FP32
    _amp_state.loss_scalers[0]._loss_scale = 4.0
    with amp.scale_loss(model(x).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert seen == [FP32]
    assert _amp_state.handle.is_active()


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_other_levels_cast_nothing_outside(level: str, device: torch.device) -> None:
    model = nn.Linear(4, 4).to(device)
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, verbosity=0)
    x = torch.ones(4, 4, device=device)
    assert (x @ x).dtype is FP32 and x.half().sum().dtype is FP16


def test_the_casts_of_initialize_end_with_the_last_model_that_asked_for_them() -> None:
    first, second = (amp.initialize(nn.Linear(2, 2), verbosity=0) for _ in range(2))
    x = torch.ones(2, 2)
    del second
    gc.collect()
    assert (x @ x).dtype is FP16
    del first
    gc.collect()
    assert (x @ x).dtype is FP32


@pytest.mark.compiled
def test_torch_compile_traces_the_casts(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).to(device)
    amp.initialize(model, opt_level="O1", verbosity=0)
    x = torch.randn(3, 4, device=device)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x)) and compiled(x).dtype is FP16
