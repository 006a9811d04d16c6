"""The numbers that a lower type holds, and those that a product in FP32 sees."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from onnx import TensorProto, helper

from rewriter.graph.float_types import SHORT_NAMES
from rewriter.model import Array

_EXPONENT = np.uint32(0x7F800000)
"""The bits of a float32's exponent."""

_ROUNDER = np.float32(1.5 * 2.0**13)
"""Float32 next to it are 2^-10 apart, as FP16 numbers from 1 to 2 are; with the half, below it, too."""

_LEAST_ROUNDER = np.float32(0.75)
"""Float32 next to it are 2^-24 apart, as FP16's subnormal numbers are."""

_PART = 2**14
"""Values that are looked at together: most weights are found not to be on the grid by the first ones."""


@dataclass(frozen=True)
class Grid:
    """The numbers of a type.

    Attributes:
        dtype: FLOAT16 or BFLOAT16 of TensorProto; FLOAT stands for TF32, to which Tensor Cores round what
            products in FP32 read: FP32's exponents, and as many bits of significand as FP16.
    """

    dtype: int

    @property
    def dropped(self) -> int:
        """Bits of float32's significand that the type lacks."""
        return 16 if self.dtype == TensorProto.BFLOAT16 else 13

    @cached_property
    def largest(self) -> np.float32:
        """The largest finite number."""
        exponent = 16 if self.dtype == TensorProto.FLOAT16 else 128
        return np.float32(2.0**exponent - 2.0 ** (exponent - 24 + self.dropped))

    @property
    def stored(self) -> np.dtype[np.generic]:
        """The type as numpy has it."""
        return np.dtype(helper.tensor_dtype_to_np_dtype(self.dtype))

    def holds(self, values: Array) -> bool:
        """Whether all values are of the type."""
        flat = values.reshape(-1)
        parts = (flat[i : i + _PART] for i in range(0, flat.size, _PART))
        return all(np.array_equal(self.nearest(part), part) for part in parts)

    def nearest(self, values: Array) -> Array:
        """Float32 values rounded to nearest even, as float32; those beyond the largest number become that."""
        held = np.maximum(values, -self.largest)  # np.clip takes longer than a row of 256 does in all
        np.minimum(held, self.largest, out=held)
        return _to_fp16(held) if self.dtype == TensorProto.FLOAT16 else self._cut(held)

    def _cut(self, values: Array) -> Array:
        """Half the last bit that stays, less one where that is even, carries into it."""
        bits = values.view(np.uint32)
        kept = (bits >> np.uint32(self.dropped)) & np.uint32(1)
        kept += bits
        kept += np.uint32(2 ** (self.dropped - 1) - 1)
        kept &= np.uint32(2**32 - 2**self.dropped)
        return kept.view(np.float32)

    def refusal(self, value: Array) -> str | None:
        """Why values cannot be put on the grid; None if they can."""
        largest = np.abs(value).max(initial=0)
        if not np.isfinite(largest):
            return "the weight is not finite"
        return (
            f"{SHORT_NAMES[self.dtype].upper()} cannot hold {largest:.4g}" if largest > self.largest else None
        )


def _to_fp16(values: Array) -> Array:
    """Adding what has the right last bit rounds, and subtracting it gives the rounded value.

    A third of the time that bits take, where subnormal numbers are a case of their own.
    """
    rounder: Array = np.bitwise_and(values.view(np.uint32), _EXPONENT).view(np.float32)
    np.multiply(rounder, _ROUNDER, out=rounder)
    np.maximum(rounder, _LEAST_ROUNDER, out=rounder)
    rounded: Array = values + rounder
    np.subtract(rounded, rounder, out=rounded)
    np.copysign(rounded, values, out=rounded)
    return rounded
