"""The structure that design and README promise, read from the sources: who imports whom, and what a
kernel file has.
"""

import ast
import functools
import graphlib
import importlib
import inspect
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import tritonamp
import tritonamp.kernels
from tritonamp.kernels._implementations import operations
from tritonamp.kernels._update import Update

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, KERNELS = ROOT / "tritonamp", ROOT / "kernels"
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "tritonamp", "kernels", "tests", "bench"}

# A room is a package or a file directly in tritonamp/, and kernels/. Each knows only rooms of
# earlier tiers.
TIERS = [
    "asleep kernels",
    "policy",
    "ambient class_swap fp32_values functional names nested readback scaler watched",
    "casts distributed",
    "step",
    "amp_state checks optim",
    "checkpoint diagnosis",
    "runtime",
    "forecast",
    "__init__",
    "apex commands integrations testing",
    "demo",
    "__main__",
]
# Known by each other, by what connects them to a run, and by the entry points; not by the core.
ADD_ONS = {"checkpoint", "diagnosis", "forecast"}
CONNECTS = {"runtime", "__init__"}
TIER = {room: number for number, rooms in enumerate(TIERS) for room in rooms.split()}
PUBLIC_ONLY = {"apex", "commands", "demo", "integrations", "testing", "__main__"}
# in addition to the public names: code that would otherwise be there twice
SHARED = {
    "apex": [
        "tritonamp.functional.masked_rows.softmax_of_scores",
        "tritonamp.policy.HALF_DTYPES",
        "tritonamp.readback.Readback",
        "tritonamp.step.state_loading.load_state",
        "tritonamp.step.state_loading.widen_state",
    ],
    "commands": ["tritonamp.casts.batch_invariance", "tritonamp.diagnosis.terminal"],
    "demo": ["tritonamp.diagnosis.terminal"],
    "__main__": ["tritonamp.diagnosis.terminal"],
    "integrations": [
        "tritonamp.casts.model_losses.computes_logits",
        "tritonamp.class_swap",
        "tritonamp.policy.HALF_DTYPES",
    ],
    "testing": ["tritonamp.policy.packs_masters"],
}
FILES = sorted(PACKAGE.rglob("*.py"))
KERNEL_FILES = sorted(KERNELS.glob("*.py"))
OP_FILES = [p for p in KERNEL_FILES if not p.name.startswith("_") and p.name != "device.py"]

HOST_READS = {"item", "tolist", "cpu", "synchronize"}


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(name: str) -> str:
    """The room of a module, given its dotted name."""
    parts = [*name.split("."), "__init__"]
    return parts[1] if parts[1] in TIER else "__init__"


def module_name(path: Path) -> str:
    """The dotted name that ``path`` is installed under."""
    parts = ["tritonamp", *path.relative_to(ROOT).with_suffix("").parts]
    if parts[1] == "tritonamp":
        parts = parts[1:]
    return ".".join(parts).removesuffix(".__init__")


def each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Return a decorator that runs a test on each file. A failure lists all files at fault."""

    def on_each(test: Callable[[Path], None]) -> Callable[[], None]:
        def test_all() -> None:
            found = {}
            for path in paths:
                try:
                    test(path)
                except AssertionError as error:
                    found[shown(path)] = str(error)
            assert found == {}

        test_all.__doc__ = test.__doc__
        return test_all

    return on_each


def is_entry(path: Path) -> bool:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py") in PUBLIC_ONLY


each_file = each(FILES)
each_core_file = each([p for p in FILES if room(module_name(p)) not in PUBLIC_ONLY])
each_entry_file = each([p for p in FILES if is_entry(p)])
each_kernel_file = each(KERNEL_FILES)
each_op_file = each(OP_FILES)


@functools.cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of ``path``, which is parsed once for all tests."""
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> list[str]:
    """Dotted names of everything that ``path`` imports, at any depth; ``from a import b`` counts as
    ``a.b``.
    """
    return list(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            yield from (
                ".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names
            )


def our_imports(path: Path) -> Iterator[str]:
    return (name for name in imports(path) if name.split(".")[0] == "tritonamp")


def foreign_roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)} - sys.stdlib_module_names - {"tritonamp"}


def is_in(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def submodules(package: ModuleType) -> list[str]:
    folder = KERNELS if package is tritonamp.kernels else PACKAGE
    files = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")]
    return sorted(files + [path.parent.name for path in folder.glob("*/__init__.py")])


def is_public(name: str) -> bool:
    """``tritonamp``, ``tritonamp.X`` with X in ``__all__``, or the same one public module further
    down.
    """
    _, *parts = name.split(".")
    scope = tritonamp
    for part in parts:
        if part not in scope.__all__:
            return False
        scope = getattr(scope, part)
    return True


# Import directions


@each_kernel_file
def test_kernels_import_torch_triton_and_themselves(path: Path) -> None:
    assert foreign_roots(path) <= {"torch", "triton"}
    assert all(is_in(name, "tritonamp.kernels") for name in our_imports(path))


@each_core_file
def test_core_needs_only_torch(path: Path) -> None:
    assert foreign_roots(path) <= {"torch"}, "Triton and every hardware question belong in kernels/"


def test_every_room_has_a_tier() -> None:
    rooms = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} | {"kernels"}
    assert rooms == set(TIER)
    assert len(rooms) < 30


