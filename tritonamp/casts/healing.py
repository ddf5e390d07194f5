"""Modules that compute in FP32, or have FP32 results: after a fault, or in a block as a trial."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tritonamp.casts.context import EnabledContext
from tritonamp.casts.enabled_module import (
    EnabledModule,
    Fp32Module,
    Fp32ResultsModule,
    NormModule,
)
from tritonamp.casts.model_dtypes import ModelDtypes
from tritonamp.casts.selection import with_forward
from tritonamp.class_swap import install, is_installed, uninstall
from tritonamp.kernels.device import check_dtype
from tritonamp.names import listed_modules, meant_module, prefixes
from tritonamp.policy import Policy, resolve


class Healing:
    """Gives modules a wider precision: for good after a fault, or inside a block as a trial.

    There are two tiers. FP32 results: products of half operands in the module have FP32 results,
    and its parameters stay half. FP32: the module computes in FP32, its parameters included.

    Args:
        models: enabled models.
        policy: policy of the models.
        context: context of the models.
        model_dtypes: dtypes of the models' tensors.
        rebuild: function called with the modules in FP32 after each change of these, because
            gradients of other dtypes need other buckets.

    Attributes:
        policy: policy with the healed modules in ``fp32_modules`` and ``fp32_results``.
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
        self._healed: dict[str, bool] = {}  # by name: whether its tier is FP32 results
        self.policy = policy
        self.decides = True

    @property
    def names(self) -> list[str]:
        """Names of the healed modules of both tiers; "" is the model."""
        return [*self._healed]

    @property
    def tiers(self) -> dict[str, bool]:
        """Whether the tier of a healed module is FP32 results, by name; "" is the model."""
        return {**self._healed}

    @property
    def in_full(self) -> list[str]:
        """Names of the healed modules that compute in FP32; "" is the model."""
        return [name for name, results in self._healed.items() if not results]

    @property
    def with_results(self) -> list[str]:
        """Names of the healed modules that have FP32 results."""
        return [name for name, results in self._healed.items() if results]

    def heal(self, name: str, results: bool = False) -> None:
        """Make the module of that name compute in FP32 from now on, its parameters included.

        Args:
            name: name of the module; "" is the model.
            results: True: only products in the module have FP32 results, and parameters stay half.

        Raises:
            ValueError: there is no such module, nothing is computed in half, or the policy has no
                FP32 results.
        """
        if isinstance(self.find(name), EnabledModule) and results:
            raise ValueError(
                f"module: expected one inside of a model for FP32 results, got {name!r}"
            )
        self._set_healed({**self._healed, name: results})

    def unheal(self, name: str) -> None:
        """Make a healed module of either tier follow the policy again.

        Raises:
            ValueError: the module was not healed.
        """
        if name not in self._healed:
            raise ValueError(f"module: expected one that is healed, {self.names}, got {name!r}")
        self._set_healed({n: tier for n, tier in self._healed.items() if n != name})

    def load(self, names: Sequence[str], with_results: Sequence[str] = ()) -> None:
        """Make the modules of these names healed, and no others.

        Under a policy that computes nothing in half, no module is healed. Without an op policy no
        module has FP32 results.

        Args:
            names: names of modules that compute in FP32.
            with_results: names of modules with FP32 results.

        Raises:
            ValueError: there is no such module; nothing was changed then.
        """
        if not (self._policy.cast_model or self._policy.op_policy):
            names = []
        if not self._policy.op_policy:
            with_results = []
        healed = {**dict.fromkeys(with_results, True), **dict.fromkeys(names, False)}
        for name in healed:
            self.find(name)
        if healed != self._healed:
            self._set_healed(healed)

    def _set_healed(self, healed: Mapping[str, bool]) -> None:
        """Make the modules of these names, and no others, healed.

        Args:
            healed: name of a module to its tier; True: FP32 results, False: FP32.
        """
        names = [name for name, results in healed.items() if not results]
        policy = self._policy_with(names, [n for n, results in healed.items() if results])
        before = self.in_full
        for name in before:
            if name not in names:
                self._model_dtypes.unwiden(self.find(name))
        self.policy, self._healed = policy, dict(healed)
        self._undo.close()
        self._have_fp32_results()
        in_fp32 = [self.find(name) for name in names]
        # models last: they take the classes off modules inside, healed ones, too
        for module in sorted(in_fp32, key=lambda m: isinstance(m, EnabledModule)):
            self._model_dtypes.widen(module)  # again, where a module around it was unhealed
            self._undo.callback(self._compute_in_fp32(module))
        if names != before:
            self._rebuild(in_fp32)  # once: every rank does it as often

    def _policy_with(self, names: Sequence[str], with_results: Sequence[str]) -> Policy:
        """Return the policy with further modules in FP32, and others with FP32 results."""
        # ``Policy.fp32_modules`` names no whole model
        inside = (name for name in names if self.find(name) not in self._models)
        modules = dict.fromkeys((*self._policy.fp32_modules, *inside))
        # a module that needs FP32 has no use for FP32 results
        asked = (m for m in self._policy.fp32_results if m not in names)
        results = dict.fromkeys((*asked, *with_results))
        return dataclasses.replace(
            self._policy, fp32_modules=tuple(modules), fp32_results=tuple(results)
        )

    def _have_fp32_results(self) -> None:
        """Give the healed modules of that tier FP32 results, until ``_undo`` is closed."""
        names = dict.fromkeys((*self._policy.fp32_results, *self.with_results))
        policy = dataclasses.replace(self._policy, fp32_results=tuple(names))
        if policy != self._context.policy:
            self._context.policy = policy
            self._context.move(self._context.device_type)
        for name in self.with_results:
            self._undo.callback(self._give_fp32_results(self.find(name)))

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
        if not isinstance(name, str):
            of_it = [f": write {each!r}" for each, module in found.items() if module is name]
            raise ValueError(
                f"module: expected a name, got {type(name).__name__}{''.join(of_it[:1])}"
            )
        if name not in found:
            known, meant = listed_modules([*map(repr, found)]), meant_module(name, found)
            raise ValueError(f"module: expected one of the model's, {known}, got {name!r}{meant}")
        return found[name]

    def parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        """Return the parameters of the modules of these names, each once."""
        found = (p for name in names for p in self.find(name).parameters())
        return [*dict.fromkeys(found)]

    @contextlib.contextmanager
    def in_fp32(
        self, names: Sequence[str] | None = None, with_results: Sequence[str] = ()
    ) -> Iterator[None]:
        """Make modules compute in FP32 inside the block. They get their own tensors back.

        Args:
            names: names of the modules; None: everything computes in FP32.
            with_results: names of modules that have FP32 results inside the block.

        Raises:
            ValueError: the policy has no FP32 results, and ``with_results`` names a module.
        """
        modules = self._models if names is None else [self.find(name) for name in names]
        with contextlib.ExitStack() as stack:
            if with_results:
                more = dict.fromkeys((*self._context.policy.fp32_results, *with_results))
                policy = dataclasses.replace(self._context.policy, fp32_results=tuple(more))
                stack.enter_context(self._context.under(policy))
            for name in with_results:
                stack.callback(self._give_fp32_results(self.find(name)))
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

    def _give_fp32_results(self, module: nn.Module) -> Callable[[], None]:
        """Make products of a module have FP32 results. Return a function that undoes this."""
        with contextlib.ExitStack() as undo:
            for part in with_forward(module):
                if not is_installed(part):
                    install(part, Fp32ResultsModule, self._context)
                    undo.callback(uninstall, part)
            return undo.pop_all().close

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
                written = isinstance(part, NormModule) and self._context.policy.op_policy
                if written or isinstance(part, Fp32ResultsModule):
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
