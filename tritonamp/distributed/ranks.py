"""The ranks that train one model together and agree on every step."""

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tritonamp.class_swap import install, is_installed, uninstall
from tritonamp.distributed.ddp import EnabledDDP, has_wide_gradients, rebuild_buckets
from tritonamp.distributed.fsdp import ShardedModules, fsdp2_modules
from tritonamp.distributed.parted import PartedCheck
from tritonamp.distributed.pipeline import pipeline_work
from tritonamp.distributed.sharding import Sharding, find_sharding
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._decision import Evidence
from tritonamp.kernels._dynamo import constant_to_dynamo
from tritonamp.kernels._shards import is_sharded
from tritonamp.kernels.device import rank
from tritonamp.watched.forwards import Spectator

# torch 2.14 renames it, and warns of the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Resumable(Protocol):
    """State other than parameters that steps change, and that a rank can copy from another."""

    def state_dict(self) -> Any:
        """Return the state as plain values and tensors."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the result of ``state_dict`` of another rank."""


class Ranks(Spectator):
    """The ranks that decide together with this one.

    There are none until the first model under DDP, FSDP2 or tensor parallelism, or until the loss
    function of a pipeline is made.

    Attributes:
        members: global numbers of the ranks; empty with one process.
        several: whether there are other ranks to agree with.
        sharding: sharding of parameters and gradients over the ranks; None if each rank has all.
        sharded_modules: the modules that ``fully_shard`` was called on.
        wrappers: the DDPs around the models.
        staged: whether the models are stages of a pipeline, so that ranks have other parameters.
        ran_as_stage: whether a forward has run as that of a stage.

    Args:
        models: the enabled models, and DDPs that are already around them.
        fp32_values: FP32 values of the models' half parameters.
        steps: state that steps change; None if no rank ever copies it.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        fp32_values: Fp32Values,
        steps: Resumable | None = None,
    ) -> None:
        self._fp32_values = fp32_values
        self._steps = steps
        self._group: Any = None
        self.members: Sequence[int] = ()
        self.several = False
        self.sharding: Sharding | None = find_sharding(models)
        self.staged = self.ran_as_stage = False
        self.sharded_modules = ShardedModules(models)
        if self.sharding is not None:
            self._join(self.sharding.group)
        self._before_forward = [weakref.ref(model) for model in models]
        self.wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._to_align: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._left: weakref.WeakKeyDictionary[DistributedDataParallel, Any] = (
            weakref.WeakKeyDictionary()
        )
        self._parted = PartedCheck()
        for module in (m for model in models for m in model.modules()):
            if isinstance(module, DistributedDataParallel) and module not in self.wrappers:
                self._attach(module)

    @constant_to_dynamo
    def before(self, *forward: Any) -> None:
        """Note the DDP or the stage that the running forward belongs to.

        Raises:
            RuntimeError: ``fully_shard`` or ``parallelize_module`` was called after ``enable``.
        """
        if self._before_forward:
            self._refuse_late_sharding()
        if pipeline_work() is not None:
            self.ran_as_stage = True
        # private (torch 2.11 to 2.15): a DDP may be built around the model at any time, and nothing
        # public knows whose forward is running
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is not None and wrapper not in self.wrappers:
            if has_wide_gradients(wrapper):
                rebuild_buckets(wrapper)
            self._attach(wrapper)
            self._to_align.add(wrapper)

    traced = before

    def _refuse_late_sharding(self) -> None:
        """Raise at the first forward if parameters were sharded after ``enable``."""
        models, self._before_forward = self._before_forward, []
        for model in (ref() for ref in models):
            if model is None or self.gathered:
                continue
            late = "fully_shard" if fsdp2_modules(model) else "parallelize_module"
            sharded = self.sharding is None and any(map(is_sharded, model.parameters()))
            if sharded or late == "fully_shard":
                raise RuntimeError(
                    f"{late} was called on an enabled model, whose optimizer now holds "
                    f"parameters that are not the model's: call {late} first, then build the "
                    "optimizer, then tritonamp.enable"
                )

    def _attach(self, wrapper: DistributedDataParallel) -> None:
        self._join(wrapper.process_group)
        self.wrappers.add(wrapper)
        if not is_installed(wrapper):
            install(wrapper, EnabledDDP, self)

    def assume(self, policies: Mapping[Any, Any]) -> None:
        """Set FSDP2's policies of modules until ``detach``."""
        self.sharded_modules.assume(policies)

    def detach(self) -> None:
        """Restore the classes of DDPs and the policies of FSDP2."""
        self.sharded_modules.give_back()
        for wrapper in self.wrappers:
            if vars(wrapper).get("_tritonamp_ranks") is self:
                uninstall(wrapper)

    def __reduce__(self) -> Any:
        return Ranks, ((), Fp32Values())  # copies decide alone

    def _join(self, group: Any) -> None:
        if self.staged:
            self._check_all(group, self._group)
            return
        if self._group is not None and self._group != group:
            raise ValueError(
                "model: the models of one tritonamp.enable run under several process groups, but "
                "take their decisions together: enable them one by one, or give them one "
                "process_group"
            )
        self._set_group(group)

    def join_stages(self, group: Any) -> None:
        """Decide together with the other stages of a pipeline from now on.

        ``group`` has the ranks of all stages and all replicas; None takes all ranks of the job.

        Raises:
            ValueError: ``group`` lacks ranks that reduce gradients with this one.
        """
        group = dist.group.WORLD if group is None else group
        if self._group is not None:
            self._check_all(self._group, group)
        self._set_group(group)
        self.staged = True

    def _set_group(self, group: Any) -> None:
        self._group = group
        members = dist.get_process_group_ranks(group)
        self.several = len(members) > 1
        self.members = members if self.several else ()

    def _check_all(self, replicas: Any, stages: Any) -> None:
        """Raise if ``stages`` lacks ranks of ``replicas``, which reduce gradients together."""
        wanted, got = map(dist.get_process_group_ranks, (replicas, stages))
        if missing := sorted(set(wanted) - set(got)):
            raise ValueError(
                f"amp.pipeline_loss: expected a process_group of all ranks that train the model, "
                f"got ranks {got}, without {missing}, whose gradients are reduced with this "
                "rank's: give the group of all stages and all their replicas"
            )

    @property
    def gathered(self) -> bool:
        """Whether FSDP2 gathers the parameters and reduces the gradients."""
        return self.sharding is not None and self.sharding.gathered

    @property
    def may_be_missing(self) -> bool:
        """Whether other ranks may have run out of batches, inside of ``with wrapper.join()``."""
        return any(map(self._in_join, self.wrappers))

    @property
    def is_aligned(self) -> bool:
        """Whether no DDP has still to give all ranks the same FP32 values."""
        return not self._to_align

    def rebuild(self, healed: Iterable[nn.Module] = ()) -> None:
        """Make DDPs and FSDP2 notice changed dtypes of parameters.

        FSDP2 gathers the parameters inside of ``healed`` modules in FP32 from now on.
        """
        self.sharded_modules.gather_in_fp32(healed)
        self.sharded_modules.refresh()
        for wrapper in self.wrappers:
            if dist.is_initialized():  # else no rank is left to reduce gradients with
                rebuild_buckets(wrapper)

    # agreement

    def agree(
        self, mine: Evidence, scale: Tensor, taken: Tensor, loss: Tensor
    ) -> tuple[Evidence, Tensor, Tensor]:
        """Return the same evidence on all ranks, by a collective that the host does not wait for.

        Args:
            mine: evidence of this rank's gradients and losses, with flags. Squares of sharded
                gradients are divided by the number of ranks that count them.
            scale: the loss scale, 0-d, which should be the same on all ranks.
            taken: number of steps taken so far, 0-d, which should be the same on all ranks.
            loss: loss of this rank, 0-d; NaN if unknown.

        Returns:
            evidence of all ranks; mean of the losses, 0-d; sum of squares, with the same bits on
            all ranks.

        Raises:
            RuntimeError: ranks differed in ``scale`` or ``taken`` at an earlier decision, or stages
                of a pipeline run inside ``join``.
        """
        for wrapper in self._to_align:
            self._align(wrapper, 0)
        self._to_align.clear()
        if self.may_be_missing:
            if self.staged:
                raise RuntimeError(
                    "model.join(): expected all stages of a pipeline to decide, got a DDP whose "
                    "ranks may have run out of batches: give all ranks as many"
                )
            return self._of_gradients(mine), torch.full_like(loss, math.nan), mine.square_sum
        assert mine.loss_nonfinite is not None and mine.found_earlier is not None
        zero = torch.zeros_like(scale)
        amax = mine.amax.max() if len(mine.amax) else zero
        row = [
            mine.loss_nonfinite,
            mine.found_earlier,
            amax,
            self._counted_once(mine.square_sum.sum()),
            scale,
            taken.float(),
            loss,
        ]  # a Row
        sent = torch.stack(row)
        table = sent.new_empty(dist.get_world_size(self._group) * len(row))
        _all_gather(table, sent, group=self._group)
        ignored = any(wrapper.parameters_to_ignore for wrapper in self.wrappers)
        # of shards or stages, ranks have different gradients
        apart = self.sharding is not None or self.staged
        self._parted.check_table(table, self._group, one_norm=not (apart or ignored))
        fault, earlier, largest, square_sum, *_, losses = table.view(-1, len(row)).unbind(1)
        total = square_sum.sum().reshape(1) if apart else mine.square_sum
        # behind the magnitudes by parameter stands one for each rank; after a fault inf shows whose
        by_rank = torch.where(fault.amax() > 0, torch.where(fault > 0, math.inf, zero), largest)
        alike = total if apart else square_sum.amax().reshape(1)
        evidence = Evidence(torch.cat([mine.amax, by_rank]), total, fault.amax(), earlier.amax())
        # earlier stages know no loss
        return evidence, losses.nanmean() if self.staged else losses.mean(), alike

    def _counted_once(self, squares: Tensor) -> Tensor:
        """Return this rank's share of a sum of squares over all stages.

        DDP's replicas of a stage have the same gradients, so each counts a part of their squares.
        Squares of sharded gradients are shares already.
        """
        if not self.staged or self.sharding is not None:
            return squares
        replicas = max((dist.get_world_size(w.process_group) for w in self.wrappers), default=1)
        return squares if replicas == 1 else squares / replicas

    def norm_of_stages(self, norm: Tensor) -> Tensor:
        """Return the norm of all gradients of a pipeline, 0-d. All ranks take part.

        ``norm`` is the norm of this rank's stages, over all shards. Without a pipeline it is
        returned unchanged.
        """
        if not (self.staged and self.several):
            return norm
        squares = self._counted_once(norm.square())
        if self.sharding is not None:
            squares = squares / self.sharding.size
        table = squares.new_empty(len(self.members))
        _all_gather(table, squares.reshape(1), group=self._group)
        return table.sum().sqrt()

    def _of_gradients(self, mine: Evidence) -> Evidence:
        """Return evidence without a collective, from gradients that DDP made equal on all ranks."""
        assert mine.loss_nonfinite is not None
        zero = torch.zeros_like(mine.loss_nonfinite)
        earlier = zero if mine.found_earlier is mine.loss_nonfinite else mine.found_earlier
        by_rank = zero.expand(len(self.members))
        return Evidence(torch.cat([mine.amax, by_rank]), mine.square_sum, zero, earlier)

    def gather(self, value: Any) -> dict[int, Any]:
        """Return the ranks' values by rank, in the same order on all. Waits for all ranks.

        Returns only this rank's value if there are no other ranks or some may be missing.
        """
        if not self.several or self.may_be_missing:
            return {rank(): value}
        values: list[Any] = [None] * len(self.members)
        dist.all_gather_object(values, value, group=self._group)
        return dict(zip(self.members, values, strict=True))

    def _align(self, wrapper: DistributedDataParallel, source: int) -> None:
        """Broadcast FP32 values from ``source``, whose parameters DDP has broadcast."""
        for name, half in wrapper.module.named_parameters():
            if half in self._fp32_values and name not in wrapper.parameters_to_ignore:
                value = self._fp32_values.get(half).detach()
                there = value.to(half.device)  # main memory may be beyond the group's reach
                dist.broadcast(there, group=wrapper.process_group, group_src=source)
                value.copy_(there)

    def _in_join(self, wrapper: DistributedDataParallel) -> bool:
        """Return whether ``with wrapper.join()`` is active, so that ranks may be missing."""
        # private (torch 2.11 to 2.15), and it stays when the block is left: see ``catch_up``
        config = wrapper._join_config
        return config.enable and self._left.get(wrapper) is not config

    def catch_up(self, wrapper: DistributedDataParallel) -> None:
        """Copy the state of the rank that took the last step, at the end of ``join``."""
        self._left[wrapper] = wrapper._join_config
        # private (torch 2.11 to 2.15): the rank whose parameters DDP has just given to all
        source = wrapper._authoritative_rank
        self._align(wrapper, source)
        states = [None if self._steps is None else self._steps.state_dict()]
        dist.broadcast_object_list(states, group=self._group, group_src=source)
        if self._steps is not None and dist.get_rank(self._group) != source:
            self._steps.load_state_dict(states[0])
