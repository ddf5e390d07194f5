"""The command: reads files, prints their changes with the reasons, writes certain ones."""

import argparse
import ast
import os
import shutil
import time
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tritonamp.commands.migrate import apex_loop, imports, torch_loop
from tritonamp.commands.migrate.script import Change, Script
from tritonamp.commands.progress import wrote
from tritonamp.diagnosis.terminal import fitted

CONVERTED, BY_HAND, NOTHING = 0, 1, 3
_SKIPPED = {"build", "dist", "node_modules", "site-packages", "venv", "__pycache__"}
_LIST = "to change by hand, and left as it is; its lines have these numbers, so begin with the last"


_PLAIN = (
    'amp = tritonamp.enable(model, optimizer, level="O2") before it, and amp.backward(loss) '
    "instead of loss.backward()"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Rewrite imports of NVIDIA apex and deprecated names of torch.amp, with a reason for each "
        "change. For a training loop, list the lines to change, with what to write there."
    )
    parser.epilog = (
        "Exit status: 0 converted, 1 a file is to be changed by hand, 2 an error, 3 nothing to do."
    )
    what = "a script, or a folder with all .py files in it"
    parser.add_argument("paths", metavar="FILE|FOLDER", nargs="+", type=Path, help=what)
    what = "enable: all of that; apex: change imports of apex alone (default: %(default)s)"
    parser.add_argument("--to", default="enable", choices=("enable", "apex"), help=what)
    parser.add_argument("--write", action="store_true", help="write the files that are converted")


def run(args: argparse.Namespace, fail: Callable[[str], Any]) -> int:
    """Convert and print; return the exit status. ``fail`` ends the command with a message."""
    for path in args.paths:
        if not path.exists():
            fail(f"{path}: there is no such file or folder")
        if path.is_file() and path.suffix != ".py":
            fail(f"{path}: expected a .py file or a folder; export a notebook as a script first")
    files = list(dict.fromkeys(file for path in args.paths for file in _files(path)))
    statuses = [_migrate(file, args.to, args.write) for file in files]
    done, left = statuses.count(CONVERTED), statuses.count(BY_HAND)
    counted = f"{len(files)} file{'s' * (len(files) != 1)}"
    if not done and not left:
        print(fitted(f"{counted}: nothing to do, no loop with apex or a GradScaler, no old name"))
        if not any(b"tritonamp" in file.read_bytes() for file in files):
            print(fitted(f"A loop in FP32 has two lines to change: {_PLAIN}"))
        return NOTHING
    verb = "converted" if args.write else "can be converted (--write does it)"
    kept = "as it is" if left == 1 else "as they are"
    rest = f"{left} left {kept}{', to change by hand' * bool(left)}"
    print(fitted(f"{counted}: {done} {verb}, {rest}"))
    return BY_HAND if left else CONVERTED


def convert(text: str, to: str = "enable") -> Script:
    """Return a training script with its edits. Raise SyntaxError if it is not Python 3.

    ``to`` is "enable" for everything, or "apex" for imports of apex alone.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in the script's strings
        script = Script(text)
    imports.move_apex(script)
    if to == "enable":
        imports.rename_old(script)
        torch_loop.edit(script)
        apex_loop.edit(script)
    try:
        ast.parse(script.after)
    except SyntaxError as error:
        raise AssertionError(f"line {error.lineno} of the new text: {error.msg}") from error
    return script


def _files(path: Path) -> Iterator[Path]:
    """Yield ``path``, or the Python files in it, except installed and hidden ones."""
    if path.is_file():
        yield path
    for folder, folders, names in os.walk(path):  # which finds nothing in a file
        folders[:] = sorted(f for f in folders if f not in _SKIPPED and not f.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _migrate(path: Path, to: str, write: bool) -> int:
    try:
        text, encoding = _read(path)
        script = convert(text, to)
    except Exception as error:  # one file does not end a folder
        return _show(path, _LIST, [(getattr(error, "lineno", None) or 1, _said(error))])
    changes = script.changes()
    if script.is_list or script.notes:
        return _show(path, _LIST, sorted(script.notes), changes)
    if not changes:
        return NOTHING
    _show(path, "its changes; lines have the numbers before them", [], changes)
    if write:
        try:
            start = time.perf_counter()
            _write(path, script.after, encoding)
            print(wrote(path, start))
        except OSError as error:
            return _show(path, "stays as it is", [(1, f"cannot be written: {error}")])
    return CONVERTED


def _said(error: Exception) -> str:
    if isinstance(error, OSError | UnicodeDecodeError):
        return f"cannot be read: {error}"
    if isinstance(error, SyntaxError):
        return f"not Python 3: {error.msg}"
    return f"a fault of this command, please report it: {type(error).__name__}: {error}"


def _read(path: Path) -> tuple[str, str]:
    """Return the text of a file with its line ends, and its encoding."""
    with path.open("rb") as file:
        encoding, _ = tokenize.detect_encoding(file.readline)
    return path.read_bytes().decode(encoding), encoding


def _write(path: Path, text: str, encoding: str) -> None:
    """Replace the content of a file at once, and keep its rights."""
    target = path.resolve()
    target.open("r+b").close()  # raises for a read-only file
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        fresh.write_bytes(text.encode(encoding))
        shutil.copymode(target, fresh)
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)


def _show(
    path: Path, title: str, notes: Iterable[tuple[int, str]], changes: Iterable[Change] = ()
) -> int:
    """Print the notes and changes of a file."""
    print(fitted(f"\n{path}: {title}"))
    for line, text in notes:
        print(fitted(f"  {path}:{line}: {text}"))
    for line, old, new, reason in changes:
        what = ("write" if new else "take out") if old else "insert after this line"
        print(fitted(f"  {path}:{line}: {what} ({reason})"))
        print(*(f"    - {text}" for text in old), *(f"    + {text}" for text in new), sep="\n")
    print()
    return BY_HAND
