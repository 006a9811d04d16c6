"""The few safe edits on a graph, and the questions that a pass asks of it.

A `GraphEditor` keeps producers and consumers indexed while it edits, so every question and every
edit costs the size of what it touches. Nothing reaches the model before `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from rewriter.facts import Facts, Shape, TensorFacts
from rewriter.model import Array, Model, holds_graphs, subgraphs

TAG = "rewriter.pass"
"""Key of the node metadata that names the pass which made the node; Netron shows it."""


class GraphEditor:
    """One graph of a model: `parent` is the graph that encloses it, `owner` the node that holds it.

    Tensors of enclosing graphs can be asked about by name as if they were local; edits touch this
    graph alone. Names of new nodes and tensors are unique in the whole model.
    """

    def __init__(
        self,
        model: Model,
        graph: onnx.GraphProto,
        facts: dict[str, TensorFacts],
        *,
        parent: GraphEditor | None = None,
        owner: NodeProto | None = None,
        names: set[str] | None = None,
        tag: str = "",
    ) -> None:
        self.model = model
        self.owner = owner
        self.graph = graph
        self.parent = parent
        self.tag = tag
        self.edited = False
        self._facts = facts
        self._names = names if names is not None else all_names(model.proto.graph)
        self._original = list(graph.node)  # held, so that the identity of a node stays its own
        self._nodes: dict[int, NodeProto] = {id(n): n for n in self._original}
        self._placed_before: dict[int, list[NodeProto]] = {}
        self._tail: list[NodeProto] = []
        self._initializers = {t.name: t for t in graph.initializer}
        self._new_initializers: dict[str, TensorProto] = {}
        self._outputs = {v.name for v in graph.output}
        self._inputs = {v.name for v in graph.input} - self._initializers.keys()
        self._producer: dict[str, NodeProto] = {}
        self._uses: dict[str, dict[int, NodeProto]] = {}
        self._constants: dict[str, Array | None] = {}
        for node in self._nodes.values():
            self._index(node)

    # -- questions ---------------------------------------------------------------------------

    @property
    def nodes(self) -> list[NodeProto]:
        """The nodes in topological order, as they stood when the editor was made."""
        return [n for n in self._original if id(n) in self._nodes]

    @property
    def is_main(self) -> bool:
        """Whether this is the model's main graph."""
        return self.parent is None

    def producer(self, tensor: str) -> NodeProto | None:
        """The node of this graph that writes `tensor`; None for inputs, initializers and outer tensors."""
        return self._producer.get(tensor)

    def consumers(self, tensor: str) -> list[NodeProto]:
        """The nodes of this graph that read `tensor`, also those whose subgraphs do."""
        return list(self._uses.get(tensor, {}).values())

    def is_input(self, tensor: str) -> bool:
        return tensor in self._inputs

    def is_output(self, tensor: str) -> bool:
        return tensor in self._outputs

    def is_initializer(self, tensor: str) -> bool:
        return tensor in self._initializers or tensor in self._new_initializers

    def only_consumer(self, tensor: str) -> NodeProto | None:
        """The node that reads `tensor`, if it is one alone and the tensor is no graph output."""
        uses = self._uses.get(tensor, {})
        return next(iter(uses.values())) if len(uses) == 1 and tensor not in self._outputs else None

    def dtype(self, tensor: str) -> int | None:
        """TensorProto.DataType of a tensor; None if it is not known."""
        facts = self._lookup(tensor)
        return facts.dtype if facts else None

    def shape(self, tensor: str) -> Shape | None:
        """Shape of a tensor (int, name or None for each axis); None if the rank is not known."""
        facts = self._lookup(tensor)
        return facts.shape if facts else None

    def rank(self, tensor: str) -> int | None:
        shape = self.shape(tensor)
        return None if shape is None else len(shape)

    def constant(self, tensor: str) -> Array | None:
        """Value of an initializer, a Constant node, or an Identity of one; None if it is computed.

        The array may be the model's own: never write to it.
        """
        if tensor not in self._constants:
            self._constants[tensor] = self._read_constant(tensor)
        return self._constants[tensor]

    def scalar(self, tensor: str) -> float | None:
        """Value of a constant with exactly one element, of any rank; None for everything else."""
        value = self.constant(tensor) if tensor else None
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def axes(self, node: NodeProto) -> tuple[int, ...] | None:
        """Axes of a Reduce, Squeeze, Unsqueeze, LayerNormalization... node as written there.

        From the attribute `axes` or `axis`, or the second input if it is constant. () if the node
        names none; None if they are computed.
        """
        for name in ("axes", "axis"):
            value = attribute(node, name)
            if value is not None:
                return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)
        if len(node.input) > 1 and node.input[1] and "axis" not in _attributes_of(node):
            constant = self.constant(node.input[1])
            return None if constant is None else tuple(int(a) for a in constant.reshape(-1))
        return ()

    # -- edits -------------------------------------------------------------------------------

    def fresh(self, base: str) -> str:
        """A name that nothing in the model has, made of `base`."""
        return fresh_name(base, self._names)

    def add_constant(self, base: str, value: Array) -> str:
        """Add an initializer to this graph; returns its name, made of `base`."""
        name = self.fresh(base)
        tensor = (
            self.model.detached_tensor(name, value) if self.is_main else numpy_helper.from_array(value, name)
        )
        self._new_initializers[name] = tensor
        self._facts[name] = TensorFacts(tensor.data_type, tuple(tensor.dims))
        self.edited = True
        return name

    def make(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        name: str = "",
        domain: str = "",
        **attributes: Any,
    ) -> NodeProto:
        """A tagged node with a unique name; place it with `substitute` or `insert`."""
        node = helper.make_node(
            op_type,
            list(inputs),
            list(outputs),
            name=self.fresh(name or f"{outputs[0]}/{op_type}"),
            domain=domain or None,
            **attributes,
        )
        if self.tag:
            node.metadata_props.add(key=TAG, value=self.tag)
        return node

    def tensor(self, base: str, like: str | None = None, *, dtype: int | None = None) -> str:
        """A fresh tensor name; its facts are those of `like`, with another `dtype` if given."""
        name = self.fresh(base)
        facts = self._lookup(like) if like else None
        if facts or dtype:
            self._facts[name] = TensorFacts(
                dtype or (facts.dtype if facts else 0), facts.shape if facts else None
            )
        return name

    def insert(self, *nodes: NodeProto, before: NodeProto | None) -> None:
        """Add nodes just before another one, or at the end."""
        for node in nodes:
            self._nodes[id(node)] = node
            self._index(node)
        where = self._tail if before is None else self._placed_before.setdefault(id(before), [])
        where.extend(nodes)
        self.edited = True

    def substitute(self, tensor: str, *nodes: NodeProto) -> None:
        """Let `nodes` compute `tensor` in place of the node that does; one of them must write it.

        What only the replaced node needed is removed with it. Tensors that others read, or that
        are graph outputs, stay.
        """
        old = self._producer[tensor]
        self.insert(*nodes, before=old)
        self.remove(old, keep=(tensor,))

    def remove(self, node: NodeProto, keep: Sequence[str] = ()) -> None:
        """Remove a node, and what feeds it if nothing else reads that."""
        self.edited = True
        stack = [node]
        while stack:
            dead = stack.pop()
            if self._nodes.pop(id(dead), None) is None:
                continue
            for name in dead.output:
                if self._producer.get(name) is dead:
                    del self._producer[name]
            for name in reads(dead):
                uses = self._uses.get(name, {})
                uses.pop(id(dead), None)
                source = self._producer.get(name)
                if source is not None and name not in keep and self._is_dead(source):
                    stack.append(source)

    def redirect(self, old: str, new: str, *, only: Sequence[NodeProto] | None = None) -> None:
        """Let the consumers of `old` (or the nodes `only`) read `new`, in their subgraphs, too.

        A graph output called `old` keeps its producer.
        """
        for node in self.consumers(old) if only is None else only:
            _renamereads(node, old, new)
            self._uses.get(old, {}).pop(id(node), None)
            self._uses.setdefault(new, {})[id(node)] = node
        self.edited = True

    def set_input(self, node: NodeProto, index: int, tensor: str) -> None:
        """Let one input of a node read another tensor."""
        old = node.input[index]
        node.input[index] = tensor
        if old not in reads(node):
            self._uses.get(old, {}).pop(id(node), None)
        self._uses.setdefault(tensor, {})[id(node)] = node
        self.edited = True

    def rename(self, old: str, new: str) -> None:
        """Let the node that writes `old` write `new` instead, and the consumers of `old` read that.

        `new` may be the name of a tensor whose producer is removed next: so a graph output keeps
        its name when the node that wrote it goes.
        """
        node = self._producer.pop(old)
        node.output[list(node.output).index(old)] = new
        self._producer[new] = node
        if old in self._facts:
            self._facts.setdefault(new, self._facts[old])
        self.redirect(old, new)

    def sweep(self, tensor: str) -> None:
        """Remove the node that writes `tensor`, if nothing reads any of its outputs any more."""
        node = self._producer.get(tensor)
        if node is not None and self._is_dead(node):
            self.remove(node)

    def refresh(self) -> None:
        """Index again what subgraphs read, after they were edited."""
        for node in self.nodes:
            if holds_graphs(node):
                self._index(node)

    def commit(self) -> None:
        """Write the edits into the graph: nodes in topological order, unread new constants dropped."""
        if not self.edited:
            return
        nodes = _topological(self._flatten(), self._producer)
        copies = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del self.graph.node[:]
        self.graph.node.extend(copies)
        self._commit_initializers()

    # -- inside ------------------------------------------------------------------------------

    def _lookup(self, tensor: str) -> TensorFacts | None:
        found = self._facts.get(tensor)
        return found if found or self.parent is None else self.parent._lookup(tensor)

    def _index(self, node: NodeProto) -> None:
        for name in node.output:
            if name:
                self._producer[name] = node
        for name in reads(node):
            self._uses.setdefault(name, {})[id(node)] = node

    def _is_dead(self, node: NodeProto) -> bool:
        return not any(self._uses.get(n) or n in self._outputs for n in node.output if n)

    def _read_constant(self, tensor: str) -> Array | None:
        stored = self._new_initializers.get(tensor) or self._initializers.get(tensor)
        if stored is not None:
            return self.model.array(stored)
        node = self._producer.get(tensor)
        if node is None:
            outside = self.parent is not None and tensor not in self._inputs
            return self.parent.constant(tensor) if outside and self.parent else None
        if node.op_type == "Constant":
            return constant_value(node)
        return self.constant(node.input[0]) if node.op_type == "Identity" else None

    def _flatten(self) -> Iterator[NodeProto]:
        def expand(node: NodeProto) -> Iterator[NodeProto]:
            for new in self._placed_before.get(id(node), ()):
                yield from expand(new)
            if id(node) in self._nodes:
                yield node

        for node in (*self._original, *self._tail):
            yield from expand(node)

    def _commit_initializers(self) -> None:
        read = {name for node in self.graph.node for name in reads(node)} | self._outputs
        kept = [t for name, t in self._initializers.items() if name in read]
        new = [t for name, t in self._new_initializers.items() if name in read]
        if len(kept) != len(self._initializers):
            kept = [TensorProto.FromString(t.SerializeToString()) for t in kept]
            del self.graph.initializer[:]
            self.graph.initializer.extend(kept)
            listed = [v for v in self.graph.input if v.name not in self._initializers or v.name in read]
            if len(listed) != len(self.graph.input):
                listed = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in listed]
                del self.graph.input[:]
                self.graph.input.extend(listed)
        self.graph.initializer.extend(new)
        if self.is_main:
            for name in self._initializers.keys() | self._new_initializers.keys():
                if name not in read:
                    self.model.weights.pop(name, None)


