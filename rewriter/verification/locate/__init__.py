"""Where an engine starts to go wrong, without changing what it computes.

Marking a tensor as an output keeps the library from fusing across it, which can hide the very fault. So
a few tensors are marked at a time, and a build whose outputs differ from those without marks is thrown
away. Where the library has unfused debug tensors, which leave fusion alone, those are looked at first.
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
from rewriter.engines.protocol import EngineName, Settings, Span
from rewriter.engines.tensors import write_samples
from rewriter.engines.workers import builds_at_a_time
from rewriter.errors import UsageError
from rewriter.figures.tolerances import EMULATION_TOLERANCE
from rewriter.model import Array, Model, load
from rewriter.model import facts as tensor_facts
from rewriter.model.stopwatch import LASTING, Progress
from rewriter.rewriting.rescaling.record import between
from rewriter.verification.checks import as_declared
from rewriter.verification.locate.lineup import Lineup, Shared, line_up
from rewriter.verification.locate.result import Location, Step
from rewriter.verification.locate.runs import (
    ANY_SHAPE,
    Build,
    EngineBuild,
    Exact,
    Measurement,
    Outputs,
    first_run,
)
from rewriter.verification.locate.search import MARKS, MAX_BUILDS, Marked, Measure, Search

__all__ = ["Location", "Options", "Step", "locate", "locate_by_emulation", "locate_with"]

TOLERANCE = EMULATION_TOLERANCE["fp16"]
"""Relative L2 error up to which a tensor is right: what well-conditioned networks reach in FP16."""

FAULT_SHARE = 0.1
"""Share of an output's error by which marks may move it: another kernel rounds in another way, and the fault
is still there. More, and the build is thrown away."""

JOBS = 4
"""Builds at a time, at most: their engines are run together, and share the GPU's memory."""

STEPS = 16
"""Tensors of the chain that are measured."""


@dataclass(frozen=True)
class Options:
    """How to look.

    Attributes:
        tolerance: Relative L2 error from which on a tensor is wrong.
        marks: Most tensors that one build marks.
        max_builds: Most builds of the search.
        builds: Builds without marks: their spread is what marks may change.
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
    options: Options | None = None,
    settings: Settings | None = None,
    profile: Mapping[str, Span] = ANY_SHAPE,
    progress: Progress = lambda *_: None,
) -> Location:
    """Find where `other` leaves `original` when an engine runs it.

    Args:
        samples: Feeds of the original, read once for every build.
        settings: Time limits, plugins; its engine, builds and timing do not matter.
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
        chosen = settings or Settings(engine)
        jobs = min(JOBS, builds_at_a_time(engine, sum(array.nbytes for array in yours.weights.values())))
        build = EngineBuild(other, fed, engine, folder / "builds", chosen, profile, jobs)
        return locate_with(mine, yours, samples, build, replace(options or Options(), jobs=jobs), progress)


def locate_with(
    original: Model,
    other: Model,
    samples: Iterable[Mapping[str, Array]],
    build: Build,
    options: Options,
    progress: Progress = lambda *_: None,
) -> Location:
    """`locate` with any engine: `build` runs the other model with some of its tensors marked."""
    start = time.monotonic()

    def tell(line: str) -> None:
        progress(f"{LASTING}{time.monotonic() - start:.0f} s: {line}", 0, 0)

    exact, lineup = _prepared(original, other, samples)
    tell(f"{len(lineup.tensors)} tensors to compare; a build without marks first")
    run = first_run(build, debug=True)
    before = Outputs(run, exact.outputs)
    errors = exact.errors({name: name for name in exact.outputs}, run.values)
    pairs = {t.name: t.exact for t in lineup.tensors if t.name not in errors}
    known = errors | exact.errors(pairs, run.debug)
    tell(f"the worst output is off by {max(errors.values(), default=0.0):.2g}; how far builds differ")
    spread = max(
        (before.distance(first_run(build, debug=False)) for _ in range(options.builds - 1)), default=0.0
    )
    allowed = max(spread, _room(errors.values(), options.tolerance))
    measure = Measurement(build, exact, before, allowed, lineup.tensors)
    told = _Told(run.engine, options.tolerance, lineup, errors, spread, run.notes)
    return replace(_searched(told, known, measure, options, tell), moved=measure.moved)


def _room(errors: Iterable[float], tolerance: float) -> float:
    """What marks may move the outputs by: a fault that big would still be there."""
    wrong = [error for error in errors if not error <= tolerance]
    return min((FAULT_SHARE * e if math.isfinite(e) else tolerance for e in wrong), default=0.0)


