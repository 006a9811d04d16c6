"""Converts nodes to a later version of the default operator set.

onnx.version_converter converts whole graphs: it drops node metadata and quantisation annotations, skips
subgraphs, and stops at unknown operators. Here it converts the nodes of one graph side by side, each with
inputs of its own: the rest of the model is unchanged, and errors name the node. `RULES` corrects adapters of
onnx 1.23 that change results (tests/passes/test_upgrade_opset.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, version_converter

from rewriter.base import sandbox
from rewriter.base.errors import NativeError
from rewriter.ir.graph import GraphEditor, attribute
from rewriter.ir.graph.ops import RESIZES
from rewriter.ir.model import DETACH_BYTES, STANDARD_DOMAINS, holds_graphs
from rewriter.ir.model.graphs import schema_of


class CannotConvertError(Exception):
    """The operator cannot be converted; the text says why."""


FAILURES = (CannotConvertError, RuntimeError, ValueError, IndexError, NativeError)
"""Reasons not to convert a node: ours, exceptions of the library's C++ code, and its end in a crash."""


@dataclass
class Converted:
    """Nodes that replace `node` at the target opset."""

    node: NodeProto
    reason: str = ""  # why it cannot be converted; "" if it can
    nodes: list[NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # what `nodes` read, by its name there

    @property
    def is_same(self) -> bool:
        new = [_form(node, [self.names.get(name, "") for name in node.input]) for node in self.nodes]
        return new == [_form(self.node, list(self.node.input))]


def _form(node: NodeProto, inputs: list[str]) -> tuple[object, ...]:
    attributes = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
    return node.op_type, inputs, list(node.output), attributes


@dataclass(frozen=True)
class Converter:
    """Converts nodes of one graph from opset `source` to `target`.

    `unknown` is the TensorProto.DataType assumed for inputs without facts; 0 if there is none.
    """

    graph: GraphEditor
    source: int
    target: int
    unknown: int

    def run(self) -> Iterator[Converted]:
        """Yields the nodes whose operators change until the target, in the order of the graph."""
        nodes = [node for node in self.graph.nodes if self._concerns(node)]
        for node in nodes:  # old exporters name a mask in every Dropout, which nothing reads
            mask = next(iter(node.output[1:]), "") if node.op_type == "Dropout" else ""
            if mask and not self.graph.is_read(mask):
                del node.output[1:]
        if nodes:
            yield from self._converted(nodes)

    def _concerns(self, node: NodeProto) -> bool:
        """False for unknown operators, and for Constant, which only gained types."""
        if node.domain not in STANDARD_DOMAINS or node.op_type == "Constant":
            return False
        if holds_graphs(node):  # these only gained types, too, but for Scan
            return node.op_type == "Scan" and self.source < 9
        old = schema_of(node.op_type, "", self.source)
        new = schema_of(node.op_type, "", self.target)
        return old is not None and (new is None or new.since_version != old.since_version)

    def _converted(self, nodes: Sequence[NodeProto]) -> Iterator[Converted]:
        """Converts nodes in one call, since each call costs 7 ms; if it fails, converts each half."""
        names, ops = dict[str, str](), {node.op_type for node in nodes}
        try:
            proto = self._draft(nodes, names)
            for rule in RULES:
                if self.source < rule.version <= self.target and rule.op_types & ops:
                    proto = rule.corrected(proto)
            graph = _at(proto, self.target).graph
        except FAILURES as error:
            if len(nodes) == 1:  # of `convert.h:70: adapter: Assertion 'x' failed: sentence` the last part
                lines = str(error).strip().splitlines() or ["no reason given"]
                yield Converted(nodes[0], lines[0].rsplit("failed: ", 1)[-1].strip())
            else:
                middle = len(nodes) // 2
                yield from (*self._converted(nodes[:middle]), *self._converted(nodes[middle:]))
            return
        yield from _separated(nodes, graph, names)

    def _draft(self, nodes: Sequence[NodeProto], names: dict[str, str]) -> ModelProto:
        """The nodes as a model, with the types and shapes of what they read; adds its names to `names`."""
        whole = helper.make_graph([], "nodes", [], [])
        for index, node in enumerate(nodes):
            if node.op_type == "Scan":
                raise CannotConvertError("Scan had a batch axis before opset 9")
            copy = whole.node.add(op_type=node.op_type, output=node.output, attribute=node.attribute)
            for name in node.input:
                alias = f"{index}/{list(node.input).index(name)}" if name else ""
                copy.input.append(alias)
                if alias and alias not in names:
                    names[alias] = name
                    facts = self.graph.facts(name)
                    dtype, shape = (facts.dtype, facts.shape) if facts is not None else (self.unknown, None)
                    whole.input.append(helper.make_tensor_value_info(alias, dtype, shape))
                    # only the conversion of Resize depends on the value of an input
                    value = self.graph.constant(name) if node.op_type == "Resize" else None
                    if value is not None and value.nbytes < DETACH_BYTES:
                        whole.initializer.append(numpy_helper.from_array(value, alias))
            whole.output.extend(helper.make_tensor_value_info(name, 0, None) for name in node.output if name)
        return helper.make_model(whole, opset_imports=[helper.make_opsetid("", self.source)])


def _separated(nodes: Sequence[NodeProto], graph: GraphProto, names: dict[str, str]) -> list[Converted]:
    """The nodes that each became: a new node belongs to the old one that it writes an output of, or for."""
    parts = [Converted(node, names=names) for node in nodes]
    owner = {name: part for part in parts for name in part.node.output if name}
    for node in reversed(graph.node):
        part = next(owner[name] for name in node.output if name in owner)
        part.nodes.insert(0, node)
        owner.update((name, part) for name in node.input if name and name not in names)
    for tensor in graph.initializer:
        if tensor.name in owner:
            owner[tensor.name].initializers.append(tensor)
    return parts


def _at(proto: ModelProto, version: int) -> ModelProto:
    if proto.opset_import[0].version == version:
        return proto
    return sandbox.call(version_converter.convert_version, proto, version, doing="onnx.version_converter")


Correction = Callable[[GraphProto, NodeProto], None]


@dataclass(frozen=True)
class Rule:
    """Correction of the conversion of some operators to `version`.

    `before` gets the node one version earlier, `after` at `version`. Both may raise CannotConvertError.
    """

    op_types: frozenset[str]
    version: int
    before: Correction | None = None
    after: Correction | None = None

    def corrected(self, proto: ModelProto) -> ModelProto:
        """Returns the model at `version`."""
        for version, correct in ((self.version - 1, self.before), (self.version, self.after)):
            proto = _at(proto, version)
            for node in [node for node in proto.graph.node if node.op_type in self.op_types]:
                if correct is not None:
                    correct(proto.graph, node)
        return proto


def _set_default(node: NodeProto, name: str, value: object) -> None:
    if attribute(node, name) is None:
        node.attribute.append(helper.make_attribute(name, value))


def _made(graph: GraphProto) -> dict[str, NodeProto]:
    """The Constant nodes by their output."""
    return {node.output[0]: node for node in graph.node if node.op_type == "Constant"}


def _input(graph: GraphProto, name: str) -> onnx.TypeProto.Tensor:
    return next((v.type.tensor_type for v in graph.input if v.name == name), onnx.TypeProto.Tensor())


def _keep_resize_coordinates(graph: GraphProto, node: NodeProto) -> None:
    """Resize 10 and Upsample map x_out to x_out / scale; Resize 11 uses pixel centres by default.

    Mode nearest rounds the index down when enlarging, as Upsample always does, and up when reducing: so do
    onnx's test of Resize 10 and ONNX Runtime.
    """
    if node.op_type == "Resize":
        _set_default(node, "coordinate_transformation_mode", "asymmetric")
        if attribute(node, "mode", "nearest") == "nearest" and attribute(node, "nearest_mode") is None:
            node.attribute.append(helper.make_attribute("nearest_mode", _rounding(graph, node)))


def _rounding(graph: GraphProto, node: NodeProto) -> str:
    held = {tensor.name: tensor for tensor in graph.initializer}
    held |= {name: constant.attribute[0].t for name, constant in _made(graph).items()}
    if node.input[1] not in held:
        raise CannotConvertError("its scales are computed, but the rounding of Resize 10 depends on them")
    scales = numpy_helper.to_array(held[node.input[1]])
    if (scales >= 1).all():
        return "floor"
    if (scales <= 1).all():
        return "ceil"
    raise CannotConvertError("it enlarges one axis and reduces another, which are rounded differently")


def _upsample_enlarges(graph: GraphProto, node: NodeProto) -> None:
    """Upsample 9 only enlarges, which is no longer known after its conversion to Resize."""
    if node.op_type == "Resize":
        _set_default(node, "nearest_mode", "floor")


def _drop_unread_roi(graph: GraphProto, node: NodeProto) -> None:
    """The adapter writes a roi for Resize 11, which only one coordinate mode reads."""
    mode, constants = attribute(node, "coordinate_transformation_mode"), _made(graph)
    if node.op_type == "Resize" and mode != "tf_crop_and_resize" and node.input[1] in constants:
        graph.node.remove(constants[node.input[1]])
        node.input[1] = ""


def _type_bounds(graph: GraphProto, node: NodeProto) -> None:
    """Clip and Pad need bounds and value in the type of the data; the adapter writes float32."""
    dtype = _input(graph, node.input[0]).elem_type
    for name in _made(graph).keys() & set(node.input[1:]):
        tensor = _made(graph)[name].attribute[0].t
        if tensor.data_type == TensorProto.FLOAT != dtype:
            if not dtype:
                raise CannotConvertError("the type of its input is unknown")
            value = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(dtype))
            tensor.CopyFrom(numpy_helper.from_array(value))


