"""A small NAFNet (Chen et al. 2022, arXiv 2204.04676) that denoises raw counts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BRANCH = 4000.0
"""Initial scale of a branch. A norm's output is about 1, but the stream to which the branch is added has raw
counts, so a branch near 1 would be lost in it."""


class LayerNorm2d(nn.Module):
    """Normalises each pixel over its channels, x [N, C, H, W]; by hand, as restoration networks ship it."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        y = (x - mean) / (variance + self.eps).sqrt()
        return self.weight.view(1, -1, 1, 1) * y + self.bias.view(1, -1, 1, 1)


class SimpleGate(nn.Module):
    """Multiplies the two halves of the channels."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1)
        return first * second


class Block(nn.Module):
    """A gated depthwise convolution with channel attention, then a gated feed-forward part."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.norm1, self.norm2 = LayerNorm2d(channels), LayerNorm2d(channels)
        self.expand = nn.Conv2d(channels, wide, 1)
        self.spatial = nn.Conv2d(wide, wide, 3, padding=1, groups=wide)
        self.gate = SimpleGate()
        self.attention = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1))
        self.project = nn.Conv2d(channels, channels, 1)
        self.feed = nn.Sequential(
            nn.Conv2d(channels, wide, 1), SimpleGate(), nn.Conv2d(channels, channels, 1)
        )
        self.beta = nn.Parameter(torch.full((1, channels, 1, 1), BRANCH))
        self.gamma = nn.Parameter(torch.full((1, channels, 1, 1), BRANCH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(self.spatial(self.expand(self.norm1(x))))
        x = x + self.project(y * self.attention(y)) * self.beta
        return x + self.feed(self.norm2(x)) * self.gamma


class Denoiser(nn.Module):
    """Noisy raw counts [N, 1, H, W] to clean ones; H and W are multiples of 2."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.intro = nn.Conv2d(1, width, 3, padding=1)
        self.encoder = Block(width)
        self.down = nn.Conv2d(width, 2 * width, 2, stride=2)
        self.middle = nn.Sequential(Block(2 * width), Block(2 * width))
        self.up = nn.Sequential(nn.Conv2d(2 * width, 4 * width, 1, bias=False), nn.PixelShuffle(2))
        self.decoder = Block(width)
        self.ending = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noisy: Tensor) -> Tensor:
        x = self.encoder(self.intro(noisy))
        x = self.decoder(x + self.up(self.middle(self.down(x))))
        return noisy + self.ending(x)
