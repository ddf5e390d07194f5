"""Real data that ships with a package: scikit-learn's digits, CPython's documentation."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CONTEXT = 64  # length of the transformer's input, in characters


class Split(NamedTuple):
    """Examples along dimension 0, for the training and for the test."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def digits() -> Split:
    """Return 1797 handwritten digits, float32 (N, 1, 8, 8) in [0, 1].

    One half is for the test, so that one digit is 0.1 points.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    # one split for every seed of the demo
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order.tensor_split(2)
    return Split(x[train], y[train], x[test], y[test])


def characters() -> tuple[Split, int]:
    """Return windows of CONTEXT character codes (int64) and the size of the alphabet.

    The target of a window is the same window, one character later. The last tenth of the text is
    the test. Training windows start at every character; test windows have gaps between them,
    because the final score would take too long otherwise.
    """
    text = python_documentation()
    code_of = {character: code for code, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([code_of[character] for character in text])
    train, test = codes.tensor_split([len(codes) * 9 // 10])
    return Split(*_windows(train, stride=1), *_windows(test, stride=4 * CONTEXT)), len(code_of)


def python_documentation() -> str:
    """Return the text behind Python's own ``help("TOPIC")``, about 450,000 characters."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise SystemExit(
            "the demo reads the text of pydoc_data.topics, which this Python came without: use a "
            "full CPython"
        ) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def batches(
    split: Split, size: int, steps: int, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``steps`` batches drawn at random; equal seeds give equal batches."""
    draws = torch.randint(
        len(split.x), (steps, size), generator=torch.Generator().manual_seed(seed)
    )
    for rows in draws:
        yield split.x[rows].to(device), split.y[rows].to(device)


def percent_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the accuracy of (N, C) logits, in percent."""
    return 100 * (logits.argmax(-1) == labels).float().mean()


def _windows(codes: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    return codes[:-1].unfold(0, CONTEXT, stride), codes[1:].unfold(0, CONTEXT, stride)
