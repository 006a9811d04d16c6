"""Rules that say which nodes must not compute in the lower precision, one function for each kind.

A rule looks at one graph with its measured ranges and yields hazards. It never edits, and it does
not know of the others. Here are the rules about types and wishes; the others have files of their own.

`RULES` decide what `fix` keeps in FP32. `SCAN_RULES` are what `scan` reports: most of those, and what
advises without deciding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from onnx import TensorProto

from rewriter.base import Kept
from rewriter.graph import GraphEditor, attribute
from rewriter.hazards.accumulation import accumulator_error, likely_partial_sums, partial_sums, running_sums
from rewriter.hazards.attention import linear_attention, masks, unbounded_masks
from rewriter.hazards.converted import cast_pairs, wide_integers
from rewriter.hazards.data import fp16_reference, outside_statistics
from rewriter.hazards.internal import (
    hidden_sums,
    inner_cube,
    inner_exponentials,
    inner_squares,
    inner_sums,
    long_softmax,
    norm_operators,
    steep_powers,
)
from rewriter.hazards.kept import KEPT, is_kept
from rewriter.hazards.loss import (
    cancellation,
    flushed_constants,
    overflowing,
    small_weights,
    vanishing,
    weights,
)
from rewriter.hazards.magnitude import FP16_MIN_NORMAL, lost_epsilon, overflow, underflow, unfused_norm
from rewriter.hazards.quirks import known_defects
from rewriter.hazards.resolution import comparisons, coordinates, integers, order, phase, positions
from rewriter.hazards.survey import CHEAP, Hazard, PrecisionRequest, Survey
from rewriter.model import holds_graphs

__all__ = ["KEPT", "RULES", "SCAN_RULES", "Hazard", "PrecisionRequest", "Rule", "Survey", "is_kept"]

Rule = Callable[[Survey], Iterable[Hazard]]


def user_choice(survey: Survey) -> Iterator[Hazard]:
    """Nodes that the user named, by pattern or by operator."""
    kept = Kept(survey.request.keep_nodes, survey.request.keep_ops)
    for node in survey.nodes:
        yield from (Hazard(node, "user", f"kept by {option}") for option in kept.options(node))


def user_island(survey: Survey) -> Iterator[Hazard]:
    """In a model that is mixed already, an FP32 node is its author's choice."""
    if not survey.mixed:
        return
    for node in survey.nodes:
        if survey.in_fp32(node):
            yield Hazard(node, "existing-island", "FP32 in a model that computes in FP16 elsewhere")


def no_lower_type(survey: Survey) -> Iterator[Hazard]:
    """Operators without a schema, without the lower type, or at tensors of unknown type."""
    low = "FP16" if survey.request.low == TensorProto.FLOAT16 else "BF16"
    for node in survey.nodes:
        rules = survey.ports(node)
        unknown = [t for t in (*node.input, *node.output) if t and not survey.graph.dtype(t)]
        if rules is None:
            yield Hazard(node, "no-schema", f"{node.op_type} has no ONNX schema: it keeps its types")
        elif unknown:
            yield Hazard(node, "unknown-type", f"the type of {unknown[0]} is not known: it keeps its types")
        elif not rules.can_follow:
            version = survey.opsets.get(node.domain, 1)
            yield Hazard(node, "no-lower-type", f"{node.op_type} has no {low} in opset {version}")


def unmeasured(survey: Survey) -> Iterator[Hazard]:
    """A node whose results were never seen may hold anything."""
    for node in survey.nodes:
        for tensor in node.output:
            if survey.is_float(tensor) and survey.range(tensor) is None:
                yield Hazard(node, "unmeasured", f"{tensor} could not be measured", tensor)
                break


def quantized(survey: Survey) -> Iterator[Hazard]:
    """Q/DQ whose scale FP16 would flush; what stands next to them follows in the plan."""
    for node in survey.nodes:
        if node.op_type not in {"QuantizeLinear", "DequantizeLinear"}:
            continue
        scale = survey.graph.constant(survey.source(node.input[1]))
        if survey.request.low == TensorProto.FLOAT16 and (scale is None or np.any(scale < FP16_MIN_NORMAL)):
            yield Hazard(node, "quantized", f"scale {node.input[1]} may be below FP16's normal range")


def accumulation(survey: Survey) -> Iterator[Hazard]:
    """A running sum rounds at every step, and a Loop or Scan at every iteration."""
    for node in survey.nodes:
        if node.op_type in {"Loop", "Scan", "CumSum"}:
            yield Hazard(node, "accumulation", "rounding would add up from step to step")
        elif holds_graphs(node) and node.op_type != "If":
            yield Hazard(node, "subgraph", f"{node.op_type} is not taken apart")


def state_update(survey: Survey) -> Iterator[Hazard]:
    """The cheap operators in a Loop's or Scan's body that write what the next iteration starts from."""
    for tensor in _states(survey.graph):
        if survey.is_float(tensor):
            for node in survey.upstream(tensor, lambda n: n.op_type in CHEAP):
                yield Hazard(node, "accumulation", f"state {tensor} goes from iteration to iteration", tensor)


def _states(graph: GraphEditor) -> list[str]:
    """Outputs of a body that are its states: Loop's behind the condition, Scan's before the scan outputs."""
    owner, outputs = graph.owner, [v.name for v in graph.graph.output]
    if owner is None or owner.op_type not in {"Loop", "Scan"}:
        return []
    if owner.op_type == "Loop":
        return outputs[1 : len(owner.input) - 1]
    return outputs[: len(owner.input) - attribute(owner, "num_scan_inputs")]


def generated(survey: Survey) -> Iterator[Hazard]:
    """Random numbers keep their type, and with it their sequence."""
    for node in survey.nodes:
        if node.op_type.startswith("Random"):
            yield Hazard(node, "generated", f"{node.op_type} keeps its type")


RULES: tuple[Rule, ...] = (
    user_choice,
    user_island,
    no_lower_type,
    unfused_norm,
    unbounded_masks,
    overflow,
    hidden_sums,
    norm_operators,
    long_softmax,
    likely_partial_sums,
    lost_epsilon,
    underflow,
    small_weights,
    phase,
    positions,
    integers,
    coordinates,
    order,
    quantized,
    accumulation,
    state_update,
    generated,
    unmeasured,
)
"""In order of precedence: the first rule that names a node gives the reason."""

SCAN_RULES: tuple[Rule, ...] = (
    unfused_norm,
    overflowing,
    hidden_sums,
    norm_operators,
    inner_squares,
    inner_exponentials,
    inner_cube,
    inner_sums,
    long_softmax,
    steep_powers,
    partial_sums,
    accumulator_error,
    running_sums,
    accumulation,
    state_update,
    lost_epsilon,
    vanishing,
    flushed_constants,
    weights,
    cancellation,
    masks,
    linear_attention,
    phase,
    positions,
    integers,
    coordinates,
    order,
    comparisons,
    quantized,
    cast_pairs,
    wide_integers,
    outside_statistics,
    fp16_reference,
    known_defects,
    unmeasured,
)
"""Every one of them reports: they do not compete for nodes."""
