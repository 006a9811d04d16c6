"""The chart of ranges along the depth of a network, and the strip under it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup

from rewriter.ir.english import count
from rewriter.ir.plan import Range
from rewriter.report.html.render import part
from rewriter.report.html.view import Section
from rewriter.runtime.ranges.depth import TensorAtDepth

Scale = Callable[[float], float]


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """Maps `low` to `start` and `high` to `end` by their logarithms; what is beyond stays at the ends."""
    first, last = math.log10(low), math.log10(high)

    def place(value: float) -> float:
        if math.isnan(value) or value >= high:
            return end
        share = (math.log10(value) - first) / (last - first) if value > low else 0.0
        return start + share * (end - start)

    return place


def decades(low: float, high: float, most: int) -> list[float]:
    """Powers of ten from `low` to `high`, at most so many."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / most))
    return [10.0**power for power in range(first, last + 1, step)]


_POWERS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_ten(value: float) -> str:
    """`10⁻⁴` for 1e-4."""
    exponent = round(math.log10(value))
    return "1" if exponent == 0 else f"10{str(exponent).translate(_POWERS)}"


LARGEST, NORMAL, SUBNORMAL = 65504.0, 2.0**-14, 2.0**-24
"""FP16's largest number, its smallest normal (6.1e-5) and smallest subnormal one (6e-8), by IEEE 754."""

HEIGHT = 320.0
"""Pixels of the drawing."""

FLOOR, CEILING = 1e-10, 1e10
"""The scale ends here at the latest: a mask of -3.4e38 would flatten all the rest."""

MOST = 3000
"""Tensors that are drawn: more would not fit into the page, and a screen has fewer columns."""

ERROR = logarithmic(1e-7, 10.0, 96.0, 0.0)
"""Position of a relative error below the chart; NaN and infinity are at the top."""

WRONG = 0.1
"""A relative error that the summary calls out: 20 times what FP16 is allowed."""

STRONG, WEAK = 5.0, 0.8
"""Widest and narrowest bar, in pixels of a drawing of 1000."""


def beyond_limits(measured: Range) -> bool:
    """True if FP16 overflows on the largest value, or rounds all values as subnormal numbers."""
    return not measured.absmax <= LARGEST or 0.0 < measured.absmax < NORMAL


class Layer(NamedTuple):
    """Tensors of one kind as one path: its CSS class, its line in the legend, and their number."""

    kind: str
    label: str
    path: str
    amount: int


Run = tuple[int, int, str, str, int]
"""Neighbours along the depth that compute in one type: start, width, CSS class, title, number of nodes."""

NAMED_RUNS = 500
"""Parts of the strip that name their first and last node; the cursor names those of all."""


@dataclass(frozen=True)
class Nodes:
    """What a report knows of the nodes, by key or name.

    Attributes:
        kind: Returns the CSS class of a tensor's node: what it computes in, or what was found.
        labels: The classes in order, with their lines in the legend.
        mark: Returns the hazard of a node or constant in a sentence; "" if there is none.
        mark_label: Line of the legend for hazards.
        graph: Returns the id of the graph that a node is in; "" if there is none.
        errors: Captions and relative errors by tensor, for the curves under the chart.
    """

    kind: Callable[[TensorAtDepth], str]
    labels: Mapping[str, str]
    mark: Callable[[TensorAtDepth], str]
    mark_label: str
    strip_label: str
    graph: Callable[[str], str] = lambda node: ""
    errors: Sequence[tuple[str, Mapping[str, float]]] = ()


LABELS = {
    "fp16": "FP16",
    "bf16": "BF16",
    "free": "FP32, at no cost",
    "fp32": "FP32",
    "beyond": "FP16, although it exceeds 65504",
}
"""Kinds of nodes by the type that they compute in."""


def depth_section(tensors: Sequence[TensorAtDepth], nodes: Nodes, lead: str, empty: str) -> Section:
    """Returns the section with the chart; `empty` says why there is none."""
    title = "Ranges along the depth of the network"
    if not tensors:
        return Section("ranges", title, empty, [])
    return Section("ranges", title, lead, [_chart(tensors, nodes)])


