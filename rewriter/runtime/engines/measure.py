"""Measures variants of a model: builds and runs them in child processes, and returns outcomes.

`run_here` is the child's side: it loads every engine, runs every sample, and times all in turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rewriter.ir import children
from rewriter.ir.errors import EngineError, NativeError, RewriterError
from rewriter.runtime.engines.build import NO_TF32, BuildOptions, BuildReport, build
from rewriter.runtime.engines.caches import gpu_turn
from rewriter.runtime.engines.nvidia_driver import CudaFault
from rewriter.runtime.engines.protocol import (
    EngineName,
    EngineOutcome,
    Latency,
    MeasureSettings,
    Program,
    RunOrder,
    Status,
    Timing,
    Variant,
)
from rewriter.runtime.engines.tensor_files import spans_of, write_tensors

SHAPE_LIKE = 16
"""Most elements of an integer input that can be a shape, an axis or a trip count: a build needs its value."""

UNBUILT: frozenset[EngineName | None] = frozenset({"onnxruntime", "onnxruntime-cuda"})
"""Engines that run the ONNX file itself."""


def measure(variants: Sequence[Variant], settings: MeasureSettings, folder: Path) -> list[EngineOutcome]:
    """Build every variant, run every sample, and time all interleaved.

    Args:
        variants: With names of their own.
        folder: Where engines and outputs go; what the outcomes read lives as long as it does.

    Returns:
        One outcome for each variant and build, in that order, failures included. If the process that runs
        them crashes or hangs, each is run alone to find the cause, and the others are then timed without it.

    Raises:
        EngineError: the library is not installed, or two variants share a name.
    """
    names = [variant.name for variant in variants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise EngineError(f"several variants are called {sorted(twice)[0]!r}", hint="give each its own name")
    folder.mkdir(parents=True, exist_ok=True)
    built: list[RunOrder] = []
    outcomes: dict[tuple[str, int], EngineOutcome] = {}
    for place, variant in enumerate(variants):
        for number in range(settings.builds):
            name = f"{place:03d}-{number}"
            found = build_variant(variant, settings, folder / f"{name}.engine", number)
            if isinstance(found, EngineOutcome):
                outcomes[variant.name, number] = found
            else:
                engine, report = found
                results = folder / "outputs" / name
                cache = settings.runtime_cache
                built.append(RunOrder(variant, number, engine, results, settings.plugins, report, cache))
    for tf32 in (True, False):
        group = [one for one in built if one.variant.tf32 == tf32]
        for outcome in _run_group(group, settings) if group else ():
            outcomes[outcome.variant, outcome.build] = outcome
    return [outcomes[variant.name, number] for variant in variants for number in range(settings.builds)]


def build_variant(
    variant: Variant, settings: MeasureSettings, target: Path, number: int = 0
) -> tuple[Path, BuildReport | None] | EngineOutcome:
    """Build one variant, if its engine needs a build.

    Returns:
        What to load, and the builder's report if there is one; the outcome if there is nothing to load.

    Raises:
        EngineError: the library is not installed.
    """
    if variant.engine is not None:
        return variant.engine, None
    if settings.engine in UNBUILT:
        return variant.path, None
    options = BuildOptions(
        shapes=spans_of(variant.samples) | dict(variant.shapes),
        values=shape_values(next(iter(variant.samples))) if len(variant.samples) else {},
        library=settings.engine.replace("-", "_"),
        optimization_level=settings.optimization_level,
        engine=str(target),
        outputs=variant.outputs,
        debug=variant.debug,
        tf32=variant.tf32,
        details=True,
        plugins=[str(plugin) for plugin in settings.plugins],
        timing_cache=settings.builds == 1,
    )
    limit_s = settings.build_timeout_s
    try:
        built = build(variant.path, options, timeout_s=limit_s, memory_bytes=settings.memory_bytes)
    except NativeError as error:
        return _accident(variant.name, number, error)
    if built.engine_bytes is None:
        return _refusal(variant.name, number, built)
    return target, built


def shape_values(sample: Mapping[str, Any]) -> dict[str, list[int]]:
    """Values of the inputs that could be shapes themselves, for a build needs them."""
    return {
        name: array.reshape(-1).tolist()
        for name, array in sample.items()
        if array.dtype.kind in "iu" and array.ndim <= 1 and array.size <= SHAPE_LIKE
    }


def _refusal(name: str, number: int, report: BuildReport) -> EngineOutcome:
    """The outcome of a build that gave no engine."""
    reasons = [str(error) for error in report.parser_errors]
    reasons = reasons or ([report.obstacle] if report.obstacle else list(report.errors[-3:]))
    problem = "; ".join(reasons) or "the builder gave no engine and no reason"
    library = f"{report.library} {report.version}"
    return EngineOutcome(
        name, number, "refused", problem, report.hint, report.log, library=library, report=report
    )


def _accident(name: str, number: int, error: RewriterError) -> EngineOutcome:
    """The outcome of a child process without an answer, or with an unexpected exception."""
    status: Status = "error"
    if isinstance(error, NativeError) and error.cause:
        status = "timeout" if error.cause == "timeout" else "crashed"
    return EngineOutcome(name, number, status, error.what, error.hint or "", getattr(error, "log", ""))


def _run_group(group: Sequence[RunOrder], settings: MeasureSettings) -> Iterator[EngineOutcome]:
    """Run all together; if that process crashes or hangs, run each alone, and then the survivors together."""
    try:
        yield from _run(group, settings)
    except RewriterError as error:
        if len(group) == 1:
            yield from (_failed(one, error) for one in group)
            return
    alone = [_alone(one, settings) for one in group]
    well = [one for one, outcome in zip(group, alone, strict=True) if outcome.ran]
    again = list(_together(well, settings))
    timed = {(outcome.variant, outcome.build): outcome for outcome in again}
    yield from (timed.get((outcome.variant, outcome.build), outcome) for outcome in alone)


def _alone(one: RunOrder, settings: MeasureSettings) -> EngineOutcome:
    try:
        return _run([one], replace(settings, timing=None))[0]
    except RewriterError as error:
        return _failed(one, error)


def _together(well: Sequence[RunOrder], settings: MeasureSettings) -> Iterator[EngineOutcome]:
    """Those that run alone, once more in one process, to be timed; nothing if that fails again."""
    if well and settings.timing is not None:
        with suppress(RewriterError):
            yield from _run(well, settings)


def _run(group: Sequence[RunOrder], settings: MeasureSettings) -> list[EngineOutcome]:
    """The outcomes of one child, with its log where one of them failed."""
    outcomes, log = children.run(
        run_here,
        settings.engine,
        group,
        settings.timing,
        doing="the run",
        limit_s=settings.run_timeout_s,
        env=None if group[0].variant.tf32 else NO_TF32,
        memory_bytes=settings.memory_bytes,
    )
    return [one if one.ran else replace(one, log=log) for one in outcomes]


def _failed(one: RunOrder, error: RewriterError) -> EngineOutcome:
    return replace(_accident(one.variant.name, one.number, error), report=one.report)


LEAST_REPEATS = 10
"""Smallest number of timed rounds, however long they are: quartiles of fewer mean little."""


def load_program(engine: EngineName, order: RunOrder) -> Program:
    """Load what was built with the engine of this name."""
    if engine.startswith("onnxruntime"):
        from rewriter.runtime.engines.local_session import OnnxRuntimeProgram

        return OnnxRuntimeProgram(order, gpu=engine == "onnxruntime-cuda")
    from rewriter.runtime.engines.tensorrt_program import load_engine

    return load_engine(engine.replace("-", "_"), order)


class _EngineRun:
    """One engine of the measurement, with its results so far."""

    def __init__(self, order: RunOrder) -> None:
        self.order = order
        self.program: Program | None = None
        self.times: list[float] = []
        notes = order.report.notes if order.report else ()
        self.outcome = EngineOutcome(order.variant.name, order.number, "ok", report=order.report, notes=notes)

    @property
    def alive(self) -> bool:
        return self.outcome.ran and self.program is not None

    def add(self, **fields: Any) -> None:
        self.outcome = replace(self.outcome, **fields)


def run_here(engine: EngineName, orders: Sequence[RunOrder], timing: Timing | None) -> list[EngineOutcome]:
    """Run all orders in this process.

    Args:
        timing: None: run, but time nothing.

    Raises:
        CudaFault: the GPU failed, so that results of other runs of this process would be unreliable.
    """
    runs = [_EngineRun(order) for order in orders]
    for run in runs:
        with _failing(run):
            run.program = load_program(engine, run.order)
    with gpu_turn() if engine != "onnxruntime" else nullcontext():  # not while they load: it takes long
        for run in runs:
            if run.program is not None:
                with _failing(run):
                    _run_samples(run, run.program)
        if timing is not None:
            _time([run for run in runs if run.alive], timing)
    return [_closed(run) for run in runs]


def _run_samples(run: _EngineRun, program: Program) -> None:
    variant, target = run.order.variant, run.order.results
    run.add(device=program.device, library=program.library)
    for number, feeds in enumerate(variant.samples):
        sys.stderr.write(f"[INFO] {variant.name}: sample {number}\n")
        debug = target / f"debug-{number:04d}" if variant.debug else None
        written = write_tensors(target / f"{number:04d}", program.run(feeds, debug))
        run.add(outputs=(*run.outcome.outputs, written))
        if debug is not None and debug.is_dir():
            run.add(debug=(*run.outcome.debug, debug))
    run.add(layers=tuple(program.layers()))


def _time(runs: Sequence[_EngineRun], timing: Timing) -> None:
    """Time all in turn, round by round, so that drift of the GPU's clock affects all alike."""
    for run in runs:
        with _failing(run):
            assert run.program is not None
            run.program.prepare(next(iter(run.order.variant.samples)))
    limit = None if timing.seconds is None else timing.seconds * len(runs)
    _rounds(runs, timing.warm_up, 1, limit)
    for run in runs:
        run.times.clear()
    _rounds(runs, timing.repeats, LEAST_REPEATS, limit)


