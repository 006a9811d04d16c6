"""Judges every attempt of a run by one measure: the same samples, expected outputs and excuses."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rewriter.ir.base import Pass
from rewriter.ir.errors import EngineError
from rewriter.ir.graph.ops import TENSOR_CORE
from rewriter.ir.model import Array, Model, load, save
from rewriter.ir.model import facts as tensor_facts
from rewriter.ir.model.stopwatch import Stopwatch, interrupt_handled
from rewriter.ir.plan import Plan
from rewriter.judge.arithmetic_checks import (
    as_fp32,
    check_emulation,
    check_structure,
    check_tf32,
    excused,
    explained,
    tf32_errors,
    without_tf32,
)
from rewriter.judge.build_check import check_model_build, check_original_build
from rewriter.judge.expected import (
    Expected,
    as_declared,
    conditioning,
    selects_rows,
    widened,
)
from rewriter.judge.judge import Standard
from rewriter.judge.run_check import run_built
from rewriter.judge.verdict import Check
from rewriter.runtime.emulation import Accumulation
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.deployment import Deployment
from rewriter.runtime.engines.measure import UNBUILT, measure
from rewriter.runtime.engines.protocol import EngineName, EngineOutcome, MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import Span, write_samples
from rewriter.runtime.figures.outputs import compare_samples
from rewriter.runtime.figures.tolerances import precision_of

Errors = Mapping[str, float]
"""Relative L2 error of each output that is finite, by name."""


@dataclass(frozen=True)
class Engine:
    """A built engine of an attempt.

    Attributes:
        model: The ONNX file that it was built from, or that the engine runs itself.
        path: What is loaded.
    """

    model: Path
    path: Path


@dataclass
class Judge:
    """Each part that attempts share is measured once, and only where a check needs it.

    The original is loaded again for that: between, its weights need no memory.

    Attributes:
        source: The original, as the user gave it.
        samples: The samples that checks compare; `expected`: the outputs of the original for them, None if it
            cannot run, or nothing is verified.
        standards: By precision, a name of `TOLERANCES`: how close results have to be.
        deployment: Engine and plugins. `spans`: the optimisation profile, shapes of the samples included.
        verify, build: The options; `build_timeout_s`: deadline of a build.
        folder: For engines; what is in it lives as long as the run.
        asked: True if the tolerance is the user's own: nothing excuses an error beyond it but conditioning.
        interrupted: True after Ctrl-C in the first build: its model is handed out, not verified to the end.
    """

    source: Any
    samples: Sequence[Mapping[str, Array]]
    expected: Expected | None
    standards: Mapping[str, Standard]
    deployment: Deployment
    spans: Mapping[str, Span]
    verify: bool
    build: bool
    build_timeout_s: float
    folder: Path
    stage: Stopwatch
    asked: bool = False
    interrupted: bool = field(default=False, init=False)
    _built: int = field(default=0, init=False)

    @cached_property
    def settings(self) -> MeasureSettings | None:
        """How engines are run here; None if none runs, none is to be built, or nothing can be compared."""
        engine = self.deployment.choose().engine
        if engine is None or not (self.verify and self.build) or self.expected is None:
            return None
        return MeasureSettings(
            engine,
            plugins=self.deployment.plugins,
            build_timeout_s=self.build_timeout_s,
            run_timeout_s=self.build_timeout_s,
        )

    @property
    def engine(self) -> EngineName | None:
        """The engine that runs results."""
        return self.settings.engine if self.settings is not None else None

    def structure(self, structured: Model, changed: Sequence[Pass]) -> Iterator[Check]:
        """Compares the model in FP32, after passes that changed it, with the original."""
        if not self.verify:
            return
        if self.expected is None:
            yield Check("structure", None, "not checked: ONNX Runtime cannot run the original")
            return
        with self.stage("verify"):
            check = check_structure(self.expected, structured, changed, self.samples)
            yield excused(check, lambda: self.conditioning)

    def emulated(self, fixed: Model, plan: Plan | None, sums: Accumulation) -> Iterator[Check]:
        """Emulates the planned types; TF32 without a plan."""
        if self.expected is None:
            return
        with self.stage("verify"):
            held = self.standards["tf32" if plan is None else plan.precision]
            precision = "tf32" if plan is None else plan.precision
            emulate = partial(check_emulation, self.expected, fixed, precision, self.samples, sums, held)
            check = check_tf32(self.expected, fixed, self.samples, held) if plan is None else emulate()
            check = excused(check, lambda: self.conditioning)
            if not self.asked:
                check = as_fp32(check, lambda: self.emulated_fp32, "its FP32 engine (TF32, emulated)")
            if plan is not None and any(one.op in TENSOR_CORE for one in plan.decisions):
                check = without_tf32(check, partial(emulate, tf32=False))
            yield check

    def built(self, fixed: Model, plan: Plan | None) -> tuple[list[Check], Engine | None]:
        """Builds a model, and runs it where an engine runs here.

        Returns:
            The checks, and the engine if there is one.
        """
        if not (self.verify and self.build) or self.interrupted:
            return [], None
        self._built += 1
        try:
            return self._built_and_run(fixed, plan)
        except KeyboardInterrupt:
            if self._built > 1:
                raise
            interrupt_handled()
            self.interrupted = True
            return [], None

    def _built_and_run(self, fixed: Model, plan: Plan | None) -> tuple[list[Check], Engine | None]:
        folder = self.folder / f"{self._built:03d}"
        folder.mkdir()
        checks = list[Check]()
        with self.stage("save"):  # many attempts are kept: their weights need no memory
            path = save(fixed, folder / "model.onnx", map_back=True)
        choice, engine = self.deployment.choose(), path
        if choice.engine not in UNBUILT:
            engine = folder / "model.engine"
            checks.append(self._build(fixed, path, engine if choice.engine else None, plan))
        if not engine.exists():
            return checks, None
        if self.settings is not None:
            checks.append(self._run(fixed, Engine(path, engine), self.settings, plan))
        elif choice.engine is None and this_machine.gpu() is not None:
            checks.append(Check("run", None, f"not run on {this_machine.gpu()}: {'; '.join(choice.reasons)}"))
        return checks, Engine(path, engine)

    def not_run(self) -> Iterator[str]:
        """Yields a warning if results are built, but no GPU runs them."""
        choice = self.deployment.choose()
        if self.verify and self.build and choice.engine is None and this_machine.gpu() is None:
            yield (
                f"NOT run on a GPU ({'; '.join(choice.reasons)}): the figures are emulated, and what was "
                "built was not loaded; `rewriter verify` on a machine with a GPU runs it"
            )

    @cached_property
    def original_build(self) -> Check:
        """The build of the original: not every failure of a build is ours."""
        choice = self.deployment.choose()
        with self.stage("build"):
            original = load(self.source)
            path = original.path or self._save(original, self.folder / "original.onnx")
            return check_original_build(
                path,
                next(iter(self.samples), {}),
                self.spans,
                self.build_timeout_s,
                plugins=self.deployment.plugins,
                library=choice.engine and choice.engine.replace("-", "_"),
            )

    def explain(self, check: Check, before: Model, fixed: Model, sums: Accumulation) -> Check:
        """Adds to a failed emulation the nodes that add most of the error.

        Args:
            before: The model before its types changed.
        """
        with self.stage("explain"):
            return explained(check, before, fixed, self.samples, sums)

    @cached_property
    def conditioning(self) -> Errors:
        """Error of each output when the original's sums run in another order; needed where a check fails."""
        if self.expected is None:
            return {}
        return conditioning(load(self.source), self.samples, self.expected.exact)

    @cached_property
    def fp32_engine(self) -> Errors:
        """Error of each output of the original's own FP32 engine, with TF32 as the library has it.

        Empty if it does not build or run.
        """
        if self.settings is None or self.expected is None:
            return {}
        original = load(self.source)
        outcome = self._run_fp32(original, self.settings)
        if outcome is None or not outcome.ran:
            return {}
        actual = [outcome.values(number) for number in range(len(self.samples))]
        compared = compare_samples(self.expected.exact, actual, 0.0, as_sets=selects_rows(original))
        return {one.name: one.relative_l2 for one in compared if one.finite}

    @cached_property
    def emulated_fp32(self) -> Errors:
        """Error of each output of the original in FP32 with TF32, emulated; empty if that is impossible."""
        if self.expected is None:
            return {}
        return tf32_errors(self.expected, widened(load(self.source)), self.samples)

    @property
    def fp32_errors(self) -> Errors:
        """Error of each output of the original in FP32: of its engine where one runs, else emulated."""
        return self.fp32_engine or self.emulated_fp32

    def timed_in_turn(self, engines: Sequence[Engine]) -> list[float | None]:
        """Median latencies in microseconds of engines that are timed in turn in one process.

        The GPU's clock rises and falls over a run: latencies of two processes differ by more than two plans.
        None for an engine that does not run, or if no engine runs here.
        """
        if self.settings is None or not engines:
            return [None] * len(engines)
        with tempfile.TemporaryDirectory(prefix="timed-", dir=self.folder) as name:
            folder = Path(name)
            variants = [
                self._variant(load(one.model), one.model, folder / str(place), one.path)
                for place, one in enumerate(engines)
            ]
            try:
                outcomes = measure(variants, self.settings, folder)
            except EngineError:
                return [None] * len(engines)
            return [one.latency.median_us if one.latency is not None else None for one in outcomes]

    def _build(self, fixed: Model, path: Path, engine: Path | None, plan: Plan | None) -> Check:
        choice = self.deployment.choose()
        with self.stage("build"):
            return check_model_build(
                fixed,
                path,
                next(iter(self.samples), {}),
                self.spans,
                self.build_timeout_s,
                plan.norms_in_range if plan is not None else frozenset(),
                plugins=self.deployment.plugins,
                engine=engine,
                library=choice.engine and choice.engine.replace("-", "_"),
            )

    def _run(self, fixed: Model, engine: Engine, settings: MeasureSettings, plan: Plan | None) -> Check:
        assert self.expected is not None
        precision = precision_of(tensor_facts.infer(fixed)) if plan is None else plan.precision
        held = self.standards["tf32" if precision == "fp32" else precision]
        with self.stage("run"):
            check = run_built(
                fixed, engine.model, engine.path, settings, self.samples, self.expected.exact, held
            )
            check = excused(check, lambda: self.conditioning)
            if not self.asked:
                check = as_fp32(check, lambda: self.fp32_engine, "the network's own FP32 engine")
            return check

    def _run_fp32(self, original: Model, settings: MeasureSettings) -> EngineOutcome | None:
        model, folder = widened(original), self.folder / "fp32"
        path = model.path if model is original and model.path else self._save(model, folder / "fp32.onnx")
        try:
            return measure([self._variant(model, path, folder / "samples")], settings, folder)[0]
        except EngineError:
            return None

    def _variant(self, model: Model, path: Path, folder: Path, engine: Path | None = None) -> Variant:
        """A model as a file, with the samples, which are written to `folder`."""
        stored = write_samples(folder, (as_declared(model, one) for one in self.samples))
        return Variant(folder.name, path, stored, shapes=self.spans, engine=engine)

    def _save(self, model: Model, path: Path) -> Path:
        path.parent.mkdir(exist_ok=True)
        with self.stage("save"):
            return save(model, path)


def engine_first(checks: Sequence[Check]) -> tuple[Check, ...]:
    """The checks, where a real engine that passes overrules an emulation of it that failed."""
    if not any(check.name == "run" and check.passed for check in checks):
        return tuple(checks)
    return tuple(
        replace(check, passed=None, summary=f"{check.summary}; the engine itself is within its tolerance")
        if check.name in ("emulation", "tf32") and check.passed is False
        else check
        for check in checks
    )
