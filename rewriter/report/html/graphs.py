"""A small graph around each cause: the nodes next to it, their types, and the ranges between them."""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rewriter.ir.graph import display_name
from rewriter.ir.model import Model, walk_graphs
from rewriter.ir.plan import logical_name, node_key
from rewriter.report.causes import Cause
from rewriter.report.html.depth import LABELS, LARGEST, Nodes
from rewriter.report.results import FixResult
from rewriter.runtime.ranges import TensorAtDepth

SIZE = 10  # nodes of a graph
MOST = 6  # causes with a graph

WIDTH, HEIGHT, COLUMN, ROW = 150.0, 36.0, 176.0, 76.0
"""A box, and the distance of boxes beside and below each other, in pixels."""

ASIDE = 34.0
"""Pixels from the middle of a box to the value of its result, above all edges to the side."""

DIGIT = 6.2  # width of a character of such a value

Box = tuple[float, float, str, str, str, str, bool]
"""A node: left, top, operator, short name, title, CSS class of its type, and True for the centre."""

Edge = tuple[str, float, float, str, bool, bool]
"""A tensor: path, position and text of its largest value, True beyond FP16, True with a Cast on its way."""


class Graph(NamedTuple):
    """The nodes around a cause; `nodes` are the names of all nodes that it concerns."""

    id: str
    title: str
    nodes: Sequence[str]
    boxes: Sequence[Box]
    edges: Sequence[Edge]
    width: float
    height: float
    summary: str


def cause_graphs(result: FixResult, nodes: Nodes) -> list[Graph]:
    """Returns a graph for each cause whose nodes the result still has."""
    network = _Network(result.model, result.depth)
    drawn = []
    for number, cause in enumerate(result.causes[:MOST], 1):
        centre = network.centre(cause)
        if centre is not None:
            drawn.append(_drawn(f"cause-{number}", cause, centre, network, nodes))
    return drawn


class _Network:
    """The nodes of a model with their neighbours; Casts and Constants belong to the edges."""

    def __init__(self, model: Model, depth: Sequence[TensorAtDepth]) -> None:
        self.names: list[tuple[str, str]] = []
        self.results: list[TensorAtDepth | None] = []
        self.before: list[dict[int, bool]] = []
        """Producers of each node's operands, with True where a Cast lies between."""
        self.after: dict[int, list[int]] = defaultdict(list)
        measured = {tensor.key: tensor for tensor in reversed(depth) if not tensor.constant}
        makers: dict[tuple[int, str], tuple[int, bool]] = {}
        for scope, graph in enumerate(walk_graphs(model.proto.graph)):
            for node in graph.node:
                if node.op_type == "Cast":
                    if (scope, node.input[0]) in makers:
                        makers[scope, node.output[0]] = makers[scope, node.input[0]][0], True
                elif node.op_type != "Constant":
                    number = len(self.names)
                    self.names.append((display_name(node), node.op_type))
                    self.results.append(measured.get(node_key(scope, node)))
                    self.before.append(dict(makers[scope, n] for n in node.input if (scope, n) in makers))
                    for producer in self.before[-1]:
                        self.after[producer].append(number)
                    makers |= {(scope, name): (number, False) for name in node.output}
                    makers |= {(scope, logical_name(name)): (number, False) for name in node.output}

    def centre(self, cause: Cause) -> int | None:
        """The node that a cause names, else its node with the largest values."""
        members = set(cause.nodes)
        numbers = [i for i, (name, _) in enumerate(self.names) if name in members]
        named = (i for i, (name, _) in enumerate(self.names) if name == cause.centre)
        widest = max(numbers, key=lambda i: self.reach(i) or 0.0, default=None)
        return next(named, widest)

    def reach(self, number: int) -> float | None:
        result = self.results[number]
        return None if result is None else result.range.absmax

    def near(self, centre: int) -> list[int]:
        """The nodes next to one, nearest first, in the order of the model."""
        chosen, waiting = {centre: None}, deque([centre])
        while waiting and len(chosen) < SIZE:
            number = waiting.popleft()
            fresh = [n for n in (*self.before[number], *self.after[number]) if n not in chosen]
            fresh = list(dict.fromkeys(fresh))[: SIZE - len(chosen)]
            chosen |= dict.fromkeys(fresh)
            waiting.extend(fresh)
        return sorted(chosen)


