"""Rules that say which nodes must not compute in the lower precision, one function for each kind.

A rule looks at one graph with its measured ranges and yields hazards. It never edits, and it does
not know of the others.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from onnx import NodeProto, TensorProto

from rewriter.edits import GraphEditor, attribute, label
from rewriter.facts import FLOATS
from rewriter.model import subgraphs
from rewriter.norms import find_norms
from rewriter.plan import Range
from rewriter.schemas import Ports, ports

FP16_MAX = 65504.0
FP16_MIN_NORMAL = 2.0**-14
"""IEEE 754 binary16: largest finite and smallest normal number."""

HEADROOM = 2.0
"""How much larger than in the samples a value may become; a factor 2 is one binade."""

EXACT_INTEGERS = {TensorProto.FLOAT16: 2048, TensorProto.BFLOAT16: 256}
"""All integers up to here are exact: 11 and 8 bits of significand."""

PHASE_LIMIT = 4.0
"""Arguments of Sin and Cos beyond one half turn lose more than 4 * 2^-11 = 2e-3 rad in FP16."""

VIEWS = frozenset(
    "Reshape Transpose Squeeze Unsqueeze Flatten Identity Slice Gather Split Concat Expand Tile Cast".split()
)
CHEAP = VIEWS | frozenset(
    "Add Sub Mul Div Neg Abs Relu Clip Max Min Pow Sqrt Reciprocal Exp Log Erf Sigmoid Tanh Where Pad Sin Cos "
    "ReduceMax ReduceMin ReduceMean ReduceSum ReduceL2 Softmax LogSoftmax Sign Floor Ceil Round Mod".split()
)
"""Memory-bound operators: in FP32 they cost bandwidth, not Tensor Cores."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Attributes:
        low: The lower precision, TensorProto.FLOAT16 or BFLOAT16.
        keep_nodes: Patterns (fnmatch) of node or output names that stay in FP32.
        keep_ops: Operator types that stay in FP32.
        headroom: Largest tolerated growth over the measured range.
    """

    low: int
    keep_nodes: tuple[str, ...] = ()
    keep_ops: tuple[str, ...] = ()
    headroom: float = HEADROOM

    @property
    def limit(self) -> float:
        """Largest measured value that is taken as in range."""
        return (FP16_MAX if self.low == TensorProto.FLOAT16 else 3.38953139e38) / self.headroom


@dataclass(frozen=True)
class Hazard:
    """A node that must stay in FP32, with the evidence."""

    node: NodeProto
    rule: str
    reason: str
    tensor: str | None = None
    range: Range | None = None


@dataclass
class Survey:
    """One graph with everything that the rules ask about it.

    `ranges` is keyed by scope index (the order of `Facts.scopes`) and tensor name. `opsets` are the
    versions of the operator sets by domain. `mixed` says that the model already computes in FP16 or
    BF16 somewhere.
    """

    graph: GraphEditor
    scope: int
    ranges: Mapping[tuple[int, str], Range]
    opsets: Mapping[str, int]
    settings: Settings
    mixed: bool
    parent: Survey | None = None
    nodes: list[NodeProto] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = [n for n in self.graph.nodes if n.op_type != "Constant" and self.floats(n)]

    def floats(self, node: NodeProto) -> list[str]:
        """The floating-point tensors at the border of a node."""
        return [t for t in (*node.input, *node.output) if t and self.graph.dtype(t) in FLOATS]

    def range(self, tensor: str) -> Range | None:
        found = self.ranges.get((self.scope, tensor))
        return found if found or self.parent is None else self.parent.range(tensor)

    def ports(self, node: NodeProto) -> Ports | None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        return ports(node, self.opsets.get(domain, 1), self.settings.low)

    def upstream(self, tensor: str, through: frozenset[str]) -> Iterator[NodeProto]:
        """Float nodes that lead to `tensor` through the operators `through`, nearest first."""
        stack, seen = [tensor], {tensor}
        while stack:
            node = self.graph.producer(stack.pop())
            if node is None or node.op_type not in through or not self.floats(node):
                continue
            yield node
            new = [t for t in node.input if t not in seen and self.graph.dtype(t) in FLOATS]
            seen.update(new)
            stack.extend(new)

    def downstream(self, tensor: str, through: frozenset[str]) -> Iterator[NodeProto]:
        """Float nodes that read `tensor`, and on through the operators `through`."""
        stack, seen = [tensor], {tensor}
        while stack:
            for node in self.graph.consumers(stack.pop()):
                if not self.floats(node):
                    continue
                yield node
                if node.op_type in through:
                    new = [t for t in node.output if t not in seen]
                    seen.update(new)
                    stack.extend(new)


Rule = Callable[[Survey], Iterable[Hazard]]


def user_choice(survey: Survey) -> Iterator[Hazard]:
    """Nodes that the user named, by pattern or by operator."""
    for node in survey.nodes:
        names = (node.name, *node.output)
        for pattern in survey.settings.keep_nodes:
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                yield Hazard(node, "user", f"kept by --keep-fp32 {pattern}")
        if node.op_type in survey.settings.keep_ops:
            yield Hazard(node, "user", f"kept by --keep-fp32-op {node.op_type}")


def user_island(survey: Survey) -> Iterator[Hazard]:
    """In a model that is mixed already, an FP32 node is its author's choice."""
    if not survey.mixed:
        return
    for node in survey.nodes:
        types = {survey.graph.dtype(t) for t in survey.floats(node)}
        if types == {TensorProto.FLOAT} and node.op_type != "Cast":
            yield Hazard(node, "existing-island", "FP32 in a model that computes in FP16 elsewhere")


