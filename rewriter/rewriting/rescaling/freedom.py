"""Which tensors of a graph may be scaled, and which of them only together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from onnx import NodeProto, TensorProto

from rewriter.graph import GraphEditor, label, reads
from rewriter.model.facts import FLOATS
from rewriter.rewriting.rescaling.classes import ZERO, Classes
from rewriter.rewriting.rescaling.rules import Relations, Slot, relations


@dataclass(frozen=True)
class ConstantUse:
    """One input of one node that reads a constant: each use may want a copy of its own."""

    node: NodeProto
    index: int
    tensor: str
    number: int


@dataclass(frozen=True)
class EpsilonUse:
    """A normalisation whose attribute `epsilon` is scaled with the square of its input."""

    node: NodeProto
    number: int


@dataclass(frozen=True)
class Freedom:
    """The exponents of a graph: numbers of tensors and constants, and what binds them.

    Attributes:
        tensors: Number of every computed FP32 tensor.
        constants: Every use of an FP32 constant.
        epsilons: Numbers are those of the inputs that are normalised.
        pins: Why a tensor has exponent 0, where an operator or the graph says so directly.
    """

    classes: Classes
    tensors: dict[str, int]
    constants: list[ConstantUse]
    epsilons: list[EpsilonUse]
    pins: dict[str, str]

    def members(self) -> dict[int, list[str]]:
        """The tensors of every class, those of `ZERO` included."""
        found: dict[int, list[str]] = {}
        for tensor, number in self.tensors.items():
            found.setdefault(self.classes.root(number), []).append(tensor)
        return found


def analyse(graph: GraphEditor) -> Freedom:
    """The freedom of one graph; inputs, outputs and tensors of enclosing graphs keep their scale."""
    walk = _Walk(graph)
    for node in graph.nodes:
        walk.visit(node)
    for tensor in walk.tensors:
        if graph.is_output(tensor):
            walk.pin(tensor, "it is a graph output")
    return Freedom(walk.classes, walk.tensors, walk.constants, walk.epsilons, walk.pins)


@dataclass
class _Walk:
    graph: GraphEditor
    classes: Classes = field(default_factory=Classes)
    tensors: dict[str, int] = field(default_factory=dict)
    constants: list[ConstantUse] = field(default_factory=list)
    epsilons: list[EpsilonUse] = field(default_factory=list)
    pins: dict[str, str] = field(default_factory=dict)

    def visit(self, node: NodeProto) -> None:
        if all(self.graph.constant(name) is not None for name in node.output if name):
            return  # a Constant, or an Identity of one: its readers have it as a constant
        slots = dict(self._slots(node))
        known = relations(self.graph, node) if self._typed(node) else None
        if known is None:
            self._pin_all(node, slots)
            return
        related = self._relate(known, slots)
        for slot in slots.keys() - related:
            self._pin_slot(node, slot, slots)
        if known.epsilon:
            self.epsilons.append(EpsilonUse(node, slots[0]))

    def pin(self, tensor: str, reason: str) -> None:
        if tensor in self.tensors:
            self.pins.setdefault(tensor, reason)
            self.classes.pin(self.tensors[tensor])

    def _slots(self, node: NodeProto) -> Iterator[tuple[Slot, int]]:
        """The numbers of the float tensors at the border of a node."""
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
            return self.tensors.get(name, ZERO)  # inputs, and tensors of enclosing graphs
        number = self.classes.add()
        self.constants.append(ConstantUse(node, index, name, number))
        return number

    def _written(self, name: str) -> int:
        if self.graph.dtype(name) != TensorProto.FLOAT:
            return ZERO
        self.tensors[name] = self.classes.add()
        return self.tensors[name]

    def _typed(self, node: NodeProto) -> bool:
        return all(self.graph.dtype(name) for name in (*node.input, *node.output) if name)

    def _relate(self, known: Relations, slots: dict[Slot, int]) -> set[Slot]:
        """Take up a node's equations; returns the slots that they, or nothing, bind."""
        related = set(known.free)
        for equation in known.equations:
            if all(slot in slots for slot, _ in equation):
                self.classes.relate((slots[slot], coefficient) for slot, coefficient in equation)
                related.update(slot for slot, _ in equation)
        return related

    def _pin_all(self, node: NodeProto, slots: dict[Slot, int]) -> None:
        for slot in slots:
            self._pin_slot(node, slot, slots)
        for name in reads(node):  # what its subgraphs read
            self.pin(name, _fixes(node))

    def _pin_slot(self, node: NodeProto, slot: Slot, slots: dict[Slot, int]) -> None:
        name = node.input[slot] if slot >= 0 else node.output[~slot]
        self.pin(name, _fixes(node))
        self.classes.pin(slots[slot])


def _fixes(node: NodeProto) -> str:
    return f"{node.op_type} {label(node)} fixes its scale"
