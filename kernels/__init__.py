"""Kernels of tritonamp: one operation in a file, each with its eager twin.

Installed as ``tritonamp.kernels``. From the root of a checkout, Python also finds this folder as
``kernels``, which is the name of a package of Hugging Face that transformers looks for.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

_MISTAKEN = (
    "the folder kernels/ of this checkout is the package 'tritonamp.kernels': "
    "install the project (pip install -e .) and import tritonamp.kernels"
)


def _give_way() -> None:
    """Replace this module by the next ``kernels`` on ``sys.path``.

    If there is none, this module becomes an empty package. It raises no ImportError, because
    transformers (5.23) imports every module that ``find_spec`` finds without catching that error,
    and treats a module without ``__version__`` and ``__file__`` as not installed.
    """
    checkout = Path(__file__).resolve().parents[1]
    elsewhere = [path for path in sys.path if Path(path).resolve() != checkout]
    # the checkout is left out, or the search would find this folder again
    spec = PathFinder.find_spec("kernels", elsewhere)
    if spec is not None and spec.loader is not None and spec.origin is not None:
        module = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        globals().update(__path__=[], __getattr__=_missing)
        del globals()["__file__"]


def _missing(name: str) -> NoReturn:
    """Raise AttributeError for every attribute of the empty package."""
    raise AttributeError(f"module 'kernels' has no attribute {name!r}: {_MISTAKEN}")


if __name__ == "kernels":
    _give_way()
elif __name__ != "tritonamp.kernels":
    raise ImportError(f"imported as {__name__!r}: {_MISTAKEN}")
