"""fp32_results: products of half operands with FP32 results, and the FP32 sums after them."""

import contextlib
import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import LlamaRMSNorm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.casts.dispatch import registration
from tritonamp.casts.enabled_module import Fp32ResultsModule

F = nn.functional
README = Path(tritonamp.__file__).parent / "casts" / "README.md"
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])
HALVES = pytest.mark.parametrize("half", [FP16, BF16], ids=str)


class Formula(nn.Module):
    """A function of an input [3, 5, 6]; its parameters make it a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.w, self.v = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.conv, self.up = nn.Conv1d(6, 6, 3), nn.ConvTranspose1d(6, 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Around(nn.Module):
    """A model around one module, ``m``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.m = module

    def forward(self, x: Tensor) -> Tensor:
        return self.m(x)


def squares(m: Formula, x: Tensor) -> Tensor:
    return m.w.expand(len(x), 6, 6)


PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "linear": lambda m, x: F.linear(x, m.w, m.v),
    "linear of a matrix": lambda m, x: F.linear(x[0], m.w, m.v),
    "linear without bias": lambda m, x: F.linear(x, m.w),
    "linear of a vector": lambda m, x: F.linear(x[0, 0], m.w, m.v),
    "linear of a transpose": lambda m, x: F.linear(x.transpose(0, 1), m.w, m.v),
    "matmul": lambda m, x: x @ m.w,
    "scores": lambda m, x: x @ x.mT,
    "broadcast": lambda m, x: x[:, None] @ x[None].mT,
    "einsum": lambda m, x: torch.einsum("bij,jk->bik", x, m.w),
    "mm": lambda m, x: x[0].mm(m.w),
    "bmm": lambda m, x: x.bmm(x.mT),
    "addmm": lambda m, x: torch.addmm(m.v, x[0], m.w, beta=2.0, alpha=0.5),
    "baddbmm": lambda m, x: torch.baddbmm(x, x, squares(m, x), alpha=3),
    "tensordot": lambda m, x: torch.tensordot(x, m.w, 1),
    "matrix and vector": lambda m, x: m.w @ m.v,
    "rows and vector": lambda m, x: x @ m.v,
    "two vectors": lambda m, x: m.v @ m.v,
    "addmv": lambda m, x: torch.addmv(m.v, m.w, m.v),
    "addbmm": lambda m, x: torch.addbmm(m.w[:5], x, squares(m, x)),
    "chain_matmul": lambda m, x: torch.linalg.multi_dot([x[0], m.w, m.w]),
    "vecdot": lambda m, x: torch.linalg.vecdot(x, m.v),
    "no rows": lambda m, x: x[:0] @ m.w,
}
OWN_TERMS = "addmm", "linear", "linear of a matrix", "linear of a vector", "linear of a transpose"
"""Products with a further term, which is not rounded at O1."""


def rounded(value: Any, half: torch.dtype) -> Any:
    return value.detach().to(half).double().requires_grad_()


