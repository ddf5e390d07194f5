"""A text, converted."""

import ast
import warnings
from typing import Literal

from tritonamp.commands.migrate.apex_amp import imports as apex_imports
from tritonamp.commands.migrate.apex_amp import loop as apex_loop
from tritonamp.commands.migrate.loops import imports
from tritonamp.commands.migrate.reading.script import Conversion, Note, Script
from tritonamp.commands.migrate.torch_amp import loop as torch_loop
from tritonamp.commands.migrate.torch_amp import old_names

To = Literal["enable", "apex"]


def convert(text: str, to: To = "enable") -> Conversion:
    """Rewrite a training script.

    Args:
        text: Python 3.
        to: "enable" for the handle of ``tritonamp.enable``; "apex" to change imports of apex alone.

    Returns:
        the new text with its reasons, or the old one with what is not understood.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the script's strings
            script = Script(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        what = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        return Conversion(text, text, (), (Note(line, f"not Python 3: {what}"),))
    if to == "enable":
        apex_loop.convert(script)
        torch_loop.convert(script)
        old_names.convert(script)
    apex_imports.convert(script)
    if script.todos:
        return Conversion(text, text, (), tuple(sorted(script.todos)))
    imports.convert(script)
    after = script.edits.render()
    try:
        ast.parse(after)
    except SyntaxError as error:
        what = (
            f"the rewritten line would be no Python ({error.msg}): {error.text}. By hand: all of it"
        )
        return Conversion(text, text, (), (Note(1, what),))
    return Conversion(text, after, tuple(sorted(script.changes)), ())
