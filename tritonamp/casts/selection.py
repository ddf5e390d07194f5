"""The modules that a policy selects by name or class, in one or several models."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from tritonamp.names import listed_modules, meant_module, prefixes
from tritonamp.policy import SELECTIONS, Policy

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module")
"""Attributes in which torch's wrappers hold the wrapped module."""


class Selectable:
    """The modules inside of a model that names and classes may select.

    Args:
        model: model, wrapped or not. It does not count itself.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = model.named_modules(remove_duplicate=False)
        self.named = {name: module for name, module in modules if name}
        self._unwrapped = {unwrapped_name(name): m for name, m in self.named.items()}

    def matches(self, wanted: str | type[Any]) -> list[nn.Module]:
        """Return the modules of that name or class."""
        if not isinstance(wanted, str):
            return [m for m in self.named.values() if isinstance(m, wanted)]
        match = self.named.get(wanted, self._unwrapped.get(unwrapped_name(wanted)))
        return [] if match is None else [match]


def own_policies(models: Sequence[nn.Module], policy: Policy) -> list[Policy]:
    """Return the policy of each model, in which ``SELECTIONS`` select modules of that model alone.

    With several models, "1.head" is the module "head" of the second one. A name that is none of
    these selects the modules of that name in all models, as a class does.

    Raises:
        ValueError: a name or class matches no module of any model.
    """
    if not any(getattr(policy, field) for field in SELECTIONS):  # names of thousands cost time
        return [policy for _ in models]
    fronts, selectable = prefixes(models), [Selectable(model) for model in models]
    parts: list[dict[str, Any]] = [{field: [] for field in SELECTIONS} for _ in models]
    for field in SELECTIONS:
        for wanted in getattr(policy, field):
            owners = _owners(wanted, fronts, selectable)
            if not owners:
                each = zip(fronts, selectable, strict=True)
                known = [front + name for front, one in each for name in one.named]
                raise ValueError(_no_match(field, wanted, known))
            for number, name in owners:
                parts[number][field].append(name)
    return [dataclasses.replace(policy, **part) for part in parts]


def _owners(
    wanted: str | type, fronts: Sequence[str], selectable: Sequence[Selectable]
) -> list[tuple[int, str | type]]:
    """Return the number of each model with modules of a name or class, and that name in it."""
    for number, front in enumerate(fronts):
        if front and isinstance(wanted, str) and wanted.startswith(front):
            own = wanted.removeprefix(front)
            if selectable[number].matches(own):
                return [(number, own)]
    return [(number, wanted) for number, one in enumerate(selectable) if one.matches(wanted)]


def _no_match(field: str, wanted: str | type, known: Collection[str]) -> str:
    meant = meant_module(wanted, known) if isinstance(wanted, str) else ""
    names = listed_modules(sorted(known)) or "(it has no submodules)"
    return (
        f"{field}: expected names or classes of modules of the model, got {wanted!r}, "
        f"which matches no module{meant or f'; its modules are {names}'}"
    )


def selected(model: nn.Module, policy: Policy, field: str) -> dict[nn.Module, None]:
    """Return the modules inside ``model`` that a field of its own policy selects, each once.

    Raises:
        ValueError: a name or class matches nothing in ``model``.
    """
    found: dict[nn.Module, None] = {}
    wanted = getattr(policy, field)
    if not wanted:
        return found
    selectable = Selectable(model)
    for each in wanted:
        matches = selectable.matches(each)
        if not matches:
            raise ValueError(_no_match(field, each, selectable.named))
        found |= dict.fromkeys(m for match in matches for m in with_forward(match))
    return found


def unwrapped_name(name: str) -> str:
    """Return a module's name without the parts that torch's wrappers add.

    The wrappers are DDP, DataParallel, torch.compile and checkpointing. A name is then valid with
    and without them.
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def with_forward(module: nn.Module) -> list[nn.Module]:
    """Return the module, or, for a container without a forward of its own, its modules."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [m for child in module.children() for m in with_forward(child)]
    return [module]
