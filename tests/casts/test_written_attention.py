"""Attention scores that code scales and masks: which are one pass, and the same bits as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.casts.written_attention import FOUND, LEFT
from tritonamp.casts.written.rewriting import rewritten

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
INF = float("inf")


class Attention(nn.Module):
    """Calls a function of query, key, value and mask, each [2, 3, 5, 8], mask [2, 1, 5, 5]."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.qkv, self.function = nn.Linear(24, 72), function

    def forward(self, x: Tensor, mask: Any) -> Any:
        projected = self.qkv(x).view(2, 5, 3, 3, 8).permute(2, 0, 3, 1, 4)
        self.given = [part.contiguous() for part in projected]
        return self.function(*self.given, mask)


def masks(dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Additive masks. The first row of one is -inf everywhere, of another the lowest number."""
    causal = torch.zeros(2, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -INF)
    empty = causal.clone()
    empty[0, :, 0] = -INF
    lowest = causal.clamp(min=torch.finfo(dtype).min)
    lowest[1, :, 3] = torch.finfo(dtype).min
    given = {
        "causal": causal,
        "an empty row": empty,
        "lowest": lowest,
        "biases": torch.randn(2, 1, 5, 5),
    }
    return {name: mask.to(dtype) for name, mask in given.items()} | {
        "FP32": lowest, "one row": causal[:1, :, -1:].to(dtype),
    }  # fmt: skip


MASKS = tuple(masks(FP16))


def results(model: nn.Module, x: Tensor, mask: Tensor | None, **fields: Any) -> list[Tensor]:
    """Return output and gradients of query, key and value."""
    amp = fields.pop("handles")(model, cast_outputs=None, **fields)
    assert len(amp.stats()["fused"]) == fields["fuse_ops"]
    output = model(x, mask)
    grads = torch.autograd.grad((1024 * output).sum(), model.given[:3])  # type: ignore[arg-type]
    amp.disable()
    return [output.detach(), *grads]


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", FOUND)
def test_one_pass_has_the_bits_of_the_steps(
    handles: Any, device: torch.device, name: str, mask: str, level: str, dtype: torch.dtype
) -> None:
    """Also for rows that are -inf everywhere, which are NaN, and of the lowest number, which are
    uniform in some dtypes.
    """
    torch.manual_seed(0)
    model, x = Attention(FOUND[name]).to(device), torch.randn(2, 5, 24, device=device)
    given = masks(dtype)[mask]
    given = None if given is None else given.to(device)
    settings = {"handles": handles, "level": level, "dtype": dtype}
    fused = results(model, x, given, fuse_ops=True, **settings)
    plain = results(model, x, given, fuse_ops=False, **settings)
    assert fused[0].dtype is plain[0].dtype
    torch.testing.assert_close(fused[0], plain[0], rtol=0, atol=0, equal_nan=True)
    for a, b in zip(fused[1:], plain[1:], strict=True):
        # gradients of the steps are rounded one by one
        finite = b.isfinite()
        assert torch.equal(a.isfinite(), finite)
        torch.testing.assert_close(
            a[finite],
            b[finite],
            rtol=0,
            atol=4 * torch.finfo(dtype).eps * float(b[finite].abs().max()),
        )


def divided_and_added(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    scores = q @ k.mT
    scores = scores / 2
    scores = scores + mask
    return torch.softmax(scores, dim=-1)


def filled(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    scores = q @ k.mT * 0.5
    scores = scores.masked_fill(mask > 0, -1e4)
    return torch.softmax(scores, dim=-1)


SHAPES = (2, 3, 5, 5), (2, 1, 5, 5), (5, 5), (5, 1), (5,), (1, 1, 1, 1)


@pytest.mark.parametrize("function", [divided_and_added, filled])
@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_steps_are_in_the_pass(
    handles: Any, function: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    names = functions_behind(handles, function, torch.randn(shape).to(dtype))
    assert "MaskedSoftmaxBackward" in names
    assert names.isdisjoint({"DivBackward0", "MulBackward0", "AddBackward0", "MaskedFillBackward0"})


@pytest.mark.parametrize(
    "mask", [torch.ones(5, 5).bfloat16(), torch.ones(5, 5).double(), torch.ones(1, 2, 3, 5, 5)],
    ids=["bfloat16", "float64", "more dimensions"],
)  # fmt: skip
def test_other_masks_are_added_as_the_code_stands(handles: Any, mask: Tensor) -> None:
    names = functions_behind(handles, divided_and_added, mask)
    assert {"DivBackward0", "AddBackward0"} <= names or "MaskedSoftmaxBackward" not in names


def functions_behind(handles: Any, function: Any, mask: Tensor) -> set[str]:
    """Return the names of a graph; the result has the bits of the code as it stands."""
    model, x = Attention(function), torch.randn(2, 5, 24)
    outputs = []
    for fuse in (False, True):
        amp = handles(model, level="O1", dtype=FP16, cast_outputs=None, fuse_ops=fuse)
        outputs.append(model(x, mask))
        amp.disable()
    assert torch.equal(*outputs)
    found, todo = set(), [outputs[1].grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            found.add(node.name())
            todo += [next for next, _ in node.next_functions]
    return found


def test_a_mask_of_another_device_is_torchs(handles: Any) -> None:
    model = Attention(divided_and_added)
    handles(model, level="O1", dtype=FP16, cast_outputs=None)
    with pytest.raises(RuntimeError, match="is not on the expected device"):
        model(torch.randn(2, 5, 24), torch.ones(5, 5, device="meta"))


@pytest.mark.parametrize("name", LEFT)
def test_other_code_is_left_alone(name: str) -> None:
    assert rewritten(LEFT[name], lambda _: False) is None


def test_there_are_thirty_of_the_others() -> None:
    assert len(LEFT) >= 30


@pytest.mark.parametrize("name", FOUND)
def test_without_a_mask(handles: Any, device: torch.device, name: str) -> None:
    if name in ("nano", "in_place", "filled_in_place", "where", "two_masks"):
        pytest.skip("it needs a mask")
    model, x = Attention(FOUND[name]).to(device), torch.randn(2, 5, 24, device=device)
    settings = {"handles": handles, "level": "O2", "dtype": FP16}
    fused = results(model, x, None, fuse_ops=True, **settings)
    plain = results(model, x, None, fuse_ops=False, **settings)
    assert torch.equal(fused[0], plain[0])


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_is_no_plain_tensor_runs_as_it_stands(handles: Any) -> None:
    """Numbers, nested and meta tensors, and the tracer of TorchScript."""

    class Other(nn.Module):
        def forward(self, x: Any, mask: Any) -> Any:
            scores = x * 0.5
            scores = scores + mask
            return torch.softmax(scores, dim=-1)

    model, mask = Other(), torch.randn(3)
    handles(model, level="O1", cast_inputs=False)
    torch.testing.assert_close(model(2.0, mask), torch.softmax(1.0 + mask, -1))
    meta = torch.empty(2, 3, device="meta", dtype=FP16)
    assert model(meta, 1.0).shape == (2, 3)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]).half()
    assert model(nested, nested).is_nested
    traced = torch.jit.trace(model, (torch.ones(2, 3).half(), mask), check_trace=False)
    assert not any(node.kind() == "prim::PythonOp" for node in traced.graph.nodes())
