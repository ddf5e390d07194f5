"""Log-probabilities and entropies of tokens, as reinforcement learning takes them from logits.

A log-probability is a cross entropy with the opposite sign. Its losses multiply each token by a
factor of its own (an advantage, a ratio of two policies), so that the backward has to compute the
gradients: from the logits, or from the inputs of the linear layer that computes them.
"""

from torch import Tensor

from tritonamp.functional.inputs import backend_in_force, is_under_transforms
from tritonamp.functional.linear_head import RowsOfLayer, check_layer
from tritonamp.functional.losses import CrossEntropy, LineLosses, Results, check_targets


def token_log_probs(
    logits: Tensor, targets: Tensor, *, temperature: float = 1.0, return_entropy: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-probability of each target under ``softmax(logits / temperature)``.

    Half logits are read once, and results are FP32 (from FP64: FP64). The incoming gradients, and
    with them a loss scale, are applied in FP32, and the result is rounded once.

    Args:
        logits: [..., v], float16, bfloat16 or float32.
        targets: int64 classes, [...]. -100 is none: give ``targets.clamp(min=0)``, and mask the
            results.
        temperature: temperature of the sampling, above 0.
        return_entropy: whether to return the entropy of each row, [...], with a gradient, too.

    Raises:
        ValueError: a shape, a dtype or the temperature is wrong.
        IndexError: a target is no class; on CUDA it is a failed assertion on the device.
    """
    if not logits.dim() or not logits.is_floating_point():
        raise ValueError(
            f"logits: expected floating numbers [..., v], got {logits.dtype} of shape "
            f"{tuple(logits.shape)}"
        )
    check_targets("targets", targets, tuple(logits.shape[:-1]))
    losses = _losses(temperature, return_entropy)
    try:
        if is_under_transforms() or logits.is_meta or not logits.numel():
            return _log_probs(losses.by_torch(logits, targets))
        return _log_probs(CrossEntropy.apply(logits, targets, losses))
    except IndexError as error:
        raise _no_class(error) from error


def linear_token_log_probs(
    input: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    chunk_rows: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return ``token_log_probs(linear(input, weight, bias), targets)``, one chunk at a time.

    Logits are half under autocast, in an enabled forward, and if one of input and weight is half
    and the other FP32. The backward computes the logits again, which makes 8 rvd FLOPs for r rows,
    v classes and d features. Gradients of weight and bias are added up in FP32 and rounded once.

    Args:
        input: hidden states, [..., d].
        weight: weight of the model's last layer, [v, d].
        targets: int64 classes, [...]. -100 is none: give ``targets.clamp(min=0)``, and mask the
            results.
        bias: bias of that layer, [v], or None.
        temperature: temperature of the sampling, above 0.
        return_entropy: whether to return the entropy of each row, [...], with a gradient, too.
        chunk_rows: number of rows whose logits exist at a time, in the backward with their
            gradients. None: 2048, or 2 d if that is more.

    Raises:
        ValueError: a shape, the targets' dtype, the temperature or ``chunk_rows`` is wrong.
        IndexError: a target is no class; on CUDA it is a failed assertion on the device.
    """
    check_layer(input, weight, bias, chunk_rows)
    check_targets("targets", targets, tuple(input.shape[:-1]))
    losses = _losses(temperature, return_entropy)
    rows = RowsOfLayer(input, weight, bias, targets, losses, chunk_rows)
    try:
        return _log_probs(rows.results())
    except IndexError as error:
        raise _no_class(error) from error


def _losses(temperature: float, entropy: bool) -> LineLosses:
    """Return the losses whose negatives are log-probabilities.

    Raises:
        ValueError: the temperature is wrong.
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature: expected a number above 0, got {temperature}")
    backend = backend_in_force()
    return LineLosses(temperature=float(temperature), entropy=entropy, backend=backend)


def _no_class(error: IndexError) -> IndexError:
    """Return torch's error with advice. CUDA raises none: a device assertion ends the process."""
    return IndexError(
        f"{error} A log-probability needs a class, and no index is ignored, also not -100: give "
        "targets.clamp(min=0), and multiply the results by a mask of the tokens that count"
    )


def _log_probs(results: Results) -> Tensor | tuple[Tensor, Tensor]:
    losses, *entropies = results
    return (-losses, entropies[0]) if entropies else -losses
