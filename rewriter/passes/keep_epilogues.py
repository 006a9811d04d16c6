"""keep-epilogues: a view keeps the operators after a matrix product in the product's kernel."""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

from onnx import NodeProto

from rewriter.ir.graph import GraphEditor, attribute, display_name
from rewriter.ir.graph.match import walk_down
from rewriter.ir.graph.ops import ELEMENTWISE, PRODUCTS, ROW_NORMS
from rewriter.passes.base import Change, Context, Event, GraphPass, Refusal, Requires
from rewriter.target.fusion import kernel_results

MOST_AXES = 8  # TensorRT's Dims::MAX_DIMS


@dataclass(frozen=True)
class KeepEpilogues(GraphPass):
    """TensorRT-RTX may move the operators after a matrix product into the kernel of their consumer.

    The product then has no epilogue, and sums in FP16. With a view between the two, its own kernel computes
    them, with as many kernels as before. So every LayerNormalization, RMSNormalization and Transpose whose
    input is computed elementwise from a MatMul or Gemm gets an Unsqueeze of the first axis before it and a
    Squeeze after it. Three layers of a BERT have a quarter of the error and are faster
    (docs/accuracy.md#norms-and-transposes).

    A Transpose after a Conv of a series gets them, too, where a residual stream begins. TensorRT computes
    that Conv as one of an image, and its view would stay in all sums of the stream, whose norms then take
    the operators (docs/accuracy.md#own-epilogues).

    Options:
        of: Producers of the operators: products and Convs of series, or only these Convs.

    Declines:
        - a norm whose mean or deviation is read
        - data of 8 axes, the most that TensorRT has
    """

    of: Literal["products", "series"] = "products"

    requires = Requires(opset=13)  # from there on Unsqueeze takes its axes as an input
    example = """
         g (float[2,4] x, float[2,3] r) => (float[2,3] y)
        -<float[4,3] w, float[3] scale> {
        +<float[4,3] w, float[3] scale, int64[1] axis = {0}> {
             m = MatMul(x, w)
             s = Add(m, r)
        -    y = LayerNormalization<axis = -1>(s, scale)
        +    u = Unsqueeze(s, axis)
        +    n = LayerNormalization<axis = -1>(u, scale)
        +    y = Squeeze(n, axis)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        series = _elementwise_from(graph, lambda n: n.op_type == "Conv" and graph.rank(n.input[0]) == 3)
        epilogues = _elementwise_from(graph, lambda n: self.of == "products" and _has_weight(graph, n))
        for node in graph.nodes:
            moved = node.op_type == "Transpose" and node.input[0] in series and _begins_stream(graph, node)
            if moved or (node.op_type in ROW_NORMS | {"Transpose"} and node.input[0] in epilogues):
                reason = _reason_against(graph, node)
                if reason is not None:
                    yield Refusal(display_name(node), reason)
                elif node.op_type == "Transpose":
                    perm = attribute(node, "perm", ()) or range(graph.rank(node.input[0]) or 0)[::-1]
                    if perm:
                        yield _lift(graph, node, perm=[0, *(axis + 1 for axis in perm)])
                else:
                    axis = attribute(node, "axis", -1)
                    yield _lift(graph, node, axis=axis + 1 if axis >= 0 else axis)


def _elementwise_from(graph: GraphEditor, begins: Callable[[NodeProto], bool]) -> AbstractSet[str]:
    """The results of nodes, and what is computed elementwise from them."""
    return kernel_results(graph.nodes, begins, lambda node: node.op_type in ELEMENTWISE | {"Cast"}).keys()


def _has_weight(graph: GraphEditor, node: NodeProto) -> bool:
    return node.op_type in PRODUCTS and any(graph.constant(name) is not None for name in node.input[:2])


def _begins_stream(graph: GraphEditor, node: NodeProto) -> bool:
    """True if several nodes, a norm and the next sum, read a result or what is computed from it."""
    _, result = walk_down(graph, node.output[0], lambda reader: reader.op_type in ELEMENTWISE)
    return len(graph.consumers(result)) > 1


def _reason_against(graph: GraphEditor, node: NodeProto) -> str | None:
    if (graph.rank(node.input[0]) or 0) >= MOST_AXES:
        return f"{node.input[0]} has {MOST_AXES} axes, the most that TensorRT has"
    read = next(filter(graph.is_read, node.output[1:]), None)
    return f"its other result {read} is read" if read else None


def _lift(graph: GraphEditor, node: NodeProto, **axes: Any) -> Change:
    """Lets the node compute on a tensor with one more leading axis; `axes` are its attributes for that."""
    data, result = node.input[0], node.output[0]
    lifted = graph.tensor(f"{result}/lifted", dtype=graph.dtype(data))
    inner = graph.tensor(f"{result}/inner", dtype=graph.dtype(result))
    first = graph.add_ints(f"{result}/axis", 0)
    graph.replace_producer(
        result,
        graph.make("Unsqueeze", [data, first], [lifted]),
        graph.clone_node(node, [lifted, *node.input[1:]], [inner], name=node.name, **axes),
        graph.make("Squeeze", [inner, first], [result]),
    )
    return Change(display_name(node), f"a view stands between it and {data}")
