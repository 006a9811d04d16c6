"""Judges plans by builds and timed runs on an engine, within a time limit."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from rewriter.engines.measure import measure
from rewriter.engines.parallel_builds import TIMES_KERNELS
from rewriter.engines.protocol import EngineOutcome, MeasureSettings, Timing, Variant
from rewriter.figures.metrics import Metric
from rewriter.plan import Plan
from rewriter.search.builder import TIME_UP, Builder
from rewriter.search.tried_plans import Judged, Measured

TOGETHER = 4
"""Engines that are loaded and timed together with the reference. More engines share the cost of loading the
reference again; fewer give results sooner, and less is lost if time runs out."""

RUN_BYTES = 4 * 1024**3
"""Largest size of the engines that are loaded together: they share the GPU's memory."""

TIMED_S = 1.0
"""Seconds of warm-up, and of repeats, for each engine: a plan for a large network must not cost a minute."""

SLACK = 1.2
"""Factor on the time for each engine of the last run, to estimate the next run."""

Ready = tuple[int, Variant]


@dataclass
class EngineEvaluator:
    """Measures the errors of plans on all samples, and their latency on the first.

    The first plan that runs is the reference. Its engine is kept and timed again with every run, and
    latencies are scaled by its drift, so that changes of the GPU's clock do not count. Models and engines of
    other plans are deleted after they were measured.

    No build or run is started that is not expected to end in time; at the deadline, running ones are killed.
    Builds of TensorRT-RTX use the CPU alone, and run in parallel with measurements.

    Attributes:
        failures: One sentence for each plan that failed.
    """

    builder: Builder
    metric: Metric
    timing: Timing = field(default_factory=lambda: Timing(seconds=TIMED_S))
    failures: list[str] = field(default_factory=list)
    _reference: Variant | None = None
    _reference_us: float = 0.0
    _device: str = ""
    _engine_s: float = 0.0

    @property
    def origin(self) -> str:
        """The engine and the device of the measurements."""
        return f"measured with {self.builder.engine} on {self._device or 'the GPU'}"

    @property
    def _one_at_a_time(self) -> bool:
        """True if builds time kernels, so that nothing may run beside them."""
        return self.builder.engine in TIMES_KERNELS

    def affords(self) -> int:
        """Returns how many more plans there should be time for; before the first plan, a million."""
        running = SLACK * self._engine_s * (TOGETHER + 1) / TOGETHER
        building = max(self.builder.lowering_s, self.builder.seconds / self.builder.workers())
        return self._fitting(running + building if self._one_at_a_time else max(running, building))

    def measured(self, plans: Sequence[Plan]) -> Iterator[Judged]:
        """Builds and runs all plans; one that does not build, crashes or hangs is yielded as failed."""
        size = TOGETHER if self._one_at_a_time else max(len(plans), 1)
        for start in range(0, len(plans), size):
            for place, one in self._measured(plans[start : start + size]):
                if one.problem and not one.untried:
                    count = len(plans[start + place].fp32)
                    self.failures.append(f"a plan with {count} nodes in FP32: {one.problem}")
                yield start + place, one

    def _measured(self, plans: Sequence[Plan]) -> Iterator[Judged]:
        """Yields the measurements of plans that are built at the same time."""
        ready: list[Ready] = []
        with closing(self.builder.built(plans)) as arriving:
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
        """Splits the first builds off, as many as memory and time allow, at least one."""
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
        """Returns how many engines can run with the reference in the time that is left."""
        return self._fitting(SLACK * self._engine_s, besides=1.0)

    def _fitting(self, each: float, besides: float = 0.0) -> int:
        """Returns how many items of `each` seconds fit in the time that is left; a million if unknown."""
        return int(min(self.builder.clock.left / each - besides, 1e6)) if each else 1_000_000

    def _run(self, group: Sequence[Ready]) -> Iterator[Judged]:
        """Yields errors and latencies of engines that are timed together with the reference."""
        if not group:
            return
        variants = [variant for _, variant in group]
        again = [] if self._reference is None else [self._reference]
        builder = self.builder
        if not builder.clock.left or (again and self._in_time() < 1):
            yield from ((place, self._without(TIME_UP)) for place, _ in group)
            return self._forget(variants)
        start, folder = time.monotonic(), builder.folder / "run"
        settings = MeasureSettings(
            builder.engine,
            timing=self.timing,
            plugins=builder.deployment.plugins,
            run_timeout_s=builder.timeout_s,
            until=builder.clock.end,
            runtime_cache=builder.folder / "kernels.cache",
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

    def _refer(self, variants: Sequence[Variant], outcomes: Sequence[EngineOutcome]) -> None:
        """Makes the first build that ran the reference."""
        for variant, outcome in zip(variants, outcomes, strict=True):
            if outcome.ran and outcome.latency is not None:
                self._reference, self._reference_us = variant, outcome.latency.median_us
                return

    def _drift(self, outcomes: Sequence[EngineOutcome]) -> float:
        """Returns the first latency of the reference over its latest one; 1 without a reference."""
        for outcome in outcomes:
            if self._reference and outcome.variant == self._reference.name and outcome.latency is not None:
                return self._reference_us / outcome.latency.median_us
        return 1.0

    def _judged(self, outcome: EngineOutcome, drift: float) -> Measured:
        if outcome.status == "timeout" and not self.builder.clock.left:
            return self._without(TIME_UP)
        if not outcome.ran or outcome.latency is None:
            return self._without(outcome.problem or "it ran, but could not be timed")
        self._device = outcome.device
        expected = self.builder.problem.expected
        values = [self.metric.worst(one, outcome.values(i)) for i, one in enumerate(expected)]
        value = min(values) if self.metric.least else max(values)
        return Measured(value, outcome.latency.median_us * drift, outcome.latency.iqr_us * drift)

    def _forget(self, variants: Sequence[Variant]) -> None:
        for variant in variants:
            if self._reference is None or variant.name != self._reference.name:
                self.builder.forget(variant)


def _engine_bytes(variant: Variant) -> int:
    """Returns the bytes that are loaded: the engine, or the model and its external data."""
    return sum(file.stat().st_size for file in variant.path.parent.glob("model.*"))
