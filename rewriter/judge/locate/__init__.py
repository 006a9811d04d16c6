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
from dataclasses import dataclass, field, replace
from pathlib import Path

from rewriter.ir.errors import UsageError
from rewriter.ir.model import Array, Model, save
from rewriter.ir.model import facts as tensor_facts
from rewriter.ir.model.stopwatch import LASTING, Progress
from rewriter.judge.expected import as_declared
from rewriter.judge.locate.bisection import MARKS, MAX_BUILDS, Bisection, Marked, Measure
from rewriter.judge.locate.lineup import Lineup, SharedTensor, line_up
from rewriter.judge.locate.location import Location, Step
from rewriter.judge.locate.runs import (
    Build,
    EngineBuild,
    Exact,
    Measurement,
    UnmarkedOutputs,
    first_run,
)
from rewriter.passes.algorithms.rescaling.apply import between
from rewriter.runtime.emulation import Accumulation, reference
from rewriter.runtime.emulation.divergence import diverge
from rewriter.runtime.engines.build import builds_at_a_time
from rewriter.runtime.engines.protocol import MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import Span, write_samples
from rewriter.runtime.figures.tolerances import TOLERANCES

__all__ = ["LocateOptions", "Location", "Step", "locate", "locate_by_emulation", "locate_with"]

TOLERANCE = TOLERANCES["fp16"].value
"""Relative L2 error above which a tensor is wrong: well-conditioned networks stay below it in FP16."""

FAULT_SHARE = 0.1
"""Share of an output's error by which marks may move it. With another kernel the rounding differs, but the
fault stays; a build with a larger change is discarded."""

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
    original: Model,
    other: Model,
    samples: Iterable[Mapping[str, Array]],
    settings: MeasureSettings,
    options: LocateOptions | None = None,
    profile: Mapping[str, Span] | None = None,
    progress: Progress = lambda *_: None,
) -> Location:
    """Finds the first tensor of `other` that differs from `original` when an engine runs it.

    Args:
        samples: Inputs of the original, iterated once for every build.
        settings: Engine, time limits and plugins; its builds and timing are ignored.
        profile: Optimisation profile of inputs with dynamic axes; the others' come from the samples.

    Raises:
        EngineError: the library is missing, or the other model does not build or run.
        ArithmeticRunError: ONNX Runtime cannot run the original.
        UsageError: the models have no tensor in common.
    """
    weights = sum(array.nbytes for array in other.weights.values())
    jobs = min(JOBS, builds_at_a_time(settings.engine, weights))
    limits = replace(options or LocateOptions(), jobs=jobs)
    with tempfile.TemporaryDirectory(prefix="rewriter-locate-") as name:
        folder = Path(name)
        path = other.path or save(other, folder / "other.onnx")
        fed = write_samples(folder / "samples", (as_declared(other, sample) for sample in samples))
        variant, once = (
            Variant("other", path, fed, shapes=profile or {}),
            replace(settings, timing=None, builds=1),
        )
        build = EngineBuild(variant, folder / "builds", once, jobs)
        return locate_with(original, other, samples, build, limits, progress)


def locate_with(
    original: Model,
    other: Model,
    samples: Iterable[Mapping[str, Array]],
    build: Build,
    options: LocateOptions,
    progress: Progress = lambda *_: None,
) -> Location:
    """Locates with any engine: `build` runs the other model with some of its tensors marked."""
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
    measure = Measurement(build, exact, before, allowed, {t.name: t.exact for t in lineup.tensors})
    location = Location(run.engine, options.tolerance, (), spread=spread, notes=run.notes)
    found = _searched(location, _Errors(lineup, errors, known), measure, options, report)
    return replace(found, moved=measure.moved)


def _room(errors: Iterable[float], tolerance: float) -> float:
    """Returns the largest change of the outputs by marks that leaves the fault recognisable."""
    wrong = [error for error in errors if not error <= tolerance]
    return min((FAULT_SHARE * e if math.isfinite(e) else tolerance for e in wrong), default=0.0)


