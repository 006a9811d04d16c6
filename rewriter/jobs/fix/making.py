"""Makes one attempt: passes over the model, its ranges, its plan, and the search that starts from it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from rewriter.base.stopwatch import Stopwatch
from rewriter.hazards.analysis import PrecisionRequest
from rewriter.hazards.planning import free_fp32
from rewriter.hazards.planning.plan_fit import fit, kept_by_user
from rewriter.hazards.planning.planner import extend_plan, make_plan
from rewriter.ir.graph import display_name
from rewriter.ir.model import Model, walk_graphs, walk_nodes
from rewriter.ir.plan import Plan, node_key
from rewriter.ir.plan.node_patterns import NodePatterns
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.refusals import near_names
from rewriter.jobs.search.goal import Found, Goal
from rewriter.jobs.search.run import search
from rewriter.passes.base import Context, Pass
from rewriter.pipeline.driver import Driver, PassResult
from rewriter.runtime.emulation import reference
from rewriter.runtime.inputs import Samples
from rewriter.runtime.metrics.outputs import OutputComparison
from rewriter.runtime.ranges import Ranges, measure
from rewriter.verification.verdict import Check
from rewriter.verification.verifier import Verifier


@dataclass(frozen=True)
class Workload:
    """The model that all attempts start from, with its data and its judge.

    Ranges are measured on `samples`; searches may fit a plan to `fitting`. `warnings` are about the model and
    its data. `before` has its outputs in plain FP16 or BF16, () if they are not verified.
    """

    original: Model
    samples: Samples
    fitting: Samples
    judge: Verifier
    stage: Stopwatch
    warnings: tuple[str, ...]
    before: tuple[OutputComparison, ...] = ()
    measured: dict[tuple[Pass, ...], CalibratedModel] = field(default_factory=dict)


@dataclass(frozen=True)
class CalibratedModel:
    """A model that a plan is made for, after `passes`, with the `checks` of its structure.

    Jobs with the same passes before the plan share it.
    """

    model: Model
    ranges: Ranges
    passes: tuple[PassResult, ...]
    checks: tuple[Check, ...]
    warnings: tuple[str, ...]

    @classmethod
    def by(cls, job: FixJob, workload: Workload) -> CalibratedModel:
        phases = job.phases
        key = (*phases.structural, *phases.measuring)
        if key not in workload.measured:
            making = AttemptBuilder(job, workload, warnings=list(workload.warnings))
            model, ranges = making.rewrite(workload.original, phases.structural), Ranges()
            if job.plan is not None and phases.measuring:  # it holds their results
                model = making.rewrite(model, phases.measuring, job.plan)
            if phases.unbiased or (job.plan is None and (phases.measuring or phases.lowering)):
                ranges = making.ranges(model)
            if job.plan is None and phases.measuring:
                first, model = len(making.passes), making.rewrite(model, phases.measuring, ranges=ranges)
                if any(result.changes for result in making.passes[first:]):
                    ranges = making.ranges(model)
            outputs, ranges.outputs = ranges.outputs, {}  # once compared, they need no memory any more
            checks = tuple(workload.judge.structure(model, making.changed(), outputs))
            workload.measured[key] = cls(model, ranges, tuple(making.passes), checks, tuple(making.warnings))
        return workload.measured[key]


@dataclass
class AttemptBuilder:
    """The passes of a job, run with what is known when each runs; they add to what its result reports.

    `passes` has their results in order, `warnings` what the user should read, `search` a search's outcome.
    """

    job: FixJob
    workload: Workload
    passes: list[PassResult] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    search: Found | None = None

    def rewrite(
        self, model: Model, steps: Sequence[Pass], plan: Plan | None = None, ranges: Ranges | None = None
    ) -> Model:
        """Returns the model after passes that need no samples."""
        stage, total, places = self.workload.stage, len(self.job.steps), count(len(self.passes))
        report = partial(stage.report, "rewriting", total=total)
        driver = Driver(lambda step: report(next(places), detail=f": {step.name}"), lenient=True)
        job = self.job  # what the user keeps in FP32 stands in the plan that excludes the options
        kept = (
            NodePatterns(job.precision.keep_nodes, job.precision.keep_ops)
            if job.plan is None
            else kept_by_user(job.plan)
        )
        with stage("rewriting"):
            means = ranges.means if ranges is not None else {}
            context = Context(job.opset, job.precision.target, plan, ranges, means, kept)
            rewritten, results = driver.run(model, steps, context)
        self.passes.extend(results)
        for result in (result for result in results if result.failure):
            text = f"pass {result.name} failed on this model and was left out: {result.failure}"
            self.warnings.append(f"{text}; please report it with the model")
        return rewritten

    def changed(self) -> list[Pass]:
        """Returns the passes before the plan that changed something."""
        phases = self.job.phases
        before = (*phases.structural, *phases.measuring)
        return [step for step, result in zip(before, self.passes, strict=False) if result.changes]

    def ranges(self, model: Model) -> Ranges:
        """Measures the ranges of every tensor on the samples."""
        stage, samples = self.workload.stage, self.workload.samples
        with stage("measuring ranges"):
            done, wide = partial(stage.report, "measuring ranges", total=len(samples)), reference(model)
            # of a model in FP32 they are what the check of its structure compares
            judged = self.workload.judge.places if wide is model else ()
            ranges = measure(wide, samples, outputs_of=judged, channels=True, progress=done)
        ranges.real = samples.source.real
        if ranges.unsupported:
            self.warnings.append(
                f"ONNX Runtime has no kernel for {', '.join(ranges.unsupported)}: what depends on it was not "
                "measured and stays in FP32"
            )
        return ranges

    def plan(self, structured: Model, ranges: Ranges) -> Plan:
        """Returns the user's plan, or the rules' plan for the measured ranges."""
        job = self.job
        with self.workload.stage("choosing types"):
            if job.plan is not None:
                named = isinstance(job.request.plan, (str, os.PathLike))
                return fit(structured, job.plan, str(job.request.plan) if named else "the plan")
            real = self.workload.samples.source.real
            plan = make_plan(structured, ranges, job.precision, real=real)
            released = {d.key for d in plan.decisions if d.rule in job.released}
            plan = extend_plan(structured, plan, {}, frozenset(released))
        self.warnings.extend(_unmatched(job.precision, plan, structured))
        if job.precision.epilogues != "none" and job.precision.precision == "fp16":
            self.warnings.extend(free_fp32.refusals(job.precision.target))
        return plan

    def searched(self, measured: CalibratedModel, plan: Plan, goal: Goal) -> Plan:
        """Returns the plan that reaches the goal; a goal out of reach is reported as a failed check."""
        job, workload, ranges = self.job, self.workload, measured.ranges
        means_of = Context(ranges=ranges, means=ranges.means) if job.phases.unbiased else None
        with workload.stage("searching"):
            self.search, warnings = search(
                workload.original,
                measured.model,
                workload.fitting,
                plan,
                goal,
                job.accumulation,
                job.precision.target,
                means_of,
            )
        self.warnings.extend(warnings)
        return self.search.plan


def _unmatched(precision: PrecisionRequest, plan: Plan, model: Model) -> Iterator[str]:
    """Warns of names that keep no node: it does not compute on floats, or a pass removed it."""
    nodes = list(model.proto.graph.node)
    keys = {d.key for d in plan.decisions if d.rule == "user"}
    scopes = enumerate(walk_graphs(model.proto.graph) if keys else ())
    lower = [node for scope, graph in scopes for node in graph.node if node_key(scope, node) in keys]
    requests = [
        *(("`keep-fp32`", name, NodePatterns(nodes=(name,))) for name in precision.keep_nodes),
        *(("`keep-fp32-op`", name, NodePatterns(ops=(name,))) for name in precision.keep_ops),
    ]
    for option, name, request in requests:
        if not any(any(request.requests(node)) for node in lower):
            there = map(display_name, nodes) if option == "`keep-fp32`" else (node.op_type for node in nodes)
            near = near_names(name, there)
            instead = f": there are {near}" if near else ""
            yield f"{option} {name!r} names no node that computes on floats{instead}"
    operators = [node.op_type for node in walk_nodes(model.proto.graph)] if precision.lower.ops else []
    for name in precision.lower.ops:
        if name not in operators:
            yield f"`lower-op` {name!r} names no node: there are {near_names(name, operators)}"
