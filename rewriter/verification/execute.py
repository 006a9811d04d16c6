"""Two ways to compute what the fixed model gives: an engine, or emulation beside a build without a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rewriter.emulation import Accumulation, emulation, sums
from rewriter.engines.measure import measure
from rewriter.engines.onnxruntime import Session
from rewriter.engines.protocol import Latency, Outcome, Settings, Variant
from rewriter.engines.tensors import write_samples, write_tensors
from rewriter.errors import ArithmeticRunError, EngineError
from rewriter.figures.tolerances import FP32, SOURCES, Tolerance, default_tolerance
from rewriter.model import Array, Model
from rewriter.model import facts as tensor_facts
from rewriter.verification.build_check import expectation, judged_report
from rewriter.verification.checks import as_declared, check_engine, selects_rows
from rewriter.verification.judge import Judged, Known, judge
from rewriter.verification.stage import Stage
from rewriter.verification.verdict import Check

LOG_LINES = 15
"""Lines of a dead child's log that are shown."""


@dataclass(frozen=True)
class Execution:
    """What came of it; see `VerifyResult` for the fields."""

    engine: str
    device: str
    judged: Judged
    checks: tuple[Check, ...]
    latency: Latency | None = None
    reference_latency: Latency | None = None
    warnings: tuple[str, ...] = ()


def on_engine(stage: Stage, settings: Settings, tolerance: Tolerance, missing: str = "") -> Execution:
    """Build and run the fixed model, and the original in FP32 without TF32 beside it, once.

    Args:
        missing: Why ONNX Runtime gave no reference; the original's FP32 engine then is what is compared with.

    Raises:
        EngineError: the library is not installed, or there is nothing to compare with.
    """
    start = time.perf_counter()
    once = replace(settings, builds=1)
    (original,) = measure([stage.reference_variant()], once, stage.folder / "original")
    instead = [_instead(stage, original, missing)] if missing else []
    fixed = measure([stage.fixed_variant()], settings, stage.folder / "fixed")
    judged = judge(stage, fixed, tolerance)
    checks = instead or [_reference_check(stage, original)]
    if fixed[0].report is not None:
        expected = expectation(stage.fixed, stage.fixed_facts)
        checks.append(judged_report(fixed[0].report, expected))
    checks.append(run_check(fixed, judged, tolerance, time.perf_counter() - start))
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


def run_built(
    fixed: Model,
    path: Path,
    engine: Path,
    settings: Settings,
    samples: Sequence[Mapping[str, Array]],
    expected: Sequence[Mapping[str, Array]],
) -> Check:
    """Run an engine that was built already, and compare it with what the original gives.

    Args:
        path: The file of `fixed`. `engine`: what was built from it; its folder takes the outputs.
        expected: Outputs of the original in FP32 for each of `samples`.

    Raises:
        EngineError: the library is not installed.
    """
    start = time.perf_counter()
    folder = engine.parent
    stored = write_samples(folder / "samples", (as_declared(fixed, sample) for sample in samples))
    outcomes = measure([Variant("fixed", path, stored, engine=engine)], settings, folder)
    tolerance = default_tolerance(tensor_facts.infer(fixed), tf32=True)
    judged = judge(Known(expected, selects_rows(fixed)), outcomes, tolerance)
    check = run_check(outcomes, judged, tolerance, time.perf_counter() - start)
    latency = outcomes[0].latency
    told = f"; {latency.median_us:.1f} us (+- {latency.iqr_us:.1f})" if latency else ""
    return replace(check, summary=check.summary + told)


def _instead(stage: Stage, original: Outcome, missing: str) -> Check:
    """The original's own engine as the reference, for operators that plugins alone can compute."""
    if not original.ran:
        raise EngineError(
            f"nothing can be compared: {missing}, and the original did not run in FP32: {original.problem}",
            where=str(stage.original.path or "the original"),
            hint=original.hint or "--plugin-lib names the library of its plugins",
        )
    stage.take_reference(original.outputs)
    summary = f"not checked: {missing}; the fixed model is compared with the original's FP32 engine"
    return Check("reference", None, summary)


