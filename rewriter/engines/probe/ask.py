"""Runs the probes on an engine, each build in a child process, and judges the results."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from rewriter.base import Target
from rewriter.engines import this_machine
from rewriter.engines.build_options import BuildOptions
from rewriter.engines.measure import measure
from rewriter.engines.probe import arithmetic, epilogue_rounding, island_latency, operators, reciprocals
from rewriter.engines.probe.answers import Answers, driver_text, measured
from rewriter.engines.probe.question import Case, Probe, Seen
from rewriter.engines.protocol import EngineName, EngineOutcome, MeasureSettings, Timing, Variant
from rewriter.engines.tensor_files import write_samples
from rewriter.engines.tensorrt_build import build
from rewriter.errors import NativeError
from rewriter.model import Array
from rewriter.model.stopwatch import Progress

PROBES: tuple[Probe, ...] = (
    *arithmetic.PROBES,
    *epilogue_rounding.PROBES,
    *reciprocals.PROBES,
    *operators.PROBES,
    *island_latency.PROBES,
)

BUILD_TIMEOUT_S = 120.0
"""A build of one model needs about a second."""

RUN_TIMEOUT_S = 300.0

ON_CPU = Timing(1, 3)
"""A CPU needs a thousand times as long as the GPU that the models were made for."""


def ask(
    engine: EngineName,
    probes: Sequence[Probe] = PROBES,
    timing: Timing | None = None,
    progress: Progress = lambda *_: None,
) -> Answers:
    """Build and run the probes' models on an engine, each build in a child process, and judge.

    Args:
        timing: Of the probes that need latencies; None: the protocol's default.

    Raises:
        EngineError: the library is not installed.
    """
    seen: dict[tuple[str, str], Seen] = {}
    library = ""
    pairs = [(probe, case) for probe in probes for case in probe.cases]
    with tempfile.TemporaryDirectory(prefix="rewriter-probe-") as name:
        for timed in (False, True):
            group = [(p, c) for p, c in pairs if c.timed == timed]
            progress(f"probing with {len(group)} models", 0, 0)
            settings = MeasureSettings(
                engine,
                timing=(timing or (ON_CPU if engine == "onnxruntime" else Timing())) if timed else None,
                build_timeout_s=BUILD_TIMEOUT_S,
                run_timeout_s=RUN_TIMEOUT_S,
            )
            folder = Path(name) / str(timed)
            variants = [_variant(p, c, folder / f"{i:03d}") for i, (p, c) in enumerate(group)]
            for (probe, case), outcome in zip(group, measure(variants, settings, folder), strict=True):
                seen[probe.name, case.name] = _seen(case, outcome)
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


def _variant(probe: Probe, case: Case, folder: Path) -> Variant:
    folder.mkdir(parents=True)
    onnx.save(case.proto(), folder / "model.onnx")
    samples = write_samples(folder / "samples", [case.feeds])
    return Variant(f"{probe.name}/{case.name}", folder / "model.onnx", samples, tf32=case.tf32)


def _seen(case: Case, outcome: EngineOutcome) -> Seen:
    if not outcome.ran:
        return Seen(problem=outcome.problem or outcome.status)
    value: Array = np.array(next(iter(outcome.values(0).values())))
    us = outcome.latency.median_us if outcome.latency else None
    if case.timed and us is None:
        return Seen(problem="it was not timed")
    return Seen(value, case.expected, us=us)


@dataclass(frozen=True)
class Buildable:
    """The result of building a probe's model; `problem` is "" if it succeeded."""

    probe: str
    case: str
    problem: str


def known_here(engine: EngineName) -> Answers | None:
    """The answers measured on this machine; None if there are none, or if probes are missing."""
    found = measured(Target(engine))
    return found if found and all(probe.name in found.answers for probe in PROBES) else None


def build_all(probes: Sequence[Probe] = PROBES, progress: Progress = lambda *_: None) -> Iterator[Buildable]:
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
