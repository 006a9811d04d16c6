"""Exponents of a graph's tensors and constants, and the linear equations between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd

from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphEditor, display_name, reads
from rewriter.ir.model.tensors import FLOATS
from rewriter.passes.algorithms.rescaling.rules import NORMS, Slot, equations

Form = tuple[tuple[int, int], ...]
"""A sum of free exponents: pairs of a free one and its coefficient, in order; (): the exponent is 0."""

ZERO = 0
"""Number of the exponent of all that cannot be scaled."""


class Exponents:
    """Integers, each a sum of free ones: every equation removes a free one.

    Constants go first, as they take up any difference between tensors; then the one that fewest exponents
    depend on, so the whole costs O(n log n).
    """

    def __init__(self) -> None:
        self._forms: list[dict[int, int]] = [{}]
        self._dependents: dict[int, set[int]] = {}
        self._constants: set[int] = set()

    def add(self, *, constant: bool = False) -> int:
        """Returns the number of a new free exponent."""
        number = len(self._forms)
        self._forms.append({number: 1})
        self._dependents[number] = {number}
        if constant:
            self._constants.add(number)
        return number

    def form(self, number: int) -> Form:
        return tuple(sorted(self._forms[number].items()))

    def relate(self, terms: Iterable[tuple[int, int]]) -> None:
        """Adds an equation over pairs (exponent, coefficient): the sum of their products is 0."""
        total: dict[int, int] = {}
        for number, coefficient in terms:
            for free, factor in self._forms[number].items():
                total[free] = total.get(free, 0) + coefficient * factor
        total = {free: c for free, c in total.items() if c}
        divisor = gcd(*total.values())
        units = [free for free, c in total.items() if abs(c) == divisor]
        if not units:  # 2a = 3b has solutions only in large steps: both become 0
            for free in total:
                self._replace(free, {})
            return
        gone = min(units, key=lambda free: (free not in self._constants, len(self._dependents[free])))
        factor = total.pop(gone)
        self._replace(gone, {free: -c // factor for free, c in total.items()})

    def pin(self, number: int) -> None:
        self.relate([(number, 1)])

    def _replace(self, gone: int, terms: Mapping[int, int]) -> None:
        """Replaces a free exponent by a sum of others."""
        for number in self._dependents.pop(gone):
            form = self._forms[number]
            times = form.pop(gone)
            for free, c in terms.items():
                form[free] = form.get(free, 0) + times * c
                if form[free]:
                    self._dependents[free].add(number)
                else:
                    del form[free]
                    self._dependents[free].discard(number)


@dataclass(frozen=True)
class ConstantUse:
    """One input of one node that reads a constant. Each use has its own exponent and may need a copy."""

    node: NodeProto
    index: int
    tensor: str
    number: int


class Constraints(Exponents):
    """The exponents of one graph; its inputs, outputs and the tensors of enclosing graphs keep their scale.

    Attributes:
        tensors: Number of the exponent of every computed FP32 tensor.
        constants: Every use of an FP32 constant.
        epsilons: Normalisations whose attribute `epsilon` scales with the square of their input, each with
            the number of its exponent.
        pins: Why an exponent is 0, for tensors that an operator or the graph fixes directly.
    """

    def __init__(self, graph: GraphEditor) -> None:
        super().__init__()
        self.graph = graph
        self.tensors: dict[str, int] = {}
        self.constants: list[ConstantUse] = []
        self.epsilons: list[tuple[NodeProto, int]] = []
        self.pins: dict[str, str] = {}
        for node in graph.nodes:
            if any(name and graph.constant(name) is None for name in node.output):
                self._visit(node)  # not a Constant, or an Identity of one: its consumers see a constant
        for tensor in self.tensors:
            if graph.is_output(tensor):
                self._fix(tensor, "it is a graph output")

    def exponent(self, number: int, free: Mapping[int, int]) -> int:
        """Returns an exponent, given the free ones; missing ones are 0."""
        return sum(c * free.get(key, 0) for key, c in self.form(number))

    def _fix(self, tensor: str, reason: str) -> None:
        """Pins the exponent of a tensor of this graph."""
        if tensor in self.tensors:
            self.pins.setdefault(tensor, reason)
            self.pin(self.tensors[tensor])

    def _visit(self, node: NodeProto) -> None:
        slots = dict(self._slots(node))
        typed = all(self.graph.dtype(name) for name in (*node.input, *node.output) if name)
        rule, related = equations(self.graph, node) if typed else None, set[Slot]()
        for equation in rule or ():
            if equation.keys() <= slots.keys():
                self.relate((slots[slot], coefficient) for slot, coefficient in equation.items())
                related |= equation.keys()
        fixes = f"{node.op_type} {display_name(node)} fixes its scale"
        for slot in slots.keys() - related:
            self._fix(node.input[slot] if slot >= 0 else node.output[~slot], fixes)
            self.pin(slots[slot])
        for name in reads(node) if rule is None else ():  # the tensors that its subgraphs read
            self._fix(name, fixes)
        if rule is not None and node.op_type in NORMS:
            self.epsilons.append((node, slots[0]))

    def _slots(self, node: NodeProto) -> Iterator[tuple[Slot, int]]:
        """Exponents of the float tensors that a node reads and writes; of types but FP32 they are 0."""
        graph = self.graph
        for index, name in enumerate(node.input):
            if name and graph.dtype(name) in FLOATS:
                number = self.tensors.get(name, ZERO)  # graph inputs and tensors of enclosing graphs: 0
                if graph.dtype(name) == TensorProto.FLOAT and graph.constant(name) is not None:
                    number = self.add(constant=True)
                    self.constants.append(ConstantUse(node, index, name, number))
                yield index, number
        for index, name in enumerate(node.output):
            if name and graph.dtype(name) == TensorProto.FLOAT:
                self.tensors[name] = self.add()
            if name and graph.dtype(name) in FLOATS:
                yield ~index, self.tensors.get(name, ZERO)
