"""``bench/counts.py --models``: the bytes of small models are those that one counts by hand."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpuless.fake_cuda import FakeCuda
from torch import Tensor, nn

pytest.importorskip("matplotlib")  # as for all of bench/

import counts
import model_counts
import model_tables
import toy_models
import traffic

INPUTS, OUTPUTS, ROWS = 8, 16, 4
WEIGHT, BIAS, X, Y = INPUTS * OUTPUTS, OUTPUTS, ROWS * INPUTS, ROWS * OUTPUTS


class Tiny(nn.Module):
    """A linear layer, and a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y = F.gelu(y)
        return y.float().sum()


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"tests/test_model_counts.py:{[text in line for line in lines].index(True) + 1}"


@pytest.mark.smoke
@pytest.mark.parametrize("way", model_counts.WAYS)
def test_bytes_of_a_layer_and_an_activation(fake_cuda: FakeCuda, way: str) -> None:
    found = model_counts.counted(fake_cuda, Tiny(), {"x": torch.randn(ROWS, INPUTS)}, way)
    is_half = way.startswith("O2")
    weights = 0 if is_half else 2 * 6 * (WEIGHT + BIAS)  # and their gradients
    # the sum reads its input; its gradient is one number until it is cast
    scale = 2 * 2 * 4 if way == "autocast" else 2 * 3 * 4  # the scale is a number or a tensor
    assert found.total() == {
        traffic.PRODUCTS: 2 * ((X + WEIGHT + BIAS + Y) + (X + Y + WEIGHT)),
        traffic.WEIGHTS: weights,
        traffic.ACTIVATIONS: 6 * X + 6 * Y + (4 + 2 * Y),
        traffic.FP32: (4 * Y + 4) + scale + 4,
        traffic.HALF: 2 * (2 * Y + 3 * Y) + 2 * (Y + BIAS),  # GELU, the gradient of the bias
        traffic.OURS: 0,
    }
    assert found.bound == found.total()[traffic.PRODUCTS] + 2 * BIAS
    linear, gelu = line_of("y = self.linear(x)"), line_of("y = F.gelu(y)")
    sizes = {work: counted.total() for work, counted in found.bytes.items()}
    for op, line, direction, size in (
        ("addmm", linear, "forward", 2 * (X + WEIGHT + BIAS + Y)),
        ("mm", linear, "backward", 2 * (X + Y + WEIGHT)),
        ("sum", linear, "backward", 2 * (Y + BIAS)),
        ("gelu", gelu, "forward", 2 * 2 * Y),
        ("gelu_backward", gelu, "backward", 2 * 3 * Y),
        ("casts of activations to float16", linear, "forward", 6 * X),
    ):
        assert sizes[traffic.Work(op, line, direction)] == size


def traffic_of(gpu: FakeCuda, function: Callable[[], Any]) -> traffic.Traffic:
    gpu.observer = found = traffic.Traffic([])
    function()
    return found


N = 6
ON_GPU: list[tuple[Callable[..., Any], int]] = [
    (lambda x, y, i: x + 1, 8 * N * N),
    (lambda x, y, i: x.add_(x), 8 * N * N),
    (lambda x, y, i: x.t(), 0),
    (lambda x, y, i: torch.empty_like(x), 0),
    (lambda x, y, i: torch.zeros_like(x), 4 * N * N),
    (lambda x, y, i: x.zero_(), 4 * N * N),
    (lambda x, y, i: x[:2].copy_(y), 8 * 2 * N),
    (lambda x, y, i: x[:1].expand(N, N) + 1, 4 * N + 4 * N * N),
    (lambda x, y, i: torch.mul(y, 2, out=torch.empty_like(y)), 8 * 2 * N),
    (lambda x, y, i: torch._foreach_add([x, y], 1), 8 * N * N + 8 * 2 * N),
    (lambda x, y, i: torch._foreach_zero_([x, y]), 4 * N * N + 4 * 2 * N),
    (lambda x, y, i: F.embedding(i, x), 8 * 2 + 2 * 4 * 2 * N),
    (lambda x, y, i: x[i], 8 * 2 + 2 * 4 * 2 * N),
    (lambda x, y, i: x.index_add_(0, i, y), 8 * 2 + 3 * 4 * 2 * N),
    (lambda x, y, i: x.index_put_((i,), y), 8 * 2 + 3 * 4 * 2 * N),
    (lambda x, y, i: F.nll_loss(y, i), 4 * 2 + 8 * 2 + 2 * 4),
]


@pytest.mark.parametrize(("function", "size"), ON_GPU)
def test_bytes_of_operations(fake_cuda: FakeCuda, function: Callable[..., Any], size: int) -> None:
    x, y, i = torch.randn(N, N).cuda(), torch.randn(2, N).cuda(), torch.tensor([1, 3]).cuda()
    assert sum(traffic_of(fake_cuda, lambda: function(x, y, i)).total().values()) == size


