"""Networks at the sizes that people deploy: families with drawn batches, images, lengths and widths.

A name is that of a family, of timm or of a table of population_networks.py, and sizes: `detector-size640`,
`resnet50-batch32`, `bert-batch32-length128`. `deployed` draws names; `build` makes the module and its samples.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Feeds = list[dict[str, np.ndarray]]
Sizes = Mapping[str, int]
SAMPLES = 5

MOST_PARAMETERS = 300e6
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (128, 256, 512, 1024)
IMAGES = (224, 288, 384, 448, 512, 640)
LARGEST_IMAGE, LARGE_SHARE = 1024, 0.1
"""One network of images in ten gets the largest."""

MOST_PIXELS = 64 * 224 * 224
"""Pixels of a batch: a large image has a smaller one."""

FAMILY, OTHERS = 2, 12
"""How often each family is drawn, and how many of timm and the table."""


def normal(draw: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * draw.standard_normal(shape)).astype(np.float32)


def pictures(size: int, batch: int, width: int = 0) -> Feeds:
    """Photographs, rolled, flipped and dimmed, so that no two rows agree."""
    from benchmarks.population_networks import photos

    ones = [one["x"][..., : width or size] for one in photos(size)]
    rows = [
        [
            np.roll(ones[(n + k) % len(ones)], 17 * k, 3)[..., :: -1 if k % 2 else 1] * (1 - 0.01 * k)
            for k in range(batch)
        ]
        for n in range(SAMPLES)
    ]
    return [{"x": np.ascontiguousarray(np.concatenate(one)).astype(np.float32)} for one in rows]


def sounds(bins: int, frames: int, batch: int) -> Feeds:
    """Log spectrograms with harmonics that move."""
    draw, f, t, found = np.random.default_rng(7), np.arange(bins)[:, None], np.arange(frames)[None], []
    for n in range(SAMPLES):
        rows = [np.sin(f / 7 + t / (23 + 3 * n + k)) * np.sin(t / 41 + k) for k in range(batch)]
        noisy = [np.maximum(-1, 1.2 * row + 0.3 * draw.standard_normal(row.shape) - f / bins) for row in rows]
        found.append({"x": np.stack(noisy).astype(np.float32)})
    return found


def angles(steps: Tensor, width: int) -> Tensor:
    rates = torch.exp(-math.log(10000) * torch.arange(width // 2) / (width // 2))
    phases = steps[:, None].float() * rates
    return torch.cat([phases.cos(), phases.sin()], -1)


def heads(x: Tensor, number: int) -> Tensor:
    return x.view(x.shape[0], -1, number, x.shape[-1] // number).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


# -- a detector ----------------------------------------------------------------------------------


class Cell(nn.Sequential):
    def __init__(self, width: int, out: int, kernel: int = 1, stride: int = 1) -> None:
        conv = nn.Conv2d(width, out, kernel, stride, kernel // 2, bias=False)
        super().__init__(conv, nn.BatchNorm2d(out), nn.SiLU())


class Split(nn.Module):
    """A cross-stage block whose parts are joined at the end."""

    def __init__(self, width: int, out: int, depth: int, add: bool = True) -> None:
        super().__init__()
        self.part, self.add = out // 2, add
        self.first, self.last = Cell(width, out), Cell((2 + depth) * self.part, out)
        blocks = (
            nn.Sequential(Cell(self.part, self.part, 3), Cell(self.part, self.part, 3)) for _ in range(depth)
        )
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(block(parts[-1]) + parts[-1] if self.add else block(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Detector(nn.Module):
    """A one-stage detector: cross-stage blocks, pooled pyramid, heads with a distribution of distances."""

    def __init__(self, size: int, width: int, classes: int = 80) -> None:
        super().__init__()
        a, b, c, d, e = (width * 2**n for n in range(5))
        self.p3 = nn.Sequential(
            Cell(3, a, 3, 2), Cell(a, b, 3, 2), Split(b, b, 2), Cell(b, c, 3, 2), Split(c, c, 4)
        )
        self.p4, self.p5 = (
            nn.Sequential(Cell(c, d, 3, 2), Split(d, d, 4)),
            nn.Sequential(Cell(d, e, 3, 2), Split(e, e, 2)),
        )
        self.before, self.after = Cell(e, e // 2), Cell(2 * e, e)
        self.up4, self.up3 = Split(e + d, d, 2, False), Split(d + c, c, 2, False)
        self.down3, self.down4 = Cell(c, c, 3, 2), Cell(d, d, 3, 2)
        self.n4, self.n5 = Split(c + d, d, 2, False), Split(d + e, e, 2, False)
        self.boxes = nn.ModuleList([nn.Sequential(Cell(i, 64, 3), nn.Conv2d(64, 64, 1)) for i in (c, d, e)])
        self.kinds = nn.ModuleList(
            [nn.Sequential(Cell(i, 96, 3), nn.Conv2d(96, classes, 1)) for i in (c, d, e)]
        )
        grids = [torch.meshgrid(*[torch.arange(size // s) + 0.5] * 2, indexing="ij") for s in (8, 16, 32)]
        self.register_buffer("points", torch.cat([torch.stack([x, y]).reshape(2, -1) for y, x in grids], 1))
        self.register_buffer(
            "steps", torch.cat([torch.full((1, (size // s) ** 2), float(s)) for s in (8, 16, 32)], 1)
        )
        self.register_buffer("bins", torch.arange(16.0).view(1, 16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        p3 = self.p3(x)
        p4 = self.p4(p3)
        pooled = [self.before(self.p5(p4))]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, 1, 2))
        p5 = self.after(torch.cat(pooled, 1))
        n4 = self.up4(torch.cat([F.interpolate(p5, scale_factor=2.0), p4], 1))
        n3 = self.up3(torch.cat([F.interpolate(n4, scale_factor=2.0), p3], 1))
        n4 = self.n4(torch.cat([self.down3(n3), n4], 1))
        levels = (n3, n4, self.n5(torch.cat([self.down4(n4), p5], 1)))
        found = [
            torch.cat([b(one), k(one)], 1).flatten(2)
            for b, k, one in zip(self.boxes, self.kinds, levels, strict=True)
        ]
        boxes, kinds = torch.cat(found, 2).split((64, found[0].shape[1] - 64), 1)
        far = (boxes.view(boxes.shape[0], 4, 16, -1).transpose(1, 2).softmax(1) * self.bins).sum(1)
        low, high = self.points - far[:, :2], self.points + far[:, 2:]
        return torch.cat([torch.cat([(low + high) / 2, high - low], 1) * self.steps, kinds.sigmoid()], 1)


# -- diffusion -----------------------------------------------------------------------------------


class Crossing(nn.Module):
    """A transformer block of a UNet: attention to itself and to a text, and gated layers."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.heads, self.norm = width // 64, nn.GroupNorm(32, width, eps=1e-6)
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.q, self.o = (
            nn.ModuleList([nn.Linear(width, width, bias=n > 1) for _ in range(2)]) for n in (1, 2)
        )
        self.k, self.v = (
            nn.ModuleList([nn.Linear(w, width, bias=False) for w in (width, context)]) for _ in range(2)
        )
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        z = self.enter(self.norm(x).flatten(2).transpose(1, 2))
        for n in range(2):
            y = self.norms[n](z)
            read = text if n else y
            parts = (heads(one, self.heads) for one in (self.q[n](y), self.k[n](read), self.v[n](read)))
            z = z + self.o[n](joined(F.scaled_dot_product_attention(*parts)))
        y, gate = self.up(self.norms[2](z)).chunk(2, -1)
        z = z + self.down(y * F.gelu(gate))
        return x + self.leave(z).transpose(1, 2).reshape(x.shape)


