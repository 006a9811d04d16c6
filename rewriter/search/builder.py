"""Builds plans, several at a time, until a deadline."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from rewriter.engines.deployment import Deployment
from rewriter.engines.measure import build_variant
from rewriter.engines.protocol import EngineName, Outcome, Settings, Variant
from rewriter.engines.tensors import Samples, write_samples
from rewriter.engines.workers import TIMES_KERNELS, builds_at_a_time
from rewriter.errors import RewriterError
from rewriter.model import save
from rewriter.plan import Plan
from rewriter.search.clock import Clock
from rewriter.search.evaluator import Problem
from rewriter.verification.checks import as_declared

TIME_UP = "not tried: the time was up"

Made = tuple[int, "Variant | str"]
"""A plan's place, and what can be run, or why nothing can."""


@dataclass
class Builder:
    """Makes models of plans, and builds them.

    Attributes:
        folder: For models and engines, a folder each.
        timeout_s: For each build.
        jobs: Builds at a time; 0: half of the cores, as far as memory allows.
        seconds: What the longest way from a plan to its engine took so far; 0 if there was none.
        lowering_s: What of it passes in this process, for one plan at a time.
    """

    problem: Problem
    engine: EngineName
    deployment: Deployment
    folder: Path
    clock: Clock
    timeout_s: float
    jobs: int = 0
    seconds: float = 0.0
    lowering_s: float = 0.0
    _count: int = 0
    _samples: Samples | None = None
    _lowering: threading.Lock = field(default_factory=threading.Lock)

    def workers(self) -> int:
        """How many builds there are at a time."""
        if self.jobs and self.engine not in TIMES_KERNELS:
            return self.jobs
        weights = sum(array.nbytes for array in self.problem.model.weights.values())
        return builds_at_a_time(self.engine, weights)

    def built(self, plans: Sequence[Plan]) -> Generator[list[Made], None, None]:
        """Yields the finished builds, in order, while others are still running.

        Where builds time kernels, all are built first: whoever asks will use the GPU.
        """
        first, self._count = self._count, self._count + len(plans)
        with ThreadPoolExecutor(self.workers()) as pool:
            open_builds: dict[Future[Variant | str], int] = {
                pool.submit(self._build, plan, f"plan-{first + place}"): place
                for place, plan in enumerate(plans)
            }
            when = "ALL_COMPLETED" if self.engine in TIMES_KERNELS else FIRST_COMPLETED
            try:
                while open_builds:
                    done, _ = wait(open_builds, return_when=when)
                    yield sorted(
                        ((open_builds.pop(one), one.result()) for one in done), key=lambda made: made[0]
                    )
            finally:
                pool.shutdown(cancel_futures=True)

    def forget(self, variant: Variant) -> None:
        """Delete its model and engine."""
        shutil.rmtree(self.folder / variant.name, ignore_errors=True)

    def _build(self, plan: Plan, name: str) -> Variant | str:
        folder = self.folder / name
        settings = Settings(
            self.engine,
            build_timeout_s=self.timeout_s,
            plugins=self.deployment.plugins,
            until=self.clock.end,
        )
        try:
            with self._lowering:  # one copy of the weights at a time
                start = time.monotonic()
                if self.clock.left <= self.seconds:
                    return TIME_UP
                variant = self._variant(plan, name, folder)
                self.lowering_s = max(self.lowering_s, time.monotonic() - start)
            made = build_variant(variant, settings, folder / "model.engine")
        except RewriterError as error:
            shutil.rmtree(folder, ignore_errors=True)
            return str(error)
        if isinstance(made, Outcome):
            shutil.rmtree(folder)
            return TIME_UP if made.status == "timeout" and not self.clock.left else made.problem
        if made[0] != variant.path:
            for file in folder.glob("model.onnx*"):
                file.unlink()
        self.seconds = max(self.seconds, time.monotonic() - start)
        return replace(variant, engine=made[0])

    def _variant(self, plan: Plan, name: str, folder: Path) -> Variant:
        folder.mkdir(parents=True)
        lowered = self.problem.lowered(plan)
        if self._samples is None:  # in the types of the inputs, which all plans share
            feeds = (as_declared(lowered, sample) for sample in self.problem.samples)
            self._samples = write_samples(self.folder / "samples", feeds)
        path = save(lowered, folder / "model.onnx")
        return Variant(name, path, self._samples, shapes=self.deployment.profile)
