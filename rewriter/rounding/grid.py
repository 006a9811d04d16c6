"""The numbers that a lower type holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from rewriter.model import Array
from rewriter.stored import SHORT_NAMES

_FP16_MIN_NORMAL = np.float32(2.0**-14)

_ROUNDER = np.float32(0.75)
"""Float32 next to it are 2^-24 apart, as FP16's subnormal numbers are."""


@dataclass(frozen=True)
class Grid:
    """The numbers of a type.

    Attributes:
        dtype: FLOAT16 or BFLOAT16 of TensorProto.
    """

    dtype: int

    @property
    def dropped(self) -> int:
        """Bits of float32's significand that the type lacks."""
        return 13 if self.dtype == TensorProto.FLOAT16 else 16

    @property
    def largest(self) -> np.float32:
        """The largest finite number."""
        exponent = 16 if self.dtype == TensorProto.FLOAT16 else 128
        return np.float32(2.0**exponent - 2.0 ** (exponent - 24 + self.dropped))

    def nearest(self, values: Array) -> Array:
        """Float32 values rounded to nearest even, as float32; those beyond the largest number become that.

        A fifth of the time of two conversions (4096 numbers to FP16 and back): half the last bit that stays,
        less one where that is even, carries into it. Below the smallest normal number, adding a number with
        the right last bit rounds.
        """
        bits = values.view(np.uint32)
        kept = (bits >> np.uint32(self.dropped)) & np.uint32(1)
        kept += bits
        kept += np.uint32(2 ** (self.dropped - 1) - 1)
        kept &= np.uint32(2**32 - 2**self.dropped)
        rounded = kept.view(np.float32)
        if self.dtype == TensorProto.FLOAT16:
            small = np.abs(values) < _FP16_MIN_NORMAL
            rounded = np.where(small, np.copysign((values + _ROUNDER) - _ROUNDER, values), rounded)
        return np.clip(rounded, -self.largest, self.largest, out=rounded)

    def refusal(self, value: Array) -> str | None:
        """Why values cannot be put on the grid; None if they can."""
        largest = np.abs(value).max(initial=0)
        if not np.isfinite(largest):
            return "the weight is not finite"
        return (
            f"{SHORT_NAMES[self.dtype].upper()} cannot hold {largest:.4g}" if largest > self.largest else None
        )
