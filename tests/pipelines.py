"""A model of four blocks, whose stages ranks train as a pipeline, or one process trains alone."""

import contextlib
import math
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from ranks import SMALL_STEPS, scaler
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from two_ranks import enable, whole

import tritonamp

MICRO = 4  # micro-batches
STEPS = 4
WIDE = 8
CPU = torch.device("cpu")

SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "traced": Schedule1F1B,  # stages by ``pipeline()``
    "interleaved": ScheduleInterleaved1F1B,
    "looped": ScheduleLoopedBFS,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "V": ScheduleZBVZeroBubble,
    "dual V": ScheduleDualPipeV,
}
# for each stage of ranks 0 and 1 the numbers of its blocks
HALVES = [[[0, 1]], [[2, 3]]]
TURNS = [[[0], [2]], [[1], [3]]]
V_SHAPE = [[[0], [3]], [[1], [2]]]
# torch 2.11 greets neighbours, and where these are stages of one rank gloo cannot
RUN = [
    kind for kind in SCHEDULES if "V" not in kind or hasattr(PipelineStage, "_warmup_forward_vote")
]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.layer(self.norm(x)).tanh()
        return result


def stage_inputs(steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2 * MICRO, WIDE, generator=generator) for _ in range(steps)]


def traced(blocks: Sequence[Residual]) -> Any:
    """Returns two stages, as ``pipeline()`` cuts them."""
    part = stage_inputs()[0].chunk(MICRO)[0]
    cut = {"2": SplitPoint.BEGINNING}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch 2.11 about what it does itself
        return pipeline(nn.Sequential(*blocks), mb_args=(part,), split_spec=cut)


