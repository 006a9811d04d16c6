"""Hazard rules about resolution: values in range that need more than the lower type's 11 or 8 bits."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto, TensorProto

from rewriter.graph import attribute, label
from rewriter.graph.ops import CHEAP, COMPUTE_BOUND, INEQUALITIES, SELECTIONS, VIEWS
from rewriter.hazards.kinds import Hazard, Severity
from rewriter.hazards.survey import Survey, Through
from rewriter.model.facts import FLOATS
from rewriter.model.schemas import FP32_INPUTS

EXACT_INTEGERS: dict[int, int] = {TensorProto.FLOAT16: 2048, TensorProto.BFLOAT16: 256}
"""All integers up to this one are exact: significands have 11 and 8 bits."""

PHASE_LIMIT = 4.0
"""Rounding an angle to 11 bits turns it by up to 4 * 2^-12 = 1e-3 rad if it is 4 rad, and by more beyond."""

POSITIONAL = VIEWS | frozenset("Add Sub Mul Div Neg Pow Exp Log Sqrt Reciprocal Floor Mod Cast Range".split())
"""Operators that compute position and timestep embeddings, up to Sin and Cos."""


def phase(survey: Survey) -> Iterator[Hazard]:
    """Large angles of Sin and Cos that are computed from positions, timesteps and constants only.

    An angle that a network's layer computes is inexact already: FP32 would not help.
    """
    for node in survey.nodes:
        if node.op_type not in {"Sin", "Cos"}:
            continue
        measured = survey.range(node.input[0])
        if measured is not None and measured.absmax <= PHASE_LIMIT:
            continue
        sources = _position_arithmetic(survey, node.input[0])
        reason = f"angle of {label(node)}: rounding it to 11 bits turns it"
        for inner in (node, *sources) if sources else ():
            yield survey.hazard(inner, "phase", reason, node.input[0])


def _position_arithmetic(survey: Survey, tensor: str) -> list[NodeProto]:
    """The nodes that compute `tensor` from inputs and constants; [] if a layer takes part."""
    found = list(survey.upstream(tensor, lambda n: True))
    exact = all(n.op_type in POSITIONAL or _is_outer_product(survey, n) for n in found)
    return found if exact else []


def _is_outer_product(survey: Survey, node: NodeProto) -> bool:
    """True for a product without a sum, as rotary embeddings multiply positions by frequencies."""
    if node.op_type == "Einsum":
        terms, _, result = attribute(node, "equation", "").partition("->")
        return set(terms) - set(", ") <= set(result)
    shape = survey.graph.shape(node.input[0]) if node.op_type == "MatMul" else None
    return shape is not None and shape[-1:] == (1,)


def positions(survey: Survey) -> Iterator[Hazard]:
    """Integers carried as floats beyond the lower type's exact ones, while they stay that large."""
    exact = EXACT_INTEGERS[survey.request.low]

    def beyond(node: NodeProto) -> bool:
        measured = survey.range(node.output[0])
        return node.op_type in POSITIONAL and measured is not None and measured.absmax > exact

    for node in survey.nodes:
        if not _counts(survey, node) or not beyond(node):
            continue
        name = node.output[0]
        reason = f"{name} holds integers beyond {exact}"
        cheap = (reader for _, reader in survey.downstream(name, beyond) if reader.op_type in CHEAP)
        yield from (survey.hazard(inner, "positions", reason, name) for inner in (node, *cheap))


def _counts(survey: Survey, node: NodeProto) -> bool:
    """True if a node converts integers to floats."""
    return node.op_type == "Range" or (node.op_type == "Cast" and not survey.is_float(node.input[0]))


def integers(survey: Survey) -> Iterator[Hazard]:
    """Floats that become integers: 799.8 is 799, but rounded to 11 bits it is 800."""
    seen: set[str] = set()
    for node in survey.graph.nodes:
        if node.op_type not in {"Cast", "CastLike"} or not survey.is_float(node.input[0]):
            continue
        if survey.graph.dtype(node.output[0]) in FLOATS | {TensorProto.BOOL}:
            continue
        for source in survey.upstream(node.input[0], _outside_stream(survey), seen):
            yield Hazard(source, "integers", f"becomes an integer in {label(node)}")


def coordinates(survey: Survey) -> Iterator[Hazard]:
    """Sampling coordinates need more than 11 bits: 1/2048 of an image is a pixel, not a fraction of one.

    The sampling node is kept in FP32, too: it costs only bandwidth. Of a Resize, only the nodes that
    compute its scales and roi are kept.
    """
    inputs = {"GridSample": 1, "RoiAlign": 1, "NonMaxSuppression": 0, "AffineGrid": 0}
    seen: set[str] = set()
    for node in survey.nodes:
        kept = [inputs[node.op_type]] if node.op_type in inputs else FP32_INPUTS.get(node.op_type, ())
        reason = f"coordinates of {label(node)}"
        severity: Severity = "warning" if node.op_type in inputs else "note"
        if node.op_type in inputs:
            yield Hazard(node, "coordinates", reason, severity=severity)
        for tensor in (node.input[index] for index in kept if index < len(node.input)):
            for source in survey.upstream(tensor, lambda n: n.op_type in CHEAP - {"Softmax"}, seen):
                yield Hazard(source, "coordinates", reason, severity=severity)


def order(survey: Survey) -> Iterator[Hazard]:
    """Values that TopK and ArgMax must tell apart: rounding makes them equal."""
    seen: set[str] = set()
    for node in survey.nodes:
        if node.op_type not in SELECTIONS:
            continue
        reason = f"order of {label(node)}"
        severity: Severity = "warning" if node.op_type == "TopK" else "note"
        yield Hazard(node, "order", reason, severity=severity)
        for source in survey.upstream(node.input[0], _outside_stream(survey), seen):
            yield Hazard(source, "order", reason, severity=severity)


def _outside_stream(survey: Survey) -> Through:
    """Accepts cheap nodes whose results no matrix operator reads: scores, not features."""

    def accepts(node: NodeProto) -> bool:
        readers = (reader for t in node.output if survey.is_float(t) for _, reader in survey.readers(t))
        return node.op_type in CHEAP and not any(r.op_type in COMPUTE_BOUND for r in readers)

    return accepts


def comparisons(survey: Survey) -> Iterator[Hazard]:
    """Comparisons of floats that a layer computed: rounding decides where they are nearly equal.

    Floats that are computed from integers and constants only are left out.
    """
    computed = _computed_by_matrix_ops(survey)
    for node in survey.graph.nodes:
        if node.op_type not in INEQUALITIES | {"Equal"}:
            continue
        tensor = next((t for t in node.input if survey.source(t) in computed), None)
        if tensor is not None:
            yield Hazard(node, "comparison", f"rounding may turn {node.op_type} over", tensor)


def _computed_by_matrix_ops(survey: Survey) -> set[str]:
    """The float tensors that depend on a matrix operator."""
    found: set[str] = set()
    for node in survey.nodes:
        if node.op_type in COMPUTE_BOUND or any(survey.source(t) in found for t in node.input if t):
            found.update(t for t in node.output if survey.is_float(t))
    return found


def made_of_integers(survey: Survey) -> set[str]:
    """The float tensors computed from integers and constants by arithmetic that keeps integers."""
    keeps = VIEWS | frozenset("Add Sub Mul Neg Abs Min Max Clip Floor Cast Range Where Trilu".split())
    found: set[str] = set()
    for node in survey.nodes:
        floats = [survey.source(t) for t in node.input if survey.is_float(t)]
        if node.op_type in keeps and all(t in found or survey.is_constant(t) for t in floats):
            found.update(node.output)
    return found
