"""Locates the first tensor of an engine that goes wrong, without changing the engine's results.

One run of the engine that the user has gives the tensors between its kernels. The others are inside fusions.
A build that marks them as outputs gives them, too. But the library does not fuse across marks, which can hide
the very fault: the build is discarded unless the outputs stay as wrong as without marks.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx

from rewriter.base import sandbox
from rewriter.base.errors import EngineError, UsageError
from rewriter.base.stopwatch import LASTING, Progress
from rewriter.ir.model import Array, Model, save
from rewriter.ir.model.output_files import work_folder
from rewriter.passes.rescale import between
from rewriter.runtime.emulation import Accumulation, emulation, reference
from rewriter.runtime.emulation.divergence import diverge
from rewriter.runtime.engines.measure import measure
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.protocol import EngineOutcome, Kernel, MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import Span, write_samples
from rewriter.runtime.metrics.pairwise_error import Pair
from rewriter.runtime.metrics.parts import Part
from rewriter.verification.expected import as_declared, run_all
from rewriter.verification.locate.bisection import TOLERANCE, Bisection, LocateOptions
from rewriter.verification.locate.kernels import Written, fused_with, recognised, relative, written
from rewriter.verification.locate.lineup import Lineup, SharedTensor, line_up
from rewriter.verification.locate.location import Location, Step

__all__ = ["TOLERANCE", "LocateOptions", "Location", "Step", "locate", "locate_by_emulation", "locate_with"]

SAME = 1.25
"""Largest factor by which marks may change the error of a wrong output. Rounding differs from build to build
by less; of two equal faults, the loss of one divides the error by 1.41."""

CHANGED = "the outputs change when it is marked"

BATCH_BYTES, SHARE = 2**28, 8
"""References that are in memory together: at least so many bytes, or the free memory divided by this."""

REARRANGED = "its elements may be right, in an order that is not the model's"

STEPS = 16
"""Most tensors of the chain: evenly spaced if it is longer."""


def locate(
    original: Model,
    other: Model,
    samples: Iterable[Mapping[str, Array]],
    settings: MeasureSettings,
    options: LocateOptions | None = None,
    profile: Mapping[str, Span] | None = None,
    progress: Progress = lambda *_: None,
    engine: Path | None = None,
) -> Location:
    """Finds the first tensor of `other` that differs from `original` when an engine runs it.

    Args:
        samples: Inputs of the original, iterated once for every build.
        settings: Engine, time limits and plugins; its builds and timing are ignored.
        profile: Optimisation profile of inputs with dynamic axes; the others' come from the samples.
        engine: Of the other model, with `Variant.unfused`; None: it is built.

    Raises:
        EngineError: the library is missing, or the other model does not build or run.
        ArithmeticRunError: ONNX Runtime cannot run the original.
        UsageError: the models have no tensor in common.
    """
    with work_folder() as folder:
        path = other.path or save(other, folder / "other.onnx")
        fed = write_samples(folder / "samples", (as_declared(other, sample) for sample in samples))
        variant = Variant("other", path, fed, shapes=profile or {})
        once, built = replace(settings, timing=None, builds=1), folder / "build"

        def build(marks: Sequence[str]) -> EngineOutcome:
            shutil.rmtree(built, ignore_errors=True)
            built.mkdir()
            unfused = replace(variant, unfused="run", engine=engine)
            return measure([replace(variant, outputs=tuple(marks)) if marks else unfused], once, built)[0]

        return locate_with(original, other, samples, build, options or LocateOptions(), progress)


def locate_with(
    original: Model,
    other: Model,
    samples: Iterable[Mapping[str, Array]],
    build: Callable[[Sequence[str]], EngineOutcome],
    options: LocateOptions,
    progress: Progress = lambda *_: None,
) -> Location:
    """Locates with any engine: `build` runs the other model with some of its tensors marked as outputs.

    Without marks, the tensors between kernels come, too. The files of the run before may be deleted then.

    Raises:
        EngineError: the other model cannot be built or run, so nothing can be located.
    """
    start = time.monotonic()

    def report(line: str) -> None:
        progress(f"{LASTING}{time.monotonic() - start:.0f} s: {line}", 0, 0)

    exact, lineup = _prepared(original, other, samples, options)
    report(f"{len(lineup.tensors)} tensors to compare; an engine without marks first")
    run = build(())
    if not run.ran:
        hint = run.hint or "try `rewriter scan` on it"
        raise EngineError(f"the other model does not run: {run.problem}", hint=hint)
    outputs = exact.errors(exact.outputs, map(run.values, range(len(run.outputs))))
    report(f"the worst output is off by {max(outputs.values(), default=0.0):.2g}")
    pairs, known = {t.name: t.exact for t in lineup.tensors}, dict(outputs)
    inner, rearranged = list[Mapping[str, Array]](), set[str]()
    if run.kernels and not max(outputs.values(), default=0.0) <= options.tolerance:
        inner = [*map(run.inner, range(len(run.outputs)))]
        between, rearranged = exact.between_kernels(other, run.kernels, inner, pairs, options.tolerance)
        known = lineup.leading_on(between | outputs, outputs, options.tolerance)
        report(f"the engine gave {len(inner[0])} tensors, which are {len(known)} of these or outputs")

    def errors(names: Sequence[str]) -> Mapping[str, float] | str:
        marked = build(names)
        if not marked.ran:
            return f"{marked.problem} ({marked.hint})" if marked.hint else marked.problem
        values = map(marked.values, range(len(marked.outputs)))
        errors = exact.errors(exact.outputs | {n: pairs[n] for n in names}, values)
        if not all(_same(error, errors.get(n), options.tolerance) for n, error in outputs.items()):
            return CHANGED
        return {n: errors[n] for n in names if n in errors}

    engine = " on ".join(part for part in (run.library, run.device) if part)
    location = Location(engine, options.tolerance, (), given=len(inner[0]) if inner else 0, notes=run.notes)
    location = _searched(location, lineup, outputs, known, options, errors, report, rearranged=rearranged)
    kernel = fused_with(other, run.kernels, location.first.tensor) if location.first else ()
    return replace(location, kernel=kernel)


def _same(before: float, after: float | None, tolerance: float) -> bool:
    """True if marks leave an output right, or about as wrong as it was."""
    if after is None or before == after:
        return after is not None
    if before <= tolerance:
        return after <= SAME * tolerance
    return before / SAME <= after <= SAME * before < float("inf")


def locate_by_emulation(
    original: Model,
    other: Model,
    samples: Iterable[Mapping[str, Array]],
    options: LocateOptions | None = None,
    accumulation: Accumulation = "fp16",
) -> Location:
    """Locates by the emulation of `other` on the CPU, which shows every tensor in one run."""
    options = replace(options or LocateOptions(), max_builds=0)
    exact, lineup = _prepared(original, other, samples, options)
    rows = diverge(original, other, samples, accumulation, exact.exponents)
    errors, added = ({row.tensor: getattr(row, key) for row in rows} for key in ("total", "added"))
    by_name = {t.name: errors[t.exact] for t in lineup.tensors if t.exact in errors}
    if options.parts:
        low = emulation(other, accumulation, tf32=True)
        values = run_all(low, [as_declared(other, sample) for sample in samples])
        by_name |= exact.errors(exact.outputs, values)
    outputs = {name: by_name[name] for name in exact.outputs if name in by_name}
    adds = {t.name: added[t.exact] for t in lineup.tensors if t.exact in added}
    engine = f"emulation on ONNX Runtime, {accumulation.upper()} accumulators"
    location = Location(engine, options.tolerance, ())
    return _searched(location, lineup, outputs, by_name, options, added=adds)


def _prepared(
    original: Model, other: Model, samples: Iterable[Mapping[str, Array]], options: LocateOptions
) -> tuple[Exact, Lineup]:
    lineup = line_up(original, other)
    if not lineup.tensors:
        raise UsageError(
            "the two models have no float tensor of one name and shape in common",
            where=str(other.path) if other.path else None,
            hint="give the model that the other one was made from; the tensors must have kept their names",
        )
    return Exact(reference(original), samples, between(original, other), options.parts), lineup


@dataclass(frozen=True)
class Exact:
    """Computes tensors of the original in FP32 on ONNX Runtime, a few at a time, sample by sample.

    `reference` is the original with every tensor in FP32; `samples` are iterated once for each call of
    `errors`. The other model holds tensors of `exponents` multiplied by 2^exponent. The error
    of an output with one of `parts` is that part's.
    """

    reference: Model
    samples: Iterable[Mapping[str, Array]]
    exponents: Mapping[str, int]
    parts: Mapping[str, Part] = field(default_factory=dict)

    @property
    def outputs(self) -> dict[str, str]:
        """The outputs, as pairs for `errors`."""
        return {port.name: port.name for port in self.reference.signature.outputs}

    def errors(self, pairs: Mapping[str, str], values: Iterable[Mapping[str, Array]]) -> dict[str, float]:
        """Returns the relative L2 errors over all samples, of the tensors that `values` holds.

        Args:
            pairs: Name in the other model: name in the original.
            values: Tensors of the other model, for each sample.
        """
        sums: dict[str, Array] = {}
        with self._session(pairs.values()) as session:
            for sample, arrays in zip(self.samples, values, strict=False):
                if not (present := [name for name in pairs if name in arrays]):
                    break
                exact = session.run(sample, list(dict.fromkeys(pairs[n] for n in present)))
                for name in present:
                    scale = 2.0 ** -self.exponents.get(pairs[name], 0)
                    value = np.asarray(arrays[name]).astype(np.float64) * scale
                    pair, part = Pair(exact[pairs[name]], value), self.parts.get(pairs[name])
                    more = np.array((part.pair(pair) if part and pair.finite else pair).squares)
                    sums[name] = sums.get(name, np.zeros(2)) + more
        return {name: relative(both) for name, both in sums.items()}

    def between_kernels(
        self,
        other: Model,
        kernels: Sequence[Kernel],
        values: Sequence[Mapping[str, Array]],
        pairs: Mapping[str, str],
        tolerance: float,
    ) -> tuple[dict[str, float], set[str]]:
        """Returns the relative L2 errors over all samples, of tensors that are recognised between kernels.

        The second result are tensors whose elements are in another order there.

        Args:
            values: What the kernels wrote, for each sample.
            pairs: Name in the other model: name in the original.
        """
        sums, rearranged = dict[str, Array](), set[str]()
        results = [r for r in written(other, kernels, pairs) if all(r.name in arrays for arrays in values)]
        for batch in _batches(results, values[0]):
            names = list(dict.fromkeys(pairs[name] for r in batch for name in (*r.ends, *r.others)))
            with self._session(names) as session:
                for sample, arrays in zip(self.samples, values, strict=False):
                    exact = session.run(sample, names)
                    exact |= {
                        n: exact[n] * np.float32(2.0**k) for n, k in self.exponents.items() if n in exact
                    }
                    found, moved = recognised(batch, arrays, exact, pairs, tolerance)
                    rearranged |= moved
                    for name, more in found.items():
                        sums[name] = sums.get(name, np.zeros(2)) + more
        return {name: relative(both) for name, both in sums.items()}, rearranged

    def _session(self, names: Iterable[str]) -> Session:
        """A session of the reference that gives these tensors."""
        model = self.reference.copy()
        missing = dict.fromkeys(name for name in names if name not in self.outputs)
        model.proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in missing)
        model.mark_edited()
        return Session(model)


def _batches(results: Iterable[Written], arrays: Mapping[str, Array]) -> Iterator[list[Written]]:
    """Groups of results whose references, in FP32, fit a share of the free memory."""
    limit = max(BATCH_BYTES, sandbox.memory("MemAvailable") // SHARE)
    seen, size, batch = set[str](), 0, list[Written]()
    for result in results:
        names = {*result.ends, *result.others}
        if batch and size + 4 * arrays[result.name].size * len(names - seen) > limit:
            yield batch
            seen, size, batch = set(), 0, []
        size += 4 * arrays[result.name].size * len(names - seen)
        seen |= names
        batch.append(result)
    if batch:
        yield batch


def _searched(
    location: Location,
    lineup: Lineup,
    errors: Mapping[str, float],  # of the outputs
    known: dict[str, float],  # errors of all tensors that are known before the search
    options: LocateOptions,
    measure: Callable[[Sequence[str]], Mapping[str, float] | str] = lambda names: {},  # as in `Bisection`
    report: Callable[[str], None] = lambda line: None,
    added: Mapping[str, float] | None = None,
    rearranged: Collection[str] = (),
) -> Location:
    """Adds the results of a search to the location."""

    def step(t: SharedTensor, note: str = "") -> Step:
        return Step(t.name, t.node, t.op, known.get(t.name), (added or {}).get(t.name), note)

    by_name = {t.name: t for t in lineup.tensors}
    outputs = tuple(
        step(by_name[name]) if name in by_name else Step(name, name, "Output", error)
        for name, error in errors.items()
    )
    compared = len(by_name.keys() & known.keys())
    location = replace(location, outputs=outputs, tensors=len(by_name), compared=compared)
    wrong = [n for n, e in errors.items() if not e <= options.tolerance and n in by_name]
    if not wrong:
        return location
    # only tensors before a wrong output, and after the right ones: the others cannot be the cause
    lineup = lineup.leading_to(wrong)
    first = next(t.name for t in lineup.tensors if not known.get(t.name, 0.0) <= options.tolerance)
    behind = lineup.suspects(first, _right(known, options.tolerance))
    search = Bisection(behind, measure, known, options, report)
    search.run()
    found, right = behind.tensors[search.high], _right(known, options.tolerance)
    suspects = lineup.suspects(found.name, right).tensors
    names = {t.name for t in suspects}
    hiding = dict.fromkeys(set(rearranged) - known.keys(), REARRANGED) | search.hiding
    before = {lineup.tensors[p].name for t in lineup.tensors if t.name in names for p in t.parents} & right
    chain = _chain(lineup, found.name, sorted(wrong, key=lambda n: -errors[n]), known)
    return replace(
        location,
        compared=len(by_name.keys() & known.keys()),
        first=step(found),
        exact=len(suspects) == 1,
        right=tuple(step(t) for t in lineup.tensors if t.name in before),
        chain=tuple(map(step, chain)),
        hiding=tuple(step(t, hiding[t.name]) for t in suspects if t.name in hiding),
        builds=search.builds,
        discarded=search.discarded,
    )


def _right(known: Mapping[str, float], tolerance: float) -> set[str]:
    return {name for name, error in known.items() if error <= tolerance}


def _chain(
    lineup: Lineup, first: str, outputs: Sequence[str], known: Mapping[str, float]
) -> list[SharedTensor]:
    """Returns the measured tensors from the first wrong one to the first of the outputs that it leads to."""
    indices = {t.name: i for i, t in enumerate(lineup.tensors)}
    paths = (lineup.path(indices[first], indices[name]) for name in outputs)
    path = next(path for path, name in zip(paths, outputs, strict=True) if path[-1] == indices[name])
    chain = [lineup.tensors[i] for i in path if lineup.tensors[i].name in known]
    return (
        chain if len(chain) <= STEPS else [chain[i * (len(chain) - 1) // (STEPS - 1)] for i in range(STEPS)]
    )
