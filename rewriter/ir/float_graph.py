"""One graph as a choice of types sees it, with walks along its float tensors.

Casts between float types are transparent, as in `retype`: they do not count as nodes, and their output is
taken for their input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphEditor, open_graphs
from rewriter.ir.graph.nodes import casts_floats
from rewriter.ir.model import Array, Model
from rewriter.ir.model.schemas import EXCHANGEABLE, TypeRule, TypeRules, type_rules
from rewriter.ir.patterns.norms import Norm, find_norms

Through = Callable[[NodeProto], bool]


@dataclass
class FloatGraph:
    """A graph, its `nodes` that compute in a precision, and walks along its float tensors."""

    graph: GraphEditor
    opsets: Mapping[str, int]
    low: int
    _casts: dict[str, str] = field(init=False, repr=False)  # the input of each float Cast by its output

    def __post_init__(self) -> None:
        casts = (n for n in self.graph.nodes if casts_floats(n, self.is_float))
        self._casts = {n.output[0]: n.input[0] for n in casts}

    @classmethod
    def main(cls, model: Model) -> FloatGraph:
        """The main graph of a model, for FP16."""
        return FloatGraph(open_graphs(model)[0], model.opsets, TensorProto.FLOAT16)

    @cached_property
    def nodes(self) -> list[NodeProto]:
        return [n for n in self.graph.nodes if self._computes(n)]

    @cached_property
    def _computing(self) -> set[int]:
        return {id(n) for n in self.nodes}

    @cached_property
    def norms(self) -> list[Norm]:
        """The decomposed normalisations of the graph: every rule that asks for them gets the same list."""
        return find_norms(self.graph)

    def is_float(self, tensor: str) -> bool:
        return bool(tensor) and self.graph.dtype(tensor) in EXCHANGEABLE

    def floats(self, node: NodeProto) -> list[str]:
        return [t for t in (*node.input, *node.output) if self.is_float(t)]

    def source(self, tensor: str) -> str:
        """The tensor at the start of the float Casts that lead to `tensor`."""
        while tensor in self._casts:
            tensor = self._casts[tensor]
        return tensor

    def constant(self, tensor: str) -> Array | None:
        """The value of a constant, seen through float Casts."""
        return self.graph.constant(self.source(tensor))

    def scalar(self, tensor: str) -> float | None:
        """The value of a constant with one element, seen through float Casts."""
        return self.graph.scalar(self.source(tensor))

    def is_constant(self, tensor: str) -> bool:
        return self.constant(tensor) is not None

    def is_output(self, tensor: str) -> bool:
        """True if `tensor` or a float Cast of it is an output of the graph."""
        return any(self.graph.is_output(name) for name in self.aliases(tensor))

    def aliases(self, tensor: str) -> list[str]:
        """`tensor` and the results of float Casts of it."""
        names = [tensor]
        for name in names if self._casts else ():
            results = (out for n in self.graph.consumers(name) for out in n.output)
            names.extend(out for out in results if out in self._casts)
        return names

    def in_fp32(self, node: NodeProto) -> bool:
        """True if all float inputs and outputs of a node are FP32."""
        return {self.graph.dtype(t) for t in self.floats(node)} == {TensorProto.FLOAT}

    def _computes(self, node: NodeProto) -> bool:
        """True if a precision has to be chosen for the node."""
        casts = self._casts and not self._casts.keys().isdisjoint(node.output)
        if node.op_type == "Constant" or casts or not any(map(self.is_float, (*node.input, *node.output))):
            return False
        rules = self.rules(node)
        if rules is None or TypeRule.ANY not in (*rules.inputs, *rules.outputs):
            return True
        border = zip((*node.input, *node.output), (*rules.inputs, *rules.outputs), strict=True)
        return any(port is not TypeRule.ANY and self.is_float(tensor) for tensor, port in border)

    def rules(self, node: NodeProto) -> TypeRules | None:
        return type_rules(node, self.opsets, self.low)

    def producer(self, tensor: str) -> NodeProto | None:
        """The node of this graph that computes `tensor`, seen through float Casts."""
        node = self.graph.producer(self.source(tensor))
        return node if id(node) in self._computing else None

    def readers(self, tensor: str) -> Iterator[tuple[str, NodeProto]]:
        """The nodes that compute with `tensor`, seen through float Casts, with the name that each reads."""
        for name in self.aliases(tensor):
            yield from ((name, n) for n in self.graph.consumers(name) if id(n) in self._computing)

    def exponent(self, node: NodeProto) -> float:
        """The exponent of a Sqrt, or of a Pow by a constant; 1 for other nodes."""
        power = self.scalar(node.input[1]) if node.op_type == "Pow" else None
        return 0.5 if node.op_type == "Sqrt" else 1.0 if power is None else power

    def squares(self, node: NodeProto) -> bool:
        """True if the node squares a tensor, or sums its squares."""
        if node.op_type == "Mul":
            return self.source(node.input[0]) == self.source(node.input[1])
        return node.op_type == "ReduceSumSquare" or self.exponent(node) == 2.0

    def upstream(self, tensor: str, through: Through, seen: set[str] | None = None) -> Iterator[NodeProto]:
        """The nodes that `tensor` is computed by, nearest first, as far as `through` accepts them.

        Walks that share `seen` visit no tensor twice.
        """
        seen = set() if seen is None else seen
        stack = [tensor]
        while stack:
            tensor = stack.pop()
            node = None if tensor in seen else self.producer(tensor)
            seen.add(tensor)
            if node is not None and through(node):
                yield node
                stack.extend(t for t in node.input if self.is_float(t))

    def downstream(self, tensor: str, through: Through) -> Iterator[tuple[str, NodeProto]]:
        """The readers of `tensor`, and the readers of each result of a node that `through` accepts."""
        stack, seen = [tensor], {tensor}
        while stack:
            for name, node in self.readers(stack.pop()):
                yield name, node
                if through(node):
                    new = [t for t in node.output if t not in seen and self.is_float(t)]
                    seen.update(new)
                    stack.extend(new)
