"""The chart of ranges along the depth of a network, and the strip under it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from rewriter.base.text import count
from rewriter.report.html.render import Part, Section, part
from rewriter.runtime.ranges import TensorAtDepth

Scale = Callable[[float], float]


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """Maps `low` to `start` and `high` to `end` by their logarithms; what is beyond stays at the ends."""
    first, last = math.log10(low), math.log10(high)

    def position(value: float) -> float:
        if math.isnan(value) or value >= high:
            return end
        share = (math.log10(value) - first) / (last - first) if value > low else 0.0
        return start + share * (end - start)

    return position


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

HEIGHT = 320.0  # pixels of the drawing

FLOOR, CEILING = 1e-10, 1e10
"""The scale ends here at the latest: a mask of -3.4e38 would flatten all the rest."""

MOST = 3000
"""Tensors that are drawn: more would not fit into the page, and a screen has fewer columns."""

ERROR = logarithmic(1e-7, 10.0, 96.0, 0.0)
"""Position of a relative error below the chart; NaN and infinity are at the top."""

WRONG = 0.1  # a relative error that the summary calls out: 20 times what FP16 is allowed
STRONG, WEAK = 5.0, 0.8  # widest and narrowest bar, in pixels of a drawing of 1000


class Layer(NamedTuple):
    """Tensors of one kind as one path: its CSS class, its line in the legend, and their number."""

    kind: str
    label: str
    path: str
    amount: int


@dataclass(frozen=True)
class Nodes:
    """Properties of the nodes, for the drawings."""

    kind: Callable[[TensorAtDepth], str]  # the key in `LABELS` of the type of a tensor's node
    marks: Mapping[str, str]  # each hazard as a sentence, by its tensor or the key of its node
    graph: Callable[[str], str] = lambda node: ""  # the id of the graph of a node; "" if there is none
    errors: Sequence[tuple[str, Mapping[str, float]]] = ()  # captions and errors by tensor: curves

    def mark(self, tensor: TensorAtDepth) -> str:
        """The hazard that a tensor is the evidence of; "" if it is of none."""
        return self.marks.get(tensor.tensor) or ("" if tensor.constant else self.marks.get(tensor.key, ""))


LABELS = {
    "fp16": "FP16",
    "bf16": "BF16",
    "free": "FP32, at no cost",
    "fp32": "FP32",
    "beyond": "FP16, although it exceeds 65504",
    "constant": "weights and constants",
}
"""CSS classes of tensors, by the type that their node computes in."""


def depth_section(tensors: Sequence[TensorAtDepth], nodes: Nodes, lead: str) -> Iterator[Section]:
    """Yields the section with the chart, if anything was measured; `tensors` are in order of depth."""
    if tensors:
        title = "Ranges along the depth of the network"
        yield Section("ranges", title, lead, [_chart(_thinned(tensors, nodes), nodes, len(tensors))])


def _chart(tensors: Sequence[TensorAtDepth], nodes: Nodes, total: int) -> Part:
    width = tensors[-1].depth + 1
    y = logarithmic(*_span(tensors), HEIGHT, 0.0)
    kinds = ["constant" if tensor.constant else nodes.kind(tensor) for tensor in tensors]
    layers = [
        Layer(kind, label, _bars(tensors, kinds, kind, y), kinds.count(kind))
        for kind, label in LABELS.items()
        if kind in kinds
    ]
    dots = [f"M{t.depth + 0.5} {y(t.range.absmax):.1f}h0" for t in tensors if nodes.mark(t)]
    firsts = {tensor.depth: tensor for tensor in reversed(tensors) if not tensor.constant}
    of_nodes, runs = [nodes.kind(firsts[depth]) for depth in sorted(firsts)], list[tuple[int, int, str]]()
    for kind, group in groupby((firsts[depth] for depth in sorted(firsts)), key=nodes.kind):
        depths = [tensor.depth for tensor in group]  # neighbours that compute in one type
        runs.append((depths[0], depths[-1] - depths[0] + 1, kind))
    strip = [f"{label} {count(of_nodes.count(k), 'node')}" for k, label in LABELS.items() if k in of_nodes]
    return part(
        "depth.html",
        width=width,
        height=HEIGHT,
        stroke=max(WEAK, min(STRONG, 800.0 / width)),
        layers=layers,
        marks=[Layer("hazard", "evidence of a hazard", "".join(dots), len(dots))] if dots else [],
        ticks=[(y(value), power_of_ten(value)) for value in decades(*_span(tensors), 9)],
        limits=(y(LARGEST), y(NORMAL), y(SUBNORMAL)),
        runs=runs,
        strip_summary=f"Computes in: {', '.join(strip)}",
        data=_columns(tensors, kinds, y, nodes),
        summary=_summary(tensors, nodes),
        note=f"{len(tensors)} of {total} tensors are drawn, the widest." if len(tensors) < total else "",
        errors=list(_curves(tensors, nodes)),
        error_ticks=[(ERROR(value), power_of_ten(value)) for value in (1e-6, 1e-4, 1e-2, 1.0)],
    )


def _curves(tensors: Sequence[TensorAtDepth], nodes: Nodes) -> Iterator[Layer]:
    """One line for each model, through the errors of the results in their order."""
    for kind, (label, errors) in zip(("plain", "fixed"), nodes.errors, strict=False):
        points = [(t.depth, errors[t.tensor]) for t in tensors if not t.constant and t.tensor in errors]
        if points:
            path = "L".join(f"{depth + 0.5} {ERROR(error):.1f}" for depth, error in points)
            yield Layer(kind, label, f"M{path}", len(points))


def _thinned(tensors: Sequence[TensorAtDepth], nodes: Nodes) -> Sequence[TensorAtDepth]:
    """At most `MOST` tensors, renumbered: of each group of neighbours the widest, and the widest hazard."""
    size = -(-2 * len(tensors) // MOST) if len(tensors) > MOST else 1
    drawn: set[int] = set()
    for start in range(0, len(tensors), size):
        group = range(start, min(start + size, len(tensors)))
        for some in (group, [i for i in group if nodes.mark(tensors[i])]):
            drawn.update(sorted(some, key=lambda i: tensors[i].range.absmax)[-1:])
    depths = {depth: index for index, depth in enumerate(sorted({tensors[i].depth for i in drawn}))}
    return [replace(tensors[i], depth=depths[tensors[i].depth]) for i in sorted(drawn)]


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
            parts.append(f"M{tensor.depth + 0.1} {top:.1f}h.8")
        elif own == kind:
            low = y(mean) if math.isfinite(mean) else top
            parts.append(f"M{tensor.depth + 0.5} {top:.1f}V{max(low, top + 1.0):.1f}")
    return "".join(parts)


def _columns(
    tensors: Sequence[TensorAtDepth], kinds: Sequence[str], y: Scale, nodes: Nodes
) -> dict[str, object]:
    """The labels that the cursor shows, by tensor; repeated texts are indices into `texts`."""
    texts: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    rows = [
        [
            t.depth,
            t.node,
            t.tensor,
            number(t.op),
            number(LABELS[kind]),
            number(nodes.mark(t)),
            str(t.range),
            round(y(t.range.absmax)),
            int(t.constant),
            number("; ".join(f"{name} {e[t.tensor]:.1g}" for name, e in nodes.errors if t.tensor in e)),
            number(nodes.graph(t.node)),
        ]
        for t, kind in zip(tensors, kinds, strict=True)
    ]
    return {"rows": rows, "texts": list(texts)}


def _summary(tensors: Sequence[TensorAtDepth], nodes: Nodes) -> str:
    results = [tensor for tensor in tensors if not tensor.constant]
    parts = [f"{len(results)} results of nodes in order of depth"]
    if results:
        widest = max(results, key=lambda tensor: tensor.range.absmax)
        parts.append(f"the largest value is {widest.range.absmax:.3g} at {widest.node} ({widest.op})")
    beyond = sum(not tensor.range.absmax <= LARGEST for tensor in results)
    parts.append(f"{beyond} exceed 65504" if beyond else "none exceeds 65504")
    for name, errors in nodes.errors:
        broken = next((t.node for t in results if not errors.get(t.tensor, 0.0) <= WRONG), "")
        parts += [f"{name} has an error above {WRONG:g} from {broken} on"] if broken else []
    return "; ".join(parts) + "."
