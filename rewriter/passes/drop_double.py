"""drop-double: replaces float64 arithmetic by float32."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from rewriter.ir.base import Change, Context, Event, Exactness, GraphPass, Refusal
from rewriter.ir.graph import GraphEditor, attribute, label, reached, reads
from rewriter.ir.graph.match import produced
from rewriter.ir.model import Array, holds_graphs
from rewriter.ir.model.schemas import ANY_TYPE_OPS, TYPE_ATTRIBUTES, schema_of
from rewriter.ir.model.tensors import FLOATS

DOUBLE, FLOAT = int(TensorProto.DOUBLE), int(TensorProto.FLOAT)

_CONTAINERS = ("Sequence", "Optional", "SplitToSequence", "ConcatFromSequence")
"""Sequences and optionals carry the type of their elements."""

_SIZES = {"Resize": (1, 2), "Upsample": (1,)}
"""Inputs that decide the size of the output: 2.9999998 in place of 3.0 gives another shape."""

_FLOAT32_INTEGERS = 2**24
"""Up to this bound, float32 holds every integer."""


@dataclass(frozen=True)
class DropDouble(GraphPass):
    """TensorRT has no float64 arithmetic, and one torch.linspace can turn a hundred tensors into it.

    Tensors that depend on float64 constants, Casts, random numbers and the like become float32. Inputs and
    outputs of the model keep their type, with one Cast at the border. Some arithmetic decides shapes and
    positions and stays float64: what ends in an integer (Cast), in the bounds of a Range or in the scales
    of a Resize.

    Declines:
        - a constant that float32 cannot hold, and the nodes that it reaches: beyond 3.4e38, below 1e-45,
          or an integer above 2^24 that would change
    """

    name = "drop-double"
    exactness = Exactness(
        1e-5, "float32 has 24 bits, 6e-8 for each operation; the sum over a deep network is below 1e-5"
    )
    before = """
        g (float[2,3] x) => (float[2,3] y)
        <double half = {0.5}> {
            d = Cast<to = 11>(x)
            m = Mul(d, half)
            y = Cast<to = 1>(m)
        }"""
    after = """
        g (float[2,3] x) => (float[2,3] y)
        <float half = {0.5}> {
            m = Mul(x, half)
            y = Cast<to = 1>(m)
        }"""

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        if not any(_has_double(graph, node) for node in graph.nodes):
            return
        kept = _index_arithmetic(graph)
        refused = list(_refusals(graph, kept))
        yield from (Refusal(name, reason) for _, name, reason in refused)
        walk = _Walk(graph, kept | _downstream(graph, [node for node, _, _ in refused]))
        walk.run()
        if graph.edited:
            names = sorted(walk.singles)
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            what = f"{len(names)} float64 tensors are read as float32: {shown}"
            yield Change(graph.graph.name or "graph", what)


def _is_double(graph: GraphEditor, tensor: str) -> bool:
    return bool(tensor) and graph.dtype(tensor) == DOUBLE


def _has_double(graph: GraphEditor, node: NodeProto) -> bool:
    return any(_is_double(graph, name) for name in (*node.input, *node.output))


# -- what stays ----------------------------------------------------------------------------------


def _index_arithmetic(graph: GraphEditor) -> set[int]:
    """Returns the nodes (by id) whose float64 results become an integer, a length or a scale."""

    def operands(tensor: str) -> list[str]:
        node = graph.producer(tensor)
        return [] if node is None else [name for name in node.input if graph.dtype(name) in FLOATS]

    deciding = reached((name for node in graph.nodes for name in _deciding(graph, node)), operands)
    makers = (node for node in map(graph.producer, deciding) if node is not None)
    ranges = (node for node in graph.nodes if node.op_type == "Range" and _is_double(graph, node.output[0]))
    return {id(node) for node in makers if _has_double(graph, node)} | {id(node) for node in ranges}


def _deciding(graph: GraphEditor, node: NodeProto) -> Iterable[str]:
    """Returns the inputs of a node that must not change in the last bit."""
    if node.op_type == "Cast" and graph.dtype(node.output[0]) not in FLOATS:
        return [name for name in node.input if _is_double(graph, name)]
    if node.op_type == "Range":
        return [name for name in node.input if graph.dtype(name) in FLOATS]
    return [node.input[i] for i in _SIZES.get(node.op_type, ()) if i < len(node.input) and node.input[i]]


def _downstream(graph: GraphEditor, nodes: list[NodeProto]) -> set[int]:
    """Returns the nodes (by id) and all their float64 consumers, whose values need not fit float32 either."""

    def doubles(nodes: Iterable[NodeProto]) -> list[str]:
        return [name for node in nodes for name in node.output if _is_double(graph, name)]

    tensors = reached(doubles(nodes), lambda tensor: doubles(graph.consumers(tensor)))
    return {id(node) for node in (*nodes, *(n for tensor in tensors for n in graph.consumers(tensor)))}


def _refusals(graph: GraphEditor, kept: set[int]) -> Iterator[tuple[NodeProto, str, str]]:
    """Yields nodes with a constant that float32 cannot hold, the constant's name, and the reason."""
    for node in graph.nodes:
        if id(node) in kept or node.op_type == "Constant":
            continue
        for name in (*node.input, *node.output):
            value = _double_value(graph, node, name)
            reason = _misfit(value) if value is not None else None
            if reason:
                yield node, name, f"{reason}; {label(node)} stays in float64, with what follows"


