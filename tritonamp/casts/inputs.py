"""The arguments of a model's forward: how they are called, which are cast, what is in them."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
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


class InputTensor(NamedTuple):
    """A tensor that was given to a forward."""

    argument: str | int  # that it is in: the name, or the position where ``*args`` takes it
    path: str  # to the tensor, "targets[0]['boxes']"
    tensor: Tensor


def input_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any], signature: Signature
) -> Iterator[InputTensor]:
    """Yield the tensors in the arguments of a forward, in the containers that casts look into."""
    known = len(signature.positional)
    given: dict[str | int, Any] = {
        signature.positional[i] if i < known else i: value for i, value in enumerate(args)
    }
    for argument, value in (given | kwargs).items():
        path = argument if isinstance(argument, str) else f"{signature.rest or 'args'}[{argument}]"
        for inner, tensor in _tensors(value):
            yield InputTensor(argument, path + inner, tensor)


def _tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    inside: Any = ()
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, PackedSequence):
        yield ".data", value.data
    elif isinstance(value, (list, tuple)):
        inside = ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, Mapping):
        inside = ((f"[{key!r}]", item) for key, item in value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        inside = ((f".{name}", getattr(value, name, None)) for name in names)
    for path, item in inside:
        for inner, tensor in _tensors(item):
            yield path + inner, tensor