def _chart(tensors: Sequence[TensorAtDepth], nodes: Nodes) -> Markup:
    """Returns the chart; `tensors` are in order of their places, and there is at least one."""
    marked = [nodes.mark(tensor) for tensor in tensors]
    shown, note = _thinned(tensors, marked)
    marked = [marked[i] for i in shown]
    places = {place: index for index, place in enumerate(sorted({tensors[i].place for i in shown}))}
    tensors = [replace(tensors[i], place=places[tensors[i].place]) for i in shown]  # without gaps
    width = tensors[-1].place + 1
    y = logarithmic(*_span(tensors), HEIGHT, 0.0)
    kinds = ["constant" if tensor.constant else nodes.kind(tensor) for tensor in tensors]
    labels = {**nodes.labels, "constant": "weights and constants"}
    layers = [
        Layer(kind, label, _bars(tensors, kinds, kind, y), kinds.count(kind))
        for kind, label in labels.items()
        if kind in kinds
    ]
    marks = [i for i, reason in enumerate(marked) if reason]
    runs = list(_runs(tensors, nodes))
    return part(
        "depth.html",
        width=width,
        height=HEIGHT,
        stroke=max(WEAK, min(STRONG, 800.0 / width)),
        layers=layers,
        marks=[Layer("hazard", nodes.mark_label, _dots(tensors, marks, y), len(marks))] if marks else [],
        ticks=[(y(value), power_of_ten(value)) for value in decades(*_span(tensors), 9)],
        limits=(y(LARGEST), y(NORMAL), y(SUBNORMAL)),
        runs=runs,
        strip_label=nodes.strip_label,
        strip_summary=f"{nodes.strip_label}: {_strip_summary(runs, nodes.labels)}",
        data=_columns(tensors, kinds, labels, marked, y, nodes),
        summary=_summary(tensors, len(marks), nodes),
        note=note,
        errors=list(_curves(tensors, nodes)),
        error_ticks=[(ERROR(value), power_of_ten(value)) for value in (1e-6, 1e-4, 1e-2, 1.0)],
    )


def _curves(tensors: Sequence[TensorAtDepth], nodes: Nodes) -> Iterator[Layer]:
    """One line for each model, through the errors of the results in their order."""
    for kind, (label, errors) in zip(("plain", "fixed"), nodes.errors, strict=False):
        points = [(t.place, errors[t.tensor]) for t in tensors if not t.constant and t.tensor in errors]
        if points:
            path = "L".join(f"{place + 0.5} {ERROR(error):.1f}" for place, error in points)
            yield Layer(kind, label, f"M{path}", len(points))


