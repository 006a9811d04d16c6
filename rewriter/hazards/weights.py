"""Hazard rules about constants that the lower type cannot hold, or holds with few bits: weights and masks."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from onnx import NodeProto

from rewriter.base.errors import Severity
from rewriter.hazards.analysis import GraphAnalysis, Hazard
from rewriter.hazards.magnitude import FP16_FLUSH, largest
from rewriter.ir.graph import attribute, display_name
from rewriter.ir.graph.ops import CHEAP, INEQUALITIES, SOFTMAX, TENSOR_CORE
from rewriter.ir.model import Array
from rewriter.ir.patterns.masks import Use, extreme, huge_uses, obstacle

WEIGHT_ERROR = 1e-3
"""Relative L2 error of rounded weights; normal numbers lose 2^-11 = 4.9e-4 at most."""

BOUNDS = INEQUALITIES | {"Clip", "Min", "Max"}
"""Operators in which an infinite constant has the effect of a huge one."""


def weights(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Constants beyond the lower type's range, and weights of products so small that FP16 holds a few bits.

    In FP32, Tensor Cores round small weights to TF32: 11 bits, as many as FP16's normal numbers have. One
    such Conv, the last of a NAFNet with a residual stream in the thousands, caused most of that model's
    error. A huge bound, or mask of a Softmax, is a note: it has the same effect if it is infinite.
    """
    masks = {analysis.source(use.node.input[use.index]) for use in mask_uses(analysis)}
    errors: dict[str, float] = {}
    for node in analysis.nodes:
        for index, name in enumerate(node.input):
            tensor = analysis.source(name)
            value = analysis.graph.constant(tensor) if analysis.is_float(name) else None
            if value is None or not value.size:
                continue
            measured = analysis.range(tensor)  # so that most weights need not be read again
            size = measured.absmax if measured is not None and measured.finite else largest(value)
            if size > analysis.largest:
                harmless = node.op_type in BOUNDS or tensor in masks
                reason = f"{tensor} holds {size:.4g}"
                yield analysis.hazard(node, "weights", reason, tensor, "note" if harmless else "error")
            elif analysis.is_fp16 and index < 2 and node.op_type in TENSOR_CORE and value.size > 1:
                error = errors.setdefault(tensor, _rounding_error(analysis, tensor, value))
                if error > WEIGHT_ERROR:
                    reason = f"{tensor} is rounded by {error:.1%}: its values are below FP16's normal numbers"
                    severity: Severity = "error" if error > 0.5 else "warning"
                    yield analysis.hazard(node, "weights", reason, tensor, severity)


def _rounding_error(analysis: GraphAnalysis, tensor: str, value: Array) -> float:
    """Relative L2 error of a constant in FP16; 0 if its range excludes one, or if all of it is zero."""
    measured = analysis.range(tensor)
    # subnormals have an error of at most 2^-25, and the norm is at least sqrt(n) * mean
    if measured is not None and measured.mean_abs * WEIGHT_ERROR / 2 > 2.0**-25:
        return 0.0
    finite = value[np.isfinite(value)].astype(np.float64)
    norm = float(np.linalg.norm(finite))
    return float(np.linalg.norm(finite - finite.astype(np.float16))) / norm if norm else 0.0


def batch_statistics(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """BatchNormalization whose statistics FP16 cannot hold: variances up to 1e8 occur, and subnormal ones.

    Folded into a Conv, they are gone. `weights` judges each constant as a whole; here each channel counts,
    with the epsilon that is added to its variance.
    """
    for node in analysis.nodes if analysis.is_fp16 else ():
        if node.op_type != "BatchNormalization" or len(node.input) < 5:
            continue
        values = [analysis.constant(t) for t in node.input[1:5]]
        vectors = [v.astype(np.float64) for v in values if v is not None and v.dtype.kind == "f"]
        if len(vectors) < 4 or not all(np.isfinite(v).all() for v in vectors):
            continue
        epsilon = float(attribute(node, "epsilon", 1e-5))
        worst = _worst_channel(vectors, epsilon)
        if worst > WEIGHT_ERROR:
            what = f"statistics in FP16 change the factor of one channel by {worst:.2%}"
            if math.isinf(worst):
                what = f"statistics up to {max(np.abs(v).max() for v in vectors):.4g}"
            yield analysis.hazard(node, "weights", f"{display_name(node)}: {what}", node.input[4])


def _worst_channel(vectors: Sequence[Array], epsilon: float) -> float:
    """The largest relative change of a channel's factor; infinite if a statistic overflows."""
    scale, _, _, variance = vectors
    with np.errstate(over="ignore"):
        rounded = [v.astype(np.float16).astype(np.float64) for v in vectors]
    if not all(np.isfinite(v).all() for v in rounded):
        return math.inf
    used = np.abs(scale) > FP16_FLUSH * np.abs(scale).max(initial=0.0)
    exact = scale / np.sqrt(variance + epsilon)
    ratio = rounded[0] / np.sqrt(rounded[3] + epsilon)
    return float(np.max(np.abs(ratio - exact)[used] / np.abs(exact[used]), initial=0.0))


BEFORE_SOFTMAX = CHEAP - SOFTMAX


def masks(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Mask constants that become infinite in the lower type, whatever the samples' masks are.

    Multiplied by the 0 of an unmasked entry they are NaN: all nodes from there to the Softmax need FP32.
    Added or selected they are harmless until a row is masked entirely (docs/hazards.md#masks).
    """
    for use in mask_uses(analysis, products=True):
        value = f"{extreme(use.value):.4g}"
        tensor, reader = use.node.input[use.index], display_name(use.node)
        if use.node.op_type == "Mul":
            reason = f"{value} in {reader} becomes infinite, and 0 times infinity is NaN"
            before = analysis.downstream(use.node.output[0], lambda n: n.op_type in BEFORE_SOFTMAX)
            for node in (use.node, *(n for _, n in before)):
                yield analysis.hazard(node, "mask", reason, tensor, "error")
        else:
            guarded = _guarded(analysis, use.node)
            end = "which is replaced after the Softmax" if guarded else "and a row masked entirely is NaN"
            severity: Severity = "warning" if use.relies and not guarded else "note"
            reason = f"{value} in {reader} becomes infinite, {end}"
            yield Hazard(use.node, "mask", reason, tensor, severity=severity)


def mask_uses(analysis: GraphAnalysis, *, products: bool = False) -> Iterator[Use]:
    """Constants that become infinite in the lower type and that reach nothing but a Softmax.

    `products`: also finite factors that reach a Softmax among others.
    """
    for use in huge_uses(analysis.graph):
        huge = abs(extreme(use.value)) > analysis.largest
        if huge and (not obstacle(analysis.graph, use) or (products and _multiplies_scores(analysis, use))):
            yield use


def _multiplies_scores(analysis: GraphAnalysis, use: Use) -> bool:
    """True for a finite factor of what reaches a Softmax."""
    if use.node.op_type != "Mul" or not np.isfinite(use.value).all():
        return False
    readers = analysis.downstream(use.node.output[0], lambda n: n.op_type in BEFORE_SOFTMAX)
    return any(n.op_type in ("Softmax", "Attention") for _, n in readers)


def _guarded(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True if an IsNaN reads the Softmax's result, as exporters write it to replace NaN."""
    reached = analysis.downstream(node.output[0], lambda n: n.op_type in CHEAP)
    softmaxes = [n for _, n in reached if n.op_type == "Softmax"]
    readers = [r for s in softmaxes for r in analysis.graph.consumers(s.output[0])]
    return any(r.op_type == "IsNaN" for r in readers)
