"""Synthetic pictures of a 14-bit sensor, with its noise."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

BLACK, WHITE = 512.0, 16383.0
"""Raw counts of a dark and of a full pixel."""

GAIN, READ_NOISE = 120.0, 200.0
"""Counts per electron, and the standard deviation of the read noise in counts, as in a dark room."""


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of noisy and clean pictures, float32 [1, size, size] in raw counts; `seed` selects them."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed = count, size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.count:
            raise IndexError(index)
        rng = np.random.default_rng([self.seed, index])
        clean = BLACK + (WHITE - BLACK) * scene(rng, self.size)
        electrons = rng.poisson((clean - BLACK) / GAIN)
        noisy = BLACK + GAIN * electrons + rng.normal(0, READ_NOISE, clean.shape)
        noisy = np.clip(np.round(noisy), 0, WHITE)
        return _tensor(noisy), _tensor(clean)


def scene(rng: np.random.Generator, size: int) -> np.ndarray:
    """Light in 0..1: soft shading with the 1/f amplitudes of photographs, and some hard edges."""
    fy, fx = np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None, :]
    falloff = 1 / np.maximum(np.hypot(fy, fx), 1 / size) ** 1.5
    light = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((size, size))) * falloff, (size, size))
    light = 0.45 + 0.15 * light / light.std()
    y, x = np.mgrid[:size, :size]
    for _ in range(4):
        angle, offset = rng.uniform(0, 2 * np.pi), rng.uniform(-0.3, 0.3) * size
        side = (x - size / 2) * np.cos(angle) + (y - size / 2) * np.sin(angle) > offset
        light = light + rng.uniform(-0.15, 0.15) * side
    return light.clip(0, 1)


def _tensor(picture: np.ndarray) -> Tensor:
    return torch.from_numpy(picture[None].astype(np.float32))
