"""`verify`: the fixed model against the original, on the best engine of this machine."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rewriter.base.errors import ArithmeticRunError, EngineError, UsageError
from rewriter.base.stopwatch import Progress, Stopwatch, silent
from rewriter.hazards.analysis import PrecisionRequest
from rewriter.hazards.planning.planner import analyses, make_plan
from rewriter.ir.model import Model, load, walk_graphs
from rewriter.ir.model.output_files import work_folder
from rewriter.ir.model.schemas import EXCHANGEABLE
from rewriter.ir.model.split import Split
from rewriter.ir.plan import Plan
from rewriter.jobs import plugins
from rewriter.jobs.fix.provenance import (
    PRECISION,
    SAMPLES,
    WORSE,
    noted,
    noted_target,
    noted_tolerance,
    sums_of,
)
from rewriter.jobs.search.effort import pays_on_cuda
from rewriter.pipeline.options import VerifyOptions
from rewriter.runtime.emulation import Accumulation, reference
from rewriter.runtime.engines.measure import measure
from rewriter.runtime.engines.onnxruntime import on_cuda
from rewriter.runtime.engines.onnxruntime_library import NoKernelError
from rewriter.runtime.engines.protocol import EngineOutcome, Latency, MeasureSettings, Timing
from rewriter.runtime.engines.this_machine import ENGINES, Choice
from rewriter.runtime.expectations import data_warnings
from rewriter.runtime.inputs import Samples
from rewriter.runtime.inputs.samples import DataSource
from rewriter.runtime.metrics.metrics import named
from rewriter.runtime.metrics.outputs import OutputStatistics
from rewriter.runtime.metrics.tolerances import TOLERANCES, Tolerance, precision_of
from rewriter.runtime.ranges import measure as measured
from rewriter.target import Target
from rewriter.verification.build_check import judged_report
from rewriter.verification.compare_runs import BuildRun, Standard, run_check
from rewriter.verification.expected import (
    MOST_SAMPLES,
    Expected,
    as_declared,
    expected_outputs,
    judging,
    load_origin,
    require_same_ports,
    unshown,
)
from rewriter.verification.not_finite import nan_warnings
from rewriter.verification.verdict import CPU, Check, Verdict, remark
from rewriter.verification.verifier import Verifier, noise_reason


@dataclass(frozen=True, repr=False)
class VerifyOutcome:
    """The outcome of `verify`.

    Attributes:
        engine: Library and version, or `emulation`. `device`: the GPU, or `CPU`.
        outputs: The worst sample and build of each output, in the order of the model's outputs.
        latency: Of the fixed model's first build; `reference_latency`: of the original in FP32, without
            TF32. None if not timed.
        verdict: The checks: `reference`, `run` or `emulation`, `build`.
        warnings: Sentences for the user; the first one reports if no GPU was used.
        lowered: True if something of the fixed model is in reduced precision. `floats`: if it has floats.
            `all_fp32`: if nothing is, though it has floats and does not note that FP32 was the request.
        worse: The outputs on which plain FP16 is more accurate, as `fix` noted them in the file.
        seconds: Wall time by stage, in order.
    """

    original: Path | None
    fixed: Path | None
    engine: str
    device: str
    tolerance: Tolerance
    data: DataSource
    outputs: tuple[OutputStatistics, ...] = ()
    builds: tuple[BuildRun, ...] = ()
    latency: Latency | None = None
    reference_latency: Latency | None = None
    verdict: Verdict = field(default_factory=lambda: Verdict(()))
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    worse: str = ""
    lowered: bool = True
    floats: bool = True
    all_fp32: bool = False

    @property
    def passed(self) -> bool:
        """True if at least one check was made and none failed."""
        return self.verdict.passed

    @property
    def checks(self) -> tuple[Check, ...]:
        return self.verdict.checks


def verify(original: Any, fixed: Any, request: VerifyOptions, progress: Progress = silent) -> VerifyOutcome:
    """Compares a fixed model with its original; see `rewriter.verify`."""
    with work_folder() as folder:
        return verify_in(folder, original, fixed, request, progress)


ENGINE, KERNELS = Path("fixed", "000-0.engine"), "kernels"
"""In the folder of `verify_in`: the engine of the fixed model, and kernels (`MeasureSettings`)."""


def verify_in(
    folder: Path,
    original: Any,
    fixed: Any,
    request: VerifyOptions,
    progress: Progress,
    *,
    unfused: bool = False,
) -> VerifyOutcome:
    """`verify` with its files in a folder.

    With `unfused`, the engine of the fixed model can give its inner tensors (`Variant.unfused`), and the
    original is built only where ONNX Runtime gives no reference.
    """
    tolerance = request.tolerance
    asked = _asked(tolerance, tolerance.metric if isinstance(tolerance, Tolerance) else request.metric)
    watch = Stopwatch(progress)
    deployed = request.deployment()
    chosen = deployed.choose()
    later = ("comparing outputs", "building an engine") if chosen.engine is None else ("running the engine",)
    watch.steps = ("reading", "running the original", *later)
    with ExitStack() as stack:
        with watch("reading"):
            models = load(original), load(fixed)
            require_same_ports(*models, "give the original first, then the model that was made from it")
            against = load_origin(request.against, models[0], asked.metric if asked else request.metric)
            if chosen.engine and ENGINES[chosen.engine].builds and (noise := noise_reason(models[0])):
                chosen = Choice(None, (noise,))
            before, after = models[0].path, models[1].path
            samples = request.samples(models[0], deployed)
            deployed = deployed.filled(samples.source.all_spans)
            splits = [plugins.parts(model, deployed) for model in models]
            if halves := _same_halves(splits):
                models = halves
            beyond = plugins.plugin_check(splits[0]) if halves and splits[0] else None
            indices = judging(samples)
            data = replace(
                samples.source,
                beyond=deployed.beyond(samples.source.spans),
                names=tuple(samples.source.names[index] for index in indices),
            )
        precision, requested = precision_of(models[1]), noted(models[1], PRECISION)
        if (precision, requested) == ("bf16", "fp16"):  # a plan with single nodes in BF16
            precision = "fp16"
        rounds = precision == "fp32" and chosen.engine != "onnxruntime"
        default = TOLERANCES["tf32" if rounds else precision]
        asked, *remarks = (asked,) if asked else _stated(noted_tolerance(models[1]), default)
        held = asked or default
        judge = Verifier(
            original=models[0],
            samples=[samples.feeds(index) for index in indices],
            expected=None,
            standards={precision: Standard.of(models[0], held, asked)},
            deployment=deployed,
            spans={**samples.source.spans, **deployed.profile},
            timeout_s=request.timeout,
            folder=folder,
            stage=watch,
            asked=asked is not None,
            against=against,
            build=request.build,
            real=samples.source.real,
            target=noted_target(models[1])
            or Target("tensorrt-rtx" if chosen.engine == "tensorrt-rtx" else "tensorrt"),
        )
        notes = stack.enter_context(on_cuda(pays_on_cuda(models[0], samples)))
        with watch("running the original"):
            missing = _without_reference(judge, models[0], chosen)
            exact = [] if judge.expected is None else judge.expected.of_model
            made_nan = nan_warnings(models[0], judge.samples, exact)
        data = replace(data, unshown=unshown(exact))
        result = VerifyOutcome(before, after, engine="emulation", device=CPU, tolerance=held, data=data)
        if chosen.engine is None:
            sums = request.accumulation or sums_of(models[1], judge.target)
            result = _emulated(result, judge, models[1], precision, sums)
        else:
            settings = MeasureSettings(
                chosen.engine,
                builds=request.builds,
                timing=Timing() if request.timing else None,
                plugins=deployed.plugins,
                kernels=folder / KERNELS,
                timeout_s=request.timeout,
            )
            with watch("running the engine"):
                result = _on_engine(result, judge, *models, precision, settings, missing, unfused=unfused)
        warnings = [*_warnings(chosen, samples), *data_warnings(models[0], samples), *made_nan, *remarks]
        if few := noted(models[1], SAMPLES):
            warnings.append(
                f"fix judged the file on {few} of the samples: to save time, or the others show nothing"
            )
        if beyond is not None:
            result = replace(result, verdict=Verdict((*result.checks, beyond)))
        floats, lowered = _computes_on_floats(models[1]), precision != "fp32"
        return replace(
            result,
            worse=noted(models[1], WORSE),
            lowered=lowered,
            floats=floats,
            all_fp32=floats and not lowered and requested != "fp32",
            warnings=(*warnings, *result.warnings, *notes),
            seconds=watch.seconds,
        )


def _same_halves(splits: Sequence[Split | None]) -> tuple[Model, Model] | None:
    """The parts of both models before their plugins; None if the second lacks a tensor that plugins read."""
    first, second = splits
    if first is None or second is None:
        return None
    names = [{port.name for port in split.head.signature.outputs} for split in (first, second)]
    return (first.head, second.head) if names[0] <= names[1] else None


def _computes_on_floats(model: Model) -> bool:
    pairs = zip(walk_graphs(model.proto.graph), model.facts().scopes, strict=False)
    return any(
        name in scope and scope[name].dtype in EXCHANGEABLE
        for graph, scope in pairs
        for node in graph.node
        if node.op_type != "Constant"
        for name in node.output
    )


def _without_reference(judge: Verifier, original: Model, chosen: Choice) -> str:
    """Computes the reference; returns why ONNX Runtime cannot if an engine of the original can replace it."""
    try:
        judge.expected = expected_outputs(original, judge.samples, judge.against)
    except NoKernelError as error:
        if judge.against is None and chosen.engine and ENGINES[chosen.engine].builds:
            return error.what
        error.hint = "on a GPU its FP32 engine is the reference: `engine=tensorrt`, with `plugin-lib`"
        raise
    return ""


def _emulated(
    result: VerifyOutcome, judge: Verifier, fixed: Model, precision: str, sums: Accumulation
) -> VerifyOutcome:
    """Emulates the fixed model, and builds it, which needs no GPU, or looks up its operators."""
    check = judge.at_last(judge.emulated(fixed, precision, sums), fixed, precision)
    if check.passed is None:
        reason = check.remarks[0].values["reason"]
        raise ArithmeticRunError(reason, hint="`engine=tensorrt-rtx` needs no emulation, but a GPU")
    details = (f"allowed: {judge.standards[precision].tolerance.source}", *check.details)
    check = replace(check, name="emulation", remarks=remark("no-gpu") + check.remarks, details=details)
    built = judge.operators(fixed)
    if judge.build:
        built = judge.build_check(
            fixed, judge.file(fixed, "fixed", fixed), None, _norms(judge, fixed, precision)
        )
    checks = [check, *([built] if built else [])]
    if built is not None and built.passed is False:  # `fix` says so, too, where the original does not build
        checks.append(judge.original_build)
    return replace(result, outputs=check.statistics, verdict=Verdict(tuple(checks)))


def _norms(judge: Verifier, fixed: Model, precision: str) -> Plan | None:
    """A plan that has the decomposed norms whose squares stay in range on the user's data; None without."""
    request = PrecisionRequest("fp16") if precision == "fp16" and judge.real else None
    if request is None or not any(analysis.norms for analysis in analyses(fixed, {}, request)):
        return None
    samples = [as_declared(fixed, sample) for sample in judge.samples]
    return make_plan(fixed, measured(reference(fixed), samples), request, real=True)


