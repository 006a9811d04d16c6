"""The workload that all attempts of a run share: the model, its samples and the verifier."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from rewriter.base.errors import ArithmeticRunError, NativeError
from rewriter.base.sandbox import processor_s
from rewriter.base.stopwatch import Stopwatch
from rewriter.hazards.analysis import LOW_TYPES
from rewriter.ir.model import Array, Model, load
from rewriter.jobs.fix import refusals
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.provenance import made_by_fix
from rewriter.jobs.search.effort import RunCost
from rewriter.jobs.search.trials import Memory
from rewriter.passes.base import Pass, Stage
from rewriter.pipeline.driver import Draft, PassResult
from rewriter.runtime.emulation import Accumulation
from rewriter.runtime.expectations import data_warnings
from rewriter.runtime.inputs import Samples
from rewriter.runtime.metrics.outputs import OutputComparison
from rewriter.runtime.metrics.probabilities import finds_nothing, probabilities
from rewriter.runtime.metrics.tolerances import TOLERANCES, Tolerance
from rewriter.runtime.ranges import Ranges
from rewriter.target.quirks import not_repaired
from rewriter.verification.compare_runs import Standard
from rewriter.verification.expected import MOST_SAMPLES, Expected, expected_outputs, judging, load_origin
from rewriter.verification.not_finite import nan_warnings
from rewriter.verification.verdict import Check
from rewriter.verification.verifier import Verifier

CHECKED_S = 60.0
"""CPU budget, in seconds, for emulating FP16 accumulation that the user did not request."""


@dataclass(frozen=True)
class CalibratedModel:
    """A model that a plan is made for, after `passes`, with the `checks` of its structure.

    `plain` is the model after the passes that plain FP16 has, too: its latency is estimated on that. `memory`
    is of searches for a plan.
    """

    model: Model
    plain: Model
    ranges: Ranges
    passes: tuple[PassResult, ...]
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True)
class Workload:
    """The model that all attempts start from, with its data and its verifier.

    Candidates with the same passes before a plan share a model in `calibrated`, and with the same first
    passes the outcome of these in `started`.
    """

    job: FixJob
    original: Model
    samples: Samples
    fitting: Samples  # those that a search may fit a plan to; ranges are measured on `samples`
    verifier: Verifier
    stage: Stopwatch
    warnings: tuple[str, ...]
    sample: Mapping[str, Array]  # arrays without memory, of the shapes of the first sample
    plain: Check | None = None  # the emulation of plain FP16 or BF16; None if nothing is verified
    calibrated: dict[tuple[Pass, ...], CalibratedModel] = field(default_factory=dict)
    started: dict[tuple[Pass, ...], tuple[Model, tuple[PassResult, ...]]] = field(default_factory=dict)
    drafts: list[Draft] = field(default_factory=list)  # as of `Driver`

    @property
    def before(self) -> tuple[OutputComparison, ...]:
        """Its outputs in plain FP16 or BF16; () if they are unknown."""
        return self.plain.outputs if self.plain is not None else ()


def read(job: FixJob) -> tuple[Model, Samples, list[str]]:
    """Returns the model and its samples, with warnings."""
    request, precision, original = job.request, job.precision, load(job.source)
    refusals.declare_plugins(original, precision.plugin_types)
    refusals.refuse_unknown_names(original, precision.keep_nodes)
    refusals.refuse_unknown_names(original, precision.lower.nodes, "lower")
    refusals.refuse_unknown_operators(original, precision.keep_ops, "keep-fp32-op")
    refusals.refuse_unknown_operators(original, precision.lower.ops, "lower-op")
    refusals.refuse_unknown_ports(original, precision.io)
    if request.verify and not job.deployment.plugins:  # a plugin may replace any operator
        refusals.refuse_unbuildable(original, precision.target, precision.plugin_types)
    samples = request.samples(original, job.deployment)
    again = made_by_fix(original)
    warnings = [*[again] * bool(again), *original.notes, *data_warnings(original, samples)]
    steps = job.first.steps
    uses_data = request.verify or any(step.stage in (Stage.RANGES, Stage.LOWERING) for step in steps)
    if not samples.source.real and uses_data:
        warnings.append(samples.source.text)
    warnings.extend(not_repaired(original, precision.target, LOW_TYPES[precision.precision]))
    return original, samples, warnings


def prepare(
    job: FixJob, stage: Stopwatch, folder: Path, original: Model, samples: Samples, warnings: list[str]
) -> Workload:
    """Runs the original; FP16 accumulation that the user did not request may become FP32."""
    request = job.request
    fitting, indices, judged, expected = samples, list[int](), list[dict[str, Array]](), None
    against, start, emulation_s = load_origin(request.against, original, job.metric), processor_s(), 0.0
    if request.verify:
        with stage("running the original"):
            try:
                default = job.accumulation_is_default
                sums, indices, judged, expected = judged_samples(
                    original, samples, job.accumulation, default=default, against=against
                )
                job = replace(job, accumulation=sums)
                fitting = samples.judged(indices, indices[0] if job.first.goal else None)
                cost = RunCost.of(original, processor_s() - start)
                emulation_s = cost.summed if sums == "fp16" else cost.exact
                warnings.extend(nan_warnings(original, judged, expected.of_model))
            except ArithmeticRunError as error:
                if isinstance(error.__cause__, NativeError) and error.__cause__.cause == "timeout":
                    raise  # measuring its ranges would take as long
                judged = list(islice(samples, 1))
                warnings.append(f"the original's outputs are not known: {error.what}")
    limit, fair = job.limit, request.metric is None
    asked = None if limit is None else Tolerance(limit.tolerance, limit.metric, "`tolerance`")
    defaults = TOLERANCES | {"fp32": TOLERANCES["tf32"]}  # results in FP32 run with TF32
    standard = Standard.of(original, defaults["fp32"], asked, fair=fair)
    verifier = Verifier(
        original=original,
        samples=judged,
        expected=expected,
        indices=indices,
        standards={n: replace(standard, tolerance=asked or default) for n, default in defaults.items()},
        deployment=job.deployment,
        spans={**fitting.source.spans, **job.deployment.profile},
        timeout_s=request.timeout,
        folder=folder,
        stage=stage,
        asked=asked is not None,
        against=against,
        verify=request.verify,
        build=request.build,
        emulation_s=emulation_s,
        target=job.precision.target,
        plugin_types=job.precision.plugin_types,
    )
    shapes = {name: np.shape(array) for name, array in next(iter(samples), {}).items()}
    sample = {name: np.broadcast_to(np.float32(), shape) for name, shape in shapes.items()}
    return Workload(job, original, samples, fitting, verifier, stage, tuple(warnings), sample)


def judged_samples(
    original: Model, samples: Samples, sums: Accumulation, *, default: bool, against: Model | None = None
) -> tuple[Accumulation, list[int], list[dict[str, Array]], Expected]:
    """Affordable sums, the samples that verify with their indices, and the original's outputs for them.

    Every sample verifies; where there is no time to emulate all, the widest do. The last one, which is kept
    from searches, comes first. Samples in which a detector finds nothing count only if there are no others:
    an error relative to such outputs means nothing.

    Args:
        default: True if the user did not request these sums.
        against: As in `expected_outputs`.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run the original.
    """
    last, start = len(samples) - 1, processor_s()
    feeds = [samples.feeds(last)]
    first = expected_outputs(original, feeds, against)
    cost = RunCost.of(original, processor_s() - start)
    sums = cost.sums(sums, CHECKED_S) if default else sums
    indices = [last, *judging(samples, cost.samples(sums, CHECKED_S, MOST_SAMPLES))[:-1]]
    feeds += [samples.feeds(index) for index in indices[1:]]
    more = expected_outputs(original, feeds[1:], against)
    exact, written = [*first.exact, *more.exact], [*first.as_written, *more.as_written]
    kinds = probabilities(original)
    telling = [n for n, outputs in enumerate(exact) if not finds_nothing(outputs, kinds)]
    telling = telling or [*range(len(indices))]
    states, own = [*first.states, *more.states], [*first.own, *more.own]
    chosen = ([values[n] for n in telling] if values else () for values in (exact, written, states, own))
    outputs = Expected(*chosen)
    return sums, [indices[n] for n in telling], [feeds[n] for n in telling], outputs
