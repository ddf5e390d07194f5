"""Roles of frames of the call stack: the user's code, a library's, or a marked function of ours."""

import enum
import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch

from tritonamp.kernels import device

F = TypeVar("F", bound=Callable[..., Any])

_OURS = os.path.dirname(os.path.dirname(__file__))
_LIBRARIES = tuple(
    folder + os.sep
    for folder in (_OURS, *(os.path.dirname(str(m.__file__)) for m in (device, torch)))
)
_DEMO = os.path.join(_OURS, "demo") + os.sep  # stands for a user
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PACKAGES = f"{os.sep}site-packages{os.sep}"  # may lie inside the standard library
_GENERATED = ("<frozen ", "<eval_with_key>")  # Python's import system, and torch.fx


class Role(enum.Enum):
    """The role of a frame when the stack is walked."""

    USER = enum.auto()  # code outside of tritonamp, torch and the standard library; the demo counts
    LIBRARY = enum.auto()  # code inside of them
    RULE = enum.auto()  # a rule of the op table; its locals are ``stock``, ``args`` and ``kwargs``
    EDGE = enum.auto()  # an enabled model's inputs and outputs are cast in it
    RUN = enum.auto()  # a watched run begins in it; frames further out did not call the model


_roles: dict[CodeType, Role] = {}  # filled where the functions are defined


def plays(role: Role) -> Callable[[F], F]:
    """Return a decorator that gives the frames of a function the role."""

    def register(function: F) -> F:
        _roles[function.__code__] = role
        return function

    return register


def role_of(code: CodeType) -> Role:
    """Return the role of frames that run ``code``."""
    return _roles.get(code) or (Role.LIBRARY if _is_library(code.co_filename) else Role.USER)


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    if file.startswith(_LIBRARIES):
        return not file.startswith(_DEMO)
    return file.startswith(_GENERATED) or (file.startswith(_STDLIB) and _PACKAGES not in file)


def user_line() -> str:
    """Return " at FILE:LINE" for the user's innermost frame, "" if there is none."""
    for frame, role in outwards(sys._getframe(1)):
        if role is Role.USER:
            return f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


def outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, Role]]:
    """Yield ``frame`` and its callers, innermost first, each with its role."""
    while frame is not None:
        yield frame, role_of(frame.f_code)
        frame = frame.f_back
