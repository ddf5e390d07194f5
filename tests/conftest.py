"""What runs (covering.py, client_libraries.py), for how long (budget.py), on what (gpuless/,
on_a_gpu.py), where results go (lines.py), and what every test gets (every_test.py).
"""

import gc
import importlib
import os

import pytest
from gpuless import driver

pytest_plugins = ["client_libraries", "covering", "budget", "lines", "on_a_gpu"]

# OpenMP's threads wait without spinning: those of a test with several took 80 times its CPU time
# where others had the cores. OpenMP reads this once, where torch is imported.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# a width that the caller exports would break lines that tests look for
os.environ.pop("COLUMNS", None)
driver.load()  # here, because other conftest.py files import torch


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    add, here = parser.addoption, "see tests/gpuless/README.md"
    add(
        "--fake-cuda",
        action="store_const",
        const="interpreter",
        help=f"run the tests that take a device on a GPU in software, {here}",
    )
    # an option of its own: an optional value would swallow the path that follows
    add(
        "--fake-cuda=ptx",
        action="store_const",
        const="ptx",
        dest="fake_cuda",
        help=f"the same with kernels compiled, as emulated PTX, {here}",
    )
    add("--arch", type=int, default=90, help="architecture of that PTX, like 75, 80 or 90")
    orders = ["lockstep", "up", "down", "random"]
    add("--schedule", default=orders[0], choices=orders, help="in which order its warps run")
    add("--jitter", type=int, default=0, help="ulps by which its approximations are off")
    # other conftest.py files import kernels, and these look into the environment
    if "--fake-cuda=ptx" in pluginmanager.get_plugin("pytestconfig").invocation_params.args:
        os.environ["TRITON_INTERPRET"] = "0"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse ``--cuda`` without a GPU before processes are started."""
    if config.option.cuda and not importlib.import_module("torch").cuda.is_available():
        raise pytest.UsageError("--cuda: torch finds no GPU; --fake-cuda needs none")


def pytest_collection(session: pytest.Session) -> None:
    """Register what every test gets, which imports torch, where tests are collected.

    The process that starts the others does not collect, and they would wait for it to import torch.
    Imported and collected objects stay, so a garbage collection would walk them in vain.
    """
    gc.disable()
    session.config.pluginmanager.register(importlib.import_module("every_test"))