def _refuse_mask(graph: GraphProto, node: NodeProto) -> None:
    if len(node.output) > 1 and node.output[1]:
        raise CannotConvertError("its mask output is used, and its meaning changes in opset 12")


def _refuse_flattening(graph: GraphProto, node: NodeProto) -> None:
    """Before 13, Hardmax flattened all axes from `axis` (default 1) on; the adapter omits that."""
    shape = _input(graph, node.input[0])
    axis = attribute(node, "axis", 1)
    if not shape.HasField("shape") or axis not in (-1, len(shape.shape.dim) - 1):
        raise CannotConvertError("it flattens several axes, which Hardmax 13 does not")
    _set_default(node, "axis", axis)


def _keep_roi_offset(graph: GraphProto, node: NodeProto) -> None:
    """RoiAlign 16 shifts by half a pixel by default; older versions of onnx omit the attribute."""
    _set_default(node, "coordinate_transformation_mode", "output_half_pixel")


def _refuse_groups(graph: GraphProto, node: NodeProto) -> None:
    """GroupNormalization 21 has scale and bias per channel, earlier versions per group."""
    sizes = np.array([dim.dim_value for dim in _input(graph, node.input[0]).shape.dim])
    if sizes[1:2] != attribute(node, "num_groups"):
        raise CannotConvertError("it has scale and bias per group, and GroupNormalization 21 per channel")


RULES = (
    Rule(RESIZES, 10, after=_upsample_enlarges),
    Rule(RESIZES, 11, before=_keep_resize_coordinates),
    Rule(frozenset({"Clip", "Pad"}), 11, after=_type_bounds),
    Rule(frozenset({"Dropout"}), 12, before=_refuse_mask),
    Rule(RESIZES, 13, after=_drop_unread_roi),
    Rule(frozenset({"Hardmax"}), 13, before=_refuse_flattening),
    Rule(frozenset({"RoiAlign"}), 16, before=_keep_roi_offset),
    Rule(frozenset({"GroupNormalization"}), 21, before=_refuse_groups),
)
"""Rules by version."""
