"""What is left between two images that are one and the same but for how they were resampled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rewriter.model import Array

LEAST_PART = 0.05
"""Pixels of shift below which a convention of pixel centres is not spoken of."""


@dataclass(frozen=True)
class Resampling:
    """theirs ~ ours shifted by (dy, dx) pixels, plus `blur` times the Laplacian (below 0: sharper).

    `explained` is the share of the remaining variance that this makes up for.
    """

    dy: float
    dx: float
    blur: float
    explained: float

    @property
    def text(self) -> str:
        """What that hints at."""
        if self.explained < 0.2:
            return "what is left is no shift and no blur: noise, compression or another augmentation"
        parts = []
        if max(abs(self.dy), abs(self.dx)) >= LEAST_PART:
            parts.append(
                f"a shift by {self.dy:+.2f} rows and {self.dx:+.2f} columns (another convention of pixel "
                "centres, align_corners, or where the crop rounds)"
            )
        if abs(self.blur) >= 0.01:
            softer = "smoother" if self.blur > 0 else "sharper"
            parts.append(f"theirs is {softer} (another interpolation, antialiasing on one side)")
        return f"{'; '.join(parts) or 'small'}: {self.explained:.0%} of what is left"


def resampling(predicted: Array, theirs: Array) -> Resampling:
    """Fit shift and blur to theirs - predicted, both [..., H, W], by least squares.

    To first order, p(y + dy, x + dx) = p + dy p_y + dx p_x, and a narrow symmetric kernel adds a multiple
    of the Laplacian: the terms of the Taylor series.
    """
    p = predicted.astype(np.float64)
    inner = (..., slice(1, -1), slice(1, -1))
    by_row = (p[..., 2:, 1:-1] - p[..., :-2, 1:-1]) / 2
    by_column = (p[..., 1:-1, 2:] - p[..., 1:-1, :-2]) / 2
    around = p[..., 2:, 1:-1] + p[..., :-2, 1:-1] + p[..., 1:-1, 2:] + p[..., 1:-1, :-2]
    laplacian = around - 4 * p[inner]
    rest = (theirs[inner] - p[inner]).reshape(-1)
    terms = np.stack([t.reshape(-1) for t in (by_row, by_column, laplacian)])
    found = np.linalg.lstsq(terms @ terms.T, terms @ rest, rcond=None)[0]
    total = float(rest @ rest)
    left = rest - found @ terms
    explained = 1.0 - float(left @ left) / total if total else 0.0
    return Resampling(float(found[0]), float(found[1]), float(found[2]), explained)
