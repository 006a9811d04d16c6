"""Names and stored types of the tensors of a model whose types change.

Nodes are visited with the names of the given model and written with new ones. A tensor is stored in
one type. Consumers that need another one share a Cast of it; constants are converted instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial

from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from rewriter.ir.graph.editor import TAG
from rewriter.ir.graph.nodes import constant_value, without_unread
from rewriter.ir.model import Array, Model
from rewriter.ir.model.graphs import fresh_name, rename_reads, replace_items
from rewriter.ir.model.schemas import EXCHANGEABLE, SHORT_NAMES, convert
from rewriter.ir.model.tensors import Shape, TensorFacts, release


@dataclass(frozen=True)
class TypeRequest:
    """The types that a model is to have."""

    # element type in which a node computes, from the index of its scope (as in `Facts.scopes`) and the node
    node_type: Callable[[int, NodeProto], int]
    # inputs, outputs: element types of graph inputs and outputs by name; the rest keep theirs
    inputs: Mapping[str, int] = field(default_factory=dict)
    outputs: Mapping[str, int] = field(default_factory=dict)
    rounding: bool = False  # round after every tensor that is FP16 or BF16 in the given model
    # tensors that are not rounded all the same: index of the scope, and name
    exact: AbstractSet[tuple[int, str]] = frozenset()
    # types of inputs and outputs by operator without a schema; 0: unchanged. The last holds for all others
    plugins: Mapping[str, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)
    tag: str = ""  # name for new nodes' metadata
    # weights of at least so many bytes stay FP16 or BF16, with a Cast where FP32 is read
    cast_bytes: float = math.inf
    # the element types that are exchanged for one another; tensors of others stay
    floats: AbstractSet[int] = EXCHANGEABLE
    overflows: bool = False  # constants beyond the range of their type become infinite
    # gives the values of a constant of the main graph to store, from its own and these rounded to nearest
    refined: Mapping[str, Callable[[Array, Callable[[], Array]], Array]] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredTensor:
    """The new name and type of a tensor of the given model, and the graph that owns it."""

    name: str
    dtype: int
    owner: Tensors
    constant: bool = False


@dataclass
class Tensors:
    """The tensors of one graph, and the new nodes so far."""

    # model, names: the weights, and the names in use, which all graphs of a model share
    model: Model
    names: set[str]
    request: TypeRequest
    graph: GraphProto
    facts: Mapping[str, TensorFacts]  # types and shapes in the given model; the new one has the same shapes
    parent: Tensors | None
    # requested element type of each float output of the graph
    wanted: dict[str, int] = field(default_factory=dict)
    nodes: list[NodeProto] = field(default_factory=list)
    _types: dict[str, TensorFacts] = field(default_factory=dict)
    _stored: dict[str, StoredTensor] = field(default_factory=dict)
    _casts: dict[tuple[str, int], str] = field(default_factory=dict)
    _sources: dict[str, str] = field(default_factory=dict)
    _own: set[int] = field(default_factory=set)
    _converted: dict[tuple[str, int], TensorProto] = field(default_factory=dict)
    _constants: dict[str, Callable[[], Array]] = field(default_factory=dict)

    def original_type(self, name: str) -> int:
        """Element type of a tensor in the given model; 0 if it is not known or not a tensor."""
        facts = self.facts.get(name)
        if facts is not None:
            return facts.dtype
        return self.parent.original_type(name) if self.parent is not None else 0

    def is_float(self, name: str) -> bool:
        return self.original_type(name) in self.request.floats

    def find(self, name: str) -> StoredTensor:
        """The stored form of a float tensor of this graph or of an enclosing one."""
        if name in self._stored:
            return self._stored[name]
        assert self.parent is not None, name
        return self.parent.find(name)

    def owns(self, name: str) -> bool:
        return name in self._stored

    def as_type(self, name: str, dtype: int) -> str:
        """The tensor that holds `name` in `dtype` (0: in its stored type)."""
        stored = self.find(name)
        if dtype in (0, stored.dtype):
            return stored.name
        return stored.owner._in_type(stored, dtype)

    def add_input(self, name: str, dtype: int) -> None:
        self._store(name, StoredTensor(name, dtype, self))

    def add_initializer(self, tensor: TensorProto) -> None:
        name, dtype, weights = tensor.name, int(tensor.data_type), self.model.weights
        tensor.name = self._own_name(name, dtype)
        if self.parent is None and name in weights:
            weights[tensor.name] = weights.pop(name)
        self._constants[tensor.name] = lambda: self.model.array(tensor)
        self._store(name, StoredTensor(tensor.name, dtype, self, True))

    def add_constant(self, node: NodeProto) -> None:
        name, value = node.output[0], constant_value(node)
        dtype = self.original_type(name)
        if value is None:  # strings
            self.add(node, [dtype])
            return
        node.output[0] = self._own_name(name, dtype)
        self._constants[node.output[0]] = lambda: value
        self.nodes.append(node)
        self._store(name, StoredTensor(node.output[0], dtype, self, True))

    def add(self, node: NodeProto, types: list[int]) -> None:
        """Adds a node with rewritten inputs, and the types of its outputs (0: as given)."""
        self.nodes.append(node)
        for index, (name, dtype) in enumerate(zip(list(node.output), types, strict=True)):
            if name and self.is_float(name):
                dtype = dtype or self.original_type(name)
                node.output[index] = self._own_name(name, dtype)
                self._store(name, StoredTensor(node.output[index], dtype, self))

    def add_alias(self, name: str, source: str) -> None:
        """Makes `name` an alias of `source`, as after a Cast that is removed."""
        self._store(name, self.find(source))

    def add_narrowed(self, name: str, source: str, dtype: int) -> None:
        """Stores `source`, rounded to `dtype` on purpose, as `name`."""
        stored = self.find(source)
        if stored.dtype != dtype:
            stored = StoredTensor(stored.owner._cast_of(stored, dtype), dtype, stored.owner)
        self._store(name, stored)

    def add_rounded(self, source: str, name: str, dtype: int) -> None:
        """Rounds the FP32 tensor `source` to `dtype` and back, and stores it as `name`."""
        self._note_type(source, TensorProto.FLOAT, name)
        low = self._cast(source, self._fresh(name, dtype), dtype)
        wide = self._cast(low, self._own_name(name, TensorProto.FLOAT), TensorProto.FLOAT)
        self._store(name, StoredTensor(wide, TensorProto.FLOAT, self))

    def finish_outputs(self) -> None:
        """Adds Casts for outputs that are tensors of an enclosing graph: ONNX Runtime refuses those."""
        for value in self.graph.output:
            if value.name not in self.wanted:
                continue
            dtype = self.wanted[value.name]
            value.type.tensor_type.elem_type = dtype
            if not self.owns(value.name):
                source = self.find(value.name).name
                value.name = self._cast(source, self._fresh(value.name, dtype), dtype)

    def write(self) -> dict[str, TensorFacts]:
        """Writes nodes, initializers and value_info into the graph; returns the facts of its tensors."""
        outputs = [v.name for v in self.graph.output]
        # new Casts that only removed Casts would have read
        self.nodes, read = without_unread(self.nodes, outputs, lambda node: id(node) in self._own)
        self._take_over_names(read)
        nodes = [n for n in self.nodes if n.op_type != "Constant" or n.output[0] in read]
        replace_items(self.graph.node, nodes)
        self._write_initializers(read)
        self._write_value_info()
        # these refer to `self`: the weights would stay in memory until cycles are collected
        self._stored.clear()
        self._constants.clear()
        constants = {t.name: TensorFacts(t.data_type, tuple(t.dims)) for t in self.graph.initializer}
        return {**self.facts, **self._types, **constants}

    def _fresh(self, name: str, dtype: int) -> str:
        return fresh_name(f"{name}/{SHORT_NAMES[dtype]}", self.names)

    def _own_name(self, name: str, dtype: int) -> str:
        """`name`, or a fresh one if it is a graph output of another requested type, which a Cast writes."""
        return name if self.wanted.get(name, dtype) == dtype else self._fresh(name, dtype)

    def _store(self, name: str, stored: StoredTensor) -> None:
        self._stored[name] = stored
        if stored.owner is self:
            self._note_type(stored.name, stored.dtype, name)
        if name in self.wanted and stored.name != name:
            dtype = self.wanted[name]
            # a second run would remove a Cast of a Cast to the same type
            source = self._sources.get(stored.name, stored.name) if stored.dtype == dtype else stored.name
            self._cast(source, name, dtype)
            if stored.owner is self and stored.dtype != dtype:
                self._casts.setdefault((stored.name, dtype), name)

    def _note_type(self, tensor: str, dtype: int, like: str) -> None:
        """Notes the type of a new tensor with the shape of `like`, a given or a new one."""
        self._types.setdefault(tensor, TensorFacts(dtype, self._shape(like)))

    def _shape(self, name: str) -> Shape | None:
        facts = self._types.get(name) or self.facts.get(name)
        if facts is None:
            return self.parent._shape(name) if self.parent is not None else None
        return facts.shape

    def _in_type(self, stored: StoredTensor, dtype: int) -> str:
        weight = self.model.weights.get(stored.name) if self.parent is None else None
        # a large weight is widened by a Cast, in each run
        large = weight is not None and weight.nbytes >= self.request.cast_bytes and dtype == TensorProto.FLOAT
        return (self._converted_of if stored.constant and not large else self._cast_of)(stored, dtype)

    def _cast_of(self, stored: StoredTensor, dtype: int) -> str:
        key = (stored.name, dtype)
        if key not in self._casts:
            self._casts[key] = self._cast(stored.name, self._fresh(stored.name, dtype), dtype)
            self._sources[self._casts[key]] = stored.name
        return self._casts[key]

    def _converted_of(self, stored: StoredTensor, dtype: int) -> str:
        key = (stored.name, dtype)
        if key not in self._converted:
            array = self._constants[stored.name]()
            nearest = partial(convert, array, dtype, stored.name, overflows=self.request.overflows)
            main = self.parent is None
            refine = self.request.refined.get(stored.name) if main and dtype != TensorProto.FLOAT else None
            value = refine(array, nearest) if refine else nearest()
            release(array)
            name = self._fresh(stored.name, dtype)
            tensor = self.model.detached_tensor(name, value, main=main)
            self._converted[key] = tensor
        return self._converted[key].name

    def _cast(self, source: str, out: str, dtype: int) -> str:
        """Adds a Cast, and returns the name of its output."""
        name = fresh_name(f"{out}/Cast", self.names)
        node = NodeProto(op_type="Cast", input=[source], output=[out], name=name)
        node.attribute.add(name="to", type=AttributeProto.INT, i=dtype)
        if self.request.tag:
            node.metadata_props.add(key=TAG, value=self.request.tag)
        self._note_type(out, dtype, source)
        self._own.add(id(node))
        self.nodes.append(node)
        return out

    def _take_over_names(self, read: set[str]) -> None:
        """Gives converted constants the names of originals that nothing reads any more."""
        renamed: dict[str, str] = {}
        taken: set[str] = set()
        weights = self.model.weights
        for (base, _), tensor in self._converted.items():
            if base in read or base in taken:
                continue
            taken.add(base)
            renamed[tensor.name] = base
            if self.parent is None:
                weights.pop(base, None)
                if tensor.name in weights:
                    weights[base] = weights.pop(tensor.name)
            tensor.name = base
        for node in self.nodes if renamed else ():
            rename_reads(node, renamed)

    def _write_initializers(self, read: set[str]) -> None:
        new = {tensor.name for tensor in self._converted.values()}
        listed = {v.name for v in self.graph.input}
        tensors = []
        for tensor in self.graph.initializer:
            if tensor.name in read or tensor.name not in self._constants or tensor.name in listed - new:
                tensors.append(tensor)
            elif self.parent is None and tensor.name not in new:
                self.model.weights.pop(tensor.name, None)
        replace_items(self.graph.initializer, [*tensors, *self._converted.values()])

    def _write_value_info(self) -> None:
        """Writes the stored types, and drops tensors that are gone."""
        types = {s.name: s.dtype for name, s in self._stored.items() if name == s.name}
        types |= {t.name: t.data_type for t in self.graph.initializer}
        for value in self.graph.input:  # IR 3 lists initializers as inputs
            if self.is_float(value.name):
                value.type.tensor_type.elem_type = types[value.name]
        infos = []
        for value in self.graph.value_info:
            if self.is_float(value.name):
                if value.name not in types:
                    continue
                value.type.tensor_type.elem_type = types[value.name]
            infos.append(value)
        replace_items(self.graph.value_info, infos)
