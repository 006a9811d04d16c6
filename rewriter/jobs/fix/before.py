"""The error of a model in reduced precision before anything is repaired, beside the result's error."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from onnx import NodeProto

from rewriter.base.errors import RewriterError
from rewriter.hazards.analysis import LOW_TYPES, PrecisionRequest
from rewriter.hazards.planning.planner import analyses
from rewriter.hazards.types import generated, no_lower_type
from rewriter.ir.graph.casts import TypeRequest, retype
from rewriter.ir.model import Array, Model
from rewriter.ir.plan import Precision, node_key
from rewriter.jobs.fix.attempt import Attempt
from rewriter.jobs.fix.workload import Workload
from rewriter.passes.base import Context
from rewriter.passes.upgrade_opset import UpgradeOpset
from rewriter.pipeline.driver import Driver, inlined
from rewriter.runtime.emulation import Accumulation, emulation
from rewriter.runtime.emulation.accumulate import FIRST_OPSET
from rewriter.runtime.emulation.divergence import diverge
from rewriter.verification.arithmetic_checks import check_emulation
from rewriter.verification.compare_runs import Standard
from rewriter.verification.expected import Expected, Outputs, as_declared, run_all
from rewriter.verification.verdict import Check


def check_before(
    original: Model,
    expected: Expected,
    samples: Sequence[Mapping[str, Array]],
    precision: Precision,
    accumulation: Accumulation,
    standard: Standard | None = None,
) -> Check | None:
    """Compares the original with every node in `precision` that can be; None if it cannot be emulated."""
    try:
        low = lowered(original, precision)
        return check_emulation(expected, low, precision, samples, accumulation, standard)
    except RewriterError:  # a figure for comparison only: what the model itself lacks is reported elsewhere
        return None


@dataclass(frozen=True, eq=False)
class Emulated:
    """One sample through an emulated model: its outputs, and errors of tensors that the original has, too.

    `name` is a caption; errors are relative L2.
    """

    name: str
    outputs: Outputs = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SideBySide:
    """One sample in the original, in plain reduced precision, and in the result: what the page shows.

    `sample` is its number among those that results are verified on; `expected` has outputs of the original.
    """

    sample: int
    inputs: Outputs
    expected: Outputs
    plain: Emulated
    fixed: Emulated


def side_by_side(attempt: Attempt, workload: Workload) -> SideBySide | None:
    """Runs the sample with the largest error through the lowered original and through the result.

    What cannot be run stays empty; None where nothing was lowered or compared.
    """
    verifier, check, accumulation = workload.verifier, attempt.arithmetic, workload.job.accumulation
    if check is None or not check.statistics or attempt.plan is None or verifier.expected is None:
        return None
    number = max(check.statistics, key=lambda entry: (entry.not_finite, entry.relative_l2)).sample
    sample, precision = verifier.samples[number], attempt.plan.precision

    def emulated(name: str, wide: Model, low: Model) -> Emulated:
        nodes = diverge(wide, low, [sample], accumulation)
        model = emulation(low, accumulation, tf32=True)
        (outputs,) = run_all(model, [as_declared(low, sample)])
        return Emulated(name, outputs, {node.tensor: node.total for node in nodes})

    plain, result = Emulated(f"Plain {precision.upper()}"), Emulated("Fixed")
    with workload.stage("comparing tensors"):
        with suppress(RewriterError):
            wide = inlined(workload.original)
            plain = emulated(plain.name, wide, lowered(wide, precision))
        with suppress(RewriterError):
            result = emulated(result.name, attempt.calibrated.model, attempt.fixed)
    return SideBySide(number, sample, verifier.expected.exact[number], plain, result)


def lowered(original: Model, precision: Precision) -> Model:
    """The model with every node in `precision` that can be, as a converter without rules writes it.

    Constants that the type cannot hold are infinite.
    """
    model = inlined(original)
    if model.opset < FIRST_OPSET:  # else its FP16 sums would not be emulated, unlike the result's
        model, _ = Driver().run(model, [UpgradeOpset()], Context())
    low = LOW_TYPES[precision]
    fp32 = set[str]()
    for analysis in analyses(model, {}, PrecisionRequest(precision)):
        nodes = [hazard.node for hazard in (*no_lower_type(analysis), *generated(analysis))]
        if analysis.mixed:  # the FP32 nodes of a model that computes in FP16 elsewhere: nothing lowers them
            nodes += filter(analysis.in_fp32, analysis.nodes)
        fp32 |= {node_key(analysis.scope, node) for node in nodes}

    def node_type(scope: int, node: NodeProto) -> int:
        return LOW_TYPES["fp32"] if node_key(scope, node) in fp32 else low

    return retype(model, TypeRequest(node_type, tag="before", overflows=True))
