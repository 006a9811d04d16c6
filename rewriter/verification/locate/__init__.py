"""Locates the first tensor of an engine that goes wrong, without changing the engine's results.

The library does not fuse across a tensor that is marked as an output, which can hide the very fault. So each
build marks a few tensors only, and is discarded if its outputs differ from those of a build without marks.
Unfused debug tensors leave fusion as it is: if the library has them, they are compared first.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rewriter.emulation import Accumulation, reference
from rewriter.emulation.divergence import diverge
from rewriter.engines.parallel_builds import builds_at_a_time
from rewriter.engines.protocol import EngineName, MeasureSettings, Span
from rewriter.engines.tensor_files import write_samples
from rewriter.errors import UsageError
from rewriter.figures.tolerances import TOLERANCES
from rewriter.model import Array, Model, load
from rewriter.model import facts as tensor_facts
from rewriter.model.stopwatch import LASTING, Progress
from rewriter.rewriting.rescaling.record import between
from rewriter.verification.expected import as_declared
from rewriter.verification.locate.bisection import MARKS, MAX_BUILDS, Bisection, Marked, Measure
from rewriter.verification.locate.lineup import Lineup, SharedTensor, line_up
from rewriter.verification.locate.location import Location, Step
from rewriter.verification.locate.runs import (
    NO_PROFILE,
    Build,
    EngineBuild,
    Exact,
    Measurement,
    UnmarkedOutputs,
    first_run,
)

__all__ = ["LocateOptions", "Location", "Step", "locate", "locate_by_emulation", "locate_with"]

TOLERANCE = TOLERANCES["fp16"].value
"""Relative L2 error up to which a tensor is right: well-conditioned networks stay below it in FP16."""

FAULT_SHARE = 0.1
"""Share of an output's error by which marks may move it. Another kernel rounds in another way, and the fault
is still there; a build with a larger change is discarded."""

JOBS = 4
"""Most builds at a time: their engines run together and share the GPU's memory."""

STEPS = 16
"""Default number of tensors of the chain that are measured."""


@dataclass(frozen=True)
class LocateOptions:
    """Limits of the search.

    Attributes:
        tolerance: A tensor with a larger relative L2 error is wrong.
        marks: Most tensors that one build marks.
        max_builds: Most builds of the search.
        builds: Builds without marks: marks may change the outputs by as much as these differ.
        steps: Most tensors of the chain that are measured.
        jobs: Builds at a time.
    """

    tolerance: float = TOLERANCE
    marks: int = MARKS
    max_builds: int = MAX_BUILDS
    builds: int = 2
    steps: int = STEPS
    jobs: int = 1


def locate(
    original: Path,
    other: Path,
    samples: Iterable[Mapping[str, Array]],
    engine: EngineName,
    options: LocateOptions | None = None,
    settings: MeasureSettings | None = None,
    profile: Mapping[str, Span] = NO_PROFILE,
    progress: Progress = lambda *_: None,
) -> Location:
    """Find the first tensor of `other` that differs from `original` when an engine runs it.

    Args:
        samples: Inputs of the original, iterated once for every build.
        settings: Time limits and plugins; its engine, builds and timing are ignored.
        profile: Optimisation profile of inputs with dynamic axes; the others' come from the samples.

    Raises:
        EngineError: the library is missing, or the other model does not build or run.
        ArithmeticRunError: ONNX Runtime cannot run the original.
        UsageError: the models have no tensor in common.
    """
    mine, yours = load(original), load(other)
    with tempfile.TemporaryDirectory(prefix="rewriter-locate-") as name:
        folder = Path(name)
        fed = write_samples(folder / "samples", (as_declared(yours, sample) for sample in samples))
        chosen = settings or MeasureSettings(engine)
        jobs = min(JOBS, builds_at_a_time(engine, sum(array.nbytes for array in yours.weights.values())))
        build = EngineBuild(other, fed, engine, folder / "builds", chosen, profile, jobs)
        return locate_with(
            mine, yours, samples, build, replace(options or LocateOptions(), jobs=jobs), progress
        )


def locate_with(
    original: Model,
    other: Model,
    samples: Iterable[Mapping[str, Array]],
    build: Build,
    options: LocateOptions,
    progress: Progress = lambda *_: None,
) -> Location:
    """`locate` with any engine: `build` runs the other model with some of its tensors marked."""
    start = time.monotonic()

    def report(line: str) -> None:
        progress(f"{LASTING}{time.monotonic() - start:.0f} s: {line}", 0, 0)

    exact, lineup = _prepared(original, other, samples)
    report(f"{len(lineup.tensors)} tensors to compare; a build without marks first")
    run = first_run(build, debug=True)
    before = UnmarkedOutputs(run, exact.outputs)
    errors = exact.errors({name: name for name in exact.outputs}, run.values)
    pairs = {t.name: t.exact for t in lineup.tensors if t.name not in errors}
    known = errors | exact.errors(pairs, run.debug)
    report(f"the worst output is off by {max(errors.values(), default=0.0):.2g}; how far builds differ")
    spread = max(
        (before.distance(first_run(build, debug=False)) for _ in range(options.builds - 1)), default=0.0
    )
    allowed = max(spread, _room(errors.values(), options.tolerance))
    measure = Measurement(build, exact, before, allowed, lineup.tensors)
    baseline = _Baseline(run.engine, options.tolerance, lineup, errors, spread, run.notes)
    return replace(_searched(baseline, known, measure, options, report), moved=measure.moved)


def _room(errors: Iterable[float], tolerance: float) -> float:
    """Change of the outputs by marks that leaves the fault recognisable."""
    wrong = [error for error in errors if not error <= tolerance]
    return min((FAULT_SHARE * e if math.isfinite(e) else tolerance for e in wrong), default=0.0)


