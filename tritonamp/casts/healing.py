"""Modules of an enabled model that compute in FP32 since a fault."""

import dataclasses
from collections.abc import Sequence

from torch import Tensor, nn

from tritonamp import class_swap
from tritonamp.casts.enabled_module import EnabledContext, EnabledModule, Fp32Module
from tritonamp.casts.model import flatten_rnns, set_data
from tritonamp.policy import HALF_DTYPES, Policy


class Healing:
    """Which they are.

    Attributes:
        names: of the modules; "" is the model.
        policy: the policy with them in ``fp32_modules``.
    """

    def __init__(self, models: list[nn.Module], policy: Policy, context: EnabledContext) -> None:
        self._models, self._policy, self._context = models, policy, context
        self.names: list[str] = []
        self.policy = policy

    def heal(self, name: str) -> None:
        """The module of that name computes in FP32 from now on, its parameters included.

        Raises:
            ValueError: there is no such module, or nothing is computed in half.
        """
        module, values = self._find(name), self._context.fp32_values
        self._name([*self.names, *[name] * (name not in self.names)])
        for tensor in _tensors(module):
            if tensor.dtype in HALF_DTYPES and tensor in values:
                set_data(tensor, values.get(tensor).detach().to(tensor.device, copy=True))
        flatten_rnns(module)
        if isinstance(module, EnabledModule):
            module._tritonamp_fp32 = True
        elif not class_swap.is_installed(module):
            class_swap.install(module, Fp32Module, self._context)

    def unheal(self, name: str) -> None:
        """The reverse.

        Raises:
            ValueError: it was not healed.
        """
        if name not in self.names:
            raise ValueError(f"got {name!r}, healed are {self.names}")
        module, values = self._find(name), self._context.fp32_values
        for tensor in _tensors(module):
            if tensor in values:
                set_data(tensor, values.get(tensor).detach().to(tensor.device, self._policy.dtype))
        flatten_rnns(module)
        if isinstance(module, EnabledModule):
            module._tritonamp_fp32 = False
        elif class_swap.is_installed(module):
            class_swap.uninstall(module)
        self._name([other for other in self.names if other != name])

    def load(self, names: Sequence[str]) -> None:
        """These and no others; none where the policy computes nothing in half.

        Raises:
            ValueError: there is no such module; nothing was changed then.
        """
        if not (self._policy.cast_model or self._policy.op_policy):
            names = []
        for name in names:
            self._find(name)
        for name in [name for name in self.names if name not in names]:
            self.unheal(name)
        for name in names:
            self.heal(name)

    def _name(self, names: list[str]) -> None:
        modules = (*self._policy.fp32_modules, *filter(None, names))
        self.policy = dataclasses.replace(self._policy, fp32_modules=tuple(dict.fromkeys(modules)))
        self.names = names

    def _find(self, name: str) -> nn.Module:
        found: dict[str, nn.Module] = {}
        for i, model in enumerate(self._models):
            front = f"{i}." if len(self._models) > 1 else ""
            found |= {
                (front + inner).rstrip("."): m
                for inner, m in model.named_modules(remove_duplicate=False)
            }
        if name not in found:
            known = ", ".join(map(repr, list(found)[:20]))
            raise ValueError(f"got the module name {name!r}; the model's modules are {known}")
        return found[name]


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
