"""Losses of transformers without all logits at once, and who gets the logits all the same."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clients import state_of
from tiny_models import losses_of, peft, trainer_of, transformers
from torch import Tensor, nn

from tritonamp.casts.unread import Unread
from tritonamp.functional import LinearHead, linear_head
from tritonamp.integrations.transformers import enable

pytestmark = [
    pytest.mark.clients,
    # of PEFT to transformers
    pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*` is deprecated"),
]

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
WORDS, WIDTH, LENGTH, SIZE, BATCHES = 37, 8, 8, 4, 2
ROWS = SIZE * LENGTH


@pytest.fixture(autouse=True)
def _few_rows_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_head, "MIN_ROWS", 12)  # 2 d = 16 rows at a time


class Largest:
    """Notes the most rows of logits, or of their gradients, that a linear layer computed at once.

    No dispatch mode does it, because logits are computed at once under such a mode.
    """

    def __init__(self) -> None:
        self.rows = 0

    def note(self, made: Tensor) -> Tensor:
        if made.shape[-1:] == (WORDS,) and not isinstance(made, Unread):
            self.rows = max(self.rows, made.numel() // WORDS)
        return made

    def __enter__(self) -> "Largest":
        linear, gradients = F.linear, LinearHead.gradients
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(F, "linear", lambda *args: self.note(linear(*args)))
        self._patch.setattr(
            LinearHead, "gradients", lambda head, d, *args: gradients(head, self.note(d), *args)
        )
        return self

    def __exit__(self, *exc: object) -> None:
        self._patch.undo()


# Models


def shape(**more: Any) -> dict[str, Any]:
    return dict(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **more,
    )


def gpt2() -> Any:
    sizes = dict(vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=1, n_head=2)
    no_dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0)


def bert() -> Any:
    no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertConfig(**shape(), **no_dropout)


def phi() -> Any:
    no_dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0)
    return transformers.PhiConfig(**shape(), **no_dropout)


def mixtral() -> Any:
    experts = dict(num_local_experts=2, num_experts_per_tok=1, output_router_logits=True)
    return transformers.MixtralConfig(**shape(), **experts)


MODELS: dict[str, tuple[type, Any, bool]] = {
    "tied": (transformers.GPT2LMHeadModel, gpt2(), False),
    "own head": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**shape()), False),
    "auxiliary loss": (transformers.MixtralForCausalLM, mixtral(), False),
    "bias": (transformers.PhiForCausalLM, phi(), False),
    "own cross entropy": (transformers.BertForMaskedLM, bert(), False),
    "soft cap": (transformers.Gemma2ForCausalLM, transformers.Gemma2Config(**shape()), True),
    "scaled": (transformers.CohereForCausalLM, transformers.CohereConfig(**shape()), True),
}
"""Class, config, and whether something else reads the logits."""


def model_named(name: str) -> Any:
    cls, config, _ = MODELS[name]
    torch.manual_seed(3)
    return cls(config)


def rows_with_few_targets() -> list[dict[str, Tensor]]:
    """Rows of which some have few targets, so that the mean over a batch is not that of means."""
    tokens = torch.randint(0, WORDS, (SIZE * BATCHES, LENGTH), generator=torch.Generator())
    labels = tokens.clone()
    labels[:2, 2:] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels, strict=True)]


def seen_in_training(
    folder: Path,
    model: nn.Module,
    kind: type = transformers.Trainer,
    more: Any = None,
    fused_loss: bool = True,
    level: str = "O2",
    resume: Any = None,
    **arguments: Any,
) -> tuple[list[float], dict[str, Tensor], int]:
    """Train, and return losses, what the steps subtracted, and the most rows of logits made."""
    settings: dict[str, Any] = dict(
        max_steps=1,
        max_grad_norm=0.0,
        per_device_train_batch_size=SIZE,
        per_device_eval_batch_size=SIZE,
        gradient_accumulation_steps=BATCHES,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
    )
    before, data = state_of(model), rows_with_few_targets()
    optimizers = torch.optim.SGD(model.parameters(), lr=1.0), None
    more = {"eval_dataset": data[:SIZE], "optimizers": optimizers, **(more or {})}
    trainer = trainer_of(folder, model, data, kind, more, **{**settings, **arguments})
    enable(trainer, level=level, fused_loss=fused_loss)
    with Largest() as largest:
        trainer.train(resume_from_checkpoint=resume)
    after = model.state_dict()
    steps = {name: value - after[name] for name, value in before.items()}
    trainer.accelerator.amp.disable()
    return losses_of(trainer), steps, largest.rows


@pytest.mark.parametrize(
    ("name", "level"),
    [*((name, "O2") for name in MODELS), ("scaled", "O1"), ("tied", "O1"), ("own head", "O5")],
)
def test_the_loss_is_that_of_all_logits(name: str, level: str, tmp_path: Path) -> None:
    """Over two batches that make one step, of which each has another number of targets."""
    losses, steps, rows = seen_in_training(tmp_path, model_named(name), level=level)
    expected, expected_steps, all_rows = seen_in_training(
        tmp_path, model_named(name), level=level, fused_loss=False
    )
    assert all_rows == ROWS and rows == (ROWS if MODELS[name][2] else 16)
    eps = torch.finfo(BF16 if level == "O5" else FP16).eps
    # logits are below 1, and each may be rounded to its neighbour
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= eps
    for name, step in expected_steps.items():
        # gradients of half an ulp off in some places, behind them four times at most; weights
        # below 2 are in FP32 what a step leaves of them
        rounding = torch.finfo(FP32).eps * step.numel() ** 0.5
        assert (steps[name] - step).norm() <= 2 * eps * step.norm() + rounding, name


def test_resuming_is_not_stopping(tmp_path: Path) -> None:
    saving = dict(max_steps=4, save_strategy="steps", save_steps=2)
    model, resumed = model_named("own head"), model_named("own head")
    seen_in_training(tmp_path / "0", model, **saving)
    _, _, rows = seen_in_training(
        tmp_path / "1", resumed, resume=str(tmp_path / "0" / "checkpoint-2"), **saving
    )
    assert rows == 16
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


# Who else needs them


class ReadingTrainer(transformers.Trainer):
    """A Trainer that reads the logits, as users' classes do."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        assert isinstance(outputs.logits.memory.source, Tensor)  # computed at once
        assert torch.isfinite(outputs.logits).all()
        return loss