def open_graphs(model: Model, facts: Facts, tag: str = "") -> list[GraphEditor]:
    """Editors for the main graph and every subgraph, outer ones first.

    Edit and commit them in reverse order, or one at a time: an outer graph's commit copies its
    nodes, and with them the subgraphs as they are at that moment.
    """
    scopes = iter(facts.scopes)
    names = all_names(model.proto.graph)

    def visit(
        graph: onnx.GraphProto, parent: GraphEditor | None, owner: NodeProto | None
    ) -> Iterator[GraphEditor]:
        editor = GraphEditor(model, graph, next(scopes), parent=parent, owner=owner, names=names, tag=tag)
        yield editor
        for node in graph.node:
            for child in subgraphs(node):
                yield from visit(child, editor, node)

    return list(visit(model.proto.graph, None, None))


def fresh_name(base: str, taken: set[str]) -> str:
    """A name that is not in `taken`, made of `base`; it is added there."""
    name, count = base, 0
    while name in taken:
        count += 1
        name = f"{base}_{count}"
    taken.add(name)
    return name


def without_unread(
    nodes: Sequence[NodeProto], outputs: Iterable[str], may_go: Callable[[NodeProto], bool]
) -> tuple[list[NodeProto], set[str]]:
    """The nodes, in topological order, less those that `may_go` and whose outputs nothing reads.

    Returns:
        The nodes that stay, and the names that they and `outputs` read.
    """
    read = set(outputs)
    kept: list[NodeProto] = []
    for node in reversed(nodes):
        if may_go(node) and read.isdisjoint(node.output):
            continue
        kept.append(node)
        read.update(reads(node))
    return kept[::-1], read


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """Value of a node's attribute as a Python object (strings as str), or `default`."""
    for item in node.attribute:
        if item.name == name:
            value = helper.get_attribute_value(item)
            return value.decode() if isinstance(value, bytes) else value
    return default


