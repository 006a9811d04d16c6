"""FP32 epilogues: what is added to an FP16 matrix product is added in FP32, and the product with it.

TensorRT fuses a bias into the MatMul before it. Where the Add is FP32, with a Cast from the FP16 product,
the fused kernel sums in FP32 and rounds once, at its end. Measured on one H200 with TensorRT-RTX 1.6.1: a
relative error of 2.1e-4 instead of 7.7e-4 (depth 768) to 1.66e-3 (depth 4096), at 0.97 to 1.04 of the time,
where the MatMul in FP32 (TF32) takes 3 to 7 times as long (docs/accuracy.md).

What it does not do: Conv sums in FP16 all the same, and so do products of one tensor with several weights
(the projections to Q, K and V), which are merged into one. Both stay as they are.

The default preset leaves epilogues in FP16: they are most nodes of a transformer, and it promises to keep no
more of them in FP32 than a fix needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from onnx import NodeProto, TensorProto

from rewriter.base import Target
from rewriter.edits import label
from rewriter.hazards import Hazard
from rewriter.hazards.survey import Survey

RULE = "epilogue"
PROBE = "matmul-epilogue"
"""Who asks the GPU whether it works there; `fp16` is a no."""

_PRODUCTS = frozenset({"MatMul", "Gemm"})

_FOLLOWING = frozenset(
    "Add Sub Mul Div Pow Neg Abs Sqrt Reciprocal Exp Log Erf Tanh Sigmoid Relu LeakyRelu Elu Celu Selu Gelu "
    "Softplus Softsign Mish Swish HardSigmoid HardSwish PRelu Clip Min Max Sum "
    "LayerNormalization RMSNormalization SimplifiedLayerNormalization".split()
)
"""What an epilogue grows over: elementwise operators, and norms that compute in FP32 inside anyway."""


def refused_by(target: Target) -> bool:
    """Whether the target is known not to sum in FP32 for an FP32 epilogue."""
    return target.answers.get(PROBE) == "fp16"


def extend_over_epilogues(survey: Survey, found: dict[int, Hazard]) -> None:
    """Add the epilogues of FP16 matrix products to `found`, hazards by the identity of their nodes.

    From the Add behind each product on, over what follows elementwise, up to the next matrix product, view
    or output: Casts then stand where FP16 is read, and nowhere between.
    """
    if survey.settings.low != TensorProto.FLOAT16 or refused_by(survey.settings.target):
        return
    queue: list[NodeProto] = []
    for product, add in _starts(survey, found.keys()):
        if id(add) not in found:
            reason = f"{label(product)} sums in FP32 where this Add reads it in FP32"
            found[id(add)] = Hazard(add, RULE, reason)
            queue.append(add)
    while queue:
        node = queue.pop()
        for _, reader in (
            pair for out in node.output if survey.is_float(out) for pair in survey.readers(out)
        ):
            if reader.op_type in _FOLLOWING and id(reader) not in found:
                reason = f"reads {label(node)}, an FP32 epilogue, with no Cast between"
                found[id(reader)] = Hazard(reader, RULE, reason)
                queue.append(reader)


def _starts(survey: Survey, kept: AbstractSet[int]) -> Iterator[tuple[NodeProto, NodeProto]]:
    """FP16 products with a constant weight, each with the Add that alone reads it."""
    projections: dict[str, list[NodeProto]] = {}
    for node in survey.nodes:
        data = _projected(survey, node)
        if data is not None and id(node) not in kept:
            projections.setdefault(data, []).append(node)
    for products in projections.values():
        if len(products) == 1:  # several are merged into one, which sums in FP16
            (product,) = products
            out = product.output[0]
            readers = [reader for _, reader in survey.readers(out)]
            handed_out = any(survey.graph.is_output(name) for name in survey.aliases(out))
            if len(readers) == 1 and readers[0].op_type == "Add" and not handed_out:
                yield product, readers[0]


def _projected(survey: Survey, node: NodeProto) -> str | None:
    """The tensor that a matrix product multiplies by a constant weight; None for other nodes."""
    if node.op_type not in _PRODUCTS:
        return None
    computed = [survey.source(t) for t in node.input[:2] if not survey.is_constant(t)]
    return computed[0] if len(computed) == 1 else None
