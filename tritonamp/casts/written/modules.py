"""The activation that a module computes."""

import ast
import functools
import weakref
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.nn import functional
from torch.nn.modules import module as torch_modules

from tritonamp.casts.source import source_of
from tritonamp.casts.written import terms
from tritonamp.casts.written.reader import Reader
from tritonamp.kernels.activation import KINDS

Spec = tuple[str, float, float]
"""Arguments kind, a and b of ``kernels.activation``."""

# of forwards, by their code; not by code alone, which is equal for functions of other globals
_known: "weakref.WeakKeyDictionary[FunctionType, dict[CodeType, Spec | None]]" = (
    weakref.WeakKeyDictionary()
)
_delegating: "weakref.WeakKeyDictionary[CodeType, bool]" = weakref.WeakKeyDictionary()


def of_module(module: Any) -> Spec | None:
    """Return kind, a and b of the activation that calling ``module`` computes, and nothing else.

    None for other modules, for modules with hooks, and while hooks of all modules are set.
    """
    # private (torch 2.11 to 2.15): the condition in ``nn.Module.__call__``
    if not isinstance(module, nn.Module) or torch_modules._has_any_global_hook():
        return None
    own = vars(module)
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    if "forward" in own or any(own[name] for name in hooks):
        return None
    cls = type(module)
    if cls is nn.SiLU:
        return None if module.inplace else KINDS["silu"]  # others may read its input
    if cls is nn.GELU:
        return KINDS["gelu" if module.approximate == "none" else "gelu tanh"]
    forward: Any = cls.forward
    if not isinstance(forward, FunctionType) or cls.__call__ is not nn.Module.__call__:
        return None
    names = forward.__code__.co_names
    if len(names) == 1 and names[0] in own:  # it may call a function that the module holds
        return _of_function(own[names[0]]) if _calls_its_own(forward) else None
    return _of_forward(forward)


def _of_function(function: Any) -> Spec | None:
    """Return the activation of a function of torch, or of one with its keywords set."""
    if function is functional.silu:
        return KINDS["silu"]
    keywords = {}
    if type(function) is functools.partial and not function.args:
        function, keywords = function.func, function.keywords
    if function is not functional.gelu or not keywords.keys() <= {"approximate"}:
        return None
    return KINDS["gelu tanh" if keywords.get("approximate") == "tanh" else "gelu"]


def _calls_its_own(forward: FunctionType) -> bool:
    """Return whether a forward is ``return self.name(x)``."""
    code = forward.__code__
    if code not in _delegating:
        try:
            (statement,) = source_of(forward).tree.body
            _delegating[code] = (
                isinstance(statement, ast.Return)
                and isinstance(statement.value, ast.Call)
                and ast.unparse(statement.value)
                == f"self.{code.co_names[0]}({code.co_varnames[1]})"
            )
        except Exception:  # Unproved, or source that is missing
            _delegating[code] = False
    return _delegating[code]


def _of_forward(forward: FunctionType) -> Spec | None:
    code, known = forward.__code__, _known.setdefault(forward, {})
    if code not in known:
        known[code] = _proved(forward)
    return known[code]


def note_rewritten(forward: FunctionType, code: CodeType) -> None:
    """Note that other code of a function computes the same as its own code, which runs now."""
    spec = _of_forward(forward)
    _known[forward][code] = spec


def _proved(forward: FunctionType) -> Spec | None:
    """Return the activation of a forward that returns an expression of its one argument."""
    try:
        body = source_of(forward).tree.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        (statement,) = body
        if not isinstance(statement, ast.Return) or statement.value is None:
            return None
        reader = Reader(forward)
        found = terms.activation(reader.read(statement.value))
        _, *arguments = forward.__code__.co_varnames[: forward.__code__.co_argcount]
    except Exception:  # Unproved, or source that is missing
        return None
    is_whole = [found.x] == arguments and found.gate is None and not reader.opaque
    return (found.kind, found.a, found.b) if is_whole else None
