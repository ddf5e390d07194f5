"""The models of one ``enable``: their dtypes and classes, and how both are restored."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tritonamp.casts import dispatch, sharing
from tritonamp.casts.context import EnabledContext
from tritonamp.casts.enabled_module import (
    EnabledModule,
    Fp32Module,
    Fp32ResultsModule,
    NormModule,
)
from tritonamp.casts.fused_norms import FusedRMSNorm, recipe_of
from tritonamp.casts.inputs import signature_of
from tritonamp.casts.model import flatten_rnns, fp32_modules, modules_with_fp32_results
from tritonamp.casts.model_dtypes import ModelDtypes
from tritonamp.casts.model_losses import install_loss
from tritonamp.casts.norm_layers import is_written_norm
from tritonamp.casts.norm_results import unknown_followers
from tritonamp.casts.saved import SavedDtypes
from tritonamp.casts.selection import own_policies
from tritonamp.casts.wide_results import WideResult
from tritonamp.casts.written import installed
from tritonamp.class_swap import install, is_installed, uninstall
from tritonamp.names import prefixes


class EnabledModels:
    """Models that compute as the policy of a context says, until ``disable``.

    Args:
        models: models that are not enabled yet.
        context: context for all modules of the models.
        stepped: parameters that optimizers step on.
        gathered: whether FSDP2 makes half copies of FP32 parameters when it gathers them.

    Attributes:
        dtypes: dtypes of the models' tensors.
        fused: names of the user-written norms, and functions and lines of the written-out
            activations, that run as one op, and of probabilities that are FP32.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        context: EnabledContext,
        stepped: set[Tensor],
        *,
        gathered: bool,
    ) -> None:
        self._models = models
        self._context = context
        self.dtypes = ModelDtypes(context.policy, context.fp32_values, gathered)
        self.fused: list[str] = []
        self._restore_losses: list[Callable[[], None]] = []
        for model in models:  # a copy of an enabled one has classes of ours
            _make_plain(model, lambda context: context.is_copy)
        policies = own_policies(models, context.policy)
        for front, model, own in zip(prefixes(models), models, policies, strict=True):
            saved = SavedDtypes(model, context.policy)
            self.dtypes.cast(model, own, stepped if context.policy.master_weights else ())
            for inner in fp32_modules(model, own):
                if is_installed(inner):  # an earlier model shares it
                    continue
                if is_written_norm(inner) and not context.policy.op_policy:
                    install(inner, NormModule, context, *unknown_followers(inner))
                else:
                    install(inner, Fp32Module, context)
            self._install_norms(model, context, front)
            for inner in modules_with_fp32_results(model, own):
                if not is_installed(inner):
                    install(inner, Fp32ResultsModule, context)
            if context.policy.op_policy and context.policy.fuse_ops:
                self._install_formulas(model, context)
            install(model, EnabledModule, context, saved, signature_of(model.forward), False)
            if context.policy.fuse_loss:
                self._restore_losses.append(install_loss(model))
        sharing.note(context, models, self.dtypes, stepped)

    def _install_formulas(self, model: nn.Module, context: EnabledContext) -> None:
        """Make written-out formulas one op, and probabilities FP32 that the code needs so."""
        found = installed.install(model, context.policy.cast_outputs is torch.float32)
        self.fused += found.sites
        for inner in found.wide:
            if not is_installed(inner):
                install(inner, WideResult, context)

    def _install_norms(self, model: nn.Module, context: EnabledContext, front: str) -> None:
        """Make user-written norms keep half results half, and run proved RMSNorms as one kernel."""
        policy = context.policy
        for name, inner in model.named_modules():
            if inner is model or is_installed(inner) or not is_written_norm(inner):
                continue
            recipe = recipe_of(inner) if policy.op_policy and policy.fuse_norms else None
            if recipe is not None:
                install(inner, FusedRMSNorm, context, *unknown_followers(inner), recipe)
                self.fused.append(front + name)
            elif policy.keep_norms_fp32:
                install(inner, NormModule, context, *unknown_followers(inner))

    def disable(self) -> dict[Tensor, Tensor]:
        """Restore the dtypes of tensors and the classes of modules.

        Returns:
            FP32 value, before this call, of each tensor that is half afterwards.
        """
        sharing.forget(self._context)
        dispatch.need_products(self._context, False)
        for restore in self._restore_losses:
            restore()
        fp32_values = self.dtypes.restore()
        for model in self._models:
            flatten_rnns(model)
            # another Amp's models may share frozen modules with these
            _make_plain(model, lambda context: context is self._context)
        return fp32_values


def _make_plain(model: nn.Module, is_left: Callable[[EnabledContext], bool]) -> None:
    """Restore the classes of the modules for whose context ``is_left`` is True."""
    for module in model.modules():
        context = vars(module).get("_tritonamp_context")
        if context is not None and is_left(context):
            uninstall(module)
