"""Which tests run: everything with ``--full``, a covering sample without.

pytest                                a sample, without the slow tests
pytest tests/step                     the same of one folder
pytest --tools                        a sample, with all tests of the tools
pytest --slow                         a sample of every test, the slow ones, too
pytest --full                         every case of every test
pytest --rest                         what --full has and a plain pytest leaves out
pytest --rest --turn 1/3              of what would run, the first of three parts
pytest tests/step/test_loop.py        every case of what is named: files, tests,
pytest -k softmax; pytest -m ranks    and what -k, -m and --lf pick

A covering sample of a parametrised test: few of its cases, and yet every row of each of its
``parametrize`` marks, and every value of each parametrised fixture, is in one of them. What only a
combination of values shows is left to ``--full``, which CI runs.

Tools are built on the library, or run its tests. ``TOOLS`` lists them: each has a test or two that
are marked as ``smoke``, and a plain run takes these alone.
"""

import argparse
import ast
import zlib
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

SLOW = {
    "ranks": "starts two processes that meet through gloo",
    "clients": "needs Lightning, Accelerate, transformers, PEFT, diffusers or TRL",
    "crash": "kills or interrupts a process at many points",
    "long": "takes seconds: hundreds of training steps, long lines in Triton's interpreter",
    "demo": "trains the demo's models or draws its pictures",
    "static": "compiles kernels for GPUs that need not be there",
    "compiled": "waits for torch.compile",
    "more": "is much like another case that a plain run has",
    "tools": "is of a tool, see TOOLS in covering.py",
}
TOOLS = [  # folders and files, from the root
    "tests/apex",
    "tests/commands",
    "tests/demo",
    "tests/diagnosis/test_errors.py",
    "tests/forecast",
    "tests/integrations",
    "tests/test_articles.py",
    "tests/test_bench.py",
    "tests/test_first_gpu.py",
    "tests/test_lines.py",
    "tests/test_model_counts.py",
    "tests/test_on_a_gpu.py",
    "tests/test_readme.py",
    "tests/test_written_bytes.py",
]
FAST_ON_A_GPU = {"compiled", "long"}
"""Slow marks that ``--cuda`` keeps: a GPU compiles other code, and steps are fast there."""
SMOKE = "smoke"
"""Mark of the tests of slow files and of tools that a plain run takes."""
STEPS = "steps"
"""Mark of tests with tens of training steps, which take as many seconds where PTX is emulated."""

SLOW_FILES = pytest.StashKey[list[str]]()
REPORT = pytest.StashKey[str]()


def more(cases: Iterable[Any]) -> list[Any]:
    """Return cases for ``parametrize`` that a plain run leaves out: others are much like them."""
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.more) for case in several]


def one_in(number: int, cases: Iterable[Any]) -> list[Any]:
    """Return cases for ``parametrize`` of which a plain run takes one in ``number``."""
    cases = list(cases)
    return [case if not i % number else more([case])[0] for i, case in enumerate(cases)]


def covering(cases: Sequence[Collection[Hashable]]) -> list[int]:
    """Return the positions of few cases in which every value of all cases appears.

    Greedy: again and again the first of the cases with the most values that are still missing.
    Where all combinations are there, these are the fewest that there can be.
    """
    values = [frozenset(case) for case in cases]
    missing = frozenset().union(*values)
    chosen = []
    while missing:
        best = max(range(len(values)), key=lambda i: len(values[i] & missing))
        missing -= values[best]
        chosen.append(best)
    return sorted(chosen)


def rows(item: pytest.Item) -> list[tuple[int, str]]:
    """Return which row of each ``parametrize``, which value of each fixture the case has.

    ``_idlist`` has been pytest's own, one id for each, since 2.4; the public id is all of them
    joined by hyphens, and ids may hold hyphens.
    """
    callspec: Any = getattr(item, "callspec", None)
    return list(enumerate(callspec._idlist)) if callspec else [(0, "the only case")]


