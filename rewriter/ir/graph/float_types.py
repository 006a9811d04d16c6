"""The float types that a tensor may change to and from, and the conversion of constants between them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from onnx import TensorProto

from rewriter.ir.errors import PassError
from rewriter.ir.model import Array

NUMPY_TYPES: dict[int, np.dtype[np.generic]] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
"""Their NumPy types. float64 is not among them: the pass drop-double removes it."""

EXCHANGEABLE = frozenset(NUMPY_TYPES)
SHORT_NAMES: dict[int, str] = {
    TensorProto.FLOAT: "fp32",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
}


def logical_name(name: str) -> str:
    """The name of a tensor without the type that is appended where a Cast writes a graph output."""
    base, _, suffix = name.rpartition("/")
    return base if suffix in SHORT_NAMES.values() else name


def convert(value: Array, dtype: int, name: str) -> Array:
    """`value` in another float type, rounded to nearest even; zeros and underflows keep their sign.

    Raises:
        PassError: a finite value would become infinite.
    """
    with np.errstate(over="ignore"):
        converted = value.astype(NUMPY_TYPES[dtype])
    infinite = np.isinf(converted)
    if infinite.any() and np.isfinite(value[infinite]).any():
        largest = np.abs(value[np.isfinite(value)]).max()
        short = SHORT_NAMES[dtype].upper()
        raise PassError(
            f"the constant holds values up to {largest:.4g}, which {short} cannot represent, and its "
            f"consumer is planned as {short}",
            where=name,
            hint="keep its consumers in FP32 (`keep-fp32`), or clamp it (pass clamp-constants)",
        )
    return converted
