"""A text, converted: the loop, the names, the imports; or what to write in each line by hand."""

import ast
import warnings
from typing import Literal

from tritonamp.commands.migrate import apex_loop, imports, table, torch_loop
from tritonamp.commands.migrate.objects import Refused
from tritonamp.commands.migrate.script import Conversion, Note, Script

To = Literal["enable", "apex"]


def convert(text: str, to: To = "enable") -> Conversion:
    """Return a training script rewritten, with its reasons; or as it was, with to-dos.

    ``to`` is "enable" for the handle of ``tritonamp.enable``, or "apex" for imports of apex alone.
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
        try:
            apex_loop.convert(script)
            torch_loop.convert(script)
        except Refused as refused:
            script.refuse(*refused.args)
        imports.rename_old(script)
    imports.move_apex(script)
    if script.todos:
        by_hand = _by_hand(script) if to == "enable" else set()
        return Conversion(text, text, (), tuple(sorted(script.todos | by_hand)))
    imports.finish(script)
    after = script.render()
    ast.parse(after)  # raises: a fault of this command, which keeps the file as it is
    return Conversion(text, after, tuple(sorted(script.changes)), ())


def _by_hand(script: Script) -> set[Note]:
    """Return each line that a row of the table knows, with what takes its place there."""
    found = [r.match(script, n) for n in script.nodes for r in (table.BACKWARD, table.UNSCALE)]
    scalers = {ast.unparse(match["SCALER"]) for match in found if match}
    notes = set()
    covered: set[ast.AST] = set()
    for node in script.nodes:  # outer ones first
        for row in table.ALL:
            match = None if node in covered else row.match(script, node)
            if match is None or ("SCALER" in match and ast.unparse(match["SCALER"]) not in scalers):
                continue
            covered |= {*ast.walk(node)}
            written = row.write(script.segment, match, "amp")
            text = script.segment(node).splitlines()[0]
            becomes = f"write `{written}`" if written else "take it out"
            notes.add(Note(node.lineno, f"`{text}`: {becomes} ({row.reason})"))  # type: ignore[attr-defined]
    return notes
