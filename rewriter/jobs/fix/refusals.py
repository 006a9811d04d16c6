"""Models that nothing can be done about, and names that no node has, refused before anything is measured."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from onnx import NodeProto

from rewriter.ir.errors import LIKENESS, UnbuildableError, UsageError
from rewriter.ir.graph import label
from rewriter.ir.graph.ops import DYNAMIC_INT8
from rewriter.ir.model import Model, walk_graphs

LISTED = 3
"""Nodes that a refusal names, and names that it offers in place of one that fits nothing."""

QUANTISATION = ("QuantizeLinear", "DequantizeLinear")
ZERO_POINT = 2
"""Place of the zero point among their inputs."""


def refuse_unknown_names(model: Model, patterns: Iterable[str]) -> None:
    """Refuses patterns of `keep-fp32` that fit no node or output of the model.

    A pass names its nodes below those of the model, as in `/mix/Split`: such a pattern is not refused.

    Raises:
        UsageError: a pattern fits nothing; the error offers names that are like it.
    """
    nodes = [node for g in walk_graphs(model.proto.graph) for node in g.node]
    names = {name for node in nodes for name in (node.name, *node.output)} - {""}
    for pattern in patterns:
        above = pattern.rpartition("/")[0]
        if not any(fnmatchcase(name, p) for p in (pattern, above) if p for name in names):
            hint = f"there are {near_names(pattern, map(label, nodes))}"
            raise UsageError(f"no node has the name {pattern!r}", where="`keep-fp32`", hint=hint)


def near_names(name: str, present: Iterable[str]) -> str:
    """Names that are like one that fits nothing, or else the first of them all; "" if there are none."""
    known = list(dict.fromkeys(present))
    core = name.strip("*/?[]").lower()
    alike = [one for one in known if core and core in one.lower()]
    shown = alike or difflib.get_close_matches(name, known, LISTED, LIKENESS) or known
    return ", ".join(shown[:LISTED]) + " ..." * (len(shown) > LISTED)


def refuse_unbuildable(model: Model) -> None:
    """Refuses quantisation that no release of TensorRT builds: dynamic, or with zero points other than 0.

    Raises:
        UnbuildableError: the model has such nodes; it names them, and what to do instead.
    """
    refuse_dynamic_int8(model)
    refuse_zero_points(model)


def refuse_zero_points(model: Model) -> None:
    """Refuses Q/DQ nodes whose constant zero point is not 0: TensorRT quantises symmetrically alone.

    Raises:
        UnbuildableError: the model has such nodes; it names them, and what to do instead.
    """
    stored = {tensor.name: tensor for tensor in model.proto.graph.initializer}
    found = [
        node
        for g in walk_graphs(model.proto.graph)
        for node in g.node
        if node.op_type in QUANTISATION
        and len(node.input) > ZERO_POINT
        and node.input[ZERO_POINT] in stored
        and model.array(stored[node.input[ZERO_POINT]]).any()
    ]
    _refuse(
        model,
        found,
        "with zero points other than 0",
        "symmetrically (of onnxruntime.quantization: QuantType.QInt8, and ActivationSymmetric=True in "
        "extra_options)",
    )


def refuse_dynamic_int8(model: Model) -> None:
    """Refuses operators of dynamic INT8 quantisation: TensorRT has no importer for any of them.

    Raises:
        UnbuildableError: the model has such nodes; it names them, and what to do instead.
    """
    found = [node for g in walk_graphs(model.proto.graph) for node in g.node if node.op_type in DYNAMIC_INT8]
    _refuse(
        model,
        found,
        "dynamically to INT8",
        "statically, as Q/DQ nodes (onnxruntime.quantization.quantize_static with QuantFormat.QDQ)",
    )


def _refuse(model: Model, found: Sequence[NodeProto], how: str, instead: str) -> None:
    """Raises the error that names the nodes, if there are some.

    Args:
        how: How they are quantised.
        instead: How to quantise the FP32 model.
    """
    if not found:
        return
    counts = Counter(node.op_type for node in found)
    operators = ", ".join(f"{count} {op}" for op, count in counts.items())
    names = ", ".join(f"{label(node)} ({node.op_type})" for node in found[:LISTED])
    more = f", and {len(found) - LISTED} more" if len(found) > LISTED else ""
    raise UnbuildableError(
        f"it is quantised {how} ({operators}), which TensorRT does not build: {names}{more}",
        where=str(model.path) if model.path else "the model",
        hint=f"take the FP32 model that it was made from; for INT8, quantise that one {instead}",
    )
