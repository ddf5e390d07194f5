"""Drop-in for ``apex.contrib.xentropy``."""

from torch import Tensor

from tritonamp import functional

__all__ = ["SoftmaxCrossEntropyLoss"]


class SoftmaxCrossEntropyLoss:
    """The cross entropy of each row, computed in FP32, as ``apply(logits, labels, ...)``."""

    @staticmethod
    def apply(
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """Return ``tritonamp.functional.cross_entropy`` without reduction.

        Args:
            logits: shape (n, classes), any floating dtype.
            labels: int64, shape (n,).
            smoothing: label smoothing.
            padding_idx: label of rows whose loss and gradient are 0.
            half_to_float: accepted and ignored.

        Returns:
            shape (n,), float32 (float64 for such logits).
        """
        return functional.cross_entropy(
            logits, labels, ignore_index=padding_idx, reduction="none", label_smoothing=smoothing
        )