def _reference_check(stage: Stage, original: Outcome) -> Check:
    """The original's FP32 engine against ONNX Runtime; if they differ, no fix is to blame."""
    if not original.ran:
        return Check(
            "reference", None, f"the original did not run here: {original.problem}", details=_log(original)
        )
    judged = judge(stage, [original], Tolerance(FP32, "relative-l2", SOURCES["fp32"]))
    within = "agrees with" if judged.passed else "DIFFERS from"
    return Check(
        "reference",
        True if judged.passed else None,
        f"the original in FP32 without TF32 {within} ONNX Runtime on the CPU: {judged.error:.2g}",
        judged.comparisons,
        () if judged.passed else ("this library computes the original differently, whatever was fixed",),
    )


def run_check(outcomes: Sequence[Outcome], judged: Judged, tolerance: Tolerance, seconds: float) -> Check:
    """The verdict on the fixed model's builds."""
    failed = [outcome for outcome in outcomes if not outcome.ran]
    details = [f"allowed: {tolerance.source}"]
    for outcome in failed:
        details += [f"build {outcome.build}: {outcome.status}: {outcome.problem}", *_log(outcome)]
        details += [f"what to do: {outcome.hint}"] if outcome.hint else []
    where = next((outcome for outcome in outcomes if outcome.ran), outcomes[0])
    if judged.error is None:
        summary = f"the fixed model did not run: {outcomes[0].problem}"
    else:
        relation = "within" if judged.passed else "NOT within"
        spread = f" ({judged.best:.3g} to {judged.error:.3g} over {len(outcomes)} builds)"
        summary = (
            f"{where.library} on {where.device}: {tolerance.metric} {judged.error:.3g}, {relation} "
            f"{judged.allowed:.3g}{spread if len(outcomes) > 1 else ''}"
        )
        summary += f"; {len(failed)} of {len(outcomes)} builds did not run" if failed else ""
    return Check("run", judged.passed, summary, judged.comparisons, tuple(details), seconds)


def _log(outcome: Outcome) -> tuple[str, ...]:
    if outcome.status not in ("crashed", "timeout"):
        return ()
    lines = [line for line in outcome.log.splitlines() if line.strip()]
    return tuple(f"log: {line}" for line in lines[-LOG_LINES:])


def emulated(stage: Stage, tolerance: Tolerance, accumulation: Accumulation) -> Execution:
    """The fixed model with a rounding after every tensor, on ONNX Runtime's CPU.

    Raises:
        ArithmeticRunError: ONNX Runtime cannot run it.
    """
    start = time.perf_counter()
    outcome = Outcome("fixed", 0, "ok", outputs=tuple(_emulate(stage, accumulation)))
    judged = judge(stage, [outcome], tolerance)
    relation = "within" if judged.passed else "NOT within"
    how = f"sums of FP16 products in {sums(stage.fixed, accumulation)}"
    check = Check(
        "emulation",
        judged.passed,
        f"no GPU was used; emulated ({how}): {tolerance.metric} {judged.error:.3g}, {relation} "
        f"{judged.allowed:.3g}",
        judged.comparisons,
        (f"allowed: {tolerance.source}",),
        time.perf_counter() - start,
    )
    return Execution("emulation", "CPU", judged, (check,))


def _emulate(stage: Stage, accumulation: Accumulation) -> Iterator[Path]:
    try:
        with Session(emulation(stage.fixed, stage.fixed_facts, accumulation)) as session:
            for number, feeds in enumerate(stage.stored(stage.fixed, "fixed")):
                yield write_tensors(stage.folder / "emulated" / str(number), session.run(feeds))
    except ArithmeticRunError as error:
        error.hint = error.hint or "--engine tensorrt-rtx needs no emulation, but a GPU"
        raise


def build_without_gpu(stage: Stage, timeout_s: float, plugins: Sequence[Path]) -> Check:
    """The build of TensorRT-RTX on a CPU: whether the fixed model is one that TensorRT takes."""
    variant = stage.fixed_variant()
    sample = next(iter(variant.samples))
    profile = variant.samples.spans() | dict(variant.shapes)
    return check_engine(stage.fixed, variant.path, sample, profile, timeout_s, plugins=plugins)
