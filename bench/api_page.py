"""Write the page of the public names, ``tritonamp/api.md``, from signatures and docstrings.

Usage: python bench/api_page.py [--write]. Without ``--write`` it prints the page.
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tritonamp

PAGE = Path(__file__).parents[1] / "tritonamp" / "api.md"
HEAD = """\
# All public names

This page is written from signatures and docstrings, by `python bench/api_page.py --write`, and has
one line for each name. `help(tritonamp.Amp.backward)` shows the arguments, shapes and errors.
[Using tritonamp](README.md) explains how the names belong together, and
[questions by task](questions.md) has programs.
"""

SECTIONS = {
    "Turning it on": ["enable", "handle", "Policy", "O0", "O1", "O2", "O3"],
    "The handle": ["Amp"],
    "What the handle returns": [
        "step.ema.EMA",
        "diagnosis.records.StepRecord",
        "diagnosis.records.RangeRecord",
        "diagnosis.live_ranges.LiveRanges",
    ],
    "The loss scale": ["GradScaler"],
    "Before training": ["check", "Forecast", "Comparison"],
    "Saving": ["save", "load", "save_sharded", "load_sharded", "RNGState"],
    "Functions: `tritonamp.functional`": ["functional"],
    "Optimizers: `tritonamp.optim`": ["optim"],
    "Casts for functions of your own": [
        "half_function",
        "float_function",
        "promote_function",
        "register_half_function",
        "register_float_function",
        "register_promote_function",
        "disable_casts",
    ],
    "Errors": ["NonFiniteError", "UnsupportedDeviceError"],
    "Tests of your own loop: `import tritonamp.testing`": ["testing"],
}
"""The names of each section, below ``tritonamp``. A module stands for its public names."""

NOT_CALLED = {"Amp", "EMA", "LiveRanges", "Comparison", "Forecast", "Mismatch"}
"""Classes whose objects tritonamp makes."""

INTERNAL = {
    "captured",
    "memory",
    "after_decision",
    "is_replayed",
    "fused_rule",
    "has_gradient_in_loss",
}
"""Attributes that other packages of tritonamp use, without a use in a training loop."""

LIBRARIES = {
    "lightning": "MixedPrecision",
    "fabric": "MixedPrecision",
    "accelerate": "enable",
    "transformers": "enable",
}
"""The public name of each module of ``tritonamp.integrations``."""

OTHERS = """\
## In other libraries

- `tritonamp.apex`: what `from apex import amp` gives ([apex](apex/README.md)).
- `python -m tritonamp`: `doctor`, `check`, `explain`... ([commands](commands/README.md)).

Of `tritonamp.integrations`, with programs in [integrations](integrations/README.md). `settings` are
keywords of `tritonamp.enable`:

"""


def page() -> str:
    """Return the text of the page."""
    lines = [HEAD]
    for title, names in SECTIONS.items():
        lines += ["", f"## {title}", "", *(line for name in names for line in lines_of(name)), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, OTHERS])) + (
        "".join(f"{line_of_integration(*each)}\n" for each in LIBRARIES.items())
    )


def line_of_integration(library: str, name: str) -> str:
    """Return the line of a name, by its source alone, because the library may not be installed."""
    tree = ast.parse((PAGE.parent / "integrations" / f"{library}.py").read_text())
    found: Any = next(node for node in tree.body if getattr(node, "name", "") == name)
    text = markdown(str(ast.get_docstring(found)).partition("\n\n")[0])
    call = next((n for n in ast.walk(found) if getattr(n, "name", "") == "__init__"), found)
    made = arguments_of(call.args, lambda default, _: ast.unparse(default))
    result = f" -> {without_quotes(found.returns)}" if call is found else ""
    return entry(f"{library}.{name}", f"{made}{result}", text)


def lines_of(dotted: str) -> Iterator[str]:
    """Yield the lines of one name below ``tritonamp``."""
    value, name = found(dotted), dotted.rpartition(".")[2]
    if inspect.ismodule(value):
        for each in public_names(value):
            yield from lines_of(f"{dotted}.{each}")
    elif inspect.isclass(value):
        yield from lines_of_class(name, value)
    elif callable(value):
        yield entry(name, signature(value), summary(value))
    else:
        yield entry(name, "", contents(value))


def found(dotted: str) -> Any:
    """Return the value of a name below ``tritonamp``; its modules are imported where needed."""
    value: Any = tritonamp
    for part in dotted.split("."):
        if not hasattr(value, part):
            importlib.import_module(f"{value.__name__}.{part}")
        value = getattr(value, part)
    return value


def public_names(module: Any) -> list[str]:
    """Return the names that a module declares, or those that it defines or imports as public."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__, key=str.lower)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "tritonamp").startswith("tritonamp")
        and not inspect.ismodule(value)
    ]


def lines_of_class(name: str, value: type) -> Iterator[str]:
    """Yield the lines of a class: itself, its documented attributes, its methods."""
    is_called = inspect.isfunction(vars(value).get("__init__", value.__init__))  # type: ignore[misc]
    if name in NOT_CALLED or dataclasses.is_dataclass(value):
        is_called = False
    made = arguments(value.__init__) if is_called else ""  # type: ignore[misc]
    yield from ("", f"### {name}", "", f"`{name}{made}`: {summary(value)}", "")
    for attribute, text in attributes(value):
        if attribute not in INTERNAL:
            yield entry(attribute, kind_of(value, attribute), text)
    for method, function in methods(value):
        if isinstance(function, property):
            yield entry(method, f": {returned(function.fget)}", summary(function.fget))
        else:
            yield entry(method, signature(function), summary(function))
    yield ""


