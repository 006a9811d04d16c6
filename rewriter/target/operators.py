"""Nodes that the target's ONNX parser refuses, from the table `operators.toml`."""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphView, attribute, display_name, open_graphs
from rewriter.ir.graph.nodes import reachable
from rewriter.ir.model import STANDARD_DOMAINS, Model
from rewriter.ir.model.schemas import EXCHANGEABLE, SHORT_NAMES
from rewriter.ir.plan import plugin_types
from rewriter.ir.reading import own_table, tuples
from rewriter.target import Target

REMEDY = "run this part outside of TensorRT, or bring a plugin"
"""Remedy for a refused node whose row has no other."""

RECENT = {"tensorrt": (10,), "tensorrt-rtx": (1, 6)}
"""The first releases that an unknown one is expected to be."""


@dataclass(frozen=True)
class Condition:
    """A condition on an attribute, or on tensors of a node; the head of `operators.toml` has the fields."""

    attribute: str = ""
    default: Any = None
    values: tuple[Any, ...] = ()
    only: tuple[Any, ...] = ()
    pattern: str = ""
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    types: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    computed: bool = False
    given: bool = False
    nonzero: bool = False

    def met(self, node: NodeProto, graph: GraphView, low: int = 0) -> str:
        """Returns what meets the condition: `antialias=1`, `float16 x` or ""; floats are of type `low`."""
        if self.attribute:
            value = attribute(node, self.attribute, self.default)
            shown = ",".join(map(str, _listed(value)))
            return "" if value is None or not self._of_value(value) else f"{self.attribute}={shown}"
        ports = [*((node.input, i) for i in self.inputs), *((node.output, i) for i in self.outputs)]
        names = [ends[i] for ends, i in ports if i < len(ends)] if ports else [*node.input, *node.output]
        if self.outputs and not (self.types or self.ranks):
            names = [name for name in names if graph.is_read(name)]
        return next(filter(None, (self._of_tensor(name, graph, low) for name in names if name)), "")

    def _of_value(self, value: Any) -> bool:
        values = _listed(value)
        if self.pattern:
            return re.search(self.pattern, " ".join(map(str, values))) is not None
        outside = bool(self.only) and any(v not in self.only for v in values)
        return outside or any(v in self.values for v in values) or not (self.only or self.values)

    def _of_tensor(self, name: str, graph: GraphView, low: int) -> str:
        if self.types:
            dtype = graph.dtype(name) or 0
            kind = TensorProto.DataType.Name(low if low and dtype in EXCHANGEABLE else dtype)
            return f"{name} in {kind}" if kind in self.types else ""
        if self.ranks:
            rank = graph.rank(name)
            return f"{name} of {rank} axes" if rank in self.ranks else ""
        if self.computed:
            return f"{name} computed from data" if _computed(graph, name) else ""
        if self.given:
            given = graph.parent is None and any(name == value.name for value in graph.graph.input)
            return f"the input {name} of the model" if given and graph.constant(name) is None else ""
        if self.nonzero:
            value = graph.constant(name)
            return f"{name} other than 0" if value is not None and value.any() else ""
        return name


@dataclass(frozen=True)
class Row:
    """A row of the table: nodes that some releases refuse."""

    when: tuple[Condition, ...]
    besides: frozenset[str]
    releases: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]] | None]
    remedy: str
    repaired: bool
    at_once: str

    @functools.cached_property
    def types(self) -> frozenset[str]:
        """The names of the element types in its conditions."""
        return frozenset(name for condition in self.when for name in condition.types)

    def may_refuse(self, types: AbstractSet[str]) -> bool:
        """False if a graph with tensors of only these types meets no condition."""
        return all(c.attribute or not c.types or not types.isdisjoint(c.types) for c in self.when)

    def refuses(self, target: Target, *, every: bool = True) -> bool:
        """True if every release that the target may be is in the row's range, or one of them."""
        bounds = self.releases.get(target.library)
        if bounds is None:
            return False
        (since, before), version = bounds, target.version
        if every:
            return since <= version and (not before or before[: len(version)] > version)
        version = version or RECENT[target.library]
        return since[: len(version)] <= version and (not before or before > version)

    def met(self, node: NodeProto, graph: GraphView, low: int = 0) -> str | None:
        """The part of a node that the row refuses: "" is all of it; None if it accepts the node."""
        if node.op_type in self.besides:
            return None
        words = list[str]()
        for condition in self.when:  # most nodes do not meet the first
            if not (met := condition.met(node, graph, low)):
                return None
            words.append(met)
        return " and ".join(words)


@dataclass(frozen=True)
class RefusedNode:
    """A node that the target's parser refuses, with the reason and what to do."""

    node: NodeProto
    reason: str
    row: Row

    @property
    def name(self) -> str:
        return display_name(self.node)

    def __str__(self) -> str:
        return f"node {self.name} ({self.node.op_type}): {self.reason}"


