"""What a loss was computed from: its optimizers, told from the graph."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tritonamp
from tritonamp.watched.graph import gradient_leaves, nodes


def enabled(level: str) -> tuple[list[nn.Module], list[torch.optim.Optimizer], tritonamp.Amp]:
    models = [nn.Linear(3, 3), nn.Linear(3, 1)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    return models, optimizers, tritonamp.enable(models, optimizers, level=level)


def test_each_node_comes_once() -> None:
    x = torch.ones((), requires_grad=True)
    loss = x
    for _ in range(40):  # 2^40 ways
        loss = loss + loss
    found = list(nodes(loss))
    assert len(found) == 41 and gradient_leaves(found) == {x}
    assert list(nodes(torch.ones(()))) == []


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_loss_feeds_those_whose_parameters_it_is_made_of(level: str) -> None:
    (one, two), (first, second), amp = enabled(level)
    x = torch.randn(4, 3)
    assert amp.fed_by(one(x).sum()) == [first]
    assert amp.fed_by(two(x).sum()) == [second]
    assert amp.fed_by(two(one(x)).sum()) == [first, second]
    assert amp.fed_by(torch.ones(())) == [first, second], "nothing is known of it"
    amp.disable()
    with pytest.raises(RuntimeError, match="fed_by"):
        amp.fed_by(torch.ones(()))


def test_a_reentrant_checkpoint_hides_what_it_uses() -> None:
    (one, two), optimizers, amp = enabled("O2")
    x = torch.randn(4, 3, requires_grad=True)
    hidden = checkpoint(one, x, use_reentrant=True)
    assert amp.fed_by(two(x).sum() + hidden.sum()) == optimizers
    amp.disable()
