"""Which tensor an optimizer steps on, for each parameter of the model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from tritonamp.distributed.sharding import Sharding
from tritonamp.kernels._shards import any_sharded
from tritonamp.policy import HALF_DTYPES


class SteppedParams(NamedTuple):
    """The parameters of one optimizer, in the order of its groups. A value.

    A step hands these lists on unchanged, because making lists costs host time at every step.

    Attributes:
        masters: tensors that the optimizer steps on.
        params: parameters of the model, one for each master.
        any_sharded: whether any parameter is a DTensor.
        copies: number of ranks that hold each parameter; empty if parameters are not sharded.
        lent: half parameters whose FP32 value is lent.
        frozen: half parameters that get a master once they require gradients.
    """

    masters: list[Tensor]
    params: list[Tensor]
    any_sharded: bool = False
    copies: Sequence[int] = ()
    lent: Sequence[Tensor] = ()
    frozen: Sequence[Tensor] = ()

    @classmethod
    def of(
        cls,
        groups: Sequence[Mapping[str, Any]],
        sources: Mapping[Tensor, Tensor],
        is_lent: Callable[[Tensor], bool] | None,
        sharding: Sharding | None,
    ) -> "SteppedParams":
        """Return the parameters of some groups.

        Args:
            groups: groups of the optimizer. Tensors without a source are left out.
            sources: master to parameter of the model.
            is_lent: function that tells whether the FP32 value of a parameter is lent; None: none
                is.
            sharding: how parameters are spread over ranks; None: each rank has whole parameters.
        """
        masters = [master for group in groups for master in group["params"] if master in sources]
        params = [sources[master] for master in masters]
        copies = [] if sharding is None else [sharding.copies(param) for param in params]
        frozen = [p for p in params if p.dtype in HALF_DTYPES and not p.requires_grad]
        own = [] if is_lent is None else list(filter(is_lent, params))
        return cls(masters, params, any_sharded(masters), copies, own, frozen)

    def check_group(self, group: dict[str, Any]) -> list[Tensor]:
        """Raise if the optimizer has a new group's parameters already.

        torch compares with the masters only, so it would not notice parameters that have masters.

        Args:
            group: group that is about to be added; its "params" become a list.

        Returns:
            the tensors of the group.

        Raises:
            ValueError: the optimizer has one of the parameters.
        """
        params = group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        # "params" may be a generator, which torch could not read a second time
        group["params"] = params
        known = set(self.params)
        tensors = [p for p in params if isinstance(p, Tensor)]
        if any(p in known for p in tensors):
            raise ValueError("some parameters appear in more than one parameter group")
        return tensors


def check_gathered(params: Sequence[Any], sharding: Sharding | None) -> None:
    """Raise if half parameters require gradients since ``enable`` under FSDP2.

    Args:
        params: parameters of the model.
        sharding: how parameters are spread over ranks; None: each rank has whole parameters.

    Raises:
        RuntimeError: some of ``params`` do; the message says how to make their shards FP32.
    """
    if sharding is None or not sharding.gathered:
        return
    half = [p for p in params if p.dtype in HALF_DTYPES and p.requires_grad]
    if half:
        raise RuntimeError(
            f"{len(half)} half parameter(s) under FSDP2 require gradients since "
            "tritonamp.enable: expected them to before it, which makes their shards FP32; call "
            "amp.disable(), requires_grad_(), and tritonamp.enable again"
        )


def check_same_device(copies: Mapping[Tensor, Tensor]) -> None:
    """Raise RuntimeError if the model was moved to another device since ``enable``.

    Args:
        copies: master to half parameter.
    """
    for master, param in copies.items():
        if master.device != param.device:
            raise RuntimeError(
                f"a parameter of the model is on {param.device}, its FP32 master on "
                f"{master.device}: move the model to its device before tritonamp.enable"
            )


def refuse_cast(count: int, optimizer: Optimizer) -> None:
    """Raise RuntimeError if parameters of ``optimizer`` have become half since ``enable``.

    Args:
        count: number of such parameters.
        optimizer: optimizer that steps on them.
    """
    if count:
        raise RuntimeError(
            f"{count} parameter(s) have become half since tritonamp.enable, as by half() "
            f"of a submodule: expected {type(optimizer).__name__} to step on "
            "FP32 values. The level decides on dtypes: leave the cast out, or call "
            "amp.disable() before it and tritonamp.enable after it"
        )