def no_lower_type(survey: Survey) -> Iterator[Hazard]:
    """Operators without a schema, without the lower type, or with tensors of unknown type."""
    low = "FP16" if survey.settings.low == TensorProto.FLOAT16 else "BF16"
    for node in survey.nodes:
        rules = survey.ports(node)
        if rules is None:
            yield Hazard(node, "no-schema", f"{node.op_type} has no ONNX schema: it keeps its types")
        elif not rules.can_follow:
            version = survey.opsets.get(node.domain, 1)
            yield Hazard(node, "no-lower-type", f"{node.op_type} has no {low} in opset {version}")
        else:
            unknown = [t for t in (*node.input, *node.output) if t and survey.graph.dtype(t) is None]
            if unknown:
                yield Hazard(node, "unknown-type", f"the type of {unknown[0]} is not known")


def overflow(survey: Survey) -> Iterator[Hazard]:
    """A tensor at the border leaves the lower type's range, or nearly does."""
    for node in survey.nodes:
        for tensor in survey.floats(node):
            measured = survey.range(tensor)
            if measured is None or _fits(survey, tensor, measured):
                continue
            what = "exceeds" if measured.finite else "is not finite:"
            limit = f" {survey.settings.limit:.4g}" if measured.finite else ""
            yield Hazard(node, "overflow", f"{tensor} {what}{limit}", tensor, measured)
            break


def _fits(survey: Survey, tensor: str, measured: Range) -> bool:
    if measured.absmax <= survey.settings.limit:
        return True
    masked = measured.low == -math.inf and measured.high <= survey.settings.limit
    return masked and not math.isnan(measured.mean_abs) and _only_feeds_softmax(survey, tensor)


def _only_feeds_softmax(survey: Survey, tensor: str) -> bool:
    """-inf is -inf in FP16, too, and Softmax makes 0 of it; anything else might make NaN."""
    through = VIEWS | {"Add", "Where"}
    readers = list(survey.downstream(tensor, through))
    return bool(readers) and all(n.op_type in through | {"Softmax"} for n in readers)


def unmeasured(survey: Survey) -> Iterator[Hazard]:
    """A node whose results were never seen may hold anything."""
    for node in survey.nodes:
        for tensor in node.output:
            if tensor and survey.graph.dtype(tensor) in FLOATS and survey.range(tensor) is None:
                yield Hazard(node, "unmeasured", f"{tensor} could not be measured", tensor)
                break


def unfused_norm(survey: Survey) -> Iterator[Hazard]:
    """The squares inside a decomposed normalisation overflow long before its input does."""
    for norm in find_norms(survey.graph):
        for node in norm.nodes:
            if survey.floats(node):
                yield Hazard(
                    node,
                    "unfused-norm",
                    f"part of a decomposed {norm.kind} that ends in {norm.output}",
                    norm.input,
                    survey.range(norm.input),
                )


def lost_epsilon(survey: Survey) -> Iterator[Hazard]:
    """A constant below FP16's smallest normal number that guards a division, root or logarithm."""
    if survey.settings.low != TensorProto.FLOAT16:
        return
    for node in survey.nodes:
        guard = _epsilon(survey, node)
        if guard is None:
            continue
        guarded = _guarded(survey, node)
        if guarded:
            for inner in (node, *guarded):
                yield Hazard(inner, "epsilon", f"{guard:.3g} in {label(node)} is below FP16's normal range")


def _epsilon(survey: Survey, node: NodeProto) -> float | None:
    if node.op_type not in {"Add", "Max", "Clip", "Sub"}:
        return None
    for index, tensor in enumerate(node.input):
        value = survey.graph.scalar(tensor)
        if value is None or not 0 < abs(value) < FP16_MIN_NORMAL:
            continue
        other = node.input[0] if index else node.input[-1]
        measured = survey.range(other)
        if measured is not None and measured.low > 1.0:  # far above the epsilon: it decides nothing
            continue
        return value
    return None


