"""Checks the result of `fix`: on ONNX Runtime, by emulation, by a build, and on the GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rewriter.base import Stage
from rewriter.data.source import DataSource
from rewriter.engines import this_machine
from rewriter.engines.measure import UNBUILT
from rewriter.engines.protocol import Span
from rewriter.figures.tolerances import precision_of
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.record import Record
from rewriter.jobs.fix.rewriting import Rewriting
from rewriter.jobs.fix.yardstick import Yardstick
from rewriter.model import Model, load, map_saved, save
from rewriter.model import facts as tensor_facts
from rewriter.plan import Plan
from rewriter.verification.arithmetic_checks import (
    as_fp32,
    check_emulation,
    check_structure,
    check_tf32,
    excused,
    explained,
)
from rewriter.verification.build_check import check_model_build, check_original_build
from rewriter.verification.run_check import run_built
from rewriter.verification.verdict import Check, Verdict

ARITHMETIC = ("run", "emulation", "tf32")
"""Checks of a result's arithmetic; an engine's own figure decides over its emulation."""


@dataclass
class Proof:
    """The checks of an attempt, and what they are made with.

    Attributes:
        source: Origin and shapes of the samples.
        yardstick: What results are compared with.
        done: The checks so far.
    """

    job: FixJob
    record: Record
    rewriting: Rewriting
    source: DataSource
    yardstick: Yardstick
    done: list[Check] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict | None:
        """None if nothing was checked, and nothing was to be."""
        return Verdict(tuple(self.done)) if self.job.request.verify or self.done else None

    @property
    def spans(self) -> dict[str, Span]:
        """The optimisation profile: the user's, and the shapes of the samples for other inputs."""
        return {**self.source.spans, **self.job.deployment.profile}

    @property
    def arithmetic(self) -> Check | None:
        """The check that decides on the arithmetic; None if nothing was compared."""
        compared = {check.name: check for check in self.done if check.outputs}
        return next((compared[name] for name in ARITHMETIC if name in compared), None)

    def check_structure(self, structured: Model) -> None:
        """Compares the model in FP32, after the passes before the plan, with the original."""
        if not self.job.request.verify:
            return
        given = self.yardstick
        if given.expected is None:
            why = "not checked: ONNX Runtime cannot run the original"
            self.done.append(Check("structure", None, why))
            return
        with self.record.stage("verify"):
            check = check_structure(given.expected, structured, self.rewriting.changed(), given.judging)
            self.done.append(excused(check, lambda: given.conditioning))

    def check_types(self, fixed: Model, plan: Plan | None) -> None:
        """Emulates the planned types, or TF32 where all is FP32."""
        expected, given = self.yardstick.expected, self.yardstick
        if not self.job.emulated or expected is None or (plan is None and self.job.wish.precision != "fp32"):
            return
        with self.record.stage("verify"):
            if plan is None:
                check = check_tf32(expected, fixed, given.judging, given.standards["tf32"])
            else:
                sums, held = self.job.accumulation, given.standards[plan.precision]
                check = check_emulation(expected, fixed, plan.precision, given.judging, sums, held)
            check = excused(check, lambda: given.conditioning)
            if not given.asked:
                check = as_fp32(check, lambda: given.emulated_fp32, "its FP32 engine (TF32, emulated)")
            self.done.append(check)

    def check_engine(self, fixed: Model, plan: Plan | None) -> None:
        """Builds the model and runs it, where an engine runs here: its figure decides over the emulation's.

        A model that is wrong in FP32 is not built: a repair follows.
        """
        wrong = any(check.name == "structure" and check.passed is False for check in self.done)
        if self.yardstick.engine is None or wrong or self.job.weak_typing:
            return
        with tempfile.TemporaryDirectory(prefix="rewriter-") as folder:
            path = self._save(fixed, Path(folder) / "model.onnx")
            self.done.extend(self._build_and_run(fixed, path, Path(folder), plan))
        self.done[:] = _engine_first(self.done)

    def explain(self, fixed: Model) -> None:
        """Adds to a failed emulation the nodes that add most of the error."""
        for place, check in enumerate(self.done):
            if check.name in ("emulation", "tf32") and check.passed is False:
                with self.record.stage("explain"):
                    model = fixed if check.name == "tf32" else self._before_types()
                    if model is not None:
                        samples, sums = self.yardstick.judging, self.job.accumulation
                        self.done[place] = explained(check, model, fixed, samples, sums)

    def _before_types(self) -> Model | None:
        """The model before its types changed; None if ranges changed it, which takes these ranges again."""
        phases = self.job.phases
        if any(step.stage is Stage.RANGES for step in self.rewriting.changed()):
            return None
        measuring = (step for step in phases.measuring if step.stage is not Stage.RANGES)
        return self.rewriting.again((*phases.structural, *measuring))

    def write_and_build(self, fixed: Model, destination: Path | None, plan: Plan | None) -> Path | None:
        """Builds the file unless that was done; with `strict` it is written only after all checks."""
        job, written = self.job, None
        if destination is not None and not job.request.strict:
            written = self._save(fixed, destination)
            map_saved(fixed, written)
        built = any(check.name in ("build", "run") for check in self.done)
        if job.request.verify and job.request.build and not built:
            with tempfile.TemporaryDirectory(prefix="rewriter-") as folder:
                path = written or self._save(fixed, Path(folder) / "model.onnx")
                with _named_if_interrupted(written):
                    self.done.extend(self._build_and_run(fixed, path, Path(folder), plan))
                self.done[:] = _engine_first(self.done)
        if written is not None or destination is None:
            return written
        if job.request.verify and not Verdict(tuple(self.done)).passed:
            self.record.warnings.append(f"--strict: {destination} was not written")
            return None
        return self._save(fixed, destination)

    def check_original(self) -> None:
        """Builds the original if the result does not build: not every failure is ours."""
        build = next((check for check in self.done if check.name == "build"), None)
        if build is None or build.passed is not False or build.built is not False:
            return
        deployment, choice = self.job.deployment, self.job.deployment.choose()
        with self.record.stage("build"), tempfile.TemporaryDirectory(prefix="rewriter-") as folder:
            original = load(self.job.source)
            path = original.path or save(original, Path(folder) / "original.onnx")
            check = check_original_build(
                path,
                next(iter(self.yardstick.judging), {}),
                self.spans,
                self.job.request.build_timeout,
                plugins=deployment.plugins,
                library=choice.engine and choice.engine.replace("-", "_"),
            )
        self.done.append(check)

    def _build_and_run(self, fixed: Model, path: Path, folder: Path, plan: Plan | None) -> Iterator[Check]:
        """Builds once; where an engine runs, runs it, too."""
        job, deployment, given = self.job, self.job.deployment, self.yardstick
        choice = deployment.choose()
        engine = path
        if choice.engine not in UNBUILT:
            engine = folder / "model.engine"
            with self.record.stage("build"):
                yield check_model_build(
                    fixed,
                    path,
                    next(iter(given.judging), {}),
                    self.spans,
                    job.request.build_timeout,
                    plan.norms_in_range if plan is not None else frozenset(),
                    plugins=deployment.plugins,
                    engine=engine if choice.engine else None,
                    library=choice.engine and choice.engine.replace("-", "_"),
                )
        if choice.engine is None and this_machine.gpu() is None:
            self.record.warnings.append(
                f"NOT run on a GPU ({'; '.join(choice.reasons)}): the figures are emulated, and what was "
                "built was not loaded; `rewriter verify` on a machine with a GPU runs it"
            )
        elif choice.engine is None:
            yield Check("run", None, f"not run on {this_machine.gpu()}: {'; '.join(choice.reasons)}")
        elif engine.exists() and given.expected is not None and given.settings is not None:
            with self.record.stage("run"):
                samples, exact = given.judging, given.expected.exact
                precision = precision_of(tensor_facts.infer(fixed)) if plan is None else plan.precision
                held = given.standards["tf32" if precision == "fp32" else precision]
                check = run_built(fixed, path, engine, given.settings, samples, exact, held)
                check = excused(check, lambda: given.conditioning)
                if not given.asked:
                    check = as_fp32(check, lambda: given.fp32_engine, "the network's own FP32 engine")
                yield check

    def _save(self, model: Model, path: Path) -> Path:
        with self.record.stage("save"):
            return save(model, path)


def _engine_first(done: Sequence[Check]) -> list[Check]:
    """The checks, where a real engine that passes overrules an emulation of it that failed."""
    if not any(check.name == "run" and check.passed for check in done):
        return list(done)
    emulated = ("emulation", "tf32")
    return [
        replace(check, passed=None, summary=f"{check.summary}; the engine itself is within its tolerance")
        if check.name in emulated and check.passed is False
        else check
        for check in done
    ]


@contextmanager
def _named_if_interrupted(written: Path | None) -> Iterator[None]:
    """Ctrl-C in a long build leaves the file; the message says that its verification is not complete."""
    try:
        yield
    except KeyboardInterrupt:
        if written is None:
            raise
        raise KeyboardInterrupt(f"{written} is written, but not verified to the end") from None
