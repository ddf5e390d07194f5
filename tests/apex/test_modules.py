"""tritonamp.apex.contrib, normalization and transformer against FP64 formulas."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tritonamp
from tritonamp.apex.contrib.clip_grad import clip_grad_norm_
from tritonamp.apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from tritonamp.apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
)
from tritonamp.apex.normalization import fused_layer_norm as norms
from tritonamp.apex.transformer import AttnMaskType
from tritonamp.apex.transformer.functional import (
    FusedScaleMaskSoftmax,
    GenericFusedScaleMaskSoftmax,
    scaled_masked_softmax,
    scaled_upper_triang_masked_softmax,
)

INF = float("inf")
U32 = torch.finfo(torch.float32).eps
FLOATS = [torch.float32, torch.float16, torch.bfloat16]

each_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=str)
each_half = pytest.mark.parametrize("half", FLOATS[1:], ids=str)


# contrib


def test_clip_grad_norm(device: torch.device) -> None:
    params = [nn.Parameter(torch.zeros(3, device=device)) for _ in range(3)]
    params[0].grad, params[1].grad = (
        torch.full_like(params[0], 2.0),
        torch.full_like(params[0], 1.0),
    )
    norm = clip_grad_norm_(iter(params), 1.0)
    torch.testing.assert_close(norm.item(), 15.0**0.5)
    torch.testing.assert_close(params[0].grad, torch.full_like(params[0], 2.0 / 15.0**0.5))
    assert clip_grad_norm_([params[2]], 1.0).item() == 0.0
    params[1].grad[0] = INF
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)


@each_dtype
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_xentropy(smoothing: float, dtype: torch.dtype, device: torch.device) -> None:
    logits = (torch.randn(6, 11, device=device) * 4).to(dtype).requires_grad_()
    labels = torch.tensor([0, 3, 10, 0, 5, 5], device=device)
    losses = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, 0, dtype is torch.float16)
    losses.sum().backward()
    exact = logits.detach().double().requires_grad_()
    log_p = exact - exact.exp().sum(1, keepdim=True).log()
    expected = -(1 - smoothing) * log_p[torch.arange(6), labels] - smoothing * log_p.mean(1)
    expected = torch.where(labels == 0, 0.0, expected)
    expected.sum().backward()
    assert losses.dtype is torch.float32
    # logits of size 20 in FP32; the gradient is rounded to the logits' dtype
    torch.testing.assert_close(losses.double(), expected, rtol=16 * U32, atol=64 * U32)
    torch.testing.assert_close(
        logits.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps, atol=64 * U32
    )


# normalization


def exact_norm(x: Tensor, rms: bool, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    centred = x if rms else x - x.mean((-2, -1), keepdim=True)
    y = centred / (centred.square().mean((-2, -1), keepdim=True) + 1e-5).sqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


KINDS = {
    "layer": (FusedLayerNorm, False, False),
    "rms": (FusedRMSNorm, True, False),
    "mixed layer": (MixedFusedLayerNorm, False, True),
    "mixed rms": (MixedFusedRMSNorm, True, True),
}


def module(kind: str, device: torch.device, dtype: torch.dtype, **arguments: Any) -> Any:
    norm = KINDS[kind][0]((4, 6), **arguments).to(device, dtype)
    for param in norm.parameters():
        nn.init.normal_(param)
    return norm


@pytest.mark.parametrize("kind", KINDS)
@each_dtype
@pytest.mark.parametrize("weights", FLOATS, ids=str)
def test_norm_modules(
    kind: str, weights: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    norm, (_, rms, mixed) = module(kind, device, weights), KINDS[kind]
    x = (torch.randn(5, 6, 4, device=device) + 1).to(dtype).transpose(1, 2).requires_grad_()
    y = norm(x)
    grad = torch.randn(y.shape, device=device).to(y.dtype)
    y.backward(grad)
    exact = x.detach().double().requires_grad_()
    parameters = {name: p.detach().double().requires_grad_() for name, p in norm.named_parameters()}
    expected = exact_norm(exact, rms, parameters["weight"], parameters.get("bias"))
    expected.backward(grad.double())
    assert y.dtype is (weights if mixed else dtype)

    def close(ours: Tensor, theirs: Tensor) -> None:
        eps = torch.finfo(ours.dtype).eps
        # half backward of torch's CPU kernel rounds some intermediate values to half
        torch.testing.assert_close(ours.double(), theirs, rtol=2 * eps, atol=4 * eps)

    close(y.detach(), expected.detach())
    close(x.grad, exact.grad)
    for name, param in norm.named_parameters():
        close(param.grad, parameters[name].grad)


@pytest.mark.parametrize("kind", KINDS)
@each_half
def test_norms_under_autocast(kind: str, half: torch.dtype, device: torch.device) -> None:
    """Input and result in autocast's dtype, weights and arithmetic in FP32."""
    norm, (_, rms, _) = module(kind, device, torch.float32), KINDS[kind]
    x = torch.randn(5, 4, 6, device=device)
    with torch.autocast(device.type, dtype=half):
        y = norm(x)
    bias = None if rms else norm.bias.detach().double()
    expected = exact_norm(x.to(half).double(), rms, norm.weight.detach().double(), bias)
    assert y.dtype is half
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(half).eps, atol=16 * U32)