@each_file
def test_rooms_know_earlier_tiers_only(path: Path) -> None:
    own = room(module_name(path))
    known = {room(name) for name in our_imports(path)} - {own}
    assert not {r for r in known if TIER[r] >= TIER[own]}


@each_file
def test_the_core_does_not_know_its_add_ons(path: Path) -> None:
    own = room(module_name(path))
    if own not in ADD_ONS | CONNECTS | PUBLIC_ONLY:
        assert not {room(name) for name in our_imports(path)} & ADD_ONS


@each_entry_file
def test_entry_points_use_public_names(path: Path) -> None:
    """The commands and the drop-in show that the public names, and few more, are enough."""
    own = room(module_name(path))
    neighbours = PUBLIC_ONLY - {"apex", "integrations", "testing"} | {own}
    # about the machine, and about optimizers
    answers = "device", "_implementations", "_native", "_optimizers"
    kernels = [f"tritonamp.kernels.{name}" for name in answers]
    allowed = [*kernels, *SHARED.get(own, []), *(f"tritonamp.{name}" for name in neighbours)]
    wrong = [
        name for name in our_imports(path) if not is_in(name, *allowed) and not is_public(name)
    ]
    attributes = {
        node.attr
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "tritonamp"
    }
    assert not wrong
    assert attributes <= {*tritonamp.__all__, "kernels", "__doc__", "__version__"}


def test_no_file_imports_one_that_imports_it() -> None:
    """Not for types, either: files can be read in the order of their imports."""
    files = {module_name(path): path for path in [*FILES, *KERNEL_FILES]}

    def imported(path: Path) -> Iterator[str]:
        own = module_name(path)
        for name in our_imports(path):
            while name not in files:  # of something in a file
                name = name.rpartition(".")[0]
            if not is_in(own, name):  # a package is there before what is in it
                yield name

    circles = graphlib.TopologicalSorter({name: imported(path) for name, path in files.items()})
    circles.prepare()  # raises CycleError, with the files


# Names and files


@pytest.mark.parametrize(
    "package", [tritonamp, tritonamp.kernels], ids=lambda package: package.__name__
)
def test_no_name_hides_its_module(package: ModuleType) -> None:
    """Re-exporting ``softmax`` from a module ``softmax`` would rebind the module."""
    for name in submodules(package):
        module = importlib.import_module(f"{package.__name__}.{name}")
        assert getattr(package, name) is module


def test_public_names_exist() -> None:
    assert len(set(tritonamp.__all__)) == len(tritonamp.__all__)
    assert all(hasattr(tritonamp, name) for name in tritonamp.__all__)


def test_top_level_is_fixed() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("git says which files belong to the project, and this is not a checkout")
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    top_level = {name.split("/")[0] for name in tracked.splitlines()}
    assert {name for name in top_level if not name.startswith(".")} <= TOP_LEVEL


# Kernel files


def updates(module: ModuleType) -> set[Update]:
    """The rules of one element in a module."""
    return {value for value in vars(module).values() if isinstance(value, Update)}


@each_op_file
def test_twins_have_one_signature(path: Path) -> None:
    module = importlib.import_module(module_name(path))
    functions = {
        name: function for name, function in vars(module).items() if inspect.isfunction(function)
    }
    operations = {name.removesuffix("_torch") for name in functions if name.endswith("_torch")}
    assert operations or updates(module), "an op file holds an op_torch, or the rule of an Update"
    assert {
        name.removesuffix("_triton") for name in functions if name.endswith("_triton")
    } <= operations
    for name in operations:
        twins = [
            functions[other]
            for other in (name, f"{name}_torch", f"{name}_triton")
            if other in functions
        ]
        assert name in functions
        op, *others = (inspect.signature(twin) for twin in twins)
        op = op.replace(parameters=[p for p in op.parameters.values() if p.name != "backend"])
        assert len({str(signature) for signature in (op, *others)}) == 1


def test_the_list_of_kernels_is_what_there_is() -> None:
    modules = [importlib.import_module(module_name(path)) for path in OP_FILES]
    names = {
        name
        for module in modules
        for name, value in vars(module).items()
        if inspect.isfunction(value)
    }
    in_files = {name.removesuffix("_triton") for name in names if name.endswith("_triton")}
    rules = {update.name for module in modules for update in updates(module) if update.samples}
    assert in_files | rules == set(operations())


@each_op_file
def test_kernels_are_built_for_every_architecture(path: Path) -> None:
    module = importlib.import_module(module_name(path))
    functions = {f for name, f in vars(module).items() if name.endswith("_triton")}
    functions |= {update.launch for update in updates(module) if update.samples}
    if functions:
        assert {case.function for case in module.shipped()} == functions


@each_op_file
def test_every_op_file_has_a_test_file(path: Path) -> None:
    folder, module = ROOT / "tests" / "kernels", importlib.import_module(module_name(path))
    names = [update.name for update in updates(module) if update.samples]
    in_table = (folder / "update_rows.py").read_text()
    assert (folder / f"test_{path.stem}.py").is_file() or all(name in in_table for name in names)


@each_kernel_file
def test_kernels_never_wait_for_the_device(path: Path) -> None:
    used = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    assert not used & HOST_READS
