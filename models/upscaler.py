"""An upscaler in the structure of ESRGAN's generator, as plain torch modules.

Residual-in-residual dense blocks, whose five Convs read all earlier ones of the block, then two nearest-neighbour
upscalings (Wang et al., arXiv 1809.00219). There is no normalisation; branches are scaled by 0.2.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from models.common import Built, export_classic, image_samples, unit_gain

SCALE = 0.2
"""Of each residual branch, as published."""


class Dense(nn.Module):
    """Five Convs of 3 x 3; each reads the input and all earlier results."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(width + place * growth, growth if place < 4 else width, 3, padding=1)
            for place in range(5)
        )

    def forward(self, x):
        parts = [x]
        for conv in self.convs[:-1]:
            parts.append(functional.leaky_relu(conv(torch.cat(parts, 1)), 0.2))
        return x + SCALE * self.convs[-1](torch.cat(parts, 1))


class Block(nn.Module):
    """Three dense blocks in a residual branch."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.dense = nn.Sequential(*(Dense(width, growth) for _ in range(3)))

    def forward(self, x):
        return x + SCALE * self.dense(x)


class Upscaler(nn.Module):
    """Image [N, 3, H, W] to [N, 3, 4 H, 4 W]."""

    def __init__(self, width: int, growth: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width, growth) for _ in range(blocks)))
        self.trunk, self.up1, self.up2, self.high = (nn.Conv2d(width, width, 3, padding=1) for _ in range(4))
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        x = x + self.trunk(self.blocks(x))
        for conv in (self.up1, self.up2):
            x = functional.leaky_relu(conv(functional.interpolate(x, scale_factor=2.0, mode="nearest")), 0.2)
        return self.last(functional.leaky_relu(self.high(x), 0.2))


def esrgan(full: bool) -> Built:
    """64 channels and 8 blocks at opset 17, classic exporter, on images of 96 x 96; ESRGAN itself has 23 blocks."""
    torch.manual_seed(41)
    net = Upscaler(64, 32, 8) if full else Upscaler(8, 4, 1)
    unit_gain(net)
    sample = image_samples("esrgan", "image", 96 if full else 16, normalised=False)
    return Built(export_classic(net, sample(0), ["upscaled"], opset=17), sample)