def _thinned(tensors: Sequence[TensorAtDepth], marked: Sequence[str]) -> tuple[list[int], str]:
    """Indices of the tensors to draw, and a note if some are left out: of neighbours, the widest stays."""
    if len(tensors) <= MOST:
        return list(range(len(tensors))), ""
    size = -(-2 * len(tensors) // MOST)
    kept: set[int] = set()
    for start in range(0, len(tensors), size):
        group = range(start, min(start + size, len(tensors)))
        kept.add(max(group, key=lambda i: tensors[i].range.absmax))
    hazards = [i for i, reason in enumerate(marked) if reason]
    hazards.sort(key=lambda i: -tensors[i].range.absmax)
    kept.update(hazards[: MOST // 2])
    return sorted(
        kept
    ), f"{len(kept)} of {len(tensors)} tensors are drawn: the widest of each {size} neighbours, and hazards."


def _span(tensors: Sequence[TensorAtDepth]) -> tuple[float, float]:
    """The limits of the scale: whole decades with the ranges and FP16's limits inside."""
    high = max((t.range.absmax for t in tensors if math.isfinite(t.range.absmax)), default=1.0)
    low = min((t.range.mean_abs for t in tensors if t.range.mean_abs > 0.0), default=1.0)
    bottom = max(FLOOR, min(low, SUBNORMAL / 10.0))
    top = min(CEILING, max(high, LARGEST * 10.0))
    return 10.0 ** math.floor(math.log10(bottom)), 10.0 ** math.ceil(math.log10(top))


def _bars(tensors: Sequence[TensorAtDepth], kinds: Sequence[str], kind: str, y: Scale) -> str:
    """One vertical line a tensor, from the mean to the largest absolute value; a dash for constants."""
    parts = []
    for tensor, own in zip(tensors, kinds, strict=True):
        mean, top = tensor.range.mean_abs, y(tensor.range.absmax)
        if own == kind and tensor.constant:
            parts.append(f"M{tensor.place + 0.1} {top:.1f}h.8")
        elif own == kind:
            low = y(mean) if math.isfinite(mean) else top
            parts.append(f"M{tensor.place + 0.5} {top:.1f}V{max(low, top + 1.0):.1f}")
    return "".join(parts)


def _dots(tensors: Sequence[TensorAtDepth], marks: Iterable[int], y: Scale) -> str:
    return "".join(f"M{tensors[i].place + 0.5} {y(tensors[i].range.absmax):.1f}h0" for i in marks)


def _runs(tensors: Sequence[TensorAtDepth], nodes: Nodes) -> Iterable[Run]:
    """Neighbouring places of one kind, with the first and the last node."""
    firsts = {tensor.place: tensor for tensor in reversed(tensors) if not tensor.constant}
    ordered = [firsts[place] for place in sorted(firsts)]
    groups = [(kind, list(members)) for kind, members in groupby(ordered, key=nodes.kind)]
    for kind, group in groups:
        first, last = group[0], group[-1]
        title = f"{nodes.labels.get(kind, kind)}: {len(group)} node{'s' * (len(group) > 1)}"
        if len(groups) <= NAMED_RUNS:
            title += f", {first.node} to {last.node}" if len(group) > 1 else f", {first.node}"
        yield first.place, last.place - first.place + 1, kind, title, len(group)


def _strip_summary(runs: Sequence[Run], labels: Mapping[str, str]) -> str:
    """`FP16: 100 nodes in 11 stretches; FP32: 91 nodes in 10 stretches`."""
    parts = []
    for kind, label in labels.items():
        own = [number for *_, of, _, number in runs if of == kind]
        if own:
            parts.append(f"{label}: {count(sum(own), 'node')} in {count(len(own), 'stretch')}")
    return "; ".join(parts)


def _columns(
    tensors: Sequence[TensorAtDepth],
    kinds: Sequence[str],
    labels: Mapping[str, str],
    marked: Sequence[str],
    y: Scale,
    nodes: Nodes,
) -> dict[str, object]:
    """What the cursor shows, by tensor; texts that repeat are numbers into `texts`."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    def suffix(t: TensorAtDepth) -> str:
        """The tensor's name; `=` and its end where it starts with the node's: a third of the page."""
        return "=" + t.tensor[len(t.node) :] if t.node and t.tensor.startswith(t.node) else " " + t.tensor

    rows = [
        [
            t.place,
            t.node,
            suffix(t),
            number(t.op),
            number(labels[kind]),
            number(reason),
            f"{t.range.low:.4g}",
            f"{t.range.high:.4g}",
            f"{t.range.mean_abs:.3g}",
            round(y(t.range.absmax)),
            int(t.constant),
            int(not t.range.finite),
            number("; ".join(f"{name} {e[t.tensor]:.1g}" for name, e in nodes.errors if t.tensor in e)),
            number(nodes.graph(t.node)),
        ]
        for t, kind, reason in zip(tensors, kinds, marked, strict=True)
    ]
    return {"rows": rows, "texts": list(texts)}


def _summary(tensors: Sequence[TensorAtDepth], hazards: int, nodes: Nodes) -> str:
    results = [tensor for tensor in tensors if not tensor.constant]
    beyond = sum(not tensor.range.absmax <= LARGEST for tensor in results)
    small = sum(0.0 < tensor.range.absmax < NORMAL for tensor in results)
    parts = [f"{len(results)} results of nodes in order of depth"]
    if results:
        widest = max(results, key=lambda tensor: tensor.range.absmax)
        parts.append(f"the largest value is {widest.range.absmax:.3g} at {widest.node} ({widest.op})")
    parts.append(f"{beyond} exceed 65504" if beyond else "none exceeds 65504")
    if small:
        parts.append(f"{small} lie wholly below 6.1e-5")
    if hazards:
        parts.append(f"{hazards} are marked")
    for name, errors in nodes.errors:
        broken = next((t.node for t in results if not errors.get(t.tensor, 0.0) <= WRONG), "")
        parts.append(f"{name} errs by more than {WRONG:g} from {broken} on" if broken else "")
    return "; ".join(filter(None, parts)) + "."
