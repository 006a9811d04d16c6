"""Hazard rules about resolution: values in range that need more than the lower type's 11 or 8 bits."""

import math
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace

from onnx import NodeProto, TensorProto

from rewriter.base.errors import Severity
from rewriter.hazards.accumulation import depth_of
from rewriter.hazards.analysis import GraphAnalysis, Hazard
from rewriter.ir.float_graph import Through
from rewriter.ir.graph import attribute, casts_to, display_name, ops
from rewriter.ir.graph.ops import CHEAP, COMPUTE_BOUND, INEQUALITIES, SELECTIONS, SOFTMAX, VIEWS
from rewriter.ir.model.schemas import FP32_INPUTS
from rewriter.ir.model.tensors import FLOATS

EXACT_INTEGERS: dict[int, int] = {TensorProto.FLOAT16: 2048, TensorProto.BFLOAT16: 256}
"""All integers up to this one are exact: significands have 11 and 8 bits. Rounding changes a number by half a
unit of them at most, relative to it: by the inverse of these."""

PHASE_LIMIT = 4.0
"""Rounding an angle to 11 bits turns it by up to 4 * 2^-12 = 1e-3 rad if it is 4 rad, and by more beyond."""

SINGLE = 2.0**-13
"""Part of float64 operands below which float32's 24 bits leave a difference fewer than the 11 of FP16."""

COORDINATES = 4
"""Terms of a product up to which it turns coordinates of space and time into angles or other coordinates."""

POSITIONAL = VIEWS | frozenset("Add Sub Mul Div Neg Pow Exp Log Sqrt Reciprocal Floor Mod Cast Range".split())
"""Operators that compute position and timestep embeddings, up to Sin and Cos."""


