"""Hazard rules about decomposed normalisations, and about the epsilons of divisions, roots and logarithms."""

from collections.abc import Iterator
from dataclasses import replace

from onnx import NodeProto

from rewriter.base.errors import Severity
from rewriter.hazards.analysis import GraphAnalysis, Hazard
from rewriter.hazards.magnitude import FP16_FLUSH, FP16_MIN_NORMAL
from rewriter.hazards.small_values import steep_operand
from rewriter.ir.graph import display_name
from rewriter.ir.graph.match import is_only_divisor
from rewriter.ir.graph.ops import VIEWS
from rewriter.ir.patterns.norms import Norm
from rewriter.ir.plan import HEADROOM, Evidence, NormHazard, Range

FP16_DIVISOR = 2.0**-20
"""Smallest accepted divisor: a subnormal number that FP16 holds to 5 bits, and never as zero."""

MEAN_RATIO = 8.0
"""Largest accepted ratio of a tensor to its deviation from the mean. Rounding the mean, by 2^-12 at most,
then shifts the normalised values by less than 2^-9 of their size."""


def unfused_norm(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Decomposed normalisations, whose squares overflow long before their input does.

    With `measured_norms`, if the measured squares are in range, only the nodes that depend on epsilon stay in
    FP32: without epsilon, a constant input would divide by zero. An L2 norm stays in FP32 as a whole, or only
    its root if all measured roots are normal numbers. `mixed-precision` then raises the epsilon of its
    maximum, for rows of zeros, to FP16's smallest normal number. With that, two SwiftFormers needed 0.98 of
    the time on an H200, at 1.02 times the error.
    """
    for norm in analysis.norms:
        tensor, severity, reason, evidence = _inside(analysis, norm)
        reason += ", and their variance E[x^2] - E[x]^2 cancels" if norm.cancels else ""
        nodes: tuple[NodeProto, ...] = norm.nodes
        root = _root(analysis, norm) if norm.epsilon < FP16_MIN_NORMAL else ()
        whole = any(norm.output in node.output for node in root)  # it needs no more Casts so
        if fits_inside(analysis, norm) and not whole:
            tensor, nodes, evidence = norm.input, root, "epsilon"
            reason = f"{norm.epsilon:.3g} under the root of {norm.name} is below FP16's normal range"
        elif evidence == "epsilon":
            nodes = _before_maximum(analysis, norm) or nodes
        about = NormHazard(norm.kind, norm.output, evidence)
        hazards = (analysis.hazard(node, "unfused-norm", reason, tensor, severity) for node in nodes)
        yield from (replace(hazard, norm=about) for hazard in hazards)


def _inside(analysis: GraphAnalysis, norm: Norm) -> tuple[str, Severity, str, Evidence]:
    """The tensor with the largest value inside a norm, a severity, the reason, and the kind of evidence."""
    written = ((t, node) for node in norm.nodes for t in node.output if t != norm.output)
    inner = [(t, node) for t, node in written if analysis.is_float(t)]
    measured = [(r.absmax, t, node) for t, node in inner if (r := analysis.range(t)) is not None]
    part = f"the decomposed {norm.kind} that ends in {norm.output}"
    worst, tensor, node = max(measured, key=lambda entry: entry[0], default=(0.0, norm.input, None))
    if node is not None and worst > analysis.limit:
        what: Evidence = "squares" if analysis.squares(node) or node.op_type == "ReduceSum" else "values"
        beyond = worst > analysis.largest
        reason = f"{what} inside {part} {'exceed' if beyond else 'come within a factor of 2 of'}"
        severity: Severity = "error" if beyond else "warning"
        severity = severity if analysis.lowered(tensor) else "note"
        return tensor, severity, f"{reason} {analysis.largest:.5g}", what
    lost = analysis.is_fp16 and norm.kind == "l2-normalize" and 0 < norm.epsilon < FP16_MIN_NORMAL
    if lost and measured and analysis.request.measured_norms:
        return norm.input, "note", f"{norm.epsilon:.3g} in {part} is below FP16's normal range", "epsilon"
    return norm.input, "note" if measured or not inner else "error", f"part of {part}", "unknown"


def _before_maximum(analysis: GraphAnalysis, norm: Norm) -> tuple[NodeProto, ...]:
    """The root of an L2 norm, with what it is taken of; () unless a maximum with epsilon guards its division
    that no measured root needs, nor one as much smaller as samples differ. `mixed-precision` raises epsilons
    in the main graph."""
    for index, node in enumerate(norm.nodes if norm.kind == "l2-normalize" and not analysis.scope else ()):
        if node.op_type in {"Clip", "Max"} and is_only_divisor(analysis.graph, node.output[0]):
            measured = analysis.range(node.input[0])
            if measured is not None and measured.low >= FP16_MIN_NORMAL * measured.headroom:
                return norm.nodes[:index]
    return ()


def _root(analysis: GraphAnalysis, norm: Norm) -> tuple[NodeProto, ...]:
    """The nodes of a norm that add epsilon and take the root, on small tensors.

    If the norm multiplies by the inverse of the root, all nodes from there to its end are included: the
    inverse of a small epsilon is no FP16 number, and two more roundings of every element would show.
    """
    radicands = {t for node in norm.nodes if (t := _radicand(analysis, node))}
    nodes: list[NodeProto] = []
    inverted: set[str] = set()
    for node in norm.nodes:
        adds = node.op_type in {"Add", "Max", "Clip"} and node.output[0] in radicands
        if _is_inverse(analysis, node) or inverted & set(node.input):
            inverted.update(node.output)
        if adds or _radicand(analysis, node) or node.output[0] in inverted:
            nodes.append(node)
    return tuple(nodes)


def fits_inside(analysis: GraphAnalysis, norm: Norm) -> bool:
    """True if FP16 holds everything measured inside a norm, with enough bits.

    It must also hold epsilon, which is the whole radicand where the input is constant. A variance as
    E[x^2] - E[x]^2 never fits: what remains of the digits that cancel is rounding.
    """
    if not analysis.is_fp16 or not analysis.request.measured_norms:
        return False
    divides = not any(_is_inverse(analysis, node) for node in norm.nodes)
    if norm.kind == "l2-normalize" or norm.cancels or norm.epsilon < (FP16_DIVISOR**2 if divides else 0.0):
        return False
    roots = {id(node) for node in _root(analysis, norm)}
    halves = [node for node in norm.nodes if id(node) not in roots]
    inner = [t for node in halves for t in node.output if t != norm.output and analysis.is_float(t)]
    measured = [analysis.range(t) for t in inner if not analysis.is_constant(t)]
    limit = analysis.largest / HEADROOM**2  # squaring an operand squares its head-room, too
    if any(m is None or not m.absmax <= limit for m in measured):
        return False
    radicands = [analysis.range(t) for node in norm.nodes if (t := _radicand(analysis, node))]
    normal = bool(radicands) and all(m is not None and m.low >= FP16_MIN_NORMAL for m in radicands)
    return normal and _centres(analysis, norm)


def _is_inverse(analysis: GraphAnalysis, node: NodeProto) -> bool:
    divides = node.op_type == "Reciprocal" or (node.op_type == "Div" and analysis.is_constant(node.input[0]))
    return divides or analysis.exponent(node) < 0


def _radicand(analysis: GraphAnalysis, node: NodeProto) -> str | None:
    """The tensor that a node takes the root of."""
    return node.input[0] if analysis.exponent(node) < 1 else None


def _centres(analysis: GraphAnalysis, norm: Norm) -> bool:
    """True if subtracting the mean does not cancel: a rounded mean shifts all values."""
    before = analysis.range(norm.input)
    after = [analysis.range(n.output[0]) for n in norm.nodes if n.op_type == "Sub"]
    return before is not None and all(m and before.mean_abs <= MEAN_RATIO * m.mean_abs for m in after)


def lost_epsilon(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """A constant below FP16's smallest normal number that guards a division, root or logarithm.

    The island reaches from the sum of squares, whose small values would vanish, to the guarded node.
    """
    if not analysis.is_fp16:
        return
    sums = VIEWS | {"ReduceSum", "ReduceMean", "ReduceL2", "Sqrt", "Pow"}
    fits = (n for n in analysis.norms if fits_inside(analysis, n) or _before_maximum(analysis, n))
    settled = {id(node) for norm in fits for node in norm.nodes}
    for node in analysis.nodes:
        hazard = _epsilon(analysis, node) if id(node) not in settled else None
        guarded = _guarded(analysis, node.output[0]) if hazard else []
        if hazard is None or not guarded:
            continue
        epsilon, other = hazard
        reason = f"{epsilon:.3g} in {display_name(node)} is below FP16's normal range"
        severity = _epsilon_severity(epsilon, analysis.range(other))
        before = analysis.upstream(other, lambda n: n.op_type in sums or analysis.squares(n))
        for inner in (*before, node, *guarded):
            yield analysis.hazard(inner, "epsilon", reason, other, severity, display_name(node))


def _epsilon_severity(epsilon: float, measured: Range | None) -> Severity:
    """Error if the samples needed the guard and FP16 loses it; a note if all values are normal numbers."""
    if measured is None:
        return "warning"
    if measured.low < FP16_FLUSH and epsilon <= FP16_FLUSH:
        return "error"
    return "warning" if measured.low < FP16_MIN_NORMAL else "note"


def _epsilon(analysis: GraphAnalysis, node: NodeProto) -> tuple[float, str] | None:
    """The epsilon that a node adds, or uses as a bound, and the tensor that it guards."""
    pairs = {"Add": ((0, 1), (1, 0)), "Max": ((0, 1), (1, 0)), "Clip": ((1, 0),), "Where": ((1, 2), (2, 1))}
    for index, other in pairs.get(node.op_type, ()):
        if len(node.input) <= max(index, other):
            continue
        value = analysis.scalar(node.input[index])
        if value is None or not 0 < value < FP16_MIN_NORMAL:
            continue
        measured = analysis.range(node.input[other])
        if measured is None or not measured.low > 1.0:  # else epsilon has no effect
            return value, node.input[other]
    return None


def _guarded(analysis: GraphAnalysis, tensor: str) -> list[NodeProto]:
    """The nodes from an epsilon to the division, root or logarithm that it protects."""
    between = VIEWS | {"Sqrt", "Pow", "Min"}  # a Clip is a Max, which writes the epsilon, and a Min
    path = analysis.downstream(tensor, lambda n: n.op_type in between)
    steep = [(node, steep_operand(analysis, node) == name) for name, node in path]
    if not any(is_steep for _, is_steep in steep):
        return []
    return [node for node, is_steep in steep if is_steep or node.op_type in between]
