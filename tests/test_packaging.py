"""What an installation must hold, and what importing it must not do."""

import ast
import importlib.resources
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_python import FreshPython

import tritonamp
import tritonamp.kernels

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

ROOT = Path(__file__).resolve().parents[1]
KERNELS = "tritonamp.kernels"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_folder_is_listed() -> None:
    inside = [path.parent.relative_to(ROOT) for path in (ROOT / "tritonamp").rglob("__init__.py")]
    folders = {".".join(path.parts) for path in inside} | {"tritonamp.kernels"}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == folders
    assert not [
        path for path in (ROOT / "kernels").rglob("__init__.py") if path.parent != ROOT / "kernels"
    ]


def test_every_python_file_is_in_a_package() -> None:
    stray = [
        str(path.relative_to(ROOT))
        for top in ("tritonamp", "kernels")
        for path in (ROOT / top).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert not stray, f"no __init__.py beside {stray}: they would be missing from the wheel"


def test_every_other_file_is_package_data() -> None:
    """Sources of C++, READMEs and error pages are read, and pointed to, where it is installed."""
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]
    stray = []
    for top in ("tritonamp", "kernels"):
        for path in (ROOT / top).rglob("*.*"):
            if path.suffix in (".py", ".pyc"):
                continue
            package = ".".join(path.parent.relative_to(ROOT).parts).replace("kernels", KERNELS)
            if not any(map(path.match, patterns["*"] + patterns.get(package, []))):
                stray.append(str(path.relative_to(ROOT)))
    assert not stray, f"missing from the wheel: {stray}"


def test_core_dependencies_are_torch_and_triton() -> None:
    assert PYPROJECT["project"]["dependencies"] == [
        "torch>=2.11",
        "triton>=3.6; sys_platform == 'linux'",
    ]


def test_the_version_stands_in_one_place() -> None:
    """As a literal, which setuptools reads without importing torch."""
    assert "version" not in PYPROJECT["project"]
    attribute = PYPROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"]
    assert attribute == "tritonamp.__version__"
    body = ast.parse((ROOT / "tritonamp" / "__init__.py").read_text()).body
    values = {ast.unparse(n.targets[0]): n.value for n in body if isinstance(n, ast.Assign)}
    assert ast.literal_eval(values["__version__"]) == tritonamp.__version__


def test_metadata_says_what_it_is_and_names_nobody() -> None:
    project = PYPROJECT["project"]
    assert not project.keys() & {"authors", "maintainers", "urls"}
    assert project["keywords"]


def test_classifiers_name_the_tested_versions_of_python() -> None:
    prefix = "Programming Language :: Python :: 3."
    found = [c.removeprefix(prefix) for c in PYPROJECT["project"]["classifiers"] if prefix in c]
    script = (ROOT / "bench" / "versions.sh").read_text()
    assert [f"3.{minor}" for minor in found] == re.search(r"pythons=\((.*)\)", script)[1].split()
    assert PYPROJECT["project"]["requires-python"] == f">=3.{found[0]}"


def test_the_tests_install_no_clients() -> None:
    test = PYPROJECT["project"]["optional-dependencies"]["test"]
    assert [r for r in test if "tritonamp" in r] == ["tritonamp[demo]"]


def test_typed_marker_is_installed() -> None:
    assert (importlib.resources.files("tritonamp") / "py.typed").is_file()


def test_readme_has_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert 'pip install -e ".[demo]" && python -m tritonamp demo' in lines
    assert 'pip install -e ".[test]" && pytest' in lines


@pytest.fixture
def kernels_elsewhere(tmp_path: Path) -> Path:
    """A folder with a package like Hugging Face's ``kernels``, metadata included."""
    package, metadata = tmp_path / "kernels", tmp_path / "kernels-0.18.5.dist-info"
    (package / "layer").mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text("from kernels.layer import Mode\n__version__ = '0.18.5'\n")
    (package / "layer" / "__init__.py").write_text("class Mode: ...\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.5\n")
    return tmp_path


