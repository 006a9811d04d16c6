"""What a run of `fix` is asked for, checked and complete."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewriter.base import Pass, Target
from rewriter.emulation import Accumulation
from rewriter.engines.deployment import Deployment
from rewriter.engines.protocol import EngineName
from rewriter.errors import UsageError
from rewriter.model.stopwatch import Progress
from rewriter.plan import Plan
from rewriter.planning.planner import PlanRequest
from rewriter.search.goal import Aim


@dataclass(frozen=True)
class Options:
    """The arguments of `fix`; see there.

    `free_opset`: whether `opset` is a default, which a model's norms may raise.
    """

    source: Any
    output: str | os.PathLike[str] | None
    steps: tuple[Pass, ...]
    wish: PlanRequest
    opset: int
    free_opset: bool
    target: Target
    inputs: Any
    input_shapes: Mapping[str, tuple[int, ...]]
    seed: int
    verify: bool
    build: bool
    dry_run: bool
    in_place: bool
    strict: bool
    build_timeout: float
    progress: Progress
    plan: Plan | None = None
    plan_source: str = "the plan"
    save_plan: Path | None = None
    accumulation: Accumulation = "fp32"
    goal: Aim | None = None
    metric: str = "relative-l2"
    pareto: bool = False
    weak_typing: bool = False
    search_engine: EngineName | None = None
    deployment: Deployment = field(default_factory=Deployment)
    search_seconds: float = 300.0

    @property
    def parts(self) -> Parts:
        """The steps by when they run."""
        return Parts.of(self.steps)

    def destination(self) -> Path | None:
        """Where the model is to be written; None: nowhere.

        Raises:
            UsageError: it cannot be written there, or the input is there.
        """
        if self.output is None or self.dry_run:
            return None
        path, source = Path(self.output), self.source
        if not path.parent.is_dir():
            raise UsageError("its folder does not exist", where=str(path), hint=f"mkdir -p {path.parent}")
        if path.is_dir():
            raise UsageError("the output is a folder", where=str(path), hint="name a file in it")
        named = isinstance(source, (str, os.PathLike)) and path.exists() and Path(source).exists()
        if named and not self.in_place and path.samefile(source):
            raise UsageError(
                "the output is the input",
                where=str(path),
                hint="write elsewhere, or say --in-place to replace the model",
            )
        return path


@dataclass(frozen=True)
class Parts:
    """The passes of a pipeline by when they run.

    Attributes:
        structural: Up to the first that needs ranges.
        measuring: Up to the first behind the plan.
        following: Behind the plan, up to the one that carries it out.
        lowering: That one, and the rest.
    """

    structural: tuple[Pass, ...]
    measuring: tuple[Pass, ...]
    following: tuple[Pass, ...]
    lowering: tuple[Pass, ...]

    @classmethod
    def of(cls, steps: Sequence[Pass]) -> Parts:
        """In their order."""
        end = next((i for i, step in enumerate(steps) if step.name == "mixed-precision"), len(steps))
        middle = next((i for i, step in enumerate(steps[:end]) if step.follows_plan), end)
        start = next((i for i, step in enumerate(steps[:middle]) if step.needs_ranges), middle)
        return cls(
            tuple(steps[:start]), tuple(steps[start:middle]), tuple(steps[middle:end]), tuple(steps[end:])
        )
