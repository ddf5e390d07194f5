"""batch_invariant=True: rows of an enabled model have the same bits in every batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from launches import note_launches
from torch import Tensor, nn

import tritonamp
from tritonamp import functional
from tritonamp.kernels import device as hardware

F = nn.functional
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
LEVELS = pytest.mark.parametrize("level", ["O1", "O2"])
ROWS, N = 37, 100


class Formula(nn.Module):
    """A function of rows and targets; its parameters make it a model that can be enabled."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.norm, self.rms, self.groups = nn.LayerNorm(N), nn.RMSNorm(N), nn.GroupNorm(4, N)
        self.scale = nn.Parameter(torch.rand(N) + 0.5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.function(self, x, targets)


class WrittenNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(N) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def log_probs(m: Formula, x: Tensor, t: Tensor) -> Tensor:
    found, entropy = functional.token_log_probs(x, t, temperature=0.8, return_entropy=True)
    return found + entropy


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "softmax": lambda m, x, t: x.softmax(-1),
    "log_softmax": lambda m, x, t: F.log_softmax(x, -1),
    "softmax of columns": lambda m, x, t: x.view(len(x), 10, 10).softmax(1),
    "sum": lambda m, x, t: x.sum(-1),
    "sum of columns": lambda m, x, t: x.view(len(x), 10, 10).sum((1,)),
    "layer_norm": lambda m, x, t: m.norm(x),
    "rms_norm": lambda m, x, t: m.rms(x),
    "group_norm": lambda m, x, t: m.groups(x[:, :, None]),
    "cross_entropy": lambda m, x, t: F.cross_entropy(x, t, reduction="none"),
    "smoothed": lambda m, x, t: F.cross_entropy(x, t, reduction="none", label_smoothing=0.1),
    "cross_entropy of images": lambda m, x, t: F.cross_entropy(
        x.view(len(x), 10, 10), t[:, None].expand(-1, 10) % 10, reduction="none"
    ),
    "add_layer_norm": lambda m, x, t: functional.add_layer_norm(
        x, x.flip(-1), (N,), m.norm.weight, m.norm.bias
    )[1],
    "add_rms_norm": lambda m, x, t: functional.add_rms_norm(x, x.flip(-1), (N,), m.rms.weight)[1],
    "masked_softmax": lambda m, x, t: functional.masked_softmax(x, x.detach() > -1, scale=0.3),
    "token_log_probs": log_probs,
    "functional.softmax": lambda m, x, t: functional.softmax(x, -1),
    "functional.sum": lambda m, x, t: functional.sum(x, -1, dtype=FP32),
    "functional.cross_entropy": lambda m, x, t: functional.cross_entropy(x, t, reduction="none"),
}


def inputs(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(3)
    x = (torch.randn(ROWS, N, generator=make) * 3).to(dtype)
    return x.to(device), torch.randint(N, (ROWS,), generator=make).to(device)


def result_and_gradient(model: nn.Module, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    result = model(x, targets)
    result.float().square().sum(tuple(range(1, result.dim()))).sum().backward()
    assert x.grad is not None
    return result.detach(), x.grad


def assert_rows_are_alone(model: nn.Module, x: Tensor, targets: Tensor) -> None:
    whole = result_and_gradient(model, x, targets)
    for at in (slice(1), slice(3, 4), slice(5, 9), slice(9, None)):
        for all_rows, rows in zip(
            whole, result_and_gradient(model, x[at], targets[at]), strict=True
        ):
            assert torch.equal(all_rows[at], rows)


@LEVELS
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows(device: torch.device, name: str, dtype: torch.dtype, level: str) -> None:
    """Forward and backward, below the size at which kernels are faster than torch, too."""
    half = FP16 if dtype is FP32 else dtype
    model = Formula(FUNCTIONS[name]).to(device)
    fields = {"dtype": half, "batch_invariant": True, "cast_outputs": None}
    with tritonamp.enable(model, level=level, **fields):
        for _ in range(2):  # the second time by a plan
            assert_rows_are_alone(model, *inputs(dtype, device))


@LEVELS
def test_a_norm_that_code_writes_out(device: torch.device, level: str) -> None:
    model = WrittenNorm().to(device)
    x, _ = inputs(FP16, device)
    with tritonamp.enable(model, level=level, batch_invariant=True):
        whole = model(x)
        assert all(torch.equal(whole[i : i + 3], model(x[i : i + 3])) for i in (0, 1, 20, 34))


@pytest.mark.compiled
# of torch 2.11, where Dynamo makes an instance of the class itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    [
        *("softmax", "layer_norm", "cross_entropy", "sum", "rms_norm", "functional.softmax"),
        *("functional.sum", "functional.cross_entropy", "add_rms_norm", "masked_softmax"),
    ],
)
def test_compiled(name: str) -> None:
    """The graph holds the same kernels or twins, and no operation of torch in their place."""
    torch.compiler.reset()  # earlier tests have compiled the same forward
    model = Formula(FUNCTIONS[name])
    x, targets = inputs(FP16, torch.device("cpu"))
    with tritonamp.enable(model, level="O2", batch_invariant=True):
        expected = result_and_gradient(model, x, targets)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_rows_are_alone(compiled, x, targets)
        assert torch.equal(compiled(x, targets), expected[0])