class InTurn(nn.Module):
    """The two stages of a traced pipeline in one process."""

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        self.submod_0, self.submod_1 = map(pipe.get_stage_module, range(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.submod_1(self.submod_0(x))
        return result


def two_optimizers(params: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """Return an SGD for matrices and an AdamW for vectors."""
    return [
        torch.optim.SGD([p for p in params if p.dim() > 1], lr=0.1),
        torch.optim.AdamW([p for p in params if p.dim() < 2], lr=0.01),
    ]


class Alone:
    """All blocks in this process, enabled.

    Attributes:
        models: one, or this rank's stages.
        amp: their handle.
        optimizers: one, or two.
        factor: factor of the losses.

    Args:
        optimizer: a name in ``ranks.SMALL_STEPS``, or "two".
    """

    has_first_stage = has_last_stage = True
    is_faulty = True  # of the replicas of a stage the one that faults are put into

    def __init__(
        self,
        optimizer: str = "SGD",
        *,
        half: bool = False,
        frozen: bool = False,
        seed: int = 0,
        traced: bool = False,
        micro: int = MICRO,
        last_first: bool = False,
        summed: bool = False,
        **options: Any,
    ) -> None:
        self._traced, self._micro, self._last_first = traced, micro, last_first
        self._divisor = 1 if summed else micro
        torch.manual_seed(seed)
        blocks = [Residual() for _ in range(4)]
        for block in blocks:
            block.layer.requires_grad_(not frozen)
        self.models: list[nn.Module] = self.stages([b.half() for b in blocks] if half else blocks)
        params = [p for model in self.models for p in model.parameters() if p.requires_grad]
        self.optimizers: list[torch.optim.Optimizer] = (
            two_optimizers(params) if optimizer == "two" else [SMALL_STEPS[optimizer](params)]
        )
        if options.get("dtype") is not torch.bfloat16 and options.get("level") in ("O1", "O2"):
            options["scaler"] = scaler()
        self.amp: tritonamp.Amp = enable(self.models, self.optimizers, **options)
        self.factor = 1.0

    def stages(self, blocks: Sequence[Residual]) -> list[nn.Module]:
        return [InTurn(traced(blocks)) if self._traced else nn.Sequential(*blocks)]

    def criterion(self, output: Tensor, target: Tensor) -> Tensor:
        return self.factor * (output.float() - target).square().mean()

    def backward(self, x: Tensor) -> list[float]:
        """Runs the backwards of micro-batches, and returns their losses."""
        losses = [self.criterion(self.models[0](part), part) for part in x.chunk(self._micro)]
        for loss in reversed(losses) if self._last_first else losses:
            self.amp.backward(loss / self._divisor)
        return [loss.item() for loss in losses]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def walk(self, inputs: Sequence[Tensor], max_norm: float | None = None) -> None:
        """Take a step on each of the inputs, clipped to ``max_norm``."""
        for x in inputs:
            self.backward(x)
            if max_norm is not None:
                self.amp.clip_grad_norm_(max_norm)
            self.step()

    def train(self, fault: str | None = None, max_norm: float = math.inf) -> dict[str, Any]:
        """Trains, with a fault in the second step, and true gradients asked for in the last."""
        losses, norms = [], []
        for number, x in enumerate(stage_inputs()):
            faulty = number == 1 and self.is_faulty
            there = faulty and self.has_first_stage
            bias = next(p for p in self.models[0].parameters() if p.dim() == 1)
            self.factor = math.nan if faulty and fault == "loss" else 1.0
            with filled(bias, math.nan if there and fault == "activation" else None):
                losses.append(self.backward(x))
            if there and fault == "gradient":
                grad: Any = bias.grad
                getattr(grad, "_local_tensor", grad)[0] = math.inf
            if there and fault == "veto":
                self.amp.veto(True)
            if number == STEPS - 1:
                self.amp.unscale_()
            norms.append(float(self.amp.clip_grad_norm_(max_norm)))
            self.step()
        return {
            "losses": [list(map(str, each)) for each in losses],
            "norms": norms,
            "values": self.values(),
            "state": self.state(),
        }

    def objects(self) -> dict[str, Any]:
        """Return the objects that a checkpoint is saved from and loaded into."""
        return {name: getattr(self, name) for name in ("models", "optimizers", "amp")}

    def values(self) -> dict[str, list[float]]:
        """Return the values of this rank's models in a checkpoint."""
        states = [model.state_dict() for model in self.models]
        return {
            re.sub(r"^(submod_\d|module)\.", "", name): whole(value)
            for state in states
            for name, value in state.items()
        }

    def state(self) -> list[Any]:
        """Return scale and steps, which the ranks have in common."""
        stats = self.amp.stats()
        names = "steps", "skipped", "forward_faults", "scale_overflows", "scale"
        return [*(stats[name] for name in names), stats["last_skip_reason"]]


class Staged(Alone):
    """This rank's stages of a pipeline.

    Args:
        kind: name of the schedule.
        wrap: puts a DDP around a stage.
        mesh: a mesh with a dimension "stage"; None: the ranks are the stages.
        lone: the stage of this rank is all that there is.
        lacks_replicas: the stages decide without their replicas.
        summed: gradients of micro-batches are not divided by their number.
        decides: False: the schedule is given the plain loss function.
        options: arguments of ``Alone``.
    """

    def __init__(
        self,
        kind: str = "1F1B",
        *args: Any,
        wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
        mesh: Any = None,
        lone: bool = False,
        lacks_replicas: bool = False,
        summed: bool = False,
        decides: bool = True,
        **options: Any,
    ) -> None:
        self._kind, self._wrap = kind, wrap
        self._group = None if mesh is None else mesh.get_group("stage")
        self._rank = dist.get_rank(self._group)
        if lone:
            groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
            self._group, self._rank = groups[self._rank], 0
        super().__init__(*args, summed=summed, **options)
        if kind == "traced":
            made = [self._pipe.build_stage(self._rank, CPU, self._group)]
        else:
            numbers = [0] if lone else self._stage_numbers()
            of_all = dist.get_world_size(self._group) * len(numbers)
            made = [
                PipelineStage(model, number, of_all, CPU, group=self._group)
                for model, number in zip(self.models, numbers, strict=True)
            ]
        self.has_first_stage = any(stage.is_first for stage in made)
        self.has_last_stage = any(stage.is_last for stage in made)
        loss_fn: Any = self.criterion
        if decides:
            of_stages = lone or lacks_replicas
            loss_fn = self.amp.pipeline_loss(loss_fn, self._group if of_stages else None)
        stages = made[0] if len(made) == 1 else made
        micro = 2 * MICRO if kind == "dual V" else MICRO
        self.schedule = SCHEDULES[kind](stages, micro, loss_fn=loss_fn, scale_grads=not summed)

    def _shape(self) -> list[list[list[int]]]:
        if self._kind in ("GPipe", "1F1B", "traced"):
            return HALVES
        return V_SHAPE if "V" in self._kind else TURNS

    def _stage_numbers(self) -> list[int]:
        in_order = sorted(stage for of_rank in self._shape() for stage in of_rank)
        return [in_order.index(stage) for stage in self._shape()[self._rank]]

    def stages(self, blocks: Sequence[Residual]) -> list[nn.Module]:
        if self._kind == "traced":
            self._pipe = traced(blocks)
            return [self._pipe.get_stage_module(self._rank)]
        return [
            self._wrap(nn.Sequential(OrderedDict((str(i), blocks[i]) for i in numbers)))
            for numbers in self._shape()[self._rank]
        ]

    def backward(self, x: Tensor) -> list[float]:
        losses: list[Tensor] = []
        self.schedule.step(
            *([x] if self.has_first_stage else []),
            target=x if self.has_last_stage else None,
            losses=losses,
        )
        return [loss.item() for loss in losses]


@contextlib.contextmanager
def filled(param: Tensor, value: float | None) -> Iterator[None]:
    """``param`` holds ``value`` in the block; None: it stays as it is."""
    before = param.detach().clone()
    with torch.no_grad():
        param.fill_(value) if value is not None else None
    yield
    with torch.no_grad():
        param.copy_(before) if value is not None else None