@HALVES
@LEVELS
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_exact_in_its_half_operands(
    name: str, level: str, half: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    model, x = Around(Formula(PRODUCTS[name])), torch.randn(3, 5, 6).to(half)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        for p in exact.parameters():
            p.copy_(p.to(half))
    model, x = model.to(device), x.to(device)
    amp = tritonamp.enable(
        model, level=level, dtype=half, fp32_results=["m"], cast_outputs=None, cast_inputs=False
    )
    given = x.clone().requires_grad_()
    found = model(given)
    assert found.dtype is FP32
    wide = rounded(x.cpu(), half)
    expected = exact(wide)
    # a term that O1 does not round: half a unit in the last place of the format
    slack = torch.finfo(half).eps * 4 if name in OWN_TERMS and level == "O1" else 1e-6
    torch.testing.assert_close(found.detach().cpu().double(), expected, rtol=slack, atol=2 * slack)
    weight = torch.linspace(0.5, 1.5, max(found.numel(), 1))[: found.numel()].view(found.shape)
    (found * weight.to(device)).sum().backward()
    (expected * weight).sum().backward()
    limit = {"rtol": 4 * torch.finfo(half).eps, "atol": 8 * torch.finfo(half).eps}
    for (own, p), q in zip(model.m.named_parameters(), exact.m.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), own
        if p.grad is not None:
            torch.testing.assert_close(p.grad.detach().cpu().double(), q.grad, **limit)
    if given.grad is not None and wide.grad is not None:
        torch.testing.assert_close(given.grad.cpu().double(), wide.grad, **limit)
    amp.disable()


@LEVELS
def test_a_product_beyond_half_is_finite(level: str, device: torch.device) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 256)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(256, 256) * 20)
    x = torch.randn(64, 256) * 20
    expected = layer.double()(x.double()).float().detach()
    layer.float()
    x, expected = (20 * x), 20 * expected
    counts = {}
    for fields in ({}, {"fp32_results": ["m"]}, {"fp32_modules": ["m"]}):
        model = Around(copy.deepcopy(layer)).to(device)
        with tritonamp.enable(model, level=level, dtype=FP16, **fields):
            found = model(x.to(device)).detach().cpu()
        wrong = ~found.isfinite()
        error = (found - expected)[~wrong].norm() / expected[~wrong].norm()
        counts[tuple(fields)] = int(wrong.sum()), float(error)
    assert counts[()][0] > 100
    assert counts[("fp32_results",)][0] == counts[("fp32_modules",)][0] == 0
    # O2 has half weights in each form, so that an FP32 module there is an FP32 model's
    assert counts[("fp32_results",)][1] < 4e-4


CONVOLUTIONS: dict[str, Callable[..., Tensor]] = {
    "conv1d": lambda m, x: m.conv(x.mT),
    "conv1d with a name": lambda m, x: F.conv1d(x.mT, m.conv.weight, padding="same"),
    "conv2d": lambda m, x: F.conv2d(x.mT[..., None], m.conv.weight[..., None], m.conv.bias),
    "conv_transpose1d": lambda m, x: m.up(x.mT),
}


@LEVELS
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_computes_in_fp32_on_half_weights(
    name: str, level: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    model, x = Around(Formula(CONVOLUTIONS[name])), torch.randn(3, 5, 6)
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        for p in exact.parameters():
            p.copy_(p.half() if level == "O2" else p)
    model = model.to(device)
    with tritonamp.enable(model, level=level, dtype=FP16, fp32_results=["m"], cast_outputs=None):
        found = model(x.to(device))
        assert {p.dtype for p in model.m.conv.parameters()} == {FP16 if level == "O2" else FP32}
    assert found.dtype is FP32
    torch.testing.assert_close(
        found.detach().cpu().double(), exact(x.double()), rtol=1e-5, atol=1e-5
    )


class BranchedNorm(nn.Module):
    """An RMSNorm that is no ``rms_norm``, because it has a branch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() > 9:
            return x
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Turned(nn.Module):
    """A norm of channels, of rows."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mT).mT


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "LayerNorm": nn.LayerNorm,
    "LayerNorm without weights": lambda n: nn.LayerNorm(n, elementwise_affine=False),
    "RMSNorm": nn.RMSNorm,
    "GroupNorm": lambda n: Turned(nn.GroupNorm(4, n)),
    "BatchNorm": lambda n: Turned(nn.BatchNorm1d(n)),
    "InstanceNorm": lambda n: Turned(nn.InstanceNorm1d(n)),
    "written norm": BranchedNorm,
    "proved norm": LlamaRMSNorm,
}


class Stretch(nn.Module):
    """A residual block whose last product leaves float16, a norm, and a layer."""

    def __init__(self, norm: Callable[[int], nn.Module], n: int = 32) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(8, n), nn.Linear(n, 4 * n), nn.Linear(4 * n, n)
        self.norm, self.last = norm(n), nn.Linear(n, 4)
        with torch.no_grad():
            self.down.weight.mul_(5e5)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        product = self.down(torch.relu(self.up(x)))
        stream = x + product
        normed = self.norm(stream)
        last = self.last(normed)
        values = (x, product, stream, normed, last)
        names = ("x", "product", "stream", "normed", "last")
        self.seen = {name: value.dtype for name, value in zip(names, values, strict=True)}
        return last


