"""FP32 models that stand in for others: the reference, and the emulation of reduced precision.

ONNX Runtime's CPU kernels hide FP16 overflow: they compute in FP32 and round once per fused kernel. So an
FP16 model never runs on it. Instead every tensor is FP32, and a pair of Casts rounds each tensor that the
model has in FP16 or BF16, with the overflow and the subnormal numbers of that type.
"""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
from onnx import TensorProto, numpy_helper

from rewriter.ir.graph import casts_to
from rewriter.ir.graph.casts import TypeRequest, retype
from rewriter.ir.model import Model, walk_graphs, walk_nodes
from rewriter.ir.model.schemas import EXCHANGEABLE
from rewriter.runtime.emulation.accumulate import FIRST_OPSET, accumulate_in_fp16
from rewriter.runtime.emulation.local_functions import multiply_by_reciprocals
from rewriter.runtime.emulation.product_sums import find_product_sums
from rewriter.runtime.emulation.recurrences import STEP, take_apart
from rewriter.runtime.emulation.tf32 import round_to_tf32

Accumulation = Literal["fp32", "fp16"]
"""Type in which MatMul, Gemm and Conv of FP16 tensors sum their products."""

CAST_BYTES = 2**20
"""Least size of a weight that a Cast widens in the graph, in a model with large weights."""

LARGE_WEIGHTS = 2**28
"""Bytes of weights from which a copy of them in FP32 counts more than the time of Casts in each run."""


def reference(model: Model) -> Model:
    """`model` with every FP16 and BF16 tensor in FP32; its inputs keep their types, outputs are FP32.

    Casts that round on purpose (FP32 to FP16 and back) stay. A model that is all FP32 is returned itself.
    """
    if _is_fp32(model):
        return model
    return retype(model, _all_fp32(model, rounding=False))


def rounded(model: Model) -> Model:
    """`reference`, with tensors rounded that `model` has in FP16 or BF16: the model as its file states it."""
    return retype(model, _all_fp32(model, rounding=True))


def emulation(
    model: Model,
    # "fp16" makes FP16 MatMul, Gemm and Conv sum in FP16, as was measured; it takes longer
    accumulation: Accumulation = "fp32",
    *,
    tf32: bool = False,  # round the operands of products of FP32 tensors to TF32, as Tensor Cores do
    backwards: bool = False,  # sum in FP16 from the end: it rounds as much, but otherwise (docs/accuracy.md)
    outputs: Literal["fp32", "own"] = "fp32",  # "own" returns outputs in the types that `model` has
) -> Model:
    """`rounded`, with float64 as float32, and TensorRT's arithmetic where it is known to differ.

    Operators compute in FP32 inside and round once, as TensorRT was measured to do for normalisations and
    reductions. Products with an FP32 epilogue sum in FP32 and are not rounded (`product_sums`). Recurrent
    operators round every operation of a step (`recurrences`).
    """
    model = take_apart(import_float64(model))
    sums_of = find_product_sums(model)
    for scope, graph in enumerate(walk_graphs(model.proto.graph)):
        if graph.name == STEP:
            sums_of.summed.update((scope, name) for node in graph.node for name in node.output)
    request = replace(_all_fp32(model, rounding=True), exact=sums_of.exact)
    emulated = retype(model, request if outputs == "fp32" else replace(request, outputs={}))
    multiply_by_reciprocals(emulated, model)
    if tf32:
        round_to_tf32(emulated, model, request.cast_bytes)
    if accumulation == "fp16":
        accumulate_in_fp16(emulated, model, sums_of, backwards)
    emulated.mark_edited()
    return emulated


DOUBLE, FLOAT = int(TensorProto.DOUBLE), int(TensorProto.FLOAT)


def import_float64(model: Model) -> Model:
    """`model` with float32 for float64, as TensorRT imports it; itself if it has none.

    Inputs and outputs keep their types, with a Cast. Constants beyond float32 are clamped, as by the parser.
    """
    if not any(tensor.dtype == DOUBLE for scope in model.facts().scopes for tensor in scope.values()):
        return model
    clamped = model.copy()
    for graph in walk_graphs(clamped.proto.graph):
        values = (a.t for n in graph.node for a in n.attribute if a.HasField("t"))
        for tensor in (t for t in (*graph.initializer, *values) if t.data_type == DOUBLE):
            value, name = clamped.array(tensor), tensor.name
            beyond = np.isfinite(value) & (np.abs(value) > np.finfo(np.float32).max)
            if beyond.any():
                edge = np.copysign(np.finfo(np.float32).max, value)
                clamped.weights.pop(name, None)
                tensor.CopyFrom(numpy_helper.from_array(np.where(beyond, edge, value), name))
    floats = frozenset({DOUBLE, FLOAT})
    return retype(clamped, TypeRequest(lambda _scope, _node: FLOAT, floats=floats))


def sums(model: Model, accumulation: Accumulation) -> str:
    """The type in which `emulation` sums FP16 products, as a text: FP16 sums need opset 13."""
    if accumulation == "fp32" or model.opset >= FIRST_OPSET:
        return accumulation.upper()
    return f"FP32, as FP16 sums are emulated from opset {FIRST_OPSET} on and the model has {model.opset}"


def _is_fp32(model: Model) -> bool:
    """True if no tensor is FP16 or BF16, and no Cast from FP32 to FP32."""
    facts = model.facts()
    types = {tensor.dtype for scope in facts.scopes for tensor in scope.values()}
    if not types.isdisjoint(EXCHANGEABLE - {TensorProto.FLOAT}):
        return False
    casts = [node for node in walk_nodes(model.proto.graph) if casts_to(node, TensorProto.FLOAT)]
    fp32 = (name for scope in facts.scopes for name, t in scope.items() if t.dtype == TensorProto.FLOAT)
    return not casts or {node.input[0] for node in casts}.isdisjoint(fp32)


def _all_fp32(model: Model, *, rounding: bool) -> TypeRequest:
    outputs = {port.name: int(TensorProto.FLOAT) for port in model.signature.outputs}
    large = rounding and sum(array.nbytes for array in model.weights.values()) >= LARGE_WEIGHTS
    return TypeRequest(
        lambda _scope, _node: TensorProto.FLOAT,
        outputs=outputs,
        rounding=rounding,
        cast_bytes=CAST_BYTES if large else math.inf,
    )
