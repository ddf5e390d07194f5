"""Enabled models for a moment under another policy: would it have helped?"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from tritonamp.casts.context import EnabledContext
from tritonamp.casts.enabled_module import EnabledModule, Fp32Module
from tritonamp.casts.model_dtypes import ModelDtypes
from tritonamp.class_swap import install, is_installed, uninstall
from tritonamp.kernels.device import check_dtype
from tritonamp.policy import resolve


class Trials:
    """Blocks in which modules compute otherwise; they have their own tensors again afterwards.

    Args:
        models: the enabled ones.
        context: of them.
        model_dtypes: of their tensors.
        find: gives the module of a name.
        inputs_in_fp32: gives a block in which modules are called with FP32 where FSDP2 casts.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        context: EnabledContext,
        model_dtypes: ModelDtypes,
        find: Callable[[str], nn.Module],
        inputs_in_fp32: Callable[[Sequence[nn.Module]], AbstractContextManager[None]],
    ) -> None:
        self._models = models
        self._context = context
        self._model_dtypes = model_dtypes
        self._find = find
        self._inputs_in_fp32 = inputs_in_fp32

    @contextlib.contextmanager
    def in_fp32(self, names: Sequence[str] | None = None) -> Iterator[None]:
        """Have modules of these names compute in FP32 inside the block; None: everything."""
        modules = self._models if names is None else [self._find(name) for name in names]
        with contextlib.ExitStack() as stack:
            self._widen(modules, stack)
            if names is None:  # else FP32 modules inside would make half outputs at O3
                policy = resolve("O1", self._context.policy.dtype)
                stack.enter_context(self._context.under(policy))
            for module in modules:
                if isinstance(module, EnabledModule):
                    stack.callback(setattr, module, "_tritonamp_fp32", module._tritonamp_fp32)
                    module._tritonamp_fp32 = True
                elif not is_installed(module):
                    install(module, Fp32Module, self._context)
                    stack.callback(uninstall, module)
            yield

    @contextlib.contextmanager
    def in_bfloat16(self) -> Iterator[None]:
        """Have the models compute in bfloat16 inside the block, on FP32 weights.

        Raises:
            UnsupportedDeviceError: the device has none.
        """
        for model in self._models:
            for device in {p.device for p in model.parameters()}:
                check_dtype(torch.bfloat16, device)
        with contextlib.ExitStack() as stack:
            self._widen(self._models, stack)
            stack.enter_context(self._context.under(resolve("O1", torch.bfloat16)))
            yield

    def _widen(self, modules: Sequence[nn.Module], stack: contextlib.ExitStack) -> None:
        """Give modules FP32 tensors, and FP32 inputs where FSDP2 would cast them, for a stack."""
        for module in modules:
            stack.enter_context(self._model_dtypes.widened(module, self._models))
        stack.enter_context(self._inputs_in_fp32(modules))
