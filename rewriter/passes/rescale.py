"""rescale: scales tensors that overflow by a power of two, which the constants around them absorb."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rewriter.base.text import count
from rewriter.hazards.analysis import GraphAnalysis, PrecisionRequest
from rewriter.hazards.planning.planner import analyses
from rewriter.ir.graph import GraphEditor, display_name, open_graphs
from rewriter.ir.model import Model
from rewriter.ir.plan import Plan
from rewriter.passes.algorithms.rescaling.apply import apply, apply_planned, record
from rewriter.passes.algorithms.rescaling.choice import demands, in_range, solve
from rewriter.passes.algorithms.rescaling.exponents import Constraints
from rewriter.passes.base import Context, Event, Exactness, ModelPass, Refusal, Requires, Rescaled, Stage
from rewriter.runtime.ranges import Ranges

NAMED = 3  # number of tensors that a message names

TIED = "its scale is tied to inputs, outputs or operators that are not linear"


@dataclass(frozen=True)
class Rescale(ModelPass):
    """Most FP16 overflow is a matter of scale: a residual stream of 1e5 between norms that ignore scale.

    Tensors that overflow are multiplied by a power of two, 2^k, and their consumers take the factor back.
    Weights, biases and tables absorb the factors, and the epsilon of a norm is scaled with the square of its
    input. No operator is added, and none needs FP32 for it. The exponents are chosen so that few tensors stay
    out of range, few lose bits among the subnormal numbers, and few constants are edited.
    docs/rescaling.md has the rule of each operator.

    Decomposed norms stay as they are and compute in FP32; only the tensors around them count.

    The pass needs ranges measured on real data (`fix --inputs`). Without ranges it only looks at constants.
    Only FP32 tensors are scaled.

    Declines:
        - tensors whose scale is tied to inputs, outputs or operators that are not linear
        - tensors for which no exponents were found, and ranges that were measured on random inputs
    """

    name = "rescale"
    refittable = False
    exactness = Exactness(
        0.0, "a power of two changes no significand, as long as FP32's normal range is kept"
    )
    stage = Stage.RANGES
    requires = Requires(precisions=frozenset({"fp16"}))  # only FP16 has so few exponents
    example = """
         g (float[2,2] x) => (float[2,2] y)
        -<float[2,2] w = {100000.0, 2.0, 3.0, 400000.0}, float[2,2] v = {1.0, 0.5, 0.25, 2.0}> {
        +<float[2,2] w = {12500.0, 0.25, 0.375, 50000.0}, float[2,2] v = {8.0, 4.0, 2.0, 16.0}> {
             m = MatMul(x, w)
             r = Relu(m)
             y = MatMul(r, v)
         }"""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        if context.plan is not None:
            yield from _as_planned(model, context.plan, self.name)
            return
        ranges = context.ranges or {}
        for analysis in reversed(list(analyses(model, ranges, PrecisionRequest("fp16"), tag=self.name))):
            if ranges and in_range(analysis):
                continue
            if isinstance(ranges, Ranges) and not ranges.real:  # on real data they may be small, and become 0
                why = "its ranges were measured on random inputs: give `inputs` for exponents"
                yield Refusal("the graph" if analysis.graph.is_main else f"graph {analysis.scope}", why)
                continue
            with analysis.graph:
                yield from _rescaled(analysis)


def _as_planned(model: Model, plan: Plan, tag: str) -> Iterator[Rescaled]:
    """Applies the exponents of a saved plan."""
    for scope, graph in reversed(list(enumerate(open_graphs(model, tag=tag)))):
        exponents = {tensor: k for s, tensor, k in plan.exponents if s == scope}
        if exponents:
            with graph:
                edits = apply_planned(graph, exponents)
                yield _event(graph, scope, exponents, edits, "as planned")


def _rescaled(analysis: GraphAnalysis) -> Iterator[Event]:
    """Scales tensors of one graph that overflow or have sunk."""
    graph = analysis.graph
    constraints = Constraints(graph)
    demanded, tied = demands(analysis, constraints)
    free = solve(demanded, [constraints.form(number) for number in constraints.tensors.values()])
    saved: dict[str, int] = {}
    refusals: dict[str, list[str]] = {}
    for form, demand in demanded.items():
        k = sum(c * free.get(key, 0) for key, c in form)
        saved |= {tensor: k for tensor, level in demand.hazards.items() if k <= level}
        saved |= {tensor: k for tensor, level in demand.sunken.items() if k >= level}
        if left := [tensor for tensor, level in demand.hazards.items() if k > level]:
            refusals.setdefault("it stays out of range: its operators allow no such factor", []).extend(left)
    if saved:
        edits = apply(graph, constraints, free)
        numbers = constraints.tensors.items()
        exponents = {t: k for t, number in numbers if (k := constraints.exponent(number, free))}
        order = sorted(saved, key=saved.__getitem__)
        texts = [f"{_shown(analysis, tensor)} times 2^{saved[tensor]}" for tensor in order]
        more = f" and {len(texts) - NAMED} more like these" if len(texts) > NAMED else ""
        yield _event(graph, analysis.scope, exponents, edits, ", ".join(texts[:NAMED]) + more)
    for tensor in tied:
        refusals.setdefault(constraints.pins.get(tensor, TIED), []).append(tensor)
    for reason, tensors in refusals.items():
        more = f" (and {len(tensors) - 1} more like it)" if len(tensors) > 1 else ""
        text = f"{_shown(analysis, tensors[0])} cannot be scaled: {reason}{more}"
        yield Refusal(_node(graph, tensors[0]), text)


def _event(graph: GraphEditor, scope: int, exponents: Mapping[str, int], edits: int, what: str) -> Rescaled:
    """Reports the exponents, and records them in the model if this is the main graph."""
    if graph.is_main:
        record(graph.model, exponents)
    rows = tuple((scope, tensor, k) for tensor, k in exponents.items())
    many = f"{count(len(rows), 'computed tensor')} and {count(edits, 'constant')} scaled"
    return Rescaled(_node(graph, next(iter(exponents), "constants")), f"{many}: {what}", rows)


def _shown(analysis: GraphAnalysis, tensor: str) -> str:
    measured = analysis.range(tensor)
    return f"{tensor} {measured}" if measured is not None else tensor


def _node(graph: GraphEditor, tensor: str) -> str:
    node = graph.producer(tensor)
    return display_name(node) if node is not None else tensor
