"""Stand-ins for parts of verl (0.8), which needs Ray, vLLM or SGLang, and GPUs.

The names, signatures and order of calls are those of verl's ``DataParallelPPOActor``,
``DataProto`` and rollout. The code is not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class DataProto:
    """Tensors of equal length by name, and other facts by name."""

    batch: dict[str, Tensor]
    meta_info: dict[str, Any] = field(default_factory=dict)

    def split(self, split_size: int) -> list["DataProto"]:
        parts = zip(*(value.split(split_size) for value in self.batch.values()), strict=True)
        return [DataProto(dict(zip(self.batch, p, strict=True)), self.meta_info) for p in parts]


@dataclass
class ActorConfig:
    dtype: str = "float16"
    ppo_mini_batch_size: int = 8
    ppo_micro_batch_size_per_gpu: int = 4
    ppo_epochs: int = 1
    clip_ratio: float = 0.2
    grad_clip: float = 1.0


class DataParallelPPOActor:
    """The attributes and methods of verl's actor that a step uses."""

    def __init__(
        self,
        config: ActorConfig,
        actor_module: nn.Module,
        actor_optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.config, self.actor_module, self.actor_optimizer = config, actor_module, actor_optimizer
        self.param_dtype = getattr(torch, config.dtype)
        self.scaler: Any = None
        if self.param_dtype is torch.float16:
            self.scaler = torch.amp.GradScaler("cpu", growth_interval=400)

    def _forward_micro_batch(
        self, micro_batch: dict[str, Tensor], temperature: float, calculate_entropy: bool = False
    ) -> dict[str, Tensor]:
        answers = micro_batch["responses"]
        half = self.param_dtype is not torch.float32
        with torch.autocast("cpu", dtype=self.param_dtype if half else None, enabled=half):
            names = "input_ids", "attention_mask", "position_ids"
            logits = self.actor_module(
                **{name: micro_batch[name] for name in names}, use_cache=False
            ).logits
            logits.div_(temperature)
            logits = logits[:, -answers.shape[1] - 1 : -1].float()
            log_probs = torch.log_softmax(logits, -1)
        found = {"log_probs": log_probs.gather(-1, answers[..., None])[..., 0]}
        if calculate_entropy:
            found["entropys"] = -(log_probs.exp() * log_probs).sum(-1)
        return found

    def _optimizer_step(self) -> Tensor:
        if self.scaler is not None:
            self.scaler.unscale_(self.actor_optimizer)
        parameters = self.actor_module.parameters()
        grad_norm = nn.utils.clip_grad_norm_(parameters, max_norm=self.config.grad_clip)
        if self.scaler is not None:
            self.scaler.step(self.actor_optimizer)
            self.scaler.update()
        elif torch.isfinite(grad_norm):
            self.actor_optimizer.step()
        return grad_norm

    def compute_log_prob(
        self, data: DataProto, calculate_entropy: bool = False
    ) -> dict[str, Tensor]:
        self.actor_module.eval()
        found = []
        for part in data.split(data.meta_info["micro_batch_size"]):
            with torch.no_grad():
                found.append(
                    self._forward_micro_batch(
                        part.batch, data.meta_info["temperature"], calculate_entropy
                    )
                )
        return {name: torch.cat([part[name] for part in found]) for name in found[0]}

    def update_policy(self, data: DataProto) -> dict[str, list[float]]:
        self.actor_module.train()
        config, metrics = self.config, {"actor/pg_loss": [], "actor/grad_norm": []}
        for _ in range(config.ppo_epochs):
            for mini in data.split(config.ppo_mini_batch_size):
                self.actor_optimizer.zero_grad()
                for micro in mini.split(config.ppo_micro_batch_size_per_gpu):
                    loss = self._loss(micro.batch, data.meta_info["temperature"])
                    metrics["actor/pg_loss"].append(loss.item())
                    loss = loss * config.ppo_micro_batch_size_per_gpu / config.ppo_mini_batch_size
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                metrics["actor/grad_norm"].append(self._optimizer_step().detach().item())
        self.actor_optimizer.zero_grad()
        return metrics

    def _loss(self, batch: dict[str, Tensor], temperature: float) -> Tensor:
        log_prob = self._forward_micro_batch(batch, temperature)["log_probs"]
        ratio, bound = (log_prob - batch["old_log_probs"]).exp(), self.config.clip_ratio
        gain = torch.minimum(
            ratio * batch["advantages"], ratio.clamp(1 - bound, 1 + bound) * batch["advantages"]
        )
        return -gain[batch["response_mask"].bool()].mean()


class Rollout:
    """A sampler of its own: it has what ``update_weights`` has given it."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], **_: Any) -> None:
        self.weights |= {name: value.clone() for name, value in weights}


def data_of(vocabulary: int, rows: int = 8, prompt: int = 4, answer: int = 4) -> DataProto:
    """Return random prompts and answers, without ``old_log_probs``."""
    ids = torch.randint(3, vocabulary, (rows, prompt + answer))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(prompt + answer).expand_as(ids),
        "responses": ids[:, -answer:],
        "response_mask": torch.ones(rows, answer),
        "advantages": torch.randn(rows, 1).expand(rows, answer),
    }
    return DataProto(batch, {"temperature": 1.0, "micro_batch_size": 4, "use_dynamic_bsz": False})
