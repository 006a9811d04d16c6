"""A judge of plans that builds them, several at a time, and runs them on the GPU, timed in turn."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

from rewriter.checks import as_declared
from rewriter.engines.measure import build_variant, measure
from rewriter.engines.protocol import EngineName, Latency, Outcome, Settings, Timing, Variant
from rewriter.engines.tensors import Samples, write_samples
from rewriter.errors import RewriterError
from rewriter.metrics import Metric
from rewriter.model import save
from rewriter.plan import Plan
from rewriter.search.evaluate import Measured, Problem

MOST_JOBS = 8
"""Builds at a time; each is a process with a model and its engine in memory."""

BUILD_BYTES = 2 * 1024**3
"""What a build takes besides the weights: libraries, CUDA, the optimiser."""

WEIGHTS_TIMES = 4
"""The model as read and as parsed, the builder's copy, the engine."""

RUN_BYTES = 4 * 1024**3
"""Engines that are loaded and timed together, at most: they share the GPU's memory."""

TIME_UP = "not tried: the time was up"

Progress = Callable[[str, int, int], None]


@dataclass
class EngineEvaluator:
    """Error of plans on all samples, and latency on the first, as measured.

    The first plan that is ever measured is the reference: its engine is kept and timed again with every
    batch, and latencies are given as if its first measurement had held throughout: the drift of the GPU's
    clock does not count. Models and engines of the others are deleted when they were measured.

    Attributes:
        folder: For models, engines and outputs.
        until: time.monotonic() from which on nothing is built any more; what was built is still run.
        timeout_s: For each build, and for each run.
        jobs: Builds at a time; 0: half of the cores, as far as memory allows. TensorRT, unlike
            TensorRT-RTX, chooses kernels by timing them on the GPU, so there it is one.
        timing: As for `Settings.timing`.
        failures: What went wrong, one sentence for each plan.
        built: How many plans were built and run.
    """

    problem: Problem
    metric: Metric
    engine: EngineName
    folder: Path
    until: float = float("inf")
    timeout_s: float = 600.0
    jobs: int = 0
    timing: Timing = field(default_factory=Timing)
    progress: Progress = lambda stage, done, total: None
    failures: list[str] = field(default_factory=list)
    built: int = 0
    _reference: Variant | None = None
    _reference_us: float = 0.0
    _device: str = ""
    _count: int = 0
    _samples: Samples | None = None
    _lowering: threading.Lock = field(default_factory=threading.Lock)

    @property
    def origin(self) -> str:
        """What measured, and where."""
        return f"measured with {self.engine} on {self._device or 'the GPU'}"

    def measured(self, plans: Sequence[Plan]) -> Sequence[Measured]:
        """Build all, run all; a plan that does not build, crashes or hangs is told as failed."""
        if not plans:
            return []
        found: dict[int, Measured] = {}
        ready: list[tuple[int, Variant]] = []
        for place, variant in self._built(plans):
            if isinstance(variant, Variant):
                ready.append((place, variant))
            else:
                found[place] = variant
        for group in self._groups(sorted(ready, key=lambda pair: pair[0])):
            found |= self._run([(place, variant) for place, variant in group])
        for place, one in sorted(found.items()):
            if one.problem and not one.untried:
                self.failures.append(f"a plan with {len(plans[place].fp32)} nodes in FP32: {one.problem}")
        return [found[place] for place in range(len(plans))]

    # -- building -------------------------------------------------------------------------------

    def _built(self, plans: Sequence[Plan]) -> Iterator[tuple[int, Variant | Measured]]:
        """Each plan's place with what can be run, or with why it cannot; as they are done."""
        first = self._count
        self._count += len(plans)
        with ThreadPoolExecutor(self._jobs()) as pool:
            futures = {pool.submit(self._build, p, f"plan-{first + i}"): i for i, p in enumerate(plans)}
            try:
                for done, future in enumerate(as_completed(futures), 1):
                    yield futures[future], future.result()
                    self.progress("search: building", done, len(plans))
            finally:
                pool.shutdown(cancel_futures=True)

    def _jobs(self) -> int:
        if self.engine == "tensorrt":
            return 1
        weights = sum(array.nbytes for array in self.problem.model.weights.values())
        by_memory = _available_bytes() // (BUILD_BYTES + WEIGHTS_TIMES * weights)
        return self.jobs or max(1, min(MOST_JOBS, (os.cpu_count() or 2) // 2, by_memory))

    def _build(self, plan: Plan, name: str) -> Variant | Measured:
        left = self.until - time.monotonic()
        if left <= 0.0:
            return Measured.failed(self.metric, TIME_UP, untried=True)
        folder = self.folder / name
        folder.mkdir(parents=True)
        settings = Settings(self.engine, build_timeout_s=min(self.timeout_s, max(left, 1.0)))
        try:
            variant = self._variant(plan, name, folder)
            made = build_variant(variant, settings, folder / "model.engine")
        except RewriterError as error:
            shutil.rmtree(folder)
            return Measured.failed(self.metric, str(error))
        if isinstance(made, Outcome):
            shutil.rmtree(folder)
            cut = made.status == "timeout" and left < self.timeout_s
            return Measured.failed(self.metric, TIME_UP if cut else made.problem, untried=cut)
        if made[0] != variant.path:
            for file in folder.glob("model.onnx*"):
                file.unlink()
        return replace(variant, engine=made[0])

    def _variant(self, plan: Plan, name: str, folder: Path) -> Variant:
        with self._lowering:  # one copy of the weights at a time
            lowered = self.problem.lowered(plan)
            if self._samples is None:  # in the types of the inputs, which all plans share
                feeds = (as_declared(lowered, sample) for sample in self.problem.samples)
                self._samples = write_samples(self.folder / "samples", feeds)
            return Variant(name, save(lowered, folder / "model.onnx"), self._samples)

    # -- running --------------------------------------------------------------------------------

    def _groups(self, ready: Sequence[tuple[int, Variant]]) -> Iterator[list[tuple[int, Variant]]]:
        """In order, no more together than the GPU's memory may take."""
        group: list[tuple[int, Variant]] = []
        size = 0
        for place, variant in ready:
            own = _engine_bytes(variant)
            if group and size + own > RUN_BYTES:
                yield group
                group, size = [], 0
            group.append((place, variant))
            size += own
        if group:
            yield group

    def _run(self, group: Sequence[tuple[int, Variant]]) -> dict[int, Measured]:
        """Errors and latencies of engines that are timed together, the reference with them."""
        variants = [variant for _, variant in group]
        again = [] if self._reference is None else [self._reference]
        self.progress(f"search: running {len(variants)}", 0, 0)
        settings = Settings(self.engine, timing=self.timing, run_timeout_s=self.timeout_s)
        folder = self.folder / f"run-{group[0][1].name}"
        outcomes = measure([*again, *variants], settings, folder)
        if self._reference is None:
            self._refer(variants, outcomes)
        reference = next((o for o in outcomes if self._reference and o.variant == self._reference.name), None)
        drift = 1.0
        if reference is not None and reference.latency is not None and self._reference_us:
            drift = self._reference_us / reference.latency.median_us
        found = {
            place: self._judged(outcome, drift)
            for (place, _), outcome in zip(group, outcomes[len(again) :], strict=True)
        }
        self._forget(variants, folder)
        return found

    def _refer(self, variants: Sequence[Variant], outcomes: Sequence[Outcome]) -> None:
        """Take the first that ran as the reference."""
        for variant, outcome in zip(variants, outcomes, strict=True):
            if outcome.ran and outcome.latency is not None:
                self._reference, self._reference_us = variant, outcome.latency.median_us
                return

    def _judged(self, outcome: Outcome, drift: float) -> Measured:
        if not outcome.ran or outcome.latency is None:
            return Measured.failed(self.metric, outcome.problem or "it ran, but could not be timed")
        self.built += 1
        self._device = outcome.device
        values = [
            self.metric.worst(expected, outcome.values(sample))
            for sample, expected in enumerate(self.problem.expected)
        ]
        value = min(values) if self.metric.least else max(values)
        latency: Latency = outcome.latency
        return Measured(value, latency.median_us * drift, latency.iqr_us * drift)

    def _forget(self, variants: Sequence[Variant], run: Path) -> None:
        shutil.rmtree(run, ignore_errors=True)
        for variant in variants:
            if self._reference is None or variant.name != self._reference.name:
                shutil.rmtree(self.folder / variant.name, ignore_errors=True)


def _engine_bytes(variant: Variant) -> int:
    """Bytes of what is loaded: the engine, or the model and its external data."""
    return sum(file.stat().st_size for file in variant.path.parent.glob("model.*"))


def _available_bytes() -> int:
    """Memory that can be had without swapping; plenty where the system does not say."""
    try:
        with Path("/proc/meminfo").open(encoding="ascii") as table:
            lines = dict(line.split(":", 1) for line in table)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 1 << 62
