"""A graph with an index: producer, consumers, type, shape and value of each tensor."""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

import onnx
from onnx import NodeProto, TensorProto

from rewriter.ir.graph.nodes import attribute, constant_value
from rewriter.ir.model import Array, Model
from rewriter.ir.model.graphs import holders, reads
from rewriter.ir.model.tensors import Shape, TensorFacts


class GraphView:
    """One graph of a model, in graph `parent` and node `owner`; it knows tensors of enclosing graphs, too."""

    def __init__(
        self,
        model: Model,
        graph: onnx.GraphProto,
        facts: dict[str, TensorFacts],
        *,
        parent: GraphView | None = None,
        owner: NodeProto | None = None,
    ) -> None:
        self.model = model
        self.owner = owner
        self.graph = graph
        self.parent = parent
        self._facts = facts
        self._original = list(graph.node)  # held, so that no other object gets the id of a node
        self._nodes: dict[int, NodeProto] = {id(n): n for n in self._original}
        self._initializers = {t.name: t for t in graph.initializer}
        self._new_initializers: dict[str, TensorProto] = {}
        self._outputs = {v.name for v in graph.output}
        self._inputs = {v.name for v in graph.input} - self._initializers.keys()
        self._producer: dict[str, NodeProto] = {}
        self._uses = defaultdict[str, dict[int, NodeProto]](dict)
        self._constants: dict[str, Array | None] = {}
        self._holders = {id(n): n for n in holders(graph)}
        for node in self._original:
            self._index(node)

    @property
    def nodes(self) -> list[NodeProto]:
        """The original nodes that are left, in topological order; new nodes are not among them."""
        return [n for n in self._original if id(n) in self._nodes]

    @cached_property
    def operators(self) -> frozenset[str]:
        """The operators of the original nodes: a pass need not look for others."""
        return frozenset(node.op_type for node in self._original)

    @property
    def holders(self) -> list[NodeProto]:
        """The nodes of this graph that hold graphs."""
        return list(self._holders.values())

    @property
    def is_main(self) -> bool:
        return self.parent is None

    def producer(self, tensor: str) -> NodeProto | None:
        """The node of this graph that writes `tensor`; None for inputs, initializers and outer tensors."""
        return self._producer.get(tensor)

    def consumers(self, tensor: str) -> list[NodeProto]:
        """The nodes of this graph that read `tensor`, themselves or in their subgraphs."""
        return list(self._uses.get(tensor, {}).values())

    def is_output(self, tensor: str) -> bool:
        return tensor in self._outputs

    def is_read(self, tensor: str) -> bool:
        """True if a node reads `tensor`, or it is an output."""
        return tensor in self._outputs or bool(self._uses.get(tensor))

    def is_initializer(self, tensor: str) -> bool:
        return tensor in self._initializers or tensor in self._new_initializers

    def owns(self, tensor: str) -> bool:
        """True if a tensor is of this graph, and not of an enclosing one."""
        return tensor in self._producer or tensor in self._inputs or self.is_initializer(tensor)

    def only_consumer(self, tensor: str) -> NodeProto | None:
        """The consumer of `tensor`, if there is exactly one and the tensor is no graph output."""
        uses = self._uses.get(tensor, {})
        return next(iter(uses.values())) if len(uses) == 1 and tensor not in self._outputs else None

    def facts(self, tensor: str) -> TensorFacts | None:
        """Type and shape of a tensor of this graph or an enclosing one; None if they are not known."""
        facts = self._facts.get(tensor)
        return facts if facts or self.parent is None else self.parent.facts(tensor)

    def dtype(self, tensor: str) -> int | None:
        """TensorProto.DataType of a tensor; None if it is not known."""
        facts = self._facts.get(tensor) or self.facts(tensor)
        return facts.dtype if facts else None

    def shape(self, tensor: str) -> Shape | None:
        """Shape of a tensor (int, name or None for each axis); None if the rank is not known."""
        facts = self.facts(tensor)
        return facts.shape if facts else None

    def sizes(self, tensor: str) -> tuple[int, ...] | None:
        """Shape of a tensor; None if a size is not known."""
        facts = self.facts(tensor)
        return facts.sizes if facts else None

    def size(self, tensor: str, axis: int) -> int | str | None:
        """Size of a tensor along an axis; None if there is none, or it is not known."""
        shape = self.shape(tensor)
        return shape[axis] if shape and -len(shape) <= axis < len(shape) else None

    def rank(self, tensor: str) -> int | None:
        shape = self.shape(tensor)
        return None if shape is None else len(shape)

    def constant(self, tensor: str) -> Array | None:
        """Value of an initializer, a Constant or its Identity, never to be written to; None if computed."""
        if tensor not in self._constants:
            self._constants[tensor] = self._read_constant(tensor)
        return self._constants[tensor]

    def value(self, tensor: str) -> Array:
        """Value of a tensor that is known to be constant."""
        value = self.constant(tensor)
        assert value is not None, tensor
        return value

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
        schema = onnx.defs.get_schema(node.op_type) if onnx.defs.has(node.op_type) else None
        by_attribute = schema is not None and "axis" in schema.attributes
        if len(node.input) > 1 and node.input[1] and not by_attribute:
            constant = self.constant(node.input[1])
            return None if constant is None else tuple(int(a) for a in constant.reshape(-1))
        return ()

    def _index(self, node: NodeProto) -> None:
        key = id(node)
        for name in node.output:
            if name:
                self._producer[name] = node
        for name in reads(node) if key in self._holders else node.input:  # `node.input` is faster
            if name:
                self._uses[name][key] = node

    def _is_dead(self, node: NodeProto) -> bool:
        return not any(map(self.is_read, node.output))

    def _read_constant(self, tensor: str) -> Array | None:
        stored = self._new_initializers.get(tensor) or self._initializers.get(tensor)
        if stored is not None:
            return self.model.array(stored)
        node = self._producer.get(tensor)
        if node is None:
            return self.parent.constant(tensor) if self.parent and tensor not in self._inputs else None
        if node.op_type == "Constant":
            return constant_value(node)
        return self.constant(node.input[0]) if node.op_type == "Identity" else None
