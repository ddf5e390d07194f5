"""The models of the training benchmarks, compact: ResNet-50 for small images, GPT-2, ViT."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """(N, inputs, H, W) -> (N, 4 * width, H / stride, W / stride)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Sequential):
    """(N, 3, 32, 32) images -> (N, 10) logits.

    He et al. 2015, with the 3x3 stem that is usual for CIFAR-10.
    """

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        inputs = width
        for stage, count in enumerate(blocks):
            for i in range(count):
                layers.append(Bottleneck(inputs, width << stage, 2 if stage > 0 and i == 0 else 1))
                inputs = 4 * (width << stage)
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class Attention(nn.Module):
    """(N, T, width) -> (N, T, width), by torch's kernel with ``fused``, else by three ops."""

    def __init__(self, width: int, heads: int, causal: bool, fused: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.project(x).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.mT * (width // self.heads) ** -0.5
            if self.causal:
                future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(future, float("-inf"))
            mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(n, t, width))


class Block(nn.Module):
    """A pre-norm transformer block, (N, T, width) -> (N, T, width)."""

    def __init__(self, width: int, heads: int, causal: bool, fused: bool) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads, causal, fused))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class GPT(nn.Module):
    """(N, context) token numbers -> (N, context, vocabulary) logits.

    The shape of GPT-2 small, embeddings tied.
    """

    def __init__(
        self, fused: bool, vocabulary: int = 50257, context: int = 1024,
        width: int = 768, layers: int = 12, heads: int = 12,
    ) -> None:  # fmt: skip
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        nn.init.normal_(self.token.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, True, fused) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def features(self, tokens: Tensor) -> Tensor:
        """Return the input of the last layer, (N, context, width)."""
        return self.norm(self.blocks(self.token(tokens) + self.position))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.features(tokens), self.token.weight)


class ViT(nn.Module):
    """(N, 3, size, size) images -> (N, 1000) logits; the shape of ViT-B/16."""

    def __init__(
        self, size: int = 224, patch: int = 16, width: int = 768, layers: int = 12, heads: int = 12
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn((size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, False, True) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1000))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.first.to(x.dtype).expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.blocks(x)[:, 0])