def _on_engine(
    result: VerifyOutcome,
    judge: Verifier,
    original: Model,
    fixed: Model,
    precision: str,
    settings: MeasureSettings,
    missing: str,  # why ONNX Runtime gave no reference, so that the original's engine is it; or ""
    *,
    unfused: bool,
) -> VerifyOutcome:
    """Builds and runs the fixed model, and once the original in FP32 without TF32 (see `verify_in`).

    Raises:
        EngineError: the library is not installed, or there is no reference.
    """
    start, checks, own = time.perf_counter(), list[Check](), list[EngineOutcome]()
    if missing or not unfused:
        wide = reference(original)
        path = judge.file(wide, "original", original)
        variant = judge.variant(wide, path, judge.folder / "samples" / "original", tf32=False)
        own = measure([variant], replace(settings, builds=1), judge.folder / "original")
        referred = _engine_as_reference if missing else _reference_check
        checks = [referred(judge, original, own[0], missing)]
    variant = judge.variant(fixed, judge.file(fixed, "fixed", fixed), judge.folder / "samples" / "fixed")
    variant = replace(variant, unfused="built" if unfused else "")
    outcomes = measure([variant], settings, (judge.folder / ENGINE).parent)
    if outcomes[0].report is not None and not unfused:
        checks.append(
            judged_report(outcomes[0].report, judge.expectation(fixed, _norms(judge, fixed, precision)))
        )
    check, judged = judge.run_check(outcomes, fixed, precision, start)
    check = judge.at_last(check, fixed, precision)
    built = judge.folder / ENGINE
    spans, engine = judge.deployment.profile, built if built.exists() else None
    at_profile = judge.at_profile(fixed, precision, check, spans, engine)
    checks = [*checks, check, *([at_profile] if at_profile is not None else [])]
    ran = next((outcome for outcome in outcomes if outcome.ran), outcomes[0])
    return replace(
        result,
        engine=ran.library or settings.engine,
        device=ran.device,
        outputs=check.statistics,
        builds=judged.builds,
        latency=ran.latency,
        reference_latency=own[0].latency if own else None,
        verdict=Verdict(tuple(checks)),
        warnings=tuple(dict.fromkeys(note for outcome in (*outcomes, *own) for note in outcome.notes)),
    )


