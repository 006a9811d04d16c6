"""Rules that keep nodes in FP32 where TensorRT computes in FP32 at no cost.

docs/accuracy.md has the measurements: epilogues of products, norms of one operator, attention's Softmax,
written-out sums of products, and divisions by a constant whose reciprocal FP16 rounds. Not free: epilogues of
a Conv, or of several products of one tensor that no pass merged (merge-projections).
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from onnx import NodeProto

from rewriter.hazards import Hazard
from rewriter.hazards.analysis import GraphAnalysis
from rewriter.hazards.magnitude import replaces_nan
from rewriter.ir.graph.ops import (
    CONVOLUTIONS,
    ELEMENTWISE,
    LAYOUTS,
    REDUCING,
    RESHAPES,
    ROW_NORMS,
    SCALING,
    SUMS,
)
from rewriter.ir.model.tensors import TensorFacts
from rewriter.target import Target
from rewriter.target.costs import bound_by_arithmetic
from rewriter.target.fusion import elementwise_after, has_fp32_epilogue, projected, rounded_reciprocal

RULE = "epilogue"
NORM_RULE = "norm"
SOFTMAX_RULE = "softmax"
RECIPROCAL_RULE = "rounded-reciprocal"
DOT_PRODUCT_RULE = "dot-product"
FREE = frozenset({RULE, NORM_RULE, SOFTMAX_RULE, RECIPROCAL_RULE, DOT_PRODUCT_RULE})
"""Rules that keep nodes in FP32 because it costs nothing, not because of a hazard."""

PROBE = "matmul-epilogue"
"""Probe: does a product sum in FP32 for an FP32 epilogue? `fp16` means no."""

SOFTMAX_PROBE = "attention-islands"
"""Probe: which FP32 islands leave attention one kernel? `none` means none."""

_ON_SCORES = SCALING | {"Add", "Where"}
"""Operators between the scores of attention and their Softmax."""

_INSTRUCTIONS = {"HardSigmoid": 4, "Clip": 2}
"""Operators that TensorRT computes by several: product, sum, minimum and maximum."""

_MOST_GATED, _MOST_MOVED = 2**17, 2**20
"""Elements of a product's result whose SiLU, or whose move by a view and a Transpose, is free beside FP32:
0.13 and 0.9 million are, 0.77 and 1.2 are not (docs/accuracy.md#own-epilogues)."""

_REASON = "the FP16 product before it then sums in FP32, at no cost"
_NORM_REASON = "it computes in FP32 inside: FP32 operands and results cost nothing extra"
_DOT_PRODUCT_REASON = "a written-out sum of products, which has to be exact"
_SOFTMAX_REASON = "attention stays one kernel with it in FP32, and the product before it sums in FP32"


def refusals(target: Target) -> Iterator[str]:
    """One sentence for each rule that `rewriter probe` switched off for the target."""
    found = f"`rewriter probe` found that on {target}"
    if target.answers.get(PROBE) == "fp16":
        yield f"no FP32 epilogues: {found} an FP16 MatMul sums in FP16 even where its epilogue is FP32"
    if target.answers.get(SOFTMAX_PROBE) == "none":
        yield f"attention's Softmax stays FP16: {found} attention is one kernel only without FP32 in it"


def _has_epilogues(analysis: GraphAnalysis) -> bool:
    """True if the target's FP16 products sum in FP32 for an FP32 epilogue, as far as is known."""
    return analysis.is_fp16 and analysis.request.target.answers.get(PROBE) != "fp16"


def epilogues(analysis: GraphAnalysis, fp32: AbstractSet[int]) -> Iterator[Hazard]:
    """The epilogues of FP16 matrix products.

    An epilogue starts at the first operator after a product and ends at the next matrix product, view or
    output: Casts are then only needed where FP16 is read. Operators that lead to the Softmax of attention
    stay FP16.

    Args:
        fp32: The identities of the nodes in FP32; the caller adds each that is yielded.
    """
    masked = scores_of_attention(analysis)
    queue: list[NodeProto] = []
    for product, readers in _starts(analysis, fp32, masked):
        for first in readers:
            if id(first) not in fp32:
                queue.append(first)
                yield Hazard(first, RULE, _REASON, product.output[0])
    while queue:
        node = queue.pop()
        for out in filter(analysis.is_float, node.output):
            for _, reader in analysis.readers(out):
                grows = reader.op_type in ELEMENTWISE and id(reader) not in masked
                if grows and id(reader) not in fp32:
                    queue.append(reader)
                    yield Hazard(reader, RULE, _REASON, out)


def own_epilogues(analysis: GraphAnalysis, fp32: AbstractSet[int]) -> Iterator[Hazard]:
    """The nodes that an FP16 product's kernel computes from its result and constants: bias, activation.

    With all of them in FP32 the kernel does the same work and rounds once, at its end
    (docs/accuracy.md#own-epilogues). If the kernel of a norm or Transpose takes them over, the product sums
    in FP16 all the same, so they stay FP16. So does a large SiLU, which takes longer and is hardly more
    accurate. So do all after a product whose time arithmetic decides, where FP32 sums add to it: a ViT-B of
    16 images took 4 % more (benchmarks/README.md#deployed-sizes). `fp32` as for `epilogues`.
    """
    masked = scores_of_attention(analysis)
    facts = analysis.graph.model.at_sizes(analysis.request.sample).facts().main
    shapes = {name: tensor.shape for name, tensor in facts.items()}
    for product, _ in _starts(analysis, fp32, masked):
        if bound_by_arithmetic(product, shapes):
            continue
        chain = elementwise_after(analysis, product.output[0], lambda node: id(node) in masked)
        gated = _has_silu(chain) and _elements(product.output[0], facts) > _MOST_GATED
        if chain and not gated and not _is_taken_over(analysis, chain, facts):
            yield from (Hazard(node, RULE, _REASON, product.output[0]) for node in chain)


def _has_silu(chain: Sequence[NodeProto]) -> bool:
    """True if a Sigmoid of the chain gates the chain itself."""
    gates = {node.output[0] for node in chain if node.op_type == "Sigmoid"}
    return any(node.op_type == "Mul" and gates.intersection(node.input) for node in chain)


def _elements(tensor: str, facts: Mapping[str, TensorFacts]) -> int:
    """0 for a tensor of a subgraph, of which nothing is known."""
    return facts[tensor].elements if tensor in facts else 0


def _is_taken_over(
    analysis: GraphAnalysis, chain: Sequence[NodeProto], facts: Mapping[str, TensorFacts]
) -> bool:
    """True if another kernel computes a chain: a Transpose reads its end, or only a norm or reduction does.

    A norm also takes a sum of the end with another tensor, if it is the only reader of the sum. Kernels of
    the parts of a Split compute the chain if one of them transposes for a Conv; else another kernel copies
    the other parts. So does a Transpose after a view, if it moves many elements. A row before a gate of more
    than two instructions, such as HardSigmoid, is viewed in the kernel that computes it: in FP32 its view and
    Cast would need another kernel.
    """
    after = _after(analysis, chain)
    if any(node.op_type == "Transpose" for node in after):
        return True
    reader = _only(after)
    if reader is not None and reader.op_type in SUMS and not analysis.is_output(reader.output[0]):
        summed = _only([n for _, n in analysis.readers(reader.output[0])])
        return summed is not None and summed.op_type in REDUCING
    if reader is not None and reader.op_type == "Split":
        moved = (n for part in reader.output for _, n in analysis.readers(part) if n.op_type == "Transpose")
        return any(n.op_type in CONVOLUTIONS for move in moved for _, n in analysis.readers(move.output[0]))
    if reader is not None and reader.op_type in RESHAPES:
        transposed = any(n.op_type == "Transpose" for _, n in analysis.readers(reader.output[0]))
        if transposed and _elements(reader.input[0], facts) > _MOST_MOVED:
            return True
        sizes, gate = analysis.graph.sizes(reader.input[0]), elementwise_after(analysis, reader.output[0])
        is_row = sizes is not None and max(sizes[:-1], default=1) == 1
        multiplies = {node.op_type for node in _after(analysis, gate)} == {"Mul"}
        return is_row and multiplies and sum(_INSTRUCTIONS.get(node.op_type, 1) for node in gate) > 2
    return reader is not None and reader.op_type in REDUCING


def _after(analysis: GraphAnalysis, chain: Sequence[NodeProto]) -> list[NodeProto]:
    """The nodes that read a chain's results and do not belong to it."""
    inside = {id(node) for node in chain}
    return [n for node in chain for _, n in analysis.readers(node.output[0]) if id(n) not in inside]


def _only(nodes: Sequence[NodeProto]) -> NodeProto | None:
    return nodes[0] if len(nodes) == 1 else None


def norms(analysis: GraphAnalysis, fp32: AbstractSet[int]) -> Iterator[Hazard]:
    """The norms of one operator, and the views between them and FP32 nodes.

    A norm that reads an FP32 sum directly stays FP16. `fp32` as for `epilogues`.
    """
    for node in analysis.nodes if _has_epilogues(analysis) else ():
        if node.op_type not in ROW_NORMS:
            continue
        before = list(analysis.upstream(node.input[0], _moves))
        source = analysis.producer(before[-1].input[0] if before else node.input[0])
        fed = id(source) in fp32 or any(id(view) in fp32 for view in before)
        if fed and not before:
            continue
        views = [reader for _, reader in analysis.downstream(node.output[0], _moves) if _moves(reader)]
        after = [v for v in views if any(id(n) in fp32 for _, n in analysis.downstream(v.output[0], _moves))]
        for member in (node, *(before if fed else ()), *after):
            yield Hazard(member, NORM_RULE, _NORM_REASON, node.input[0])


def _moves(node: NodeProto) -> bool:
    return node.op_type in LAYOUTS


def softmaxes(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """The Softmax of each attention whose products are FP16, and nothing around it."""
    if analysis.is_fp16 and analysis.request.target.answers.get(SOFTMAX_PROBE) != "none":
        for softmax in _attention(analysis):
            yield Hazard(softmax, SOFTMAX_RULE, _SOFTMAX_REASON, softmax.input[0])


def scores_of_attention(analysis: GraphAnalysis) -> AbstractSet[int]:
    """The identities of the nodes that scale and mask the scores of attention."""
    return {id(node) for softmax in _attention(analysis) for node in _before(analysis, softmax)}


def _starts(
    analysis: GraphAnalysis, fp32: AbstractSet[int], masked: AbstractSet[int]
) -> Iterator[tuple[NodeProto, list[NodeProto]]]:
    """FP16 products that can have an FP32 epilogue, each with all of its readers.

    Products with a reader in `masked` are skipped: it stays FP16.
    """
    for node in analysis.nodes if _has_epilogues(analysis) else ():
        if id(node) in fp32 or projected(analysis, node) is None:
            continue
        ends = list(analysis.readers(node.output[0]))
        if has_fp32_epilogue(analysis, node, ends, fp32) and not any(id(n) in masked for _, n in ends):
            yield node, [reader for _, reader in ends]


def _attention(analysis: GraphAnalysis) -> Iterator[NodeProto]:
    """The Softmax of each attention: over a product of computed tensors, and only read by such products."""
    for node in analysis.nodes:
        if node.op_type == "Softmax" and not analysis.graph.is_output(node.output[0]):
            readers = _readers_of_weights(analysis, node)
            second = bool(readers) and all(_of_activations(analysis, r) for r in readers)
            before = (p for n in (node, *_before(analysis, node)) for p in map(analysis.producer, n.input))
            if second and any(p is not None and _of_activations(analysis, p) for p in before):
                yield node


def _of_activations(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True for a MatMul of two computed tensors that sums more than one term."""
    if node.op_type != "MatMul" or any(analysis.is_constant(t) for t in node.input):
        return False
    shape = analysis.graph.shape(node.input[0])
    computed = all(analysis.producer(t) is not None for t in node.input)
    return computed and (shape is None or shape[-1:] != (1,))


def _readers_of_weights(analysis: GraphAnalysis, softmax: NodeProto) -> list[NodeProto]:
    """The readers of a Softmax, or of PyTorch's Where after it, which replaces the NaN of masked rows."""
    readers = [reader for _, reader in analysis.readers(softmax.output[0]) if reader.op_type != "IsNaN"]
    guards = [reader for reader in readers if replaces_nan(analysis, reader)]
    if len(guards) == len(readers) == 1 and not analysis.is_output(guards[0].output[0]):
        return [reader for _, reader in analysis.readers(guards[0].output[0])]
    return readers


def _before(analysis: GraphAnalysis, softmax: NodeProto) -> list[NodeProto]:
    """Scaling and masks, from the Softmax up."""
    return list(analysis.upstream(softmax.input[0], lambda n: n.op_type in _ON_SCORES))


def dot_products(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Mul by a constant matrix and ReduceSum, the pooling before them, and what follows elementwise."""
    moves = ELEMENTWISE | RESHAPES
    for node in analysis.nodes:
        product = _product(analysis, node)
        if product is not None:
            readers = analysis.downstream(node.output[0], lambda n: n.op_type in moves)
            after = (reader for _, reader in readers if reader.op_type in moves)
            for member in (node, product, *_pooling(analysis, product), *after):
                yield Hazard(member, DOT_PRODUCT_RULE, _DOT_PRODUCT_REASON, node.output[0])


def _product(analysis: GraphAnalysis, node: NodeProto) -> NodeProto | None:
    """The Mul by a constant matrix that only the ReduceSum `node` reads; None if there is none."""
    product = analysis.producer(node.input[0]) if node.op_type == "ReduceSum" else None
    if product is None or product.op_type != "Mul":
        return None
    constant = [name for name in product.input if analysis.is_constant(name)]
    if len(constant) != 1 or analysis.graph.rank(constant[0]) != 2:
        return None
    return product if analysis.graph.only_consumer(product.output[0]) is node else None


def _pooling(analysis: GraphAnalysis, product: NodeProto) -> Iterator[NodeProto]:
    """The views before the Mul, and the pooling before these, if nothing else reads them."""
    (tensor,) = (name for name in product.input if not analysis.is_constant(name))
    node = analysis.producer(tensor)
    while node is not None and analysis.graph.only_consumer(node.output[0]) is not None:
        if node.op_type not in RESHAPES | {"GlobalAveragePool", "ReduceMean"}:
            return
        yield node
        node = analysis.producer(node.input[0]) if node.op_type in RESHAPES else None


LEAST_BIAS = 2.0**-14
"""Relative error of a reciprocal that is worth a Cast, a quarter of one rounding to FP16: on an H200 a slope
showed from there on (docs/accuracy.md#rounded-reciprocals)."""

BOUNDED = frozenset({"Erf", "Sigmoid", "HardSigmoid", "Tanh", "Softmax"})
"""Functions whose result does not grow with their argument."""


def rounded_reciprocals(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Divisions by a scalar whose reciprocal FP16 rounds.

    The scaling of attention's scores is skipped: FP32 there takes the fused kernel apart. So is the argument
    of a function that is bounded, as in GELU: a bias of it adds up no further, and FP32 there cost up to 6 %
    of latency. So is a result that nothing but the graph's output reads: TensorRT divides exactly there.
    """
    scores = scores_of_attention(analysis)
    for node in analysis.nodes if analysis.is_fp16 else ():
        if node.op_type != "Div" or id(node) in scores:
            continue
        divisor = analysis.scalar(node.input[1])
        bias = reciprocal_bias(divisor) if divisor is not None else 0.0
        readers = {reader.op_type for _, reader in analysis.readers(node.output[0])}
        if bias >= LEAST_BIAS and readers - BOUNDED:
            reason = f"FP16 rounds the reciprocal of {divisor:.6g} by {bias:.1e}; FP32 costs nothing"
            yield Hazard(node, RECIPROCAL_RULE, reason, node.input[0])


def reciprocal_bias(divisor: float) -> float:
    """Relative error of 1 / divisor rounded to FP16; 0.0 if FP16 has no such number."""
    factor = rounded_reciprocal(divisor)
    return 0.0 if factor is None else abs(factor * divisor - 1.0)
