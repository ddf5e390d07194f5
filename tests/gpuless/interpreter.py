"""Triton's interpreter, mended where it is wrong and slow."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.torch_version import TorchVersion

from tritonamp.kernels.device import INTERPRETED, triton_version

_TRITON = TorchVersion(triton_version() or "0")

if INTERPRETED:
    from gpuless import shortcuts
    from triton.runtime import interpreter

FUSES = INTERPRETED and _TRITON >= "3.9"
"""Whether ``tl.fma`` rounds once, as on a GPU."""

if INTERPRETED and _TRITON < "3.7":
    # a scalar that a kernel has loaded is an array of one element there, which today's NumPy makes
    # no index of
    def _patch(tensor, scope, original=interpreter._patch_lang_tensor):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(())))

    interpreter._patch_lang_tensor = _patch


if INTERPRETED:
    # asked for each result of each operation, and makes a dictionary of all types each time
    def _numpys(dtype, known={}, ask=interpreter._get_np_dtype):  # noqa: B006
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = ask(dtype)
        return found

    interpreter._get_np_dtype = _numpys

    shortcuts.take()


@contextlib.contextmanager
def prepared_once() -> Iterator[None]:
    """Have ``triton.language`` prepared once for all launches inside.

    The interpreter does it for each launch, and for each call of a helper in a kernel: half of the
    time of small launches.
    """
    if not INTERPRETED:
        yield
        return
    prepare = interpreter._patch_lang
    prepared: dict[int, Any] = {}

    def prepare_once(function: Any) -> Any:
        names = id(function.__globals__)
        if names not in prepared:
            prepared[names] = prepare(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = prepare_once
    try:
        yield
    finally:
        interpreter._patch_lang = prepare
        for scope in reversed(prepared.values()):
            scope.restore()
