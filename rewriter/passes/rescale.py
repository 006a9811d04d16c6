"""rescale: scales tensors that overflow by a power of two, which the constants around them absorb."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rewriter.hazards.planning.planner import surveys
from rewriter.hazards.survey import PrecisionRequest, Survey
from rewriter.ir.base import Context, Event, Exactness, ModelPass, Refusal, Requires, Rescaled, Stage
from rewriter.ir.english import count
from rewriter.ir.graph import GraphEditor, label, open_graphs
from rewriter.ir.model import Model, facts
from rewriter.ir.plan import Plan
from rewriter.passes.algorithms.rescaling import Rescaling, apply_planned, in_range, record, rescale
from rewriter.runtime.ranges import Ranges

NAMED = 3
"""Number of tensors that a message names."""


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
    before = """
        g (float[2,2] x) => (float[2,2] y)
        <float[2,2] w = {100000.0, 2.0, 3.0, 400000.0}, float[2,2] v = {1.0, 0.5, 0.25, 2.0}> {
            m = MatMul(x, w)
            r = Relu(m)
            y = MatMul(r, v)
        }"""
    after = """
        g (float[2,2] x) => (float[2,2] y)
        <float[2,2] w = {12500.0, 0.25, 0.375, 50000.0}, float[2,2] v = {8.0, 4.0, 2.0, 16.0}> {
            m = MatMul(x, w)
            r = Relu(m)
            y = MatMul(r, v)
        }"""

    def rewrite_model(self, model: Model, context: Context) -> Iterator[Event]:
        if context.plan is not None:
            graphs = open_graphs(model, facts.infer(model), tag=self.name)
            yield from _recorded(model, _as_planned(graphs, context.plan))
            return
        ranges = context.ranges if context.ranges is not None else {}
        request = PrecisionRequest()
        for survey in reversed(list(surveys(model, facts.infer(model), ranges, request, tag=self.name))):
            if isinstance(ranges, Ranges) and not ranges.real:
                yield from _made_up(survey)
                continue
            with survey.graph:
                done = rescale(survey, measured=context.ranges is not None)
                yield from _recorded(model, _events(survey, done))


def _recorded(model: Model, events: Iterator[Event]) -> Iterator[Event]:
    """Yields the events and records the exponents of the main graph in the model."""
    for event in events:
        main = {t: k for s, t, k in event.exponents if not s} if isinstance(event, Rescaled) else {}
        if main:
            record(model, main)
        yield event


def _made_up(survey: Survey) -> Iterator[Refusal]:
    """Declines: what overflows on random inputs may be small on real ones, and become zero in FP16."""
    if not in_range(survey):
        why = "its ranges were measured on random inputs: give `inputs` for exponents"
        yield Refusal("the graph" if survey.graph.is_main else f"graph {survey.scope}", why)


def _as_planned(graphs: list[GraphEditor], plan: Plan) -> Iterator[Rescaled]:
    """Applies the exponents of a saved plan."""
    for scope, graph in reversed(list(enumerate(graphs))):
        exponents = {tensor: k for s, tensor, k in plan.exponents if s == scope}
        if not exponents:
            continue
        with graph:
            edits = apply_planned(graph, exponents)
            what = f"scaled as planned: {count(len(exponents), 'tensor')}, {count(edits, 'constant')}"
            rows = tuple((scope, tensor, k) for tensor, k in exponents.items())
            yield Rescaled(_node(graph, next(iter(exponents))), what, rows)


def _events(survey: Survey, done: Rescaling) -> Iterator[Event]:
    graph = survey.graph
    exponents = tuple((survey.scope, tensor, k) for tensor, k in done.exponents.items())
    for index, (k, tensors) in enumerate(done.saved.items()):
        many = f"{len(tensors)} tensors" if len(tensors) > 1 else "a tensor"
        what = f"{many} times 2^{k}: {_before_and_after(survey, tensors, k)}"
        if not index:
            in_all = f"{count(len(exponents), 'computed tensor')}, {count(done.edits, 'constant')}"
            what += f" (scaled in all: {in_all})"
        yield Rescaled(_node(graph, tensors[0]), what, () if index else exponents)
    if done.left:
        reason = "stay out of range: their operators allow no such factor"
        yield Refusal(_node(graph, done.left[0]), f"{_names(survey, done.left)} {reason}")
    groups: dict[str, list[str]] = {}
    for tensor, reason in done.tied.items():
        groups.setdefault(reason, []).append(tensor)
    for reason, tied in groups.items():
        why = reason or "their scale is tied to that of inputs, outputs or operators that are not linear"
        yield Refusal(_node(graph, tied[0]), f"{_names(survey, tied)} cannot be scaled: {why}")


def _before_and_after(survey: Survey, tensors: Sequence[str], k: int) -> str:
    """Lists the ranges of the largest tensors."""
    ranges = {t: m for t in tensors if (m := survey.range(t)) is not None}
    largest = sorted(tensors, key=lambda t: -ranges[t].absmax if t in ranges else 0.0)[:NAMED]
    texts = [f"{t} {ranges[t]} to {ranges[t].scaled(k)}" if t in ranges else t for t in largest]
    more = len(tensors) - len(largest)
    return "; ".join(texts) + (f"; and {more} more like these" if more else "")


def _names(survey: Survey, tensors: Sequence[str]) -> str:
    texts = [f"{t} {m}" if (m := survey.range(t)) is not None else t for t in tensors[:NAMED]]
    more = len(tensors) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")


def _node(graph: GraphEditor, tensor: str) -> str:
    node = graph.producer(tensor)
    return label(node) if node is not None else tensor
