"""Give an object a generated subclass of its own class, and take it off again.

The object stays the object; only its class changes, to a subclass of its own class with the same
name. Nothing is bound to one instance, so copies, pickles, replicas and other threads behave like
the original. ``torch.distributed.fsdp.fully_shard`` does the same.
"""

import copyreg
import functools
from typing import Any, ClassVar


class Swapped:
    """The kinds of generated classes derive from this one, and say here what differs.

    Attributes:
        _belongings: the attributes of an instance that ``install`` sets and ``uninstall`` removes.
        _set_aside: an attribute of the instance that would hide the generated class's, and the
            name under which it waits meanwhile.
        _kept_by_copies: whether copies and pickles are of the generated class, too; else they are
            of the plain one.
    """

    _belongings: ClassVar[tuple[str, ...]]
    _set_aside: ClassVar[tuple[str, str]]
    _kept_by_copies: ClassVar[bool] = True

    @classmethod
    def _members(cls, base: type) -> dict[str, Any]:
        """Return further members of the subclass of ``base``."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Go by the class that this one was generated from: a generated one cannot be imported."""
        reduced: Any = super().__reduce_ex__(max(protocol, 2))
        new_object = copyreg.__newobj__  # type: ignore[attr-defined]
        if isinstance(reduced, tuple) and reduced[0] is new_object and reduced[1][0] is type(self):
            kind, base = type(self).__bases__
            return (new, (kind, base, *reduced[1][1:]), *reduced[2:])
        return reduced


@functools.cache
def _generated(kind: type[Swapped], base: type) -> type:
    """Return the subclass of ``base`` for one kind: same name, module and signatures."""
    namespace: dict[str, Any] = {
        name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    return type(base.__name__, (kind, base), {**namespace, **kind._members(base)})


def new(kind: type[Swapped], base: type, *args: Any) -> Any:
    """Make the object that a copy or a pickle is then filled into."""
    cls = _generated(kind, base) if kind._kept_by_copies else base  # type: ignore[arg-type]
    return cls.__new__(cls, *args)


def base_class(cls: type) -> type:
    """Return the class that a generated one was made from; of any other class, itself."""
    return cls.__bases__[1] if issubclass(cls, Swapped) else cls


def is_installed(instance: object) -> bool:
    """Tell whether ``install`` has given the object a generated class."""
    return isinstance(instance, Swapped)


def install(instance: Any, kind: type[Swapped], *belongings: Any) -> None:
    """Give ``instance`` the generated subclass of its class, and its ``belongings``.

    Raises:
        ValueError: Python cannot change the class of such an object.
    """
    cls: Any = type(instance)
    try:
        instance.__class__ = _generated(kind, cls)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"cannot enable an object of class {cls.__name__}: {error}") from error
    own = vars(instance)
    name, aside = kind._set_aside
    if name in own:
        own[aside] = own.pop(name)
    own.update(zip(kind._belongings, belongings, strict=True))


def uninstall(instance: Any) -> None:
    """Put the object's own class and attributes back."""
    name, aside = instance._set_aside
    own = vars(instance)
    for belonging in instance._belongings:
        own.pop(belonging, None)
    instance.__class__ = base_class(type(instance))
    if aside in own:
        own[name] = own.pop(aside)
