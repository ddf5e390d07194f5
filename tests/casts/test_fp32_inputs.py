"""FP32 inputs at O2: nothing is rounded on the way into a forward, and every operation takes them
next to half weights.
"""

import copy
import inspect
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import torchs_database
from outputs import floats, largest_error
from small_models import Apply
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp import functional as ours

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HALVES = (FP16, BF16)


# What a half input would lose


class Angles(nn.Module):
    """What diffusion models do with a time in [0, 1]."""

    def forward(self, time: Tensor) -> Tensor:
        steps = 1000 * time[:, None] / 10 ** torch.linspace(0, 4, 8)
        return torch.cat([steps.sin(), steps.cos()], 1)


class Centred(nn.Module):
    def forward(self, series: Tensor) -> Tensor:
        mean = series.mean(1, keepdim=True)
        return (series - mean) / (series - mean).square().mean(1, keepdim=True).sqrt()


def times() -> Tensor:
    return torch.linspace(0.001, 0.999, 64)


def series() -> Tensor:
    return 3000 + torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


# name: (what the model does with its input before a layer reads it, the input)
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "a time that is multiplied": (Angles, times),
    "a series that is centred": (Centred, series),
    "a batch norm": (lambda: nn.BatchNorm1d(16, affine=False), series),
    "a layer norm": (lambda: nn.LayerNorm(16), series),
    "a group norm": (lambda: nn.GroupNorm(4, 16), series),
    "differences": (lambda: Apply(lambda x: x - x.roll(1, 0)), series),
    "indices": (lambda: Apply(lambda x: F.one_hot((x % 16).long(), 16).float().sum(1)), series),
}