@HALVES
@LEVELS
@pytest.mark.parametrize("name", NORMS)
def test_the_sum_stays_fp32_until_a_norm(
    name: str, level: str, half: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    model, x = Stretch(NORMS[name]), 4 * torch.randn(3, 6, 8)
    exact = copy.deepcopy(model).double()
    expected, weight = exact(x.double()), torch.randn(3, 6, 4)
    (expected * weight).sum().backward()
    expected = expected.detach()
    model, x, weight = model.to(device), x.to(device), weight.to(device)
    adamw = torch.optim.AdamW(model.parameters(), 1e-3)
    fields = {"dtype": half, "fp32_results": ["down"], "loss_scale": 64.0}
    with tritonamp.enable(model, adamw, level=level, **fields) as amp:
        found = model(x)
        # O1 leaves a written norm with FP32 weights alone
        normed = FP32 if (name, level) == ("written norm", "O1") else half
        assert model.seen == {
            "x": half, "product": FP32, "stream": FP32, "normed": normed, "last": half,
        }  # fmt: skip
        eps = torch.finfo(half).eps
        off = (found.detach().cpu().double() - expected).norm() / expected.norm()
        assert off < 4 * eps
        amp.backward((found * weight).sum())
        amp.unscale_()
        for (own, p), q in zip(amp.named_master_params(), exact.parameters(), strict=True):
            # gradients of biases before a norm cancel
            size = max(q.grad.norm(), torch.tensor(1e-3))
            assert (p.grad.detach().cpu().double() - q.grad).norm() < 16 * eps * size, own
        adamw.step()


def test_without_fp32_results_norms_keep_an_fp32_input() -> None:
    with tritonamp.enable(model := nn.Sequential(nn.LayerNorm(4)), level="O1", cast_outputs=None):
        assert model(torch.randn(2, 4)).dtype is FP32


def test_further_results_of_a_norm_stay() -> None:
    class AddNorm(BranchedNorm):
        def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
            total = x if residual is None else x.float() + residual.float()
            return super().forward(total), total

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), AddNorm(4)
            with torch.no_grad():
                self.layer.weight.mul_(1e5)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x, self.layer(x))[1]

    with tritonamp.enable(model := Model(), level="O2", fp32_results="layer"):
        total = model(4 * torch.randn(2, 4))
    assert total.dtype is FP32
    assert total.isfinite().all()
    assert total.abs().max() > 65504


def test_results_of_a_norm_that_do_not_follow_an_fp32_input_stay() -> None:
    class LogNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 3e5))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight[x] if x.dtype is torch.long else self.weight.sum().expand(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), LogNorm()

        def forward(self, x: Tensor) -> Any:
            return self.norm(self.layer(x)), self.norm(torch.arange(4))

    with tritonamp.enable(model := Model(), level="O2", fp32_results="layer", cast_outputs=None):
        of_values, of_ids = model(torch.randn(2, 4))
    assert of_values.item() == 1.2e6
    assert of_ids.tolist() == [3e5] * 4