@each_half
def test_norm_functions(half: torch.dtype, device: torch.device) -> None:
    x, w, b = (torch.randn(shape, device=device) for shape in ((5, 4, 6), (4, 6), (4, 6)))
    shape, h = [4, 6], x.to(half)
    results = {
        "layer": (norms.fused_layer_norm_affine(h, w, b, shape, 1e-5), half, False, w, b),
        "layer bare": (norms.fused_layer_norm(h, shape, 1e-5), half, False, None, None),
        "layer mixed": (
            norms.mixed_dtype_fused_layer_norm_affine(h, w, b, shape, 1e-5),
            torch.float32,
            False,
            w,
            b,
        ),
        "rms": (norms.fused_rms_norm_affine(h, w, shape, 1e-5), half, True, w, None),
        "rms bare": (norms.fused_rms_norm(h, shape, 1e-5), half, True, None, None),
        "rms mixed": (
            norms.mixed_dtype_fused_rms_norm_affine(h, w, shape, 1e-5),
            torch.float32,
            True,
            w,
            None,
        ),
        "rms manual": (norms.manual_rms_norm(h, shape, w, 1e-5), torch.float32, True, w, None),
        "rms manual bare": (norms.manual_rms_norm(h, shape, None, 1e-5), half, True, None, None),
    }
    for name, (y, dtype, rms, weight, bias) in results.items():
        parameters = (None if p is None else p.double() for p in (weight, bias))
        assert y.dtype is dtype, name
        torch.testing.assert_close(
            y.double(),
            exact_norm(h.double(), rms, *parameters),
            rtol=torch.finfo(dtype).eps,
            atol=16 * U32,
        )


@each_half
@pytest.mark.parametrize("kind", KINDS)
def test_norms_keep_the_half_input_for_backward(
    kind: str, half: torch.dtype, device: torch.device
) -> None:
    """With FP32 weights: one pass, no FP32 copy, whatever the dtype of the result."""
    x = torch.randn(5, 4, 6, device=device).to(half).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(kind, device, torch.float32)(x)
    assert [t.data_ptr() == x.data_ptr() for t in kept if t.shape == x.shape] == [True]


