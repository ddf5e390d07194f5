"""Trainings that ranks share under DDP, FSDP2 or tensor parallelism, or one process alone."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from runs import Training
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from two_ranks import RANKS, enable, whole

import tritonamp
from tritonamp.kernels.outliers import SIZE

SCALE = 2.0**10
SMALL_STEPS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=0.25, weight_decay=0.0),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01, eps=0.25, foreach=False),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
}
STEP_SIZES = {"AdamW": 2 * 0.01 / 0.25, "NAdam": 4 * 0.01 / 0.25, "SGD": 0.1 / (1 - 0.5)}
"""By how much a step of `SMALL_STEPS` moves a parameter at most, for each unit of gradient.

AdamW's is lr / eps, twice for its two moments; SGD's is lr / (1 - momentum).
"""
COUNTS = "steps", "skipped", "scale", "scale_overflows", "forward_faults", "growth_tracker"
MESHES = {"copies": (RANKS, 1), "shards": (1, RANKS)}


def scaler(scale: float = SCALE) -> tritonamp.GradScaler:
    return tritonamp.GradScaler("cpu", init_scale=scale)


def joint_batches(steps: int, *shape: int) -> list[Tensor]:
    """Return batches of all ranks together, of shape [8, 6] by default."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape or (8, 6), generator=generator) for _ in range(steps)]


def share(x: Tensor) -> Tensor:
    """Return the part of a joint batch that this rank reads."""
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def joint(x: Tensor) -> Tensor:
    """Return the whole batch, for one process that trains alone."""
    return x


class Shared(Training):
    """A training on the share of this rank, at a loss scale of 1024.

    Args:
        model: the module to call: one in a DDP, a sharded one, or that of one process.
        optimizer: a name in `SMALL_STEPS`, or a function of the trainable parameters.
        share: function from a joint batch to the part that the training reads.
        fields: arguments of ``enable``.

    Attributes:
        losses: those of the batches, without faults.
        norms: those of the gradients, where they were clipped.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: str | Callable[..., Any] = "AdamW",
        level: str | None = "O2",
        *,
        share: Callable[[Tensor], Tensor] = share,
        **fields: Any,
    ) -> None:
        make = SMALL_STEPS[optimizer] if isinstance(optimizer, str) else optimizer
        if not fields.keys() & {"loss_scale", "scaler"}:
            fields["scaler"] = scaler()
        super().__init__(model, make, level, enable=enable, lr=None, **fields)
        self.share, self.losses, self.norms = share, list[float](), list[float]()

    def loss(self, x: Tensor | None = None, fault: str | None = None) -> Tensor:
        """Return the loss, with a fault in the "loss" or in the "gradient" of the output."""
        output = self.model(self.share(self.x if x is None else x))
        if fault == "gradient":
            output.register_hook(lambda grad: grad * math.inf)
        loss = (output - 1).square().mean()
        self.losses.append(float(loss.detach()))
        return loss * (math.nan if fault == "loss" else 1.0)

    def finish(self, max_norm: float | None = None, *how: Any) -> None:
        if max_norm is not None:
            self.norms.append(float(self.amp.clip_grad_norm_(max_norm)))
        super().finish(None, *how)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return the context of a micro-batch that is not the last one of its step."""
        return contextlib.nullcontext()

    def walk(
        self,
        batches: Sequence[Tensor],
        faults: Mapping[int, str | None] | None = None,
        max_norm: float | None = None,
        micro: int = 1,
    ) -> "Shared":
        """Take a step on every ``micro`` batches.

        Args:
            batches: joint batches.
            faults: kinds of faults on this rank, by the number of the batch.
            max_norm: the norm to clip to; None: gradients are not clipped.
            micro: number of batches in a step.
        """
        for i, x in enumerate(batches):
            last = (i + 1) % micro == 0
            with contextlib.nullcontext() if last else self.no_sync():
                self.backward(self.loss(x, (faults or {}).get(i)) / micro)
            if last:
                self.finish(max_norm)
        return self

    def values(self) -> list[list[float]]:
        """Return the FP32 values of the parameters, whole."""
        return [whole(p) for p in self.amp.master_params()]

    def counts(self, *names: str) -> list[Any]:
        stats = self.amp.stats()
        return [stats[name] for name in names]

    def outcome(self) -> dict[str, Any]:
        """Return the FP32 values and counts on which ranks must agree."""
        return {"masters": self.values(), **dict(zip(COUNTS, self.counts(*COUNTS), strict=True))}

    def saved(self) -> list[list[float]]:
        """Return the values of model and optimizer in a checkpoint, whole."""
        return all_values(self.model, self.optimizer)


