"""The recipe of rl.md for verl, on a stand-in for its engine, and on its own where it is installed.

``pip install --no-deps verl "tensordict<=0.10" codetiming hydra-core omegaconf ray torchdata`` and
what an import then misses; verl itself asks for an older transformers.
"""

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rl_page import VERL, run
from tiny_models import make_llama, make_tokenizer
from verl_stand_in import Batch, FSDPEngine, Rollout, data_of, ppo_loss

import tritonamp

pytestmark = pytest.mark.tools

HALVES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The function of the page."""
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
    """Also after a step that overflows, which changes nothing."""
    (engine, batch), rollout = engine_of(half), Rollout()
    with page["train_in_half"](engine, half) as amp:
        for overflows in (False, True, False):
            before = dict(rollout.weights)
            data = with_old(engine, batch)
            if overflows:
                data["advantages"] = data["advantages"] * torch.inf
            engine.train_batch(data, ppo_loss)
            weights, _ = engine.get_per_tensor_param()
            asyncio.run(rollout.update_weights((name, w.to(half)) for name, w in weights))
            for name, p in engine.module.named_parameters():
                assert torch.equal(rollout.weights[name], p.to(half))
            same = [n for n in before if torch.equal(before[n], rollout.weights[n])]
            assert len(same) == (len(rollout.weights) if overflows else 0)
        assert (amp.stats()["steps"], amp.stats()["skipped"]) == (2, 1)


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """verl on a CPU, in a group of one process."""
    found = pytest.importorskip("verl", reason="verl is not installed")
    platforms = pytest.importorskip("verl.plugin.platform.platform_manager")
    monkeypatch.setenv("LOCAL_RANK", "0")

    class OnCPU(platforms.PlatformCUDA):
        device_name = "cpu"
        device_module = torch.cpu

        def is_available(self) -> bool:
            return True

        def current_device(self) -> str:
            return "cpu"

        def empty_cache(self) -> None:
            pass

    monkeypatch.setattr(platforms, "_current_platform", OnCPU())
    # verl 0.9 looks for a class that newer versions of TRL do not have
    monkeypatch.setattr("verl.models.transformers.monkey_patch.is_trl_available", lambda: False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield found
    dist.destroy_process_group()


def verls_engine(folder: Path, half: torch.dtype) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    tokenizer = make_tokenizer()
    make_llama(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=str(folder),
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision={
                "param_dtype": str(half).removeprefix("torch."),
                "reduce_dtype": "fp32",
            },
            use_torch_compile=False,
        ),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=8, clip_grad=1.0),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def verls_batch(data: Batch) -> Any:
    """Return the batch as verl has it: without padding, in a TensorDict."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    rows, answer = data["responses"].shape
    prompts = data["input_ids"][:, :-answer]
    parts = {name: data[name] for name in ("input_ids", "position_ids", "responses", "advantages")}
    parts["prompts"], parts["response_mask"] = prompts, data["response_mask"].float()
    parts["loss_mask"] = torch.cat([torch.zeros(prompts.shape), parts["response_mask"]], 1)
    nested = {
        name: torch.nested.as_nested_tensor(list(value), layout=torch.jagged)
        for name, value in parts.items()
    }
    found = TensorDict(nested, batch_size=[rows])
    tensordict_utils.assign_non_tensor(
        found,
        temperature=1.0,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=4,
        use_fused_kernels=False,
        calculate_entropy=False,
        global_batch_size=rows,
        pad_mode="no_padding",
        max_response_len=answer,
        use_remove_padding=False,
    )
    return found


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore")  # verl's, about engines that are not installed
@HALVES
def test_verls_engine(half: torch.dtype, page: dict[str, Any], verl: Any, tmp_path: Path) -> None:
    """Gradient norms of four steps are those of the stand-in in FP32, up to rounding."""
    from verl.workers.utils.padding import no_padding_2_padding

    stand_in, data = engine_of(torch.float32)
    engine, batch = verls_engine(tmp_path, half), verls_batch(data)

    def loss_function(model_output: Any, data: Any, dp_group: Any) -> Any:
        advantages = torch.stack(list(data["advantages"].unbind()))
        padded = {name: no_padding_2_padding(data[name], data) for name in ("old_log_probs",)}
        padded |= {"advantages": advantages, "response_mask": advantages.isfinite()}
        log_probs = no_padding_2_padding(model_output["log_probs"], data)
        loss, metrics = ppo_loss({"log_probs": log_probs}, padded)
        return loss / 2, metrics  # of two micro-batches

    with page["train_in_half"](engine, half) as amp:
        with engine.eval_mode():
            batch["old_log_probs"] = engine.infer_batch(batch.copy())["model_output"]["log_probs"]
        assert batch["old_log_probs"].dtype is torch.float32
        same = with_old(stand_in, data)
        for _ in range(4):
            with engine.train_mode():
                found = engine.train_batch(batch.copy(), loss_function)
            norm = stand_in.train_batch(same, ppo_loss)["metrics"]["grad_norm"]
            rounding = 20 * torch.finfo(half).eps
            assert found["metrics"]["grad_norm"] == pytest.approx(norm, rel=rounding)
        assert amp.stats()["steps"] == 4 and engine.scaler is amp.scaler
        weights, _ = engine.get_per_tensor_param()
        assert {value.dtype for _, value in weights} == {torch.float32}
