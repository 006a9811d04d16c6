"""What all results are judged by: the original's outputs, its conditioning, and its FP32 engine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rewriter.engines.measure import measure
from rewriter.engines.protocol import EngineName, EngineOutcome, MeasureSettings, Span, Variant
from rewriter.engines.tensor_files import write_samples
from rewriter.errors import EngineError
from rewriter.figures.outputs import compare_samples
from rewriter.model import Array, Model, load, save
from rewriter.verification.arithmetic_checks import check_tf32
from rewriter.verification.expected import (
    Expected,
    as_declared,
    conditioning,
    selects_rows,
    widened,
)
from rewriter.verification.judge import Standard

Errors = Mapping[str, float]
"""Relative L2 error of each output that is finite, by name."""


@dataclass
class Yardstick:
    """Each part is measured once, and only where a check needs it.

    The original is loaded again for that: between, its weights need no memory.

    Attributes:
        source: The original, as the user gave it.
        judging: Samples that checks compare; nothing is fitted to them if there are several samples.
        expected: Outputs of the original for them; None if it cannot run, or nothing is verified.
        standards: By precision, a name of `TOLERANCES`: how close results have to be.
        settings: How engines are built and run on this machine; None if none runs, or none is to be built.
        spans: The optimisation profile.
        asked: True if the tolerance is the user's own: nothing excuses an error beyond it but conditioning.
        seconds: What measuring its parts took so far.
    """

    source: Any
    judging: Sequence[Mapping[str, Array]]
    expected: Expected | None
    standards: Mapping[str, Standard]
    settings: MeasureSettings | None = None
    spans: Mapping[str, Span] = field(default_factory=dict)
    asked: bool = False
    seconds: float = 0.0

    @property
    def engine(self) -> EngineName | None:
        """The engine that runs results; None if there is none, or nothing to compare them with."""
        return self.settings.engine if self.settings is not None and self.expected is not None else None

    @cached_property
    def conditioning(self) -> Errors:
        """Error of each output when the original's sums run in another order; needed where a check fails."""
        if self.expected is None:
            return {}
        with self._timed():
            return conditioning(load(self.source), self.judging, self.expected.exact)

    @cached_property
    def fp32_engine(self) -> Errors:
        """Error of each output of the original's own FP32 engine, with TF32 as the library has it.

        Empty if it does not build or run.
        """
        if self.engine is None or self.settings is None or self.expected is None:
            return {}
        original = load(self.source)
        with self._timed(), tempfile.TemporaryDirectory(prefix="rewriter-fp32-") as folder:
            outcome = self._run_fp32(original, self.settings, Path(folder))
            if outcome is None or not outcome.ran:
                return {}
            actual = [outcome.values(number) for number in range(len(self.judging))]
            found = compare_samples(self.expected.exact, actual, 0.0, as_sets=selects_rows(original))
        return {one.name: one.relative_l2 for one in found if one.finite}

    @cached_property
    def emulated_fp32(self) -> Errors:
        """Error of each output of the original in FP32 with TF32, emulated; empty if that is impossible."""
        if self.expected is None:
            return {}
        with self._timed():
            check = check_tf32(self.expected, widened(load(self.source)), self.judging)
        return {output.name: output.relative_l2 for output in check.outputs if output.finite}

    @property
    def fp32_errors(self) -> Errors:
        """Error of each output of the original in FP32: of its engine where one runs, else emulated."""
        return self.fp32_engine or self.emulated_fp32

    def timed_in_turn(self, models: Sequence[Model]) -> list[float | None]:
        """Median latencies in microseconds of models that are timed in turn in one process.

        The GPU's clock rises and falls over a run: latencies of two processes differ by more than two plans.
        None for a model that does not build or run, or if no engine runs here.
        """
        if self.settings is None:
            return [None] * len(models)
        with tempfile.TemporaryDirectory(prefix="rewriter-timed-") as folder:
            variants = [
                self._variant(str(number), model, Path(folder)) for number, model in enumerate(models)
            ]
            try:
                outcomes = measure(variants, self.settings, Path(folder) / "run")
            except EngineError:
                return [None] * len(models)
        return [outcome.latency.median_us if outcome.latency is not None else None for outcome in outcomes]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - start

    def _run_fp32(self, original: Model, settings: MeasureSettings, folder: Path) -> EngineOutcome | None:
        model = widened(original)
        known = model.path if model is original else None
        try:
            return measure([self._variant("fp32", model, folder, known)], settings, folder)[0]
        except EngineError:
            return None

    def _variant(self, name: str, model: Model, folder: Path, known: Path | None = None) -> Variant:
        """A model as a file, with the samples; `known`: its file, if there is one."""
        path = known or save(model, folder / f"{name}.onnx")
        feeds = (as_declared(model, one) for one in self.judging)
        return Variant(name, path, write_samples(folder / f"{name}-samples", feeds), shapes=self.spans)
