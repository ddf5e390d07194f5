"""Real data that ships with a package: scikit-learn's digits, CPython's documentation."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CONTEXT = 64  # characters that the transformer sees


class Split(NamedTuple):
    """Examples along dimension 0: what trains, and what the final score is taken on."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


def digits() -> Split:
    """Return 1797 handwritten digits, float32 (N, 1, 8, 8) in [0, 1].

    Half is for the test, so one digit is 0.1 points.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    # one split, whatever the demo's seed
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order.tensor_split(2)
    return Split(x[train], y[train], x[test], y[test])


def characters() -> tuple[Split, int]:
    """Return windows of CONTEXT characters, each with those that follow, and the alphabet's size.

    Characters are codes, int64.

    The last tenth of the text is the test. Training windows start at every character, test windows
    with gaps between them, so that the final score takes no longer than it must.
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