class Block(nn.Module):
    """The residual block of casts/README.md between two layers."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.first, self.norm, self.up = nn.Linear(n, n), nn.LayerNorm(n), nn.Linear(n, 4 * n)
        self.down, self.after, self.last = nn.Linear(4 * n, n), nn.LayerNorm(n), nn.Linear(n, n)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.last(self.after(x))


@pytest.mark.parametrize("tier", ["half", "`fp32_results`", "`fp32_modules`"])
def test_bytes_of_the_readme(tier: str, fake_cuda: Any) -> None:
    pytest.importorskip("matplotlib")  # as for all of bench/
    import model_counts
    import traffic

    model, x = Block(64).cuda(), torch.randn(1024, 64).half().cuda()
    fields = {} if tier == "half" else {tier.strip("`"): ["down"]}
    with (
        model_counts.as_if_large(),
        tritonamp.enable(model, level="O2", dtype=FP16, cast_outputs=None, **fields),
    ):
        fake_cuda.observer = found = traffic.Traffic([])
        y = model(x)
        y.backward(torch.ones_like(y))
        moved = sum(found.total().values()) / x.numel()
        kept = model.down.weight.element_size()
    line = [r for r in README.read_text().splitlines() if r.startswith(f"| {tier} |")][-1]
    assert [cell.strip() for cell in line.split("|")[2:4]] == [f"{moved:.0f}", str(kept)]


@HALVES
def test_parameters_stay_half(half: torch.dtype, device: torch.device) -> None:
    model = Stretch(nn.LayerNorm).to(device)
    adamw = torch.optim.AdamW(model.parameters(), 1e-3)
    with tritonamp.enable(model, adamw, level="O2", dtype=half, fp32_results=["down"]) as amp:
        assert amp.policy.fp32_results == ("down",)
        assert isinstance(model.down, Fp32ResultsModule)
        assert type(model.down) is not nn.Linear
        assert {p.dtype for p in model.down.parameters()} == {half}
        masters = dict(amp.named_master_params())
        assert masters["down.weight"].dtype is FP32
        amp.backward(model(torch.randn(2, 3, 8, device=device)).sum())
        assert model.down.weight.grad.dtype is half
    assert type(model.down) is nn.Linear


@pytest.mark.parametrize(
    "wanted", ["layers.1", nn.Linear, "layers", ["layers.0", "layers.1"]], ids=str
)
def test_names_and_classes(wanted: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    with tritonamp.enable(model := Model(), level="O2", fp32_results=wanted, cast_outputs=None):
        assert isinstance(model.layers[1], Fp32ResultsModule)
        assert isinstance(model.layers[0], Fp32ResultsModule) == (wanted != "layers.1")
        assert model(torch.randn(2, 4)).dtype is FP32
    assert type(model.layers[1]) is nn.Linear


@LEVELS
@pytest.mark.parametrize("size", [1.0, 1e5, 3e30])
def test_a_gradient_that_half_does_not_hold_is_fitted(
    size: float, level: str, device: torch.device
) -> None:
    torch.manual_seed(0)
    x, grad, layer = torch.randn(6, 8) / 1024, torch.randn(6, 8), nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(8, 8) / 4096)
    weight = layer.weight.detach().half().double()
    model = Around(layer).to(device)
    expected = grad.double().T @ x.half().double(), grad.double() @ weight
    with tritonamp.enable(
        model, level=level, dtype=FP16, fp32_results=["m"], cast_outputs=None, cast_inputs=False
    ):
        given = x.to(device).requires_grad_()
        model(given).backward(size * grad.to(device))
        found = model.m.weight.grad.detach().cpu().double(), given.grad.cpu().double()
    fits = size < 1e6 or level == "O1"
    for got, exact in zip(found, expected, strict=True):
        if fits or got is found[1]:
            assert (got / size - exact).norm() < 1e-3 * exact.norm()
        else:  # the gradient of a half weight is half
            assert got.isinf().any()


@LEVELS
def test_a_backward_inside_of_autocast(level: str, device: torch.device) -> None:
    """Its products follow no rule: the gradient of an FP32 operand is FP32 there, too."""
    torch.manual_seed(0)
    model, x = Around(nn.Linear(8, 8)).to(device), torch.randn(6, 8, device=device)
    found = []
    with tritonamp.enable(model, level=level, dtype=FP16, fp32_results=["m"]) as amp:
        for around in (contextlib.nullcontext(), amp.autocast()):
            given = x.clone().requires_grad_()
            output = model(given)
            with around:
                output.backward(torch.full_like(output, 1e8))
            found.append(given.grad)
    assert found[0].abs().max() > 65504
    assert torch.equal(*found)


def test_a_gradient_that_is_not_finite_stays_so(device: torch.device) -> None:
    for value in (torch.inf, torch.nan):
        model = Around(nn.Linear(8, 8)).to(device)
        with tritonamp.enable(model, level="O2", dtype=FP16, fp32_results=["m"]):
            (model(torch.ones(2, 8, device=device)) * value).sum().backward()
        assert not model.m.weight.grad.isfinite().any()
        assert bool(model.m.weight.grad.isinf().any()) == (value == torch.inf)


def test_in_other_modules_products_stay_half() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda m, args, output: seen.append(output.dtype))
    with tritonamp.enable(model, level="O2", fp32_results=["1"]):
        model(torch.randn(2, 4))
        assert seen == [FP16, FP32, FP16]
        # an FP32 module around it, and a block without casts, decide first
        with tritonamp.disable_casts(), pytest.raises(RuntimeError, match="same dtype"):
            model[1](torch.randn(2, 4))
        assert model[1](torch.randn(2, 4).half()).dtype is FP16  # called alone


def test_inside_an_fp32_module() -> None:
    model = Around(nn.Sequential(nn.Linear(4, 4)))
    fields = {"fp32_modules": ["m"], "fp32_results": ["m.0"]}
    with tritonamp.enable(model, level="O2", **fields) as amp:
        x = torch.randn(2, 4)
        expected = F.linear(x, *(p.detach() for p in model.parameters()))
        assert torch.equal(model(x), expected)
        assert amp.policy.fp32_modules == ("m",)


def test_attention_and_recurrent_layers_are_half() -> None:
    attend = Formula(lambda m, x: F.scaled_dot_product_attention(x, x, x))
    with tritonamp.enable(model := Around(attend), level="O2", fp32_results="m", cast_outputs=None):
        assert model(torch.randn(3, 5, 6)).dtype is FP16


@LEVELS
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_tensors(level: str, layout: torch.layout) -> None:
    torch.manual_seed(0)
    model, x = Around(nn.Linear(6, 6)), torch.randn(5, 6)
    expected, exact = model(x), copy.deepcopy(model)
    exact(x).sum().backward()
    with tritonamp.enable(model, level=level, fp32_results="m", cast_outputs=None):
        given = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=layout)
        found = torch.cat(model(given).unbind())
        assert found.dtype is FP32
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        found.sum().backward()
        gradients = [p.grad.float() for p in model.parameters()]
    for p, q in zip(gradients, exact.parameters(), strict=True):
        torch.testing.assert_close(p, q.grad, rtol=1e-2, atol=1e-2)


@LEVELS
@pytest.mark.parametrize("training", [True, False])  # in eval mode torch has one op for the layer
def test_a_transformer_layer_beyond_half(level: str, training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
    layer.linear2.weight.data.mul_(3e5)
    model = nn.Sequential(nn.Linear(16, 16), layer, nn.LayerNorm(16)).train(training)
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = model(x)
        with tritonamp.enable(model, level=level, dtype=FP16, fp32_results=["1"]):
            torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)


@LEVELS
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_segment(level: str, reentrant: bool, device: torch.device) -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            return self.block(x) if is_plain else checkpoint(self.block, x, use_reentrant=reentrant)

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def both(self, x: Tensor) -> Tensor:
            dtypes.append((y := self.a(x)).dtype)
            return self.b(torch.tanh(y))

        def forward(self, x: Tensor) -> Tensor:
            return self.both(x) if is_plain else checkpoint(self.both, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model, gradients = Segments().to(device), []
    dtypes: list[torch.dtype] = []
    x = torch.randn(4, 8, device=device)
    with tritonamp.enable(model, level=level, fp32_results=["block.0", "inner"]):
        for kept in (True, False):
            is_plain = kept
            model.zero_grad()
            model(x.clone().requires_grad_()).square().sum().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
    assert dtypes == [FP32] * 3
    for own, first, second in zip(dict(model.named_parameters()), *gradients, strict=True):
        assert torch.equal(first, second), (own, (first - second).abs().max(), first.abs().max())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("depth", [2, 70])  # 70: more policies than a backward can look back on
def test_a_segment_around_a_module_follows_its_own_policy(depth: int, reentrant: bool) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Residual() for _ in range(depth))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) if is_plain else checkpoint(block, x, use_reentrant=reentrant)
            return x

    torch.manual_seed(0)
    model, gradients, names = Blocks(), [], [f"blocks.{i}.down" for i in range(depth)]
    x = torch.randn(4, 8)
    with tritonamp.enable(model, level="O2", fp32_results=names):
        for kept in (True, False):
            is_plain = kept
            model.zero_grad()
            model(x.clone().requires_grad_()).square().mean().backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
    for own, first, second in zip(dict(model.named_parameters()), *gradients, strict=True):
        assert torch.equal(first, second), own


def test_a_copy_and_disable() -> None:
    model = Stretch(nn.LayerNorm)
    amp = tritonamp.enable(model, level="O2", fp32_results=["down"])
    x = 4 * torch.randn(2, 3, 8)
    twin = copy.deepcopy(model)
    assert twin(x).isfinite().all()
    assert twin.seen["stream"] is FP32
    assert twin.seen["normed"] is FP16
    assert twin.down.weight.dtype is FP32
    amp.disable()
    assert twin(x).isfinite().all()
    assert twin.seen["normed"] is FP16
    del twin


def test_rules_on_cuda_last_as_long_as_a_model_needs_them(cuda: Any) -> None:
    plain, wide = (Around(nn.Linear(4, 4)).cuda() for _ in range(2))
    first = tritonamp.enable(plain, level="O2")
    assert registration.products is None
    second = tritonamp.enable(wide, level="O2", fp32_results=["m"], cast_outputs=None)
    x = torch.randn(2, 4, device="cuda")
    assert wide(x).dtype is FP32
    assert plain.m(x.half()).dtype is FP16
    twin = copy.deepcopy(wide)
    second.disable()
    assert twin(x).dtype is FP32
    del twin
    gc.collect()
    with first._parts.healing.in_fp32([], ["m"]):
        assert registration.products is not None
    assert registration.products is None, "a trial leaves nothing"
    first.heal("m", results=True)
    assert registration.products is not None
    first.unheal("m")
    assert registration.products is None
    first.disable()
    assert not registration.libraries
    with torch.autocast("cuda", FP16):
        assert plain.m(x).dtype is FP16


def test_rules_on_cuda_of_a_copy_that_outlives_its_original(cuda: Any) -> None:
    model = Around(nn.Linear(4, 4)).cuda()
    x = torch.randn(2, 4, device="cuda")
    with tritonamp.enable(model, level="O2", fp32_results=["m"], cast_outputs=None):
        twin = copy.deepcopy(model)
    assert registration.products is None
    assert twin(x).dtype is FP32
    del twin
    gc.collect()
    assert registration.products is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_transforms_of_functions() -> None:
    model = Around(nn.Linear(6, 6))
    with tritonamp.enable(model, level="O2", fp32_results=["m"], cast_outputs=None):
        x = torch.randn(3, 6)
        expected = model(x)
        torch.testing.assert_close(torch.func.vmap(model)(x), expected)
        value, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        torch.testing.assert_close(value, expected)
        weight = model.m.weight.detach().float()
        torch.testing.assert_close(tangent, torch.ones(3, 6) @ weight.T, rtol=1e-3, atol=1e-3)


def test_a_gradient_of_a_gradient() -> None:
    model = Around(nn.Linear(6, 6, bias=False))
    with tritonamp.enable(model, level="O1", fp32_results=["m"]):
        x = torch.randn(3, 6, requires_grad=True)
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
    w = model.m.weight.detach().double()
    twice = 2 * w.T @ w
    expected = 2 * (x.detach().double() @ twice) @ twice
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@LEVELS
def test_compiled(level: str) -> None:
    torch.manual_seed(0)
    model, x = Stretch(LlamaRMSNorm), torch.randn(2, 3, 8)
    with tritonamp.enable(model, level=level, fp32_results=["down"]):
        expected = model(x)
        expected.sum().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        compiled = torch.compile(model, backend="aot_eager")
        found = compiled(x)
        found.sum().backward()
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
        for p, g in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(p.grad, g, rtol=1e-2, atol=1e-2)
