"""Give an object a generated subclass of its own class, and take it off again.

The object keeps its identity. Only its class changes, to a subclass of its own class with the same
name. Nothing is bound to one instance, so copies, replicas and other threads behave like the
original. ``torch.distributed.fsdp.fully_shard`` does the same. A pickle is that of the plain
object, so it loads without tritonamp.
"""

import copy
import copyreg
import functools
import threading
from collections.abc import Hashable
from typing import Any, ClassVar


class _Pickled(threading.local):
    """The object whose class pickle is about to read, in this thread."""

    last: Any = None


_pickled = _Pickled()


class Swapped:
    """The base of each kind of generated class; the attributes say how the kinds differ.

    Attributes:
        _belongings: names of the instance attributes that ``install`` sets and ``uninstall``
            removes.
        _set_aside: name of an instance attribute that would hide one of the generated class, and
            its name meanwhile; both "" if there is none.
        _kept_by_copies: whether copies have the generated class, too; otherwise they have the plain
            class, as pickles have.
    """

    _belongings: ClassVar[tuple[str, ...]] = ()
    _set_aside: ClassVar[tuple[str, str]] = ("", "")
    _kept_by_copies: ClassVar[bool] = True

    @classmethod
    def _variant(cls, instance: Any, base: type) -> tuple[Hashable, ...]:
        """Return the further arguments of ``_members`` for this instance of ``base``."""
        return ()

    @classmethod
    def _members(cls, base: type) -> dict[str, Any]:
        """Return further members of the subclass of ``base``."""
        return {}

    @property
    def __class__(self) -> type:
        """The class; the plain class once after ``__reduce_ex__``.

        Pickle reads the attribute next, and refuses to write ``__newobj__`` of any other class.
        """
        cls: type = type(self)
        if _pickled.last is self:
            _pickled.last = None
            return base_class(cls)
        return cls

    @__class__.setter
    def __class__(self, cls: type) -> None:
        """Put the object into another class, or the subclass that is generated from it."""
        kind: Any = type(self).__bases__[0]
        if not issubclass(cls, Swapped):
            cls = _generated(kind, cls, *kind._variant(self, cls))  # type: ignore[arg-type]
        _set_class(self, cls)

    def _plain_state(self, state: Any) -> Any:
        """Return the state of the plain object, given the state of this object."""
        if not isinstance(state, dict):
            return state
        name, aside = self._set_aside
        names = {aside: name}
        return {names.get(k, k): v for k, v in state.items() if k not in self._belongings}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the pickle of an object of the class that this class was generated from."""
        reduced, is_plain = self._plain_reduced(max(protocol, 2))
        _pickled.last = self if is_plain else None
        return reduced

    def _plain_reduced(self, protocol: int) -> tuple[Any, bool]:
        """Return the arguments that rebuild the plain object, and whether they name its class."""
        reduced: Any = super().__reduce_ex__(protocol)
        new_object = copyreg.__newobj__  # type: ignore[attr-defined]
        if not isinstance(reduced, tuple) or reduced[0] is not new_object:
            return reduced, False  # the class has a ``__reduce__`` of its own
        _, (_, *args), state, *rest = reduced
        plain = (base_class(type(self)), *args)
        return (new_object, plain, self._plain_state(state), *rest), True

    def __copy__(self) -> Any:
        """Return a shallow copy."""
        own = getattr(super(), "__copy__", None)
        return self._copied(None) if own is None else own()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a deep copy."""
        own = getattr(super(), "__deepcopy__", None)
        return self._copied(memo) if own is None else own(memo)

    def _copied(self, memo: dict[int, Any] | None) -> Any:
        reduced = super().__reduce_ex__(4) if self._kept_by_copies else self._plain_reduced(4)[0]
        # private (Python 3.10 to 3.14): what copy does with objects that say nothing about copies,
        # where ``__reduce_ex__`` is not about pickles alone
        return copy._reconstruct(self, memo, *reduced)  # type: ignore[attr-defined]


_set_class = vars(object)["__class__"].__set__


@functools.cache
def _generated(kind: type[Swapped], base: type, *variant: Hashable) -> type:
    """Return the subclass of ``base`` for one kind: same name, module and docstring."""
    namespace: dict[str, Any] = {
        name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    namespace["_generated_from"] = base
    return type(base.__name__, (kind, base), {**namespace, **kind._members(base, *variant)})


def base_class(cls: type) -> type:
    """Return the class that a generated class was made from; any other class is returned itself.

    If ``cls`` derives from a generated class, as after ``register_parametrization`` of a module,
    the result is a new class like ``cls`` that derives from the plain class.
    """
    if not issubclass(cls, Swapped):
        return cls
    own = dict(vars(cls))
    if "_generated_from" in own:
        plain: type = own["_generated_from"]
        return plain
    for name in ("__dict__", "__weakref__"):  # Python makes them for each class
        own.pop(name, None)
    return type(cls.__name__, tuple(map(base_class, cls.__bases__)), own)


def is_installed(instance: object) -> bool:
    """Tell whether ``install`` has given the object a generated class."""
    return isinstance(instance, Swapped)


def install(instance: Any, kind: type[Swapped], *belongings: Any) -> None:
    """Give ``instance`` the generated subclass of its class, and its ``belongings``.

    Args:
        instance: any object with a ``__dict__``.
        kind: base of the generated class.
        *belongings: values of the attributes that ``kind._belongings`` names.

    Raises:
        ValueError: Python cannot change the class of such an object.
    """
    cls: Any = type(instance)
    try:
        instance.__class__ = _generated(kind, cls, *kind._variant(instance, cls))  # type: ignore[arg-type]
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
    _set_class(instance, base_class(type(instance)))
    if aside in own:
        own[name] = own.pop(aside)
