"""The arguments of a model's forward: their names, their casts, and the tensors inside them."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from tritonamp.casts.tree import Cast, cast_tree


class Signature(NamedTuple):
    """The names of a forward's arguments."""

    positional: tuple[str, ...] = ()  # arguments that can be given by position, in order
    keywords: tuple[str, ...] = ()  # keyword-only arguments
    rest: str = ""  # name of ``*args``; "" if there is none
    takes_any: bool = False  # whether there is ``**kwargs``

    def name(self, position: int) -> str:
        """Return the name of the argument at a position; "" if it is unknown."""
        return self.positional[position] if position < len(self.positional) else self.rest

    def has(self, argument: str | int) -> bool:
        """Return whether the forward has an argument of that name or position."""
        if isinstance(argument, int):
            return argument < len(self.positional) or bool(self.rest)
        return self.takes_any or argument in (*self.positional, *self.keywords, self.rest)

    def __str__(self) -> str:
        """Return the signature as one writes it: ``(images, targets, **)``."""
        rest = [f"*{self.rest}"] if self.rest else []
        return f"({', '.join([*self.positional, *rest, *self.keywords, *['**'] * self.takes_any])})"


def signature_of(forward: Callable[..., Any]) -> Signature:
    """Return the signature of a bound forward.

    For a callable without a Python signature, the result allows any arguments.
    """
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # a callable written in C
        return Signature(rest="args", takes_any=True)

    def named(*kinds: Any) -> tuple[str, ...]:
        return tuple(p.name for p in parameters if p.kind in kinds)

    kind = inspect.Parameter
    return Signature(
        named(kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD),
        named(kind.KEYWORD_ONLY),
        "".join(named(kind.VAR_POSITIONAL)),
        bool(named(kind.VAR_KEYWORD)),
    )


def cast_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: bool | tuple[str | int, ...],
    signature: Signature,
    cast: Cast,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a forward's arguments, with tensors in the wanted arguments cast.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        wanted: names and positions of the arguments to cast; True: all; False: none.
        signature: signature of the forward.
        cast: cast to apply.
    """
    if not wanted:
        return args, kwargs
    if isinstance(wanted, bool):
        new_args = [cast_tree(value, cast) for value in args]
        return tuple(new_args), kwargs and {n: cast_tree(v, cast) for n, v in kwargs.items()}
    names = wanted_names(wanted, signature)
    new_args = [
        cast_tree(value, cast) if position in wanted or signature.name(position) in names else value
        for position, value in enumerate(args)
    ]
    new_kwargs = {
        name: cast_tree(value, cast) if name in names else value for name, value in kwargs.items()
    }
    return tuple(new_args), new_kwargs


def wanted_names(wanted: tuple[str | int, ...], signature: Signature) -> tuple[str, ...]:
    """Return the names of the arguments that ``wanted`` has by name or position."""
    named = dict(enumerate(signature.positional))
    # "" is the name of no argument: the forward has no such position
    return tuple(named.get(w, "") if isinstance(w, int) else w for w in wanted)


def input_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
) -> Iterator[tuple[str | int, Tensor]]:
    """Yield each tensor in the arguments of a forward, after the argument that holds it.

    The argument is a name, or a position where ``*args`` takes it.
    """
    known = len(signature.positional)
    given: dict[str | int, Any] = {
        signature.positional[i] if i < known else i: value for i, value in enumerate(args)
    }
    for argument, value in (given | kwargs).items():
        for tensor in tensors_in(value):
            yield argument, tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in lists, tuples, mappings and dataclasses."""
    inside: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        inside = value
    elif isinstance(value, Mapping):
        inside = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for item in inside:
        yield from tensors_in(item)
