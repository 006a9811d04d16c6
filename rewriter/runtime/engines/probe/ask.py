"""Runs probes on an engine, each build in a child process, and judges the results."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from rewriter.ir.errors import NativeError
from rewriter.ir.model import Array
from rewriter.ir.model.stopwatch import Progress
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.build import BuildOptions, build
from rewriter.runtime.engines.measure import measure
from rewriter.runtime.engines.probe.answers import Answers, driver_text
from rewriter.runtime.engines.probe.question import Case, Probe, Seen
from rewriter.runtime.engines.protocol import EngineName, EngineOutcome, MeasureSettings, Timing, Variant
from rewriter.runtime.engines.tensor_files import write_samples

BUILD_TIMEOUT_S = 120.0
"""A build of one model needs about a second."""

RUN_TIMEOUT_S = 300.0

ON_CPU = Timing(1, 3)
"""A CPU needs a thousand times as long as the GPU that the models were made for."""


def ask(
    engine: EngineName,
    probes: Sequence[Probe],
    timing: Timing | None = None,
    progress: Progress = lambda *_: None,
) -> Answers:
    """Build and run the probes' models on an engine, each build in a child process, and judge.

    Args:
        timing: Of the probes that need latencies; None: the protocol's default.

    Raises:
        EngineError: the library is not installed.
    """
    timing = timing or (ON_CPU if engine == "onnxruntime" else Timing())
    seen: dict[tuple[str, str], Seen] = {}
    library = ""
    with tempfile.TemporaryDirectory(prefix="rewriter-probe-") as name:
        expected = _expected(probes, Path(name) / "expected")
        for timed in (False, True):
            group = [(probe, case) for probe in probes for case in probe.cases if case.timed == timed]
            progress(f"probing with {len(group)} models", 0, 0)
            settings = _settings(engine, timing if timed else None)
            folder = Path(name) / str(timed)
            names = [f"{probe.name}/{case.name}" for probe, case in group]
            variants = [_variant(names[i], c, folder / f"{i:03d}") for i, (_, c) in enumerate(group)]
            for (probe, case), outcome in zip(group, measure(variants, settings, folder), strict=True):
                seen[probe.name, case.name] = _seen(case, outcome, outcome.variant, expected)
                library = outcome.library or library
    answers = {p.name: p.answer({c.name: seen[p.name, c.name] for c in p.cases}) for p in probes}
    gpu = None if engine == "onnxruntime" else this_machine.gpu()
    return Answers(
        engine,
        library.rpartition(" ")[2],
        gpu.name if gpu else "CPU",
        driver_text(gpu) if gpu else "",
        "measured by rewriter probe",
        answers=answers,
    )


def _settings(engine: EngineName, timing: Timing | None) -> MeasureSettings:
    return MeasureSettings(
        engine, timing=timing, build_timeout_s=BUILD_TIMEOUT_S, run_timeout_s=RUN_TIMEOUT_S
    )


def _expected(probes: Sequence[Probe], folder: Path) -> dict[str, Array]:
    """Outputs of the graphs in FP32 on ONNX Runtime; with `/c` after the name, those with reciprocals."""
    variants: list[Variant] = []
    for name, case in ((f"{p.name}/{c.name}", c) for p in probes for c in p.cases):
        if case.measure in ("error", "reciprocal"):
            variants.append(_variant(name, case, folder / f"{len(variants):03d}", fp32=True))
        if case.measure == "reciprocal":
            place = folder / f"{len(variants):03d}"
            variants.append(_variant(f"{name}/c", case, place, fp32=True, data=case.by_reciprocal))
    outcomes = measure(variants, _settings("onnxruntime", None), folder / "outputs") if variants else []
    return {o.variant: np.array(next(iter(o.values(0).values()))) for o in outcomes if o.ran}


def _variant(
    name: str, case: Case, folder: Path, *, fp32: bool = False, data: Mapping[str, Array] | None = None
) -> Variant:
    folder.mkdir(parents=True)
    onnx.save(case.proto(fp32=fp32, data=data), folder / "model.onnx")
    samples = write_samples(folder / "samples", [case.feeds(fp32=fp32)])
    return Variant(name, folder / "model.onnx", samples, tf32=case.tf32)


def _seen(case: Case, outcome: EngineOutcome, name: str, expected: Mapping[str, Array]) -> Seen:
    if not outcome.ran:
        return Seen(problem=outcome.problem or outcome.status)
    us = outcome.latency.median_us if outcome.latency else None
    if case.timed and us is None:
        return Seen(problem="it was not timed")
    value: Array = np.array(next(iter(outcome.values(0).values())))
    if case.measure in ("error", "reciprocal") and name not in expected:
        return Seen(value, problem="ONNX Runtime does not run it in FP32")
    return Seen(value, expected.get(name), expected.get(f"{name}/c"), us=us)


@dataclass(frozen=True)
class Buildable:
    """The result of building a probe's model; `problem` is "" if it succeeded."""

    probe: str
    case: str
    problem: str


def build_all(probes: Sequence[Probe], progress: Progress = lambda *_: None) -> Iterator[Buildable]:
    """Parse and build all models without running them, which TensorRT-RTX does without a GPU.

    Raises:
        EngineError: TensorRT-RTX is not installed.
    """
    pairs = [(probe, case) for probe in probes for case in probe.cases]
    with tempfile.TemporaryDirectory(prefix="rewriter-probe-") as folder:
        path = Path(folder) / "model.onnx"
        for done, (probe, case) in enumerate(pairs):
            progress("building", done, len(pairs))
            onnx.save(case.proto(), path)
            yield Buildable(probe.name, case.name, _problem(path))


def _problem(path: Path) -> str:
    try:
        report = build(path, BuildOptions(library="tensorrt_rtx"), timeout_s=BUILD_TIMEOUT_S)
    except NativeError as error:
        return error.what
    if report.engine_bytes is not None:
        return ""
    errors: list[str] = [error.message for error in report.parser_errors]
    return "; ".join([*errors, report.obstacle, *report.errors[-1:]]).strip("; ") or "nothing was built"
