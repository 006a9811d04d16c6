"""One graph as the hazard rules see it: its measured ranges, and walks along its float tensors.

Casts between float types are transparent here, as they are for `retype`: they do not count as nodes,
and their output has the range of their input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from onnx import NodeProto, TensorProto

from rewriter.base.errors import Severity
from rewriter.hazards.kinds import Hazard
from rewriter.ir.graph import GraphEditor
from rewriter.ir.graph.nodes import casts_floats
from rewriter.ir.model import Array
from rewriter.ir.model.schemas import EXCHANGEABLE, TypeRule, TypeRules, type_rules
from rewriter.ir.patterns.norms import Norm, find_norms
from rewriter.ir.plan import HEADROOM, Epilogues, InputsOutputs, Precision, Range, io_type
from rewriter.ir.plan.node_patterns import NodePatterns
from rewriter.target import Target

LOW_TYPES: dict[Precision, int] = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}

LARGEST: dict[int, float] = {TensorProto.FLOAT16: 65504.0, TensorProto.BFLOAT16: 3.3895313892515355e38}
"""Largest finite number: IEEE 754 binary16, and the upper half of a binary32."""

Through = Callable[[NodeProto], bool]


@dataclass(frozen=True)
class PrecisionRequest:
    """The lower precision that the user asks for, with its conditions.

    Attributes:
        io: Types of graph inputs and outputs.
        keep_nodes: Patterns (fnmatch) of node or output names that stay in FP32; `keep_ops`: operators.
        lower: Nodes that stay in the lower precision, whatever a rule or `keep_nodes` says.
        epilogues: Where FP32 is used because it is free (`rewriter.hazards.planning.free_fp32`): nowhere,
            in what a product's own kernel computes of its result, or in all of it, which may cost latency.
        rules: The user's own, which come before ours.
        measured_norms: True if the nodes of a decomposed normalisation may compute in FP16 where their
            measured ranges allow it.
    """

    precision: Precision = "fp16"
    io: InputsOutputs = "keep"
    keep_nodes: tuple[str, ...] = ()
    keep_ops: tuple[str, ...] = ()
    lower: NodePatterns = field(default_factory=NodePatterns)
    plugin_types: tuple[str, ...] = ()
    epilogues: Epilogues = "none"
    rules: tuple[Callable[[GraphAnalysis], Iterable[Hazard]], ...] = ()
    target: Target = field(default_factory=Target)
    measured_norms: bool = False

    @property
    def low(self) -> int:
        """TensorProto.FLOAT16 or BFLOAT16."""
        return LOW_TYPES[self.precision]


@dataclass
class GraphAnalysis:
    """One graph with everything that the rules ask about it.

    Attributes:
        scope: Index of the graph in the order of `Facts.scopes`.
        ranges: Measured ranges by scope and tensor name.
        mixed: True if the model already computes in FP16 or BF16 somewhere.
        nodes: The nodes that compute in a precision; Constants and Shape, for example, do not.
    """

    graph: GraphEditor
    scope: int
    ranges: Mapping[tuple[int, str], Range]
    opsets: Mapping[str, int]
    request: PrecisionRequest
    mixed: bool = False
    parent: GraphAnalysis | None = None
    nodes: list[NodeProto] = field(init=False)
    _computing: set[int] = field(init=False, repr=False)
    _casts: dict[str, str] = field(init=False, repr=False)  # the input of each float Cast by its output

    def __post_init__(self) -> None:
        casts = (n for n in self.graph.nodes if casts_floats(n, self.is_float))
        self._casts = {n.output[0]: n.input[0] for n in casts}
        self.nodes = [n for n in self.graph.nodes if self._computes(n)]
        self._computing = {id(n) for n in self.nodes}

    @cached_property
    def norms(self) -> list[Norm]:
        """The decomposed normalisations of the graph: every rule that asks for them gets the same list."""
        return find_norms(self.graph)

    @property
    def is_fp16(self) -> bool:
        return self.request.low == TensorProto.FLOAT16

    @property
    def low_name(self) -> str:
        return self.request.precision.upper()

    @property
    def largest(self) -> float:
        """Largest finite number of the lower precision."""
        return LARGEST[self.request.low]

    @property
    def limit(self) -> float:
        """Largest measured value that counts as in range."""
        return self.largest / HEADROOM

    def hazard(
        self, node: NodeProto, rule: str, reason: str, tensor: str, severity: Severity | None = None
    ) -> Hazard:
        """A hazard with the measured range of `tensor` as its evidence."""
        return Hazard(node, rule, reason, tensor, self.range(tensor), severity)

    def is_float(self, tensor: str) -> bool:
        return bool(tensor) and self.graph.dtype(tensor) in EXCHANGEABLE

    def floats(self, node: NodeProto) -> list[str]:
        return [t for t in (*node.input, *node.output) if self.is_float(t)]

    def source(self, tensor: str) -> str:
        """The tensor at the start of the float Casts that lead to `tensor`."""
        while tensor in self._casts:
            tensor = self._casts[tensor]
        return tensor

    def range(self, tensor: str) -> Range | None:
        """The range of a tensor; None if it was not measured."""
        tensor = self.source(tensor)
        measured = self.ranges.get((self.scope, tensor))
        return measured if measured or self.parent is None else self.parent.range(tensor)

    def constant(self, tensor: str) -> Array | None:
        """The value of a constant, seen through float Casts."""
        return self.graph.constant(self.source(tensor))

    def scalar(self, tensor: str) -> float | None:
        """The value of a constant with one element, seen through float Casts."""
        return self.graph.scalar(self.source(tensor))

    def is_constant(self, tensor: str) -> bool:
        return self.constant(tensor) is not None

    def is_output(self, tensor: str) -> bool:
        """True if the graph hands out `tensor` or a float Cast of it."""
        return any(self.graph.is_output(name) for name in self.aliases(tensor))

    def aliases(self, tensor: str) -> list[str]:
        """`tensor` and the results of float Casts of it."""
        names = [tensor]
        for name in names if self._casts else ():
            results = (out for n in self.graph.consumers(name) for out in n.output)
            names.extend(out for out in results if out in self._casts)
        return names

    def lowered(self, tensor: str) -> bool:
        """True if `tensor` is, or may come to be, in the lower precision; a mixed model's types decide."""
        return not self.mixed or any(self.graph.dtype(t) in LARGEST for t in self.aliases(tensor))

    def was_rounded(self, tensor: str) -> bool:
        """True if `tensor` passed through the lower precision after the node that computed it."""
        types = {self.graph.dtype(tensor)}
        while tensor in self._casts:
            tensor = self._casts[tensor]
            types.add(self.graph.dtype(tensor))
        return not types.isdisjoint(LARGEST)

    def stays_fp32(self, tensor: str) -> bool:
        """True if `tensor`, an input or output of the model, stays FP32."""
        main, wanted = self.graph.is_main, io_type(self.request.io, tensor)
        return main and wanted in ("keep", "fp32") and self.graph.dtype(tensor) == TensorProto.FLOAT

    def in_fp32(self, node: NodeProto) -> bool:
        """True if all float inputs and outputs of a node are FP32."""
        return {self.graph.dtype(t) for t in self.floats(node)} == {TensorProto.FLOAT}

    def _computes(self, node: NodeProto) -> bool:
        """True if a precision has to be chosen for the node."""
        casts = not self._casts.keys().isdisjoint(node.output)
        if node.op_type == "Constant" or casts or not self.floats(node):
            return False
        rules = self.rules(node)
        if rules is None:
            return True
        border = zip((*node.input, *node.output), (*rules.inputs, *rules.outputs), strict=True)
        return any(port is not TypeRule.ANY and self.is_float(tensor) for tensor, port in border)

    def rules(self, node: NodeProto) -> TypeRules | None:
        return type_rules(node, self.opsets, self.request.low)

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
