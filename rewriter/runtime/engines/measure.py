"""Measures variants of a model: builds and runs them in child processes, and returns outcomes.

`run_here` is the child's side: it loads every engine, runs every sample, and times all in turn.
`EngineCalls` keeps one engine loaded, which answers calls one by one.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rewriter.base import sandbox
from rewriter.base.errors import EngineError, NativeError, RewriterError
from rewriter.ir.model import Array
from rewriter.runtime.engines import tensor_files
from rewriter.runtime.engines.build import NO_TF32, BuildOptions, build
from rewriter.runtime.engines.caches import gpu_turn
from rewriter.runtime.engines.nvidia_driver import CudaFault
from rewriter.runtime.engines.protocol import INNER, EngineOutcome, Latency, MeasureSettings, Status, Variant
from rewriter.runtime.engines.this_machine import ENGINES


@dataclass
class Run:
    """One build of one variant, with its outcome so far, and the folder of its outputs.

    The `program`, a `Program`, and `times`, in microseconds, are only set in the child.
    """

    variant: Variant
    results: Path
    outcome: EngineOutcome
    program: Any = None
    times: list[float] = field(default_factory=list)

    def add(self, **fields: Any) -> None:
        self.outcome = replace(self.outcome, **fields)


def measure(variants: Sequence[Variant], settings: MeasureSettings, folder: Path) -> list[EngineOutcome]:
    """Build every variant, run every sample, and time all interleaved.

    Args:
        folder: For engines and outputs. Outcomes read them from there, so it must outlive them.

    Returns:
        One outcome for each variant and build, in that order, including failures. If the process that runs
        them crashes or hangs, each is run by itself to find the cause; the others are then timed without it.

    Raises:
        EngineError: the library is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = list[Run]()
    for index, variant in enumerate(variants):
        for number in range(settings.builds):
            name = f"{index:03d}-{number}"
            built, outcome = build_variant(variant, settings, folder / f"{name}.engine", number)
            runs.append(Run(built, folder / "outputs" / name, outcome))
    for tf32 in (True, False):
        if group := [run for run in runs if run.outcome.ran and run.variant.tf32 == tf32]:
            _run_group(group, settings)
    return [run.outcome for run in runs]


def build_variant(
    variant: Variant, settings: MeasureSettings, target: Path, number: int = 0
) -> tuple[Variant, EngineOutcome]:
    """Build one variant, if its engine needs a build.

    Returns:
        The variant with its engine, and an outcome to go on with: it is not `ok` if there is nothing to load.
    """
    outcome = EngineOutcome(variant.name, number, "ok")
    if variant.engine is not None or not ENGINES[settings.engine].builds:
        return variant, outcome
    options = BuildOptions(
        shapes=tensor_files.spans_of(map(tensor_files.read_tensors, variant.samples)) | dict(variant.shapes),
        values=tensor_files.values_of(map(tensor_files.read_tensors, variant.samples)),
        library=settings.engine.replace("-", "_"),
        engine=target,
        outputs=variant.outputs,
        unfused=bool(variant.unfused),
        tf32=variant.tf32,
        plugins=settings.plugins,
        timing_cache=settings.builds == 1,
    )
    try:
        report = build(variant.path, options, timeout_s=settings.timeout_s)
    except NativeError as error:
        return variant, _failed(outcome, error)
    if report.engine_bytes is None:
        library = f"{report.library} {report.version}"
        outcome = replace(outcome, status="refused", problem=report.refusal, hint=report.hint)
        return variant, replace(outcome, log=report.log, library=library, report=report)
    return replace(variant, engine=target), replace(outcome, report=report, notes=report.notes)


def _failed(outcome: EngineOutcome, error: RewriterError) -> EngineOutcome:
    """The outcome of a child process without an answer, or with an unexpected exception."""
    status: Status = "error"
    if isinstance(error, NativeError) and error.cause:
        status = "timeout" if error.cause == "timeout" else "crashed"
    log = getattr(error, "log", "")
    return replace(outcome, status=status, problem=error.what, hint=error.hint, log=log)


def _run_group(group: Sequence[Run], settings: MeasureSettings) -> None:
    """Run all together; if the process crashes or hangs, run each by itself, then the survivors together."""
    try:
        _run(group, settings)
    except RewriterError as error:
        if len(group) == 1:
            group[0].outcome = _failed(group[0].outcome, error)
            return
        for run in group:
            _run_group([run], replace(settings, timing=None))
        well = [run for run in group if run.outcome.ran]
        if well and settings.timing is not None:
            with suppress(RewriterError):
                _run(well, settings)