def methods(value: type) -> Iterator[tuple[str, Any]]:
    """Yield public methods and properties in the order of the source, those of tritonamp alone."""
    yielded = set()  # a base's method is not listed again; torch wraps `step` at the first instance
    for base in value.__mro__:
        if base.__module__.startswith("tritonamp"):
            for name, method in vars(base).items():
                if isinstance(method, (classmethod, staticmethod)):
                    method = method.__func__
                is_method = inspect.isfunction(method) or isinstance(method, property)
                is_left_out = name in INTERNAL | yielded or (
                    value is tritonamp.GradScaler and not hasattr(torch.amp.GradScaler, name)
                )
                if is_method and not name.startswith("_") and not is_left_out:
                    yielded.add(name)
                    yield name, method


def source_of(function: Any) -> ast.FunctionDef:
    """Return the definition of a function, without its decorators' wrappers."""
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    return next(n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))


def signature(function: Any) -> str:
    """Return arguments, without ``self``, and type of the result, as the source has them."""
    return f"{arguments(function)} -> {returned(function)}"


def arguments(function: Any) -> str:
    """Return the arguments in parentheses, without ``self``, as the source has them."""
    values = inspect.signature(function).parameters

    def default(node: ast.expr, name: str) -> str:
        is_name = isinstance(node, ast.Subscript)  # of a constant of ours
        return repr(values[name].default) if is_name else ast.unparse(node)

    return arguments_of(source_of(function).args, default)


def arguments_of(args: ast.arguments, text_of: Callable[[ast.expr, str], str]) -> str:
    """Return arguments in parentheses, without ``self``; ``text_of`` shows a default."""
    plain = [(arg, None) for arg in args.args]
    if args.defaults:
        plain[-len(args.defaults) :] = zip(
            args.args[-len(args.defaults) :], args.defaults, strict=True
        )
    if plain and plain[0][0].arg in ("self", "cls"):
        del plain[0]

    def shown(arg: ast.arg, default: ast.expr | None = None) -> str:
        kind = f": {without_quotes(arg.annotation)}" if arg.annotation else ""
        if default is None:
            return arg.arg + kind
        text = text_of(default, arg.arg)
        return f"{arg.arg}{kind} = {text}" if kind else f"{arg.arg}={text}"

    parts = [shown(*each) for each in plain]
    if args.vararg:
        parts.append("*" + shown(args.vararg))
    elif args.kwonlyargs:
        parts.append("*")
    parts += [shown(*each) for each in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        parts.append("**" + shown(args.kwarg))
    return f"({', '.join(parts)})"


def returned(function: Any) -> str:
    """Return the type of a function's result, as the source has it."""
    result = source_of(function).returns
    text = "Any" if result is None else without_quotes(result)
    manager = re.fullmatch(r"Iterator\[(.*)\]", text)
    is_manager = any("contextmanager" in ast.unparse(d) for d in source_of(function).decorator_list)
    return f"AbstractContextManager[{manager[1]}]" if manager and is_manager else text


def without_quotes(node: ast.expr) -> str:
    """Return the source of a type that may be a string."""
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def summary(value: Any) -> str:
    """Return the first paragraph of a docstring, in Markdown."""
    return markdown(inspect.cleandoc(value.__doc__).partition("\n\n")[0])


def attributes(value: type) -> Iterator[tuple[str, str]]:
    """Yield name and text of each entry of a class's ``Attributes:``."""
    text = inspect.cleandoc(value.__doc__ or "").partition("\nAttributes:\n")[2]
    text = re.split(r"^\S", text, maxsplit=1, flags=re.MULTILINE)[0]
    for part in re.split(r"^    (?=\w+(?:, \w+)*:)", text, flags=re.MULTILINE)[1:]:
        name, _, rest = part.partition(":")
        yield name, markdown(rest.partition("\n        - ")[0])


def kind_of(value: type, attribute: str) -> str:
    """Return type and default of a field, of records and dataclasses; "" for other classes."""
    kinds = {
        node.target.id: node
        for node in ast.parse(textwrap.dedent(inspect.getsource(value))).body[0].body  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    if attribute not in kinds:
        return ""
    node = kinds[attribute]
    default = getattr(value, "_field_defaults", vars(value)).get(attribute)
    has_default = isinstance(default, (str, int, float, tuple, torch.dtype)) or (
        isinstance(node.value, ast.Constant)
    )
    return f": {without_quotes(node.annotation)}" + (f" = {default!r}" if has_default else "")


def contents(value: Any) -> str:
    """Return the fields of a level that differ from the defaults, or a constant."""
    if not dataclasses.is_dataclass(value):
        return f"`{value!r}`"
    kept = [
        f"{field.name}={getattr(value, field.name)!r}"
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    ]
    return f"the level: `Policy({', '.join(kept)})`"


def markdown(text: str) -> str:
    """Return a docstring's text as one line of Markdown."""
    return " ".join(text.replace("``", "`").split())


def entry(name: str, rest: str, text: str) -> str:
    """Return the line of one name."""
    return f"- `{name}{rest}`: {text}"


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(page())
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