def test_attention_is_one_product(fake_cuda: FakeCuda) -> None:
    q, k, v = (torch.randn(2, 1, n, 8).half().cuda().requires_grad_() for n in (4, 6, 6))
    mask = torch.zeros(4, 6, dtype=torch.bool).cuda()
    found = traffic_of(
        fake_cuda, lambda: F.scaled_dot_product_attention(q, k, v, mask).backward(q.detach())
    )
    products = {work: size for work, size in found.bytes.items() if traffic.PRODUCTS in size}
    (forward, forward_bytes), (backward, backward_bytes) = products.items()
    of_q, of_k, statistics = 2 * q.numel(), 2 * k.numel(), 4 * 2 * 4
    inputs = of_q + 2 * of_k + mask.numel()
    assert forward_bytes == {traffic.PRODUCTS: inputs + of_q + statistics}
    gradients = of_q + of_q + 2 * of_k  # of the output, and of q, k and v
    assert backward_bytes == {traffic.PRODUCTS: inputs + of_q + statistics + gradients}
    assert forward.line == backward.line == line_of("fake_cuda, lambda: F.scaled_dot")
    assert (forward.direction, backward.direction) == ("forward", "backward")


def test_our_kernels_and_weights_of_few_dimensions(fake_cuda: FakeCuda, compiled: bool) -> None:
    if compiled:
        pytest.skip("only the interpreter shows its launches")

    class Norm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.half()).float().sum()

    found = model_counts.counted(fake_cuda, Norm(32), {"x": torch.randn(64, 32)}, "O2")
    kernels = Counter(work.op for work, size in found.bytes.items() if traffic.OURS in size)
    assert kernels.keys() >= {"norm_kernel", "norm_backward_kernel"}
    norm = next(size for work, size in found.bytes.items() if work.op == "norm_kernel")
    # input and output, weight and bias, a mean and a deviation for each row
    assert norm[traffic.OURS] == 2 * 2 * 64 * 32 + 2 * 4 * 32 + 2 * 4 * 64
    assert found.bound == 2 * 2 * 32  # gradients of weight and bias


# The command


def test_every_model_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"GPT-2", "BERT", "Llama", "ViT", "U-Net", "ResNet-50", "Mamba", "T5", "Mixtral"} <= set(
        toy_models.MODELS
    )
    for only, message in (("GPT-3", "'GPT-3' finds no model; expected"), ("(", "regular")):
        with pytest.raises(SystemExit):
            run_main("--models", "--only", only)
        assert message in capsys.readouterr().err
    for wrong in (["--peers"], ["--arch", "90"], ["--op", "softmax"]):
        with pytest.raises(SystemExit):
            run_main("--models", *wrong)


def run_main(*arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return counts.main([*arguments])


def test_a_missing_package_leaves_out_its_model(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = toy_models.MODELS["BERT"]._replace(package="no_such_package")
    fails = toy_models.Toy(None, lambda: 1 / 0)
    monkeypatch.setattr(toy_models, "MODELS", {"BERT": missing, "zero": fails})
    assert list(model_counts.rows_of(fake_cuda, "BERT")) == [
        {"model": "BERT", "reason": "no_such_package is not installed"}
    ]
    (row, *_) = model_counts.rows_of(fake_cuda, "zero")
    assert row["reason"] == "ZeroDivisionError: division by zero"


def made_up(fake_cuda: FakeCuda) -> dict[str, Any]:
    batch = {"x": torch.randn(ROWS, INPUTS)}
    rows = [
        model_counts.row_of("Tiny", way, model_counts.counted(fake_cuda, Tiny(), batch, way))
        for way in model_counts.WAYS
    ]
    absent = [{"model": "T5", "reason": "transformers is not installed"}]
    return {
        "date": "2026-01-01", "command": "counts", "seconds": 1, "commit": "abc",
        "versions": {"torch": "2.15"}, "rows": json.loads(json.dumps(rows)), "not_counted": absent,
    }  # fmt: skip


def test_tables(fake_cuda: FakeCuda) -> None:
    found = made_up(fake_cuda)
    page = model_tables.page(found)
    assert "| Tiny | O2 | 0.00 |" in page and "T5: transformers is not installed" in page
    ours = next(row for row in found["rows"] if row["way"] == "O2")
    ops = model_tables.largest(ours)
    assert [op["op"] for op in ops[:2]] == ["casts of activations to float32", "gelu_backward"]
    assert not any("mm" in op["op"] for op in ops)  # products
    lines = "\n".join(model_tables.lines_of(found))
    assert line_of("y = F.gelu(y)") in lines and "T5: transformers" in lines


@pytest.mark.long
def test_json_of_the_command(fake_cuda: FakeCuda) -> None:
    """In a process of its own, as users run it."""
    command = [sys.executable, counts.__file__, "--models", "--json", "--only", "ResNet"]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    output = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["way"] for row in rows] == list(model_counts.WAYS)
    for row in rows:
        assert tuple(row["bytes"]) == traffic.KINDS
        assert sum(row["bytes"].values()) == sum(sum(op["bytes"].values()) for op in row["ops"])
        assert row["bound"] < sum(row["bytes"].values())
        assert all({"op", "line", "direction", "calls"} <= op.keys() for op in row["ops"])
