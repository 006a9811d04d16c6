"""FP32 models that stand in for others: the reference, and the emulation of a reduced-precision one.

ONNX Runtime's CPU kernels hide FP16 overflow (they compute in FP32 and round once per fused
kernel), so an FP16 model is never run on it. Instead every tensor is FP32, and where the model
says FP16 or BF16 a pair of Casts rounds it, with the overflow and the subnormals of that type.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from onnx import TensorProto

from rewriter.emulation.accumulate import FIRST_OPSET, accumulate_in_fp16
from rewriter.emulation.product_sums import find_product_sums
from rewriter.emulation.tf32 import round_to_tf32
from rewriter.graph.retype import Request, retype
from rewriter.model import Model
from rewriter.model.facts import Facts

Accumulation = Literal["fp32", "fp16"]
"""Type in which MatMul, Gemm and Conv of FP16 tensors sum their products."""


def reference(model: Model, facts: Facts) -> Model:
    """`model` with every FP16 and BF16 tensor in FP32; its inputs keep their types, outputs are FP32.

    Casts that round on purpose (FP32 to FP16 and back) stay.
    """
    return retype(model, facts, _all_fp32(model, rounding=False))


def rounded(model: Model, facts: Facts) -> Model:
    """`reference`, with a round to its own type after every tensor that `model` keeps in FP16 or BF16.

    That is what the file says, whatever kernels make of it: what a rewrite of its structure must keep.
    """
    return retype(model, facts, _all_fp32(model, rounding=True))


def emulation(
    model: Model, facts: Facts, accumulation: Accumulation = "fp32", *, tf32: bool = False
) -> Model:
    """`rounded`, but for what TensorRT's kernels are known to do otherwise.

    Operators compute in FP32 inside and round once, which is what TensorRT was measured to do for
    normalisations and reductions. A MatMul, Gemm or Conv of FP16 tensors was measured to accumulate in
    FP16: `accumulation="fp16"` does that, too, and takes several times as long. Those of FP32 tensors are
    TF32 on Tensor Cores: `tf32` rounds their operands so. What sums in FP32 and is not rounded because of the
    FP32 operator behind it is what `epilogues` says.
    """
    found = find_product_sums(model, facts)
    emulated = retype(model, facts, replace(_all_fp32(model, rounding=True), exact=found.exact))
    if tf32:
        round_to_tf32(emulated, model, facts)
    if accumulation == "fp16":
        accumulate_in_fp16(emulated, model, facts, found)
    return emulated


def sums(model: Model, accumulation: Accumulation) -> str:
    """What `emulation` sums FP16 products in, for people: FP16 sums need operators of opset 13."""
    if accumulation == "fp32" or model.opset >= FIRST_OPSET:
        return accumulation.upper()
    return f"FP32, as FP16 sums are emulated from opset {FIRST_OPSET} on and the model has {model.opset}"


def _all_fp32(model: Model, *, rounding: bool) -> Request:
    outputs = {port.name: int(TensorProto.FLOAT) for port in model.signature.outputs}
    return Request(lambda _scope, _node: TensorProto.FLOAT, outputs=outputs, rounding=rounding)
