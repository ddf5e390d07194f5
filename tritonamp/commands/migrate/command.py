"""The command: reads files, prints diffs and reasons, writes where it is told to."""

import argparse
import difflib
import os
import sys
import tempfile
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tritonamp.commands.migrate.convert import convert
from tritonamp.commands.migrate.script import Conversion, Note

CONVERTED, BY_HAND, NOTHING = 0, 1, 3
_SKIPPED = {"build", "dist", "node_modules", "site-packages", "venv", "__pycache__"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Rewrite training scripts for torch.amp or NVIDIA apex. Prints a diff, a reason for each "
        "edit, and what is left to do by hand. A file that is not understood stays as it is."
    )
    parser.epilog = (
        "Exit status: 0 all that had something to do is converted, 1 a file needs a hand, 2 the "
        "command could not be carried out, 3 there is nothing to do."
    )
    parser.add_argument(
        "paths",
        metavar="FILE|FOLDER",
        nargs="+",
        type=Path,
        help="of a folder, all .py files in it",
    )
    parser.add_argument(
        "--to",
        default="enable",
        choices=("enable", "apex"),
        help="enable: loops become tritonamp.enable's; apex: imports of apex become those of "
        "tritonamp.apex, nothing else changes (default: %(default)s)",
    )
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
        print(f"{counted}: nothing to do, no loop with apex or a GradScaler, no old name")
        return NOTHING
    verb = "converted" if args.write else "can be converted (--write does it)"
    kept = "as it is" if left == 1 else "as they are"
    hand = " and in need of a hand" * bool(left)
    print(f"{counted}: {done} {verb}, {left} left {kept}{hand}")
    return BY_HAND if left else CONVERTED


def _files(path: Path) -> Iterator[Path]:
    """Yield ``path``, or the Python files in it, but for installed and hidden ones."""
    if path.is_file():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED and not f.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _migrate(path: Path, to: Any, write: bool) -> int:
    by_hand = "needs a hand, and stays as it is"
    try:
        text, encoding = _read(path)
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        return _show(path, "needs a hand", [Note(1, f"cannot be read: {error}")])
    try:
        conversion = convert(text, to)
    except Exception as error:  # one file does not end a folder
        what = f"a fault of this command, please report it: {type(error).__name__}: {error}"
        return _show(path, by_hand, [Note(1, what)])
    if conversion.todos:
        return _show(path, by_hand, conversion.todos)
    if not conversion.converted:
        return NOTHING
    sys.stdout.writelines(_diff(path, conversion))
    _show(path, "why (lines of the file as it was)", conversion.changes)
    if write:
        try:
            _write(path, conversion.after, encoding)
        except OSError as error:
            return _show(path, "stays as it is", [Note(1, f"cannot be written: {error}")])
    return CONVERTED


def _read(path: Path) -> tuple[str, str]:
    """Return the text of a file, line ends as they are, and its encoding."""
    with path.open("rb") as file:
        encoding, _ = tokenize.detect_encoding(file.readline)
    return path.read_bytes().decode(encoding), encoding


def _write(path: Path, text: str, encoding: str) -> None:
    """Put ``text`` in the place of a file, at once and with the file's rights."""
    target = path.resolve()
    target.open("r+b").close()  # or the file is read-only
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode(encoding))
        os.chmod(name, target.stat().st_mode)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _diff(path: Path, conversion: Conversion) -> Iterator[str]:
    before, after = (
        text.replace("\r\n", "\n").splitlines(keepends=True)
        for text in (conversion.before, conversion.after)
    )
    name = path.as_posix().lstrip("/")
    for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _show(path: Path, title: str, notes: Iterable[Note]) -> int:
    lines = [f"  {path}:{note.line}: {note.text}" for note in notes]
    print(f"\n{path}: {title}", *lines, sep="\n", end="\n\n")
    return BY_HAND
