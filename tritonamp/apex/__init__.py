"""Drop-in for NVIDIA apex: ``from tritonamp.apex import amp`` migrates an old script.

Levels, masters, loss scales and skipped steps are tritonamp's own. This package adds apex's names
and arguments. It also adds apex's lists of functions, which level O1 runs in half or in FP32
everywhere in the process.
"""

import importlib
import pkgutil
import sys
from typing import Any

_PARTS = [module.name for module in pkgutil.iter_modules(__path__)]


def __getattr__(name: str) -> Any:
    """Parts are imported when they are first asked for."""
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}: it has {', '.join(_PARTS)}"
    )


def install() -> None:
    """Make ``import apex`` in this process import this package, for scripts that cannot be edited.

    Call it before anything imports apex. ``import amp_C`` and ``import apex_C`` then also work. A
    folder named apex without an ``__init__.py``, such as a clone next to the script, does not count
    as apex.

    Raises:
        RuntimeError: another apex is already imported.
    """
    package = sys.modules[__name__]
    other = sys.modules.get("apex", package)
    if other is not package and other.__file__ is not None:
        raise RuntimeError(
            f"tritonamp.apex.install(): apex is imported already, from {other.__file__}: call "
            "install() before the first import of apex, or replace `apex` by `tritonamp.apex` in "
            "the script"
        )
    for part in pkgutil.walk_packages(package.__path__, f"{__name__}."):
        sys.modules[part.name.removeprefix("tritonamp.")] = importlib.import_module(part.name)
    sys.modules["apex"] = package
    for extension in ("amp_C", "apex_C"):
        sys.modules[extension] = importlib.import_module(f"{__name__}.{extension}")
