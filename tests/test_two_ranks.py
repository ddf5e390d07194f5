"""Ranks that hang are killed, and those that follow are new. The ranks are this file, too."""

import sys

import pytest
import torch.distributed as dist
import two_ranks
from two_ranks import Pair, of_ranks, on_ranks, serve

pytestmark = of_ranks


@on_ranks
def number() -> int:
    return dist.get_rank()


def test_a_hang_fails_one_test_alone(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(two_ranks, "TIMEOUT", 0.01)  # they are still importing torch
        with pytest.raises(pytest.fail.Exception, match=r"or was killed after 0\.03 s"):
            number(pair)
    assert number(pair) == [0, 1]


if __name__ == "__main__":
    serve(*sys.argv[1:])