def test_kernels_of_somebody_else_are_found_from_the_repository_root(
    kernels_elsewhere: Path, fresh_python: FreshPython
) -> None:
    code = f"""
import sys
sys.path.append({str(kernels_elsewhere)!r})
import kernels
from kernels.layer import Mode
assert kernels.Mode is Mode and kernels.__version__ == "0.18.5", kernels
assert sys.modules["kernels"] is kernels
import tritonamp.kernels
assert tritonamp.kernels is not kernels
"""
    result = fresh_python.run(code, ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.clients
@pytest.mark.parametrize("installed", [False, True])
def test_transformers_from_the_repository_root(
    kernels_elsewhere: Path, installed: bool, fresh_python: FreshPython
) -> None:
    pytest.importorskip("transformers")
    code = f"""
import sys
sys.path += [{str(kernels_elsewhere)!r}] * {installed}
from transformers.utils import is_kernels_available
assert is_kernels_available() == {installed}
"""
    # the stand-in has nothing of what Trainer imports from the real one
    code += "" if installed else "from transformers import Trainer"
    result = fresh_python.run(code, ROOT)
    assert result.returncode == 0, result.stderr


def test_kernels_are_not_importable_from_the_repository_root(fresh_python: FreshPython) -> None:
    """Whoever looks for them there finds an empty package, and is told where they are."""
    code = """
import kernels
assert not hasattr(kernels, "__file__") and not hasattr(kernels, "__version__")
for statement in "import kernels.softmax", "from kernels import softmax":
    try:
        exec(statement)
    except ImportError:
        pass
    else:
        raise AssertionError(statement)
kernels.softmax
"""
    result = fresh_python.run(code, ROOT)
    assert result.returncode == 1
    last_line = result.stderr.splitlines()[-1]
    assert last_line.startswith("AttributeError: ")
    assert "import tritonamp.kernels" in last_line


def test_kernels_are_imported_under_their_own_name_only(fresh_python: FreshPython) -> None:
    code = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("other", {str(ROOT / "kernels" / "__init__.py")!r})
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
    result = fresh_python.run(code, ROOT)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("ImportError: imported as 'other': ")


@pytest.mark.long
def test_pytest_runs_as_a_module() -> None:
    """Which puts the repository root on ``sys.path``."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]
    result = subprocess.run(
        [*command, "tests/test_packaging.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_import_leaves_cuda_alone(tmp_path: Path, fresh_python: FreshPython) -> None:
    # The stand-ins make this fail on machines without a GPU too, where is_initialized() is always
    # False.
    code = """
import torch
def touched(*args, **kwargs):
    raise AssertionError("import tritonamp asked CUDA something")
names = "_lazy_init init is_available device_count current_device get_device_capability"
for name in names.split():
    setattr(torch.cuda, name, touched)
import tritonamp, tritonamp.kernels
assert not torch.cuda.is_initialized()
"""
    result = fresh_python.run(code, tmp_path)
    assert result.returncode == 0, result.stderr


LOADED = """
import sys
import torch
def loaded():
    return {name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules}
"""


def test_import_leaves_the_compilers_alone(tmp_path: Path, fresh_python: FreshPython) -> None:
    """They take seconds to import. An optimizer of torch does import them: it is made before."""
    code = (
        LOADED
        + """
before = loaded()
import tritonamp
assert loaded() == before, loaded()
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Softmax(1))
amp = tritonamp.enable(model)
model(torch.ones(2, 8)).sum().backward()
amp.stats()
amp.disable()
assert loaded() == before, loaded()
"""
    )
    result = fresh_python.run(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_import_leaves_out_what_few_runs_use(tmp_path: Path, fresh_python: FreshPython) -> None:
    """These modules took a sixth of the time of ``import tritonamp``."""
    code = """
import sys
import tritonamp
later = {"checkpoint": "save", "forecast": "check", "optim": "optim"}
diagnosis = "live_ranges", "live_attention", "attention_calls", "range_hooks"
replay = "replay.bundles", "replay.search", "replay.watching"
others = "kernels.muon", "kernels.ranges", *(f"diagnosis.{name}" for name in diagnosis + replay)
not_yet = tuple(f"tritonamp.{name}" for name in (*later, *others))
loaded = [name for name in sys.modules if name.startswith(not_yet)]
assert not loaded, loaded
for module, name in later.items():
    assert name in dir(tritonamp)
    found = getattr(tritonamp, name)
    assert getattr(tritonamp, module) is sys.modules[f"tritonamp.{module}"]
    assert found is tritonamp.optim or found.__module__.startswith(f"tritonamp.{module}.")
try:
    tritonamp.lode
except AttributeError as error:
    assert "module 'tritonamp' has no attribute 'lode'" in str(error)
else:
    raise AssertionError
"""
    result = fresh_python.run(code, tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.compiled
@pytest.mark.parametrize("how", ["model", "amp.autocast"])
def test_a_model_is_compiled_by_a_compiler_that_came_later(
    tmp_path: Path, how: str, fresh_python: FreshPython
) -> None:
    code = (
        LOADED
        + """
import tritonamp
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Softmax(1))
amp = tritonamp.enable(model)
assert "torch._dynamo" not in loaded()
functions = {"model": model, "amp.autocast": lambda x: in_context(x)}
def in_context(x):
    with amp.autocast():
        return torch.softmax(torch.mm(x, x.t()), 1)
x = torch.ones(8, 8)
compiled = torch.compile(functions[HOW], backend="aot_eager", fullgraph=True)(x)
assert compiled.dtype is (torch.float16 if HOW == "amp.autocast" else torch.float32)
assert torch.equal(compiled, functions[HOW](x))
""".replace("HOW", repr(how))
    )
    result = fresh_python.run(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_works_without_triton(tmp_path: Path, fresh_python: FreshPython) -> None:
    code = """
import sys
sys.modules["triton"] = None
import pkgutil, torch, tritonamp, tritonamp.kernels
for module in pkgutil.iter_modules(tritonamp.kernels.__path__, "tritonamp.kernels."):
    __import__(module.name)
for level in "O0", "O1", "O2", "O3":
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    amp = tritonamp.enable(model, optimizer, level=level)
    amp.backward(model(torch.ones(2, 8)).square().sum())
    optimizer.step()
    amp.disable()
"""
    result = fresh_python.run(code, tmp_path)
    assert result.returncode == 0, result.stderr


def test_kernels_are_the_folder_of_this_package() -> None:
    editable, wheel = ROOT / "kernels", Path(tritonamp.__file__).resolve().parent / "kernels"
    assert Path(tritonamp.kernels.__file__).resolve().parent in (editable, wheel)