def their_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    assert torch.isfinite(outputs.logits).all()
    return outputs.logits.float().logsumexp(-1).mean()


OTHERS: dict[str, dict[str, Any]] = {
    "compute_loss": dict(kind=ReadingTrainer),
    "compute_loss_func": dict(more={"compute_loss_func": their_loss}),
    "label smoothing": dict(label_smoothing_factor=0.1),
    "the user": dict(fused_loss=False),
}


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
def test_where_others_need_logits_they_are_all_there(settings: Any, tmp_path: Path) -> None:
    _, _, rows = seen_in_training(tmp_path, model_named("own head"), **settings)
    assert rows == ROWS


def adapted() -> Any:
    return peft.get_peft_model(
        model_named("own head"), peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"])
    )


def with_forward() -> Any:
    model = model_named("own head")
    model.lm_head.forward = functools.partial(nn.Linear.forward, model.lm_head)
    return model


def with_hook() -> Any:
    """Halves the logits in place, of which the loss is then."""
    model = model_named("own head")
    model.lm_head.register_forward_hook(lambda _, __, logits: logits.mul_(0.5))
    return model


def with_loss() -> Any:
    model = model_named("own head")
    model.loss_function = lambda logits, labels, **_: logits.float().logsumexp(-1).mean()
    return model


@pytest.mark.parametrize("model", [adapted, with_forward, with_hook, with_loss])
def test_other_heads_and_losses_have_all_logits(model: Any, tmp_path: Path) -> None:
    losses, _, rows = seen_in_training(tmp_path, model())
    expected, *_ = seen_in_training(tmp_path, model(), fused_loss=False)
    assert rows == ROWS
    assert abs(losses[0] - expected[0]) <= torch.finfo(FP16).eps  # as above


def test_evaluation_has_its_logits(tmp_path: Path) -> None:
    seen: list[Any] = []
    metrics = {"compute_metrics": lambda found: seen.append(found.predictions.shape) or {}}
    seen_in_training(
        tmp_path, model_named("own head"), more=metrics, eval_strategy="steps", eval_steps=1
    )
    assert seen == [(SIZE, LENGTH, WORDS)]


def test_prompts_of_peft_are_before_the_logits(tmp_path: Path) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    results = []
    for fused in (True, False):
        torch.manual_seed(3)
        cls, _, _ = MODELS["own head"]
        base = cls(transformers.LlamaConfig(**{**shape(), "max_position_embeddings": LENGTH + 2}))
        model = peft.get_peft_model(base, config)
        results.append(seen_in_training(tmp_path, model, fused_loss=fused))
    (losses, _, rows), (expected, _, all_rows) = results
    assert rows == 16 and all_rows == ROWS + 2 * SIZE
    assert abs(losses[0] - expected[0]) <= torch.finfo(FP16).eps
