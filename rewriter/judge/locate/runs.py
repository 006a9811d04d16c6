"""Runs builds with marked tensors, and compares their tensors with exact values."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from rewriter.ir.model import Array, Model
from rewriter.runtime.engines.measure import measure
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.protocol import MeasureSettings, Variant
from rewriter.runtime.figures.pair import Pair

Values = Callable[[], Mapping[str, Array]]
"""Reads the tensors of one sample, by name."""


@dataclass(frozen=True)
class Run:
    """One build: outputs and marked tensors of each sample, read on demand.

    Attributes:
        problem: The reason why there are no values; "" if there are.
    """

    values: Sequence[Values] = ()
    problem: str = ""
    engine: str = ""
    notes: tuple[str, ...] = ()


Build = Callable[[Sequence[str]], Run]
"""Builds and runs the other model with some tensors marked as outputs. The files of the run before may be
deleted."""


@dataclass(frozen=True)
class EngineBuild:
    """A `Build` by an engine, in child processes.

    Attributes:
        other: The model without marks.
        folder: For engine and outputs.
        settings: With one build and no timing.
    """

    other: Variant
    folder: Path
    settings: MeasureSettings

    def __call__(self, marks: Sequence[str]) -> Run:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        variant = replace(self.other, outputs=tuple(marks))
        (outcome,) = measure([variant], self.settings, self.folder)
        engine = " on ".join(part for part in (outcome.library, outcome.device) if part)
        if not outcome.ran:
            hint = f" ({outcome.hint})" if outcome.hint else ""
            return Run(problem=f"{outcome.problem}{hint}", engine=engine, notes=outcome.notes)
        return Run(
            [lambda i=i: outcome.values(i) for i in range(len(outcome.outputs))],  # type: ignore[misc]
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
    def outputs(self) -> dict[str, str]:
        """The outputs, as pairs for `errors`."""
        return {port.name: port.name for port in self.reference.signature.outputs}

    def errors(self, pairs: Mapping[str, str], values: Sequence[Values]) -> dict[str, float]:
        """Returns the relative L2 errors over all samples, of the tensors that `values` holds.

        Args:
            pairs: Name in the other model: name in the original.
            values: Tensors of the other model, for each sample.
        """
        squares: dict[str, Array] = {}
        with ExitStack() as stack:
            session: Session | None = None
            for sample, read in zip(self.samples, values, strict=False):
                arrays = read()
                present = [name for name in pairs if name in arrays]
                if not present:
                    break
                if session is None:
                    session = stack.enter_context(Session(self._with_outputs([pairs[n] for n in present])))
                exact = session.run(sample, list(dict.fromkeys(pairs[n] for n in present)))
                for name in present:
                    scale = 2.0 ** -self.exponents.get(pairs[name], 0)
                    value = np.asarray(arrays[name]).astype(np.float64) * scale
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
