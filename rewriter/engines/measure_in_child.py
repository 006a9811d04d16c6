"""The child's side of a measurement: loads every engine, runs every sample, times all in turn."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rewriter.engines.cuda import CudaFault
from rewriter.engines.protocol import Engine, Latency, Program, RunOrder, Timing
from rewriter.engines.tensor_files import read_tensors, write_tensors
from rewriter.errors import RewriterError

LEAST_REPEATS = 10
"""Smallest number of timed rounds, however long they are: quartiles of fewer mean little."""


def engine_named(name: str) -> Engine:
    """The engine with this `EngineName`."""
    if name.startswith("onnxruntime"):
        from rewriter.engines.onnxruntime_program import OnnxRuntimeEngine

        return OnnxRuntimeEngine(gpu=name == "onnxruntime-cuda")
    from rewriter.engines.tensorrt_program import TensorRTEngine

    return TensorRTEngine(name.replace("-", "_"))


@dataclass
class _Lane:
    """One engine of the measurement, with its results so far; `answer` is JSON."""

    order: RunOrder
    program: Program | None = None
    times: list[float] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=lambda: {"status": "ok"})

    @property
    def alive(self) -> bool:
        return self.answer["status"] == "ok" and self.program is not None

    def fail(self, error: RewriterError) -> None:
        self.answer |= {"status": "error", "problem": error.what, "hint": error.hint or ""}


def run_here(
    engine: str, orders: Sequence[Mapping[str, Any]], timing: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Run all orders in this process.

    Args:
        orders: Fields of `RunOrder`, paths as text.
        timing: Fields of `Timing`; None: run, but time nothing.

    Returns:
        `outcomes`: for each order the fields of `Outcome` that a run gives.

    Raises:
        CudaFault: the GPU failed, so that results of other engines of this process would be unreliable.
    """
    lanes = [_Lane(_order(fields)) for fields in orders]
    maker = engine_named(engine)
    for lane in lanes:
        with _failing(lane):
            lane.program = maker.load(lane.order)
            _run_samples(lane, lane.program)
    if timing is not None:
        _time([lane for lane in lanes if lane.alive], Timing(**timing))
    return {"outcomes": [_closed(lane) for lane in lanes]}


def _order(fields: Mapping[str, Any]) -> RunOrder:
    paths = {name: Path(fields[name]) for name in ("engine", "results")}
    several = {name: tuple(map(Path, fields[name])) for name in ("samples", "plugins")}
    return RunOrder(**{**fields, **paths, **several, "outputs": tuple(fields["outputs"])})


def _run_samples(lane: _Lane, program: Program) -> None:
    target = lane.order.results
    lane.answer |= {"device": program.device, "library": program.library, "outputs": [], "debug": []}
    for number, folder in enumerate(lane.order.samples):
        sys.stderr.write(f"[INFO] {lane.order.name}: sample {number}\n")
        debug = target / f"debug-{number:04d}" if lane.order.debug else None
        outputs = program.run(read_tensors(folder), debug)
        lane.answer["outputs"].append(str(write_tensors(target / f"{number:04d}", outputs)))
        if debug is not None and debug.is_dir():
            lane.answer["debug"].append(str(debug))
    lane.answer["layers"] = [asdict(layer) for layer in program.layers()]


def _time(lanes: Sequence[_Lane], timing: Timing) -> None:
    """Time all in turn, round by round, so that drift of the GPU's clock affects all alike."""
    for lane in lanes:
        with _failing(lane):
            assert lane.program is not None
            lane.program.prepare(read_tensors(lane.order.samples[0]))
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
        lane.fail(error)


def _closed(lane: _Lane) -> dict[str, Any]:
    if lane.program is None:
        return lane.answer
    lane.answer["notes"] = list(dict.fromkeys(lane.program.notes))
    if lane.alive and lane.times:
        lane.answer["latency"] = asdict(summary(lane.times, lane.program.cuda_graph))
    with suppress(RewriterError), closing(lane.program):
        pass
    return lane.answer


def summary(times: Sequence[float], cuda_graph: bool) -> Latency:
    """Median and spread of timings in microseconds."""
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return Latency(statistics.median(times), high - low, min(times), len(times), cuda_graph)