def constant_value(node: NodeProto) -> Array | None:
    """Value of a Constant node; None for strings and sparse tensors."""
    for item in node.attribute:
        if item.name == "value":
            return numpy_helper.to_array(item.t)
        if item.name in ("value_float", "value_floats"):
            return np.asarray(helper.get_attribute_value(item), np.float32)
        if item.name in ("value_int", "value_ints"):
            return np.asarray(helper.get_attribute_value(item), np.int64)
    return None


def label(node: NodeProto) -> str:
    """How messages call a node: its name, or its operator and first output."""
    return node.name or f"{node.op_type}({next((o for o in node.output if o), '?')})"


def _attributes_of(node: NodeProto) -> set[str]:
    schema = onnx.defs.get_schema(node.op_type) if onnx.defs.has(node.op_type) else None
    return set(schema.attributes) if schema else set()


def captured(node: NodeProto) -> set[str]:
    """Names of outer tensors that a node's subgraphs read."""
    return set().union(*(_free_names(g) for g in subgraphs(node)))


def _free_names(graph: onnx.GraphProto) -> set[str]:
    bound = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    free: set[str] = set()
    for node in graph.node:
        free |= reads(node).keys() - bound
        bound.update(node.output)
    return free | ({v.name for v in graph.output} - bound)


