"""A run of `fix`: its options, checked and complete."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rewriter.base import Pass, Target
from rewriter.emulation import Accumulation
from rewriter.engines.deployment import Deployment
from rewriter.errors import UsageError
from rewriter.jobs.fix.phases import Phases
from rewriter.model import check_model_output
from rewriter.model.stopwatch import Progress
from rewriter.pipeline.options import FixOptions
from rewriter.plan import Plan
from rewriter.planning.planner import PlanRequest
from rewriter.search.goal import Goal


@dataclass(frozen=True)
class FixJob:
    """A request to `fix`, with the values that its preset, its plan and this machine decide.

    `free_opset` is True if `opset` is a default, which a pass may raise (`Pass.opset_for`). `repairing` is
    True for a remedy: its goal is not the user's, so that missing it is no failed check. `free_sums` is True
    if `accumulation` is what is recorded of the target, from which a slow emulation may depart. `emulated` is
    False where the figure of an engine alone decides.
    """

    source: Any
    output: str | os.PathLike[str] | None
    request: FixOptions
    steps: tuple[Pass, ...]
    wish: PlanRequest
    opset: int
    free_opset: bool
    target: Target
    progress: Progress
    plan: Plan | None = None
    plan_source: str = "the plan"
    accumulation: Accumulation = "fp32"
    goal: Goal | None = None
    metric: str = "relative-l2"
    weak_typing: bool = False
    deployment: Deployment = field(default_factory=Deployment)
    repairing: bool = False
    free_sums: bool = False
    emulated: bool = True

    @cached_property
    def phases(self) -> Phases:
        """The steps by when they run."""
        return Phases.of(self.steps)

    def without(self, step: Pass) -> FixJob:
        """Returns the job without one of its steps."""
        return replace(self, steps=tuple(other for other in self.steps if other is not step))

    def destination(self) -> Path | None:
        """Returns the path to write the model to; None: it is not written.

        Raises:
            UsageError: it cannot be written there, or the input is there.
        """
        if self.output is None or self.request.dry_run:
            return None
        path, source = Path(self.output), self.source
        if not path.parent.is_dir():
            raise UsageError("its folder does not exist", where=str(path), hint=f"mkdir -p {path.parent}")
        if path.is_dir():
            raise UsageError("the output is a folder", where=str(path), hint="name a file in it")
        check_model_output(path)
        named = isinstance(source, (str, os.PathLike)) and path.exists() and Path(source).exists()
        if named and not self.request.in_place and path.samefile(source):
            raise UsageError(
                "the output is the input",
                where=str(path),
                hint="write elsewhere, or say --in-place to replace the model",
            )
        return path