def sample(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield a covering sample of each test's cases."""
    for _, group in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        yield from (cases[i] for i in covering([rows(case) for case in cases]))


def file_marks(path: Path) -> set[str]:
    """Return which slow marks a file's ``pytestmark`` holds, without importing the file."""
    text = path.read_text()
    if "pytestmark" not in text:
        return set()
    marks = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    names = {n.attr for mark in marks for n in ast.walk(mark) if isinstance(n, ast.Attribute)}
    return names & SLOW.keys()


def of_a_tool(path: Path, config: pytest.Config) -> bool:
    return any(path.is_relative_to(config.rootpath / tool) for tool in TOOLS)


def left_out(config: pytest.Config) -> list[str]:
    """Return the slow marks whose tests this run leaves out."""
    option = config.option
    kept = {"tools"} if option.tools else set()
    if getattr(option, "cuda", False):
        kept |= FAST_ON_A_GPU
    return [] if option.slow else [mark for mark in SLOW if mark not in kept]


def turn_of(text: str) -> tuple[int, int]:
    """Return K and N of ``--turn K/N``."""
    which, _, turns = text.partition("/")
    if which.isdecimal() and turns.isdecimal() and 1 <= int(which) <= int(turns):
        return int(which), int(turns)
    raise argparse.ArgumentTypeError(f"expected K/N with K from 1 to N, like 2/3, got {text!r}")


def has_turn(name: str, which: int, turns: int) -> bool:
    """Whether a case runs in a turn: the same one on every machine and in every process."""
    return zlib.crc32(name.encode()) % turns == which - 1


def is_slow(item: pytest.Item, marks: Iterable[str] = SLOW) -> bool:
    return not item.get_closest_marker(SMOKE) and any(map(item.get_closest_marker, marks))


def takes_all(config: pytest.Config) -> bool:
    """Whether every case was asked for, or something by its name."""
    option = config.option
    named = any("::" in arg or arg.endswith(".py") for arg in config.args)
    last_failed = getattr(option, "lf", False)  # not there with -p no:cacheprovider
    every = option.full or option.rest
    return bool(named or every or option.keyword or option.markexpr or last_failed)


# tests/conftest.py takes these hooks over


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run slow tests, too")
    parser.addoption("--tools", action="store_true", help="run all tests of the tools, too")
    parser.addoption("--full", action="store_true", help="run every case of every test")
    parser.addoption("--rest", action="store_true", help="run what is left out without options")
    parser.addoption(
        "--turn",
        type=turn_of,
        metavar="K/N",
        help="run the K-th of N parts of the cases that would run, by a checksum of their names",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SLOW_FILES] = []
    for name, meaning in SLOW.items():
        config.addinivalue_line("markers", f"{name}: {meaning}; left out unless asked for")
    meaning = "takes tens of training steps; left out with --fake-cuda=ptx unless asked for"
    config.addinivalue_line("markers", f"{STEPS}: {meaning}")
    meaning = "runs without options, though its file is slow or of a tool"
    config.addinivalue_line("markers", f"{SMOKE}: {meaning}")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Start a process for each core, as ``-n auto --dist worksteal`` does.

    That is no matter for addopts: benchmarks want the machine for themselves, one named test is
    done before processes have started, -s and --pdb need this one, and there may be no xdist.
    """
    option = config.option
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        option.tools = True  # their folders were named, or others
    if getattr(option, "numprocesses", 0) is not None or hasattr(config, "workerinput"):
        return
    if option.capture == "no" or option.usepdb or option.trace or "::" in "".join(config.args):
        return
    option.numprocesses = "auto"
    option.maxprocesses = option.maxprocesses or 8  # a process takes about 1 GB
    if option.dist == "no":
        # each process gets a row of neighbours, so that the fixtures of a module are made once or
        # twice, and who is done takes half of what another has left; on a GPU the order counts
        option.dist = "load" if getattr(option, "cuda", False) else "worksteal"


def pytest_report_header(config: pytest.Config) -> str:
    option = config.option
    if not takes_all(config):
        which = "with" if option.slow else "without"
        cases = f"a covering sample, {which} slow tests (--full runs all)"
    elif option.rest:
        cases = "those that are not in the covering sample, and slow tests"
    else:
        cases = "all" if option.full else "all of what is named"
    turn = "part {} of {} of ".format(*option.turn) if option.turn else ""
    return f"cases: {turn}{cases}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip slow files before they are imported: that alone takes seconds for some."""
    path = collection_path
    if takes_all(config) or not path.name.startswith("test_"):
        return None
    marks = file_marks(path) | ({"tools"} if of_a_tool(path, config) else set())
    if f"mark.{SMOKE}" in path.read_text() or marks.isdisjoint(left_out(config)):
        return None
    config.stash[SLOW_FILES].append(path.name)
    return True


def pytest_itemcollected(item: pytest.Item) -> None:
    if of_a_tool(item.path, item.config):
        item.add_marker("tools")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what ``chosen`` returns, or all that was asked for; of these a part with ``--turn``."""
    every = takes_all(config)
    kept = items if every and not config.option.rest else chosen(config, items)
    if turn := config.option.turn:
        kept = [item for item in kept if has_turn(item.nodeid, *turn)]
    if not every:
        marks, files = left_out(config), len(config.stash[SLOW_FILES])
        and_none = f", and none of {files} files marked as {', '.join(marks)}" if marks else ""
        config.stash[REPORT] = f"{len(kept)} of {len(items)} cases{and_none}: --full runs all"
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


def chosen(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return a covering sample of the tests without a slow mark; with --rest all others."""
    marks = left_out(config)
    candidates = [item for item in items if not is_slow(item, marks)]
    if getattr(config.option, "fake_cuda", None) == "ptx":
        candidates = [item for item in candidates if not item.get_closest_marker(STEPS)]
    kept = list(sample(candidates))
    if not config.option.rest:
        return kept
    in_sample = set(kept)
    return [item for item in items if item not in in_sample]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the report of a worker to the process that prints it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cases"] = session.config.stash.get(REPORT, "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[REPORT] = getattr(node, "workeroutput", {}).get("cases", "")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if report := config.stash.get(REPORT, ""):
        terminalreporter.write_line(report)
