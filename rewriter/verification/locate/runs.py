"""Builds with marked tensors, and the exact values that they are compared with."""

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

from rewriter.engines.measure import build_variant, measure
from rewriter.engines.onnxruntime import Session
from rewriter.engines.protocol import EngineName, EngineOutcome, MeasureSettings, Span, Variant
from rewriter.engines.tensor_files import StoredSamples
from rewriter.errors import EngineError
from rewriter.figures.pair import Pair
from rewriter.model import Array, Model
from rewriter.verification.locate.bisection import Marked
from rewriter.verification.locate.lineup import SharedTensor


@dataclass(frozen=True)
class Run:
    """One build: outputs and marked tensors of each sample, by name, read on demand.

    Attributes:
        debug: The library's unfused debug tensors of each sample.
        problem: The reason why there are no values; "" if there are.
    """

    values: Sequence[Callable[[], Mapping[str, Array]]] = ()
    debug: Sequence[Callable[[], Mapping[str, Array]]] = ()
    problem: str = ""
    engine: str = ""
    notes: tuple[str, ...] = ()


Build = Callable[[Sequence[Sequence[str]], bool], Sequence[Run]]
"""Builds and runs the other model once for each set of tensors, which are marked as outputs. The flag
requests unfused debug tensors. The files of earlier runs may be deleted."""

NO_PROFILE: Mapping[str, Span] = {}
"""Shapes are those of the samples."""


class EngineBuild:
    """A `Build` by an engine, in child processes. Each call deletes the files of the call before.

    Args:
        path: The other model. `samples`: its inputs.
        folder: For engines and outputs.
        profile: Of inputs with dynamic axes; the others' come from the samples.
        jobs: Builds at a time.
    """

    def __init__(
        self,
        path: Path,
        samples: StoredSamples,
        engine: EngineName,
        folder: Path,
        settings: MeasureSettings,
        profile: Mapping[str, Span] = NO_PROFILE,
        jobs: int = 1,
    ) -> None:
        self._path, self._samples, self._folder, self._profile = path, samples, folder, profile
        self._settings = replace(settings, engine=engine, timing=None, builds=1)
        self._jobs = jobs
        self._count = 0

    def __call__(self, sets: Sequence[Sequence[str]], debug: bool) -> list[Run]:
        shutil.rmtree(self._folder / str(self._count), ignore_errors=True)
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir(parents=True)
        variants = [
            Variant(
                f"other {place}",
                self._path,
                self._samples,
                shapes=self._profile,
                outputs=tuple(marks),
                debug=debug,
            )
            for place, marks in enumerate(sets)
        ]
        if len(variants) == 1:
            return [_run(outcome) for outcome in measure(variants, self._settings, folder)]
        with ThreadPoolExecutor(self._jobs) as pool:
            built = list(pool.map(lambda variant: self._built(folder, variant), variants))
        ready = [one for one in built if isinstance(one, Variant)]
        ran = iter(measure(ready, self._settings, folder) if ready else ())
        return [_run(next(ran) if isinstance(one, Variant) else one) for one in built]

    def _built(self, folder: Path, variant: Variant) -> Variant | EngineOutcome:
        """The variant with its engine, or why there is none."""
        made = build_variant(variant, self._settings, folder / f"{variant.name}.engine")
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


class Exact:
    """The original in FP32 on ONNX Runtime: computes any of its tensors, a few at a time, sample by sample.

    Args:
        reference: The original with every tensor in FP32, from `emulation.reference`.
        samples: Iterated once for each call of `errors`.
        exponents: Tensors that the other model holds multiplied by 2^exponent.
    """

    def __init__(
        self, reference: Model, samples: Iterable[Mapping[str, Array]], exponents: Mapping[str, int]
    ) -> None:
        self._exponents = exponents
        self._reference, self._samples = reference, samples
        self.outputs = tuple(port.name for port in reference.signature.outputs)

    def errors(
        self,
        pairs: Mapping[str, str],
        values: Sequence[Callable[[], Mapping[str, Array]]],
    ) -> dict[str, float]:
        """Relative L2 errors over all samples, of the tensors that `values` holds.

        Args:
            pairs: Name in the other model: name in the original.
            values: Tensors of the other model, for each sample.
        """
        squares: dict[str, Array] = {}
        with ExitStack() as stack:
            session: Session | None = None
            for sample, given in zip(self._samples, values, strict=False):
                found = given()
                present = [name for name in pairs if name in found]
                if not present:
                    break
                if session is None:
                    session = stack.enter_context(Session(self._with_outputs([pairs[n] for n in present])))
                exact = session.run(sample, list(dict.fromkeys(pairs[n] for n in present)))
                for name in present:
                    scale = 2.0 ** -self._exponents.get(pairs[name], 0)
                    value = np.asarray(found[name]).astype(np.float64) * scale
                    more = np.array(Pair(exact[pairs[name]], value).squares)
                    squares[name] = squares.get(name, np.zeros(2)) + more
        return {name: _relative(*parts) for name, parts in squares.items()}

    def _with_outputs(self, names: Sequence[str]) -> Model:
        model = self._reference.copy()
        missing = dict.fromkeys(n for n in names if n not in self.outputs)
        model.proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in missing)
        return model


def _relative(error: float, scale: float) -> float:
    return math.sqrt(error / (scale or 1.0)) if math.isfinite(error) else math.inf


class UnmarkedOutputs:
    """The other model's own outputs in a build without marks, to detect that marks change them."""

    def __init__(self, run: Run, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.kept = [{n: np.array(values()[n]) for n in names if n in values()} for values in run.values]

    def distance(self, run: Run) -> float:
        """Largest relative L2 distance of an output; infinite if only one of both has a NaN."""
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


class Measurement:
    """A `bisection.Measure`: makes builds with marks and computes the errors of the marked tensors.

    Args:
        allowed: Largest distance of the outputs that counts as unchanged.

    Attributes:
        moved: Largest distance in a build that was not discarded.
    """

    def __init__(
        self,
        build: Build,
        exact: Exact,
        before: UnmarkedOutputs,
        allowed: float,
        tensors: Sequence[SharedTensor],
    ) -> None:
        self._build, self._exact, self._before = build, exact, before
        self._allowed = allowed
        self._names = {t.name: t.exact for t in tensors}
        self.moved = 0.0

    def __call__(self, sets: Sequence[Sequence[str]]) -> list[Marked]:
        return [self._shown(names, run) for names, run in zip(sets, self._build(sets, False), strict=True)]

    def _shown(self, names: Sequence[str], run: Run) -> Marked:
        if run.problem:
            return Marked({}, unchanged=False, problem=run.problem)
        distance = self._before.distance(run)
        if not distance <= self._allowed:
            return Marked({}, unchanged=False)
        self.moved = max(self.moved, distance)
        pairs = {name: self._names[name] for name in names}
        return Marked(self._exact.errors(pairs, run.values), unchanged=True)


def first_run(build: Build, *, debug: bool) -> Run:
    """Makes the build without marks.

    Raises:
        EngineError: the model cannot be built or run: there is nothing to locate.
    """
    (run,) = build([()], debug)
    if run.problem:
        raise EngineError(f"the other model does not run: {run.problem}", hint="try `rewriter scan` on it")
    return run
