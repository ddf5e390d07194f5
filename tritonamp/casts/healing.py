"""Modules of an enabled model that compute in FP32: after a fault, or in a block as a trial."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from tritonamp.casts.context import EnabledContext
from tritonamp.casts.enabled_module import EnabledModule, Fp32Module, NormModule
from tritonamp.casts.model import with_forward
from tritonamp.casts.model_dtypes import ModelDtypes
from tritonamp.class_swap import install, is_installed, uninstall
from tritonamp.kernels.device import check_dtype
from tritonamp.names import prefixes
from tritonamp.policy import Policy, resolve


class Healing:
    """Makes modules compute in FP32: for good after a fault, or inside a block as a trial.

    Args:
        models: enabled models.
        policy: policy of the models.
        context: context of the models.
        model_dtypes: dtypes of the models' tensors.
        rebuild: function called with the healed modules after each change, because gradients of
            other dtypes need other buckets.

    Attributes:
        names: names of the healed modules; "" is the model.
        policy: policy with the healed modules in ``fp32_modules``.
        decides: whether the policy alone decides in which precision the models compute. Where
            others cast, too, as under apex's O1, another precision cannot be tried.
    """

    def __init__(
        self,
        models: list[nn.Module],
        policy: Policy,
        context: EnabledContext,
        model_dtypes: ModelDtypes,
        rebuild: Callable[[Sequence[nn.Module]], None],
    ) -> None:
        self._models = models
        self._policy = policy
        self._context = context
        self._model_dtypes = model_dtypes
        self._rebuild = rebuild
        self._undo = contextlib.ExitStack()  # makes healed modules compute as before
        self.names: list[str] = []
        self.policy = policy
        self.decides = True

    def heal(self, name: str) -> None:
        """Make the module of that name compute in FP32 from now on, its parameters included.

        Raises:
            ValueError: there is no such module, or nothing is computed in half.
        """
        self.find(name)
        self._set_healed([*self.names, name])

    def unheal(self, name: str) -> None:
        """Make a healed module follow the policy again.

        Raises:
            ValueError: the module was not healed.
        """
        if name not in self.names:
            raise ValueError(f"module: expected one that is healed, {self.names}, got {name!r}")
        self._set_healed([other for other in self.names if other != name])

    def load(self, names: Sequence[str]) -> None:
        """Make the modules of these names compute in FP32, and no others.

        Under a policy that computes nothing in half, no module is healed.

        Raises:
            ValueError: there is no such module; nothing was changed then.
        """
        if not (self._policy.cast_model or self._policy.op_policy):
            names = []
        for name in names:
            self.find(name)
        if list(names) != self.names:
            self._set_healed(names)

    def _set_healed(self, names: Sequence[str]) -> None:
        """Make the modules of these names, and no others, compute in FP32."""
        modules = dict.fromkeys((*self._policy.fp32_modules, *filter(None, names)))
        # first, because it may raise
        policy = dataclasses.replace(self._policy, fp32_modules=tuple(modules))
        for name in self.names:
            if name not in names:
                self._model_dtypes.unwiden(self.find(name))
        self.policy, self.names = policy, list(dict.fromkeys(names))
        self._undo.close()
        healed = [self.find(name) for name in self.names]
        # models last: they take the classes off modules inside, healed ones, too
        for module in sorted(healed, key=lambda m: isinstance(m, EnabledModule)):
            self._model_dtypes.widen(module)  # again, where a module around it was unhealed
            self._undo.callback(self._compute_in_fp32(module))
        self._rebuild(healed)  # once: every rank does it as often

    def find(self, name: str) -> nn.Module:
        """Return the module of that name.

        Raises:
            ValueError: there is no such module.
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

    @contextlib.contextmanager
    def in_fp32(self, names: Sequence[str] | None = None) -> Iterator[None]:
        """Make modules compute in FP32 inside the block. They get their own tensors back.

        Args:
            names: names of the modules; None: everything computes in FP32.
        """
        modules = self._models if names is None else [self.find(name) for name in names]
        with contextlib.ExitStack() as stack:
            self._widen_for(modules, stack)
            if names is None:  # else FP32 modules inside would make half outputs at O3
                policy = resolve("O1", self._context.policy.dtype)
                stack.enter_context(self._context.under(policy))
            for module in modules:
                stack.callback(self._compute_in_fp32(module))
            yield

    @contextlib.contextmanager
    def in_bfloat16(self) -> Iterator[None]:
        """Make the models compute in bfloat16 inside the block, on FP32 weights.

        Raises:
            UnsupportedDeviceError: the device does not compute in bfloat16.
        """
        for model in self._models:
            for device in {p.device for p in model.parameters()}:
                check_dtype(torch.bfloat16, device)
        with contextlib.ExitStack() as stack:
            self._widen_for(self._models, stack)
            stack.enter_context(self._context.under(resolve("O1", torch.bfloat16)))
            yield

    @contextlib.contextmanager
    def in_fp32_softmax(self) -> Iterator[None]:
        """Make softmax return FP32 inside the block, as ``softmax_dtype=torch.float32`` does."""
        policy = dataclasses.replace(self._context.policy, softmax_dtype=torch.float32)
        with self._context.under(policy):
            yield

    @contextlib.contextmanager
    def with_inputs_uncast(self, names: Sequence[str]) -> Iterator[None]:
        """Cast no inputs of the models, and compute the named modules in FP32, inside the block."""
        policy = dataclasses.replace(self._context.policy, cast_inputs=False)
        with self._context.under(policy), self.in_fp32(names):
            yield

    def _widen_for(self, modules: Sequence[nn.Module], stack: contextlib.ExitStack) -> None:
        """Give modules FP32 tensors until the stack is closed."""
        for module in modules:
            stack.enter_context(self._model_dtypes.widened(module, self._models))

    def _compute_in_fp32(self, module: nn.Module) -> Callable[[], None]:
        """Make the forward of a module compute in FP32. Return a function that undoes this."""
        with contextlib.ExitStack() as undo:
            if isinstance(module, EnabledModule):
                undo.callback(setattr, module, "_tritonamp_fp32", module._tritonamp_fp32)
                module._tritonamp_fp32 = True
                # at O3 they would give half to the modules after them, which are FP32 now
                inside = [m for m in module.modules() if isinstance(m, (Fp32Module, NormModule))]
                for inner in inside:
                    undo.callback(_taken_off(inner))
                return undo.pop_all().close
            for part in with_forward(module):
                # without an op table written norms compute in FP32 already
                if isinstance(part, NormModule) and self._context.policy.op_policy:
                    undo.callback(_taken_off(part))
                if not is_installed(part):
                    install(part, Fp32Module, self._context)
                    undo.callback(uninstall, part)
            return undo.pop_all().close


def _taken_off(module: Any) -> Callable[[], None]:
    """Take the generated class off a module. Return a function that restores the class."""
    kind: Any = type(module).__bases__[0]
    belongings = [vars(module)[name] for name in kind._belongings]
    uninstall(module)
    return functools.partial(install, module, kind, *belongings)
