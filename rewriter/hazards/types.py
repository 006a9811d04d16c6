"""Hazard rules about types: nodes that keep theirs, and models that hold lower types already."""

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from rewriter.hazards.analysis import LARGEST, GraphAnalysis, Hazard
from rewriter.hazards.magnitude import FP16_MIN_NORMAL
from rewriter.ir.graph import attribute, casts_to, display_name
from rewriter.ir.graph.ops import QUANTISING, SAME_VALUES
from rewriter.ir.model.schemas import READS_BITS, SHORT_NAMES
from rewriter.ir.plan import NodePatterns, plugin_types
from rewriter.target.operators import refused_in_type

NO_LOWER_TYPE = frozenset({"no-lower-type", "no-schema", "unknown-type"})
"""Rules of nodes that no option lowers."""


def user_choice(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Nodes that the user keeps in FP32, by pattern or by operator."""
    choice = NodePatterns(analysis.request.keep_nodes, analysis.request.keep_ops)
    for node in analysis.nodes:
        yield from (Hazard(node, "user", f"kept by {request}") for request in choice.requests(node))


def no_lower_type(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Operators without a schema, without the lower type, or at tensors of unknown type."""
    plugins = plugin_types(analysis.request.plugin_types)
    for node in analysis.nodes:
        op, low, rules = node.op_type, analysis.low_name, analysis.rules(node)
        unknown = [t for t in (*node.input, *node.output) if t and not analysis.graph.dtype(t)]
        if op in READS_BITS:
            yield Hazard(node, "no-lower-type", f"{op} reads the bits of its input: it keeps its types")
        elif op in plugins:
            continue
        elif rules is None:
            yield Hazard(node, "no-schema", f"{op} has no ONNX schema: it keeps its types")
        elif unknown:
            yield Hazard(node, "unknown-type", f"the type of {unknown[0]} is not known: it keeps its types")
        elif refused := refused_in_type(node, analysis.graph, analysis.request.low, analysis.request.target):
            yield Hazard(node, "no-lower-type", refused)
        elif not rules.can_follow:
            version = analysis.opsets.get(node.domain, 1)
            yield Hazard(node, "no-lower-type", f"{op} has no {low} in opset {version}")


def unmeasured(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Nodes with a result that was never measured: it may hold anything."""
    branch = _branch_not_taken(analysis)
    for node in analysis.nodes:
        unknown = [t for t in node.output if analysis.is_float(t) and analysis.range(t) is None]
        if unknown:
            reason = branch or f"{unknown[0]} could not be measured"
            yield Hazard(node, "unmeasured", reason, unknown[0])


def _branch_not_taken(analysis: GraphAnalysis) -> str:
    """The reason why nothing new in a branch of an If was measured; "" for measured or other graphs."""
    owner = analysis.graph.owner
    if owner is None or owner.op_type != "If":
        return ""
    nodes = (n for n in analysis.nodes if n.op_type not in SAME_VALUES)
    if any(analysis.range(t) is not None for n in nodes for t in n.output if analysis.is_float(t)):
        return ""
    called = [a.name for a in owner.attribute if a.g.name == analysis.graph.graph.name]
    branch = called[0] if len(called) == 1 else "one branch"
    return f"no sample takes {branch} of {display_name(owner)}, whose condition is {owner.input[0]}"


def quantized(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Q/DQ whose scale FP16 would flush; the plan keeps their neighbours in FP32 with them."""
    for node in analysis.nodes if analysis.is_fp16 else ():
        if node.op_type not in QUANTISING:
            continue
        scale = analysis.constant(node.input[1])
        if scale is None or np.any(scale < FP16_MIN_NORMAL):
            yield Hazard(node, "quantized", f"scale {node.input[1]} may be below FP16's normal range")


def generated(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """Random numbers: another type would give another sequence."""
    for node in analysis.nodes:
        if node.op_type.startswith("Random"):
            yield Hazard(node, "generated", f"{node.op_type} keeps its type")


def cast_pairs(analysis: GraphAnalysis) -> Iterator[Hazard]:
    """FP32 tensors that are cast to a lower type and back: they are rounded there, and may overflow.

    Converters to FP16 leave such pairs around nodes that they keep in FP32. Optimisers that remove the
    pairs change results: https://github.com/microsoft/onnxruntime/issues/20346. TensorRT-RTX 1.6.1 keeps
    them (measured).
    """
    for node in analysis.graph.nodes:
        to = attribute(node, "to", 0) if node.op_type == "Cast" else 0
        if to not in LARGEST or analysis.graph.dtype(node.input[0]) != TensorProto.FLOAT:
            continue
        readers = analysis.graph.consumers(node.output[0])
        back = next((r for r in readers if casts_to(r, TensorProto.FLOAT)), None)
        if back is None:
            continue
        measured = analysis.range(node.input[0])
        beyond = to == TensorProto.FLOAT16 and measured is not None and measured.absmax > LARGEST[to]
        low = SHORT_NAMES[to].upper()
        reason = f"{display_name(node)} rounds {node.input[0]} to {low}, and {display_name(back)} goes back"
        yield analysis.hazard(node, "cast-pair", reason, node.input[0], "error" if beyond else None)