def test_small_inputs_take_kernels(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch computes them otherwise, in an order that depends on the number of rows."""
    found, launches = {}, note_launches(monkeypatch, lambda launch: [launch.kernel.__name__])
    for invariant in (False, True):
        model = Formula(FUNCTIONS["softmax"]).to(cuda)
        with tritonamp.enable(model, level="O1", batch_invariant=invariant):
            launches.clear()
            model(*inputs(FP16, cuda))
            found[invariant] = [name for name in launches if "softmax" in name]
    assert found == {False: [], True: ["softmax_kernel"]}


def test_functions_run_by_length(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of masked_softmax and those of apex, too."""
    from tritonamp.kernels import masked_softmax

    asked, operation = [], masked_softmax.masked_softmax

    def note(*args: Any) -> Tensor:
        asked.append(args[-1])
        return operation(*args)

    monkeypatch.setattr(masked_softmax, "masked_softmax", note)
    model = Formula(FUNCTIONS["masked_softmax"]).to(device)
    with tritonamp.enable(model, level="O1", batch_invariant=True):
        model(*inputs(FP16, device))
    assert asked == ["auto, batch-invariant"]
    functional.masked_softmax(*inputs(FP16, device)[:1])
    assert asked[1:] == ["auto"]


@pytest.mark.parametrize("name", ["softmax", "group_norm", "cross_entropy"])
def test_under_a_dispatch_mode(cuda: torch.device, name: str) -> None:
    """A mode, such as a counter of FLOPs, sees an op in place of a launch."""
    from torch.utils.flop_counter import FlopCounterMode

    model, (x, targets) = Formula(FUNCTIONS[name]).to(cuda), inputs(FP16, cuda)
    with tritonamp.enable(model, level="O1", batch_invariant=True, cast_outputs=None):
        expected = model(x, targets)
        with FlopCounterMode(display=False):
            assert torch.equal(model(x[5:6], targets[5:6]), expected[5:6])


def test_only_inside_of_its_forward() -> None:
    """Functions outside, and other models, choose as before."""
    asked = []

    def note(m: Formula, x: Tensor, t: Tensor) -> Tensor:
        asked.append(functional.inputs.backend_in_force())
        return x

    x, targets = inputs(FP16, torch.device("cpu"))
    plain, alone = Formula(note), Formula(note)
    of_plain = tritonamp.enable(plain, level="O1")
    with of_plain, tritonamp.enable(alone, level="O1", batch_invariant=True):
        for model in (plain, alone, plain):
            model(x, targets)
    asked.append(functional.inputs.backend_in_force())
    assert asked == ["auto", "auto, batch-invariant", "auto", "auto"]


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_levels_without_an_op_policy_are_refused(level: str) -> None:
    with pytest.raises(ValueError, match=r"batch_invariant=True needs op_policy=True: .*'O1'"):
        tritonamp.enable(Formula(FUNCTIONS["sum"]), level=level, batch_invariant=True)


def test_a_gpu_without_kernels_is_refused(cuda: torch.device) -> None:
    model = Formula(FUNCTIONS["sum"]).to(cuda)
    expected = r"batch_invariant=True: .*\(asked for\), whose sums depend on the number of rows"
    with pytest.raises(hardware.UnsupportedDeviceError, match=expected):
        tritonamp.enable(model, level="O1", batch_invariant=True, backend="eager")
    with tritonamp.enable(model, level="O1"):
        pass  # nothing was left behind


def test_a_recomputed_segment_has_the_bits_of_the_forward(device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    def inner(m: Formula, x: Tensor, t: Tensor) -> Tensor:
        return checkpoint(lambda x: m.norm(x).softmax(-1), x, use_reentrant=False)  # type: ignore[no-any-return]

    model = Formula(inner).to(device)
    with tritonamp.enable(model, level="O1", batch_invariant=True):
        assert_rows_are_alone(model, *inputs(FP16, device))


@pytest.mark.parametrize("dim", [2, -3, "0", ("0",)])
def test_a_wrong_dim_is_refused_as_without_it(dim: Any) -> None:
    x, targets = inputs(FP16, torch.device("cpu"))
    errors = []
    for invariant in (False, True):
        model = Formula(lambda m, x, t: functional.softmax(x, dim))
        amp = tritonamp.enable(model, level="O1", batch_invariant=invariant)
        # RuntimeError: torch 2.11, to which "0" is a malformed name
        with amp, pytest.raises((IndexError, TypeError, RuntimeError)) as caught:
            model(x, targets)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]
