"""Changes the float types of a model, with as few Casts as possible.

It serves the precision pass (types from a plan), the reference (everything FP32) and the emulation (FP32,
with a round to the planned type after every tensor).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from rewriter.ir.graph.nodes import all_names, attribute, casts_floats, display_name, without_unread
from rewriter.ir.graph.ops import CONTROL_FLOW, VALUE_PRESERVING
from rewriter.ir.graph.typed_tensors import Tensors, TypeRequest
from rewriter.ir.model import Model, holds_graphs
from rewriter.ir.model.graphs import fresh_name, subgraphs
from rewriter.ir.model.schemas import EXCHANGEABLE, TypeRule, convert, set_type_attributes, type_rules
from rewriter.ir.model.tensors import Facts, TensorFacts

__all__ = ["TypeRequest", "retype"]

LOWER = EXCHANGEABLE - {TensorProto.FLOAT}

UNCHANGED = int(TensorProto.UNDEFINED)
"""Type for an If, Loop or Scan whose inputs and outputs keep their types."""


def retype(model: Model, request: TypeRequest) -> Model:
    """Returns a copy of the model with the types of `request`.

    Nodes without a schema, and nodes with a tensor of unknown type (sequences and optionals among them), keep
    their types. An output that is itself an input has that input's type.

    Raises:
        PassError: a constant exceeds the type that its consumer is to have.
    """
    result = model.copy()
    graph = result.proto.graph
    for value in graph.input:
        if value.name in request.inputs and value.type.tensor_type.elem_type in request.floats:
            value.type.tensor_type.elem_type = request.inputs[value.name]
    own = {v.name: v.type.tensor_type.elem_type for v in graph.input}
    wanted = [
        own.get(v.name) or request.outputs.get(v.name, v.type.tensor_type.elem_type) for v in graph.output
    ]
    walk = _Walk(model.facts(), request, result, model.opsets, all_names(graph))
    walk.graph(graph, None, wanted)
    result.mark_edited()
    if not request.plugins:  # their types add to what inference finds
        result.set_facts(Facts(walk.scopes, walk.facts.contradiction))
    return result


@dataclass
class _Walk:
    """Visits the nodes of all graphs in the order of `Facts.scopes`; `Tensors` writes the new ones."""

    facts: Facts
    request: TypeRequest
    model: Model
    opsets: Mapping[str, int]
    names: set[str]
    scopes: list[dict[str, TensorFacts]] = field(default_factory=list)

    def graph(self, graph: GraphProto, parent: Tensors | None, output_types: Sequence[int]) -> None:
        """Retypes one graph; `output_types` are the element types of its outputs, in order."""
        scope = len(self.scopes)
        self.scopes.append({})
        tensors = Tensors(self.model, self.names, self.request, graph, self.facts.scopes[scope], parent)
        outputs = zip(graph.output, output_types, strict=True)
        tensors.wanted = {v.name: dtype for v, dtype in outputs if tensors.is_float(v.name)}
        nodes = list(graph.node)
        for node in nodes:  # the names of Casts that will be removed: the same new ones get the same names
            if casts_floats(node, tensors.is_float):
                self.names.discard(node.name)
                if node.output[0] not in tensors.wanted:
                    self.names.discard(node.output[0])
        # an unread Cast would count as a consumer of its input
        ends = [v.name for v in graph.output]
        nodes, _ = without_unread(nodes, ends, lambda n: casts_floats(n, tensors.is_float))
        for tensor in graph.initializer:
            if tensor.data_type in self.request.floats:
                tensors.add_initializer(tensor)
        for value in graph.input:
            if tensors.is_float(value.name) and not tensors.owns(value.name):
                tensors.add_input(value.name, value.type.tensor_type.elem_type)
        detours = _detours(tensors, nodes)
        for node in nodes:
            self._visit(tensors, scope, node, detours)
        tensors.finish_outputs()
        self.scopes[scope] = tensors.write()

    def _visit(self, tensors: Tensors, scope: int, node: NodeProto, detours: set[int]) -> None:
        if node.op_type == "Constant" and tensors.is_float(node.output[0]):
            tensors.add_constant(node)
        elif casts_floats(node, tensors.is_float):
            self._visit_float_cast(tensors, node, detour=id(node) in detours)
        elif holds_graphs(node):
            self._visit_control_flow(tensors, scope, node)
        else:
            self._visit_plain(tensors, scope, node)

    def _visit_float_cast(self, tensors: Tensors, node: NodeProto, *, detour: bool) -> None:
        source, name, to = node.input[0], node.output[0], attribute(node, "to")
        if self.request.rounding and to != TensorProto.FLOAT and tensors.original_type(source) != to:
            tensors.add_rounded(tensors.as_type(source, TensorProto.FLOAT), name, to)
        elif detour and not self.request.rounding:
            tensors.add_narrowed(name, source, to)
        else:
            tensors.add_alias(name, source)

    def _visit_plain(self, tensors: Tensors, scope: int, node: NodeProto) -> None:
        dtype = self.request.node_type(scope, node)
        names = filter(None, (*node.input, *node.output))
        unknown = not all(map(tensors.original_type, names))
        rules = None if unknown else type_rules(node, self.opsets, dtype)
        if rules is None:
            ports = self.request.plugins.get(node.op_type, ((0,), (0,)))
            inputs, outputs = (  # the last type holds for all that follow
                [types[min(index, len(types) - 1)] for index in range(len(names))]
                for types, names in zip(ports, (node.input, node.output), strict=True)
            )
            before = [tensors.original_type(name) for name in node.input]
            self._read(tensors, node, [kind or own for kind, own in zip(inputs, before, strict=True)])
            self._add(tensors, scope, node, outputs)
            for name, kind in zip(node.output, outputs, strict=True):
                if kind and name and not tensors.original_type(name):  # inference cannot find it
                    tensors.graph.value_info.add(name=name).type.tensor_type.elem_type = kind
            return
        follow = {TypeRule.FOLLOWS: dtype, TypeRule.FP32: TensorProto.FLOAT, TypeRule.ANY: 0}
        self._read(tensors, node, [follow[port] for port in rules.inputs])
        outputs = [follow[port] for port in rules.outputs]
        if outputs and outputs[0]:
            set_type_attributes(node, outputs[0], self.request.floats)
        if node.op_type == "ConstantOfShape" and tensors.is_float(node.output[0]):
            _fill_with(node, dtype, overflows=self.request.overflows)
        self._add(tensors, scope, node, outputs)

    def _read(self, tensors: Tensors, node: NodeProto, types: Sequence[int]) -> None:
        for index, (name, dtype) in enumerate(zip(node.input, types, strict=True)):
            if name and tensors.is_float(name):
                node.input[index] = tensors.as_type(name, dtype)

    def _add(self, tensors: Tensors, scope: int, node: NodeProto, types: list[int]) -> None:
        """Adds the node; its outputs are rounded where the given model has a lower type."""
        rounded: list[tuple[str, str, int]] = []
        for index, name in enumerate(node.output if self.request.rounding else ()):
            dtype = tensors.original_type(name) if name else 0
            lower = dtype in LOWER and (scope, name) not in self.request.exact
            if lower and node.op_type not in VALUE_PRESERVING:
                node.output[index] = fresh_name(f"{name}/exact", self.names)
                rounded.append((node.output[index], name, dtype))
        tensors.add(node, types)
        for exact, name, dtype in rounded:
            tensors.add_rounded(exact, name, dtype)

    def _visit_control_flow(self, tensors: Tensors, scope: int, node: NodeProto) -> None:
        """Gives all floats that cross the border of If, Loop and Scan the node's type."""
        dtype, border = self.request.node_type(scope, node), 0  # it keeps its types
        exchanges = dtype != UNCHANGED and node.op_type in CONTROL_FLOW
        rules = type_rules(node, self.opsets, dtype) if exchanges else None
        if rules is not None:
            border = dtype if rules.can_follow else TensorProto.FLOAT
        self._read(tensors, node, [border or tensors.original_type(name) for name in node.input])
        for child in subgraphs(node):
            facts = self.facts.scopes[len(self.scopes)]
            for value in child.input:
                if border and value.name in facts and facts[value.name].dtype in self.request.floats:
                    value.type.tensor_type.elem_type = border
            names = [v.name for v in child.output]
            types = (facts[n].dtype if n in facts else tensors.original_type(n) for n in names)
            self.graph(child, tensors, [border or dtype for dtype in types])
        self._add(tensors, scope, node, [border] * len(node.output))


def _detours(tensors: Tensors, nodes: Sequence[NodeProto]) -> set[int]:
    """Casts that round on purpose: from FP32 to a lower type, with a Cast back to FP32 as consumer."""
    casts = [(n, attribute(n, "to")) for n in nodes if casts_floats(n, tensors.is_float)]
    widened = {node.input[0] for node, to in casts if to == TensorProto.FLOAT}
    narrowing = (node for node, to in casts if to in LOWER and node.output[0] in widened)
    return {id(n) for n in narrowing if tensors.original_type(n.input[0]) == TensorProto.FLOAT}


def _fill_with(node: NodeProto, dtype: int, *, overflows: bool) -> None:
    """Lets ConstantOfShape make `dtype`; without the attribute its zeros are FP32."""
    for item in node.attribute:
        if item.name == "value":
            value = numpy_helper.to_array(item.t)
            value = convert(value, dtype, display_name(node), overflows=overflows)
            item.t.CopyFrom(numpy_helper.from_array(value))
            return
    if dtype != TensorProto.FLOAT:
        zero = TensorProto(data_type=dtype, dims=[1], raw_data=bytes(2))
        node.attribute.append(helper.make_attribute("value", zero))
