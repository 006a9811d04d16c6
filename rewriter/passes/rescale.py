"""rescale: scales tensors that overflow by a power of two, which the constants around them absorb."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from rewriter.base.errors import UsageError
from rewriter.base.text import count
from rewriter.hazards.analysis import GraphAnalysis, PrecisionRequest
from rewriter.hazards.planning.planner import analyses
from rewriter.ir.graph import GraphEditor, display_name, open_graphs
from rewriter.ir.model import Model, set_metadata
from rewriter.ir.plan import Plan
from rewriter.ir.plan.plan_file import Exponent
from rewriter.ir.reading import from_json
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
    input. No operator is added. docs/rescaling.md has the rule of each operator, and how k is chosen.

    The pass needs ranges measured on real data (`fix --inputs`). Without ranges it only looks at constants.
    Only FP32 tensors are scaled.

    Declines:
        - tensors whose scale is tied to inputs, outputs or operators that are not linear
        - tensors for which no exponents were found, and ranges that were measured on random inputs
    """

    refittable = False
    exactness = Exactness(0.0, "a power of two changes no significand in FP32's normal range")
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


DEFAULT_EPSILON = 1e-5
"""Default in ONNX of LayerNormalization, RMSNormalization, InstanceNormalization and GroupNormalization."""

HINT = (
    'correct "rescaled" in the plan, or save a new one with `save-plan`: a plan fits only the model, '
    "`passes` and `skip` that it was saved with"
)

EXPONENTS = "rewriter.exponents"
"""Metadata key of a JSON object: exponent of two by tensor of the main graph."""


def apply(graph: GraphEditor, constraints: Constraints, free: Mapping[int, int]) -> int:
    """Scales every use of a constant and every epsilon by its exponent.

    Uses of one constant with equal exponents share one new constant, and unused constants are removed. Free
    exponents that are missing are 0. Returns the number of constants and epsilons with a new value.
    """
    names: dict[tuple[str, int], str] = {}
    for use in constraints.constants:
        k = constraints.exponent(use.number, free)
        value = graph.constant(use.tensor) if k else None
        if value is None or not np.any(np.isfinite(value) & (value != 0)):
            continue
        if (use.tensor, k) not in names:
            names[use.tensor, k] = graph.add_constant(f"{use.tensor}/scaled", np.ldexp(value, k))
        graph.set_input(use.node, use.index, names[use.tensor, k])
    for tensor in dict.fromkeys(name for name, _ in names):
        graph.erase_if_dead(tensor)
    moved = [(node, k) for node, number in constraints.epsilons if (k := constraints.exponent(number, free))]
    for node, k in moved:
        stored = next((item for item in node.attribute if item.name == "epsilon"), None)
        if stored is None:
            stored = node.attribute.add(name="epsilon", type=1, f=DEFAULT_EPSILON)
        stored.f = float(np.ldexp(np.float32(stored.f), 2 * k))
        graph.edited = True
    return len(names) + len(moved)


def apply_planned(graph: GraphEditor, exponents: Mapping[str, int]) -> int:
    """Applies the exponents of a saved plan, as `apply` does; tensors that it does not name keep their scale.

    Raises:
        UsageError: the graph does not compute a tensor, or does not allow these exponents together.
    """
    constraints = Constraints(graph)
    for tensor in exponents:
        if tensor not in constraints.tensors:
            text = f"it scales {tensor}, which the model does not compute"
            raise UsageError(text, where="the plan", hint=HINT)
    free = {number: exponents.get(tensor, 0) for tensor, number in constraints.tensors.items()}
    for tensor, number in constraints.tensors.items():
        if (k := constraints.exponent(number, free)) != free[number]:
            text = f"it scales {tensor} by 2^{free[number]}, but the tensors beside it require 2^{k}"
            raise UsageError(text, where="the plan", hint=HINT)
    return apply(graph, constraints, free)


def record(model: Model, exponents: Mapping[str, int]) -> None:
    """Add exponents of tensors of the main graph to those already noted."""
    noted = recorded(model)
    for tensor, exponent in exponents.items():
        noted[tensor] = noted.get(tensor, 0) + exponent
    text = json.dumps({tensor: k for tensor, k in sorted(noted.items()) if k})
    set_metadata(model.proto, {EXPONENTS: text})


def recorded(model: Model) -> dict[str, int]:
    """The noted exponents by tensor; empty if another program wrote something else under this key."""
    text = next((e.value for e in model.proto.metadata_props if e.key == EXPONENTS), "{}")
    with suppress(UsageError):
        return dict(from_json(text, dict[str, Exponent], EXPONENTS, ""))
    return {}


def between(original: Model, other: Model) -> dict[str, int]:
    """The exponents by which tensors of `other` differ from the tensors of `original`."""
    before, after = recorded(original), recorded(other)
    steps = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
    return {name: k for name, k in steps.items() if k}