def _drawn(name: str, cause: Cause, centre: int, network: _Network, nodes: Nodes) -> Graph:
    members = network.near(centre)
    positions, width, height = _positions(members, network)
    boxes: list[Box] = []
    for number in members:
        full, op = network.names[number]
        result = network.results[number]
        kind = nodes.kind(result) if result is not None else "other"
        title = f"{full} ({op}), {LABELS.get(kind, 'no floats')}"
        title += f", {result.range}" if result is not None else ""
        short = full if len(full) <= 19 else f"…{full[-18:]}"
        boxes.append((*positions[number], op, short, title, kind, number == centre))
    edges = list(_edges(members, positions, network))
    full, op = network.names[centre]
    summary = f"{len(members)} nodes around {full} ({op}): " + ", then ".join(op for _, _, op, *_ in boxes)
    return Graph(name, str(cause), cause.nodes, boxes, edges, width, height, summary)


def _positions(
    members: Sequence[int], network: _Network
) -> tuple[Mapping[int, tuple[float, float]], float, float]:
    """Left top corners by layer: below every producer, and right above the first consumer."""
    layers: dict[int, int] = {}
    for number in members:
        layers[number] = 1 + max((layers[n] for n in network.before[number] if n in layers), default=-1)
    for number in reversed(members):
        below = [layers[n] for n in network.after[number] if n in layers]
        layers[number] = min(below) - 1 if below else layers[number]
    rows: dict[int, list[int]] = defaultdict(list)
    for number in members:
        rows[layers[number]].append(number)
    most = max(map(len, rows.values()))
    positions: dict[int, tuple[float, float]] = {}

    def over(number: int) -> float:
        above = [positions[n][0] for n in network.before[number] if n in positions]
        return sum(above) / len(above) if above else 0.0

    for row, (_, numbers) in enumerate(sorted(rows.items())):
        numbers.sort(key=over)
        left = (most - len(numbers)) / 2
        positions |= {n: ((left + i) * COLUMN + 40, row * ROW + 2) for i, n in enumerate(numbers)}
    return positions, most * COLUMN + 120, len(rows) * ROW - ROW + HEIGHT + 4


def _edges(
    members: Sequence[int], positions: Mapping[int, tuple[float, float]], network: _Network
) -> Iterator[Edge]:
    labelled = set[int]()
    bent = {
        producer
        for number in members
        for producer in network.before[number]
        if producer in positions and positions[number][1] - positions[producer][1] > ROW
    }
    for number in members:
        for producer, cast in network.before[number].items():
            if producer in positions:
                (x0, y0), (x1, y1) = positions[producer], positions[number]
                x0, x1, y0 = x0 + WIDTH / 2, x1 + WIDTH / 2, y0 + HEIGHT
                aside = (max(x0, x1) + WIDTH / 2 + 8 - (x0 + x1) / 2) / 0.75  # right of the boxes between
                bend = aside if y1 - y0 > ROW else 0.0
                path = f"M{x0:g} {y0:g}C{x0 + bend:g} {y0 + 26:g} {x1 + bend:g} {y1 - 26:g} {x1:g} {y1:g}"
                reach = network.reach(producer)
                text = "" if reach is None or producer in labelled else f"{reach:.2g}"
                labelled.add(producer)
                at = x0 - ASIDE - DIGIT * len(text) if producer in bent else x0 + ASIDE
                yield path, at, y0 + 12, text, reach is not None and not reach <= LARGEST, cast
