"""The functions of torch that the user's code calls in a run, and changes of such calls."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributions
import torch.nn.utils
from torch.overrides import TorchFunctionMode

from tritonamp.watched.places import Place, PlacedOps, Way

Change = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""``change(function, args, kwargs)`` returns the result; NotImplemented: it cannot change that."""
_NOT_OF_USERS = tuple(
    os.path.dirname(str(m.__file__)) + os.sep for m in (torch.distributions, torch.nn.utils)
)
"""Folders of Python code of torch whose calls no edit of the user's line reaches."""
_SITE = os.path.dirname(os.path.dirname(str(torch.__file__))) + os.sep


class Site(NamedTuple):
    """The calls of one function on one line, in one module."""

    place: Place
    function: Any  # function or method of torch, like ``torch.log`` or ``torch.Tensor.log``

    @classmethod
    def of(cls, place: Place) -> "Site":
        """Return the site of the call behind an op's place."""
        return cls(place, place.function)


@dataclass(eq=False)
class Patch:
    """A change of the user's code, tried in a run without an edit of the code.

    Attributes:
        words: the change as advice.
        changes: change of the calls at each site.
        form: equal for edits that differ in a number only.
        used: whether a call has been changed.
    """

    words: str
    changes: Mapping[Site, Change]
    form: str = ""
    used: bool = field(default=False, init=False)

    def __call__(
        self, site: Site, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a call at a site, changed if the site has a change."""
        change = self.changes.get(site)
        result = NotImplemented if change is None else change(function, args, kwargs)
        if result is NotImplemented:
            return function(*args, **kwargs)
        self.used = True
        return result


class UserCalls(TorchFunctionMode):
    """Notes in a watched run which function of torch the user's code calls, and applies a patch.

    torch disables the mode while a call runs, so functions that torch itself calls are not seen.
    Those that its distributions and parametrizations call are left out.
    """

    def __init__(self, run: PlacedOps, patch: Patch | None) -> None:
        super().__init__()
        self._run = run
        self._patch = patch

    def is_disabled_in_backward(self) -> bool:
        """Return whether a backward is running, and torch has disabled the mode for it."""
        # private (torch 2.11 to 2.15): nothing public tells either
        is_active = self in torch.overrides._get_current_function_mode_stack()
        return torch._C._current_autograd_node() is not None and not is_active

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        caller = sys._getframe(1)
        if caller.f_code.co_filename.startswith(_NOT_OF_USERS):
            file = caller.f_code.co_filename.removeprefix(_SITE).replace(os.sep, "/")
            self._run.inside = f"{file}:{caller.f_lineno}"
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self._run.inside = ""
        self._run.function = func
        try:
            if self._patch is None or self._run.in_backward():
                return func(*args, **(kwargs or {}))
            here = self._run.place_now("", Way.out_of(sys._getframe(1)))
            return self._patch(Site.of(here), func, args, kwargs or {})
        finally:
            self._run.function = None