def _engine_as_reference(judge: Verifier, original: Model, outcome: EngineOutcome, missing: str) -> Check:
    """Makes the original's own engine the reference, for operators that only a plugin computes."""
    if not outcome.ran:
        raise EngineError(
            f"nothing can be compared: {missing}, and the original did not run in FP32: {outcome.problem}",
            where=str(original.path or "the original"),
            hint=outcome.hint or "`plugin-lib` names the library of its plugins",
        )
    exact = [outcome.values(number) for number in range(len(outcome.outputs))]
    judge.expected = Expected(exact, exact)
    return Check("reference", None, remark("engine-as-reference", reason=missing))


def _reference_check(judge: Verifier, original: Model, outcome: EngineOutcome, _: str) -> Check:
    """Compares the original's FP32 engine with ONNX Runtime, which only shows errors of the library."""
    assert judge.expected is not None
    standard = Standard.of(original, TOLERANCES["fp32"])
    check, judged = run_check(judge.expected.of_model, [outcome], standard)
    if not outcome.ran:
        problem = remark("reference-failed", reason=outcome.problem)
        return Check("reference", None, problem, details=check.details[2:])
    distance = remark(f"reference-{'agrees' if judged.passed else 'differs'}", distance=judged.error)
    return Check("reference", judged.passed or None, distance, judged.comparisons)


