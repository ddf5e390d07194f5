"""Stand-ins for parts of verl (0.9), which needs Ray and a GPU.

Names, signatures and the order of calls are those of verl's ``FSDPEngine`` and of its rollouts. The
code is not, and batches are plain dictionaries of padded tensors.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MICRO_BATCH = 4
CLIP_GRAD = 1.0

Batch = dict[str, Tensor]
LossFunction = Callable[..., tuple[Tensor, dict[str, Any]]]


class FSDPEngine:
    """What verl's engine does in a step, in one process that shards nothing.

    Args:
        module: model of transformers, in FP32.
        param_dtype: ``mixed_precision.param_dtype`` of verl's configuration.
    """

    def __init__(self, module: nn.Module, param_dtype: torch.dtype) -> None:
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        self._autocast_dtype = param_dtype
        self.scaler: Any = None
        if param_dtype is torch.float16:
            self.scaler = torch.amp.GradScaler("cpu", growth_interval=400)

    def forward_step(
        self, micro_batch: Batch, loss_function: LossFunction | None, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        dtype, answers = self._autocast_dtype, micro_batch["responses"]
        half = dtype is not torch.float32
        names = "input_ids", "attention_mask", "position_ids"
        with torch.autocast("cpu", dtype=dtype if half else None, enabled=half):
            logits = self.module(**{n: micro_batch[n] for n in names}, use_cache=False).logits
            scores = torch.log_softmax(logits[:, -answers.shape[1] - 1 : -1].float(), -1)
            output = {"log_probs": scores.gather(-1, answers[..., None])[..., 0]}
            loss, metrics = torch.tensor(1.0), {}
            if loss_function is not None:
                loss, metrics = loss_function(model_output=output, data=micro_batch, dp_group=None)
        detached = {name: value.detach() for name, value in output.items()}
        return loss, {"model_output": detached, "loss": loss.item(), "metrics": metrics}

    def forward_backward_batch(
        self, data: Batch, loss_function: LossFunction | None, forward_only: bool = False
    ) -> dict[str, Any]:
        rows = len(data["responses"])
        outputs = []
        for start in range(0, rows, MICRO_BATCH):
            micro_batch = {name: value[start : start + MICRO_BATCH] for name, value in data.items()}
            with torch.set_grad_enabled(not forward_only):
                loss, output = self.forward_step(micro_batch, loss_function, forward_only)
            if not forward_only:
                loss = loss * MICRO_BATCH / rows
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            outputs.append(output)
        log_probs = torch.cat([output["model_output"]["log_probs"] for output in outputs])
        losses = [output["loss"] for output in outputs]
        return {"model_output": {"log_probs": log_probs}, "loss": losses, "metrics": {}}

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        grad_norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm=CLIP_GRAD)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif torch.isfinite(grad_norm):
            self.optimizer.step()
        return grad_norm.item()

    def train_batch(self, data: Batch, loss_function: LossFunction) -> dict[str, Any]:
        self.module.train()
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        outputs["metrics"]["grad_norm"] = self.optimizer_step()
        self.optimizer_zero_grad()
        return outputs

    def infer_batch(self, data: Batch, loss_function: LossFunction | None = None) -> dict[str, Any]:
        self.module.eval()
        return self.forward_backward_batch(data, loss_function, forward_only=True)

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, Tensor]], None]:
        return iter(self.module.state_dict().items()), None


class Rollout:
    """A sampler with its own weights: those that ``update_weights`` has given it."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    async def update_weights(self, weights: Iterator[tuple[str, Tensor]], **_: Any) -> None:
        self.weights |= {name: value.clone() for name, value in weights}


def ppo_loss(
    model_output: Batch, data: Batch, dp_group: Any = None
) -> tuple[Tensor, dict[str, Any]]:
    ratio = (model_output["log_probs"] - data["old_log_probs"]).exp()
    gain = torch.minimum(ratio * data["advantages"], ratio.clamp(0.8, 1.2) * data["advantages"])
    return -gain[data["response_mask"]].mean(), {}


def data_of(vocabulary: int, rows: int = 8, prompt: int = 4, answer: int = 4) -> Batch:
    """Return random prompts and answers, without ``old_log_probs``."""
    ids = torch.randint(3, vocabulary, (rows, prompt + answer))
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(prompt + answer).expand_as(ids),
        "responses": ids[:, -answer:],
        "response_mask": torch.ones(rows, answer, dtype=torch.bool),
        "advantages": torch.randn(rows, 1).expand(rows, answer),
    }
