"""The FP32 masters of one optimizer's parameters, in the groups of the optimizer."""

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tritonamp.distributed.sharding import Sharding
from tritonamp.fp32_values import Fp32Values
from tritonamp.policy import HALF_DTYPES, Policy, packs_masters
from tritonamp.step.changes import Changes
from tritonamp.step.packed_masters import load_master, masters_form
from tritonamp.step.small_state import state_format
from tritonamp.step.state_loading import widen_state
from tritonamp.step.stepped_params import (
    SteppedParams,
    check_gathered,
    check_same_device,
    refuse_cast,
)

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
        sources: master to parameter of the model.
        stepped: lists of the optimizer's parameters and masters.
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
        self.sources: dict[Tensor, Tensor] = {}
        self.stepped = SteppedParams([], [])
        self.changes = None
        if policy.tracks_changes:
            self.changes = Changes(fp32_values, of_last_step=policy.track_lost_updates)
        self.packs = packs_masters(
            masters_form(optimizer, policy), state_format(optimizer, policy.state)
        )
        self._optimizer = optimizer
        self._fp32_values = fp32_values
        self._trains_fp32_values = policy.trains_fp32_values
        self._sharding = sharding
        self._lends = self.packs or policy.offload is not None
        self._halves: Sequence[int] = ()  # the half parameters' numbers in the FP32 values
        self.adopt(*optimizer.param_groups)

    def adopt(self, *groups: dict[str, Any]) -> None:
        """Replace half parameters of some groups by masters, which take over their state.

        Args:
            *groups: groups of the optimizer, changed in place.
        """
        for params in (group["params"] for group in groups):
            for i, param in enumerate(params):
                master = param if param in self.sources else self._master_of(param)
                if master is not param:
                    params[i] = master
        lends = self._lends and self._trains_fp32_values
        # groups that are still to be adopted have no entry in the sources yet
        self.stepped = SteppedParams.of(
            self._optimizer.param_groups,
            self.sources,
            self._fp32_values.__contains__ if lends else None,
            self._sharding,
        )
        self._halves = self._fp32_values.indices(list(self.copies().values()))
        if self.changes is not None:
            self.changes.adopt(self.stepped.masters, self.stepped.params)

    def _master_of(self, param: Tensor) -> Tensor:
        """Return the tensor to step on for ``param``, which takes over the optimizer's state."""
        master = param
        if self._trains_fp32_values and self._needs_master(param):
            if self._lends:
                self._fp32_values.lend(param, self.packs)
            else:
                master = self._fp32_values.master(param)
        self.sources[master] = param
        # Moments that were made or loaded before ``enable`` stay in use.
        if master is not param and param in self._optimizer.state:
            self._optimizer.state[master] = self._optimizer.state.pop(param)
        return master

    def _needs_master(self, param: Tensor) -> bool:
        trains_in_half = param.dtype in HALF_DTYPES and param.requires_grad
        return trains_in_half or param in self._fp32_values

    def adopt_unfrozen(self) -> bool:
        """Replace half parameters that now require gradients by masters; tell whether any were."""
        unfrozen = list(filter(_requires_grad, self.stepped.frozen))
        if not unfrozen:
            return False
        check_gathered(unfrozen, self._sharding)
        if not self._trains_fp32_values:
            return False
        # half state may be left from a time before these parameters were frozen
        widen_state(self._optimizer, unfrozen)
        for param in unfrozen:
            self.sources.pop(param, None)
        self.adopt(*self._optimizer.param_groups)
        # masters of a loaded state have waited for this, see ``load_master_params``
        self.load_master_params()
        return True

    def check_group(self, group: dict[str, Any]) -> None:
        """Raise if the optimizer has a new group's parameters already, or cannot step on them.

        Args:
            group: group that is about to be added; its "params" become a list.

        Raises:
            ValueError: the optimizer has one of the parameters.
            RuntimeError: as for ``check_gathered``.
        """
        check_gathered(self.stepped.check_group(group), self._sharding)

    def check_dtypes(self) -> None:
        """Raise RuntimeError if a cast of a module has made trained parameters half."""
        trained = (m for m in self.stepped.masters if m.dtype in HALF_DTYPES and m.requires_grad)
        bare = [m for m in trained if self._trains_fp32_values and m not in self._fp32_values]
        refuse_cast(len(bare), self._optimizer)

    def restore_groups(self) -> None:
        """Put the model's parameters and their state back into all groups."""
        for group in self._optimizer.param_groups:
            for i, master in enumerate(group["params"]):
                param = self.sources[master]
                if param is not master:
                    group["params"][i] = param
                    if master in self._optimizer.state:
                        self._optimizer.state[param] = self._optimizer.state.pop(master)

    def load_master_params(self) -> None:
        """Move FP32 masters of a ``tritonamp.optim`` state, packed ones too, into the masters.

        A master counts only where its rounded value is the parameter, so the model has to be loaded
        first. Masters of frozen half parameters wait until the parameters require gradients.
        """
        lent = set(self.stepped.lent)
        for master, param in self.sources.items():
            waits = self._trains_fp32_values and master.dtype in HALF_DTYPES and param not in lent
            if not waits:
                load_master(self._optimizer.state.get(master, {}), param, self._fp32_values)

    def copies(self) -> dict[Tensor, Tensor]:
        """Return master to half parameter, for each parameter that has a master of its own."""
        return {master: param for master, param in self.sources.items() if master is not param}

    def stored_form(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the stored form of each parameter's lent FP32 value: 16 bits, or a host tensor.

        A parameter without a lent value stands for itself.
        """
        return self._fp32_values.stored_form(params)

    def with_groups(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Yield each parameter of the model, its stepped-on tensor, and that tensor's group."""
        for group in self._optimizer.param_groups:
            for master in group["params"]:
                yield self.sources.get(master, master), master, group

    def refresh(self) -> bool:
        """Copy half parameters that were written to since the last step into their masters.

        Groups that the user has changed by hand are adopted.

        Returns:
            whether groups were adopted.

        Raises:
            RuntimeError: the model was moved to another device since ``enable``.
        """
        groups, masters = self._optimizer.param_groups, self.stepped.masters
        params = [param for group in groups for param in group["params"]]
        # The user may have changed the groups by hand. The comparison is by identity, because
        # ``==`` of tensors would launch kernels and wait for them.
        by_hand = len(params) != len(masters) or not all(map(operator.is_, params, masters))
        if by_hand:
            self.adopt(*groups)
        changed = self._fp32_values.refresh(self._halves)
        if changed:
            # a move to another device gives half parameters other memory, so it counts as a change
            check_same_device(self.copies())
        if self.changes is not None:
            # written masters, because a fused step takes the rounded one for the old half value
            self._fp32_values.push()
            self.changes.follow()
        return by_hand

    def unlike(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return half parameters, and how many elements of each differ from the rounded master.

        Parameters with writes that ``refresh`` takes over are left out.

        Returns:
            the parameters, and their counts as 0-d tensors.
        """
        found = {p: self._fp32_values.unlike(p) for p in self.copies().values()}
        known = {p: count for p, count in found.items() if count is not None}
        return list(known), list(known.values())

    def mark_rounded(self) -> None:
        """Note that the half parameters hold the rounded masters."""
        self._fp32_values.mark_rounded(self._halves)
        # lent FP32 tensors are out of date now, since a step writes to their stored form
        self._fp32_values.note_step()
        if self.changes is not None:
            self.changes.note_step()

    def lost_updates(self) -> list[float]:
        """Return by group the share of half values that the last step did not change, or zeros.

        The values are zeros without ``Policy.track_lost_updates``. Reads the device.
        """
        groups = self._optimizer.param_groups
        return [0.0] * len(groups) if self.changes is None else self.changes.shares_left(groups)
