"""Lists of tensors as the functions of ``amp_C`` take and write them."""

from collections.abc import Sequence

import torch
from torch import Tensor

Lists = Sequence[Sequence[Tensor]]
GRADS, PARAMS, MOMENTS, SQUARES = "gradients", "parameters", "first moments", "second moments"


def checked(function: str, tensor_lists: Lists, *names: str, optional: str = "") -> Lists:
    """Return ``tensor_lists``, one for each name; one of ``optional`` may follow.

    Raises:
        RuntimeError: another number of lists, lists of different lengths, or tensors of different
            sizes at one place.
    """
    several = {len(names), len(names) + bool(optional)}
    if len(tensor_lists) not in several:
        expected = " or ".join(map(str, sorted(several)))
        listed = ", ".join(names) + (f", and {optional}" if optional else "")
        raise RuntimeError(
            f"{function}: expected {expected} lists of tensors ({listed}), got {len(tensor_lists)}"
        )
    lengths = [len(tensors) for tensors in tensor_lists]
    if len(set(lengths)) > 1:
        raise RuntimeError(f"{function}: expected lists of one length, got {lengths}")
    for place, row in enumerate(zip(*tensor_lists, strict=True)):
        sizes = [tensor.numel() for tensor in row]
        if len(set(sizes)) > 1:
            raise RuntimeError(
                f"{function}: expected tensors of one size at place {place} of the lists, got "
                f"{sizes} elements"
            )
    return tensor_lists


def as_list(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a result of torch's functions on lists, typed as tuple or list, as a list."""
    return list(tensors)


def wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors themselves where they are FP32 or FP64, else FP32 copies."""
    return [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]


def store(lists: Lists, values: Lists) -> None:
    """Round wide values into the tensors they belong to, where these are not the same."""
    pairs = [
        (t, v)
        for pair in zip(lists, values, strict=True)
        for t, v in zip(*pair, strict=True)
        if t is not v
    ]
    if pairs:
        torch._foreach_copy_([t for t, _ in pairs], [v for _, v in pairs])


def raise_flag(noop_flag: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set the flag where a tensor holds a value that is not finite: then so is its largest."""
    filled = [t for t in tensors if t.numel()]
    if filled:
        largest = [norm.float() for norm in torch._foreach_norm(filled, float("inf"))]
        noop_flag.masked_fill_(~torch.isfinite(torch.stack(largest)).all(), 1)
