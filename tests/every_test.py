"""Fixtures of every test: fixed seeds, all devices, and no state left behind in torch."""

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fresh_python import FreshPython
from gpuless import driver

if not torch.cuda.is_available():
    # Without a GPU the kernels run in Triton's interpreter; triton.jit asks for it where a kernel
    # is defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch._dynamo  # here, and not in the first enable: see pytest_collection_finish
import torch.distributed as dist
from gpuless.fake_cuda import FakeCuda, in_software, interpreted
from gpuless.interpreter import prepared_once
from gpuless.real_cuda import AnyCuda, in_a_stream
from two_ranks import Pair

import tritonamp
from tritonamp.casts import dispatch
from tritonamp.kernels import _facts, _multi_tensor, _native

HAS_GPU = torch.cuda.is_available()  # a real one: that in software comes and goes

if not HAS_GPU:
    # Without this, torch records the stack at each seed for absent devices. That takes half a
    # millisecond, and most tests seed several times.
    def _if_in_software(call: Callable[[], object], **kwargs: Any) -> None:
        if torch.cuda.is_initialized():
            call()

    torch.cuda.random._lazy_call = _if_in_software
    for _module in (torch.xpu.random, torch.mtia):
        _module._lazy_call = lambda call, **kwargs: None

# Tensors are small and a process of the tests has each core: threads would only wait for one
# another. The variable is for the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the ``device`` of a test that says nothing else each device there is."""
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "device" in metafunc.fixturenames and "device" not in named:
        devices = ["cpu", "cuda"] if HAS_GPU else ["cpu"]
        if metafunc.config.option.fake_cuda or metafunc.config.option.cuda:
            devices = ["cuda"]
        metafunc.parametrize("device", devices, indirect=True)


GPU_FIXTURES = "gpu", "cuda", "device"
"""Fixtures of tests that run on a GPU, those that only a GPU can answer first."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that ask for a device; on a real one the READMEs run, too, as the last."""
    if config.option.fake_cuda or config.option.cuda:
        asked = *GPU_FIXTURES, "on_this_machine" if config.option.cuda else "fake_cuda"
        takes = {item: [name in item.fixturenames for name in asked] for item in items}
        config.hook.pytest_deselected(items=[item for item in items if not any(takes[item])])
        items[:] = [item for item in items if any(takes[item])]
        if config.option.cuda:
            items.sort(key=lambda item: takes[item].index(True))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze all imported objects, because garbage collections would mostly walk these."""
    gc.collect()
    gc.freeze()
    gc.enable()
    _capture_warnings_alone(session.config)


def _capture_warnings_alone(config: pytest.Config) -> None:
    """Make pytest capture no log lines below WARNING, because torch.compile traces at DEBUG.

    pytest's own option would also set the level of the root logger. Then logging clears the caches
    of hundreds of loggers, twelve times for each test.
    """
    plugin = config.pluginmanager.get_plugin("logging-plugin")
    if plugin is not None:
        for handler in (plugin.caplog_handler, plugin.report_handler):
            handler.setLevel(logging.WARNING)


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def _collect_garbage() -> None:
    """Collect garbage, and keep out of later collections what has grown too much to walk again.

    That is what tests have imported: with torch's own samples of its ops half a second's worth.
    """
    before = time.process_time()
    gc.collect()
    if time.process_time() - before > 0.05:
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Skip what a GPU of compute capability 7 is refused: bfloat16."""
    try:
        return (yield)
    except tritonamp.UnsupportedDeviceError as error:
        if not HAS_GPU or torch.cuda.get_device_capability() >= (8, 0):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> Iterator[None]:
    with prepared_once():
        yield


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return request.getfixturevalue("cuda") if request.param == "cuda" else torch.device("cpu")


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> torch.device:
    """A GPU, in software where there is none."""
    if not HAS_GPU:
        request.getfixturevalue("fake_cuda")
    return torch.device("cuda", 0)  # as tensors say


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[AnyCuda]:
    """A GPU that records waits and launches; in software if there is no real one."""
    if not HAS_GPU:
        yield request.getfixturevalue("fake_cuda")
        return
    with in_a_stream() as real:
        yield real


@pytest.fixture(scope="session")
def fresh_python() -> Iterator[FreshPython]:
    """Runs programs that say what importing does."""
    python = FreshPython()
    yield python
    python.close()


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Ranks, which run the file of the test: two, or as many as its ``RANKS`` says."""
    number = getattr(request.module, "RANKS", 2)
    pair = Pair(tmp_path_factory.mktemp("ranks"), str(request.path), number)
    yield pair
    pair.stop()


@pytest.fixture
def handles() -> Iterator[Callable[..., Any]]:
    """``tritonamp.enable``, undone at the end."""
    made: list[Any] = []

    def enable(*args: Any, **kwargs: Any) -> Any:
        made.append(tritonamp.enable(*args, **kwargs))
        return made[-1]

    yield enable
    for amp in made:
        if amp._enabled:
            amp.disable()


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps keep their plans, with ``TRITONAMP_PLAIN_STEPS=1`` in the environment, too."""
    monkeypatch.setattr(_multi_tensor, "PLAIN_STEPS", False)
    monkeypatch.setattr(_facts, "PLAIN_STEPS", False)
    # a step may switch to C++; the next test begins as this one
    monkeypatch.setattr(_facts, "_native", _facts._native)


@pytest.fixture(scope="session", autouse=True)
def built_cpp() -> None:
    """Build the C++, which takes seconds, before it counts as the time of a test."""
    if not _native.PLAIN_STEPS:
        _native.build()


@pytest.fixture
def cpp(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module built from C++, which ``_facts`` and ``Steady`` then ask."""
    module = _native.build().module
    if module is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(_facts, "_native", module)
    return module


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> bool:
    """Whether kernels on a GPU are compiled: each contracts products and sums in its own way."""
    return not driver.is_loaded() or request.config.option.fake_cuda == "ptx"


@pytest.fixture
def fake_cuda(request: pytest.FixtureRequest) -> Iterator[FakeCuda]:
    """A GPU in software, which sees what the host does to it."""
    if obstacle := driver.obstacle():
        pytest.skip(obstacle)
    if request.node.get_closest_marker("compiled"):
        pytest.skip("torch.compile would look through the tensors of the GPU in software")
    kernels = interpreted
    if request.config.option.fake_cuda == "ptx":
        from gpuless.ptx.session import on_the_gpu

        kernels = on_the_gpu(request.config)
    with in_software(kernels) as gpu:
        yield gpu


def _made_for_ranks() -> set[str]:
    """Return the variables of a launcher, such as torchrun's, and whether there is a group."""
    found = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & os.environ.keys()
    if dist.is_available() and dist.is_initialized():
        found.add("a process group")
    return found


@pytest.fixture(autouse=True)
def _seeds_and_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    for name in {*GPU_FIXTURES, "fake_cuda"} & set(request.fixturenames):
        request.getfixturevalue(name)  # first: what other fixtures hold on it ends before it does
    registered_before, for_ranks_before = dispatch.is_registered(), _made_for_ranks()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
    left = _made_for_ranks() - for_ranks_before
    assert not left, f"this test left {sorted(left)} behind: later ones would train as a rank"
    if (
        dispatch.is_registered() and not registered_before
    ):  # only the test that leaked fails, not all after it
        _collect_garbage()  # an enabled model in a reference cycle is not a leak
        assert not dispatch.is_registered(), (
            "this test left an enabled model behind: call amp.disable()"
        )
