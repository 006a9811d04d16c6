"""Runs probes on an engine, each build in a child process, and judges the results."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx

from rewriter.ir.errors import ArithmeticRunError
from rewriter.ir.model import Model
from rewriter.ir.model.stopwatch import Progress
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.measure import measure
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.probe.answers import Answers
from rewriter.runtime.engines.probe.question import Case, Probe
from rewriter.runtime.engines.protocol import EngineName, EngineOutcome, MeasureSettings, Timing, Variant
from rewriter.runtime.engines.tensor_files import write_samples
from rewriter.runtime.figures.pair import Pair

BUILD_TIMEOUT_S = 120.0
"""A build of one model needs about a second."""

RUN_TIMEOUT_S = 300.0

ON_CPU = Timing(1, 3)
"""A CPU needs a thousand times as long as the GPU that the models were made for."""


def ask(
    engine: EngineName, probes: Sequence[Probe], progress: Progress = lambda stage, done, total: None
) -> Answers:
    """Build and run the probes' models on an engine, and judge.

    Raises:
        EngineError: the library is not installed.
    """
    timing = ON_CPU if engine == "onnxruntime" else Timing()
    results: dict[tuple[str, str], float | str] = {}
    library = ""
    with tempfile.TemporaryDirectory(prefix="rewriter-probe-") as name:
        for timed in (False, True):
            group = [(probe, case) for probe in probes for case in probe.cases if case.timed == timed]
            progress(f"probing with {len(group)} models", 0, 0)
            folder = Path(name) / str(timed)
            variants = [
                _variant(f"{probe.name}/{case.name}", case, folder / f"{number:03d}")
                for number, (probe, case) in enumerate(group)
            ]
            settings = MeasureSettings(
                engine,
                timing=timing if timed else None,
                build_timeout_s=BUILD_TIMEOUT_S,
                run_timeout_s=RUN_TIMEOUT_S,
            )
            for (probe, case), outcome in zip(group, measure(variants, settings, folder), strict=True):
                results[probe.name, case.name] = _result(case, outcome)
                library = outcome.library or library
    gpu = None if engine == "onnxruntime" else this_machine.gpu()
    return Answers(
        engine,
        library.rpartition(" ")[2],
        gpu.name if gpu else "CPU",
        gpu.cuda if gpu else "",
        "measured by rewriter probe",
        answers={p.name: p.answer({c.name: results[p.name, c.name] for c in p.cases}) for p in probes},
    )


def _variant(name: str, case: Case, folder: Path) -> Variant:
    folder.mkdir(parents=True)
    onnx.save(case.proto(), folder / "model.onnx")
    samples = write_samples(folder / "samples", [case.feeds()])
    return Variant(name, folder / "model.onnx", samples)


def _result(case: Case, outcome: EngineOutcome) -> float | str:
    """The figure of a case, or the reason why there is none."""
    if not outcome.ran:
        return outcome.problem or outcome.status
    if case.timed:
        return outcome.latency.median_us if outcome.latency else "it was not timed"
    value = next(iter(outcome.values(0).values()))
    try:
        with Session(Model(case.proto(fp32=True))) as session:
            exact = next(iter(session.run(case.feeds(fp32=True)).values()))
    except ArithmeticRunError:
        return "ONNX Runtime does not run it in FP32"
    return Pair(exact, value).relative_l2
