"""Exponents of a graph's tensors and constants, and the linear equations between them, by operator.

If the inputs of an operator are multiplied by powers of two, its outputs are, too, and no bit of a
significand changes. An operator without a rule allows no exponent but 0.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd

from onnx import NodeProto, TensorProto

from rewriter.ir.graph import GraphEditor, attribute, display_name, reads
from rewriter.ir.model import STANDARD_DOMAINS
from rewriter.ir.model.tensors import FLOATS

Slot = int  # an input or output of a node: input i is i, output j is ~j (its bitwise complement)

NORMS = frozenset(f"{kind}Normalization" for kind in ("Layer", "RMS", "Instance", "Group"))
"""Operators that add the attribute `epsilon` to squares of their input, and divide by the root."""

_TABLE = {
    # the outputs are values of the first input, or sums and averages of them
    "k = k0": "Reshape Transpose Squeeze Unsqueeze Flatten Identity Slice Gather GatherElements GatherND "
    "Split Expand Tile Relu LeakyRelu PRelu Abs Neg Dropout MaxPool AveragePool GlobalMaxPool "
    "GlobalAveragePool ReduceSum ReduceMean ReduceMax ReduceMin ReduceL1 ReduceL2 CumSum DepthToSpace "
    "SpaceToDepth Cast Trilu Compress ReverseSequence GridSample RoiAlign Resize",
    "k = k0 = k2": "ScatterElements ScatterND Pad",
    "k = k0 = k1 = k2": "Clip",
    "k = k1 = k2": "Where",
    "k = k0 = ...": "Concat Add Sub Sum Mean Max Min",
    "k = k0 + ...": "Mul MatMul Einsum",
    "k = k0 + k1 = k2": "Conv ConvTranspose Gemm",
    "k = k0 - k1": "Div",
    "k = -k0": "Reciprocal",
    "2k = k0": "Sqrt",
    "k = 2k0": "ReduceSumSquare",
    "k = k0 * k1": "Pow",
    # x / scale is rounded to an integer: if both scale together, no integer changes
    "k0 = k1": "QuantizeLinear Equal Less Greater LessOrEqual GreaterOrEqual",
    "k = k1": "DequantizeLinear",
    # the results do not depend on a positive factor
    "k0 = k0": "Shape Size IsNaN IsInf Sign LpNormalization",
    "k0 = k0, k = k1 = k2": " ".join(NORMS),
    # (x - mean) * scale / sqrt(var + epsilon) + bias: the scale takes up the factor, the variance stays
    "k = k0 + k1 = k2, k0 = k3": "BatchNormalization",
}
"""Operators of the default domain by rule: k is the exponent of every output, k0 the exponent of input 0."""

RULES = {op: rule for rule, ops in _TABLE.items() for op in ops.split()}


def equations(graph: GraphEditor, node: NodeProto) -> list[Counter[Slot]] | None:
    """The equations of a node; None if all its exponents have to be 0.

    Returns:
        Coefficients by slot: the sum of coefficient times exponent is 0. An equation with an absent input, or
        with a tensor that is no float, is to be ignored; a slot that none mentions has exponent 0.
    """
    if node.domain not in STANDARD_DOMAINS or node.op_type not in RULES or _is_inexact(graph, node):
        return None
    rule = RULES[node.op_type]
    if node.op_type == "Pow":
        rule = f"k = {graph.scalar(node.input[1]):.0f}k0"
    if rule.endswith("..."):
        rule = "k = " + rule[-5:-3].join(f"k{index}" for index in range(len(node.input)))
    result = []
    for chain in rule.split(","):
        first, *others = chain.split("=")
        for other in others:
            result.append(_side(first))
            result[-1].subtract(_side(other))
    return result + [Counter({~0: 1, ~index: -1}) for index in range(1, len(node.output))]


def _side(text: str) -> Counter[Slot]:
    """The coefficients of one side of an equation, such as `2k` or `k0 - k1`."""
    terms: Counter[Slot] = Counter()
    for sign, factor, index in re.findall(r"(-?) ?(\d*)k(\d*)", text):
        terms[int(index) if index else ~0] += int(f"{sign}{factor or 1}")
    return terms


def _is_inexact(graph: GraphEditor, node: NodeProto) -> bool:
    """True for a form of its operator that the rule does not hold for."""
    match node.op_type:
        case "Clip":
            return bool(node.attribute)  # opset 6 has the bounds as attributes
        case "Pad":
            return bool(attribute(node, "value"))
        case "Resize":
            return bool(attribute(node, "coordinate_transformation_mode") == "tf_crop_and_resize")
        case "ScatterElements" | "ScatterND":
            return bool(attribute(node, "reduction") == "mul")
        case "Pow":  # 1, 2 and 3 are products; others are computed through a logarithm, which rounds
            return graph.scalar(node.input[1]) not in (1.0, 2.0, 3.0)
    norm = node.op_type in NORMS or node.op_type == "BatchNormalization"
    return norm and (any(node.output[1:]) or bool(attribute(node, "training_mode", 0)))


Form = tuple[tuple[int, int], ...]
"""A sum of free exponents: pairs of a free one and its coefficient, in order; (): the exponent is 0."""

ZERO = 0  # number of the exponent of all that cannot be scaled


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