def _guarded(survey: Survey, node: NodeProto) -> list[NodeProto]:
    """The nodes from an epsilon to the division, root or logarithm that it protects."""
    through = VIEWS | {"Sqrt", "Pow"}
    sensitive = {"Div", "Reciprocal", "Log", "Sqrt", "Pow"}
    found = list(survey.downstream(node.output[0], through))
    return found if any(n.op_type in sensitive for n in found) else []


def phase(survey: Survey) -> Iterator[Hazard]:
    """Angles of Sin and Cos, with the position arithmetic that leads to them."""
    for node in survey.nodes:
        if node.op_type not in {"Sin", "Cos"}:
            continue
        measured = survey.range(node.input[0])
        if measured is not None and measured.absmax <= PHASE_LIMIT:
            continue
        reason = f"angle of {label(node)}: rounding it to FP16 turns it"
        yield Hazard(node, "phase", reason, node.input[0], measured)
        for source in survey.upstream(node.input[0], CHEAP | {"MatMul", "Einsum", "Range"}):
            yield Hazard(source, "phase", reason, node.input[0], measured)


def positions(survey: Survey) -> Iterator[Hazard]:
    """Integers carried as floats beyond what the lower type counts exactly."""
    exact = EXACT_INTEGERS[survey.settings.low]
    for node in survey.nodes:
        if node.op_type != "Cast" or survey.graph.dtype(node.input[0]) in FLOATS:
            continue
        measured = survey.range(node.output[0])
        if measured is None or measured.absmax <= exact:
            continue
        reason = f"{node.output[0]} holds integers beyond {exact}"
        yield Hazard(node, "positions", reason, node.output[0], measured)
        for reader in survey.downstream(node.output[0], VIEWS | {"Add", "Sub", "Mul", "Div"}):
            if reader.op_type in CHEAP:
                yield Hazard(reader, "positions", reason, node.output[0], measured)


def coordinates(survey: Survey) -> Iterator[Hazard]:
    """Sampling coordinates need more than 11 bits: 1/2048 of an image is a pixel, not a fraction of one."""
    inputs = {"GridSample": 1, "RoiAlign": 1, "NonMaxSuppression": 0, "AffineGrid": 0}
    for node in survey.nodes:
        index = inputs.get(node.op_type)
        if index is None:
            continue
        reason = f"coordinates of {label(node)}"
        yield Hazard(node, "coordinates", reason)
        for source in survey.upstream(node.input[index], CHEAP - {"Softmax", "LogSoftmax"}):
            yield Hazard(source, "coordinates", reason)


def order(survey: Survey) -> Iterator[Hazard]:
    """Rounding makes ties of what TopK and ArgMax shall tell apart."""
    for node in survey.nodes:
        if node.op_type not in {"TopK", "ArgMax", "ArgMin"}:
            continue
        reason = f"order of {label(node)}"
        yield Hazard(node, "order", reason)
        for source in survey.upstream(node.input[0], CHEAP):
            yield Hazard(source, "order", reason)


def quantized(survey: Survey) -> Iterator[Hazard]:
    """A Cast between Q/DQ and its operator would keep TensorRT from fusing them."""
    for node in survey.nodes:
        if node.op_type not in {"QuantizeLinear", "DequantizeLinear"}:
            continue
        rules = survey.ports(node)
        if rules is not None and rules.can_follow:  # from opset 19 on Q/DQ have FP16 themselves
            continue
        near = (
            [survey.graph.producer(node.input[0])]
            if node.op_type == "QuantizeLinear"
            else survey.graph.consumers(node.output[0])
        )
        for other in (node, *near):
            if other is not None and survey.floats(other):
                yield Hazard(other, "quantized", f"adjacent to {label(node)}")


def loop_state(survey: Survey) -> Iterator[Hazard]:
    """What a Loop or Scan carries from one iteration to the next would gather rounding errors."""
    for node in survey.nodes:
        if node.op_type in {"Loop", "Scan"}:
            yield Hazard(node, "loop-state", "rounding would add up over the iterations")
        elif any(True for _ in subgraphs(node)) and node.op_type != "If":
            yield Hazard(node, "subgraph", f"{node.op_type} is not taken apart")


def generated(survey: Survey) -> Iterator[Hazard]:
    """Range and random generators have their type as an attribute or none lower."""
    for node in survey.nodes:
        if node.op_type.startswith("Random") or attribute(node, "dtype") == TensorProto.DOUBLE:
            yield Hazard(node, "generated", f"{node.op_type} keeps its type")


RULES: tuple[Rule, ...] = (
    user_choice,
    user_island,
    no_lower_type,
    overflow,
    unmeasured,
    unfused_norm,
    lost_epsilon,
    phase,
    positions,
    coordinates,
    order,
    quantized,
    loop_state,
    generated,
)
"""In order of precedence: the first rule that names a node gives the reason."""
