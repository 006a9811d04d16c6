"""Maps of probabilities, such as those of segmentation and of text detectors, and how far they are apart.

At the edge of an object, a probability goes from 0 to 1 over a pixel or two. An edge that moves by a tenth of
a pixel changes values by a tenth, though nobody sees it. So maps are compared as areas.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from rewriter.ir.model import Array
from rewriter.runtime.figures.tolerances import USABLE

LEAST_SIDE = 16
"""Pixels of the shorter side below which an output is no map: edges would be most of it."""


@dataclass(frozen=True)
class MapError:
    """How far a map is from the original's.

    Attributes:
        distance: 1 - the weighted Jaccard index, sum(min(a, b)) / sum(max(a, b)): the share of the area that
            differs. 0 where both are empty.
        beyond: Largest distance of a value from the range of the original's values in the 3 x 3 pixels around
            it: 0 if edges moved by less than a pixel.
    """

    distance: float
    beyond: float

    def excess(self, allowed: float) -> float:
        """The error in units of what is allowed: of `distance` this much, of `beyond` `USABLE`."""
        return max(self.distance / allowed, self.beyond / USABLE)


def map_error(expected: Array, actual: Array) -> MapError | None:
    """Compares two arrays of probabilities [N, C, H, W]; None if they do not look like maps."""
    if expected.ndim != 4 or min(expected.shape[-2:]) < LEAST_SIDE:
        return None
    larger = float(np.maximum(expected, actual).sum(dtype=np.float64))
    common = float(np.minimum(expected, actual).sum(dtype=np.float64))
    lowest, highest = _around(expected)
    beyond = np.maximum(lowest - actual, actual - highest).max(initial=0.0)
    return MapError(1.0 - common / larger if larger > 0 else 0.0, float(max(beyond, 0.0)))


def _around(values: Array) -> tuple[Array, Array]:
    """Smallest and largest value in the 3 x 3 pixels around each."""
    height, width = values.shape[-2:]
    padded = np.pad(values, [(0, 0), (0, 0), (1, 1), (1, 1)], mode="edge")
    lowest, highest = values.copy(), values.copy()
    for row, column in product(range(3), repeat=2):
        shifted = padded[..., row : row + height, column : column + width]
        np.minimum(lowest, shifted, out=lowest)
        np.maximum(highest, shifted, out=highest)
    return lowest, highest
