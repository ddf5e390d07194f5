"""The arguments of a model's forward: how they are called, which are cast, what is in them."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from tritonamp.casts.tree import Cast, cast_tree


class Signature(NamedTuple):
    """How the arguments of a forward are called."""

    positional: tuple[str, ...] = ()  # those that can be given by position, in order
    keywords: tuple[str, ...] = ()  # those that cannot
    rest: str = ""  # ``*args``, if there is one
    takes_any: bool = False  # whether there is ``**kwargs``

    def name(self, position: int) -> str:
        """Return what the argument at a position is called; "" if nothing is known of it."""
        return self.positional[position] if position < len(self.positional) else self.rest

    def name_of(self, argument: str | int) -> str:
        """Return what an argument is called that is given by name, or taken by ``*args``."""
        return argument if isinstance(argument, str) else self.name(argument)

    def has(self, argument: str | int) -> bool:
        """Tell whether there is such an argument, by name or position."""
        if isinstance(argument, int):
            return argument < len(self.positional) or bool(self.rest)
        return self.takes_any or argument in (*self.positional, *self.keywords, self.rest)

    def __str__(self) -> str:
        """Return it as one writes it: ``(images, targets, **)``."""
        rest = [f"*{self.rest}"] if self.rest else []
        return f"({', '.join([*self.positional, *rest, *self.keywords, *['**'] * self.takes_any])})"


def signature_of(forward: Callable[..., Any]) -> Signature:
    """Return the signature of a bound forward; one that takes anything where Python has none."""
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
    """Return a forward's arguments; tensors in the wanted ones are cast.

    ``wanted`` are names and positions, or True: all, or False: none.
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


def wanted_names(wanted: tuple[str | int, ...], signature: Signature) -> list[str]:
    """Return the names of arguments that are wanted by name or position."""
    by_position = [p for p in wanted if isinstance(p, int) and p < len(signature.positional)]
    return [name for name in wanted if isinstance(name, str)] + [
        signature.positional[position] for position in by_position
    ]


def input_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
) -> Iterator[tuple[str | int, Tensor]]:
    """Yield the tensors in the arguments of a forward, in the containers that casts look into.

    Each with its argument: the name, or the position where ``*args`` takes it.
    """
    known = len(signature.positional)
    given: dict[str | int, Any] = {
        signature.positional[i] if i < known else i: value for i, value in enumerate(args)
    }
    for argument, value in (given | kwargs).items():
        for tensor in _tensors(value):
            yield argument, tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    inside: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, (list, tuple)):
        inside = value
    elif isinstance(value, Mapping):
        inside = value.values()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for item in inside:
        yield from _tensors(item)
