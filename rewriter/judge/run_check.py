"""Runs the fixed model on an engine, or emulates it, and compares it with the original."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rewriter.ir.errors import ArithmeticRunError, EngineError
from rewriter.ir.model import Array, Model
from rewriter.judge.arithmetic_checks import as_fp32, excused, tf32_errors
from rewriter.judge.build_check import check_model_build, expectation, judged_report
from rewriter.judge.expected import Expected, as_declared, conditioning, selects_rows, widened
from rewriter.judge.judge import Judged, Standard, against, fair_words, judge
from rewriter.judge.verdict import ADVICE, Check, MetricValue, log_lines
from rewriter.judge.workspace import Workspace
from rewriter.runtime.emulation import Accumulation, emulation, sums
from rewriter.runtime.engines.measure import measure
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.protocol import EngineOutcome, Latency, MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import StoredSamples, spans_of, write_samples
from rewriter.runtime.figures.metrics import named
from rewriter.runtime.figures.outputs import compare_samples
from rewriter.runtime.figures.tolerances import RELATIVE_L2, TOLERANCES, Tolerance


@dataclass(frozen=True)
class Execution:
    """Checks and figures of one verification; see `VerifyResult` for the fields."""

    engine: str
    device: str
    judged: Judged
    checks: tuple[Check, ...]
    latency: Latency | None = None
    reference_latency: Latency | None = None
    warnings: tuple[str, ...] = ()


def run_on_engine(
    workspace: Workspace,
    settings: MeasureSettings,
    tolerance: Tolerance,
    missing: str = "",
    *,
    asked: bool = False,
) -> Execution:
    """Builds and runs the fixed model, and once the original in FP32 without TF32.

    Args:
        missing: The reason why ONNX Runtime gave no reference; "" if it did. Without one, the original's FP32
            engine is the reference.
        asked: As for `run_emulated`.

    Raises:
        EngineError: the library is not installed, or there is no reference.
    """
    start = time.perf_counter()
    once = replace(settings, builds=1)
    (original,) = measure([workspace.reference_variant()], once, workspace.folder / "original")
    instead = [_engine_as_reference(workspace, original, missing)] if missing else []
    fixed = measure([workspace.fixed_variant()], settings, workspace.folder / "fixed")
    judged = workspace.judge(fixed, tolerance)
    checks = instead or [_reference_check(workspace, original)]
    if fixed[0].report is not None:
        expected = expectation(workspace.fixed, workspace.fixed_facts)
        checks.append(judged_report(fixed[0].report, expected))
    check = run_check(fixed, judged, tolerance, time.perf_counter() - start)
    if not asked:
        check = as_fp32(check, lambda: _fp32_errors(workspace, once), "the network's own FP32 engine")
    checks.append(check)
    notes = dict.fromkeys(note for outcome in (*fixed, original) for note in outcome.notes)
    ran = next((outcome for outcome in fixed if outcome.ran), fixed[0])
    return Execution(
        ran.library or settings.engine,
        ran.device,
        judged,
        tuple(checks),
        ran.latency,
        original.latency,
        tuple(notes),
    )


def _fp32_errors(workspace: Workspace, settings: MeasureSettings) -> dict[str, float]:
    """Error of each finite output of the original's FP32 engine, with TF32; empty if it does not run."""
    variant = replace(workspace.reference_variant(), name="fp32", tf32=True)
    (outcome,) = measure([variant], replace(settings, timing=None), workspace.folder / "fp32")
    if not outcome.ran:
        return {}
    actual = (outcome.values(number) for number in range(len(outcome.outputs)))
    rows = selects_rows(workspace.original)
    compared = compare_samples(list(workspace.expected), list(actual), 0.0, as_sets=rows)
    return {one.name: one.relative_l2 for one in compared if one.finite}


def run_built(
    fixed: Model,
    path: Path,
    engine: Path,
    settings: MeasureSettings,
    samples: Sequence[Mapping[str, Array]],
    expected: Sequence[Mapping[str, Array]],
    standard: Standard,
) -> Check:
    """Runs an existing engine of the fixed model, and compares it with the original's outputs.

    Args:
        path: The file of `fixed`. `engine`: built from it; its folder takes the outputs.
        expected: Outputs of the original in FP32 for each of `samples`.
        standard: How close to them the engine has to be.

    Raises:
        EngineError: the library is not installed.
    """
    start = time.perf_counter()
    folder = engine.parent
    stored = write_samples(folder / "samples", (as_declared(fixed, sample) for sample in samples))
    outcomes = measure([Variant("fixed", path, stored, engine=engine)], settings, folder)
    judged = judge(expected, outcomes, standard)
    check = run_check(outcomes, judged, standard.tolerance, time.perf_counter() - start)
    latency = outcomes[0].latency
    timed = f"; {latency.median_us:.1f} us (+- {latency.iqr_us:.1f})" if latency else ""
    return replace(check, summary=check.summary + timed, latency=latency, statistics=judged.outputs)