def _warnings(chosen: Choice, samples: Samples) -> Iterator[str]:
    if chosen.engine is None:
        why = "; ".join(chosen.reasons)
        yield (
            f"NOT run on a GPU ({why}): the figures are emulated; they do not show speed or defects of "
            "TensorRT's kernels"
        )
    elif not ENGINES[chosen.engine].on_gpu:
        yield (
            "NOT run on a GPU: ONNX Runtime on the CPU computes FP16 in FP32, between nodes, too, so that an "
            "overflow may not show; `engine=emulation` shows it"
        )
    if not samples.source.real:
        yield samples.source.text
    if len(samples) > MOST_SAMPLES:
        yield f"{MOST_SAMPLES} of {len(samples)} samples were compared: the last, and the largest others"


def _stated(noted: Tolerance | None, default: Tolerance) -> tuple[Any, ...]:
    """The tolerance that a file states of itself if it counts, with a remark: it may not be looser."""
    if noted is None:
        return (None,)
    text = f"{noted.metric} {noted.value:g}"
    if noted.metric == default.metric and 0 <= noted.value <= default.value:
        return noted, f"the limit, {text}, is the one that the file states of itself"
    ours = f"{default.metric} {default.value:g}"
    return None, f"the file states a limit of itself, {text}, which does not count: the default is {ours}"


def _asked(tolerance: float | Tolerance | None, metric: str) -> Tolerance | None:
    """The user's tolerance, if there is one and it makes sense."""
    measure = named(metric)
    if tolerance is None:
        if metric != "relative-l2":
            what = f"there is no default tolerance for {metric}"
            raise UsageError(what, option="metric", hint="add `tolerance=VALUE`")
        return None
    asked = tolerance if isinstance(tolerance, Tolerance) else Tolerance(tolerance, metric, "`tolerance`")
    if not math.isfinite(asked.value) or (asked.value < 0 and not measure.least):
        raise UsageError(f"it cannot be {asked.value:g}", option="tolerance", hint="such as 1e-3")
    return asked