def reads(node: NodeProto) -> dict[str, None]:
    """Tensors that a node reads, itself or in its subgraphs, each once, in order."""
    reads = dict.fromkeys(name for name in node.input if name)
    if holds_graphs(node):
        reads.update(dict.fromkeys(sorted(captured(node))))
    return reads


def _renamereads(node: NodeProto, old: str, new: str) -> None:
    for index, name in enumerate(node.input):
        if name == old:
            node.input[index] = new
    for graph in subgraphs(node):
        if old in {v.name for v in graph.input} | {t.name for t in graph.initializer}:
            continue
        for inner in graph.node:
            _renamereads(inner, old, new)
        _rename_output(graph, old, new)


def _rename_output(graph: onnx.GraphProto, old: str, new: str) -> None:
    """A subgraph may hand an outer tensor straight out."""
    written = {name for node in graph.node for name in node.output}
    for value in graph.output:
        if value.name == old and old not in written:
            value.name = new


def all_names(graph: onnx.GraphProto) -> set[str]:
    values = (*graph.input, *graph.output, *graph.value_info)  # types of tensors that are gone may linger
    names = {v.name for v in values} | {t.name for t in graph.initializer}
    for node in graph.node:
        names.add(node.name)
        names.update(node.output)
        for child in subgraphs(node):
            names |= all_names(child)
    return names


def _topological(nodes: Iterator[NodeProto], producer: dict[str, NodeProto]) -> list[NodeProto]:
    """The nodes in an order in which producers come first; unchanged where it already is one."""
    order: list[NodeProto] = []
    done: set[int] = set()
    for root in nodes:
        stack = [root]
        while stack:
            node = stack[-1]
            if id(node) in done:
                stack.pop()
                continue
            waiting = [
                source
                for name in reads(node)
                if (source := producer.get(name)) is not None and id(source) not in done
            ]
            if waiting:
                stack.extend(reversed(waiting))
            else:
                stack.pop()
                done.add(id(node))
                order.append(node)
    return order
