"""FP32 where TensorRT computes in FP32 at no cost: behind FP16 products, in norms, in attention's Softmax.

A kernel computes what stands behind a product before it stores the result. Where that is FP32, with a Cast
from the FP16 product, the kernel sums in FP32, too, and rounds once, at its end. Measured on one H200 with
TensorRT-RTX 1.6.1 (docs/accuracy.md): a relative error of 2.1e-4 instead of 7.7e-4 (depth 384 and 768) to
1.66e-3 (depth 4096), at 0.97 to 1.05 of the time, where the MatMul in FP32 (TF32) takes 3 to 7 times as long.
The operator may be an Add, a Mul by constants or an activation; a Cast up and down again at once is folded.

In attention the Softmax in FP32, alone, makes the product before it sum in FP32: 4.6e-4 instead of 7.4e-4
(128 tokens), 9.1e-4 instead of 1.14e-3 (1500 tokens), at 0.98 to 1.0 of the time. The scaling and the mask
before it stay FP16: with a mask Add in FP32, attention of 1500 tokens was no longer one kernel, and took 1.6
times as long. So it is with IsNaN and Where behind it, which stay FP16: the search on that GPU found a Llama
block (128 tokens) with its two Softmaxes in FP32 at 6.0e-4 and 140.5 us, without at 7.0e-4 and 143.3.

What it does not do: Conv sums in FP16 all the same, and so do products of one tensor with several weights,
unless the graph merges them (pass merge-projections). A Reshape between product and operator undoes it, and
so does a norm that takes the operators into its own kernel, for the product is left with none. That is so for
a norm in FP32 that reads the result itself, and for one in FP16 if nothing else reads what was summed. With a
view between (pass keep-epilogues) the product keeps its operators, and the norm, in FP32, reads the sum as it
is. TensorRT computes norms in FP32 inside and casts in the same kernel: FP32 round a norm costs bandwidth
alone. Three layers of a BERT: 1.74e-3 without the views, 7.4e-4 with them, 4.1e-4 with the norms in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet

from onnx import NodeProto, TensorProto

from rewriter.base import Target
from rewriter.graph.ops import ELEMENTWISE, LAYOUTS, PRODUCTS, ROW_NORMS, SCALING
from rewriter.hazards import Hazard
from rewriter.hazards.attention import of_activations
from rewriter.hazards.survey import Survey
from rewriter.patterns.splits import REASON as SPLIT_REASON
from rewriter.patterns.splits import RULE as SPLIT_RULE
from rewriter.patterns.splits import is_part
from rewriter.planning import dot_products

RULE = "epilogue"
NORM_RULE = "norm"
SOFTMAX_RULE = "softmax"
FREE = frozenset({RULE, NORM_RULE, SOFTMAX_RULE, dot_products.RULE})
"""Rules that keep nodes in FP32 because it costs nothing, not because FP16 would break them."""

PROBE = "matmul-epilogue"
"""Who asks the GPU whether a product sums in FP32 for what stands behind it; `fp16` is a no."""

SOFTMAX_PROBE = "attention-islands"
"""Who asks the GPU which FP32 islands leave attention one kernel; `none` is a no."""

_ON_SCORES = SCALING | {"Add", "Where"}
"""What stands between the scores of attention and their Softmax."""

_REASON = "an FP16 product before it sums in FP32 for it, at no cost"
_NORM_REASON = "it computes in FP32 inside: what it reads and writes need not be rounded"
_SOFTMAX_REASON = "attention stays one kernel with it in FP32, and the product before it sums in FP32"


def refusals(target: Target) -> Iterator[str]:
    """What the target is known not to do, a sentence for each of the rules that it switches off."""
    if _refused(target):
        yield (
            f"no FP32 epilogues: `rewriter probe` found that on {target} an FP16 MatMul sums in FP16 even "
            "where what stands behind it is FP32"
        )
    if _softmax_refused(target):
        yield (
            f"attention's Softmax stays FP16: `rewriter probe` found that on {target} attention is one "
            "kernel only without FP32 in it"
        )


def _refused(target: Target) -> bool:
    return target.answers.get(PROBE) == "fp16"


def _softmax_refused(target: Target) -> bool:
    return target.answers.get(SOFTMAX_PROBE) == "none"


def extend_over_splits(survey: Survey, found: dict[int, Hazard]) -> None:
    """Add to `found` what the pass split-products wrote round its products."""
    if survey.request.low != TensorProto.FLOAT16:
        return
    for node in filter(is_part, survey.nodes):
        found.setdefault(id(node), Hazard(node, SPLIT_RULE, SPLIT_REASON, node.input[0]))


def extend_over_epilogues(survey: Survey, found: dict[int, Hazard]) -> None:
    """Add the epilogues of FP16 matrix products to `found`, hazards by the identity of their nodes.

    From the operator behind each product on, over what follows elementwise, up to the next matrix product,
    view or output: Casts then stand where FP16 is read, and nowhere between. What leads to the Softmax of
    attention stays FP16. What adds up a split product is a part of its epilogue.
    """
    if survey.request.low != TensorProto.FLOAT16 or _refused(survey.request.target):
        return
    masked = {id(n) for softmax in _attention(survey) for n in _before(survey, softmax)}
    queue = [node for node in survey.nodes if is_part(node) and id(node) in found]
    for product, first in _starts(survey, found.keys(), masked):
        if id(first) not in found:
            found[id(first)] = Hazard(first, RULE, _REASON, product.output[0])
            queue.append(first)
    while queue:
        node = queue.pop()
        for out in filter(survey.is_float, node.output):
            for _, reader in survey.readers(out):
                grows = reader.op_type in ELEMENTWISE and id(reader) not in masked
                if grows and id(reader) not in found:
                    found[id(reader)] = Hazard(reader, RULE, _REASON, out)
                    queue.append(reader)


def extend_over_norms(survey: Survey, found: dict[int, Hazard]) -> None:
    """Add to `found` the norms of one operator, and the views between them and FP32 nodes.

    A norm that reads an FP32 sum with no view between stays FP16.
    """
    if survey.request.low != TensorProto.FLOAT16 or _refused(survey.request.target):
        return
    for node in survey.nodes:
        if node.op_type not in ROW_NORMS:
            continue
        before = list(survey.upstream(node.input[0], _moves))
        source = survey.producer(before[-1].input[0] if before else node.input[0])
        fed = id(source) in found or any(id(view) in found for view in before)
        if fed and not before:
            continue
        behind = [view for view in _moved(survey, node) if _is_read(survey, view, found)]
        for kept in (node, *(before if fed else ()), *behind):
            found.setdefault(id(kept), Hazard(kept, NORM_RULE, _NORM_REASON, node.input[0]))


def _moves(node: NodeProto) -> bool:
    return node.op_type in LAYOUTS


def _moved(survey: Survey, node: NodeProto) -> list[NodeProto]:
    """The views of what a node computes, and the views of these."""
    return [reader for _, reader in survey.downstream(node.output[0], _moves) if _moves(reader)]


def _is_read(survey: Survey, node: NodeProto, found: Mapping[int, Hazard]) -> bool:
    """Whether a node of `found` reads what the node computes, through views or not."""
    return any(id(reader) in found for _, reader in survey.downstream(node.output[0], _moves))


def extend_over_softmax(survey: Survey, found: dict[int, Hazard]) -> None:
    """Add the Softmax of each attention whose product is FP16 to `found`, and nothing round it."""
    if survey.request.low != TensorProto.FLOAT16 or _softmax_refused(survey.request.target):
        return
    for softmax in _attention(survey):
        found.setdefault(id(softmax), Hazard(softmax, SOFTMAX_RULE, _SOFTMAX_REASON, softmax.input[0]))


def _starts(
    survey: Survey, kept: AbstractSet[int], masked: AbstractSet[int]
) -> Iterator[tuple[NodeProto, NodeProto]]:
    """FP16 products with a constant weight, with each of their readers where all are elementwise operators.

    Those that an operator of `masked` reads are left out: it stays FP16.
    """
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
            if not _is_handed_out(survey, out) and all(
                _may_end(survey, r) and id(r) not in masked for r in readers
            ):
                yield from ((product, reader) for reader in readers)


def _may_end(survey: Survey, reader: NodeProto) -> bool:
    """Whether a product's kernel sums in FP32 for a reader in FP32: an elementwise one, or a norm's view."""
    if reader.op_type in ELEMENTWISE:
        return True
    read = [n for _, n in survey.readers(reader.output[0])] if _moves(reader) else []
    return bool(read) and all(n.op_type in ROW_NORMS for n in read)


def _projected(survey: Survey, node: NodeProto) -> str | None:
    """The tensor that a matrix product multiplies by a constant weight; None for other nodes."""
    if node.op_type not in PRODUCTS:
        return None
    computed = [survey.source(t) for t in node.input[:2] if not survey.is_constant(t)]
    return computed[0] if len(computed) == 1 else None


def _attention(survey: Survey) -> Iterator[NodeProto]:
    """Every Softmax over a product of computed tensors whose result goes into such products alone."""
    for node in survey.nodes:
        if node.op_type == "Softmax" and not survey.graph.is_output(node.output[0]):
            readers = _readers_of_weights(survey, node)
            second = bool(readers) and all(of_activations(survey, r) for r in readers)
            if second and any(
                producer is not None and of_activations(survey, producer)
                for n in (node, *_before(survey, node))
                for producer in map(survey.producer, n.input)
            ):
                yield node


def _readers_of_weights(survey: Survey, softmax: NodeProto) -> list[NodeProto]:
    """What reads a Softmax, or PyTorch's Where behind it, which replaces the NaN of rows masked whole."""
    readers = [reader for _, reader in survey.readers(softmax.output[0]) if reader.op_type != "IsNaN"]
    guards = [reader for reader in readers if _replaces_nan(survey, reader, softmax)]
    if len(guards) == len(readers) == 1 and not _is_handed_out(survey, guards[0].output[0]):
        return [reader for _, reader in survey.readers(guards[0].output[0])]
    return readers


def _is_handed_out(survey: Survey, tensor: str) -> bool:
    return any(survey.graph.is_output(name) for name in survey.aliases(tensor))


def _replaces_nan(survey: Survey, node: NodeProto, softmax: NodeProto) -> bool:
    """Whether it is Where(IsNaN(weights), constant, weights)."""
    if node.op_type != "Where" or not survey.is_constant(node.input[1]):
        return False
    asked = survey.graph.producer(node.input[0])
    if asked is None or asked.op_type != "IsNaN":
        return False
    return all(survey.producer(name) is softmax for name in (node.input[2], asked.input[0]))


def _before(survey: Survey, softmax: NodeProto) -> list[NodeProto]:
    """Scaling and masks, from the Softmax up."""
    return list(survey.upstream(softmax.input[0], lambda n: n.op_type in _ON_SCORES))