def float64_differences(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Differences of large float64 numbers: TensorRT computes them in float32, whatever is kept in FP32."""
    for node in (n for n in analysis.graph.nodes if n.op_type in {"Sub", "Add", "Mod"}):
        if analysis.graph.dtype(node.output[0]) != TensorProto.DOUBLE:
            continue
        operands, result = [analysis.range(t) for t in node.input], analysis.range(node.output[0])
        large = min((r.absmax for r in operands if r is not None), default=0.0)
        if len(operands) > 1 and None not in operands and result and result.absmax < SINGLE * large:
            name = display_name(node)
            reason = f"{name} leaves {result.absmax:.3g} of {large:.3g} in float64, TensorRT has float32"
            advice = "no plan repairs it: compute the difference outside, and pass it as an input"
            yield replace(analysis.hazard(node, "cancellation", reason, node.output[0]), repair=advice)


def phase(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Large angles of Sin and Cos that are computed from positions, timesteps and constants only.

    An angle that a network's layer computes is inexact already: FP32 would not help.
    """
    for node in analysis.nodes:
        if node.op_type not in {"Sin", "Cos"}:
            continue
        measured = analysis.range(node.input[0])
        if measured is not None and measured.absmax <= PHASE_LIMIT:
            continue
        sources = from_inputs(
            analysis, node.input[:1], lambda n: n.op_type in POSITIONAL or mixes_coordinates(analysis, n)
        )
        reason = f"angle of {display_name(node)}: rounding it to 11 bits turns it"
        for inner in (node, *sources) if sources else ():
            yield analysis.hazard(inner, "phase", reason, node.input[0], about=display_name(node))


def from_inputs(analysis: GraphAnalysis, tensors: Iterable[str], accepts: Through) -> list[NodeProto] | None:
    """The nodes that compute tensors from graph inputs and constants; None if one is not accepted."""
    refused: list[NodeProto] = []

    def through(node: NodeProto) -> bool:
        if not accepts(node):
            refused.append(node)
        return not refused

    seen: set[str] = set()
    nodes = [node for tensor in tensors for node in analysis.upstream(tensor, through, seen)]
    return None if refused else nodes


def mixes_coordinates(analysis: GraphAnalysis, node: NodeProto) -> bool:
    """True for a product of positions by frequencies: without a sum, or with one over coordinates."""
    if node.op_type == "Einsum":
        terms, _, result = attribute(node, "equation", "").partition("->")
        return set(terms) - set(", ") <= set(result)
    shape = analysis.graph.sizes(node.input[1]) if node.op_type in ops.CONVOLUTIONS else None
    pointwise = node.op_type in ops.PRODUCTS or (shape is not None and set(shape[2:]) == {1})
    depth = depth_of(analysis, node) if pointwise else None
    return depth is not None and depth <= COORDINATES


def positions(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Integers carried as floats beyond the lower type's exact ones, while they stay that large."""
    exact = EXACT_INTEGERS[analysis.request.low]

    def beyond(node: NodeProto) -> bool:
        measured = analysis.range(node.output[0])
        return node.op_type in POSITIONAL and measured is not None and measured.absmax > exact

    for node in analysis.nodes:
        counts = node.op_type == "Range" or (node.op_type == "Cast" and not analysis.is_float(node.input[0]))
        if counts and beyond(node):  # it converts integers to floats
            name = node.output[0]
            cheap = (reader for _, reader in analysis.downstream(name, beyond) if reader.op_type in CHEAP)
            reason = f"{name} holds integers beyond {exact}"
            yield from (analysis.hazard(inner, "positions", reason, name) for inner in (node, *cheap))


def float64_outputs(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Cheap nodes that only make float64 outputs: who asks for 53 bits of a result needs more than 11."""
    seen: set[str] = set()
    for node in analysis.graph.nodes if analysis.graph.is_main else ():
        name = node.output[0] if casts_to(node, TensorProto.DOUBLE) else ""
        if analysis.graph.is_output(name) and analysis.is_float(node.input[0]):
            for source in analysis.upstream(node.input[0], _outside_stream(analysis), seen):
                yield Hazard(source, "float64", f"{name} is a float64 output")


def integers(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Floats that become integers or decisions: 799.8 is 799, but rounded to 11 bits it is 800.

    A Cast needs FP32 in the cheap nodes before it, as far as no matrix operator reads them. Floor, Ceil,
    Round and comparisons occur in activations, too. They need FP32 where all before them is arithmetic on
    graph inputs, which FP32 makes exact, and the measured ranges reach a step.
    """
    seen: set[str] = set()
    steps = ROUNDING | COMPARISONS
    exact = _of_integers(analysis) if any(n.op_type in steps for n in analysis.graph.nodes) else set()
    for node in analysis.graph.nodes:
        floats = [t for t in node.input if analysis.is_float(t)]
        if node.op_type in {"Cast", "CastLike"} and floats:
            if analysis.graph.dtype(node.output[0]) not in FLOATS | {TensorProto.BOOL}:
                for source in analysis.upstream(node.input[0], _outside_stream(analysis), seen):
                    name = display_name(node)
                    yield Hazard(source, "integers", f"becomes an integer in {name}", about=name)
        elif node.op_type in steps and _reaches_step(analysis, node, exact):
            sources = from_inputs(analysis, floats, lambda n: n.op_type in CHEAP - SOFTMAX)
            rests = (r for t in node.output for _, r in analysis.readers(t) if r.op_type == "Sub")
            if sources is not None:
                reason = f"rounding would move it over a step of {display_name(node)}"
                for source in (node, *sources, *(rests if node.op_type in ROUNDING else ())):
                    yield Hazard(source, "integers", reason, about=display_name(node))


ROUNDING = frozenset({"Floor", "Ceil", "Round"})
COMPARISONS = INEQUALITIES | {"Equal"}


def _of_integers(analysis: GraphAnalysis) -> set[str]:
    """The float tensors computed from integers and constants by arithmetic that keeps integers."""
    keeps = VIEWS | frozenset("Add Sub Mul Neg Abs Min Max Clip Floor Cast Range Where Trilu".split())
    tensors: set[str] = set()
    for node in analysis.nodes:
        floats = [analysis.source(t) for t in node.input if analysis.is_float(t)]
        if node.op_type in keeps and all(t in tensors or analysis.is_constant(t) for t in floats):
            tensors.update(node.output)
    return tensors


def _reaches_step(analysis: GraphAnalysis, node: NodeProto, exact: AbstractSet[str]) -> bool:
    """True if an operand may lie so close to an integer, or to the other operand, that rounding decides.

    Rounding changes no sign. `exact`: tensors that hold integers, which the lower type holds, too.
    """
    step = 1.0 / EXACT_INTEGERS[analysis.request.low]
    ranges = [r for t in node.input if (r := _widened(analysis, t, step)) is not None]
    holds = all(analysis.is_constant(t) or analysis.source(t) in exact for t in node.input)
    if holds or len(ranges) < len(node.input):
        return False
    low, high = max(low for low, _ in ranges), min(high for _, high in ranges)
    if node.op_type in ROUNDING:
        half = 0.5 if node.op_type == "Round" else 0.0
        return math.ceil(low - half) <= high - half
    return low <= high and not any(analysis.scalar(t) == 0 for t in node.input)


def _widened(analysis: GraphAnalysis, tensor: str, step: float) -> tuple[float, float] | None:
    """The range of a tensor with what rounding may add; None if it is unknown."""
    value = analysis.constant(tensor)
    if value is not None and value.size:
        return float(value.min()), float(value.max())
    measured = analysis.range(tensor)
    if measured is None or not measured.finite:
        return None
    return measured.low - step * abs(measured.low), measured.high + step * abs(measured.high)


def coordinates(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Sampling coordinates need more than 11 bits: 1/2048 of an image is a pixel, not a fraction of one.

    The sampling node is kept in FP32, too: it costs only bandwidth. Of a Resize, only the nodes that
    compute its scales and roi are kept.
    """
    inputs = {"GridSample": 1, "RoiAlign": 1, "NonMaxSuppression": 0, "AffineGrid": 0}
    seen: set[str] = set()
    for node in analysis.nodes:
        indices = [inputs[node.op_type]] if node.op_type in inputs else FP32_INPUTS.get(node.op_type, ())
        reason = f"coordinates of {display_name(node)}"
        severity: Severity = "warning" if node.op_type in inputs else "note"
        if node.op_type in inputs:
            yield Hazard(node, "coordinates", reason, severity=severity)
        for tensor in (node.input[index] for index in indices if index < len(node.input)):
            for source in analysis.upstream(tensor, lambda n: n.op_type in CHEAP - {"Softmax"}, seen):
                yield Hazard(source, "coordinates", reason, severity=severity, about=display_name(node))


def order(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Values that TopK and ArgMax must tell apart: rounding makes them equal."""
    seen: set[str] = set()
    for node in analysis.nodes:
        if node.op_type not in SELECTIONS:
            continue
        reason = f"order of {display_name(node)}"
        severity: Severity = "warning" if node.op_type == "TopK" else "note"
        for source in (node, *analysis.upstream(node.input[0], _outside_stream(analysis), seen)):
            yield Hazard(source, "order", reason, severity=severity, about=display_name(node))


def _outside_stream(analysis: GraphAnalysis) -> Through:
    """Accepts cheap nodes whose results no matrix operator reads: scores, not features."""

    def accepts(node: NodeProto) -> bool:
        readers = (reader for t in node.output if analysis.is_float(t) for _, reader in analysis.readers(t))
        return node.op_type in CHEAP and not any(r.op_type in COMPUTE_BOUND for r in readers)

    return accepts