def run_emulated(
    workspace: Workspace, tolerance: Tolerance, accumulation: Accumulation, *, asked: bool = False
) -> Execution:
    """Emulates the fixed model on ONNX Runtime's CPU, with a rounding after every tensor, as `fix` does.

    Args:
        asked: True if the tolerance is the user's own: only conditioning excuses an error beyond it.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run it.
    """
    start = time.perf_counter()
    outcome = EngineOutcome("fixed", 0, "ok", outputs=_emulate(workspace, accumulation).folders)
    judged = workspace.judge([outcome], tolerance)
    how = f"no GPU was used; emulated (sums of FP16 products in {sums(workspace.fixed, accumulation)})"
    check = Check(
        "emulation",
        judged.passed,
        f"{how}: {_against(judged, tolerance)}",
        judged.comparisons,
        (f"allowed: {tolerance.source}",),
        time.perf_counter() - start,
        pictures=judged.pictures,
    )
    wide = widened(workspace.original)
    exact, samples = list(workspace.expected), list(workspace.stored(wide, "wide"))
    check = excused(check, lambda: conditioning(workspace.original, samples, exact))
    if not asked:
        fp32 = "its FP32 engine (TF32, emulated)"
        check = as_fp32(check, lambda: tf32_errors(Expected(exact, exact), wide, samples), fp32)
    return Execution("emulation", "CPU", judged, (check,))


def _emulate(workspace: Workspace, accumulation: Accumulation) -> StoredSamples:
    try:
        with Session(emulation(workspace.fixed, workspace.fixed_facts, accumulation, tf32=True)) as session:
            found = map(session.run, workspace.stored(workspace.fixed, "fixed"))
            return write_samples(workspace.folder / "emulated", found)
    except ArithmeticRunError as error:
        error.hint = error.hint or "`engine=tensorrt-rtx` needs no emulation, but a GPU"
        raise


def build_without_gpu(workspace: Workspace, timeout_s: float, plugins: Sequence[Path]) -> Check:
    """Checks that TensorRT-RTX builds the fixed model, which needs no GPU."""
    variant = workspace.fixed_variant()
    sample = next(iter(variant.samples))
    profile = spans_of(variant.samples) | dict(variant.shapes)
    return check_model_build(workspace.fixed, variant.path, sample, profile, timeout_s, plugins=plugins)


def _engine_as_reference(workspace: Workspace, original: EngineOutcome, missing: str) -> Check:
    """Makes the original's own engine the reference, for operators that only a plugin computes."""
    if not original.ran:
        raise EngineError(
            f"nothing can be compared: {missing}, and the original did not run in FP32: {original.problem}",
            where=str(workspace.original.path or "the original"),
            hint=original.hint or "`plugin-lib` names the library of its plugins",
        )
    workspace.expected = StoredSamples(original.outputs)
    summary = f"not checked: {missing}; the fixed model is compared with the original's FP32 engine"
    return Check("reference", None, summary)


def _reference_check(workspace: Workspace, original: EngineOutcome) -> Check:
    """Compares the original's FP32 engine with ONNX Runtime, which shows errors of the library alone."""
    if not original.ran:
        problem = f"the original did not run here: {original.problem}"
        return Check("reference", None, problem, details=_log(original))
    judged = workspace.judge([original], TOLERANCES["fp32"])
    within = "agrees with" if judged.passed else "DIFFERS from"
    return Check(
        "reference",
        True if judged.passed else None,
        f"the original in FP32 without TF32 {within} ONNX Runtime: {judged.error:.2g}",
        judged.comparisons,
        () if judged.passed else ("this library computes the original itself differently",),
    )


def run_check(
    outcomes: Sequence[EngineOutcome], judged: Judged, tolerance: Tolerance, seconds: float
) -> Check:
    """Returns the check of the fixed model's builds."""
    failed = [outcome for outcome in outcomes if not outcome.ran]
    details = [f"allowed: {tolerance.source}"]
    for outcome in failed:
        details += [f"build {outcome.build}: {outcome.status}: {outcome.problem}", *_log(outcome)]
        details += [f"{ADVICE}{outcome.hint}"] if outcome.hint else []
    where = next((outcome for outcome in outcomes if outcome.ran), outcomes[0])
    if judged.error is None:
        summary = f"the fixed model did not run: {outcomes[0].problem}"
    else:
        spread = f" ({judged.best:.3g} to {judged.error:.3g} over {len(outcomes)} builds)"
        summary = f"{where.library} on {where.device}: {_against(judged, tolerance)}"
        summary += spread if len(outcomes) > 1 else ""
        summary += f"; {len(failed)} of {len(outcomes)} builds did not run" if failed else ""
    value = None
    if judged.error is not None and tolerance.metric != RELATIVE_L2:
        met = named(tolerance.metric).meets(judged.error, judged.allowed)
        value = MetricValue(tolerance.metric, judged.error, judged.allowed, met)
    return Check(
        "run",
        judged.passed,
        summary,
        judged.comparisons,
        tuple(details),
        seconds,
        pictures=judged.pictures,
        value=value,
        device=where.device,
    )


def _against(judged: Judged, tolerance: Tolerance) -> str:
    if tolerance.metric == RELATIVE_L2:
        words = against(judged.comparisons, passed=judged.passed, default=judged.allowed)
        return f"{RELATIVE_L2} {words}{fair_words(judged.comparisons)}"
    within = judged.error is not None and named(tolerance.metric).meets(judged.error, judged.allowed)
    relation = "within" if within else "NOT within"
    return f"{tolerance.metric} {judged.error:.3g}, {relation} {judged.allowed:.3g}"


def _log(outcome: EngineOutcome) -> tuple[str, ...]:
    return log_lines(outcome.log) if outcome.status in ("crashed", "timeout") else ()
