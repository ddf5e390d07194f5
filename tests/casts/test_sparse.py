"""Models with sparse parameters, buffers and gradients, and with quantized buffers."""

from collections.abc import Callable

import pytest
import torch
from helpers import take_step
from torch import Tensor, nn

import tritonamp
from tritonamp.casts import op_table

# torch's own: compressed sparse tensors are new to it
pytestmark = pytest.mark.filterwarnings("ignore:Sparse:UserWarning")

FP32 = torch.float32
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "COO": Tensor.to_sparse,
    "CSR": Tensor.to_sparse_csr,
    "CSC": Tensor.to_sparse_csc,
}


def matrix() -> Tensor:
    return torch.tensor([[0.0, 1, 0, 2], [3, 0, 0, 0], [0, 0, 0.5, 0], [0, 1, 1, 0]])


class Graph(nn.Module):
    """A layer of a graph network, whose edges are sparse."""

    def __init__(self, edges: Tensor, kind: str) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        if kind == "buffer":
            self.register_buffer("edges", edges)
        else:
            self.edges = nn.Parameter(edges, requires_grad=kind == "trained")

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.sparse.mm(self.edges, self.linear(x)))


def made(layout: str, kind: str) -> tuple[Graph, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Graph(LAYOUTS[layout](matrix()), kind)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


CASES = [(layout, kind) for layout in LAYOUTS for kind in ("buffer", "frozen")]
each_case = pytest.mark.parametrize(("layout", "kind"), [*CASES, ("COO", "trained")])


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@each_case
def test_steps_are_those_of_fp32(layout: str, kind: str, level: str, half: torch.dtype) -> None:
    x = torch.randn(4, 4)
    plain, plain_optimizer = made(layout, kind)
    model, optimizer = made(layout, kind)
    with tritonamp.enable(model, optimizer, level=level, dtype=half) as amp:
        amp.watch(every=1)
        for _ in range(2):
            loss = model(x).square().mean()
            amp.backward(loss)
            amp.clip_grad_norm_(1e3)
            optimizer.step()
            optimizer.zero_grad()
            plain(x).square().mean().backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        assert amp.stats()["skipped"] == 0
        assert model.edges.layout is LAYOUTS[layout](matrix()).layout
        assert model.edges.dtype is FP32  # as it came
        amp.ranges(), amp.explain()
        assert "nothing overflows" in amp.explain(replay=lambda: model(x).square().mean())
        state = model.state_dict()
    for name, expected in plain.state_dict().items():
        found = state[name].to_dense().float()
        # an operand or two is rounded, and so is its gradient
        eps = 0 if level == "O0" else torch.finfo(half).eps
        torch.testing.assert_close(found, expected.to_dense(), rtol=4 * eps, atol=4 * eps + 1e-6)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_replay_leaves_quantized_buffers_alone() -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("codes", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8))
    x = torch.randn(2, 4)
    with tritonamp.enable(model, level="O2") as amp:
        assert "nothing overflows" in amp.explain(replay=lambda: model(x).square().mean())
        assert torch.equal(model.codes.dequantize(), torch.ones(4))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@each_case
def test_check_and_disable(layout: str, kind: str, level: str) -> None:
    """At O3, which has no op table, torch has its say about dtypes in the forward."""
    model, optimizer = made(layout, kind)
    forecast = tritonamp.check(model, optimizer, torch.randn(4, 4), level=level)
    assert forecast.loss is not None
    assert str(forecast)
    with tritonamp.enable(model, optimizer, level=level):
        assert model.edges.dtype is FP32
    assert torch.equal(model.edges.to_dense(), matrix())


@pytest.mark.parametrize("value", [1e6, float("nan")], ids=str)
def test_check_reads_the_values_of_sparse_parameters(value: float) -> None:
    model = Graph((matrix() * value).to_sparse(), "frozen")
    kinds = {finding.kind for finding in tritonamp.check(model, None, torch.randn(4, 4)).findings}
    assert kinds & {"overflow", "non-finite"}


def test_half_edges_and_no_edges() -> None:
    x = torch.randn(4, 4)
    for edges in (matrix().half(), torch.zeros(4, 4)):
        model = Graph(edges.to_sparse(), "buffer")
        expected = Graph(edges.float().to_sparse(), "buffer")
        expected.load_state_dict({**model.state_dict(), "edges": edges.float().to_sparse()})
        assert tritonamp.check(model, None, x).loss is not None
        with tritonamp.enable(model):
            torch.testing.assert_close(model(x), expected(x), rtol=0, atol=0.01)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sparse.mm": torch.sparse.mm,
    "sparse.addmm": lambda a, x: torch.sparse.addmm(x, a, x),
    "matmul": lambda a, x: a @ x,
    "mv": lambda a, x: a.mv(x[:, 0]),
    "addmm": lambda a, x: torch.addmm(x, a, x),
    "smm": lambda a, x: torch.smm(a, x).to_dense(),
    "hspmm": lambda a, x: torch.hspmm(a, x).to_dense(),
    "sspaddmm": lambda a, x: torch.sspaddmm(a, a, x).to_dense(),
    "sparse with sparse": lambda a, x: torch.sparse.mm(a, x.to_sparse()).to_dense(),
    "reduce": lambda a, x: torch.sparse.mm(a, x, "mean"),
    "sampled_addmm": lambda a, x: torch.sparse.sampled_addmm(a, x, x).to_dense(),
}


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["COO", "CSR"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_and_their_gradients(product: str, layout: str, half: torch.dtype) -> None:
    """Of each dtype with each other, where torch has the product in FP32."""
    torch.manual_seed(0)
    call, value = PRODUCTS[product], torch.randn(4, 4)
    seed = torch.randn(4, 4)

    def run(edges: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        x = value.to(dtype, copy=True).requires_grad_()
        result = call(LAYOUTS[layout](edges), x)
        if not result.requires_grad:
            return result, None
        (
            result.float() * seed[: len(result)].view_as(result) if result.dim() > 1 else result
        ).sum().backward()
        return result.detach(), x.grad

    try:
        expected = run(matrix(), FP32)
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch has no such product or gradient")
    with tritonamp.enable(nn.Linear(1, 1), dtype=half) as amp:
        for first in (FP32, half):
            for second in (FP32, half):
                with amp.autocast():
                    found = run(matrix().to(first), second)
                for f, e in zip(found, expected, strict=True):
                    if e is not None:
                        # a rounded operand and a rounded result, of sums of three terms
                        close = 8 * torch.finfo(half).eps
                        torch.testing.assert_close(f.float(), e, rtol=close, atol=close)


def test_every_product_of_sparse_matrices_is_fp32() -> None:
    assert {*op_table.overloads(op_table.SPARSE)} >= {"_sparse_mm", "_sparse_mm.reduce", "hspmm"}


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, indices: Tensor) -> Tensor:
        return self.linear(self.table(indices))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_sparse_gradients(level: str) -> None:
    model, indices = Table(), torch.tensor([[1, 2, 2], [7, 1, 9]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert tritonamp.check(model, optimizer, indices).loss is not None
    with tritonamp.enable(model, optimizer, level=level) as amp:
        amp.watch(every=1)
        before = model.table.weight.detach().clone()
        take_step(amp, optimizer, model(indices).float().square().mean())
        changed = (model.table.weight.detach() != before).any(-1)
        assert changed.nonzero().flatten().tolist() == [1, 2, 7, 9]
        assert amp.stats()["skipped"] == 0
