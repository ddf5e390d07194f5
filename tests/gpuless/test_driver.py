"""Whoever asks the driver of machines without a GPU hears of no device."""

import ctypes

import pytest
from gpuless import driver

pytestmark = pytest.mark.skipif(not driver.is_loaded(), reason="there is another driver, or none")
NO_DEVICE = 100


@pytest.fixture
def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")  # the one that is loaded has this name


@pytest.mark.parametrize("name", ["cuInit", "cuDriverGetVersion", "cuDeviceGet"])
def test_functions_say_that_there_is_none(library: ctypes.CDLL, name: str) -> None:
    assert getattr(library, name)(0) == NO_DEVICE


def test_there_are_none(library: ctypes.CDLL) -> None:
    count = ctypes.c_int(-1)
    assert (library.cuDeviceGetCount(ctypes.byref(count)), count.value) == (NO_DEVICE, 0)


@pytest.mark.parametrize("entry", ["cuGetProcAddress", "cuGetProcAddress_v2"])
def test_functions_that_are_looked_up(library: ctypes.CDLL, entry: str) -> None:
    function, status, numbers = (
        ctypes.c_void_p(),
        ctypes.c_int(-1),
        [ctypes.c_int(-1) for _ in "ab"],
    )
    given = ctypes.byref(function), 13000, ctypes.c_uint64(0)
    rest = (ctypes.byref(status),) if entry.endswith("_v2") else ()
    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    pointers = [ctypes.addressof(number) for number in numbers]
    for name, answer in ("cuMemAlloc_v2", NO_DEVICE), ("cuDevicePrimaryCtxGetState", 0):
        assert getattr(library, entry)(name.encode(), *given, *rest) == 0
        assert call(function.value)(0, *pointers) == answer
    assert [number.value for number in numbers] == [0, 0]  # no flags, no context
    assert status.value == (0 if rest else -1)


def test_numba_finds_no_gpu() -> None:
    cuda = pytest.importorskip("numba.cuda")
    assert not cuda.is_available()


def test_nvidias_own_bindings_find_no_gpu() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    assert bindings.cuInit(0) == (bindings.CUresult.CUDA_ERROR_NO_DEVICE,)