LAYER_AFFINE = "input weight bias normalized_shape eps memory_efficient"
SHOWN = {
    "fused_layer_norm_affine": LAYER_AFFINE,
    "fused_layer_norm": "input normalized_shape eps memory_efficient",
    "mixed_dtype_fused_layer_norm_affine": LAYER_AFFINE,
    "fused_rms_norm_affine": "input weight normalized_shape eps memory_efficient",
    "fused_rms_norm": "input normalized_shape eps memory_efficient",
    "mixed_dtype_fused_rms_norm_affine": "input weight normalized_shape eps memory_efficient",
    "manual_rms_norm": "input normalized_shape weight eps",
    "FusedLayerNorm": "normalized_shape eps elementwise_affine memory_efficient",
    "FusedRMSNorm": "normalized_shape eps elementwise_affine memory_efficient",
    "MixedFusedLayerNorm": "normalized_shape eps memory_efficient kwargs",
    "MixedFusedRMSNorm": "normalized_shape eps memory_efficient kwargs",
}


@pytest.mark.parametrize("name", SHOWN)
def test_norms_show_apexs_arguments(name: str) -> None:
    norm = getattr(norms, name)
    assert " ".join(inspect.signature(norm).parameters) == SHOWN[name]
    assert norm.__name__ == name and norm.__doc__


def test_mixed_norms_have_weights() -> None:
    with pytest.warns(UserWarning, match="does not support `elementwise_affine`"):
        assert MixedFusedLayerNorm(3, elementwise_affine=True).weight is not None
    with (
        pytest.warns(UserWarning, match="does not support `elementwise_affine`"),
        pytest.raises(RuntimeError, match="elementwise_affine = False"),
    ):
        MixedFusedRMSNorm(3, elementwise_affine=False)
    assert FusedLayerNorm(3, elementwise_affine=False).weight is None
    assert FusedRMSNorm(3, eps=0.5, memory_efficient=True).eps == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_norms_stay_fp32_in_o2(kind: str, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(6, 6), KINDS[kind][0](6), nn.Linear(6, 1)).to(device)
    amp = tritonamp.enable(model, level="O2")
    dtypes = [p.dtype for p in model.parameters()]
    finite = torch.isfinite(model(torch.randn(3, 6, device=device))).all()
    amp.disable()
    norm = len(list(model[1].parameters()))
    assert dtypes == [torch.float16] * 2 + [torch.float32] * norm + [torch.float16] * 2
    assert finite


# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.compiled
@pytest.mark.parametrize("kind", ["layer", "mixed rms"])
def test_norms_compile_without_a_break(kind: str) -> None:
    norm = module(kind, torch.device("cpu"), torch.float32)
    x = torch.randn(5, 4, 6).half()
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), norm(x))


# transformer.functional


def fill(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -10000.0)


def softmax(
    half: torch.dtype, fused: bool, kind: AttnMaskType, scale: float | None, in_fp32: bool
) -> Any:
    return FusedScaleMaskSoftmax(
        half is torch.float16, half is torch.bfloat16, kind, fused, fill, in_fp32, scale
    )


@each_half
@pytest.mark.parametrize("kind", AttnMaskType)
@pytest.mark.parametrize(("scale", "in_fp32"), [(None, False), (None, True), (2.0, True)])
@pytest.mark.parametrize("masked", [True, False])
def test_masked_softmax(
    masked: bool,
    scale: float | None,
    in_fp32: bool,
    kind: AttnMaskType,
    half: torch.dtype,
    device: torch.device,
) -> None:
    causal = kind is AttnMaskType.causal
    scores = torch.randn(2, 3, 6, 6, device=device).to(half).requires_grad_()
    mask = torch.rand(2, 1, 6, 6, device=device) < 0.3 if masked or causal else None
    if mask is not None:
        mask[..., 0] = False  # no row without a key
    if causal:
        mask = torch.ones(1, 1, 6, 6, dtype=torch.bool, device=device).triu(1)
    grad = torch.randn(2, 3, 6, 6, device=device).to(half)
    results = []
    for fused in (True, False):
        module = softmax(half, fused, kind, scale, in_fp32)
        y = module(scores, mask)
        (dx,) = torch.autograd.grad(y, scores, grad)
        results.append((y, dx))
    exact = scores.detach().double().requires_grad_()
    scaled = exact * (scale or 1.0)
    expected = (scaled if mask is None else scaled.masked_fill(mask, -INF)).softmax(-1)
    (dexpected,) = torch.autograd.grad(expected, exact, grad.double())
    eps = torch.finfo(half).eps
    for y, dx in results:
        assert y.dtype is half
        # a subnormal half at most
        torch.testing.assert_close(y.double(), expected, rtol=eps, atol=1e-7)
        torch.testing.assert_close(dx.double(), dexpected, rtol=4 * eps, atol=8 * eps)


