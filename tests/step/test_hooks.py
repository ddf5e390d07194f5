"""Hooks of a step run at each step that has gradients, skipped or not, with every optimizer."""

import contextlib
from typing import Any

import pytest
from runs import LEVELS, started_on_cpu
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

OPTIMIZERS = "AdamW", "SGD", "Lion", "NAdam", "Adagrad"  # the last two step by themselves


start = started_on_cpu()


@pytest.mark.parametrize("of", ["the optimizer", "all optimizers"])
@pytest.mark.parametrize("by_scaler", [False, True], ids=["step", "scaler.step"])
@pytest.mark.parametrize("level", LEVELS[:3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_at_each_step_with_gradients(
    start: Any, kind: str, level: str, by_scaler: bool, of: str
) -> None:
    run, ran = start(optimizer=kind, level=level), list[str]()
    hooks = run.optimizer.register_step_pre_hook, run.optimizer.register_step_post_hook
    if of == "all optimizers":
        hooks = register_optimizer_step_pre_hook, register_optimizer_step_post_hook
    with contextlib.ExitStack() as removed:
        for name, register in zip(("pre", "post"), hooks, strict=True):
            handle = register(lambda *_, name=name: ran.append(name))
            removed.callback(handle.remove)
        for factor in (1.0, float("nan"), 1.0):
            run.step(factor=factor, by_scaler=by_scaler)
            assert ran == ["pre", "post"]
            ran.clear()
        run.loss()  # and no backward
        run.finish(by_scaler=by_scaler)
        assert ran == []
    assert (run.amp.stats()["steps"], run.amp.stats()["skipped"]) == (2, 1)