def _run(group: Sequence[Run], settings: MeasureSettings) -> None:
    """Run a group in one child; those that fail get its log."""
    outcomes, log = sandbox.run(
        run_here,
        group,
        settings,
        doing="the run",
        limit_s=settings.timeout_s,
        env=None if group[0].variant.tf32 else NO_TF32,
    )
    for run, outcome in zip(group, outcomes, strict=True):
        run.outcome = outcome if outcome.ran else replace(outcome, log=log)


def run_here(runs: Sequence[Run], settings: MeasureSettings) -> list[EngineOutcome]:
    """Run all in this process; a CudaFault if the GPU failed, which makes the other results unreliable."""
    _each(runs, partial(_load, settings=settings))
    # not while they load: it takes long
    with gpu_turn() if ENGINES[settings.engine].on_gpu else nullcontext():
        _each(runs, _run_samples)
        if settings.timing is not None:
            _each(runs, lambda run: run.program.prepare(tensor_files.read_tensors(run.variant.samples[0])))
            for _ in range(settings.timing.warm_up):
                _each(runs, _time)
            for run in runs:
                run.times.clear()
            for _ in range(settings.timing.repeats):  # in turn, so that drift of the clock affects all alike
                _each(runs, _time)
    return [_closed(run) for run in runs]


def _each(runs: Sequence[Run], work: Callable[[Run], None]) -> None:
    """Does a piece of work for every run. The first error of a run ends it; a fault of the GPU ends all."""
    for run in runs:
        if run.outcome.ran:
            try:
                work(run)
            except CudaFault:
                raise
            except RewriterError as error:
                run.add(status="error", problem=error.what, hint=error.hint)


def _load(run: Run, settings: MeasureSettings) -> None:
    run.program = ENGINES[settings.engine].load(run.variant, settings)
    run.add(device=run.program.device, library=run.program.library, kernels=run.program.kernels)


def _run_samples(run: Run) -> None:
    outputs = list[Path]()
    for number, sample in enumerate(run.variant.samples):
        sys.stderr.write(f"[INFO] {run.variant.name}: sample {number}\n")
        folder, inner = run.results / f"{number:04d}", None
        if run.variant.unfused == "run":
            inner = tensor_files.TensorWriter(folder / INNER)
        values = run.program.run(tensor_files.read_tensors(sample), inner.add if inner else None)
        if inner:
            inner.close()
        outputs.append(tensor_files.write_tensors(folder, values))
    run.add(outputs=tuple(outputs))


def _time(run: Run) -> None:
    run.times.append(run.program.time_us())


def _closed(run: Run) -> EngineOutcome:
    if run.program is not None:
        run.add(notes=tuple(dict.fromkeys((*run.outcome.notes, *run.program.notes))))
        if run.outcome.ran and run.times:
            run.add(latency=summary(run.times, run.program.cuda_graph))
        with suppress(RewriterError):
            run.program.close()
    return run.outcome


def summary(times: Sequence[float], cuda_graph: bool) -> Latency:
    """Median and spread of timings in microseconds."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return Latency(statistics.median(times), high - low, len(times), cuda_graph)


class EngineCalls(AbstractContextManager["EngineCalls"]):
    """A model, built and loaded in a process of its own, which `close` ends.

    Args:
        variant: Its samples and shapes give the profile: axes that grow from call to call need a span.

    Raises:
        EngineError: it cannot be built or loaded here. NativeError: its process crashed.
    """

    def __init__(self, variant: Variant, settings: MeasureSettings, folder: Path) -> None:
        built, outcome = build_variant(variant, settings, folder / f"{variant.name}.engine")
        if not outcome.ran:
            raise EngineError(outcome.problem, where=str(variant.path), hint=outcome.hint)
        load = partial(ENGINES[settings.engine].load, built, settings)
        env = {} if variant.tf32 else NO_TF32
        self._worker = sandbox.Worker(
            load, doing="the engine", limit_s=settings.timeout_s, env=env, limited=False
        )

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name; an EngineError if a shape is outside the profile."""
        values: dict[str, Array] = self._worker.call("run", dict(feeds))
        return values

    def time_us(self, feeds: Mapping[str, Array], repeats: int) -> list[float]:
        """The device's time of runs on these feeds, without copies, in microseconds."""
        self._worker.call("prepare", dict(feeds))
        return [self._worker.call("time_us") for _ in range(repeats)]

    def close(self) -> None:
        self._worker.close()

    def __exit__(self, *_: object) -> None:
        self.close()