class LatentUnet(nn.Module):
    """The UNet of a latent diffusion model, with skips, for several latents and their texts at a time."""

    def __init__(self, width: int, context: int = 512) -> None:
        from benchmarks.population_networks import Residual

        super().__init__()
        w, time = (width, 2 * width, 3 * width), 4 * width
        self.width, self.time = width, nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.first, self.last = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 3, padding=1)
        self.down = nn.ModuleList([Residual(w[max(n - 1, 0)], w[n], time) for n in range(3)])
        self.shrink = nn.ModuleList([nn.Conv2d(w[n], w[n], 3, 2, 1) for n in range(2)])
        self.middle = nn.ModuleList([Residual(w[2], w[2], time) for _ in range(2)])
        self.up = nn.ModuleList([Residual(w[n] + w[min(n + 1, 2)], w[n], time) for n in (2, 1, 0)])
        self.grow = nn.ModuleList([nn.Conv2d(w[n], w[n], 3, padding=1) for n in (2, 1)])
        self.cross = nn.ModuleList([Crossing(w[n], context) for n in (1, 2, 2, 2, 1)])
        self.norm = nn.GroupNorm(32, width)

    def forward(self, x: Tensor, step: Tensor, text: Tensor) -> Tensor:
        time, skips, x = self.time(angles(step, self.width)), list[Tensor](), self.first(x)
        for n in range(3):
            x = self.down[n](x, time)
            x = self.cross[n - 1](x, text) if n else x
            skips.append(x)
            x = self.shrink[n](x) if n < 2 else x
        x = self.middle[1](self.cross[2](self.middle[0](x, time), text), time)
        for n in range(3):
            x = self.up[n](torch.cat([x, skips.pop()], 1), time)
            x = self.cross[3 + n](x, text) if n < 2 else x
            x = self.grow[n](F.interpolate(x, scale_factor=2.0)) if n < 2 else x
        return self.last(F.silu(self.norm(x)))


