"""The two models: a convolutional net with BatchNorm, and a character transformer."""

import torch
from torch import Tensor, nn


class DigitNet(nn.Sequential):
    """(N, 1, 8, 8) images -> (N, 10) logits."""

    def __init__(self, width: int = 24):
        super().__init__(
            _conv(1, width),
            _conv(width, width),
            nn.MaxPool2d(2),
            _conv(width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class CharTransformer(nn.Module):
    """(N, T) character codes -> (N, T, vocabulary) logits; T is at most ``context``."""

    def __init__(
        self, vocabulary: int, context: int, width: int = 64, heads: int = 4, layers: int = 2
    ):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, codes: Tensor) -> Tensor:
        positions = self.position(torch.arange(codes.shape[1], device=codes.device))
        logits: Tensor = self.head(self.blocks(self.token(codes) + positions))
        return logits


class Block(nn.Module):
    """Attention and a perceptron, each on a normed copy of the residual. Shapes: (N, T, width)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), CausalAttention(width, heads))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class CausalAttention(nn.Module):
    """Attention, written out so that the op policy sees each matmul and the softmax."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.project(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * (width // self.heads) ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed: Tensor = self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return mixed
