"""Safe edits of a graph."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, Self

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import NodeProto, TensorProto, helper

from rewriter.ir.graph.nodes import all_names
from rewriter.ir.graph.view import GraphView
from rewriter.ir.model import Model, holds_graphs
from rewriter.ir.model.graphs import fresh_name, reads, rename_reads, replace_items, subgraphs, topological
from rewriter.ir.model.tensors import Shape, TensorFacts

TAG = "rewriter.pass"
"""Key of the node metadata that names the pass which made the node; Netron shows it."""


def made_by(node: NodeProto, passes: Container[str]) -> bool:
    return any(entry.key == TAG and entry.value in passes for entry in node.metadata_props)


class GraphEditor(GraphView):
    """A graph whose edits reach the model at the end of a `with` block; `tag` names the pass in new nodes.

    Edits only affect this graph. Names of new nodes and tensors are unique in the whole model.
    If a block raises, the graph's list of nodes is unchanged.
    """

    def __init__(
        self,
        model: Model,
        graph: onnx.GraphProto,
        facts: dict[str, TensorFacts],
        names: Callable[[], set[str]],
        *,
        parent: GraphEditor | None = None,
        owner: NodeProto | None = None,
        tag: str = "",
    ) -> None:
        super().__init__(model, graph, facts, parent=parent, owner=owner)
        self.tag = tag
        self.edited = False
        self._names = names
        self._named = False
        self._placed_before: dict[int, list[NodeProto]] = {}
        self._tail: list[NodeProto] = []

    def __enter__(self) -> Self:
        """Index again what subgraphs read: they may have been edited since the editor was made."""
        for key, node in tuple(self._holders.items()):
            if key in self._nodes:
                self._index(node)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.commit()

    @property
    def untouched(self) -> bool:
        """True if nothing was edited, and no name taken: another pass would find it as this one did."""
        return not (self.edited or self._named)

    def fresh(self, base: str) -> str:
        """A name made of `base` that is unique in the model."""
        self._named = True
        return fresh_name(base, self._names())

    def add_constant(self, base: str, value: ArrayLike, like: str = "") -> str:
        """Add an initializer, in the float type of the tensor `like`; returns its name, made of `base`."""
        name, dtype = self.fresh(base), self.dtype(like) or TensorProto.FLOAT
        value = np.asarray(value, helper.tensor_dtype_to_np_dtype(dtype) if like else None)
        tensor = self.model.detached_tensor(name, value, main=self.is_main)
        self._new_initializers[name] = tensor
        self._facts[name] = TensorFacts(tensor.data_type, tuple(tensor.dims))
        self.edited = True
        return name

    def add_ints(self, base: str, *values: int) -> str:
        """Add an initializer of int64, such as the target of a Reshape; returns its name."""
        return self.add_constant(base, np.asarray(values, np.int64))

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
        """A tagged node with a unique name; place it with `replace_producer` or `insert`."""
        fields = {"name": self.fresh(name or f"{outputs[0]}/{op_type}"), "domain": domain or None}
        node = helper.make_node(op_type, list(inputs), list(outputs), **fields, **attributes)
        if self.tag:
            node.metadata_props.add(key=TAG, value=self.tag)
        return node

    def clone_node(
        self,
        node: NodeProto,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        name: str = "",
        **changes: Any,
    ) -> NodeProto:
        """A node like another one, with other inputs and outputs, and with `changes` of its attributes."""
        attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute} | changes
        return self.make(node.op_type, inputs, outputs, name=name, **attributes)

    def tensor(
        self, base: str, like: str | None = None, *, dtype: int | None = None, shape: Shape | None = None
    ) -> str:
        """A fresh tensor name with the facts of `like`, except for `dtype` or `shape` if given."""
        name = self.fresh(base)
        facts = self.facts(like) if like else None
        if facts or dtype:
            base_facts = facts or TensorFacts(0, None)
            self._facts[name] = TensorFacts(dtype or base_facts.dtype, shape or base_facts.shape)
        return name

    def insert(self, *nodes: NodeProto, before: NodeProto | None) -> None:
        """Add nodes just before another one, or at the end."""
        for node in nodes:
            self._nodes[id(node)] = node
            if holds_graphs(node):
                self._holders[id(node)] = node
            self._index(node)
        where = self._tail if before is None else self._placed_before.setdefault(id(before), [])
        where.extend(nodes)
        self.edited = True

    def replace_producer(self, tensor: str, *nodes: NodeProto) -> None:
        """Replaces the node that computes `tensor` by `nodes`, and removes what only that node needed."""
        old = self._producer[tensor]
        self.insert(*nodes, before=old)
        self.remove(old, keep=(tensor,))

    def remove(self, node: NodeProto, keep: Sequence[str] = ()) -> None:
        """Removes a node, and its producers that nothing else reads."""
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

    def replace_all_uses_with(self, old: str, new: str) -> None:
        """Lets the consumers of `old` and their subgraphs read `new`; an output keeps its producer."""
        for node in self.consumers(old):
            rename_reads(node, {old: new})
            self._uses.get(old, {}).pop(id(node), None)
            self._uses[new][id(node)] = node
        self.edited = True

    def set_input(self, node: NodeProto, index: int, tensor: str) -> None:
        old = node.input[index]
        node.input[index] = tensor
        if old not in reads(node):
            self._uses.get(old, {}).pop(id(node), None)
        self._uses[tensor][id(node)] = node
        self.edited = True

    def rename(self, old: str, new: str) -> None:
        """Lets the producer of `old` write `new` instead, and its consumers read that.

        `new` may be a tensor whose producer is removed next: so a graph output keeps its name.
        """
        self._names()  # names that edits remove stay taken
        node = self._producer.pop(old)
        node.output[list(node.output).index(old)] = new
        self._producer[new] = node
        if old in self._facts:
            self._facts.setdefault(new, self._facts[old])
        self.replace_all_uses_with(old, new)

    def erase_if_dead(self, tensor: str) -> None:
        """Removes the producer of `tensor`, if nothing reads any of its outputs."""
        node = self._producer.get(tensor)
        if node is not None and self._is_dead(node):
            self.remove(node)

    def commit(self) -> None:
        """Writes the edits into the graph, with nodes in topological order and without unread constants."""
        if not self.edited:
            return
        self._names()
        self.model.mark_edited()
        nodes = chain.from_iterable(map(self._expanded, (*self._original, *self._tail)))
        replace_items(self.graph.node, topological(nodes, self._producer))
        self._commit_initializers()

    def _expanded(self, node: NodeProto) -> Iterator[NodeProto]:
        """The node, after those that are placed before it."""
        for new in self._placed_before.get(id(node), ()):
            yield from self._expanded(new)
        if id(node) in self._nodes:
            yield node

    def _commit_initializers(self) -> None:
        read = {name for node in self.graph.node for name in reads(node)} | self._outputs
        old = [t for name, t in self._initializers.items() if name in read]
        new = [t for name, t in self._new_initializers.items() if name in read]
        if len(old) != len(self._initializers):
            replace_items(self.graph.initializer, old)
            listed = [v for v in self.graph.input if v.name not in self._initializers or v.name in read]
            if len(listed) != len(self.graph.input):
                replace_items(self.graph.input, listed)
        self.graph.initializer.extend(new)
        if self.is_main:
            for name in self._initializers.keys() | self._new_initializers.keys():
                if name not in read:
                    self.model.weights.pop(name, None)


def open_graphs(model: Model, tag: str = "") -> list[GraphEditor]:
    """Editors for the main graph and every subgraph, outer ones first.

    Edit them in reverse order, each in a `with` block: an outer graph's commit copies its nodes, and
    with them the subgraphs as they are at that moment.
    """
    names = cache(partial(all_names, model.proto.graph))  # most editors make none
    make = partial(GraphEditor, model, names=names, tag=tag)
    return list(_opened(make, iter(model.facts().scopes), model.proto.graph, None, None))


def _opened(
    make: Callable[..., GraphEditor],
    scopes: Iterator[dict[str, TensorFacts]],
    graph: onnx.GraphProto,
    parent: GraphEditor | None,
    owner: NodeProto | None,
) -> Iterator[GraphEditor]:
    """A module-level function: a recursive closure would keep the model until the next garbage collection."""
    editor = make(graph, dict(next(scopes)), parent=parent, owner=owner)
    yield editor
    for node in editor.holders:
        for child in subgraphs(node):
            yield from _opened(make, scopes, child, editor, node)
