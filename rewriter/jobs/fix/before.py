"""The error that a model has in reduced precision before anything is repaired, beside that of the result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from rewriter.hazards.kinds import Hazard
from rewriter.hazards.planning.planner import surveys
from rewriter.hazards.survey import LARGEST, LOW_TYPES, PrecisionRequest, Survey
from rewriter.hazards.types import generated, no_lower_type
from rewriter.ir.base import Context
from rewriter.ir.errors import RewriterError
from rewriter.ir.graph.casts import TypeRequest, retype
from rewriter.ir.model import Array, Model, walk_graphs
from rewriter.ir.model import facts as tensor_facts
from rewriter.ir.plan import Precision, node_key
from rewriter.judge.arithmetic_checks import check_emulation
from rewriter.judge.expected import Expected, Outputs, as_declared, run_all
from rewriter.judge.judge import Standard
from rewriter.pipeline import text as pipeline
from rewriter.pipeline.driver import Driver
from rewriter.runtime.emulation import Accumulation, emulation
from rewriter.runtime.emulation.divergence import diverge
from rewriter.runtime.figures.outputs import OutputComparison


def errors_before(
    original: Model,
    expected: Expected,
    samples: Sequence[Mapping[str, Array]],
    precision: Precision,
    accumulation: Accumulation,
    standard: Standard | None = None,
) -> tuple[OutputComparison, ...]:
    """The outputs of the original, emulated with every node in `precision` that can be, against FP32.

    Returns:
        One comparison for each output; () if it cannot be emulated.
    """
    try:
        lowered = _lowered(original, precision)
        return check_emulation(expected, lowered, precision, samples, accumulation, standard).outputs
    except RewriterError:  # a figure for comparison only: what the model itself lacks is reported elsewhere
        return ()


@dataclass(frozen=True, eq=False)
class Emulated:
    """One sample through an emulated model.

    Attributes:
        name: As a caption. `outputs`: by name.
        errors: Relative L2 of each tensor that the model shares with the original.
    """

    name: str
    outputs: Outputs = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SideBySide:
    """One sample in the original, in plain reduced precision, and in the result: what the page shows.

    Attributes:
        sample: Its number among those that results are judged by.
        inputs: Its arrays. `expected`: outputs of the original.
    """

    sample: int
    inputs: Outputs
    expected: Outputs
    plain: Emulated
    fixed: Emulated


def side_by_side(
    original: Model,
    structured: Model,
    fixed: Model,
    number: int,
    sample: Outputs,
    expected: Outputs,
    precision: Precision,
    accumulation: Accumulation,
) -> SideBySide:
    """Runs one sample through the lowered original and through the result; empty where that is impossible.

    Args:
        structured: The result before its types changed.
    """

    def emulated(name: str, wide: Model, low: Model) -> Emulated:
        found = diverge(wide, low, [sample], accumulation)
        model = emulation(low, tensor_facts.infer(low), accumulation, tf32=True)
        (outputs,) = run_all(model, [as_declared(low, sample)])
        return Emulated(name, outputs, {node.tensor: node.total for node in found.nodes})

    plain, result = Emulated(f"Plain {precision.upper()}"), Emulated("Fixed")
    with suppress(RewriterError):
        inlined = _inlined(original)
        plain = emulated(plain.name, inlined, _lowered(inlined, precision))
    with suppress(RewriterError):
        result = emulated(result.name, structured, fixed)
    return SideBySide(number, sample, expected, plain, result)


def _inlined(original: Model) -> Model:
    if not original.proto.functions:
        return original
    return Driver().run(original, pipeline.parse("inline-functions"), Context(original.opset))[0]


def _lowered(original: Model, precision: Precision) -> Model:
    model = _inlined(original)
    low, facts = LOW_TYPES[precision], tensor_facts.infer(model)
    model = _with_infinities(model, LARGEST[low])
    kept = {
        node_key(survey.scope, hazard.node)
        for survey in surveys(model, facts, {}, PrecisionRequest(precision))
        for hazard in (*no_lower_type(survey), *generated(survey), *_as_it_came(survey))
    }

    def node_type(scope: int, node: NodeProto) -> int:
        return LOW_TYPES["fp32"] if node_key(scope, node) in kept else low

    return retype(model, facts, TypeRequest(node_type, tag="before"))


def _as_it_came(survey: Survey) -> Iterator[Hazard]:
    """The FP32 nodes of a model that computes in FP16 elsewhere: nothing lowers them before `fix`."""
    for node in survey.nodes if survey.mixed else ():
        if survey.in_fp32(node):
            yield Hazard(node, "existing-island", "FP32 in the file")


def _with_infinities(model: Model, largest: float) -> Model:
    """The model with infinity for every FP32 constant that the lower type cannot hold, as converters do."""
    changed = model.copy()
    for graph in walk_graphs(changed.proto.graph):
        attributes = [a for node in graph.node if node.op_type == "Constant" for a in node.attribute]
        for attribute in attributes:
            if attribute.name == "value_float" and largest < abs(attribute.f) < math.inf:
                attribute.f = math.copysign(math.inf, attribute.f)
        # only initializers of the main graph may have their data elsewhere
        made = changed.detached_tensor if graph is changed.proto.graph else _attached
        for tensor in graph.initializer:
            if (infinite := _infinite(changed, tensor, largest)) is not None:
                tensor.CopyFrom(made(tensor.name, infinite))
        for tensor in (a.t for a in attributes if a.name == "value"):
            if (infinite := _infinite(changed, tensor, largest)) is not None:
                tensor.CopyFrom(_attached(tensor.name, infinite))
    return changed


def _attached(name: str, array: Array) -> TensorProto:
    return numpy_helper.from_array(array, name)


def _infinite(model: Model, tensor: TensorProto, largest: float) -> Array | None:
    """An FP32 tensor with infinity for what is beyond `largest`; None if nothing is, or for other types."""
    if tensor.data_type != TensorProto.FLOAT:
        return None
    array = model.array(tensor)
    huge = np.isfinite(array) & (np.abs(array) > largest)
    if not huge.any():
        return None
    return np.where(huge, np.copysign(np.inf, array), array).astype(np.float32)
