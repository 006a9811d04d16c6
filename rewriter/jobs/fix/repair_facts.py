"""Repairs by passes that leave no trace in the plan, and repairs of known defects."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rewriter.hazards.analysis import LOW_TYPES, PrecisionRequest
from rewriter.hazards.planning.planner import analyses
from rewriter.hazards.weights import batch_statistics
from rewriter.ir.graph import display_name
from rewriter.ir.graph.editor import made_by
from rewriter.ir.graph.ops import ROW_NORMS
from rewriter.ir.model import Model, walk_graphs
from rewriter.ir.plan import Precision, Range
from rewriter.pipeline.driver import PassResult
from rewriter.target import Target
from rewriter.target.quirks import Quirk, met, repairs

BATCH = "BatchNormalization"

FUSING = ("fuse-layer-norm", "keep-epilogues")
"""Passes whose name a fused norm may carry: the last one moves norms and makes them anew."""


@dataclass(frozen=True)
class RepairFacts:
    """Repairs in one attempt that its plan does not hold, by the functions below."""

    fused: Sequence[tuple[str, str, Range]] = ()
    unscaled: Mapping[tuple[int, str], Range] = field(default_factory=dict)  # before `rescale`
    folded: Sequence[tuple[str, str]] = ()
    defects: Sequence[tuple[Quirk, tuple[str, ...]]] = ()
    precision: Precision = "fp16"


def fused_norms(model: Model, ranges: Mapping[tuple[int, str], Range]) -> list[tuple[str, str, Range]]:
    """Name and operator of each norm that our passes made one operator, with the range of its input."""
    return [
        (display_name(node), node.op_type, ranges[scope, node.input[0]])
        for scope, graph in enumerate(walk_graphs(model.proto.graph))
        for node in graph.node
        if node.op_type in ROW_NORMS and made_by(node, FUSING) and (scope, node.input[0]) in ranges
    ]


def folded_statistics(original: Model, rewritten: Model) -> list[tuple[str, str]]:
    """BatchNormalizations whose statistics FP16 cannot hold, and the reasons, where passes folded them."""
    left = {n.output[0] for g in walk_graphs(rewritten.proto.graph) for n in g.node if n.op_type == BATCH}
    if not any(n.op_type == BATCH for g in walk_graphs(original.proto.graph) for n in g.node):
        return []
    seen = analyses(original, {}, PrecisionRequest("fp16"))
    hazards = [h for analysis in seen for h in batch_statistics(analysis) if h.node.output[0] not in left]
    return [(display_name(hazard.node), hazard.reason) for hazard in hazards]


def repaired_defects(
    original: Model, target: Target, precision: Precision, passes: Sequence[PassResult]
) -> Iterator[tuple[Quirk, tuple[str, ...]]]:
    """Known defects of the target that the model met, and that a pass, the plan or the build repairs."""
    changed = {step.name for step in passes if step.changes}
    for quirk, nodes in met(original, repairs(target, LOW_TYPES[precision])):
        if quirk.repairing_pass in changed or quirk.build or quirk.lower:
            yield quirk, tuple(map(display_name, nodes))
