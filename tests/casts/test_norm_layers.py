"""Norms that people write, and what models ask to keep in FP32."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import LlamaRMSNorm
from torch import Tensor, nn

from tritonamp.casts.norm_layers import is_norm

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


class CentredNorm(nn.Module):
    """Leaves its arithmetic to the op table."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True))
        return centred * scale * self.gain + self.bias


class LayerNorm(nn.Module):
    """With torch's norm inside."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return self.weight * F.layer_norm(x, x.shape[-1:])


class NormLinear(nn.Module):
    """Named like a norm, with a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))


class PreNorm(nn.Module):
    """Named like a norm, with a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.fn = nn.Linear(4, 4)


WRITTEN: list[Callable[[int], nn.Module]] = [LlamaRMSNorm, CentredNorm, LayerNorm]


def test_what_is_a_norm() -> None:
    assert all(is_norm(cls(4)) for cls in (*WRITTEN, nn.LayerNorm, nn.BatchNorm1d))
    others = (NormLinear(), PreNorm(), nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4)))
    assert not any(map(is_norm, others))


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), norm, nn.Linear(16, 3)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.first(x))
        self.dtypes = [normed.dtype, normed.detach().relu().dtype]
        return self.last(normed)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("norm", WRITTEN, ids=lambda cls: cls.__name__)
def test_its_parameters_are_fp32_and_its_result_half(
    handles: Any, device: torch.device, norm: Callable[[int], nn.Module], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, x = Block(norm(16)).to(device), 300 * torch.randn(8, 6, device=device)
    expected = model(x)
    amp = handles(model, level="O2", dtype=dtype)
    assert {p.dtype for p in model.norm.parameters()} == {FP32}
    output = model(x)
    assert model.dtypes == [dtype, dtype]
    # roundings of weights, activations and result
    torch.testing.assert_close(output, expected, rtol=0, atol=16 * torch.finfo(dtype).eps)
    output.sum().backward()
    assert {p.grad.dtype for p in model.norm.parameters()} == {FP32}
    amp.disable()
    assert type(model.norm) is norm


@pytest.mark.parametrize(
    "fields", [{"level": "O2", "keep_norms_fp32": False, "fuse_norms": False}, {"level": "O3"}]
)
def test_without_the_field_they_are_as_other_modules(handles: Any, fields: Any) -> None:
    model = Block(LlamaRMSNorm(16))
    handles(model, **fields)
    assert model.norm.weight.dtype is FP16 and type(model.norm) is LlamaRMSNorm


def test_half_input_is_taken_as_it_is(handles: Any) -> None:
    model = Block(LayerNorm(16))
    handles(model, level="O2")
    model(torch.ones(2, 6))
    assert model.norm.seen is FP16


def test_healing_one_and_back(handles: Any) -> None:
    model = Block(LlamaRMSNorm(16))
    amp = handles(model, level="O2")
    for change, dtype in ((amp.heal, FP32), (amp.unheal, FP16)):
        change("norm")
        model(torch.ones(2, 6))
        assert model.dtypes[0] is dtype and model.norm.weight.dtype is FP32


# torch 2.11 tracing a Function
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_copies_and_compiled(handles: Any) -> None:
    model = Block(LlamaRMSNorm(16))
    handles(model, level="O2")
    expected = model(torch.ones(2, 6))
    assert torch.equal(copy.deepcopy(model)(torch.ones(2, 6)), expected)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 6)), expected)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo, self.two = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        middle = self.wo(self.wi(x))
        self.dtypes = [middle.dtype, x.dtype]
        return self.two(middle)


class Asks(nn.Module):
    """As models of transformers do; ``query`` is a parameter."""

    _keep_in_fp32_modules = ("wo", "que*")
    _keep_in_fp32_modules_strict = frozenset({"gate.weight"})

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Dense()])
        self.gate, self.query = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.blocks[0](x) + self.query)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_a_model_asks_to_keep(
    handles: Any, level: str, dtype: torch.dtype, inside: bool
) -> None:
    asking = Asks()
    model = nn.Sequential(asking) if inside else asking
    handles(model, level=level, dtype=dtype)
    stored = FP32 if level == "O1" else dtype
    for_float16 = FP32 if dtype is FP16 else stored
    (block,) = asking.blocks
    found = [block.wi, block.wo, block.two, asking.gate]
    assert [m.weight.dtype for m in found] == [stored, for_float16, stored, FP32]
    assert asking.gate.bias.dtype is stored and asking.query.dtype is for_float16
    assert model(torch.ones(2, 4)).dtype is FP32
    # the input is as it was given
    assert block.dtypes == [FP32 if dtype is FP16 else dtype, FP32]


class AsksStrictly(nn.Sequential):
    _keep_in_fp32_modules_strict = ("1",)


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_kept_computes_in_fp32(handles: Any, level: str, dtype: torch.dtype) -> None:
    """The same bits as FP32 from half inputs; weights beyond float16 are no fault."""
    torch.manual_seed(0)
    model = AsksStrictly(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.uniform_(model[1].weight, 1e5, 2e5)
    results: list[tuple[Tensor, Tensor]] = []
    model[1].register_forward_hook(lambda _, args, y: results.append((args[0], y)))
    handles(model, level=level, dtype=dtype)
    model(torch.ones(2, 4)).sum().backward()
    [(x, y)] = results
    assert x.dtype is dtype
    assert torch.equal(y, F.linear(x.float(), model[1].weight, model[1].bias))
    assert model[1].weight.grad.isfinite().all()


@pytest.mark.parametrize(
    "fields",
    [{"level": "O3"}, {"level": "O2", "keep_norms_fp32": False}, {"level": "O0"}],
    ids=str,
)
def test_who_says_no_to_what_a_model_asks(handles: Any, fields: dict[str, Any]) -> None:
    model = Asks()
    handles(model, **fields)
    assert type(model.blocks[0].wo) is nn.Linear
    assert {p.dtype for p in model.parameters()} == {FP32 if fields["level"] == "O0" else FP16}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_attribute_of_none_asks_for_nothing(handles: Any, level: str) -> None:
    model = Asks()
    model._keep_in_fp32_modules = model._keep_in_fp32_modules_strict = None
    handles(model, level=level)
    model(torch.ones(2, 4))
    assert model.blocks[0].dtypes == [FP16, FP32]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("half", ["all", "but wo"])
def test_half_parameters_that_stay_are_not_kept(handles: Any, level: str, half: str) -> None:
    """transformers loads such modules in FP32; ``model.half()`` leaves them half."""
    model = Asks().half()
    if half == "but wo":
        model.blocks[0].wo.float()
    handles(model, level=level, half_parameters=True)
    model(torch.ones(2, 4)).sum().backward()
    assert model.blocks[0].dtypes[0] is (FP16 if half == "all" else FP32)
    assert model.blocks[0].wi.weight.dtype is FP16
