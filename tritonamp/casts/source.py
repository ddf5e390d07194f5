"""The source of a function, where it is certainly that of the code that runs."""

import __future__

import ast
import inspect
import itertools
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from tritonamp.casts.norm_terms import Unproved

_PARTS = "co_code", "co_consts", "co_names", "co_varnames", "co_argcount", "co_kwonlyargcount"
MOST = 6  # modules of which each may count as imported, or not: 2**6 attempts
_ANNOTATIONS = __future__.annotations.compiler_flag


class Source(NamedTuple):
    """The definition of a function, without decorators, with the line numbers of its file.

    Attributes:
        tree: the definition.
        imports: names of modules that count as imported in the same file.
    """

    tree: ast.FunctionDef
    imports: tuple[str, ...]

    def compiled(self, tree: ast.FunctionDef, code: CodeType) -> CodeType:
        """Return the code of another definition, with the cells, line and names of ``code``.

        Raises:
            Unproved: the definition needs other cells.
        """
        found = _compiled(tree, code, self.imports)
        if found.co_freevars != code.co_freevars:
            raise Unproved(code)
        found = found.replace(co_firstlineno=code.co_firstlineno)
        name = getattr(code, "co_qualname", None)  # Python 3.10 has no qualified names in code
        return found if name is None else _renamed(found, found.co_qualname, name)


def _names(code: CodeType) -> dict[str, None]:
    """Return the names in code and in inner functions, in the order in which they come."""
    names = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            names |= _names(inner)
    return names


def _renamed(code: Any, old: str, new: str) -> CodeType:
    """Return code with ``new`` for ``old`` in its qualified name and those of inner functions."""
    inner = (_renamed(c, old, new) if isinstance(c, CodeType) else c for c in code.co_consts)
    name = new + code.co_qualname.removeprefix(old)
    renamed: CodeType = code.replace(co_qualname=name, co_consts=tuple(inner))
    return renamed


def source_of(function: Any) -> Source:
    """Return the source of a function.

    Raises:
        Unproved: the function has no source, or its source is not the code that runs, for example
            because the file has changed.
        OSError: the file is missing.
    """
    if not isinstance(function, FunctionType):
        raise Unproved(function)
    lines, first = inspect.getsourcelines(function.__code__)
    source = "".join(lines)
    if source[0].isspace():
        source, first = "if True:\n" + source, first - 1
    (tree,) = ast.parse(source).body
    if isinstance(tree, ast.If):
        (tree,) = tree.body
    if not isinstance(tree, ast.FunctionDef):
        raise Unproved(function)
    ast.increment_lineno(tree, first - 1)
    tree.decorator_list = []
    code, outer = function.__code__, function.__globals__
    modules = [name for name in _names(code) if inspect.ismodule(outer.get(name))]
    most = len(modules) if len(modules) <= MOST else 0
    # Python compiles ``torch.rsqrt(x)`` by whether torch was imported in the same file, or cell
    for count in range(most + 1):
        for imported in itertools.combinations(modules, count):
            found = _compiled(tree, code, imported)
            if all(getattr(found, part) == getattr(code, part) for part in _PARTS):
                return Source(tree, imported)
    raise Unproved(code)


def _compiled(tree: ast.FunctionDef, code: CodeType, imports: tuple[str, ...]) -> CodeType:
    """Return the code of a definition that uses the cells of ``code``."""
    body: list[ast.stmt] = [ast.Import([ast.alias(name)]) for name in imports]
    if code.co_freevars:
        outer = ast.FunctionDef("outer", ast.arguments([], [], None, [], [], None, []), [], [])
        cells: list[ast.expr] = [ast.Name(name, ast.Store()) for name in code.co_freevars]
        outer.body = [ast.Assign(cells, ast.Constant(None)), tree]
        body.append(outer)
    else:
        body.append(tree)
    module: Any = ast.fix_missing_locations(ast.Module(body, []))
    flags = code.co_flags & _ANNOTATIONS
    found = compile(module, code.co_filename, "exec", flags, dont_inherit=True)
    for _ in range(2 if code.co_freevars else 1):
        found = next(c for c in found.co_consts if isinstance(c, CodeType))
    return found
