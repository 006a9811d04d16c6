"""fuse-softmax: replaces a Softmax written in small operators by the operator."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rewriter.ir.graph import GraphEditor, display_name, is_op
from rewriter.ir.patterns.norms.language import Bindings, Pattern, broadcast, const, mean, named, op, var
from rewriter.ir.patterns.values import exposed, is_harmless, positive
from rewriter.passes.base import Change, Context, Event, Exactness, GraphPass, Refusal, Requires

X = var("x")
_PEAK = mean("peak", X, ("ReduceMax",), scaled=False)
PEAK = _PEAK | op("Max", _PEAK, const(-math.inf))
SHIFTED = op("Sub", X, broadcast("peak", PEAK), wide=True)


def total(exponentials: Pattern) -> Pattern:
    return mean("sum", exponentials, ("ReduceSum",), scaled=False)


EXPONENTIALS = named("e", op("Exp", SHIFTED | X, wide=True))
SOFTMAX = op("Div", EXPONENTIALS, broadcast("sum", total(var("e")))) | op(
    "Mul", EXPONENTIALS, broadcast("sum", op("Reciprocal", total(var("e"))))
)
LOG_SOFTMAX = op(
    "Sub", named("shifted", SHIFTED), broadcast("sum", op("Log", total(op("Exp", var("shifted"), wide=True))))
)


@dataclass(frozen=True)
class FuseSoftmax(GraphPass):
    """JAX and older Keras write Softmax as Exp over its sum, which hides attention from TensorRT.

    FP16 then rounds the exponentials and their sum, too. LogSoftmax is treated alike. Exponentials without
    the largest value subtracted first overflow FP16 beyond 11.09; those inside the operator never do
    (docs/accuracy.md#as-flax-writes-it).

    Declines:
        - an inner tensor that is used elsewhere or is a graph output
        - a sum over several axes, or over others than the largest value
        - statistics that are expanded beyond the input, or rounded inside
    """

    requires = Requires(opset=13)  # before, Softmax flattened all axes from `axis` on
    exactness = Exactness(1e-5, "FP32 sums in another order, and exp(x - max) for exp(x): some ulps")
    example = """
        -g (float[2,8] x) => (float[2,8] y) <int64[1] axis = {1}> {
        -    peak = ReduceMax<axes = [1]>(x)
        -    shifted = Sub(x, peak)
        -    e = Exp(shifted)
        -    total = ReduceSum(e, axis)
        -    y = Div(e, total)
        +g (float[2,8] x) => (float[2,8] y) {
        +    y = Softmax<axis = 1>(x)
         }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for node in (n for n in graph.nodes if "Exp" in graph.operators and is_op(n, "Div", "Mul", "Sub")):
            kind, formula = ("LogSoftmax", LOG_SOFTMAX) if is_op(node, "Sub") else ("Softmax", SOFTMAX)
            match = next(formula.match(Bindings(graph), node.output[0]), None)
            if match is None:
                continue
            axes, reasons = _axes(match), list(_reasons(match, node.output[0]))
            if reasons or axes is None:
                yield Refusal(display_name(node), f"stays written out: {'; '.join(reasons)}")
                continue
            softmax = graph.make(kind, [match.tensors["x"][0]], [node.output[0]], axis=axes[0])
            graph.replace_producer(node.output[0], softmax)
            yield Change(display_name(node), f"{len(match.nodes)} nodes became {kind}")


def _axes(match: Bindings) -> tuple[int, ...] | None:
    """The axes of all statistics, counted from the front if the rank is known; None if they differ."""
    rank = match.graph.rank(match.tensors["x"][0])
    moments = [*match.moments.get("peak", ()), *match.moments["sum"]]
    axes = {positive(moment.axes, rank) for moment in moments}
    return axes.pop() if len(axes) == 1 else None


def _reasons(match: Bindings, output: str) -> Iterator[str]:
    """Reasons why the formula must not become one operator."""
    graph, source, axes = match.graph, match.tensors["x"][0], _axes(match)
    unit = {id(node) for node in match.nodes}
    inner = (exposed(graph, node, unit) for node in match.nodes if output not in node.output)
    yield from (*match.faults, *filter(None, inner))
    if axes is None or len(axes) != 1:
        yield "it does not run over one axis"
    if not all(is_harmless(graph, node, source) for node in match.expanded):
        yield "a statistic is expanded inside it"
    if graph.dtype(source) != graph.dtype(output):
        yield f"{source} and {output} have different types"
