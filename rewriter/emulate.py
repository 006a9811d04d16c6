"""FP32 models that stand in for others: the reference, and the emulation of a reduced-precision one.

ONNX Runtime's CPU kernels hide FP16 overflow (they compute in FP32 and round once per fused
kernel), so an FP16 model is never run on it. Instead every tensor is FP32, and where the model
says FP16 or BF16 a pair of Casts rounds it, with the overflow and the subnormals of that type.
"""

from __future__ import annotations

from onnx import TensorProto

from rewriter.facts import Facts
from rewriter.model import Model
from rewriter.retype import Request, retype


def reference(model: Model, facts: Facts) -> Model:
    """`model` with every FP16 and BF16 tensor in FP32; its inputs keep their types, outputs are FP32.

    Casts that round on purpose (FP32 to FP16 and back) stay.
    """
    return retype(model, facts, _all_fp32(model, rounding=False))


def emulation(model: Model, facts: Facts) -> Model:
    """`reference`, with a round to its own type after every tensor that `model` keeps in FP16 or BF16.

    Operators compute in FP32 inside and round once, which is what TensorRT was measured to do for
    normalisations and reductions; a MatMul or Conv that accumulates in FP16 errs more.
    """
    return retype(model, facts, _all_fp32(model, rounding=True))


def _all_fp32(model: Model, *, rounding: bool) -> Request:
    outputs = {port.name: int(TensorProto.FLOAT) for port in model.signature.outputs}
    return Request(
        lambda _scope, _node: TensorProto.FLOAT, TensorProto.FLOAT, outputs=outputs, rounding=rounding
    )
