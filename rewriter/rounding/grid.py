"""The numbers that a lower type holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np

from rewriter.model import Array
from rewriter.stored import NUMPY_TYPES, SHORT_NAMES


@dataclass(frozen=True)
class Grid:
    """The numbers of a type.

    Attributes:
        dtype: A TensorProto.DataType of `stored.NUMPY_TYPES`.
    """

    dtype: int

    @cached_property
    def largest(self) -> np.float32:
        """The largest finite number."""
        return np.float32(ml_dtypes.finfo(NUMPY_TYPES[self.dtype]).max)

    def nearest(self, values: Array) -> Array:
        """Float32 values rounded to nearest even, as float32; those beyond the largest number become that."""
        bounded = np.clip(values, -self.largest, self.largest)
        return bounded.astype(NUMPY_TYPES[self.dtype]).astype(np.float32)

    def refusal(self, value: Array) -> str | None:
        """Why values cannot be put on the grid; None if they can."""
        largest = np.abs(value).max(initial=0)
        if not np.isfinite(largest):
            return "the weight is not finite"
        return f"{SHORT_NAMES[self.dtype].upper()} cannot hold {largest:.4g}" if largest > self.largest else None