def _rounds(runs: Sequence[_EngineRun], most: int, least: int, limit: float | None) -> None:
    """Run `most` rounds, or as many as fit into `limit` seconds, but at least `least`."""
    start = time.perf_counter()
    for number in range(most):
        if limit is not None and number >= least and time.perf_counter() - start > limit:
            return
        for run in runs:
            if run.alive and run.program is not None:
                with _failing(run):
                    run.times.append(run.program.time_us())


@contextmanager
def _failing(run: _EngineRun) -> Iterator[None]:
    """Ends a run at its first error; a fault of the GPU ends all runs."""
    try:
        yield
    except CudaFault:
        raise
    except RewriterError as error:
        run.add(status="error", problem=error.what, hint=error.hint or "")


def _closed(run: _EngineRun) -> EngineOutcome:
    if run.program is not None:
        run.add(notes=(*run.outcome.notes, *dict.fromkeys(run.program.notes)))
        if run.alive and run.times:
            run.add(latency=summary(run.times, run.program.cuda_graph))
        with suppress(RewriterError), closing(run.program):
            pass
    return run.outcome


def summary(times: Sequence[float], cuda_graph: bool) -> Latency:
    """Median and spread of timings in microseconds."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return Latency(statistics.median(times), high - low, min(times), len(times), cuda_graph)
