"""Checks the result of `fix`: on ONNX Runtime, by emulation, by a build, and on the GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from rewriter.base import Stage
from rewriter.data.source import DataSource
from rewriter.engines import this_machine
from rewriter.engines.protocol import MeasureSettings, Span
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.record import Record
from rewriter.jobs.fix.rewriting import Rewriting
from rewriter.model import Array, Model, save
from rewriter.plan import Plan
from rewriter.verification.arithmetic_checks import (
    AS_FP32,
    REORDERED,
    allowing,
    check_emulation,
    check_structure,
    check_tf32,
    explained,
)
from rewriter.verification.build_check import check_model_build
from rewriter.verification.expected import Expected
from rewriter.verification.run_check import run_built
from rewriter.verification.verdict import Check, Verdict

Conditioning = Callable[[], Mapping[str, float]]
"""Measures the error of each output when the original's sums run in another order."""


@dataclass
class Proof:
    """The checks of an attempt, and what they are made with.

    Attributes:
        source: Origin and shapes of the samples.
        judging: The samples that are compared.
        expected: Outputs of the original for them; None if it cannot run, or nothing is verified.
        done: The checks so far.
    """

    job: FixJob
    record: Record
    rewriting: Rewriting
    source: DataSource
    judging: Sequence[Mapping[str, Array]]
    expected: Expected | None
    done: list[Check] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict | None:
        """None if nothing was checked, and nothing was to be."""
        return Verdict(tuple(self.done)) if self.job.request.verify or self.done else None

    @property
    def spans(self) -> dict[str, Span]:
        """The optimisation profile: the user's, and the shapes of the samples for other inputs."""
        return {**self.source.spans, **self.job.deployment.profile}

    def check_structure(self, structured: Model, conditioning: Conditioning) -> None:
        """Compares the model in FP32, after the passes before the plan, with the original."""
        if not self.job.request.verify:
            return
        if self.expected is None:
            why = "not checked: ONNX Runtime cannot run the original"
            self.done.append(Check("structure", None, why))
            return
        with self.record.stage("verify"):
            check = check_structure(self.expected, structured, self.rewriting.changed(), self.judging)
            self.done.append(_conditioned(check, conditioning))

    def check_types(
        self, structured: Model, fixed: Model, plan: Plan | None, conditioning: Conditioning
    ) -> None:
        """Emulates the planned types, or TF32 where all is FP32, before an engine is built."""
        if self.expected is None:
            return
        with self.record.stage("verify"):
            if plan is None:
                if self.job.wish.precision == "fp32":
                    check = check_tf32(self.expected, fixed, self.judging)
                    self.done.append(_conditioned(check, conditioning))
                return
            sums = self.job.accumulation
            check = check_emulation(self.expected, fixed, plan.precision, self.judging, sums)
            check = _conditioned(check, conditioning)
            if check.passed is False:
                tf32 = check_tf32(self.expected, structured, self.judging)
                errors = {o.name: o.relative_l2 for o in tf32.outputs if o.finite}
                reason = "as accurate as FP32 here, where an FP32 engine (TF32) errs by"
                allowed = allowing(check, errors, reason, AS_FP32)
                check = allowed if allowed.passed else check
            self.done.append(check)

    def explain(self, fixed: Model) -> None:
        """Adds to a failed emulation the nodes that add most of the error."""
        phases = self.job.phases
        by_ranges = any(step.stage is Stage.RANGES for step in self.rewriting.changed())
        if by_ranges:  # what ranges changed cannot be made again without them
            return
        again = (*phases.structural, *(step for step in phases.measuring if step.stage is not Stage.RANGES))
        for place, check in enumerate(self.done):
            if check.name == "emulation" and check.passed is False:
                with self.record.stage("explain"):
                    model = self.rewriting.again(again)
                    self.done[place] = explained(check, model, fixed, self.judging, self.job.accumulation)

    def write_and_build(self, fixed: Model, destination: Path | None, plan: Plan | None) -> Path | None:
        """Builds the file as written; with `strict` it is written to its place only after all checks."""
        job, written = self.job, None
        if destination is not None and not job.request.strict:
            written = self._save(fixed, destination)
        if job.request.verify and job.request.build:
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

    def _build_and_run(self, fixed: Model, path: Path, folder: Path, plan: Plan | None) -> Iterator[Check]:
        """Builds once; where there is a GPU, runs the engine, too."""
        job, deployment = self.job, self.job.deployment
        with self.record.stage("build"):
            choice = deployment.choose()
            engine = folder / "model.engine" if choice.engine else None
            yield check_model_build(
                fixed,
                path,
                next(iter(self.judging), {}),
                self.spans,
                job.request.build_timeout,
                plan.norms_in_range if plan is not None else frozenset(),
                plugins=deployment.plugins,
                engine=engine,
                library=choice.engine and choice.engine.replace("-", "_"),
            )
        if choice.engine is None and this_machine.gpu() is None:
            self.record.warnings.append(
                f"NOT run on a GPU ({'; '.join(choice.reasons)}): the figures are emulated, and what was "
                "built was not loaded; `rewriter verify` on a machine with a GPU runs it"
            )
        elif choice.engine is None:
            yield Check("run", None, f"not run on {this_machine.gpu()}: {'; '.join(choice.reasons)}")
        if choice.engine and engine and engine.exists() and self.expected is not None:
            timeout = job.request.build_timeout
            settings = MeasureSettings(choice.engine, plugins=deployment.plugins, run_timeout_s=timeout)
            with self.record.stage("run"):
                yield run_built(fixed, path, engine, settings, self.judging, self.expected.exact)

    def _save(self, model: Model, path: Path) -> Path:
        with self.record.stage("save"):
            return save(model, path)


def _conditioned(check: Check, conditioning: Conditioning) -> Check:
    """The check, with a failure excused that another order of the original's own sums explains."""
    if check.passed is not False:
        return check
    return allowing(check, conditioning(), "another order of its own sums moves the result by", REORDERED)


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
