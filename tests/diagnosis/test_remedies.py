"""Remedies that are tried against a fault, their order, and the end of the search."""

from collections.abc import Callable, Collection

import pytest
import torch
from runs import Training
from torch import Tensor, nn

from tritonamp.diagnosis.remedies import Faulty, find_remedy
from tritonamp.diagnosis.replay import Remedy

BFLOAT16 = Remedy(bfloat16=True)


def faulty(names: Collection[str | None], products: Collection[str | None] = ()) -> Faulty:
    return {name: name in products for name in names}


def scripted(
    moves: dict[tuple[str, ...], Collection[str | None]], bfloat16_helps: bool
) -> tuple[list[Remedy], Callable[[Remedy], Faulty]]:
    tried: list[Remedy] = []

    def again(remedy: Remedy) -> Faulty:
        tried.append(remedy)
        if remedy.bfloat16:
            return faulty([] if bfloat16_helps else ["a"])
        return faulty(moves[remedy.modules])

    return tried, again


def test_modules_that_a_fault_moves_on_to_are_tried_together() -> None:
    tried, again = scripted({("a",): ["b"], ("a", "b"): ["a", "c"], ("a", "b", "c"): []}, True)
    assert find_remedy(faulty(["a"]), again, 4) == Remedy(("a", "b", "c"))
    assert [len(remedy.modules) for remedy in tried] == [1, 2, 3]


@pytest.mark.parametrize("helps", [True, False])
@pytest.mark.parametrize(
    ("wrong", "moves", "most", "runs"),
    [
        (["a"], {("a",): ["a"]}, 4, 2),  # it stays
        (["a"], {("a",): [None]}, 4, 2),  # it leaves the model
        ([None], {}, 4, 1),
        (["a", None], {}, 4, 1),
        (["a"], {("a",): ["b"], ("a", "b"): ["c"]}, 2, 3),
    ],
    ids=["stays", "leaves", "outside", "outside, too", "too many"],
)
def test_bfloat16_comes_last(
    wrong: list[str | None],
    moves: dict[tuple[str, ...], list[str | None]],
    most: int,
    runs: int,
    helps: bool,
) -> None:
    tried, again = scripted(moves, helps)
    found = find_remedy(faulty(wrong), again, most)
    assert tried[-1] == BFLOAT16 and len(tried) == runs
    assert found == Remedy(bfloat16=helps) and found.helps is helps


def results(*names: str, and_fp32: tuple[str, ...] = ()) -> Remedy:
    return Remedy(and_fp32, results=names)


@pytest.mark.parametrize(
    "runs",
    [
        [(results("a"), {})],
        [(results("a"), {"a": True}), (Remedy(("a",)), {})],
        [(results("a"), {None: False}), (Remedy(("a",)), {})],
        [(results("a"), {"b": True}), (results("a", "b"), {})],
        [(results("a"), {"b": False}), (results("a", and_fp32=("b",)), {})],
        [
            (results("a"), {"b": False, "a": True}),
            (Remedy(("a", "b")), {"c": True}),
            (results("c", and_fp32=("a", "b")), {}),
        ],
        [(results("a"), {"a": True}), (Remedy(("a",)), {"a": True}), (BFLOAT16, {})],
    ],
)
def test_fp32_results_come_first_and_then_full_fp32(runs: list[tuple[Remedy, Faulty]]) -> None:
    left = iter(runs)

    def again(tried: Remedy) -> Faulty:
        expected, then = next(left)
        assert tried == expected
        return then

    assert find_remedy({"a": True}, again, 3) == runs[-1][0]
    assert not [*left]


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


def test_a_remedy_of_a_recorded_batch_is_tried_again_for_a_function() -> None:
    with Training(
        lambda: nn.Sequential(nn.Linear(6, 8), Squares(), nn.Linear(8, 3)), on_nonfinite="explain"
    ) as run:
        x = 1e4 * run.x
        run.step(x)
        assert "fp32_modules=" in run.amp.explain()
        ran: list[Tensor] = []

        def bad_loss() -> Tensor:
            ran.append(x)
            return (run.model(x).float() * 0 - 1).sqrt().mean()

        text = run.amp.explain(replay=bad_loss)
        assert len(ran) > 2 and "passes)" not in text and "in vain:" in text


def test_a_batch_that_the_run_makes_itself_cannot_be_repaired() -> None:
    with Training() as run:
        text = run.amp.explain(
            replay=lambda: run.loss(torch.tensor([[float("nan")] * 6, [1.0] * 6]))
        )
    assert "inf or NaN came in with the batch" in text and "in vain" not in text
    assert "(Not tried: no other values could be put in their place.)" in text


def test_a_run_may_use_transforms() -> None:
    with Training(lambda: nn.Linear(6, 3), level="O1") as run:

        def loss() -> Tensor:
            return torch.func.vmap(run.model)(run.x).float().mul(0).log().mean()

        text = run.amp.explain(replay=loss)
    assert "op log at" in text and "(tried: the batch passes)" in text


@pytest.mark.parametrize("by_scaler", [False, True])
def test_a_function_that_trains_is_refused(by_scaler: bool) -> None:
    with Training() as run:
        run.step()
        values = [p.clone() for p in run.optimizer.param_groups[0]["params"]]

        def step() -> Tensor:
            loss = run.loss()
            if by_scaler:
                run.amp.scaler.scale(loss).backward()
                run.amp.scaler.step(run.optimizer)
            else:
                run.amp.backward(loss)
                run.optimizer.step()
            return loss

        text = run.amp.explain(replay=step)
        assert "The replay failed: RuntimeError" in text and "must not train" in text
        assert run.amp.stats()["steps"] == 1
        params = run.optimizer.param_groups[0]["params"]
        assert all(torch.equal(p, value) for p, value in zip(params, values, strict=True))
        run.step()
        assert run.amp.stats()["steps"] == 2
