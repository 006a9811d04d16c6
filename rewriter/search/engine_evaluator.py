"""A judge of plans that builds them and runs them on the GPU, timed in turn, within the time that it has."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rewriter.engines.deployment import Deployment
from rewriter.engines.measure import measure
from rewriter.engines.protocol import EngineName, Outcome, Settings, Timing, Variant
from rewriter.engines.workers import TIMES_KERNELS
from rewriter.figures.metrics import Metric
from rewriter.plan import Plan
from rewriter.search.builder import TIME_UP, Builder
from rewriter.search.clock import Clock
from rewriter.search.evaluator import Judged, Measured, Problem

TOGETHER = 4
"""Engines that are loaded and timed together with the reference: more of them share the cost of loading it
again, fewer are known sooner, and lost with less if the time runs out."""

RUN_BYTES = 4 * 1024**3
"""Engines that are loaded and timed together, at most: they share the GPU's memory."""

TIMED_S = 1.0
"""Seconds of warm-up, and of repeats, for each engine: a plan of a large network must not cost a minute."""

SLACK = 1.2
"""A run is expected to take this many times as long, for each engine in it, as the one before."""

Ready = tuple[int, Variant]


@dataclass
class EngineEvaluator:
    """Error of plans on all samples, and latency on the first, as measured.

    The first plan that is ever measured is the reference: its engine is kept and timed again with every
    run, and latencies are given as if its first measurement had held throughout: the drift of the GPU's
    clock does not count. Models and engines of the others are deleted when they were measured.

    No build or run is begun that is not expected to end in time; what is under way at the end of the time
    is ended. Builds of TensorRT-RTX, which are work for the CPU, go on beside the runs.

    Attributes:
        folder: For models, engines and outputs.
        deployment: Plugins and the optimisation profile.
        timeout_s: For each build, and for each run.
        jobs: As for `Builder`.
        failures: What went wrong, one sentence for each plan.
        built: How many plans were built and run.
    """

    problem: Problem
    metric: Metric
    engine: EngineName
    folder: Path
    clock: Clock = field(default_factory=lambda: Clock(float("inf")))
    deployment: Deployment = field(default_factory=Deployment)
    timeout_s: float = 600.0
    jobs: int = 0
    timing: Timing = field(default_factory=lambda: Timing(seconds=TIMED_S))
    failures: list[str] = field(default_factory=list)
    built: int = 0
    _reference: Variant | None = None
    _reference_us: float = 0.0
    _device: str = ""
    _engine_s: float = 0.0

    def __post_init__(self) -> None:
        self._builder = Builder(
            self.problem, self.engine, self.deployment, self.folder, self.clock, self.timeout_s, self.jobs
        )

    @property
    def origin(self) -> str:
        """The engine and the device of the measurements."""
        return f"measured with {self.engine} on {self._device or 'the GPU'}"

    def affords(self) -> int:
        """How many more plans the time that is left should do for; as many as you like before the first."""
        running = SLACK * self._engine_s * (TOGETHER + 1) / TOGETHER
        building = max(self._builder.lowering_s, self._builder.seconds / self._builder.workers())
        beside = self.engine not in TIMES_KERNELS
        each = max(running, building) if beside else running + building
        return int(min(self.clock.left / each, 1e6)) if each else 1_000_000

    def measured(self, plans: Sequence[Plan]) -> Iterator[Judged]:
        """Build all, run all; a plan that does not build, crashes or hangs is reported as failed."""
        size = TOGETHER if self.engine in TIMES_KERNELS else max(len(plans), 1)
        for start in range(0, len(plans), size):
            for place, one in self._measured(plans[start : start + size]):
                if one.problem and not one.untried:
                    count = len(plans[start + place].fp32)
                    self.failures.append(f"a plan with {count} nodes in FP32: {one.problem}")
                yield start + place, one

    def _measured(self, plans: Sequence[Plan]) -> Iterator[Judged]:
        """As `measured`, of plans that are built at the same time."""
        ready: list[Ready] = []
        with closing(self._builder.built(plans)) as arriving:
            for made in arriving:
                yield from ((place, self._without(why)) for place, why in made if isinstance(why, str))
                ready += [(place, one) for place, one in made if isinstance(one, Variant)]
                group, ready = self._group(ready)
                yield from self._run(group)
        while ready:
            group, ready = self._group(ready)
            yield from self._run(group)

    def _without(self, why: str) -> Measured:
        return Measured.failed(self.metric, why, untried=why == TIME_UP)

    def _group(self, ready: Sequence[Ready]) -> tuple[list[Ready], list[Ready]]:
        """The first ones, as many as memory and time allow, one at least; and the rest."""
        most = min(TOGETHER, self._in_time()) if self._reference is not None else 1
        group: list[Ready] = []
        size = 0
        for one in ready:
            size += _engine_bytes(one[1])
            if group and (size > RUN_BYTES or len(group) >= most):
                break
            group.append(one)
        return group, list(ready[len(group) :])

    def _in_time(self) -> int:
        """How many engines can be run beside the reference in the time that is left."""
        each = SLACK * self._engine_s
        return int(min(self.clock.left / each - 1.0, 1e6)) if each else 1_000_000

    def _run(self, group: Sequence[Ready]) -> Iterator[Judged]:
        """Errors and latencies of engines that are timed together, the reference with them."""
        if not group:
            return
        variants = [variant for _, variant in group]
        again = [] if self._reference is None else [self._reference]
        if not self.clock.left or (again and self._in_time() < 1):
            yield from ((place, self._without(TIME_UP)) for place, _ in group)
            return self._forget(variants)
        start, folder = time.monotonic(), self.folder / "run"
        settings = Settings(
            self.engine,
            timing=self.timing,
            plugins=self.deployment.plugins,
            run_timeout_s=self.timeout_s,
            until=self.clock.end,
        )
        outcomes = measure([*again, *variants], settings, folder)
        if any(outcome.ran for outcome in outcomes):
            self._engine_s = (time.monotonic() - start) / len(outcomes)
        if self._reference is None:
            self._refer(variants, outcomes)
        drift = self._drift(outcomes)
        found = [self._judged(outcome, drift) for outcome in outcomes[len(again) :]]
        shutil.rmtree(folder, ignore_errors=True)
        self._forget(variants)
        yield from ((place, one) for (place, _), one in zip(group, found, strict=True))

    def _refer(self, variants: Sequence[Variant], outcomes: Sequence[Outcome]) -> None:
        """Take the first that ran as the reference."""
        for variant, outcome in zip(variants, outcomes, strict=True):
            if outcome.ran and outcome.latency is not None:
                self._reference, self._reference_us = variant, outcome.latency.median_us
                return

    def _drift(self, outcomes: Sequence[Outcome]) -> float:
        """Returns the first latency of the reference over its present one; 1 where there is none."""
        for outcome in outcomes:
            if self._reference and outcome.variant == self._reference.name and outcome.latency is not None:
                return self._reference_us / outcome.latency.median_us
        return 1.0

    def _judged(self, outcome: Outcome, drift: float) -> Measured:
        if outcome.status == "timeout" and not self.clock.left:
            return self._without(TIME_UP)
        if not outcome.ran or outcome.latency is None:
            return self._without(outcome.problem or "it ran, but could not be timed")
        self.built += 1
        self._device = outcome.device
        values = [
            self.metric.worst(expected, outcome.values(sample))
            for sample, expected in enumerate(self.problem.expected)
        ]
        value = min(values) if self.metric.least else max(values)
        return Measured(value, outcome.latency.median_us * drift, outcome.latency.iqr_us * drift)

    def _forget(self, variants: Sequence[Variant]) -> None:
        for variant in variants:
            if self._reference is None or variant.name != self._reference.name:
                self._builder.forget(variant)


def _engine_bytes(variant: Variant) -> int:
    """Bytes of what is loaded: the engine, or the model and its external data."""
    return sum(file.stat().st_size for file in variant.path.parent.glob("model.*"))
