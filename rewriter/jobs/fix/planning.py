"""Measures ranges, makes the plan, and runs the search that starts from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rewriter.hazards.planning import free_fp32
from rewriter.hazards.planning.plan_fit import fit
from rewriter.hazards.planning.planner import PlanRequest, extend_plan, make_plan
from rewriter.ir.base import Kept, Merged, Pass, Rescaled
from rewriter.ir.graph import label
from rewriter.ir.model import Model, walk_graphs
from rewriter.ir.model import facts as tensor_facts
from rewriter.ir.plan import Plan, node_key
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.refusals import near_names
from rewriter.jobs.fix.rewriting import Record, Rewriting
from rewriter.jobs.search.goal import Goal
from rewriter.jobs.search.run import SearchRequest, run
from rewriter.runtime.emulation import reference
from rewriter.runtime.inputs import Samples
from rewriter.runtime.ranges import Ranges, measure
from rewriter.runtime.ranges.merged import merged_ranges


@dataclass(frozen=True)
class Planning:
    """From ranges, measured on `samples`, to a plan and the model that it is for; searches use `fitting`."""

    job: FixJob
    record: Record
    rewriting: Rewriting
    samples: Samples
    fitting: Samples

    def ranges(self, model: Model) -> Ranges:
        """Measures the ranges of every tensor on the samples."""
        with self.record.stage("ranges"):
            widened = reference(model, tensor_facts.infer(model))
            ranges = measure(
                widened,
                self.samples,
                tensor_facts.infer(widened),
                progress=lambda done: self.record.stage.progress("ranges", done, len(self.samples)),
            )
        ranges.real = self.samples.source.real
        if ranges.unsupported:
            self.record.warnings.append(
                f"ONNX Runtime has no kernel for {', '.join(ranges.unsupported)}: what depends on it was not "
                "measured and stays in FP32"
            )
        return ranges

    def rewritten_by_ranges(
        self, model: Model, steps: Sequence[Pass], ranges: Ranges
    ) -> tuple[Model, Ranges]:
        """Returns the model after passes that need ranges, with its ranges: derived, or measured again."""
        first = len(self.record.passes)
        rewritten = self.rewriting.rewrite(model, steps, ranges=ranges)
        made = self.record.passes[first:]
        if not all(isinstance(change, (Merged, Rescaled)) for result in made for change in result.changes):
            return rewritten, self.ranges(rewritten)
        known = ranges.rescaled(self.record.exponents())
        merging = {r.name for r in made if any(isinstance(change, Merged) for change in r.changes)}
        if not merging:
            return rewritten, known
        merged = merged_ranges(rewritten, known, merging, tensor_facts.infer(rewritten))
        return rewritten, merged if merged is not None else self.ranges(rewritten)

    def plan(self, structured: Model, ranges: Ranges) -> Plan:
        """Returns the user's plan, or the rules' plan for the measured ranges."""
        job = self.job
        with self.record.stage("plan"):
            facts = tensor_facts.infer(structured)
            if job.plan is not None:
                return fit(structured, facts, job.plan, job.plan_source)
            plan = make_plan(structured, facts, ranges, job.wish, real=self.samples.source.real)
            released = {d.key for d in plan.decisions if (d.rule, d.op) in job.released}
            plan = extend_plan(structured, facts, plan, {}, frozenset(released))
        self.record.warnings.extend((*_unmatched(job.wish, plan, structured), *_declined(job.wish)))
        return plan

    def searched(self, original: Model, structured: Model, plan: Plan, goal: Goal) -> Plan:
        """Returns the plan that reaches the goal; a goal out of reach is reported as a failed check."""
        job = self.job
        with self.record.stage("search"):
            found = run(
                SearchRequest(original, structured, self.fitting, plan, goal, job.accumulation, job.target)
            )
        self.record.search = found
        self.record.warnings.extend(found.warnings)
        return found.plan


def _declined(wish: PlanRequest) -> Iterator[str]:
    """Warns of requests that the target was measured not to fulfil."""
    if wish.epilogues and wish.precision == "fp16":
        yield from free_fp32.refusals(wish.target)


def _unmatched(wish: PlanRequest, plan: Plan, model: Model) -> Iterator[str]:
    """Warns of names that keep no node: it does not compute on floats, or a pass removed it."""
    nodes = list(model.proto.graph.node)
    keys = {d.key for d in plan.decisions if d.rule == "user"}
    scopes = enumerate(walk_graphs(model.proto.graph))
    kept = [node for scope, graph in scopes for node in graph.node if node_key(scope, node) in keys]
    requests = [
        *(("`keep-fp32`", name, Kept(nodes=(name,))) for name in wish.keep_nodes),
        *(("`keep-fp32-op`", name, Kept(ops=(name,))) for name in wish.keep_ops),
    ]
    for option, name, request in requests:
        if not any(any(request.requests(node)) for node in kept):
            there = map(label, nodes) if option == "`keep-fp32`" else (node.op_type for node in nodes)
            near = near_names(name, there)
            instead = f": there are {near}" if near else ""
            yield f"{option} {name!r} names no node that computes on floats{instead}"