def locate_by_emulation(
    original: Model,
    other: Model,
    samples: Iterable[Mapping[str, Array]],
    options: Options | None = None,
    accumulation: Accumulation = "fp16",
) -> Location:
    """The same question answered by the emulation of `other` on the CPU: every tensor in one run."""
    options = options or Options()
    exact, lineup = _prepared(original, other, samples)
    exponents = between(original, other)
    found = {node.tensor: node for node in diverge(original, other, samples, accumulation, exponents).nodes}
    known = {t.name: found[t.exact].total for t in lineup.tensors if t.exact in found}
    added = {t.name: found[t.exact].added for t in lineup.tensors if t.exact in found}
    errors = {name: known[name] for name in exact.outputs if name in known}
    engine = f"emulation on ONNX Runtime, {accumulation.upper()} accumulators"
    told = _Told(engine, options.tolerance, lineup, errors, 0.0, (), added)
    return _searched(told, known, _nothing, options, lambda line: None)


def _nothing(sets: Sequence[Sequence[str]]) -> list[Marked]:
    return [Marked({}, unchanged=False, problem="the emulation does not show it") for _ in sets]


def _prepared(original: Model, other: Model, samples: Iterable[Mapping[str, Array]]) -> tuple[Exact, Lineup]:
    facts = tensor_facts.infer(original)
    lineup = line_up(original, other, (facts, tensor_facts.infer(other)))
    if not lineup.tensors:
        raise UsageError(
            "the two models have no float tensor of one name and shape in common",
            where=str(other.path) if other.path else None,
            hint="give the model that the other one was made from, with its tensor names kept",
        )
    return Exact(reference(original, facts), samples, between(original, other)), lineup


@dataclass(frozen=True)
class _Told:
    """What is known before the search."""

    engine: str
    tolerance: float
    lineup: Lineup
    errors: Mapping[str, float]
    spread: float
    notes: tuple[str, ...]
    added: Mapping[str, float] | None = None

    def step(self, tensor: Shared, known: Mapping[str, float], note: str = "") -> Step:
        added = (self.added or {}).get(tensor.name)
        return Step(tensor.name, tensor.node, tensor.op, known.get(tensor.name), added, note)


def _searched(
    told: _Told, known: dict[str, float], measure: Measure, options: Options,
    tell: Callable[[str], None],
) -> Location:  # fmt: skip
    by_name = {t.name: t for t in told.lineup.tensors}
    outputs = tuple(
        told.step(by_name[n], told.errors) if n in by_name else Step(n, n, "Output", e)
        for n, e in told.errors.items()
    )
    wrong = [n for n, e in told.errors.items() if not e <= options.tolerance and n in by_name]
    count = len(told.lineup.tensors)
    if not wrong:
        return Location(
            told.engine, options.tolerance, outputs, tensors=count, spread=told.spread, notes=told.notes
        )
    # the first of the outputs in the graph's order: what is wrong there is not the fault of what follows
    lineup = told.lineup.leading_to(wrong)
    search = Search(
        lineup, measure, options.tolerance, known, options.marks, options.max_builds, options.jobs, tell
    )
    search.run()
    chain = _chain(search, max(wrong, key=lambda n: told.errors[n]), options.steps)
    return _location(told, search, outputs, chain)


def _chain(search: Search, end: str, steps: int) -> list[int]:
    """Positions from the first wrong tensor to a wrong output, thinned out, and measured where it can be."""
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


def _after(search: Search) -> set[int]:
    """Positions of what is computed from the first wrong tensor."""
    found = {search.high}
    for position, tensor in enumerate(search.lineup.tensors):
        if not found.isdisjoint(tensor.parents):
            found.add(position)
    return found


def _location(told: _Told, search: Search, outputs: tuple[Step, ...], chain: list[int]) -> Location:
    tensors, known = search.lineup.tensors, search.known

    def step(position: int) -> Step:
        name = tensors[position].name
        return told.step(
            tensors[position], known, "" if name in known else search.hiding.get(name, "not measured")
        )

    right = tensors[search.high].parents if search.found else ()
    if not search.found and search.low >= 0:
        places = {t.name: i for i, t in enumerate(tensors)}
        right = tuple(places[name] for name in search.cut(search.low))
    between = range(search.low + 1, search.high)
    return Location(
        told.engine,
        told.tolerance,
        outputs,
        first=step(search.high),
        exact=search.found,
        right=tuple(step(i) for i in right),
        chain=tuple(step(i) for i in chain),
        hiding=tuple(step(i) for i in between if tensors[i].name in search.hiding),
        tensors=len(told.lineup.tensors),
        builds=search.builds,
        discarded=search.discarded,
        spread=told.spread,
        notes=told.notes,
    )
