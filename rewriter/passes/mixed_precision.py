"""mixed-precision: gives every float tensor its planned type."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from onnx import NodeProto, TensorProto

from rewriter.base.text import count
from rewriter.hazards.analysis import LOW_TYPES
from rewriter.ir.graph import GraphEditor, GraphView, attribute, is_op, open_graphs
from rewriter.ir.graph.casts import TypeRequest, retype
from rewriter.ir.graph.match import walk_up
from rewriter.ir.graph.ops import RECURRENT, VIEWS
from rewriter.ir.model import Model, Port
from rewriter.ir.model.graphs import walk_nodes
from rewriter.ir.plan import Epilogues, Plan, Precision, io_type, node_key, plugin_types
from rewriter.passes.algorithms.rounding import raised_bounds, unbiased_weights
from rewriter.passes.base import Change, Context, Event, Exactness, ModelPass, Refusal, Stage


@dataclass(frozen=True)
class MixedPrecision(ModelPass):
    """TensorRT 11 has no weak typing any more: the types in the ONNX file are the types that run.

    The pass applies a plan. FP32 islands get Casts on their border only, and initializers are converted once,
    with their sign. Scales and roi of Resize stay FP32. If, Loop and Scan keep one type across their border.
    Casts between float types in the given model are dissolved: each tensor has one stored type, and one Cast
    of it serves all consumers that read another.

    Options:
        epilogues: What the plan keeps in FP32 so that TensorRT sums FP16 matrix products in FP32: nothing;
            with `own`, bias and activation in the product's kernel, at no cost; with `all`, sums with other
            tensors, norms and attention's Softmax, too, which costs latency on some (docs/accuracy.md).
        rounding: Of weights: each to its nearest number; with `unbiased`, a few to their other neighbour, so
            that each output of a product keeps its mean over the samples (docs/accuracy.md#weights).

    Declines:
        - a model whose tensors all have their planned types already
    """

    epilogues: Epilogues = "none"
    rounding: Literal["nearest", "unbiased"] = "nearest"
    exactness = Exactness(5e-3, "FP16 has 11 bits; the error of well-conditioned networks is about 1e-3")
    stage = Stage.LOWERING
    keeps_signature = False
    example = """
         g (float[2,3] x, float[3,4] w) => (float[2,4] y) {
        -    m = MatMul(x, w)
        -    y = Relu(m)
        +    a = Cast<to = 10>(x)
        +    b = Cast<to = 10>(w)
        +    m = MatMul(a, b)
        +    r = Relu(m)
        +    y = Cast<to = 1>(r)
         }"""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        plan = context.plan or Plan("fp16")
        result = lowered(model, plan, context if self.rounding == "unbiased" else None, self.name)
        if result.same_as(model):
            yield Refusal("model", f"every tensor has its planned type ({plan.precision}) already")
            return
        model.adopt(result)
        rest, bf16 = plan.float_nodes - len(plan.decisions), len(plan.bf16)
        what = f"{count(rest, 'node')} in {plan.precision.upper()}, {len(plan.fp32)} in FP32"
        yield Change("model", what + (f", {bf16} in BF16" if bf16 else ""))


def lowered(model: Model, plan: Plan, means_of: Context | None = None, tag: str = "") -> Model:
    """Returns a copy of `model` with the types of `plan`; new nodes are tagged with `tag`.

    Weights are rounded by the means of the context, to nearest without one.
    """
    graph = GraphView(model, model.proto.graph, model.facts().main)
    refined = unbiased_weights(graph, plan, means_of) if means_of is not None else {}
    refined |= raised_bounds(graph, plan)
    result = retype(model, replace(request(model, plan, tag), refined=refined))
    if any(node.op_type in RECURRENT for node in walk_nodes(result.proto.graph)):
        for editor in reversed(open_graphs(result, tag)):
            with editor:
                _shield_recurrences(editor)
    return result


def _shield_recurrences(graph: GraphEditor) -> None:
    """Adds -0, which changes no number, to a sequence that a recurrent layer in FP32 reads from a Cast.

    TensorRT-RTX 1.4 to 1.7 builds no LSTM, GRU or RNN that runs only forward, over two or more steps, and
    reads a Cast from FP16 or BF16, with or without views between them.
    """
    for node in graph.nodes:
        if node.op_type in RECURRENT and attribute(node, "direction", "forward") == "forward":
            source = node.input[0]
            _, before = walk_up(graph, source, lambda view: is_op(view, *VIEWS))
            if is_op(graph.producer(before), "Cast") and graph.dtype(source) == TensorProto.FLOAT:
                result = graph.tensor(f"{source}/shielded", like=source)
                zero = graph.add_constant(f"{source}/zero", -0.0, like=source)
                graph.insert(graph.make("Add", [source, zero], [result]), before=node)
                graph.set_input(node, 0, result)


def request(model: Model, plan: Plan, tag: str) -> TypeRequest:
    """Returns the types that `plan` gives to `model`; new nodes are tagged with `tag`."""
    low = LOW_TYPES[plan.precision]
    higher = plan.fp32 | plan.bf16

    def node_type(scope: int, node: NodeProto) -> int:
        key = node_key(scope, node)
        return LOW_TYPES["fp32" if key in plan.fp32 else "bf16"] if key in higher else low

    def wanted(ports: Iterable[Port]) -> dict[str, int]:
        types = {port.name: io_type(plan.io, port.name) for port in ports}
        return {name: LOW_TYPES[cast("Precision", kind)] for name, kind in types.items() if kind != "keep"}

    inputs, outputs = wanted(model.signature.inputs), wanted(model.signature.outputs)
    ports = plugin_types(plan.plugin_types).items()
    plugins = {op: (_element_types(port.inputs), _element_types(port.outputs)) for op, port in ports}
    return TypeRequest(node_type, inputs, outputs, plugins=plugins, tag=tag)


def _element_types(kinds: Sequence[str]) -> list[int]:
    """Element types of ports; 0 for those that hold no floats."""
    return [LOW_TYPES.get(cast("Precision", kind), 0) for kind in kinds]