class Modulated(nn.Module):
    """A block of a diffusion transformer whose norms are shifted and scaled by the time (adaLN-Zero)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.norm = width // 64, nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.shift = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Linear(width, 6 * width),
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        b, n, _ = x.shape
        s1, k1, g1, s2, k2, g2 = self.shift(F.silu(time))[:, None].chunk(6, 2)
        parts = self.qkv(self.norm(x) * (1 + k1) + s1).view(b, n, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        x = x + g1 * self.o(joined(F.scaled_dot_product_attention(*parts.unbind(0))))
        return x + g2 * self.down(F.gelu(self.up(self.norm(x) * (1 + k2) + s2), approximate="tanh"))


class DiffusionTransformer(nn.Module):
    def __init__(self, width: int, side: int, depth: int = 12) -> None:
        super().__init__()
        self.side, self.width, self.patch = side // 2, width, nn.Conv2d(4, width, 2, 2)
        self.places = nn.Parameter(torch.randn(1, self.side**2, width) * 0.02)
        self.time, self.kinds = (
            nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width)),
            nn.Embedding(1001, width),
        )
        self.blocks = nn.ModuleList([Modulated(width) for _ in range(depth)])
        self.norm, self.last = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6), nn.Linear(width, 32)

    def forward(self, x: Tensor, step: Tensor, kind: Tensor) -> Tensor:
        time = self.time(angles(step, 256)) + self.kinds(kind)
        x = self.patch(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x, time)
        x = self.last(self.norm(x)).view(x.shape[0], self.side, self.side, 2, 2, 8)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], 8, 2 * self.side, 2 * self.side)


def latents(side: int, batch: int, context: int = 0) -> Feeds:
    """Noise at five steps, twice for guidance; with a text or a class for each row."""
    draw, found = np.random.default_rng(3), []
    for n in range(SAMPLES):
        one = np.repeat(normal(draw, (batch + 1) // 2, 4, side, side), 2, 0)[:batch]
        step = np.full((batch,), (981, 501, 21, 741, 261)[n], np.int64)
        text = (
            {"text": normal(draw, batch, 77, context)}
            if context
            else {"kind": (np.arange(batch) * 7 + n) % 1001}
        )
        found.append({"x": one, "step": step, **text})
    return found


# -- optical flow --------------------------------------------------------------------------------


class Eye(nn.Module):
    def __init__(self, out: int) -> None:
        super().__init__()
        rows = ((3, 64, 7, 2), (64, 64, 3, 1), (64, 96, 3, 2), (96, 96, 3, 1), (96, 128, 3, 2))
        self.convs = nn.ModuleList([nn.Conv2d(a, b, k, s, k // 2) for a, b, k, s in rows])
        self.norms, self.last = (
            nn.ModuleList([nn.InstanceNorm2d(row[1]) for row in rows]),
            nn.Conv2d(128, out, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        return self.last(x)


class Flow(nn.Module):
    """Optical flow: all-pairs correlation, lookups with GridSample, updates of a convolutional GRU."""

    def __init__(self, updates: int, width: int = 96) -> None:
        super().__init__()
        self.updates, self.width, self.eye, self.context = updates, width, Eye(128), Eye(2 * width)
        self.m1, self.m2, self.m3 = (
            nn.Conv2d(147, 96, 1),
            nn.Conv2d(2, 32, 7, padding=3),
            nn.Conv2d(128, width - 2, 3, padding=1),
        )
        self.z, self.r, self.q = (nn.Conv2d(3 * width, width, 3, padding=1) for _ in range(3))
        self.h1, self.h2, self.mask = (
            nn.Conv2d(width, 128, 3, padding=1),
            nn.Conv2d(128, 2, 3, padding=1),
            nn.Conv2d(width, 576, 1),
        )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        f, g = self.eye(a), self.eye(b)
        _, c, h, w = f.shape
        levels = [(f.flatten(2).transpose(1, 2) @ g.flatten(2) / c**0.5).reshape(h * w, 1, h, w)]
        for _ in range(2):
            levels.append(F.avg_pool2d(levels[-1], 2))
        state, given = self.context(a).split(self.width, 1)
        state, given = state.tanh(), given.relu()
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        base = place = torch.stack([x, y])[None].float()
        d = torch.linspace(-3, 3, 7)
        near = torch.stack(torch.meshgrid(d, d, indexing="ij")[::-1], -1).view(1, 7, 7, 2)
        for _ in range(self.updates):
            seen = []
            for n, level in enumerate(levels):
                at = place.permute(0, 2, 3, 1).reshape(h * w, 1, 1, 2) / 2**n + near
                size = torch.tensor([level.shape[-1] - 1, level.shape[-2] - 1])
                seen.append(F.grid_sample(level, 2 * at / size - 1, align_corners=True).view(1, h, w, 49))
            flow = place - base
            moved = torch.cat(
                [self.m1(torch.cat(seen, -1).permute(0, 3, 1, 2)).relu(), self.m2(flow).relu()], 1
            )
            rest = [given, torch.cat([self.m3(moved).relu(), flow], 1)]
            every = torch.cat([state, *rest], 1)
            z, r = self.z(every).sigmoid(), self.r(every).sigmoid()
            state = (1 - z) * state + z * self.q(torch.cat([r * state, *rest], 1)).tanh()
            place = place + 0.3 * self.h2(self.h1(state).relu())
        mask = self.mask(state).view(1, 1, 9, 8, 8, h, w).softmax(2)
        flow = F.unfold(8 * (place - base), 3, padding=1).view(1, 2, 9, 1, 1, h, w)
        return (mask * flow).sum(2).permute(0, 1, 4, 2, 5, 3).reshape(1, 2, 8 * h, 8 * w)


def frames(size: int) -> Feeds:
    ones = [one["x"] for one in pictures(size, 1)]
    return [
        {"a": one, "b": np.roll(one, (2 + n, 3 - n), (2, 3)) + np.float32(0.01)} for n, one in enumerate(ones)
    ]


# -- sound ---------------------------------------------------------------------------------------


class Conformer(nn.Module):
    """A block of a speech encoder with relative positions, by padding and reshaping."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.heads = number
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(5)])
        self.feed = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
                for _ in range(2)
            ]
        )
        self.q, self.k, self.v, self.o, self.p = (nn.Linear(width, width) for _ in range(5))
        self.u, self.w = (nn.Parameter(0.1 * torch.randn(number, 1, width // number)) for _ in range(2))
        self.enter, self.leave = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.deep, self.norm = nn.Conv1d(width, width, 9, padding=4, groups=width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = x + 0.5 * self.feed[0](self.norms[0](x))
        y = self.norms[1](x)
        b, n, _ = y.shape
        q, k, v, p = (heads(one, self.heads) for one in (self.q(y), self.k(y), self.v(y), self.p(places)))
        near = (q + self.w) @ p.transpose(-2, -1)
        far = near.shape[-1]
        near = (
            F.pad(near, (1, 0))
            .view(b, self.heads, far + 1, n)[:, :, 1:]
            .reshape(b, self.heads, n, far)[..., :n]
        )
        scores = ((q + self.u) @ k.transpose(-2, -1) + near) / q.shape[-1] ** 0.5
        x = x + self.o(joined(scores.softmax(-1) @ v))
        y = F.glu(self.enter(self.norms[2](x).transpose(1, 2)), 1)
        x = x + self.leave(F.silu(self.norm(self.deep(y)))).transpose(1, 2)
        return self.norms[4](x + 0.5 * self.feed[1](self.norms[3](x)))


class SpeechEncoder(nn.Module):
    """Depthwise Convs that stride by 8, and conformer blocks."""

    def __init__(self, width: int, depth: int = 8, c: int = 128) -> None:
        super().__init__()
        deep = lambda: nn.Sequential(nn.Conv2d(c, c, 3, 2, 1, groups=c), nn.Conv2d(c, c, 1), nn.ReLU())  # noqa: E731
        self.front, self.width = nn.Sequential(nn.Conv2d(1, c, 3, 2, 1), nn.ReLU(), deep(), deep()), width
        self.enter, self.head = nn.Linear(c * 10, width), nn.Linear(width, 1025)
        self.blocks = nn.ModuleList([Conformer(width, width // 64) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.front(x.transpose(1, 2)[:, None])
        x = self.enter(y.transpose(1, 2).flatten(2)) * self.width**0.5
        places = angles(torch.arange(x.shape[1] - 1, -x.shape[1], -1), self.width)[None]
        for block in self.blocks:
            x = block(x, places)
        return self.head(x).log_softmax(-1)


class Vocoder(nn.Module):
    """ConvNeXt blocks, magnitudes and phases, and the inverse transform as a ConvTranspose."""

    def __init__(self, width: int, depth: int = 8, size: int = 1024) -> None:
        super().__init__()
        self.enter, self.norm, self.last = (
            nn.Conv1d(100, width, 7, padding=3),
            nn.LayerNorm(width),
            nn.LayerNorm(width),
        )
        self.deep = nn.ModuleList([nn.Conv1d(width, width, 7, padding=3, groups=width) for _ in range(depth)])
        self.rest = nn.ModuleList(
            [
                nn.Sequential(
                    nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
                )
                for _ in range(depth)
            ]
        )
        self.out, self.size = nn.Linear(width, size + 2), size
        k, t = np.arange(size // 2 + 1)[:, None], 2 * np.pi * np.arange(size)[None] / size
        window, share = np.hanning(size + 1)[:-1], np.where(k % (size // 2) == 0, 1, 2) / size
        waves = np.concatenate([share * np.cos(k * t) * window, -share * np.sin(k * t) * window])
        self.register_buffer("waves", torch.tensor(waves[:, None].astype(np.float32)))
        self.register_buffer("window", torch.tensor((window**2)[None, None].astype(np.float32)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.enter(x).transpose(1, 2)).transpose(1, 2)
        for deep, rest in zip(self.deep, self.rest, strict=True):
            y = y + 0.3 * rest(deep(y).transpose(1, 2)).transpose(1, 2)
        size, phase = self.out(self.last(y.transpose(1, 2))).transpose(1, 2).chunk(2, 1)
        size = torch.clip(torch.exp(size), max=1e2)
        both, step = torch.cat([size * phase.cos(), size * phase.sin()], 1), self.size // 4
        whole = F.conv_transpose1d(both, self.waves, stride=step)
        share = F.conv_transpose1d(torch.ones(1, 1, x.shape[2]), self.window, stride=step)
        return (whole / share.clamp(min=1e-11))[..., self.size // 2 : -self.size // 2]


class Separation(nn.Module):
    """Music separation in the time domain: strided Convs, gates, an LSTM, transposed Convs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        c = [2, *(width * 2**n for n in range(4))]
        self.down = nn.ModuleList(
            [
                nn.Sequential(nn.Conv1d(a, b, 8, 4), nn.ReLU(), nn.Conv1d(b, 2 * b, 1), nn.GLU(1))
                for a, b in pairwise(c)
            ]
        )
        self.lstm, self.join = nn.LSTM(c[-1], c[-1], 2, bidirectional=True), nn.Linear(2 * c[-1], c[-1])
        self.up = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv1d(b, 2 * b, 3, padding=1),
                    nn.GLU(1),
                    nn.ConvTranspose1d(b, a if a > 2 else 8, 8, 4),
                )
                for a, b in reversed([*pairwise(c)])
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        mean, deviation, skips = x.mean((1, 2), keepdim=True), x.std((1, 2), keepdim=True), []
        x = (x - mean) / (deviation + 1e-5)
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = self.join(self.lstm(x.permute(2, 0, 1))[0]).permute(1, 2, 0)
        for n, block in enumerate(self.up):
            x = block(x + skips.pop()[..., : x.shape[-1]])
            x = F.relu(x) if n < 3 else x
        return x * (deviation + 1e-5) + mean


def songs(seconds: int) -> Feeds:
    draw, count = np.random.default_rng(5), 340 + 256 * (172 * seconds)
    time, found = np.arange(count) / 44100, []
    for n in range(SAMPLES):
        sides = [
            sum(np.sin(2 * np.pi * (110 + 30 * n + 11 * k) * h * time + h) / h for h in range(1, 9))
            for k in range(2)
        ]
        louder = 0.1 * np.stack(sides) * (0.5 + 0.5 * np.sin(2 * np.pi * (2 + n) * time))
        found.append({"x": (louder + 0.01 * draw.standard_normal((2, count)))[None].astype(np.float32)})
    return found


# -- a decoder's step, points, volumes -----------------------------------------------------------


class Rms(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class DecoderStep(nn.Module):
    """One step of a decoder with rotary positions, shared keys and values, and its cache as inputs and outputs."""

    shared = 4

    def __init__(self, width: int, depth: int, words: int = 16000) -> None:
        super().__init__()
        self.width, self.heads, self.depth, keys = width, width // 64, depth, 64 * self.shared
        linear = lambda a, b: nn.ModuleList([nn.Linear(a, b, bias=False) for _ in range(depth)])  # noqa: E731
        self.words, self.head, self.last = (
            nn.Embedding(words, width),
            nn.Linear(width, words, bias=False),
            Rms(width),
        )
        self.n1, self.n2 = (nn.ModuleList([Rms(width) for _ in range(depth)]) for _ in range(2))
        self.q, self.o, self.k, self.v = (
            linear(width, width),
            linear(width, width),
            linear(width, keys),
            linear(width, keys),
        )
        self.gate, self.up, self.down = (
            linear(width, 3 * width),
            linear(width, 3 * width),
            linear(3 * width, width),
        )

    def forward(self, ids: Tensor, place: Tensor, mask: Tensor, *past: Tensor) -> Any:
        phase = place[:, None, :, None].float() * torch.exp(-torch.arange(0, 64, 2) / 64 * math.log(10000.0))
        cos, sin = (torch.cat([one, one], -1) for one in (phase.cos(), phase.sin()))
        hidden = (1 - mask[:, None, None, :].float()) * torch.finfo(torch.float32).min
        x, new = self.words(ids), list[Tensor]()
        turned = lambda z: z * cos + torch.cat([-z[..., 32:], z[..., :32]], -1) * sin  # noqa: E731
        for n in range(self.depth):
            y = self.n1[n](x)
            q, k = turned(heads(self.q[n](y), self.heads)), turned(heads(self.k[n](y), self.shared))
            k, v = (
                torch.cat([past[2 * n], k], 2),
                torch.cat([past[2 * n + 1], heads(self.v[n](y), self.shared)], 2),
            )
            wide = [one.repeat_interleave(self.heads // self.shared, 1) for one in (k, v)]
            x = x + self.o[n](joined((q @ wide[0].transpose(-2, -1) / 8 + hidden).softmax(-1) @ wide[1]))
            y = self.n2[n](x)
            x, new = x + self.down[n](F.silu(self.gate[n](y)) * self.up[n](y)), [*new, k, v]
        return (self.head(self.last(x)), *new)


def cached(batch: int, length: int, depth: int) -> Feeds:
    draw, found, loud = np.random.default_rng(4), [], 1 + 3 * (np.arange(64) % 17 == 3)
    for n in range(SAMPLES):
        one = {"ids": draw.integers(0, 16000, (batch, 1)), "place": np.full((batch, 1), length, np.int64)}
        one["mask"] = np.ones((batch, length + 1), np.int64)
        one["mask"][-1, : length // 8 + 9 * n] = 0
        for layer in range(depth):
            one[f"past_{layer}_key"] = (normal(draw, batch, DecoderStep.shared, length, 64) * loud).astype(
                np.float32
            )
            one[f"past_{layer}_value"] = normal(draw, batch, DecoderStep.shared, length, 64, scale=0.7)
        found.append(one)
    return found


class Pillars(nn.Module):
    """A lidar detector: points of pillars through a layer and a maximum, scattered to a grid; Convs; heads."""

    def __init__(self, grid: int) -> None:
        super().__init__()
        self.grid, self.linear, self.norm = grid, nn.Linear(9, 64, bias=False), nn.BatchNorm1d(64, eps=1e-3)
        self.stages, width = nn.ModuleList(), 64
        for out, depth in ((64, 4), (128, 6), (256, 6)):
            rows = [(width if n == 0 else out, 2 if n == 0 else 1) for n in range(depth)]
            cells = [
                (nn.Conv2d(i, out, 3, s, 1, bias=False), nn.BatchNorm2d(out, eps=1e-3), nn.ReLU())
                for i, s in rows
            ]
            self.stages.append(nn.Sequential(*[part for cell in cells for part in cell]))
            width = out
        self.up = nn.ModuleList([nn.ConvTranspose2d(64 * 2**n, 128, 2**n, 2**n) for n in range(3)])
        self.kinds, self.boxes = nn.Conv2d(384, 18, 1), nn.Conv2d(384, 42, 1)

    def forward(self, points: Tensor, count: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        mean = points[..., :3].sum(1, keepdim=True) / count.view(-1, 1, 1).clamp(min=1).float()
        there = (torch.arange(points.shape[1])[None] < count[:, None]).float()[..., None]
        middle = place[:, None].float() * 0.32 + 0.16 - 0.16 * self.grid
        parts = torch.cat([points, points[..., :3] - mean, points[..., :2] - middle], -1) * there
        y = F.relu(self.norm(self.linear(parts).transpose(1, 2))).amax(2)
        flat = torch.zeros(self.grid**2, 64).index_put((place[:, 1] * self.grid + place[:, 0],), y)
        x, levels = flat.t().view(1, 64, self.grid, self.grid), []
        for stage, up in zip(self.stages, self.up, strict=True):
            x = stage(x)
            levels.append(F.relu(up(x)))
        z = torch.cat(levels, 1)
        return self.kinds(z), self.boxes(z)


def scans(grid: int, points: int = 20) -> Feeds:
    draw, pillars, found = np.random.default_rng(1), grid * grid // 12, []
    for _ in range(SAMPLES):
        cells = draw.permutation(grid * grid)[:pillars]
        place = np.stack([cells % grid, cells // grid], 1).astype(np.int64)
        count = np.minimum(1 + draw.geometric(0.25, pillars), points).astype(np.int64)
        x = np.zeros((pillars, points, 4), np.float32)
        x[..., :2] = (place[:, None] + draw.random((pillars, points, 2))) * 0.32 - 0.16 * grid
        x[..., 2], x[..., 3] = draw.gamma(1.2, 0.6, x.shape[:2]) - 1.6, draw.random(x.shape[:2])
        found.append(
            {"points": x * (np.arange(points) < count[:, None])[..., None], "count": count, "place": place}
        )
    return found


class Volume(nn.Module):
    """A U-Net over volumes, as for CT scans: InstanceNorm, LeakyRelu, transposed Convs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        w = [width * 2**n for n in range(4)]

        def cell(a: int, b: int, stride: int = 1) -> nn.Module:
            norm = nn.InstanceNorm3d(b, affine=True)
            return nn.Sequential(nn.Conv3d(a, b, 3, stride, 1), norm, nn.LeakyReLU(0.01))

        self.down = nn.ModuleList(
            [nn.Sequential(cell(([1, *w])[n], w[n], 2 if n else 1), cell(w[n], w[n])) for n in range(4)]
        )
        self.grow = nn.ModuleList([nn.ConvTranspose3d(w[n + 1], w[n], 2, 2) for n in (2, 1, 0)])
        self.up = nn.ModuleList([nn.Sequential(cell(2 * w[n], w[n]), cell(w[n], w[n])) for n in (2, 1, 0)])
        self.last = nn.Conv3d(width, 14, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for grow, up, skip in zip(self.grow, self.up, skips[-2::-1], strict=True):
            x = up(torch.cat([grow(x), skip], 1))
        return self.last(x)


def scans_3d(side: int) -> Feeds:
    draw, axis = np.random.default_rng(6), np.linspace(-1, 1, side)
    z, y, x = np.meshgrid(axis, axis, axis, indexing="ij")
    bodies = [
        np.tanh(8 * (0.6 + 0.05 * n - np.sqrt(z**2 + (y * (1 + 0.1 * n)) ** 2 + x**2)))
        for n in range(SAMPLES)
    ]
    return [
        {"x": (one + 0.1 * draw.standard_normal(one.shape))[None, None].astype(np.float32)} for one in bodies
    ]


# -- families and their draw ---------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A kind of network: the sizes that are drawn, and what they make."""

    sizes: Mapping[str, Sequence[int]]
    make: Callable[..., tuple[nn.Module, Feeds]]


FAMILIES = {
    "detector": Family({"size": (320, 640, 1024), "width": (16, 32, 48), "batch": (1, 2, 4)}, lambda size, width, batch: (Detector(size, width), pictures(size, batch))),
    "latent_unet": Family({"side": (32, 64), "width": (128, 192), "batch": (2, 4, 8)}, lambda side, width, batch: (LatentUnet(width), latents(side, batch, 512))),
    "diffusion_transformer": Family({"side": (32, 64), "width": (384, 768, 1024), "batch": (1, 2, 8)}, lambda side, width, batch: (DiffusionTransformer(width, side), latents(side, batch))),
    "flow": Family({"size": (192, 256, 320), "updates": (4, 8, 12)}, lambda size, updates: (Flow(updates), frames(size))),
    "speech_encoder": Family({"width": (256, 384, 512), "frames": (480, 1000, 1600), "batch": (1, 4, 16)}, lambda width, frames, batch: (SpeechEncoder(width), sounds(80, frames, batch))),
    "vocoder": Family({"width": (256, 384, 512), "frames": (96, 188, 400), "batch": (1, 4)}, lambda width, frames, batch: (Vocoder(width), sounds(100, frames, batch))),
    "separation": Family({"width": (32, 48, 64), "seconds": (1, 2)}, lambda width, seconds: (Separation(width), songs(seconds))),
    "decoder_step": Family({"width": (512, 768, 1024), "depth": (6, 8, 12), "length": (256, 512, 1024), "batch": (1, 4, 16)}, lambda width, depth, length, batch: (DecoderStep(width, depth), cached(batch, length, depth))),
    "pillars": Family({"grid": (144, 216, 320)}, lambda grid: (Pillars(grid), scans(grid))),
    "volume": Family({"side": (48, 64, 96), "width": (16, 24, 32)}, lambda side, width: (Volume(width), scans_3d(side))),
}  # fmt: skip

USUAL = (
    "pillars-grid216", "vocoder-width384-frames188-batch1", "mobilenetv3_large_100-batch64", "efficientnet_b3-batch16-size288",
    "flow-size256-updates8", "resnet50-batch32", "detector-size640-width32-batch1", "speech_encoder-width384-frames1000-batch4",
    "separation-width48-seconds1", "volume-side64-width24", "decoder_step-width768-depth8-length1024-batch4",
    "diffusion_transformer-side32-width768-batch2", "latent_unet-side64-width192-batch2", "vit_base_patch16_224-batch16",
    "bert-batch32-length128",
)  # fmt: skip
"""Sizes that are common, the small networks first."""

LARGE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
"""What transformers of the table have here."""


def sizes_of(name: str) -> tuple[str, Sizes]:
    """The network of a name, and its sizes; none for a network of the small stratum."""
    base, *words = name.split("-")
    pairs = [re.fullmatch(r"([a-z]+)(\d+)", word) for word in words]
    return base, {pair[1]: int(pair[2]) for pair in pairs if pair}


def deployed(seed: int, timm_names: Sequence[str], table: Sequence[str]) -> list[str]:
    """Names with drawn sizes: `FAMILY` of each family, and `OTHERS` of timm and of a table of transformers.

    Args:
        timm_names: That take images of any size, in the order in which they are drawn.
        table: Encoders of texts.
    """
    draw, found = np.random.default_rng([seed, 1]), list[str]()
    for family, one in FAMILIES.items():
        found += [
            _named(family, {n: draw.choice(sizes) for n, sizes in one.sizes.items()}) for _ in range(FAMILY)
        ]
    for name in timm_names[: OTHERS * 2 // 3]:
        size = LARGEST_IMAGE if draw.random() < LARGE_SHARE else int(draw.choice(IMAGES))
        fitting = [batch for batch in BATCHES if batch * size * size <= MOST_PIXELS]
        found.append(_named(name, {"batch": draw.choice(fitting), "size": size}))
    for name in draw.permutation(table)[: OTHERS - OTHERS * 2 // 3]:
        found.append(_named(str(name), {"batch": draw.choice(BATCHES[:-1]), "length": draw.choice(LENGTHS)}))
    return list(dict.fromkeys(found))


def _named(base: str, sizes: Mapping[str, Any]) -> str:
    return "-".join([base, *(f"{name}{size}" for name, size in sizes.items())])


def texts(batch: int, length: int) -> Feeds:
    from benchmarks.population_networks import tokens

    rows, found = [one for _ in range(batch) for one in tokens(length)], []
    for n in range(SAMPLES):
        ids = np.concatenate([np.roll(rows[n]["ids"], 3 * k, 1) for k in range(batch)])
        mask = np.stack([np.arange(length) < length - 3 * (k % 30) for k in range(batch)]).astype(np.int64)
        found.append({"ids": ids, "mask": mask})
    return found


def build(name: str) -> tuple[nn.Module, Feeds]:
    """The network of a name with sizes, with the weights of its initialisation, and its samples."""
    from benchmarks.population_networks import TRANSFORMERS, of_transformers

    base, sizes = sizes_of(name)
    if base in FAMILIES:
        return FAMILIES[base].make(**sizes)
    batch = sizes.get("batch", 1)
    if base in TRANSFORMERS:
        length = sizes.get("length", 128)
        return of_transformers(base, TRANSFORMERS[base], {**LARGE, "max_position_embeddings": 1026}), texts(
            batch, length
        )
    import timm

    options = {"img_size": sizes["size"]} if "size" in sizes else {}
    try:
        model = timm.create_model(base, pretrained=False, **options)
    except TypeError:  # takes images of any size
        model = timm.create_model(base, pretrained=False)
    return model, pictures(sizes.get("size", model.pretrained_cfg["input_size"][-1]), batch)
