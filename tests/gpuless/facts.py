"""Properties of operations that the GPU in software needs, read from torch once for each."""

import functools
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Facts:
    """The properties of one operation, which never change.

    Attributes:
        name: its name, without "aten::".
        is_composite: whether torch computes it by other operations on a GPU.
        is_view: whether it touches no values, and only gives other sizes to its argument's memory.
        is_resize: whether it gives other sizes to its argument itself, as ``t_`` does.
        is_in_place: whether all results are arguments that it writes.
        reads_values: whether it reads more than the sizes of its arguments.
        written: positions and names of the arguments that it writes.
        is_random: whether it takes random numbers.
        is_on_cpu: whether the CPU computes it in the same way.
    """

    name: str
    is_composite: bool
    is_view: bool
    is_resize: bool
    is_in_place: bool
    reads_values: bool
    written: tuple[tuple[int, str], ...]
    is_random: bool
    is_on_cpu: bool

    def writes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that it writes."""
        return [args[at] if at < len(args) else kwargs[key] for at, key in self.written]


@functools.cache
def facts(func: Any) -> Facts:
    """Return the properties of an operation."""
    schema, keys = func._schema, torch._C.DispatchKey
    name = schema.name.removeprefix("aten::")
    returned = [r.alias_info is not None for r in schema.returns]
    is_resize = torch.Tag.inplace_view in func.tags
    arguments = [(at, a.name, a.alias_info) for at, a in enumerate(schema.arguments)]
    return Facts(
        name,
        is_composite=func.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd)
        and not func.has_kernel_for_dispatch_key(keys.CUDA),
        is_view=is_resize if schema.is_mutable else any(returned),
        is_resize=is_resize,
        is_in_place=schema.is_mutable and all(returned),
        reads_values=not (name.startswith("new_") or name.endswith("_like")),
        written=tuple((at, key) for at, key, alias in arguments if alias and alias.is_write),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        is_on_cpu=torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "CPU"),
    )
