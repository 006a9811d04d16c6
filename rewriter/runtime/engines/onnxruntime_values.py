"""Arrays as values of ONNX Runtime and back, in every element type that ONNX has."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import numpy_helper

from rewriter.ir.errors import ArithmeticRunError
from rewriter.ir.model import Array
from rewriter.runtime.engines.onnxruntime_module import import_onnxruntime

if TYPE_CHECKING:
    import onnxruntime as ort


def value_of(array: Array, device: str = "cpu") -> ort.OrtValue:
    """The array as an OrtValue that shares its memory where it is contiguous and stays on the CPU."""
    ort = import_onnxruntime()
    array = np.asarray(array, order="C")
    if array.dtype.isbuiltin != 2:  # 2: registered with numpy from outside, as ml_dtypes does
        return ort.OrtValue.ortvalue_from_numpy(array, device)
    dtype = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(f"u{array.itemsize}"), dtype)


def array_of(name: str, value: ort.OrtValue) -> Array:
    """The tensor `name` as an array; types that NumPy lacks, FP8 and INT4 among them, are those of ml_dtypes.

    Raises:
        ArithmeticRunError: it is a sequence, a map or an optional.
    """
    if not value.is_tensor():
        raise ArithmeticRunError(
            f"output {name!r} is {value.data_type()}, and only tensors can be compared",
            hint="TensorRT has tensors alone: leave the output out of the model, or use `verify=false`",
        )
    dtype = value.element_type()
    if dtype == onnx.TensorProto.STRING or onnx.helper.tensor_dtype_to_np_dtype(dtype).isbuiltin == 1:
        array: Any = value.numpy()
        return np.asarray(array)
    data = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return numpy_helper.to_array(onnx.TensorProto(data_type=dtype, dims=value.shape(), raw_data=data))