@each_half
def test_rows_without_keys_are_zero(half: torch.dtype, device: torch.device) -> None:
    scores, mask = (
        torch.randn(1, 1, 2, 3, device=device).to(half),
        torch.zeros(1, 1, 2, 3, device=device).byte(),
    )
    mask[..., 0, :] = 1
    y = scaled_masked_softmax(scores, mask, 0.5)
    assert y[..., 0, :].count_nonzero() == 0 and torch.isclose(
        y[..., 1, :].float().sum(), torch.tensor(1.0), atol=0.01
    )
    generic = GenericFusedScaleMaskSoftmax(
        half is torch.float16, half is torch.bfloat16, True, fill, True, 0.5
    )
    assert torch.equal(generic(scores, mask), y)


@each_half
def test_only_the_half_result_is_kept(half: torch.dtype, device: torch.device) -> None:
    scores = torch.randn(1, 2, 4, 4, device=device).to(half).requires_grad_()
    mask = torch.rand(1, 1, 4, 4, device=device) < 0.3
    for kind in AttnMaskType:
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t) or t, lambda t: t
        ):
            y = softmax(half, True, kind, 2.0, True)(scores, mask)
        assert [t.data_ptr() for t in kept] == [y.data_ptr()]


def test_masked_scores_are_minus_10000(device: torch.device) -> None:
    """Scores below that leave their probability to what is masked, as in apex."""
    scores = torch.full((1, 1, 1, 4), -40_000.0, device=device).half()
    mask = torch.tensor([False, False, True, True], device=device).view(1, 1, 1, 4)
    assert scaled_masked_softmax(scores, mask, 1.0).flatten().tolist() == [0, 0, 0.5, 0.5]
    near = scaled_masked_softmax(scores, mask, 0.25).flatten().tolist()
    assert near == [0.25] * 4


@each_half
def test_masked_softmax_under_autocast(half: torch.dtype, device: torch.device) -> None:
    scores = torch.randn(1, 2, 4, 4, device=device)
    module = softmax(half, True, AttnMaskType.causal, 2.0, True)
    with torch.autocast(device.type, dtype=half):
        y = module(scores, None)
    assert y.dtype is half and torch.equal(y, module(scores.to(half), None))


def test_softmax_refuses() -> None:
    with pytest.raises(RuntimeError, match="both fp16 and bf16"):
        FusedScaleMaskSoftmax(True, True, AttnMaskType.padding, True, fill, True, None)
    with pytest.raises(RuntimeError, match="softmax should be in fp32 when scaled"):
        FusedScaleMaskSoftmax(True, False, AttnMaskType.padding, True, fill, False, 2.0)
    with pytest.raises(
        ValueError, match=r"attn_mask_type: expected one of AttnMaskType.*got 'causal'"
    ):
        FusedScaleMaskSoftmax(True, False, "causal", True, fill, True, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected as many queries as keys, got 2 and 3"):
        scaled_upper_triang_masked_softmax(torch.zeros(1, 1, 2, 3), None, 1.0)


def test_a_mask_that_is_not_square_goes_to_mask_func() -> None:
    module = softmax(torch.float16, True, AttnMaskType.causal, None, True)
    scores, mask = torch.zeros(1, 1, 1, 4).half(), torch.tensor([[[[False, False, True, True]]]])
    assert module(scores, mask).flatten().tolist() == [0.5, 0.5, 0.0, 0.0]
