"""The FP32 masters that an optimizer steps on."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tritonamp.distributed.sharding import Sharding
from tritonamp.fp32_values import Fp32Values
from tritonamp.kernels._facts import versions
from tritonamp.kernels._multi_tensor import Memory, TensorLists
from tritonamp.kernels._shards import any_sharded
from tritonamp.kernels.cast import cast
from tritonamp.policy import HALF_DTYPES, Policy, packs_masters
from tritonamp.step.changes import Changes
from tritonamp.step.packed_masters import has_master, masters_form, take_master
from tritonamp.step.small_state import state_format
from tritonamp.step.state_loading import widen_state

_requires_grad = operator.attrgetter("requires_grad")


class Masters:
    """One optimizer's parameters, each with the tensor that the optimizer steps on.

    The tensor is an FP32 master, or the parameter itself. It is the parameter itself if the
    parameter is FP32, if the policy has no masters, or if its FP32 value is lent: packed (the
    parameter and 16 more bits) or in host memory between steps.

    Args:
        optimizer: the optimizer; its ``param_groups`` and ``state`` are changed.
        fp32_values: FP32 values of the models' half tensors.
        policy: policy of the ``Amp``.
        sharding: how parameters are spread over ranks; None: each rank has whole parameters.

    Attributes:
        optimizer: the optimizer, whose ``param_groups`` hold the masters.
        changes: record of the values that have changed; None: the policy does not ask for it.
        packs: whether an FP32 master is the half parameter and 16 more bits.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        fp32_values: Fp32Values,
        policy: Policy,
        sharding: Sharding | None,
    ) -> None:
        self.optimizer = optimizer
        self._fp32_values = fp32_values
        self._trains_fp32_values = policy.trains_fp32_values
        self._sharding = sharding
        state = state_format(optimizer, policy.state)
        self.packs = packs_masters(masters_form(optimizer, policy), state)
        self._lends = self.packs or policy.offload is not None
        self._memory = Memory()
        self._sources: dict[Tensor, Tensor] = {}  # master -> parameter of the model
        # The same in the order of the groups. A step hands these lists on as they are: to make
        # lists of a dictionary would cost host time at every step.
        self._masters: list[Tensor] = []
        self._params: list[Tensor] = []
        self._any_sharded = False
        self._copies: list[int] = []  # of each parameter, on how many ranks; empty: not sharded
        self._lent: list[Tensor] = []  # half parameters whose FP32 value is lent
        self._frozen: list[Tensor] = []  # half parameters that train once they require gradients
        self._halves: list[int] = []  # the half parameters' numbers in the FP32 values
        self._versions_after_step = b""  # of the parameters, for the log
        self.changes = Changes(fp32_values) if policy.tracks_changes else None
        self.adopt(*optimizer.param_groups)

    def adopt(self, *groups: dict[str, Any]) -> None:
        """Replace half parameters of some groups by masters, which take over their state.

        Args:
            *groups: groups of the optimizer, changed in place.
        """
        for params in (group["params"] for group in groups):
            for i, param in enumerate(params):
                master = param if param in self._sources else self._master_of(param)
                if master is not param:
                    params[i] = master
        masters = [master for group in self.optimizer.param_groups for master in group["params"]]
        # groups that are still to be adopted have no entry yet
        self._masters = [m for m in masters if m in self._sources]
        self._params = [self._sources[master] for master in self._masters]
        self._any_sharded = any_sharded(self._masters)
        if self._sharding is not None:
            self._copies = [self._sharding.copies(param) for param in self._params]
        # All lists are made here, once for each change of the groups, and not in the steps.
        self._frozen = [p for p in self._params if p.dtype in HALF_DTYPES and not p.requires_grad]
        lends = self._lends and self._trains_fp32_values
        self._lent = [p for p in self._params if lends and p in self._fp32_values]
        self._halves = self._fp32_values.indices(list(self.copies().values()))
        if self.changes is not None:
            self.changes.adopt(self._masters, self._params)

    def _master_of(self, param: Tensor) -> Tensor:
        """Return the tensor to step on for ``param``, which takes over the optimizer's state."""
        master = param
        if self._trains_fp32_values and self._needs_master(param):
            if self._lends:
                self._fp32_values.lend(param, self.packs)
            else:
                master = self._fp32_values.master(param)
        self._sources[master] = param
        # Moments that were made or loaded before ``enable`` stay in use.
        if master is not param and param in self.optimizer.state:
            self.optimizer.state[master] = self.optimizer.state.pop(param)
        return master

    def _needs_master(self, param: Tensor) -> bool:
        trains_in_half = param.dtype in HALF_DTYPES and param.requires_grad
        return trains_in_half or param in self._fp32_values

    def _adopt_unfrozen(self) -> None:
        """Replace half parameters by masters once they require gradients."""
        unfrozen = list(filter(_requires_grad, self._frozen))
        self.check_gathered(unfrozen)
        if self._trains_fp32_values and unfrozen:
            # half state may be left from a time before these parameters were frozen
            widen_state(self.optimizer, unfrozen)
            for param in unfrozen:
                self._sources.pop(param, None)
            self.adopt(*self.optimizer.param_groups)
            # masters of a loaded state have waited for this, see ``load_master_params``
            self.load_master_params()

    def check_gathered(self, params: Sequence[Any]) -> None:
        """Raise if half parameters require gradients since ``enable`` under FSDP2.

        Args:
            params: parameters of the model.

        Raises:
            RuntimeError: some of ``params`` do; the message says how to make their shards FP32.
        """
        half = [p for p in params if p.dtype in HALF_DTYPES and p.requires_grad]
        if self._sharding is not None and self._sharding.gathered and half:
            raise RuntimeError(
                f"{len(half)} half parameter(s) under FSDP2 require gradients since "
                "tritonamp.enable: expected them to before it, which makes their shards FP32; call "
                "amp.disable(), requires_grad_(), and tritonamp.enable again"
            )

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise if the optimizer has a new group's parameters already, or cannot step on them.

        torch compares with the masters only, so it would not notice parameters that have masters.

        Args:
            group: group that is about to be added; its "params" become a list.

        Raises:
            ValueError: the optimizer has one of the parameters.
            RuntimeError: as for ``check_gathered``.
        """
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        # "params" may be a generator, which torch could not read a second time
        group["params"] = params
        known = set(self._params)
        if any(isinstance(p, Tensor) and p in known for p in params):
            raise ValueError("some parameters appear in more than one parameter group")
        self.check_gathered([p for p in params if isinstance(p, Tensor)])

    def restore_groups(self) -> None:
        """Put the model's parameters and their state back into all groups."""
        for group in self.optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                param = self._sources[master]
                if param is not master:
                    group["params"][i] = param
                    if master in self.optimizer.state:
                        self.optimizer.state[param] = self.optimizer.state.pop(master)

    def load_master_params(self) -> None:
        """Move FP32 masters of a ``tritonamp.optim`` state, packed ones too, into the masters.

        A master counts only where its rounded value is the parameter, so the model has to be loaded
        first. Masters of frozen half parameters wait until the parameters require gradients.
        """
        lent = set(self._lent)
        for master, param in self._sources.items():
            if self._trains_fp32_values and master.dtype in HALF_DTYPES and param not in lent:
                continue
            state = self.optimizer.state.get(master, {})
            if not has_master(state):
                continue
            held = self._fp32_values.get(param) if param in self._fp32_values else param
            with torch.no_grad():
                held.copy_(take_master(state, held))
                # Packing rounds ties of bfloat16 away from 0, a step rounds them to even: the half
                # parameter follows its master, as after a step.
                if held is not param:
                    param.copy_(held)
                    self._fp32_values.mark_rounded(self._fp32_values.indices([param]))

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the model, in the order of the groups."""
        return self._params

    def copies(self) -> dict[Tensor, Tensor]:
        """Return master to half parameter, for each parameter that has a master of its own."""
        return {master: param for master, param in self._sources.items() if master is not param}

    def stored_form(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the stored form of each parameter's lent FP32 value: 16 bits, or a host tensor.

        A parameter without a lent value stands for itself.
        """
        return self._fp32_values.stored_form(params)

    def with_groups(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Yield each parameter of the model, its stepped-on tensor, and that tensor's group."""
        for group in self.optimizer.param_groups:
            for master in group["params"]:
                yield self._sources.get(master, master), master, group

    def refresh(self) -> None:
        """Copy half parameters that were written to since the last step into their masters.

        Groups that the user has changed by hand are adopted.

        Raises:
            RuntimeError: the model was moved to another device since ``enable``.
        """
        groups = self.optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        same = len(params) == len(self._masters) and all(map(operator.is_, params, self._masters))
        # The user has changed the groups by hand. The comparison is by identity, because ``==`` of
        # tensors would launch kernels and wait for them.
        if not same:
            self.adopt(*groups)
        changed = self._fp32_values.refresh(self._halves)
        if self.changes is not None:
            self.changes.follow()
        if not changed:
            return
        # Only after a change: a move to another device gives half parameters other memory, so that
        # it is noticed above.
        for master, param in self.copies().items():
            if master.device != param.device:
                raise RuntimeError(
                    f"a parameter of the model is on {param.device}, its FP32 master on "
                    f"{master.device}: move the model to its device before tritonamp.enable"
                )

    def check_dtypes(self) -> None:
        """Raise if a cast of a module has made trained parameters half since ``enable``.

        Raises:
            RuntimeError: it has; the message says what to do instead.
        """
        trained = (m for m in self._masters if m.dtype in HALF_DTYPES and m.requires_grad)
        bare = [m for m in trained if self._trains_fp32_values and m not in self._fp32_values]
        if bare:
            raise RuntimeError(
                f"{len(bare)} parameter(s) have become half since tritonamp.enable, as by half() "
                f"of a submodule: expected {type(self.optimizer).__name__} to step on "
                "FP32 values. The level decides on dtypes: leave the cast out, or call "
                "amp.disable() before it and tritonamp.enable after it"
            )

    def unlike(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return half parameters, and how many elements of each differ from the rounded master.

        Parameters with writes that ``refresh`` takes over are left out.

        Returns:
            the parameters, and their counts as 0-d tensors.
        """
        found = {p: self._fp32_values.unlike(p) for p in self.copies().values()}
        known = {p: count for p, count in found.items() if count is not None}
        return list(known), list(known.values())

    # after the step

    def write_back(self, backend: str) -> None:
        """Round the masters into the half parameters."""
        lists = TensorLists(memory=self._memory, params=self._masters, copies=self._params)
        if self.changes is not None:
            self.changes.compare()
        with torch.no_grad():
            cast(lists, backend)
        self.mark_rounded()

    def mark_rounded(self) -> None:
        """Note that the half parameters hold the rounded masters."""
        self._fp32_values.mark_rounded(self._halves)
        # lent FP32 tensors are out of date now, since a step writes to their stored form
        self._fp32_values.note_step()
        if self.changes is not None:
            self.changes.note_step()

    def note_step(self) -> None:
        """Note that a step was the last to write to the parameters."""
        self._versions_after_step = versions(self._params)

    @property
    def is_untouched(self) -> bool:
        """Whether torch has counted no write to the parameters since the last step."""
        return self._versions_after_step == versions(self._params)

    def overflowed(self) -> list[Tensor]:
        """Return the parameters that became inf in any step though their master was finite.

        Reads the device.
        """
        kept = self._memory.all_kept("overflow", len(self._params))
        flags = [flag.tolist() for flag in kept]
        return [param for param, *found in zip(self._params, *flags, strict=False) if any(found)]

    def lost_updates(self) -> list[float]:
        """Return by group the share of half values that the last step did not change, or zeros.

        The values are zeros if the policy does not track changes. Reads the device.
        """
        groups = self.optimizer.param_groups
        return [0.0] * len(groups) if self.changes is None else self.changes.shares_left(groups)