def _double_value(graph: GraphEditor, node: NodeProto, name: str) -> Array | None:
    """Returns the float64 constant that `node` reads as `name`, or fills `name` with."""
    if not _is_double(graph, name):
        return None
    if node.op_type == "ConstantOfShape":
        return numpy_helper.to_array(attribute(node, "value"))
    return graph.constant(name) if name in node.input else None


def _misfit(value: Array) -> str | None:
    """Returns why float32 cannot hold a float64 array; None if it can, up to rounding."""
    with np.errstate(over="ignore", under="ignore"):
        single = value.astype(np.float32)
    back = single.astype(np.float64)
    finite = np.isfinite(value)
    if not np.isfinite(single[finite]).all():
        return f"its value {value[finite & ~np.isfinite(single)].flat[0]:g} is beyond float32"
    if (finite & (value != 0) & (single == 0)).any():
        return "it holds values that are 0 in float32"
    whole = finite & (np.abs(value) > _FLOAT32_INTEGERS) & (value == np.floor(np.where(finite, value, 0)))
    if (whole & (back != value)).any():
        return f"its integer {value[whole & (back != value)].flat[0]:.0f} is not one of float32"
    return None


# -- what changes --------------------------------------------------------------------------------


@dataclass
class _Walk:
    """Visits the nodes of one graph in order and converts those that can compute in float32.

    Attributes:
        converted: Tensors that were float64 and are float32 now.
        singles: For each float64 tensor the float32 tensor to read: itself, a constant, or a Cast.
        doubles: For a converted tensor its Cast back to float64.
    """

    graph: GraphEditor
    kept: set[int]
    converted: set[str] = field(default_factory=set)
    singles: dict[str, str] = field(default_factory=dict)
    doubles: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        for node in self.graph.nodes:
            if self._converts(node):
                self._convert(node)
            elif not self._takes_any(node):
                self._read_double(node)
        for value in self.graph.graph.value_info:
            if value.name in self.converted:
                value.type.tensor_type.elem_type = FLOAT
        for name in self.singles:
            self.graph.sweep(name)

    def _takes_any(self, node: NodeProto) -> bool:
        """True if the node reads its first input in any type and does not pass float64 on."""
        if id(node) in self.kept or (node.op_type == "CastLike" and _is_double(self.graph, node.input[1])):
            return False
        return node.op_type in ANY_TYPE_OPS

    def _converts(self, node: NodeProto) -> bool:
        if id(node) in self.kept or self._takes_any(node) or node.op_type in ("Cast", "Constant", "BitCast"):
            return False
        if holds_graphs(node) or node.op_type.startswith(_CONTAINERS):
            return False
        if schema_of(node.op_type, node.domain, self.graph.model.opset) is None:
            return False
        return _has_double(self.graph, node)

    def _convert(self, node: NodeProto) -> None:
        for index, name in enumerate(node.input):
            if _is_double(self.graph, name):
                self.graph.set_input(node, index, self._single(name, node))
        _retype_attributes(node)
        for name in [name for name in node.output if _is_double(self.graph, name)]:
            self._convert_output(node, name)
        self.graph.edited = True

    def _convert_output(self, node: NodeProto, name: str) -> None:
        """Makes an output float32; a graph output keeps its name and type through a Cast."""
        self.converted.add(name)
        self.singles[name] = name
        if self.graph.is_output(name):
            single = self.graph.fresh(f"{name}/float32")
            self.graph.rename(name, single)
            self.graph.insert(self._cast(single, name, DOUBLE), before=None)
            self.singles[single] = single
            self.doubles[single] = name

    def _single(self, name: str, reader: NodeProto) -> str:
        """Returns the float32 form of a float64 tensor, made just before `reader` if there is none yet."""
        if name not in self.singles:
            self.singles[name] = self._made_single(name, reader)
        return self.singles[name]

    def _made_single(self, name: str, reader: NodeProto) -> str:
        value = self.graph.constant(name)
        if value is not None:
            return self.graph.add_constant(f"{name}/float32", value.astype(np.float32))
        cast = produced(self.graph, name, "Cast")
        source = name if cast is None else str(cast.input[0])
        if self.graph.dtype(source) == FLOAT:
            return source
        single = self.graph.tensor(f"{name}/float32", like=name, dtype=FLOAT)
        self.graph.insert(self._cast(source, single, FLOAT), before=reader)
        return single

    def _cast(self, source: str, target: str, dtype: int) -> NodeProto:
        return self.graph.make("Cast", [source], [target], name=f"{target}/Cast", to=dtype)

    def _read_double(self, node: NodeProto) -> None:
        """Gives a node that stays float64 a Cast back of every tensor that became float32."""
        for name in reads(node):
            if self.singles.get(name) == name:
                if name not in self.doubles:
                    self.doubles[name] = self.graph.tensor(f"{name}/float64", like=name, dtype=DOUBLE)
                    self.graph.insert(self._cast(name, self.doubles[name], DOUBLE), before=node)
                self.graph.redirect(name, self.doubles[name], only=[node])


def _retype_attributes(node: NodeProto) -> None:
    """Replaces the attribute by which a generator writes float64."""
    for item in node.attribute:
        if item.name == TYPE_ATTRIBUTES.get(node.op_type) and item.i == DOUBLE:
            item.i = FLOAT
        elif node.op_type == "ConstantOfShape" and item.t.data_type == DOUBLE:
            item.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(item.t).astype(np.float32)))
