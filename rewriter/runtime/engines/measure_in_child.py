"""The child's side of a measurement: loads every engine, runs every sample, times all in turn."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from rewriter.ir.errors import RewriterError
from rewriter.runtime.engines.caches import gpu_turn
from rewriter.runtime.engines.cuda import CudaFault
from rewriter.runtime.engines.protocol import EngineName, EngineOutcome, Latency, Program, RunOrder, Timing
from rewriter.runtime.engines.tensor_files import write_tensors

LEAST_REPEATS = 10
"""Smallest number of timed rounds, however long they are: quartiles of fewer mean little."""


def load_program(engine: EngineName, order: RunOrder) -> Program:
    """Load what was built with the engine of this name."""
    if engine.startswith("onnxruntime"):
        from rewriter.runtime.engines.local_session import OnnxRuntimeProgram

        return OnnxRuntimeProgram(order, gpu=engine == "onnxruntime-cuda")
    from rewriter.runtime.engines.tensorrt_program import load_engine

    return load_engine(engine.replace("-", "_"), order)


class _Lane:
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
        CudaFault: the GPU failed, so that results of other engines of this process would be unreliable.
    """
    lanes = [_Lane(order) for order in orders]
    for lane in lanes:
        with _failing(lane):
            lane.program = load_program(engine, lane.order)
    with gpu_turn() if engine != "onnxruntime" else nullcontext():  # not while they load: it takes long
        for lane in lanes:
            if lane.program is not None:
                with _failing(lane):
                    _run_samples(lane, lane.program)
        if timing is not None:
            _time([lane for lane in lanes if lane.alive], timing)
    return [_closed(lane) for lane in lanes]


def _run_samples(lane: _Lane, program: Program) -> None:
    variant, target = lane.order.variant, lane.order.results
    lane.add(device=program.device, library=program.library)
    for number, feeds in enumerate(variant.samples):
        sys.stderr.write(f"[INFO] {variant.name}: sample {number}\n")
        debug = target / f"debug-{number:04d}" if variant.debug else None
        written = write_tensors(target / f"{number:04d}", program.run(feeds, debug))
        lane.add(outputs=(*lane.outcome.outputs, written))
        if debug is not None and debug.is_dir():
            lane.add(debug=(*lane.outcome.debug, debug))
    lane.add(layers=tuple(program.layers()))


def _time(lanes: Sequence[_Lane], timing: Timing) -> None:
    """Time all in turn, round by round, so that drift of the GPU's clock affects all alike."""
    for lane in lanes:
        with _failing(lane):
            assert lane.program is not None
            lane.program.prepare(next(iter(lane.order.variant.samples)))
    limit = None if timing.seconds is None else timing.seconds * len(lanes)
    _rounds(lanes, timing.warm_up, 1, limit)
    for lane in lanes:
        lane.times.clear()
    _rounds(lanes, timing.repeats, LEAST_REPEATS, limit)


def _rounds(lanes: Sequence[_Lane], most: int, least: int, limit: float | None) -> None:
    """Run `most` rounds, or as many as fit into `limit` seconds, but at least `least`."""
    start = time.perf_counter()
    for number in range(most):
        if limit is not None and number >= least and time.perf_counter() - start > limit:
            return
        for lane in lanes:
            if lane.alive and lane.program is not None:
                with _failing(lane):
                    lane.times.append(lane.program.time_us())


@contextmanager
def _failing(lane: _Lane) -> Iterator[None]:
    """Ends a lane at its first error; a fault of the GPU ends all lanes."""
    try:
        yield
    except CudaFault:
        raise
    except RewriterError as error:
        lane.add(status="error", problem=error.what, hint=error.hint or "")


def _closed(lane: _Lane) -> EngineOutcome:
    if lane.program is not None:
        lane.add(notes=(*lane.outcome.notes, *dict.fromkeys(lane.program.notes)))
        if lane.alive and lane.times:
            lane.add(latency=summary(lane.times, lane.program.cuda_graph))
        with suppress(RewriterError), closing(lane.program):
            pass
    return lane.outcome


def summary(times: Sequence[float], cuda_graph: bool) -> Latency:
    """Median and spread of timings in microseconds."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return Latency(statistics.median(times), high - low, min(times), len(times), cuda_graph)