@functools.cache
def _rows() -> tuple[dict[tuple[str, str], list[Row]], frozenset[str]]:
    """The rows by domain and operator ("*": any), and the operators of the DLA."""
    table = own_table("rewriter.target", "operators.toml")
    rows: dict[tuple[str, str], list[Row]] = {}
    for entry in table["row"]:
        when = tuple(Condition(**tuples(row)) for row in entry.get("when", ()))
        releases = {"tensorrt": entry.get("tensorrt", ".."), "tensorrt-rtx": entry.get("rtx", "..")}
        repaired = entry.get("repaired_by", "")
        row = Row(
            when,
            frozenset(entry.get("besides", "").split()),
            {library: _bounds(text) for library, text in releases.items()},
            f"`fix` does it: {repaired}" if repaired else entry.get("remedy", REMEDY),
            bool(repaired),
            entry.get("at_once", ""),
        )
        for domain in entry.get("domain", "").split() or [""]:
            for operator in entry["operators"].split():
                rows.setdefault((domain, operator), []).append(row)
    return rows, frozenset(table["dla"]["operators"].split())


def rows_of(node: NodeProto, target: Target, *, every: bool = True) -> Sequence[Row]:
    """The rows of the target for an operator: the parser goes by its name, not its domain."""
    return _rows_of(node.domain, node.op_type, target, every)


@functools.lru_cache(maxsize=4096)  # most nodes of a graph share their rows with others
def _rows_of(domain: str, op: str, target: Target, every: bool) -> tuple[Row, ...]:
    standard = domain in STANDARD_DOMAINS or onnx.defs.has(op)
    keys = sorted({(domain, op), ("" if standard else domain, "*"), ("", op)}, reverse=True)
    rows = (row for key in keys for row in _rows()[0].get(key, ()))
    return tuple(row for row in rows if row.refuses(target, every=every))


def refused(graph: GraphView, target: Target, plugins: Iterable[str] = ()) -> Iterator[RefusedNode]:
    """The nodes of one graph that the target's parser refuses, each once; it takes the `plugins`."""
    taken = plugin_types(plugins).keys() | {function.name for function in graph.model.proto.functions}
    scopes = graph.model.facts().scopes
    kinds = {0, *(tensor.dtype for scope in scopes for tensor in scope.values())}
    types, possible = set(map(TensorProto.DataType.Name, kinds)), dict[str, list[Row]]()
    for node in graph.nodes:
        if node.op_type in taken:
            continue
        if (key := f"{node.domain}.{node.op_type}") not in possible:  # most nodes share few rows, or none
            possible[key] = [row for row in rows_of(node, target) if row.may_refuse(types)]
        for row in possible[key]:
            if (part := row.met(node, graph)) is not None:
                operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
                reason = f"{target} takes no {operator}" + (f" with {part}" if part else "")
                yield RefusedNode(node, reason, row)
                break


def runs_on_dla(node: NodeProto) -> bool:
    """True if the accelerator beside a GPU runs an operator, or it is none of ONNX's."""
    return node.domain not in STANDARD_DOMAINS or node.op_type in _rows()[1]


def refused_in_model(model: Model, target: Target, plugins: Iterable[str] = ()) -> list[RefusedNode]:
    return [refusal for graph in open_graphs(model) for refusal in refused(graph, target, plugins)]


def refused_in_type(node: NodeProto, graph: GraphView, low: int, target: Target) -> str | None:
    """Sentence on why a node keeps FP32: the target takes it there, and may not in `low`; None otherwise."""
    name = TensorProto.DataType.Name(low)
    for row in rows_of(node, target, every=False):
        refused = name in row.types and row.met(node, graph, low) is not None
        if refused and row.met(node, graph, TensorProto.FLOAT) is None:
            parts = " and ".join(c.met(node, graph, low) for c in row.when if not c.types)
            operator = f"{node.op_type} with {parts}" if parts else node.op_type
            return f"{target} takes {operator} in FP32, not in {SHORT_NAMES[low].upper()}"
    return None


def _computed(graph: GraphView, tensor: str) -> bool:
    """True if the value of a tensor depends on data: not for constants, nor if it is computed from shapes."""

    def sources(name: str) -> Iterable[str]:
        producer = graph.producer(name)
        if producer is None or producer.op_type in ("Shape", "Size"):
            return ()
        return filter(None, producer.input)

    inputs = {value.name for value in graph.graph.input}
    ends = (name for name in reachable([tensor], sources) if graph.producer(name) is None)
    return any(
        name in inputs or graph.parent is None or _computed(graph.parent, name)
        for name in ends
        if graph.constant(name) is None
    )


def _bounds(text: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The two releases of "10.4..11.2"; None of ""."""
    if not text:
        return None
    since, before = (tuple(int(part) for part in end.split(".") if part) for end in text.split(".."))
    return since, before


def _listed(value: Any) -> list[Any]:
    values = value if isinstance(value, list) else [value]
    return [v.decode() if isinstance(v, bytes) else v for v in values]
