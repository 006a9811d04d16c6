"""Runs builds with marked tensors, and compares their tensors with exact values."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from rewriter.ir.errors import EngineError
from rewriter.ir.model import Array, Model
from rewriter.judge.locate.bisection import Marked
from rewriter.runtime.engines.measure import build_variant, measure
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.protocol import EngineOutcome, MeasureSettings, Variant
from rewriter.runtime.figures.pair import Pair

Values = Callable[[], Mapping[str, Array]]
"""Reads the tensors of one sample, by name."""


@dataclass(frozen=True)
class Run:
    """One build: outputs and marked tensors of each sample, read on demand.

    Attributes:
        debug: The library's unfused debug tensors of each sample.
        problem: The reason why there are no values; "" if there are.
    """

    values: Sequence[Values] = ()
    debug: Sequence[Values] = ()
    problem: str = ""
    engine: str = ""
    notes: tuple[str, ...] = ()


Build = Callable[[Sequence[Sequence[str]], bool], Sequence[Run]]
"""Builds and runs the other model once for each set of tensors, which are marked as outputs. The flag
requests unfused debug tensors. The files of earlier runs may be deleted."""


@dataclass
class EngineBuild:
    """A `Build` by an engine, in child processes. Each call deletes the files of the call before.

    Attributes:
        other: The model without marks.
        folder: For engines and outputs.
        settings: With one build and no timing.
        jobs: Builds at a time.
    """

    other: Variant
    folder: Path
    settings: MeasureSettings
    jobs: int = 1
    _count: int = 0

    def __call__(self, sets: Sequence[Sequence[str]], debug: bool) -> list[Run]:
        shutil.rmtree(self.folder / str(self._count), ignore_errors=True)
        self._count += 1
        folder = self.folder / str(self._count)
        folder.mkdir(parents=True)
        variants = [
            replace(self.other, name=f"other {place}", outputs=tuple(marks), debug=debug)
            for place, marks in enumerate(sets)
        ]
        if len(variants) == 1:
            return [_run(outcome) for outcome in measure(variants, self.settings, folder)]
        with ThreadPoolExecutor(self.jobs) as pool:
            built = list(pool.map(lambda variant: self._built(folder, variant), variants))
        ready = [one for one in built if isinstance(one, Variant)]
        ran = iter(measure(ready, self.settings, folder) if ready else ())
        return [_run(next(ran) if isinstance(one, Variant) else one) for one in built]

    def _built(self, folder: Path, variant: Variant) -> Variant | EngineOutcome:
        """Returns the variant with its engine, or the outcome of a failed build."""
        made = build_variant(variant, self.settings, folder / f"{variant.name}.engine")
        return made if isinstance(made, EngineOutcome) else replace(variant, engine=made[0])


def _run(outcome: EngineOutcome) -> Run:
    engine = " on ".join(part for part in (outcome.library, outcome.device) if part)
    if not outcome.ran:
        hint = f" ({outcome.hint})" if outcome.hint else ""
        return Run(problem=f"{outcome.problem}{hint}", engine=engine, notes=outcome.notes)
    count = len(outcome.outputs)
    return Run(
        [lambda i=i: outcome.values(i) for i in range(count)],  # type: ignore[misc]
        [lambda i=i: outcome.debug_values(i) for i in range(len(outcome.debug))],  # type: ignore[misc]
        engine=engine,
        notes=outcome.notes,
    )


@dataclass(frozen=True)
class Exact:
    """Computes tensors of the original in FP32 on ONNX Runtime, a few at a time, sample by sample.

    Attributes:
        reference: The original with every tensor in FP32, from `emulation.reference`.
        samples: Iterated once for each call of `errors`.
        exponents: Tensors that the other model holds multiplied by 2^exponent.
    """

    reference: Model
    samples: Iterable[Mapping[str, Array]]
    exponents: Mapping[str, int]

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(port.name for port in self.reference.signature.outputs)

    def errors(self, pairs: Mapping[str, str], values: Sequence[Values]) -> dict[str, float]:
        """Returns the relative L2 errors over all samples, of the tensors that `values` holds.

        Args:
            pairs: Name in the other model: name in the original.
            values: Tensors of the other model, for each sample.
        """
        squares: dict[str, Array] = {}
        with ExitStack() as stack:
            session: Session | None = None
            for sample, given in zip(self.samples, values, strict=False):
                found = given()
                present = [name for name in pairs if name in found]
                if not present:
                    break
                if session is None:
                    session = stack.enter_context(Session(self._with_outputs([pairs[n] for n in present])))
                exact = session.run(sample, list(dict.fromkeys(pairs[n] for n in present)))
                for name in present:
                    scale = 2.0 ** -self.exponents.get(pairs[name], 0)
                    value = np.asarray(found[name]).astype(np.float64) * scale
                    more = np.array(Pair(exact[pairs[name]], value).squares)
                    squares[name] = squares.get(name, np.zeros(2)) + more
        return {name: _relative(*parts) for name, parts in squares.items()}

    def _with_outputs(self, names: Sequence[str]) -> Model:
        model = self.reference.copy()
        missing = dict.fromkeys(n for n in names if n not in self.outputs)
        model.proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in missing)
        return model


def _relative(error: float, scale: float) -> float:
    return math.sqrt(error / (scale or 1.0)) if math.isfinite(error) else math.inf


class UnmarkedOutputs:
    """The other model's own outputs in a build without marks, to detect that marks change them."""

    def __init__(self, run: Run, names: Sequence[str]) -> None:
        self.kept = [{n: np.array(values()[n]) for n in names if n in values()} for values in run.values]

    def distance(self, run: Run) -> float:
        """Returns the largest relative L2 distance of an output; infinite if only one of both has a NaN."""
        if len(run.values) != len(self.kept):
            return math.inf
        found = [0.0]
        for kept, values in zip(self.kept, run.values, strict=True):
            given = values()
            for name, array in kept.items():
                if name not in given:
                    return math.inf
                found.append(_relative(*Pair(array, np.asarray(given[name])).squares))
        return max(found)


@dataclass
class Measurement:
    """A `bisection.Measure`: makes builds with marks and computes the errors of the marked tensors.

    Attributes:
        allowed: Largest distance of the outputs that counts as unchanged.
        pairs: Name in the other model: name in the original.
        moved: Largest distance in a build that was not discarded.
    """

    build: Build
    exact: Exact
    before: UnmarkedOutputs
    allowed: float
    pairs: Mapping[str, str]
    moved: float = 0.0

    def __call__(self, sets: Sequence[Sequence[str]]) -> list[Marked]:
        return [self._shown(names, run) for names, run in zip(sets, self.build(sets, False), strict=True)]

    def _shown(self, names: Sequence[str], run: Run) -> Marked:
        if run.problem:
            return Marked({}, unchanged=False, problem=run.problem)
        distance = self.before.distance(run)
        if not distance <= self.allowed:
            return Marked({}, unchanged=False)
        self.moved = max(self.moved, distance)
        pairs = {name: self.pairs[name] for name in names}
        return Marked(self.exact.errors(pairs, run.values), unchanged=True)


def first_run(build: Build, *, debug: bool) -> Run:
    """Makes the build without marks.

    Raises:
        EngineError: the model cannot be built or run, so nothing can be located.
    """
    (run,) = build([()], debug)
    if run.problem:
        raise EngineError(f"the other model does not run: {run.problem}", hint="try `rewriter scan` on it")
    return run