class Replica(Shared):
    """A training under DistributedDataParallel.

    Args:
        net: the module inside.
        order: whether ``enable`` comes "before" DDP, or "after" it.
        hook: a communication hook, and the state that it is given.
        ddp: options of DDP.
        how: arguments of `Shared`.
    """

    def __init__(
        self,
        net: nn.Module,
        *args: Any,
        order: str = "after",
        hook: tuple[Any, Any] | None = None,
        ddp: dict[str, Any] | None = None,
        **how: Any,
    ) -> None:
        self.net = net

        def wrapped() -> DistributedDataParallel:
            model = DistributedDataParallel(net, **(ddp or {}))
            if hook is not None:
                state, function = hook
                model.register_comm_hook(state, function)
            return model

        super().__init__(net if order == "before" else wrapped(), *args, **how)
        if order == "before":
            self.model = wrapped()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.model.no_sync()  # type: ignore[no-any-return]

    def outcome(self) -> dict[str, Any]:
        tensors = [t for state in self.optimizer.state.values() for t in state.values()]
        state = [whole(t) for t in tensors if isinstance(t, Tensor)]
        return {
            **super().outcome(),
            "params": list(map(whole, self.net.parameters())),
            "state": state,
        }


class Clipped(Shared):
    """A run with clipped gradients, of which the last are unscaled by hand.

    Args:
        model: the module.
        batches: joint batches.
        fault: what happens to the third batch: to the "loss", the "gradient", or a "shard" of a
            gradient; None: nothing.
        args, how: arguments of `Shared`.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Tensor], fault: str | None, *args: Any, **how: Any
    ) -> None:
        super().__init__(model, *args, **how)
        for i, x in enumerate(batches):
            bad = fault if i == 2 else None
            self.backward(self.loss(x, bad))
            if bad == "shard":
                grads: Any = [p.grad for p in model.parameters() if hasattr(p.grad, "placements")]
                parts = [grad._local_tensor.view(-1) for grad in grads]
                max(parts, key=len)[0] = math.inf
            if i == len(batches) - 1:
                self.amp.unscale_()
            self.finish(0.5)

    def outcome(self) -> dict[str, Any]:
        largest = max(norm for norm in (0.0, *self.norms) if math.isfinite(norm))
        return {**super().outcome(), "norms": list(map(str, self.norms)), "largest": largest}


def mesh_of(kind: str | None) -> Any:
    """Return a mesh of two dimensions, "copies" or "shards" of them all; else one of the ranks."""
    if kind not in MESHES:
        return init_device_mesh("cpu", (dist.get_world_size(),))
    return init_device_mesh("cpu", MESHES[kind], mesh_dim_names=("replicate", "shard"))


def sharded(
    model: Any,
    own: Sequence[nn.Module] = (),
    policy: Mapping[str, torch.dtype | None] | None = None,
    **options: Any,
) -> Any:
    """Shard ``model`` by FSDP2.

    Args:
        model: the module.
        own: modules inside that are gathered by themselves.
        policy: arguments of MixedPrecisionPolicy; None: ``fully_shard`` is given no policy.
        options: further arguments of ``fully_shard``.
    """
    if policy is not None:
        options["mp_policy"] = MixedPrecisionPolicy(**policy)
    for part in (*own, model):
        fully_shard(part, **options)
    return model


def all_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """Return the values of model and optimizer in a checkpoint, whole."""
    state = optimizer.state_dict()["state"]
    moments = [t for i in sorted(state) for _, t in sorted(state[i].items())]
    return [whole(t) for t in (*model.state_dict().values(), *moments)]


def distance(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Return the largest difference of two lists of whole values."""
    pairs = zip(ours, theirs, strict=True)
    return max(abs(a - b) for p, q in pairs for a, b in zip(p, q, strict=True))


def outlying(
    run: Shared, x: Tensor, worse: Callable[[Tensor], Tensor], max_norm: float | None = None
) -> list[Any]:
    """Take steps until outliers are known, and one more on a loss that is made ``worse``.

    Returns:
        The cause of the last step, steps, skipped steps, and the window of numbers.
    """
    for step in range(SIZE + 1):
        loss = (1.0 + 0.02 * (step % 5)) * run.model(x).square().mean()
        run.backward(worse(loss) if step == SIZE else loss)
        run.finish(max_norm)
    window = run.amp.state_dict()["outliers"]["0"]
    return [run.amp.history[-1].cause, *run.counts("steps", "skipped"), window]


def alike(answers: list[Any]) -> Any:
    """Return the one answer of all ranks."""
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@contextlib.contextmanager
def listening(level: int = logging.INFO) -> Iterator[list[str]]:
    """Collect the messages that the library logs at ``level`` or above."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tritonamp")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield texts
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
