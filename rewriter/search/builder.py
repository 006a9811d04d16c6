"""Builds plans, several at a time, until a deadline."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

from rewriter.engines.deployment import Deployment
from rewriter.engines.measure import build_variant
from rewriter.engines.parallel_builds import TIMES_KERNELS, builds_at_a_time
from rewriter.engines.protocol import EngineName, EngineOutcome, MeasureSettings, Variant
from rewriter.engines.tensor_files import StoredSamples, write_samples
from rewriter.errors import RewriterError
from rewriter.model import save
from rewriter.plan import Plan
from rewriter.search.clock import Clock
from rewriter.search.problem import Problem
from rewriter.search.trials import Types, types_of
from rewriter.verification.expected import as_declared

TIME_UP = "not tried: the time was up"

Made = tuple[int, "Variant | str"]
"""The index of a plan, and its build or the reason why there is none."""


@dataclass
class Builder:
    """Makes models of plans, and builds them; a context manager, which waits for builds that still run.

    Attributes:
        folder: Holds a folder for each model and its engine.
        timeout_s: Limit of each build, and of each run of the engine.
        seconds: The longest time from a plan to its engine so far; 0 if there was none.
        lowering_s: The part of it in this process, which handles one plan at a time.
    """

    problem: Problem
    engine: EngineName
    deployment: Deployment
    folder: Path
    clock: Clock = field(default_factory=lambda: Clock(float("inf")))
    timeout_s: float = 600.0
    seconds: float = 0.0
    lowering_s: float = 0.0
    _count: int = 0
    _samples: StoredSamples | None = None
    _lowering: threading.Lock = field(default_factory=threading.Lock)
    _begun: dict[Types, Future[Variant | str]] = field(default_factory=dict)
    _begun_lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.workers())

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def workers(self) -> int:
        """Returns the number of builds at a time."""
        weights = sum(array.nbytes for array in self.problem.model.weights.values())
        return builds_at_a_time(self.engine, weights)

    def begin(self, plans: Iterable[Plan]) -> None:
        """Begins with builds that will be asked for soon; one worker is left for a plan that is asked for.

        Nothing is begun if builds time kernels: the caller uses the GPU meanwhile.
        """
        if self.engine not in TIMES_KERNELS:
            for plan in islice(plans, max(0, self.workers() - 1 - len(self._begun))):
                self._building(plan)

    def built(self, plans: Sequence[Plan]) -> Generator[list[Made], None, None]:
        """Yields the finished builds of different plans, in order, while others are still running.

        If builds time kernels, all are finished first, because the caller uses the GPU.
        """
        open_builds = {self._building(plan): place for place, plan in enumerate(plans)}
        for plan in plans:
            self._begun.pop(types_of(plan))
        when = "ALL_COMPLETED" if self.engine in TIMES_KERNELS else FIRST_COMPLETED
        try:
            while open_builds:
                done, _ = wait(open_builds, return_when=when)
                yield sorted(((open_builds.pop(one), one.result()) for one in done), key=lambda made: made[0])
        finally:
            for one in open_builds:
                one.cancel()

    def _building(self, plan: Plan) -> Future[Variant | str]:
        """Begins a build, unless it was begun already."""
        with self._begun_lock:
            if (types := types_of(plan)) not in self._begun:
                self._begun[types] = self._pool.submit(self._build, plan, f"plan-{self._count}")
                self._count += 1
            return self._begun[types]

    def forget(self, variant: Variant) -> None:
        """Deletes the model and the engine of a build."""
        shutil.rmtree(self.folder / variant.name, ignore_errors=True)

    def _build(self, plan: Plan, name: str) -> Variant | str:
        folder = self.folder / name
        settings = MeasureSettings(
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
        if isinstance(made, EngineOutcome):
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
