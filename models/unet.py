"""A text-conditioned diffusion UNet in the structure of Stable Diffusion's, as plain torch modules.

It has ResBlocks of GroupNorm, SiLU and Conv with the timestep added between, and skip connections by concatenation. Its
transformer blocks have self-attention, cross-attention and GEGLU (Rombach et al., arXiv 2112.10752). Timesteps are
embedded by sines and cosines (Ho et al., arXiv 2006.11239): floats that are integers up to 999 reach Sin and Cos.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from models.common import Built, Sample, export_classic, rng_for, unit_gain

# Steps of the diffusion that the model is trained on (arXiv 2006.11239).
TIMESTEPS = 1000


@dataclass(frozen=True)
class Size:
    """`widths` by level from fine to coarse; the coarsest has no attention, as in Stable Diffusion 1."""

    side: int
    widths: tuple[int, ...]
    blocks: int
    groups: int
    head: int
    context: int
    tokens: int


FULL = Size(side=64, widths=(128, 256, 512, 512), blocks=2, groups=32, head=64, context=768, tokens=77)
SMALL = Size(side=16, widths=(16, 32), blocks=1, groups=4, head=8, context=16, tokens=6)


class Timestep(nn.Module):
    """Embeds timestep, float32 [N], as [N, 4 * width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("frequencies", frequencies)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))

    def forward(self, timestep):
        angles = timestep[:, None] * self.frequencies[None]
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))


class ResBlock(nn.Module):
    """Two convolutions with the timestep added between them."""

    def __init__(self, before: int, after: int, time: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(groups, before), nn.SiLU(), nn.Conv2d(before, after, 3, padding=1)
        )
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, after))
        self.second = nn.Sequential(
            nn.GroupNorm(groups, after), nn.SiLU(), nn.Conv2d(after, after, 3, padding=1)
        )
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x, time):
        hidden = self.first(x) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(hidden)


class Attention(nn.Module):
    """Scaled dot-product attention of x [N, L, C] over `context` [N, M, D]."""

    def __init__(self, width: int, context: int, head: int) -> None:
        super().__init__()
        self.heads, self.scale = width // head, head**-0.5
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(context, width, bias=False)
        self.v = nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, context):
        q, k, v = self.split(self.q(x)), self.split(self.k(context)), self.split(self.v(context))
        weights = torch.softmax(q @ k.transpose(-1, -2) * self.scale, dim=-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Geglu(nn.Module):
    """Feed-forward with a GELU gate (Shazeer, arXiv 2002.05202)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        value, gate = self.gate(x).chunk(2, dim=-1)
        return self.out(value * functional.gelu(gate))


class Transformer(nn.Module):
    """Self-attention, cross-attention and GEGLU over the pixels of [N, C, H, W]."""

    def __init__(self, width: int, size: Size) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(size.groups, width, eps=1e-6)
        self.before, self.out = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.itself = Attention(width, width, size.head)
        self.cross = Attention(width, size.context, size.head)
        self.feed = Geglu(width)

    def forward(self, image, context):
        x = self.before(self.norm(image)).flatten(2).transpose(1, 2)
        normed = self.norms[0](x)
        x = x + self.itself(normed, normed)
        x = x + self.cross(self.norms[1](x), context)
        x = x + self.feed(self.norms[2](x))
        return image + self.out(x.transpose(1, 2).unflatten(2, image.shape[2:]))


class Stage(nn.Module):
    """A ResBlock, and a transformer where the level has attention."""

    def __init__(self, before: int, after: int, attends: bool, size: Size) -> None:
        super().__init__()
        self.res = ResBlock(before, after, 4 * size.widths[0], size.groups)
        self.attention = Transformer(after, size) if attends else None

    def forward(self, x, time, context):
        x = self.res(x, time)
        return x if self.attention is None else self.attention(x, context)


class Upsample(nn.Module):
    """Doubles the side by nearest neighbour, then convolves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return self.conv(functional.interpolate(x, scale_factor=2.0, mode="nearest"))


class UNet(nn.Module):
    """latent [N, 4, S, S], timestep [N] and context [N, tokens, D] to the predicted noise, as large as the latent."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        widths, top = size.widths, len(size.widths) - 1
        self.timestep = Timestep(widths[0])
        self.enter = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        self.shrink, self.grow = nn.ModuleList(), nn.ModuleList()
        skips, width = [widths[0]], widths[0]
        for level, after in enumerate(widths):
            stages = nn.ModuleList()
            for _ in range(size.blocks):
                stages.append(Stage(width, after, level < top, size))
                width = after
                skips.append(width)
            self.down.append(stages)
            if level < top:
                self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                skips.append(width)
        self.middle = nn.ModuleList([Stage(width, width, True, size), Stage(width, width, False, size)])
        for level in reversed(range(len(widths))):
            stages = nn.ModuleList()
            for _ in range(size.blocks + 1):
                stages.append(Stage(width + skips.pop(), widths[level], level < top, size))
                width = widths[level]
            self.up.append(stages)
            if level:
                self.grow.append(Upsample(width))
        self.leave = nn.Sequential(
            nn.GroupNorm(size.groups, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1)
        )

    def forward(self, latent, timestep, context):
        time = self.timestep(timestep)
        x = self.enter(latent)
        skips = [x]
        for level, stages in enumerate(self.down):
            for stage in stages:
                x = stage(x, time, context)
                skips.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
                skips.append(x)
        for stage in self.middle:
            x = stage(x, time, context)
        for level, stages in enumerate(self.up):
            for stage in stages:
                x = stage(torch.cat([x, skips.pop()], dim=1), time, context)
            if level < len(self.grow):
                x = self.grow[level](x)
        return self.leave(x)


def settle(net: UNet) -> None:
    """Unit gain, norms with scales and biases of their own, and branches a third as large as the stream."""
    unit_gain(net)
    with torch.no_grad():
        for name, layer in net.named_modules():
            if isinstance(layer, nn.GroupNorm):
                layer.weight.normal_(1.0, 0.1)
                layer.bias.normal_(0.0, 0.1)
            elif name.endswith((".second.2", "itself.out", "cross.out", "feed.out", "attention.out")):
                layer.weight *= 0.3


def unet(full: bool) -> Built:
    """The UNet at opset 17, classic exporter; full: 0.4 of Stable Diffusion 1's widths, on its 64 x 64 latents."""
    torch.manual_seed(33)
    size = FULL if full else SMALL
    net = UNet(size)
    settle(net)

    def sample(index: int) -> Sample:
        rng = rng_for("unet", index)
        return {
            "latent": rng.standard_normal((1, 4, size.side, size.side)).astype(np.float32),
            "timestep": np.array([(381 + 271 * index) % TIMESTEPS], np.float32),
            "context": rng.standard_normal((1, size.tokens, size.context)).astype(np.float32),
        }

    return Built(export_classic(net, sample(0), ["noise"], opset=17), sample)
