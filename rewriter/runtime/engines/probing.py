"""Runs probes on an engine, several models side by side, and keeps their answers in the user's cache."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import onnx

from rewriter.base.errors import ArithmeticRunError, OutputError, UsageError
from rewriter.base.stopwatch import Progress, silent
from rewriter.ir.model import Model, write_json
from rewriter.ir.model.output_files import work_folder
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.caches import user_cache
from rewriter.runtime.engines.measure import measure
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.protocol import EngineOutcome, MeasureSettings, Timing, Variant
from rewriter.runtime.engines.tensor_files import write_samples
from rewriter.runtime.metrics.pairwise_error import Pair
from rewriter.target import Target
from rewriter.target.probes import Answers, Case, Probe, plain_fields, read, recorded

LIMIT_S = 120.0
"""Deadline of a build, and of a run: each needs a few seconds, most of them to start its process."""

MOST_JOBS = 8
"""Most models that are built and loaded side by side: one after the other, 43 did not end in a minute on an
H100. Each holds some 0.5 GB of the GPU's memory, on which one at a time runs."""

ON_CPU = Timing(1, 3)
"""A CPU needs a thousand times as long as the GPU that the models were made for."""


def ask(engine: str, probes: Sequence[Probe], progress: Progress = silent) -> Answers:
    """Build and run the probes' models on an engine, and judge; an EngineError if its library is missing."""
    on_gpu = this_machine.ENGINES[engine].on_gpu
    timing = Timing() if on_gpu else ON_CPU
    results: dict[tuple[str, str], float | str] = {}
    library, jobs = "", min(MOST_JOBS, os.cpu_count() or 1)
    with work_folder() as name, ThreadPoolExecutor(jobs) as pool:
        for timed in (False, True):
            group = [(probe, case) for probe in probes for case in probe.cases if case.timed == timed]
            folder = name / str(timed)
            variants = list[Variant]()
            for number, (probe, case) in enumerate(group):
                own = folder / f"{number:03d}"
                samples = write_samples(own / "samples", [case.feeds()])
                onnx.save(case.proto(), own / "model.onnx")
                variants.append(Variant(f"{probe.name}/{case.name}", own / "model.onnx", samples))
            # what is timed is timed in turn
            parts = [variants] if timed else [[variant] for variant in variants]
            rounds = timing if timed else None
            settings = MeasureSettings(engine, timing=rounds, timeout_s=LIMIT_S)
            folders = (folder / f"engines-{number}" for number in range(len(parts)))
            outcomes = chain.from_iterable(pool.map(measure, parts, repeat(settings), folders))
            for number, ((probe, case), outcome) in enumerate(zip(group, outcomes, strict=True)):
                progress("probing", number, len(group))
                results[probe.name, case.name] = _result(case, outcome)
                library = outcome.library or library
    gpu = this_machine.gpu() if on_gpu else None
    return Answers(
        engine,
        library.rpartition(" ")[2],
        gpu.name if gpu else "CPU",
        gpu.cuda if gpu else "",
        "measured by rewriter probe",
        sm=gpu.sm if gpu else "",
        answers={p.name: p.answer({c.name: results[p.name, c.name] for c in p.cases}) for p in probes},
    )


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


def known_target(target: Target) -> Target:
    """The target with its answers, measured on this machine's GPU or recorded, and with that GPU."""
    here = this_machine.at_hand(target)
    asked = replace(target, gpus=here.gpus)
    answers = measured(asked) or next((a for a in recorded() if a.fits(asked)), None)
    if answers is None:
        return here
    return replace(here, answers=answers.values, known_from=answers.origin)


def measured(target: Target | None = None) -> Answers | None:
    """The newest answers of this machine's GPU and driver, for a target if one is given."""
    files = list[Path]()
    with suppress(OSError):  # there is no folder, or none that can be read
        folder = user_cache("probe", "any").parent
        files += sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    cached = chain.from_iterable(map(_read_cached, files))
    fitting = [answers for answers in cached if target is None or answers.fits(target)]
    gpu = this_machine.gpu() if fitting else None  # asks the driver in a child process: only if it matters
    return next((a for a in fitting if gpu is not None and (a.gpu, a.driver) == (gpu.name, gpu.cuda)), None)


def remember(answers: Answers) -> Path | None:
    """Keep answers in the user's cache folder, by GPU, driver and library; None if it cannot be written."""
    name = f"{answers.gpu}, {answers.driver}, {answers.library} {answers.version}.json"
    with suppress(OSError, OutputError):
        path = user_cache("probe", name)
        write_json(plain_fields(answers), path, "the answers")
        return path
    return None


def _read_cached(path: Path) -> Iterator[Answers]:
    with suppress(UsageError):  # broken, or of another version: it can be measured again
        yield read(path)
