"""The trainer of rl.md on TRL, with a stand-in for vLLM that returns log-probabilities."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rl_page import TRL, run
from tiny_models import LINES, loaded_llama, make_tokenizer, quiet

from tritonamp import functional
from tritonamp.integrations.transformers import enable

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

pytestmark = [
    pytest.mark.clients,
    # of PEFT and TRL to transformers
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*` is deprecated"),
]

ANSWER = 4


@pytest.fixture
def watched() -> type:
    """The class of the page."""
    names: dict[str, Any] = {"functional": functional}
    run(TRL, names, before="arguments = ")
    return names["WatchedTrainer"]


def sample(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Return answers that a model draws; a log-probability is off by 0.25, and one is absent."""
    tokenizer = trainer.processing_class
    found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for prompt in prompts:
        given, log_probs = tokenizer(prompt).input_ids, []
        ids = list(given)
        for _ in range(ANSWER):
            with torch.no_grad():
                logits = trainer.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            scores = torch.log_softmax(logits, -1)
            ids.append(torch.multinomial(scores.exp(), 1).item())
            log_probs.append(scores[ids[-1]].item())
        log_probs[0] -= 0.25
        log_probs[1] = float("nan")
        found["prompt_ids"].append(given)
        found["completion_ids"].append(ids[len(given) :])
        found["logprobs"].append(log_probs)
    return found


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_the_mismatch_is_in_trls_log(
    half: torch.dtype, watched: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # of rollout_func
    tokenizer = make_tokenizer()
    torch.manual_seed(1)
    settings = dict(
        max_steps=2,
        num_generations=4,
        num_iterations=2,  # TRL then computes the log-probabilities of the policy that drew
        max_completion_length=ANSWER,
        per_device_train_batch_size=4,
        bf16=False,
    )
    trainer = watched(
        model=loaded_llama(tmp_path / "base", half, half, tokenizer),
        args=trl.GRPOConfig(**quiet(tmp_path, **settings)),
        reward_funcs=lambda completions, **_: [float(c.count("cat")) for c in completions],
        train_dataset=datasets.Dataset.from_dict({"prompt": LINES * 2}),
        processing_class=tokenizer,
        rollout_func=sample,
    )
    enable(trainer, level="O2")
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    metrics = trainer.accelerator.amp.metrics()
    trainer.accelerator.free_memory()
    eps = torch.finfo(half).eps
    assert logged[-1].keys() >= {"amp/mismatch_k3", "amp/mismatch_outside"}
    assert metrics["amp/mismatch_worst_ratio"] == pytest.approx(
        torch.tensor(0.25).exp(), rel=4 * eps
    )
    # of the three that count in each answer one is off; others, by rounding
    share = metrics["amp/mismatch_outside"]
    assert share == pytest.approx(1 / 3) if half is torch.float16 else share >= 1 / 3
