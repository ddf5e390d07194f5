"""Drop-in for ``apex.transformer.functional``: masked softmax of attention scores."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tritonamp.apex.transformer.enums import AttnMaskType
from tritonamp.functional.masked_rows import softmax_of_scores

__all__ = [
    "FusedScaleMaskSoftmax",
    "GenericFusedScaleMaskSoftmax",
    "generic_scaled_masked_softmax",
    "scaled_masked_softmax",
    "scaled_upper_triang_masked_softmax",
]

MASKED = -10000.0  # what a masked score becomes


def scaled_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the softmax of ``scale * inputs`` over the last dimension.

    The arithmetic is FP32, and the result has the inputs' dtype. Under autocast both have
    autocast's dtype.

    Args:
        inputs: shape (batch, heads, queries, keys).
        mask: bool, broadcastable to ``inputs``; True is masked. Rows that are all True are 0.
        scale: factor of the inputs.
    """
    # apex's polarity, and its score of masked columns
    mask = None if mask is None else mask.bool()
    return _fused(inputs, mask, scale, keep=False, fill=MASKED)


generic_scaled_masked_softmax = scaled_masked_softmax


def scaled_upper_triang_masked_softmax(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return ``scaled_masked_softmax`` under a causal mask.

    ``mask`` is accepted and ignored.

    Raises:
        ValueError: different numbers of queries and keys.
    """
    queries, keys = inputs.shape[-2:]
    if queries != keys:
        raise ValueError(
            f"a causal mask is for self attention: expected as many queries as keys, got {queries} "
            f"and {keys}"
        )
    return _fused(inputs, None, scale, causal=True)


def _fused(
    inputs: Tensor, mask: Tensor | None, scale: float, causal: bool = False, **how: Any
) -> Tensor:
    """Return the softmax in autocast's dtype, as apex's functions cast their inputs."""
    device_type = inputs.device.type
    if torch.is_autocast_enabled(device_type):
        inputs = inputs.to(torch.get_autocast_dtype(device_type))
    with torch.autocast(device_type, enabled=False):
        return softmax_of_scores(inputs, mask, scale, causal, **how)


class FusedScaleMaskSoftmax(nn.Module):
    """Scale, mask and softmax of attention scores.

    Args:
        input_in_fp16, input_in_bf16: whether the scores have this half dtype.
        attn_mask_type: padding, with a mask that ``forward`` takes; or causal.
        scaled_masked_softmax_fusion: whether half scores take one fused pass instead of
            ``mask_func``.
        mask_func: function that returns masked scores, ``mask_func(scores, mask)``.
        softmax_in_fp32: whether half scores become FP32 before they are scaled.
        scale: factor of the scores, or None.

    Raises:
        RuntimeError: both half dtypes, or a ``scale`` without ``softmax_in_fp32``.
        ValueError: another ``attn_mask_type``.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor],
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise RuntimeError("both fp16 and bf16 flags cannot be active at the same time.")
        if scale is not None and not softmax_in_fp32:
            raise RuntimeError("softmax should be in fp32 when scaled")
        if scaled_masked_softmax_fusion and not isinstance(attn_mask_type, AttnMaskType):
            raise ValueError(
                f"attn_mask_type: expected one of {', '.join(map(str, AttnMaskType))}, got "
                f"{attn_mask_type!r}"
            )
        self.input_in_fp16, self.input_in_bf16 = input_in_fp16, input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale

    def forward(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Return the probabilities; ``input`` has shape (batch, heads, queries, keys)."""
        if self.is_kernel_available(mask, *input.shape):
            return self.forward_fused_softmax(input, mask)
        return self.forward_torch_softmax(input, mask)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Return whether ``forward`` takes the fused pass.

        The only shape that it does not take is a causal mask that is not square.
        """
        square = self.attn_mask_type is not AttnMaskType.causal or sq == sk
        return self.scaled_masked_softmax_fusion and self.input_in_float16 and square

    def forward_fused_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        scale = 1.0 if self.scale is None else self.scale
        if self.attn_mask_type is AttnMaskType.causal:
            return scaled_upper_triang_masked_softmax(input, mask, scale)
        return scaled_masked_softmax(input, mask, scale)

    def forward_torch_softmax(self, input: Tensor, mask: Tensor | None) -> Tensor:
        scores = input.float() if self.input_in_float16 and self.softmax_in_fp32 else input
        if self.scale is not None:
            scores = scores * self.scale
        probs = torch.softmax(scores if mask is None else self.mask_func(scores, mask), -1)
        if self.input_in_float16 and self.softmax_in_fp32:
            probs = probs.to(torch.float16 if self.input_in_fp16 else torch.bfloat16)
        return probs


class GenericFusedScaleMaskSoftmax(FusedScaleMaskSoftmax):
    """``FusedScaleMaskSoftmax`` with a padding mask."""

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor],
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__(
            input_in_fp16,
            input_in_bf16,
            AttnMaskType.padding,
            scaled_masked_softmax_fusion,
            mask_func,
            softmax_in_fp32,
            scale,
        )
