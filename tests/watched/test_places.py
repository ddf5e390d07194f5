"""Where ops run: modules and lines, in the forward and in the backward."""

import inspect
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watched.seen import Doubles, Seen

from tritonamp.watched.ops import schema_of
from tritonamp.watched.places import Place, op_of

aten = torch.ops.aten


def test_module_and_line_in_forward_and_backward() -> None:
    model, seen_file = nn.Sequential(Doubles()), inspect.getfile(Doubles)
    x = torch.ones(2, requires_grad=True)
    with Seen(model) as seen:
        model(x).sum().backward()
    here = Place("0", file=seen_file, number=model[0].line)
    assert seen.of("exp") == [(here, False)]
    assert seen.of("tanh") == [(Place("0.inner", file=seen_file, number=model[0].line), False)]
    ((place, backward),) = seen.of("tanh_backward")
    assert (place.module, place.op, backward) == ("0.inner", "tanh", True)
    assert [place.module for place, _ in seen.of("sum")] == [None]
    assert str(seen.of("exp")[0][0]) == f"0, op exp at {seen_file}:{model[0].line}"
    assert here.line == f"tests/watched/seen.py:{model[0].line}"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_forward(use_reentrant: bool) -> None:
    model = nn.Sequential(Doubles())
    x = torch.ones(2, requires_grad=True)
    with Seen(model) as seen:
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert [(p.module, backward) for p, backward in seen.of("exp")] == [("0", False)] * 2
    assert [(p.module, backward) for p, backward in seen.of("tanh_backward")] == [("0.inner", True)]


def test_a_module_that_raises_is_known() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError

    model = nn.Sequential(nn.Identity(), Raises())
    seen = Seen(model)
    with pytest.raises(RuntimeError), seen:
        model(torch.ones(1))
    assert seen.failed is model[1] and not seen.modules


def test_a_module_in_another_thread_is_noted_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Identity())
    with Seen(model) as seen:
        thread = threading.Thread(target=lambda: model[1](torch.ones(1)))
        thread.start()
        thread.join()
        model[0](torch.ones(1))
    assert seen.threads == {"1": None} and seen.of("tanh")[0][0].module == "0"


def test_hooks_are_gone_afterwards() -> None:
    hooks = nn.modules.module
    before = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    with pytest.raises(ValueError, match="inside"), Seen(nn.Tanh()):
        raise ValueError("inside")
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == before


@pytest.mark.parametrize(
    ("func", "aten_name", "name", "written", "overwritten", "is_view"),
    [
        (aten._softmax.default, "_softmax", "softmax", set(), set(), False),
        (aten.add_.Tensor, "add_", "add", {0}, set(), False),
        (aten.copy_.default, "copy_", "copy", {0}, {0}, False),
        (aten.add.out, "add", "add", {"out"}, {"out"}, False),
        (aten.view.default, "view", "view", set(), set(), True),
    ],
)
def test_what_a_schema_says(
    func: Any, aten_name: str, name: str, written: set, overwritten: set, is_view: bool
) -> None:
    schema = schema_of(func)
    assert (schema.aten, schema.name, schema.is_view) == (aten_name, name, is_view)
    assert (schema.written, schema.overwritten) == (written, overwritten)
    assert not schema.random and schema_of(aten.rand_like.default).random


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (torch.sqrt, "sqrt"),
        (torch.log1p, "log1p"),
        (torch.exp2, "exp2"),
        (torch.special.i0, "i0"),
        (torch.linalg.vector_norm, "linalg_vector_norm"),
        (lambda x: nn.functional.nll_loss(x, torch.zeros(2, 3, 3).long()), "nll_loss2d"),
    ],
)
def test_the_op_of_a_node(function: Any, op: str) -> None:
    """Where a backward's op ran before the watch, its node alone tells the op."""
    node = function(torch.rand(2, 2, 3, 3, requires_grad=True)).grad_fn
    assert op_of(node) == op
