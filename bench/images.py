"""Small images on the device as bytes: CIFAR-10, or generated ones of its size.

Batches are drawn, moved, mirrored and normalised on the device, so that no loader is measured.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CLASSES = 10
MARGIN = 4  # pixels that a crop may move by
COARSE = 4  # generated images are smooth: so many random values along a side
CONTRAST, NOISE = 24.0, 40.0  # standard deviation of a class's pattern, and of what hides it
NO_TORCHVISION = "torchvision, which reads CIFAR-10, is not installed: pip install torchvision"


class Images(NamedTuple):
    """Images (N, 3, size, size) in uint8 and their classes (N,) in int64.

    Attributes:
        padded: images to train on, each with a margin of zeros.
        classes: classes of the images to train on.
        test: images to test on.
        test_classes: classes of the images to test on.
        mean: mean of the images to train on, by channel, (3, 1, 1).
        std: standard deviation of the images to train on, by channel, (3, 1, 1).
    """

    padded: Tensor
    classes: Tensor
    test: Tensor
    test_classes: Tensor
    mean: Tensor
    std: Tensor

    def epoch(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield full batches of all images in a random order, each cropped and mirrored at random.

        Yields:
            normalised images (batch, 3, size, size) in float32, and their classes.
        """
        order = torch.randperm(len(self.padded), device=self.padded.device)
        for rows in order[: len(order) // batch * batch].split(batch):
            yield self._normalised(random_crops(self.padded, rows)), self.classes[rows]

    def tests(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of all test images, as ``epoch`` does, but whole and in order."""
        for x, y in zip(self.test.split(batch), self.test_classes.split(batch), strict=True):
            yield self._normalised(x), y

    def _normalised(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


def prepared(train: Tensor, classes: Tensor, test: Tensor, test_classes: Tensor) -> Images:
    """Return ``Images`` from tensors on the device; the arguments are like its attributes."""
    std, mean = torch.std_mean(train.float(), (0, 2, 3))
    shape = (3, 1, 1)
    padded = F.pad(train, [MARGIN] * 4)
    return Images(padded, classes, test, test_classes, mean.view(shape), std.view(shape))


def random_crops(padded: Tensor, rows: Tensor) -> Tensor:
    """Return a random window of each chosen image, half of them mirrored.

    Args:
        padded: images (N, C, H + 2 MARGIN, W + 2 MARGIN).
        rows: numbers of the chosen images, (n,).
    """
    device = padded.device
    tops, lefts = torch.randint(2 * MARGIN + 1, (2, len(rows)), device=device)
    mirrored = torch.rand(len(rows), device=device) < 0.5
    return crops(padded, rows, tops, lefts, mirrored)


def crops(padded: Tensor, rows: Tensor, tops: Tensor, lefts: Tensor, mirrored: Tensor) -> Tensor:
    """Return a window of each chosen image, (n, C, H, W).

    Args:
        padded: images (N, C, H + 2 MARGIN, W + 2 MARGIN).
        rows: numbers of the chosen images, (n,).
        tops: first line of each window, (n,).
        lefts: first column of each window, (n,).
        mirrored: whether each window is mirrored left to right, (n,).
    """
    channels, height, width = (
        torch.arange(length, device=padded.device)
        for length in (padded.shape[1], padded.shape[2] - 2 * MARGIN, padded.shape[3] - 2 * MARGIN)
    )
    lines = tops[:, None] + height
    columns = lefts[:, None] + torch.where(mirrored[:, None], width.flip(0), width)
    return padded[
        rows[:, None, None, None],
        channels[:, None, None],
        lines[:, None, :, None],
        columns[:, None, None, :],
    ]


def generated(train: int, test: int, size: int, device: torch.device) -> Images:
    """Return generated images that can be learned: a pattern for each class, under noise.

    Pattern and noise are equally smooth. The pattern is shifted and mirrored like crops.

    Args:
        train: number of images to train on.
        test: number of images to test on.
        size: pixels along a side.
        device: device of the result.
    """
    patterns = CONTRAST * _smooth(CLASSES, size + 2 * MARGIN, device)

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        classes = torch.randint(CLASSES, (count,), device=device)
        images = 128 + random_crops(patterns, classes) + NOISE * _smooth(count, size, device)
        return images.clamp(0, 255).to(torch.uint8), classes

    return prepared(*drawn(train), *drawn(test))


def _smooth(count: int, size: int, device: torch.device) -> Tensor:
    coarse = torch.randn(count, 3, COARSE, COARSE, device=device)
    return F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=True)


def cifar10(folder: Path, device: torch.device) -> Images:
    """Return CIFAR-10 from a folder with ``cifar-10-batches-py``, which torchvision reads.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
        RuntimeError: torchvision does not find the files, or their checksums are wrong.
    """
    try:
        from torchvision.datasets import CIFAR10
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(NO_TORCHVISION) from error

    def read(train: bool) -> tuple[Tensor, Tensor]:
        split = CIFAR10(str(folder), train)
        images = torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous()
        return images.to(device), torch.tensor(split.targets, device=device)

    return prepared(*read(True), *read(False))
