"""Collects the constraints on a graph's exponents: which tensors may be scaled, and which only together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from onnx import NodeProto, TensorProto

from rewriter.graph import GraphEditor, label, reads
from rewriter.model.facts import FLOATS
from rewriter.rewriting.rescaling.classes import ZERO, Classes
from rewriter.rewriting.rescaling.rules import Relations, Slot, relations


@dataclass(frozen=True)
class ConstantUse:
    """One input of one node that reads a constant. Each use has its own exponent and may need a copy."""

    node: NodeProto
    index: int
    tensor: str
    number: int


@dataclass(frozen=True)
class EpsilonUse:
    """A normalisation whose attribute `epsilon` scales with the square of its input, exponent `number`."""

    node: NodeProto
    number: int


@dataclass
class Constraints:
    """The exponents of one graph and the constraints between them.

    Attributes:
        tensors: Number of the exponent of every computed FP32 tensor.
        constants: Every use of an FP32 constant.
        epsilons: Every epsilon that scales with an input.
        pins: Why an exponent is 0, for tensors that an operator or the graph fixes directly.
    """

    classes: Classes = field(default_factory=Classes)
    tensors: dict[str, int] = field(default_factory=dict)
    constants: list[ConstantUse] = field(default_factory=list)
    epsilons: list[EpsilonUse] = field(default_factory=list)
    pins: dict[str, str] = field(default_factory=dict)

    def members(self) -> dict[int, list[str]]:
        """The tensors of every class, `ZERO` included."""
        found: dict[int, list[str]] = {}
        for tensor, number in self.tensors.items():
            found.setdefault(self.classes.root(number), []).append(tensor)
        return found

    def pin(self, tensor: str, reason: str) -> None:
        """Fix the exponent of a tensor at 0."""
        if tensor in self.tensors:
            self.pins.setdefault(tensor, reason)
            self.classes.pin(self.tensors[tensor])


def collect(graph: GraphEditor) -> Constraints:
    """Constraints of one graph; its inputs, outputs and the tensors of enclosing graphs keep their scale."""
    found = Constraints()
    collector = _Collector(graph, found)
    for node in graph.nodes:
        collector.visit(node)
    for tensor in found.tensors:
        if graph.is_output(tensor):
            found.pin(tensor, "it is a graph output")
    return found


@dataclass(frozen=True)
class _Collector:
    graph: GraphEditor
    found: Constraints

    def visit(self, node: NodeProto) -> None:
        if all(self.graph.constant(name) is not None for name in node.output if name):
            return  # a Constant, or an Identity of one: its consumers see a constant
        slots = dict(self._slots(node))
        typed = all(self.graph.dtype(name) for name in (*node.input, *node.output) if name)
        known = relations(self.graph, node) if typed else None
        if known is None:
            self._pin(node, slots, slots)
            for name in reads(node):  # the tensors that its subgraphs read
                self.found.pin(name, _fixes(node))
            return
        self._pin(node, slots, slots.keys() - self._relate(known, slots))
        if known.epsilon:
            self.found.epsilons.append(EpsilonUse(node, slots[0]))

    def _slots(self, node: NodeProto) -> Iterator[tuple[Slot, int]]:
        """Exponents of the float tensors that a node reads and writes."""
        for index, name in enumerate(node.input):
            if name and self.graph.dtype(name) in FLOATS:
                yield index, self._read(node, index, name)
        for index, name in enumerate(node.output):
            if name and self.graph.dtype(name) in FLOATS:
                yield ~index, self._written(name)

    def _read(self, node: NodeProto, index: int, name: str) -> int:
        if self.graph.dtype(name) != TensorProto.FLOAT:
            return ZERO
        if self.graph.constant(name) is None:
            return self.found.tensors.get(name, ZERO)  # graph inputs and tensors of enclosing graphs: 0
        number = self.found.classes.add()
        self.found.constants.append(ConstantUse(node, index, name, number))
        return number

    def _written(self, name: str) -> int:
        if self.graph.dtype(name) != TensorProto.FLOAT:
            return ZERO
        self.found.tensors[name] = self.found.classes.add()
        return self.found.tensors[name]

    def _relate(self, known: Relations, slots: dict[Slot, int]) -> set[Slot]:
        """Add a node's equations; returns the slots that need no pin."""
        related = set(known.free)
        for equation in known.equations:
            if all(slot in slots for slot, _ in equation):
                self.found.classes.relate((slots[slot], coefficient) for slot, coefficient in equation)
                related.update(slot for slot, _ in equation)
        return related

    def _pin(self, node: NodeProto, slots: dict[Slot, int], fixed: Iterable[Slot]) -> None:
        for slot in fixed:
            self.found.pin(node.input[slot] if slot >= 0 else node.output[~slot], _fixes(node))
            self.found.classes.pin(slots[slot])


def _fixes(node: NodeProto) -> str:
    return f"{node.op_type} {label(node)} fixes its scale"