def model_of(program: str) -> tuple[nn.Sequential, Tensor]:
    make, inputs = PROGRAMS[program]
    torch.manual_seed(0)
    return nn.Sequential(make(), nn.Linear(16, 4)), inputs()


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_a_forward_computes_before_a_layer_is_exact(program: str, level: str) -> None:
    """To the bit, and the layer loses no more than the rounding of what it reads and holds."""
    model, x = model_of(program)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        before, expected = plain[0](x), plain(x)
    seen: list[Tensor] = []
    model[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with tritonamp.enable(model, level=level) as amp:
        found = model(x).detach()
        u = torch.finfo(amp.policy.dtype).eps / 2
    assert torch.equal(seen[0], before)
    # products and the bias of a sum: input, weight, and the result are rounded by u each
    absolute = before.abs() @ plain[1].weight.detach().abs().T + plain[1].bias.detach().abs()
    assert bool(((found - expected).abs() <= 3 * u * absolute + 1e-6).all())


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_cast_that_is_asked_for_loses_it(level: str) -> None:
    """So that the test above can fail."""
    for program, lost in (("a series that is centred", 0.2), ("differences", 0.2)):
        model, x = model_of(program)
        expected = copy.deepcopy(model)(x).detach()
        with tritonamp.enable(model, level=level, cast_inputs=True):
            assert largest_error([model(x)], [expected]) > lost


def in_a_thread(model: nn.Module, x: Tensor) -> Tensor:
    """As DataParallel calls its replicas."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(model, x).result()


def compiled(model: nn.Module, x: Tensor) -> Tensor:
    torch.compiler.reset()
    return torch.compile(model, backend="eager", fullgraph=True)(x)


# ways to call a model, at O2
WAYS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "by name": lambda model, x: model(input=x),
    "without gradients": lambda model, x: torch.no_grad()(model)(x),
    "in inference mode": lambda model, x: torch.inference_mode()(model)(x),
    "in a thread": in_a_thread,
    "checkpointed": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "checkpointed, reentrant": lambda model, x: checkpoint(
        model, x.clone().requires_grad_(), use_reentrant=True
    ),
    "functional_call": lambda model, x: torch.func.functional_call(
        model, dict(model.named_parameters()), (x,)
    ),
    "a copy": lambda model, x: copy.deepcopy(model)(x),
    "a method": lambda model, x: model.encode(x),
    "compiled": compiled,
}


class Whole(nn.Module):
    def __init__(self, first: nn.Module, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = first, layer

    def forward(self, input: Tensor) -> Tensor:
        self.before = self.first(input)
        return self.layer(self.before)  # type: ignore[no-any-return]

    def encode(self, input: Tensor) -> Tensor:
        return self.layer(self.first(input))  # type: ignore[no-any-return]


@pytest.mark.parametrize("grad_dtype", [None, FP32], ids=str)
@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=pytest.mark.compiled) if w == "compiled" else w for w in WAYS]
)
def test_it_is_exact_whatever_way_a_model_is_called(
    way: str, grad_dtype: torch.dtype | None
) -> None:
    """To the bits of a plain call."""
    parts, x = model_of("a time that is multiplied")
    model = Whole(*parts)
    before = model.first(x)
    with tritonamp.enable(model, level="O2", grad_dtype=grad_dtype):
        expected = model(x)
        assert torch.equal(model.before, before)
        found = WAYS[way](model, x)
        assert torch.equal(found, expected)
        if found.requires_grad:
            found.square().mean().backward()


# Every module of torch that has weights


def has_weights(kind: Any) -> bool:
    """Return whether it is a module that is built with a dtype."""
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        return False
    return issubclass(kind, nn.RNNBase) or "dtype" in inspect.signature(kind.__init__).parameters


NAMES = sorted(
    name for name, kind in vars(nn).items() if has_weights(kind) if not name.startswith("Lazy")
)
LAYERS = 16  # the most that one of them passes a value through: a decoder's


def test_the_walk_meets_what_has_weights() -> None:
    wanted = "Linear Bilinear Conv3d ConvTranspose1d LSTM GRUCell Embedding EmbeddingBag PReLU"
    assert {*wanted.split(), "MultiheadAttention", "Transformer", "BatchNorm2d"} <= {*NAMES}


@pytest.fixture(scope="module")
def modules() -> Any:
    """Cases of torch's own tests: their import takes seconds."""
    return torchs_database("common_modules", "module_db")


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:LSTM with projections")
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_modules_of_torch_take_fp32(name: str, half: torch.dtype, modules: Any) -> None:
    for info in modules:
        if info.name != f"nn.{name}":
            continue
        for training in (True, False):
            cases = info.module_inputs_func(info, "cpu", FP32, True, training)
            for case in cases[:: len(cases) // 3 + 1]:
                if case.forward_input is not None:
                    takes_fp32(info.module_cls, case, half, training)


def fresh(value: Any) -> Any:
    """A copy of inputs whose tensors are leaves."""
    return tree_map_only(
        Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), value
    )


def takes_fp32(kind: Any, case: Any, half: torch.dtype, training: bool) -> None:
    """Compare a forward at O2 with FP32's, and run its backward."""
    made, given = case.constructor_input, case.forward_input
    torch.manual_seed(0)
    plain = kind(*made.args, **made.kwargs).train(training)
    model = copy.deepcopy(plain)
    torch.manual_seed(1)
    expected = floats(plain(*fresh(given.args), **fresh(given.kwargs)))
    args, kwargs = fresh(given.args), fresh(given.kwargs)
    with tritonamp.enable(model, level="O2", dtype=half):
        torch.manual_seed(1)  # of dropout
        found = floats(model(*args, **kwargs))
        torch.autograd.backward(found, [torch.ones_like(f) for f in found])
    assert [f.dtype for f in found] == [e.dtype for e in expected]
    assert all(x.grad is None or x.grad.dtype is FP32 for x in floats([*args, *kwargs.values()]))
    # a layer rounds its input, its weight and its result; 2: the gain of the layers after it
    tolerance = 2 * 3 * LAYERS * torch.finfo(half).eps / 2
    for f, e in zip(found, expected, strict=True):
        assert largest_error([f], [e]) <= tolerance


# Operations on an FP32 activation and a half parameter


def rows(x: Tensor) -> Tensor:
    return torch.tensor([0, 2], device=x.device)


def targets(x: Tensor) -> Tensor:
    return torch.tensor([0, 1, 2], device=x.device)


def written(target: Tensor, source: Tensor, where: Any) -> Tensor:
    target = target.clone()
    target[where] = source
    return target


# name: (shape of the parameter, shape of the activation, function of both)
OPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "linear": ((4, 4), (3, 4), lambda x, w: F.linear(x, w, w[0])),
    "matmul": ((4, 5), (3, 4), lambda x, w: x @ w),
    "matmul, weight first": ((5, 3), (3, 4), lambda x, w: w @ x),
    "mm": ((4, 5), (3, 4), torch.mm),
    "mv": ((4,), (3, 4), torch.mv),
    "dot": ((4,), (4,), torch.dot),
    "vdot": ((4,), (4,), torch.vdot),
    "inner": ((4,), (3, 4), torch.inner),
    "outer": ((4,), (3,), torch.outer),
    "bmm": ((2, 4, 5), (2, 3, 4), torch.bmm),
    "addmm, added x": ((3, 3), (3, 3), lambda x, w: torch.addmm(x, w, w)),
    "addmm": ((3, 3), (3, 3), lambda x, w: torch.addmm(w, x, w)),
    "addmv": ((3,), (3, 3), lambda x, w: torch.addmv(w, x, w)),
    "addr": ((4,), (3,), lambda x, w: torch.addr(x[:, None] + w, x, w)),
    "addbmm": ((2, 3, 3), (2, 3, 3), lambda x, w: torch.addbmm(w[0], x, w)),
    "baddbmm": ((2, 3, 3), (2, 3, 3), lambda x, w: torch.baddbmm(w, x, w)),
    "einsum": ((4, 5), (2, 3, 4), lambda x, w: torch.einsum("bij,jk->bik", x, w)),
    "tensordot": ((4, 5), (2, 3, 4), lambda x, w: torch.tensordot(x, w, 1)),
    "multi_dot": ((4, 4), (3, 4), lambda x, w: torch.linalg.multi_dot([x, w, w])),
    "vecdot": ((4,), (3, 4), torch.linalg.vecdot),
    "bilinear": ((2, 4, 4), (3, 4), lambda x, w: F.bilinear(x, x, w)),
    "conv1d": ((2, 3, 3), (2, 3, 9), F.conv1d),
    "conv2d": ((2, 3, 3, 3), (2, 3, 9, 9), lambda x, w: F.conv2d(x, w, w[:, 0, 0, 0])),
    "conv3d": ((2, 3, 3, 3, 3), (2, 3, 5, 5, 5), F.conv3d),
    "conv_transpose1d": ((3, 2, 3), (2, 3, 9), F.conv_transpose1d),
    "conv_transpose2d": ((3, 2, 3, 3), (2, 3, 9, 9), F.conv_transpose2d),
    "conv_tbc": ((3, 3, 2), (9, 2, 3), lambda x, w: F.conv_tbc(x, w, w[0, 0])),
    "attention": (
        (2, 2, 5, 8),
        (2, 2, 5, 8),
        lambda x, w: F.scaled_dot_product_attention(x, w, w, attn_mask=x.new_zeros(5, 5)),
    ),
    "attention, half query": (
        (2, 2, 5, 8),
        (2, 2, 5, 8),
        lambda x, w: F.scaled_dot_product_attention(w, x, x, is_causal=True),
    ),
    "lstm_cell": (
        (12, 4),
        (2, 4),
        lambda x, w: torch.lstm_cell(x, (x[:, :3], x[:, 1:]), w, w[:, :3], w[:, 0], w[:, 0])[0],
    ),
    "gru_cell": ((9, 4), (2, 4), lambda x, w: torch.gru_cell(x, x[:, 1:], w, w[:, :3])),
    "layer_norm": ((8,), (3, 8), lambda x, w: F.layer_norm(x, (8,), w, w)),
    "rms_norm": ((8,), (3, 8), lambda x, w: F.rms_norm(x, (8,), w)),
    "group_norm": ((8,), (3, 8, 4), lambda x, w: F.group_norm(x, 2, w, w)),
    "batch_norm": ((8,), (3, 8, 4), lambda x, w: F.batch_norm(x, None, None, w, w, True)),
    "instance_norm": ((8,), (3, 8, 4), lambda x, w: F.instance_norm(x, None, None, w, w)),
    "our layer_norm": ((8,), (3, 8), lambda x, w: ours.layer_norm(x, (8,), w, w)),
    "our rms_norm": ((8,), (3, 8), lambda x, w: ours.rms_norm(x, (8,), w)),
    "our group_norm": ((8,), (3, 8, 4), lambda x, w: ours.group_norm(x, 2, w, w)),
    "add_layer_norm": (
        (3, 8),
        (3, 8),
        lambda x, w: ours.add_layer_norm(x, w, (8,), w[0], w[0])[0],
    ),
    "add_rms_norm": ((3, 8), (3, 8), lambda x, w: ours.add_rms_norm(w, x, (8,), w[0])[0]),
    "linear_cross_entropy": (
        (5, 8),
        (3, 8),
        lambda x, w: ours.linear_cross_entropy(x, w, targets(x)),
    ),
    "linear_token_log_probs": (
        (5, 8),
        (3, 8),
        lambda x, w: ours.linear_token_log_probs(x, w, targets(x)),
    ),
    "add": ((8,), (3, 8), torch.add),
    "add in place": ((8,), (3, 8), lambda x, w: x.clone().add_(w)),
    "add into half": ((3, 8), (3, 8), lambda x, w: w.clone().add_(x)),
    "cat": ((3, 8), (3, 8), lambda x, w: torch.cat([x, w])),
    "stack": ((3, 8), (3, 8), lambda x, w: torch.stack([w, x])),
    "where": ((3, 8), (3, 8), lambda x, w: torch.where(x > 0, x, w)),
    "lerp": ((3, 8), (3, 8), lambda x, w: torch.lerp(x, w, w)),
    "lerp in place": ((3, 8), (3, 8), lambda x, w: x.clone().lerp_(w, 0.5)),
    "addcmul": ((3, 8), (3, 8), lambda x, w: torch.addcmul(x, w, w)),
    "prelu": ((8,), (3, 8), F.prelu),
    "index_put": ((2, 8), (3, 8), lambda x, w: x.index_put((rows(x),), w)),
    "setitem": ((2, 8), (3, 8), lambda x, w: written(x, w, rows(x))),
    "setitem of half": ((3, 8), (2, 8), lambda x, w: written(w, x, rows(x))),
    "slice": ((2, 8), (3, 8), lambda x, w: written(x, w, slice(2))),
    "index_add": ((2, 8), (3, 8), lambda x, w: x.index_add(0, rows(x), w)),
    "index_copy": ((2, 8), (3, 8), lambda x, w: x.index_copy(0, rows(x), w)),
    "scatter": ((1, 8), (3, 8), lambda x, w: x.scatter(0, torch.ones_like(w).long(), w)),
    "scatter_add": ((2, 8), (3, 8), lambda x, w: x.scatter_add(0, torch.ones_like(w).long(), w)),
    "masked_scatter": ((3, 8), (3, 8), lambda x, w: x.masked_scatter(x > 0, w)),
    "slice_scatter": ((2, 8), (3, 8), lambda x, w: x.slice_scatter(w, 0, 0, 2)),
    "cdist": ((5, 8), (3, 8), torch.cdist),
    "cosine_similarity": ((1, 8), (3, 8), F.cosine_similarity),
    "mse_loss": ((3, 8), (3, 8), F.mse_loss),
    "smooth_l1_loss": ((3, 8), (3, 8), F.smooth_l1_loss),
    "kl_div": ((3, 8), (3, 8), lambda x, w: F.kl_div(w.log_softmax(-1), x.softmax(-1))),
    "cross_entropy": ((3, 8), (3, 8), lambda x, w: F.cross_entropy(w, x.softmax(-1))),
    "bce_with_logits": (
        (3, 8),
        (3, 8),
        lambda x, w: F.binary_cross_entropy_with_logits(w, x.sigmoid()),
    ),
    "gaussian_nll_loss": ((3, 8), (3, 8), lambda x, w: F.gaussian_nll_loss(w, x, w.abs() + 1)),
    "triplet_margin_loss": ((3, 8), (3, 8), lambda x, w: F.triplet_margin_loss(w, x, x)),
    "grid_sample": (
        (1, 3, 3, 2),
        (1, 2, 4, 4),
        lambda x, w: F.grid_sample(x, w.tanh(), align_corners=False),
    ),
    "embedding_bag": (
        (5, 3),
        (2, 2),
        lambda x, w: F.embedding_bag(
            torch.tensor([[0, 1], [2, 3]], device=x.device), w, mode="sum", per_sample_weights=x
        ),
    ),
    "maximum": ((8,), (3, 8), torch.maximum),
    "pow": ((8,), (3, 8), lambda x, w: x.exp().pow(w)),
    "atan2": ((8,), (3, 8), torch.atan2),
    "polar": ((3,), (3,), lambda x, w: torch.polar(x.abs(), w.float()).real),
    "solve": (
        (3, 3),
        (3, 3),
        lambda x, w: torch.linalg.solve(w + 5 * torch.eye(3, device=x.device), x),
    ),
    "multi_head_attention": (
        (12, 4),
        (3, 2, 4),
        lambda x, w: F.multi_head_attention_forward(
            *(x, x, x, 4, 2, w, w[:, 0], None, None, False, 0.0, w[:4], w[:4, 0])
        )[0],
    ),
}


class OneOp(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        shape, _, self.function = OPS[name]
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_an_fp32_activation_meets_a_half_parameter(
    name: str, half: torch.dtype, device: torch.device
) -> None:
    """The result is FP32's, up to the rounding of the parameter, the activation and the result."""
    torch.manual_seed(0)
    model, x = OneOp(name), torch.randn(OPS[name][1])
    expected = copy.deepcopy(model)(x).detach()
    model, x = model.to(device), x.to(device).requires_grad_()
    with tritonamp.enable(model, level="O2", dtype=half):
        found = model(x)
        assert model.weight.dtype is half
        found.sum().backward()
        assert x.grad is None or x.grad.dtype is FP32
        assert model.weight.grad is not None and model.weight.grad.dtype is half
    if name.startswith("attention") and device.type != "cpu":
        return  # the GPU in software has other values at every level
    # of at most nine products, of values whose size is one: a few roundings of the largest
    assert largest_error([found.cpu()], [expected]) <= 16 * torch.finfo(half).eps
    assert math.isfinite(float(found.detach().sum()))