def locate_by_emulation(
    original: Model,
    other: Model,
    samples: Iterable[Mapping[str, Array]],
    options: LocateOptions | None = None,
    accumulation: Accumulation = "fp16",
) -> Location:
    """Locates by the emulation of `other` on the CPU, which shows every tensor in one run."""
    options = options or LocateOptions()
    exact, lineup = _prepared(original, other, samples)
    exponents = between(original, other)
    found = {node.tensor: node for node in diverge(original, other, samples, accumulation, exponents).nodes}
    known = {t.name: found[t.exact].total for t in lineup.tensors if t.exact in found}
    added = {t.name: found[t.exact].added for t in lineup.tensors if t.exact in found}
    errors = {name: known[name] for name in exact.outputs if name in known}
    engine = f"emulation on ONNX Runtime, {accumulation.upper()} accumulators"
    location = Location(engine, options.tolerance, ())
    return _searched(location, _Errors(lineup, errors, known, added), _nothing, options, lambda line: None)


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
class _Errors:
    """Errors of the outputs, and of all tensors that are known before the search."""

    lineup: Lineup
    outputs: Mapping[str, float]
    known: dict[str, float]
    added: Mapping[str, float] = field(default_factory=dict)

    def step(self, tensor: SharedTensor, note: str = "") -> Step:
        name = tensor.name
        return Step(name, tensor.node, tensor.op, self.known.get(name), self.added.get(name), note)


def _searched(
    location: Location, errors: _Errors, measure: Measure, options: LocateOptions,
    report: Callable[[str], None],
) -> Location:  # fmt: skip
    """Adds the results of a search to the location."""
    by_name = {t.name: t for t in errors.lineup.tensors}
    outputs = tuple(
        errors.step(by_name[name]) if name in by_name else Step(name, name, "Output", error)
        for name, error in errors.outputs.items()
    )
    location = replace(location, outputs=outputs, tensors=len(by_name))
    wrong = [n for n, e in errors.outputs.items() if not e <= options.tolerance and n in by_name]
    if not wrong:
        return location
    # only tensors before a wrong output: the others cannot be the cause
    lineup = errors.lineup.leading_to(wrong)
    search = Bisection(
        lineup,
        measure,
        options.tolerance,
        errors.known,
        options.marks,
        options.max_builds,
        options.jobs,
        report,
    )
    search.run()
    chain = _chain(search, max(wrong, key=lambda n: errors.outputs[n]), options.steps)
    return _located(location, errors, search, chain)


def _chain(search: Bisection, end: str, steps: int) -> list[int]:
    """Returns positions from the first wrong tensor to a wrong output, at most `steps`, and measures them."""
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
    """Returns the positions of the first wrong tensor and its descendants."""
    found = {search.high}
    for position, tensor in enumerate(search.lineup.tensors):
        if not found.isdisjoint(tensor.parents):
            found.add(position)
    return found


def _located(location: Location, errors: _Errors, search: Bisection, chain: list[int]) -> Location:
    tensors, known = search.lineup.tensors, search.known

    def steps(positions: Iterable[int]) -> tuple[Step, ...]:
        return tuple(
            errors.step(t, "" if t.name in known else search.hiding.get(t.name, "not measured"))
            for t in (tensors[position] for position in positions)
        )

    right: Iterable[int] = tensors[search.high].parents if search.found else ()
    if not search.found and search.low >= 0:
        places = {t.name: i for i, t in enumerate(tensors)}
        right = (places[name] for name in search.cut(search.low))
    between = range(search.low + 1, search.high)
    (first,) = steps([search.high])
    return replace(
        location,
        first=first,
        exact=search.found,
        right=steps(right),
        chain=steps(chain),
        hiding=steps(i for i in between if tensors[i].name in search.hiding),
        builds=search.builds,
        discarded=search.discarded,
    )
