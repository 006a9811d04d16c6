"""Hazards and their kinds, and one graph as the rules see it: with measured ranges and the request.

The output of a Cast between float types has the range of its input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from onnx import NodeProto, TensorProto

from rewriter.base.errors import SEVERITIES, Severity
from rewriter.ir.float_graph import FloatGraph
from rewriter.ir.model import Array
from rewriter.ir.plan import (
    HEADROOM,
    Epilogues,
    InputsOutputs,
    NodePatterns,
    NormHazard,
    Precision,
    Range,
    io_type,
)
from rewriter.ir.reading import own_table
from rewriter.target import Target

LOW_TYPES: dict[Precision, int] = {
    "fp32": TensorProto.FLOAT,
    "fp16": TensorProto.FLOAT16,
    "bf16": TensorProto.BFLOAT16,
}

LARGEST: dict[int, float] = {TensorProto.FLOAT16: 65504.0, TensorProto.BFLOAT16: 3.3895313892515355e38}
"""Largest finite number: IEEE 754 binary16, and the upper half of a binary32."""


@dataclass(frozen=True)
class Kind:
    """One kind of hazard, as reports explain it; the head of `kinds.toml` explains the fields."""

    title: str
    severity: Severity
    repair: str
    why: str
    picture: str
    measured: bool = False
    acts: Severity = "note"


@dataclass(frozen=True)
class Hazard:
    """A node that goes wrong in the lower precision, with the evidence.

    Attributes:
        kind: A key of `KINDS` where `scan` reports it.
        reason: One sentence; hazards with the same kind and reason are one finding.
        severity, repair: None: as in the kind.
        link: The page that reports it, if there is one.
        norm: For a node of a decomposed norm.
        about: Name of the node that goes wrong, if `node` feeds it; "" for `node` itself.
    """

    node: NodeProto
    kind: str
    reason: str
    tensor: str | None = None
    range: Range | None = None
    severity: Severity | None = None
    repair: str | None = None
    link: str = ""
    norm: NormHazard | None = None
    about: str = ""

    @property
    def acted_on(self) -> bool:
        """True if `fix` keeps the node in FP32 for it."""
        kind = KINDS.get(self.kind)
        severity = self.severity or (kind.severity if kind else "error")
        return kind is None or SEVERITIES.index(severity) >= SEVERITIES.index(kind.acts)


KINDS = {name: Kind(**row) for name, row in own_table("rewriter.hazards", "kinds.toml").items()}
"""By the `kind` of a hazard: the table `kinds.toml`."""


@dataclass(frozen=True)
class PrecisionRequest:
    """The lower precision that the user asks for, with its conditions.

    Attributes:
        io: Types of graph inputs and outputs.
        keep_nodes: Patterns (fnmatch) of node or output names that stay in FP32; `keep_ops`: operators.
        lower: Nodes that stay in the lower precision, whatever a rule or `keep_nodes` says.
        epilogues: Where FP32 is used at no cost (`rewriter.hazards.planning.free_fp32`): nowhere,
            in what a product's own kernel computes of its result, or in all of it, which may cost latency.
        rules: The user's own, which come before ours.
        sample: Arrays by input, whose shapes are the sizes of dynamic axes.
        measured_norms: True if the nodes of a decomposed normalisation may compute in FP16 where their
            measured ranges allow it.
        stand_in: The library whose parser decides what is refused, where that is not the target's.
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
    stand_in: Target | None = None
    measured_norms: bool = False
    sample: Mapping[str, Array] = field(default_factory=dict, compare=False, repr=False)

    @property
    def low(self) -> int:
        """TensorProto.FLOAT16 or BFLOAT16."""
        return LOW_TYPES[self.precision]

    @property
    def parser(self) -> Target:
        """The TensorRT whose parser decides what is refused."""
        return self.stand_in or self.target


@dataclass
class GraphAnalysis(FloatGraph):
    """One graph with everything that the rules ask about it.

    Attributes:
        scope: Index of the graph in the order of `Facts.scopes`.
        ranges: Measured ranges by scope and tensor name.
        mixed: True if the model already computes in FP16 or BF16 somewhere.
    """

    scope: int
    ranges: Mapping[tuple[int, str], Range]
    request: PrecisionRequest
    mixed: bool
    parent: GraphAnalysis | None = None

    @property
    def is_fp16(self) -> bool:
        return self.low == TensorProto.FLOAT16

    @property
    def low_name(self) -> str:
        return self.request.precision.upper()

    @property
    def largest(self) -> float:
        """Largest finite number of the lower precision."""
        return LARGEST[self.low]

    @property
    def limit(self) -> float:
        """Largest measured value that counts as in range."""
        return self.largest / HEADROOM

    def hazard(
        self,
        node: NodeProto,
        rule: str,
        reason: str,
        tensor: str,
        severity: Severity | None = None,
        about: str = "",
    ) -> Hazard:
        """A hazard with the measured range of `tensor` as its evidence."""
        return Hazard(node, rule, reason, tensor, self.range(tensor), severity, about=about)

    def range(self, tensor: str) -> Range | None:
        """The range of a tensor; None if it was not measured."""
        tensor = self.source(tensor)
        measured = self.ranges.get((self.scope, tensor))
        return measured if measured or self.parent is None else self.parent.range(tensor)

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


ANY_TYPE = frozenset(
    "cast-pair tf32 known-defect refused-operator unmeasured no-schema random-data quantized".split()
)
"""Kinds that occur in FP32, too, or that concern no arithmetic."""

OF_RESULTS = frozenset({"overflow", "underflow"})
"""Kinds that hold wherever a Cast to the lower type follows, whatever type the node computes in."""

OF_OPERANDS = frozenset("coordinates order positions phase integers cancellation".split())
"""Kinds that FP32 does not repair where the operands were rounded before."""

ALREADY_AVOIDED = "nothing to do: this model computes it in FP32; keep it so"


def is_already_avoided(analysis: GraphAnalysis, hazard: Hazard) -> bool:
    """True if a mixed model computes the node in FP32, and no Cast of its result overflows."""
    node = hazard.node
    # a Cast between float types is judged by its result
    cast = node.op_type == "Cast" and all(analysis.is_float(t) for t in (*node.input, *node.output))
    if not analysis.mixed or hazard.kind in ANY_TYPE or not (cast or analysis.in_fp32(node)):
        return False
    if hazard.kind in OF_OPERANDS:
        return not any(analysis.was_rounded(t) for t in node.input if analysis.is_float(t))
    rounded = [t for t in node.output if analysis.is_float(t) and analysis.lowered(t)]
    if hazard.kind in OF_RESULTS:
        return not rounded
    measured = [analysis.range(t) for t in rounded]
    return all(m is None or m.absmax <= analysis.largest for m in measured)
