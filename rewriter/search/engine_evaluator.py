"""A judge of plans that builds each and runs it on the GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from rewriter.checks import as_declared
from rewriter.engines.measure import measure
from rewriter.engines.protocol import EngineName, Outcome, Settings, Variant
from rewriter.engines.tensors import write_samples
from rewriter.metrics import Metric
from rewriter.model import save
from rewriter.plan import Plan
from rewriter.search.evaluate import Problem


@dataclass
class EngineEvaluator:
    """Error and latency of plans as measured; each plan is built and run once.

    A plan that does not build, crashes or hangs is worth nothing: `value` is the worst there is, and
    `failures` says what happened.

    Attributes:
        folder: For models and engines; an engine is deleted once it was measured.
        timeout_s: For each build, and for each run.
    """

    problem: Problem
    metric: Metric
    engine: EngineName
    folder: Path
    timeout_s: float = 600.0
    failures: list[str] = field(default_factory=list)
    _known: dict[tuple[frozenset[str], frozenset[str]], tuple[float, float | None]] = field(
        default_factory=dict
    )
    _device: str = ""

    @property
    def origin(self) -> str:
        """What measured, and where."""
        return f"measured with {self.engine} on {self._device or 'the GPU'}"

    def value(self, plan: Plan) -> float:
        """The metric of the built model, the worst over all outputs and samples."""
        return self._measured(plan)[0]

    def latency_us(self, plan: Plan) -> float | None:
        """Median latency of the first sample; None if it did not run."""
        return self._measured(plan)[1]

    def _measured(self, plan: Plan) -> tuple[float, float | None]:
        key = (plan.fp32, plan.bf16)
        if key not in self._known:
            self._known[key] = self._build_and_run(plan)
        return self._known[key]

    def _build_and_run(self, plan: Plan) -> tuple[float, float | None]:
        number = len(self._known)
        lowered = self.problem.lowered(plan)
        folder = self.folder / f"plan-{number}"
        folder.mkdir(parents=True)
        fed = (as_declared(lowered, sample) for sample in self.problem.samples)
        samples = write_samples(folder / "samples", fed)
        path = save(lowered, folder / "model.onnx")
        settings = Settings(self.engine, build_timeout_s=self.timeout_s, run_timeout_s=self.timeout_s)
        (outcome,) = measure([Variant(f"plan {number}", path, samples)], settings, folder)
        for file in (*folder.glob("*.engine"), *folder.glob("model.onnx*")):
            file.unlink()
        if not outcome.ran:
            self.failures.append(f"a plan with {len(plan.fp32)} nodes in FP32: {outcome.problem}")
            return (-math.inf if self.metric.least else math.inf), None
        self._device = outcome.device
        return self._worst(outcome), outcome.latency.median_us if outcome.latency else None

    def _worst(self, outcome: Outcome) -> float:
        values = [
            self.metric.worst(expected, outcome.values(sample))
            for sample, expected in enumerate(self.problem.expected)
        ]
        return min(values) if self.metric.least else max(values)
