"""Module names that pickles of earlier versions hold, and what stands behind them today.

A pickle names each class by module and name, so a class that moves would take its pickles with it.
Modules that are gone get a stand-in in ``sys.modules`` with the few names that pickles refer to
(``torch.save(model)`` of an enabled model, ``pickle.dumps`` of an enabled optimizer or of
``amp.history``) and that the ``replay.py`` of a bundle imports. A class that moves again: change
its import here. A class whose constructor changes: a function like ``_context``.
"""

import sys
from types import ModuleType
from typing import Any

from tritonamp.casts.context import EnabledContext
from tritonamp.casts.enabled_module import EnabledModule, Fp32Module
from tritonamp.class_swap import new as new_swapped
from tritonamp.diagnosis import replay
from tritonamp.diagnosis.log import NonFiniteError
from tritonamp.diagnosis.records import StepRecord
from tritonamp.distributed.ddp import EnabledDDP
from tritonamp.distributed.ranks import Ranks
from tritonamp.fp32_values import Fp32Values
from tritonamp.policy import Policy
from tritonamp.step.enabled_optimizer import EnabledOptimizer


class _NoValues:
    """The FP32 values of a copy as pickles have them: always empty, in attributes of that time."""


def _context(policy: Policy, backend: str, device_type: str, values: _NoValues) -> EnabledContext:
    """Rebuild what an enabled module knows."""
    return EnabledContext(policy, backend, device_type, Fp32Values())


def _ranks(models: tuple[()], values: _NoValues) -> Ranks:
    """Rebuild what a DDP around an enabled model knows: a copy decides alone."""
    return Ranks(models, Fp32Values())


_REPLAY = ("NOT_REPRODUCED", "find_fault", "load_bundle")
_MODULES: dict[str, dict[str, Any]] = {
    "tritonamp.installing": {
        "EnabledModule": EnabledModule,
        "EnabledOptimizer": EnabledOptimizer,
        "EnabledWrapper": EnabledDDP,
        "Fp32Module": Fp32Module,
        "Precision": _context,
        "_new": new_swapped,
    },
    "tritonamp.masters": {"PreciseValues": _NoValues},
    "tritonamp.ranks": {"Ranks": _ranks},
    "tritonamp.diagnostics": {"NonFiniteError": NonFiniteError, "StepRecord": StepRecord},
    "tritonamp.replay": {name: getattr(replay, name) for name in _REPLAY},
    "tritonamp.replay.faults": {"Fault": replay.FaultReport},
}


def register() -> None:
    """Put the stand-ins into ``sys.modules``."""
    for name, names in _MODULES.items():
        text = "A stand-in for a module that is gone: see tritonamp.old_pickles."
        module = ModuleType(name, text)
        vars(module).update(names)
        sys.modules[name] = module
