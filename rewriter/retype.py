"""Gives every float tensor of a model its type, with as few Casts as that takes.

One algorithm serves the precision pass (types from a plan), the reference (everything FP32) and
the emulation (everything FP32, with an explicit round to the planned type after every tensor).
Existing Casts between float types are dissolved first: a tensor has one stored type, and each
consumer that wants another reads one shared Cast of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from rewriter.edits import TAG, all_names, attribute, constant_value, label, reads
from rewriter.errors import PassError
from rewriter.facts import Facts, TensorFacts
from rewriter.model import Array, Model, subgraphs
from rewriter.schemas import DTYPE_ATTRIBUTES, Port, ports

EXCHANGEABLE = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16})
"""The types among which a tensor may move; float64 is drop-double's business."""

SHORT_NAMES = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "fp16", TensorProto.BFLOAT16: "bf16"}

NUMPY_TYPES: dict[int, np.dtype[np.generic]] = {
    TensorProto.FLOAT: np.dtype(np.float32),
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}

VALUE_PRESERVING = frozenset(
    "Reshape Transpose Squeeze Unsqueeze Flatten Identity Slice Gather GatherElements GatherND Split Concat "
    "Expand Tile Relu Neg Abs Max Min MaxPool GlobalMaxPool ReduceMax ReduceMin DepthToSpace SpaceToDepth Where "
    "Dropout ScatterElements ScatterND TopK Compress ReverseSequence Trilu If Loop Scan".split()
)
"""Operators whose outputs hold only values of their inputs: what was rounded stays rounded."""


UNKNOWN = TensorFacts(0, None)


@dataclass(frozen=True)
class Request:
    """The types that a model shall have.

    Attributes:
        node_type: Element type in which a node computes, from the index of its scope (the order
            of `Facts.scopes`) and the node.
        low: The lower precision that occurs, which operators' schemas are asked for.
        inputs, outputs: Element types of graph inputs and outputs by name; the rest keep theirs.
        rounding: Round after every tensor that is FP16 or BF16 in the given model.
        tag: Name for new nodes' metadata.
    """

    node_type: Callable[[int, NodeProto], int]
    low: int
    inputs: Mapping[str, int] = field(default_factory=dict)
    outputs: Mapping[str, int] = field(default_factory=dict)
    rounding: bool = False
    tag: str = ""


def retype(model: Model, facts: Facts, request: Request) -> Model:
    """A model with the types of `request`; `model` stays as it is.

    Raises:
        PassError: a constant does not fit the type that its consumer shall have.
    """
    result = model.copy()
    versions = {o.domain: o.version for o in result.proto.opset_import}
    versions.setdefault("", versions.get("ai.onnx", 1))
    run = _Run(result, facts, request, versions)
    main = run.open(result.proto.graph, None)
    for value in result.proto.graph.input:
        dtype = request.inputs.get(value.name)
        if dtype is not None and value.type.tensor_type.elem_type in EXCHANGEABLE:
            value.type.tensor_type.elem_type = dtype
    wanted = [
        request.outputs.get(v.name, v.type.tensor_type.elem_type) for v in result.proto.graph.output
    ]
    main.run(wanted)
    return result


@dataclass
class _Run:
    """What all scopes of one call share."""

    model: Model
    facts: Facts
    request: Request
    versions: dict[str, int]
    names: set[str] = field(default_factory=set)
    scopes: int = 0

    def open(self, graph: GraphProto, parent: _Scope | None) -> _Scope:
        if parent is None:
            self.names = all_names(graph)
        scope = _Scope(self, graph, parent, self.scopes)
        self.scopes += 1
        return scope

    def fresh(self, base: str) -> str:
        name, count = base, 0
        while name in self.names:
            count += 1
            name = f"{base}_{count}"
        self.names.add(name)
        return name


@dataclass(frozen=True)
class _Stored:
    """Where a logical tensor of the given model lives now: name, type, and the scope that owns it."""

    name: str
    dtype: int
    scope: _Scope
    constant: bool = False