def locate_by_emulation(
    original: Model,
    other: Model,
    samples: Iterable[Mapping[str, Array]],
    options: LocateOptions | None = None,
    accumulation: Accumulation = "fp16",
) -> Location:
    """`locate` with the emulation of `other` on the CPU, which shows every tensor in one run."""
    options = options or LocateOptions()
    exact, lineup = _prepared(original, other, samples)
    exponents = between(original, other)
    found = {node.tensor: node for node in diverge(original, other, samples, accumulation, exponents).nodes}
    known = {t.name: found[t.exact].total for t in lineup.tensors if t.exact in found}
    added = {t.name: found[t.exact].added for t in lineup.tensors if t.exact in found}
    errors = {name: known[name] for name in exact.outputs if name in known}
    engine = f"emulation on ONNX Runtime, {accumulation.upper()} accumulators"
    baseline = _Baseline(engine, options.tolerance, lineup, errors, 0.0, (), added)
    return _searched(baseline, known, _nothing, options, lambda line: None)


def _nothing(sets: Sequence[Sequence[str]]) -> list[Marked]:
    return [Marked({}, unchanged=False, problem="the emulation does not show it") for _ in sets]


def _prepared(original: Model, other: Model, samples: Iterable[Mapping[str, Array]]) -> tuple[Exact, Lineup]:
    facts = tensor_facts.infer(original)
    lineup = line_up(original, other, (facts, tensor_facts.infer(other)))
    if not lineup.tensors:
        raise UsageError(
            "the two models have no float tensor of one name and shape in common",
            where=str(other.path) if other.path else None,
            hint="give the model that the other one was made from; the tensors must have kept their names",
        )
    return Exact(reference(original, facts), samples, between(original, other)), lineup


@dataclass(frozen=True)
class _Baseline:
    """Errors that are known before the search."""

    engine: str
    tolerance: float
    lineup: Lineup
    errors: Mapping[str, float]
    spread: float
    notes: tuple[str, ...]
    added: Mapping[str, float] | None = None

    def step(self, tensor: SharedTensor, known: Mapping[str, float], note: str = "") -> Step:
        added = (self.added or {}).get(tensor.name)
        return Step(tensor.name, tensor.node, tensor.op, known.get(tensor.name), added, note)


def _searched(
    baseline: _Baseline, known: dict[str, float], measure: Measure, options: LocateOptions,
    report: Callable[[str], None],
) -> Location:  # fmt: skip
    by_name = {t.name: t for t in baseline.lineup.tensors}
    outputs = tuple(
        baseline.step(by_name[n], baseline.errors) if n in by_name else Step(n, n, "Output", e)
        for n, e in baseline.errors.items()
    )
    wrong = [n for n, e in baseline.errors.items() if not e <= options.tolerance and n in by_name]
    count = len(baseline.lineup.tensors)
    if not wrong:
        return Location(
            baseline.engine,
            options.tolerance,
            outputs,
            tensors=count,
            spread=baseline.spread,
            notes=baseline.notes,
        )
    # only tensors before a wrong output: the others cannot be the cause
    lineup = baseline.lineup.leading_to(wrong)
    search = Bisection(
        lineup, measure, options.tolerance, known, options.marks, options.max_builds, options.jobs, report
    )
    search.run()
    chain = _chain(search, max(wrong, key=lambda n: baseline.errors[n]), options.steps)
    return _location(baseline, search, outputs, chain)


def _chain(search: Bisection, end: str, steps: int) -> list[int]:
    """Positions from the first wrong tensor to a wrong output, at most `steps`; measures those it can."""
    tensors = search.lineup.tensors
    last = next(i for i, t in enumerate(tensors) if t.name == end)
    path = search.lineup.path(search.high, last)
    if path[-1] != last:  # of several faults, the first does not lead to the worst output
        ends = [i for i, t in enumerate(tensors) if t.name in search.known and i in _after(search)]
        path = search.lineup.path(search.high, ends[-1]) if ends else path
    kept = path if len(path) <= steps else [path[i * (len(path) - 1) // (steps - 1)] for i in range(steps)]
    while search.builds < search.max_builds:
        names = [tensors[i].name for i in kept]
        left = search.sets([n for n in names if n not in search.known and n not in search.hiding])
        if not left:
            break
        search.mark(left)
    return kept


def _after(search: Bisection) -> set[int]:
    """Positions of the first wrong tensor and its descendants."""
    found = {search.high}
    for position, tensor in enumerate(search.lineup.tensors):
        if not found.isdisjoint(tensor.parents):
            found.add(position)
    return found


def _location(
    baseline: _Baseline, search: Bisection, outputs: tuple[Step, ...], chain: list[int]
) -> Location:
    tensors, known = search.lineup.tensors, search.known

    def step(position: int) -> Step:
        name = tensors[position].name
        return baseline.step(
            tensors[position], known, "" if name in known else search.hiding.get(name, "not measured")
        )

    right = tensors[search.high].parents if search.found else ()
    if not search.found and search.low >= 0:
        places = {t.name: i for i, t in enumerate(tensors)}
        right = tuple(places[name] for name in search.cut(search.low))
    between = range(search.low + 1, search.high)
    return Location(
        baseline.engine,
        baseline.tolerance,
        outputs,
        first=step(search.high),
        exact=search.found,
        right=tuple(step(i) for i in right),
        chain=tuple(step(i) for i in chain),
        hiding=tuple(step(i) for i in between if tensors[i].name in search.hiding),
        tensors=len(baseline.lineup.tensors),
        builds=search.builds,
        discarded=search.discarded,
        spread=baseline.spread,
        notes=baseline.notes,
    )
