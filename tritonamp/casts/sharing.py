"""Refuse to enable tensors twice, because two ``Amp`` must not scale, or cast, the same one."""

import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from tritonamp.casts.context import EnabledContext
from tritonamp.casts.model_dtypes import ModelDtypes, castable_tensors, wanted_dtypes
from tritonamp.casts.selection import own_policies
from tritonamp.policy import Policy


class Holdings(NamedTuple):
    """The models of one ``Amp``, and its use of their tensors.

    Attributes:
        models: weak references to the models.
        dtypes: dtypes of the models' tensors.
        stepped: parameters that optimizers step on.
    """

    models: Sequence["weakref.ref[nn.Module]"]
    dtypes: ModelDtypes
    stepped: Collection[Tensor]


# an enabled model holds its context, and is forgotten with it
_contexts: weakref.WeakSet[EnabledContext] = weakref.WeakSet()


def note(
    context: EnabledContext,
    models: Iterable[nn.Module],
    dtypes: ModelDtypes,
    stepped: Collection[Tensor],
) -> None:
    """Note models that have been enabled."""
    context.holdings = Holdings([*map(weakref.ref, models)], dtypes, stepped)
    _contexts.add(context)


def forget(context: EnabledContext) -> None:
    """Forget models that have been disabled."""
    _contexts.discard(context)


def check_shared_tensors(
    models: Sequence[nn.Module], policy: Policy, optimizers: Sequence[Optimizer]
) -> None:
    """Refuse models that share tensors with enabled ones, unless both can be enabled.

    Both can be enabled if neither policy changes the dtype of a shared tensor, and no optimizer
    steps on a shared tensor. An optimizer may step on one if the other model has no optimizer at
    all, and so no loss scale.

    Raises:
        ValueError: names a shared tensor, as both models call it, or a model inside an enabled one.
    """
    stepped = {p for o in optimizers for group in o.param_groups for p in group["params"]}
    each = zip(models, own_policies(models, policy), strict=True)
    for (model, own), (other, held) in itertools.product(each, _others()):
        _check_inside(model, other)
        shared = list(_shared(model, other))
        cast = wanted_dtypes(model, own) if shared else {}
        for name, name_there, tensor in shared:
            is_scaled = stepped and held.stepped and (tensor in stepped or tensor in held.stepped)
            if is_scaled:
                why = "both would decide on its gradients, each with a loss scale of its own"
            elif tensor in cast or held.dtypes.changes(tensor):
                why = "enabling changes its dtype"
            else:
                continue
            raise ValueError(
                f"model: {name!r} of this {type(model).__name__} is {name_there!r} of the "
                f"{type(other).__name__} that is enabled already, and {why}: call amp.disable() on "
                "the first handle, and enable both models in one call, tritonamp.enable([a, b], "
                "[optimizer_a, optimizer_b])"
            )


def _others() -> Iterator[tuple[nn.Module, Holdings]]:
    for holdings in [context.holdings for context in _contexts]:
        yield from ((model, holdings) for ref in holdings.models if (model := ref()) is not None)


def _check_inside(model: nn.Module, other: nn.Module) -> None:
    name = next((name for name, module in other.named_modules() if module is model), None)
    if name is not None:
        raise ValueError(
            f"model: {type(model).__name__} cannot be enabled, it is the submodule {name!r} of the "
            f"{type(other).__name__} that is enabled already: call amp.disable() on the first "
            "handle, or keep using it"
        )


def _shared(model: nn.Module, other: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Yield, for each shared tensor, its names in ``model`` and in ``other``, and the tensor."""
    there = {id(stored.tensor): stored.name for stored in castable_tensors(other)}
    for stored in castable_tensors(model):
        if id(stored.tensor) in there:
            yield stored.name, there[id(stored.tensor)], stored.tensor
