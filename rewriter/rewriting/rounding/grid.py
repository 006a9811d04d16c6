"""The grid of a lower type: its numbers, and rounding to the nearest of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from onnx import TensorProto, helper

from rewriter.graph.float_types import SHORT_NAMES
from rewriter.model import Array

_EXPONENT = np.uint32(0x7F800000)
"""Mask of a float32's exponent bits."""

_ROUNDER = np.float32(1.5 * 2.0**13)
"""Near it, float32 numbers are 2^-10 apart, as FP16 numbers from 1 to 2 are. The factor 1.5 makes that true
below it, too."""

_LEAST_ROUNDER = np.float32(0.75)
"""Near it, float32 numbers are 2^-24 apart, as FP16's subnormal numbers are."""

_PART = 2**14
"""Values compared at a time: for most weights, the first ones show that they are not on the grid."""


@dataclass(frozen=True)
class Grid:
    """The numbers of a type.

    Attributes:
        dtype: TensorProto's FLOAT16, BFLOAT16, or FLOAT for TF32, to which Tensor Cores round the operands of
            FP32 products: FP32's exponents with FP16's significands.
    """

    dtype: int

    @property
    def dropped(self) -> int:
        """Bits of float32's significand that the type drops."""
        return 16 if self.dtype == TensorProto.BFLOAT16 else 13

    @cached_property
    def largest(self) -> np.float32:
        """The largest finite number."""
        exponent = 16 if self.dtype == TensorProto.FLOAT16 else 128
        return np.float32(2.0**exponent - 2.0 ** (exponent - 24 + self.dropped))

    @property
    def stored(self) -> np.dtype[np.generic]:
        """The type in numpy."""
        return np.dtype(helper.tensor_dtype_to_np_dtype(self.dtype))

    def holds(self, values: Array) -> bool:
        """True if all values are on the grid."""
        flat = values.reshape(-1)
        parts = (flat[i : i + _PART] for i in range(0, flat.size, _PART))
        return all(np.array_equal(self.nearest(part), part) for part in parts)

    def nearest(self, values: Array) -> Array:
        """Returns float32 values rounded to nearest even, clamped to the largest number."""
        rounded = np.empty_like(values)
        self.round_within(values.copy(), -self.largest, self.largest, rounded)
        return np.copysign(rounded, values, out=rounded)

    def of_sign(self, values: Array) -> tuple[Array, Array]:
        """Bounds, float32, of the numbers that have the sign of each value, or are 0; 0 and 0 for a 0."""
        zero = np.float32(0.0)
        return np.where(values < 0, -self.largest, zero), np.where(values > 0, self.largest, zero)

    def round_within(
        self, values: Array, low: Array | np.float32, high: Array | np.float32, out: Array
    ) -> None:
        """Write float32 values to `out`, clamped to bounds on the grid and rounded to nearest even.

        Args:
            values: Overwritten.
            out: Of the same shape; a 0 may have either sign.
        """
        np.maximum(values, low, out=values)  # np.clip has more overhead than rounding a row of 256
        np.minimum(values, high, out=values)
        if self.dtype == TensorProto.FLOAT16:
            _to_fp16(values, out)
        else:
            out[:] = self._cut(values)

    def _cut(self, values: Array) -> Array:
        """Round to nearest even: add half of the last kept bit, less one if that bit is 0, and truncate."""
        bits = values.view(np.uint32)
        kept = (bits >> np.uint32(self.dropped)) & np.uint32(1)
        kept += bits
        kept += np.uint32(2 ** (self.dropped - 1) - 1)
        kept &= np.uint32(2**32 - 2**self.dropped)
        return kept.view(np.float32)

    def refusal(self, value: Array) -> str | None:
        """Returns why values cannot be rounded to the grid; None if they can."""
        largest = np.abs(value).max(initial=0)
        if not np.isfinite(largest):
            return "the weight is not finite"
        return (
            f"{SHORT_NAMES[self.dtype].upper()} cannot hold {largest:.4g}" if largest > self.largest else None
        )


def _to_fp16(values: Array, out: Array) -> None:
    """Round by adding and subtracting a number whose last bit has the weight of the result's last bit.

    Three times as fast as bit operations, which need a special case for subnormal numbers.
    """
    rounder: Array = np.bitwise_and(values.view(np.uint32), _EXPONENT).view(np.float32)
    np.multiply(rounder, _ROUNDER, out=rounder)
    np.maximum(rounder, _LEAST_ROUNDER, out=rounder)
    np.add(values, rounder, out=out)
    np.subtract(out, rounder, out=out)