class _Scope:
    """One graph on its way from the given types to the wanted ones."""

    def __init__(self, run: _Run, graph: GraphProto, parent: _Scope | None, index: int) -> None:
        self.run_ = run
        self.graph = graph
        self.parent = parent
        self.index = index
        self.facts = run.facts.scopes[index]
        self.nodes: list[NodeProto] = []
        self.stored: dict[str, _Stored] = {}
        self.casts: dict[tuple[str, int], str] = {}
        self.converted: dict[str, tuple[str, TensorProto]] = {}
        self.wanted: dict[str, int] = {}
        self.initializers = {t.name: t for t in graph.initializer}
        self.constants: dict[str, NodeProto] = {}

    # -- the walk ----------------------------------------------------------------------------

    def run(self, output_types: Sequence[int]) -> None:
        """Retype the graph; `output_types` are the element types of its outputs, in order."""
        given = list(self.graph.node)
        self.wanted = {
            v.name: t
            for v, t in zip(self.graph.output, output_types, strict=True)
            if self._given(v.name) in EXCHANGEABLE
        }
        detours = self._detours(given)
        for tensor in self.graph.initializer:
            if tensor.data_type in EXCHANGEABLE:
                self._store_initializer(tensor)
        for value in self.graph.input:
            dtype = value.type.tensor_type.elem_type
            if value.name not in self.stored and dtype in EXCHANGEABLE:
                self.stored[value.name] = _Stored(value.name, dtype, self)
        for node in given:
            self._visit(node, detours)
        self._finish_outputs()
        self._write()

    def _visit(self, node: NodeProto, detours: set[int]) -> None:
        if node.op_type == "Constant":
            self._visit_constant(node)
        elif node.op_type == "Cast" and self._is_float_cast(node):
            self._visit_float_cast(node, keep=id(node) in detours)
        elif any(True for _ in subgraphs(node)):
            self._visit_control_flow(node)
        else:
            self._visit_plain(node)

    def _store_initializer(self, tensor: TensorProto) -> None:
        name, dtype = tensor.name, tensor.data_type
        if self.parent is not None and self.wanted.get(name, dtype) != dtype:
            tensor.name = self.run_.fresh(name)  # its name is an output of another type
            self.initializers[tensor.name] = tensor
        self.stored[name] = _Stored(tensor.name, dtype, self, True)

    def _visit_constant(self, node: NodeProto) -> None:
        name = node.output[0]
        dtype = self._given(name)
        self.nodes.append(node)
        if dtype in EXCHANGEABLE:
            if self.wanted.get(name, dtype) != dtype:
                node.output[0] = self.run_.fresh(name)
            self.constants[node.output[0]] = node
            self.stored[name] = _Stored(node.output[0], dtype, self, True)

    def _is_float_cast(self, node: NodeProto) -> bool:
        return self._given(node.input[0]) in EXCHANGEABLE and attribute(node, "to") in EXCHANGEABLE

    def _visit_float_cast(self, node: NodeProto, *, keep: bool) -> None:
        source, to = self._find(node.input[0]), attribute(node, "to")
        narrows = to in (TensorProto.FLOAT16, TensorProto.BFLOAT16)
        if source is None or (keep and not self.run_.request.rounding):
            if source is not None:
                node.input[0] = self._as_type(node.input[0], self._given(node.input[0]))
            self.nodes.append(node)
            self.stored[node.output[0]] = _Stored(node.output[0], to, self)
        elif self.run_.request.rounding and narrows and self._given(node.input[0]) != to:
            self._round(self._as_type(node.input[0], TensorProto.FLOAT), node.output[0], to)
        else:
            self.stored[node.output[0]] = source

    def _visit_plain(self, node: NodeProto) -> None:
        request = self.run_.request
        rules = ports(node, self._version(node), request.low)
        if rules is None:  # no schema: it gets what it had
            self._read(node, [self._given(name) for name in node.input])
            self._store(node, [self._given(name) for name in node.output])
            return
        dtype = request.node_type(self.index, node)
        follow = {Port.FOLLOWS: dtype, Port.FP32: TensorProto.FLOAT, Port.ANY: 0}
        self._read(node, [follow[port] for port in rules.inputs])
        outputs = [follow[port] for port in rules.outputs]
        self._set_type_attributes(node, dtype)
        self._store(node, outputs)

    def _set_type_attributes(self, node: NodeProto, dtype: int) -> None:
        for item in node.attribute:
            if node.op_type == "Cast" and item.name == "to" and item.i in EXCHANGEABLE:
                item.i = dtype
            elif item.name == DTYPE_ATTRIBUTES.get(node.op_type) and item.i in EXCHANGEABLE:
                item.i = TensorProto.FLOAT
            elif node.op_type == "ConstantOfShape" and item.t.data_type in EXCHANGEABLE:
                value = self._convert(numpy_helper.to_array(item.t), dtype, label(node))
                item.t.CopyFrom(numpy_helper.from_array(value))

    def _read(self, node: NodeProto, types: Sequence[int]) -> None:
        for index, (name, dtype) in enumerate(zip(node.input, types, strict=True)):
            if name and self._given(name) in EXCHANGEABLE and self._find(name) is not None:
                node.input[index] = self._as_type(name, dtype)

    def _store(self, node: NodeProto, types: Sequence[int]) -> None:
        """Append the node and record the types of its outputs."""
        self.nodes.append(node)
        for index, (name, dtype) in enumerate(zip(node.output, types, strict=True)):
            given = self._given(name) if name else 0
            if given not in EXCHANGEABLE:
                continue
            dtype = dtype or given
            rounded = self.run_.request.rounding and given != TensorProto.FLOAT
            if rounded and node.op_type not in VALUE_PRESERVING:
                node.output[index] = self.run_.fresh(f"{name}/exact")
                self._round(node.output[index], name, given)
                continue
            if self.wanted.get(name, dtype) != dtype:  # the graph output's name goes to a Cast
                node.output[index] = self.run_.fresh(f"{name}/{SHORT_NAMES[dtype]}")
            self.stored[name] = _Stored(node.output[index], dtype, self)

    def _round(self, source: str, name: str, dtype: int) -> None:
        """Round FP32 `source` through `dtype` and keep it as FP32 under the name of `name`."""
        low = self.run_.fresh(f"{name}/{SHORT_NAMES[dtype]}")
        stored = name
        if self.wanted.get(name, TensorProto.FLOAT) != TensorProto.FLOAT:
            stored = self.run_.fresh(f"{name}/fp32")
        self.nodes.append(self._cast(source, low, dtype))
        self.nodes.append(self._cast(low, stored, TensorProto.FLOAT))
        self.stored[name] = _Stored(stored, TensorProto.FLOAT, self)

    # -- control flow ------------------------------------------------------------------------

    def _visit_control_flow(self, node: NodeProto) -> None:
        """If, Loop and Scan: all floats that cross the border have the node's type."""
        dtype = self.run_.request.node_type(self.index, node)
        self._read(node, [dtype] * len(node.input))
        for child in subgraphs(node):
            for value in child.input:
                if self.run_.facts.scopes[self.run_.scopes].get(value.name, UNKNOWN).dtype in EXCHANGEABLE:
                    value.type.tensor_type.elem_type = dtype
            inner = self.run_.open(child, self)
            inner.run([dtype] * len(child.output))
        self._store(node, [dtype] * len(node.output))

    # -- tensors -----------------------------------------------------------------------------

    def _given(self, name: str) -> int:
        """Element type of a tensor in the given model; 0 if unknown."""
        facts = self.facts.get(name)
        if facts is not None:
            return facts.dtype
        return self.parent._given(name) if self.parent is not None else 0

    def _find(self, name: str) -> _Stored | None:
        found = self.stored.get(name)
        return found if found or self.parent is None else self.parent._find(name)

    def _as_type(self, name: str, dtype: int) -> str:
        """Name of a tensor that holds `name` in `dtype` (0: as it is stored)."""
        stored = self._find(name)
        assert stored is not None
        if dtype in (0, stored.dtype):
            return stored.name
        if stored.constant:
            return stored.scope._converted_constant(stored, dtype)
        key = (stored.name, dtype)
        if key not in self.casts:
            out = self.run_.fresh(f"{name}/{SHORT_NAMES[dtype]}")
            self.nodes.append(self._cast(stored.name, out, dtype))
            self.casts[key] = out
        return self.casts[key]

    def _converted_constant(self, stored: _Stored, dtype: int) -> str:
        key = f"{stored.name}/{SHORT_NAMES[dtype]}"
        if key not in self.converted:
            value = self._convert(self._constant(stored.name), dtype, stored.name)
            name = self.run_.fresh(key)
            model = self.run_.model
            tensor = (
                model.detached_tensor(name, value)
                if self.parent is None
                else numpy_helper.from_array(value, name)
            )
            self.converted[key] = (stored.name, tensor)
        return self.converted[key][1].name

    def _constant(self, name: str) -> Array:
        if name in self.initializers:
            return self.run_.model.array(self.initializers[name])
        value = constant_value(self.constants[name])
        assert value is not None
        return value

    def _convert(self, value: Array, dtype: int, name: str) -> Array:
        with np.errstate(over="ignore"):
            converted = value.astype(NUMPY_TYPES[dtype])
        if dtype == TensorProto.FLOAT16 and bool(np.any(np.isinf(converted) & np.isfinite(value))):
            raise PassError(
                f"constant {name!r} holds values up to {np.abs(value[np.isfinite(value)]).max():.4g}, "
                "which FP16 cannot represent, and its consumer is planned as FP16",
                where=name,
                hint="keep the nodes that read it in FP32 (--keep-fp32)",
            )
        return converted

    def _cast(self, source: str, out: str, dtype: int) -> NodeProto:
        return self._tagged("Cast", source, out, to=dtype)

    def _tagged(self, op: str, source: str, out: str, **attributes: int) -> NodeProto:
        node = helper.make_node(op, [source], [out], name=self.run_.fresh(f"{out}/{op}"), **attributes)
        if self.run_.request.tag:
            node.metadata_props.add(key=TAG, value=self.run_.request.tag)
        return node

    def _version(self, node: NodeProto) -> int:
        return self.run_.versions.get("" if node.domain == "ai.onnx" else node.domain, 1)

    def _detours(self, nodes: Sequence[NodeProto]) -> set[int]:
        """Casts that round on purpose: a narrowing one that only widening ones read, and those."""
        readers: dict[str, list[NodeProto]] = {}
        for node in nodes:
            for name in node.input:
                readers.setdefault(name, []).append(node)
        found: set[int] = set()
        outputs = {v.name for v in self.graph.output}
        for node in nodes:
            if not (node.op_type == "Cast" and self._is_float_cast(node)):
                continue
            to, after = attribute(node, "to"), readers.get(node.output[0], [])
            narrows = to != TensorProto.FLOAT and self._given(node.input[0]) == TensorProto.FLOAT
            if narrows and after and node.output[0] not in outputs:
                if all(n.op_type == "Cast" and attribute(n, "to") == TensorProto.FLOAT for n in after):
                    found.update((id(node), *map(id, after)))
        return found

    # -- the end -----------------------------------------------------------------------------

    def _finish_outputs(self) -> None:
        for value in self.graph.output:
            if value.name not in self.wanted:
                continue
            value.type.tensor_type.elem_type = dtype = self.wanted[value.name]
            stored = self._find(value.name)
            if stored is None or stored.name == value.name:
                continue
            if stored.dtype != dtype:
                self.nodes.append(self._cast(stored.name, value.name, dtype))
            else:
                self.nodes.append(self._tagged("Identity", stored.name, value.name))

    def _write(self) -> None:
        read = {name for node in self.nodes for name in reads(node)} | {v.name for v in self.graph.output}
        renamed = self._take_over_names(read)
        for node in self.nodes:
            _rename_inputs(node, renamed)
        nodes = [n for n in self.nodes if n.op_type != "Constant" or n.output[0] in read]
        nodes = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del self.graph.node[:]
        self.graph.node.extend(nodes)
        self._write_initializers(read)
        self._write_value_info()

    def _take_over_names(self, read: set[str]) -> dict[str, str]:
        """A converted constant takes the name of the original that nothing reads any more."""
        renamed: dict[str, str] = {}
        for base, tensor in self.converted.values():
            if base not in read and base not in renamed.values():
                renamed[tensor.name] = base
                weights = self.run_.model.weights
                if self.parent is None:
                    weights.pop(base, None)  # half the size, the new one may be too small to be detached
                if tensor.name in weights:
                    weights[base] = weights.pop(tensor.name)
                tensor.name = base
        return renamed

    def _write_initializers(self, read: set[str]) -> None:
        weights, new = self.run_.model.weights, {t.name for _, t in self.converted.values()}
        kept = []
        for tensor in self.graph.initializer:
            if tensor.name in read or tensor.data_type not in EXCHANGEABLE:
                kept.append(TensorProto.FromString(tensor.SerializeToString()))
            elif self.parent is None and tensor.name not in new:
                weights.pop(tensor.name, None)
        del self.graph.initializer[:]
        self.graph.initializer.extend([*kept, *(t for _, t in self.converted.values())])
        names = {t.name: t.data_type for t in self.graph.initializer}
        for value in self.graph.input:  # IR 3 lists initializers as inputs
            if value.name in names:
                value.type.tensor_type.elem_type = names[value.name]

    def _write_value_info(self) -> None:
        kept = []
        for value in self.graph.value_info:
            if value.type.tensor_type.elem_type in EXCHANGEABLE:
                stored = self.stored.get(value.name)
                if stored is None or stored.name != value.name:
                    continue
                value.type.tensor_type.elem_type = stored.dtype
            kept.append(onnx.ValueInfoProto.FromString(value.SerializeToString()))
        del self.graph.value_info[:]
        self.graph.value_info.extend(kept)


def _rename_inputs(node: NodeProto, renamed: Mapping[str, str]) -> None:
    if not renamed:
        return
    for index, name in enumerate(node.input):
        if name in renamed:
            node.input[index] = renamed[name]
    for graph in subgraphs(node):
        for inner in graph.node:
            _rename_inputs(inner, renamed)
