"""The recipe of rl.md for verl, on a stand-in for its engine."""

import asyncio
import copy
from typing import Any

import pytest
import torch
from rl_page import VERL, run
from tiny_models import make_llama, make_tokenizer
from verl_stand_in import Batch, FSDPEngine, Rollout, data_of, ppo_loss

import tritonamp

pytestmark = pytest.mark.tools

HALVES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The functions of the page."""
    names: dict[str, Any] = {"torch": torch, "tritonamp": tritonamp}
    run(VERL, names, before="verl_amp = ")
    return names


def engine_of(half: torch.dtype) -> tuple[FSDPEngine, Batch]:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    return FSDPEngine(make_llama(tokenizer), half), data_of(len(tokenizer))


def with_old(engine: FSDPEngine, data: Batch) -> Batch:
    return data | {"old_log_probs": engine.infer_batch(data)["model_output"]["log_probs"]}


@HALVES
def test_the_steps_are_those_of_fp32(half: torch.dtype, page: dict[str, Any]) -> None:
    engine, batch = engine_of(half)
    exact = FSDPEngine(copy.deepcopy(engine.module), torch.float32)
    eps = torch.finfo(half).eps
    with page["train_in_half"](engine, half) as amp:
        data, same = with_old(engine, batch), with_old(exact, batch)
        torch.testing.assert_close(
            data["old_log_probs"], same["old_log_probs"], rtol=0, atol=4 * eps
        )
        for _ in range(3):
            found, expected = engine.train_batch(data, ppo_loss), exact.train_batch(same, ppo_loss)
            norm = expected["metrics"]["grad_norm"]
            assert found["metrics"]["grad_norm"] == pytest.approx(norm, rel=20 * eps)
        assert amp.stats()["steps"] == 3 and amp.stats()["skipped"] == 0
        assert engine.module.lm_head.weight.dtype is half


@HALVES
def test_the_sampler_has_the_bits_of_the_engine(half: torch.dtype, page: dict[str, Any]) -> None:
    (engine, batch), rollout = engine_of(half), Rollout()
    copies = {name: p.detach().to(half, copy=True) for name, p in engine.module.named_parameters()}
    with page["train_in_half"](engine, half, track_changes=True) as amp:
        for overflows in (False, True, False):
            data = with_old(engine, batch)
            if overflows:
                data["advantages"] = data["advantages"] * torch.inf
            before = {name: value.clone() for name, value in copies.items()}
            engine.train_batch(data, ppo_loss)
            asyncio.run(page["send_changes"](amp, copies, rollout))
            for name, p in engine.module.named_parameters():
                assert torch.equal(rollout.weights[name], p.to(half))
            changed = any(not torch.equal(copies[name], before[name]) for name in copies)
            assert changed is not overflows
        assert (amp.stats()["steps"], amp.stats()["skipped"]) == (2, 1)


@HALVES
def test_verls_own_transfer_sends_half(half: torch.dtype, page: dict[str, Any]) -> None:
    (engine, batch), rollout = engine_of(half), Rollout()
    with page["train_in_half"](engine, half, state_dict_dtype=half):
        engine.train_batch(with_old(engine, batch), ppo_loss)
        weights, _ = engine.get_per_tensor_param()
        asyncio.run(rollout.update_weights(weights))
        for name, p in engine.module.named_parameters():
            assert torch.equal(rollout.weights[name], p)
            assert p.dtype is (torch.float32 if "norm" in name else half)
