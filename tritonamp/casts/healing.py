"""Modules of an enabled model that compute in FP32 since a fault."""

import dataclasses
from collections.abc import Sequence

from torch import nn

from tritonamp.casts.context import EnabledContext
from tritonamp.casts.enabled_module import EnabledModule, Fp32Module
from tritonamp.casts.model_dtypes import ModelDtypes
from tritonamp.class_swap import install, is_installed, uninstall
from tritonamp.names import prefixes
from tritonamp.policy import Policy


class Healing:
    """The modules that compute in FP32 since a fault, and the policy with them.

    Attributes:
        names: of the modules; "" is the model.
        policy: the policy with them in ``fp32_modules``.
    """

    def __init__(
        self,
        models: list[nn.Module],
        policy: Policy,
        context: EnabledContext,
        model_dtypes: ModelDtypes,
    ) -> None:
        self._models = models
        self._policy = policy
        self._context = context
        self._model_dtypes = model_dtypes
        self.names: list[str] = []
        self.policy = policy

    def heal(self, name: str) -> None:
        """Have the module of that name compute in FP32 from now on, its parameters included.

        Raises:
            ValueError: there is no such module, or nothing is computed in half.
        """
        module = self.find(name)
        if name not in self.names:
            self._set_names([*self.names, name])
        self._model_dtypes.widen(module)
        if isinstance(module, EnabledModule):
            module._tritonamp_fp32 = True
        elif not is_installed(module):
            install(module, Fp32Module, self._context)

    def unheal(self, name: str) -> None:
        """Have a healed module follow the policy again.

        Raises:
            ValueError: it was not healed.
        """
        if name not in self.names:
            raise ValueError(f"module: expected one that is healed, {self.names}, got {name!r}")
        module = self.find(name)
        self._model_dtypes.unwiden(module)
        if isinstance(module, EnabledModule):
            module._tritonamp_fp32 = False
        elif isinstance(module, Fp32Module):
            uninstall(module)
        self._set_names([other for other in self.names if other != name])
        for other in self.names:  # it may hold this one, or be inside
            self._model_dtypes.widen(self.find(other))

    def load(self, names: Sequence[str]) -> None:
        """Have these modules compute in FP32 and no others.

        None where the policy computes nothing in half.

        Raises:
            ValueError: there is no such module; nothing was changed then.
        """
        if not (self._policy.cast_model or self._policy.op_policy):
            names = []
        for name in names:
            self.find(name)
        for name in [name for name in self.names if name not in names]:
            self.unheal(name)
        for name in names:
            self.heal(name)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of these names."""
        return [self.find(name) for name in self.names]

    def _set_names(self, names: list[str]) -> None:
        modules = (*self._policy.fp32_modules, *filter(None, names))
        self.policy = dataclasses.replace(self._policy, fp32_modules=tuple(dict.fromkeys(modules)))
        self.names = names

    def find(self, name: str) -> nn.Module:
        """Return the module of that name.

        Raises:
            ValueError: there is none.
        """
        found: dict[str, nn.Module] = {}
        for prefix, model in zip(prefixes(self._models), self._models, strict=True):
            found |= {
                (prefix + inner).rstrip("."): m
                for inner, m in model.named_modules(remove_duplicate=False)
            }
        if name not in found:
            known = ", ".join(map(repr, list(found)[:20]))
            raise ValueError(f"module: expected one of the model's, {known}, got {name!r}")
        return found[name]
