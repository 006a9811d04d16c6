"""A run of `fix`: its options, checked and complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from rewriter.base.errors import UsageError
from rewriter.base.stopwatch import Progress
from rewriter.hazards.analysis import PrecisionRequest
from rewriter.ir.model import Model, check_model_output
from rewriter.ir.plan import Plan
from rewriter.jobs.search.goal import NOISE, Budget, ErrorLimit, Goal
from rewriter.passes.base import Pass, Stage
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.pipeline.options import FixOptions
from rewriter.runtime.emulation import Accumulation
from rewriter.runtime.engines.deployment import Deployment


@dataclass(frozen=True)
class Phases:
    """The passes of a pipeline by when they run.

    `structural` ones run before ranges are measured, `measuring` ones before the plan is made, `lowering`
    from the one on that applies the plan.
    """

    structural: tuple[Pass, ...]
    measuring: tuple[Pass, ...]
    lowering: tuple[Pass, ...]

    @property
    def unbiased(self) -> bool:
        """True if weights are rounded by the means of their data."""
        return any(isinstance(s, MixedPrecision) and s.rounding == "unbiased" for s in self.lowering)

    @classmethod
    def of(cls, steps: Sequence[Pass]) -> Phases:
        """Splits the pipeline, in order; UsageError: a pass comes before one that it has to follow."""
        for first, second in combinations(steps, 2):
            if Stage.STRUCTURE < second.stage < first.stage:
                hint = f"name {first.name} after {second.name}"
                what = f"{first.name} has to follow {second.name}"
                raise UsageError(what, option="passes", hint=hint)
        lowering = next((at for at, step in enumerate(steps) if step.stage is Stage.LOWERING), len(steps))
        before = enumerate(steps[:lowering])
        measuring = next((at for at, step in before if step.stage is Stage.RANGES), lowering)
        return cls(tuple(steps[:measuring]), tuple(steps[measuring:lowering]), tuple(steps[lowering:]))


Comparable = Literal["", "plain FP16", "FP32"]  # name of a candidate that others are compared with


@dataclass(frozen=True)
class Candidate:
    """The differences between the attempts of one run: passes, types, and the goal of a search."""

    steps: tuple[Pass, ...]
    precision: PrecisionRequest
    goal: Goal | None = None  # the goal that a plan is searched for; None: the rules' plan is used
    difference: str = "the rules' plan"  # in words, for the report
    name: Comparable = ""
    emulated: bool = True  # False if only the error on an engine decides
    released: frozenset[str] = frozenset()  # rules of FP32 nodes that the plan omits

    @cached_property
    def phases(self) -> Phases:
        return Phases.of(self.steps)

    def changed(self, difference: str, name: Comparable = "", **fields: Any) -> Candidate:
        """Returns another candidate that starts from this one."""
        return replace(self, difference=difference, name=name, **fields)

    def without(self, step: Pass, why: str = "") -> Candidate:
        steps = tuple(other for other in self.steps if other is not step)
        return self.changed(f"without {step.name}{why}", steps=steps)


@dataclass(frozen=True)
class FixJob:
    """A request to `fix`, with the values that its preset, its plan and this machine decide.

    `first` is the candidate that is tried first, `limit` the user's tolerance. `ending` says in words how a
    `FixOutcome` ended, for the file. `accumulation_is_default` is
    True if `accumulation` is what is recorded of the target, from which a slow emulation may depart.
    """

    source: Any
    output: str | os.PathLike[str] | None
    request: FixOptions
    first: Candidate
    opset: int
    progress: Progress
    plan: Plan | None = None
    accumulation: Accumulation = "fp32"
    metric: str = "relative-l2"
    deployment: Deployment = field(default_factory=Deployment)
    accumulation_is_default: bool = False
    limit: ErrorLimit | None = None
    ending: Callable[[Any], str] = str

    @property
    def precision(self) -> PrecisionRequest:
        return self.first.precision

    @property
    def lowers(self) -> bool:
        """True if something is to be in reduced precision."""
        return bool(self.first.phases.lowering) and self.precision.precision != "fp32"

    @property
    def latency_tolerance(self) -> float:
        """Share of the fastest plan's latency that a more accurate one may take on top."""
        return self.first.goal.share if isinstance(self.first.goal, Budget) else NOISE

    @property
    def may_change(self) -> bool:
        """True if other candidates may replace the rules' plan: the user did not choose that."""
        checked = self.request.repair and self.request.verify
        return checked and self.plan is None and self.precision.precision != "fp32"

    @property
    def may_drop_optional_fp32(self) -> bool:
        """True if the tool chose the passes and FP32 nodes that only make a result better, not the user."""
        chosen = self.request.passes is not None or self.request.save_plan is not None
        return not chosen and self.first.goal is None and self.precision.precision == "fp16"

    def destination(self) -> Path | None:
        """The path to write the model to, or None; UsageError: it cannot be written, or is the input."""
        if self.output is None or self.request.dry_run:
            return None
        path, source = Path(self.output), self.source
        if not path.parent.is_dir():
            raise UsageError("its folder does not exist", where=str(path), hint=f"mkdir -p {path.parent}")
        if not os.access(path.parent, os.W_OK):
            raise UsageError("its folder cannot be written", where=str(path), hint="name another folder")
        if path.is_dir():
            raise UsageError("the output is a folder", where=str(path), hint="name a file in it")
        check_model_output(path)
        named = isinstance(source, (str, os.PathLike)) and path.exists() and Path(source).exists()
        if named and not self.request.in_place and path.samefile(source):
            hint = "write elsewhere, or say `in-place` to replace the model"
            raise UsageError("the output is the input", where=str(path), hint=hint)
        return path


def require_space(path: Path | None, original: Model) -> None:
    """Refuses an output for which its disk has no room: half of the original is the least it needs."""
    if path is None or original.path is None:
        return
    files = (original.path, *original.files)
    needed = sum(file.stat().st_size for file in files if file.is_file()) // 2
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        unit, name = (2**30, "GiB") if needed >= 2**30 else (2**20, "MiB")
        have, lacking = (f"{size / unit:.1f} {name}" for size in (free, needed))
        what = f"the disk has {have} free, and the result needs {lacking} at least"
        raise UsageError(what, where=str(path), hint="name a folder on another disk")
