"""Repairs a result that TensorRT does not build, although it builds the original.

Most often its parser refuses a type that the original does not have: the nodes that it names go to FP32, then
all nodes of their operators. Next, the passes that changed something are left out, one at a time. FP32 with
our passes and without any comes last. Each remedy is a run of its own, from the file on: a run whose result
builds keeps nothing in memory for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from rewriter.base import Stage
from rewriter.graph import label
from rewriter.hazards import Hazard, Survey
from rewriter.jobs.fix.job import FixJob
from rewriter.jobs.fix.repair import can_be_repaired, in_fp32
from rewriter.jobs.fix.result import FixResult
from rewriter.model.stopwatch import LASTING
from rewriter.verification.verdict import ORIGINAL, Check

REFUSALS = 4
"""Most runs that move refused nodes to FP32: a parser names the first node that it refuses, or few."""


def buildable(job: FixJob, once: Callable[[FixJob], FixResult]) -> FixResult:
    """Runs a job, and remedies if its result does not build though the original does.

    Args:
        once: Runs a job, and writes its result.

    Returns:
        The first result that builds; the last one if none does. It is the one that was written.
    """
    made = once(job)
    if not _is_ours(made) or not can_be_repaired(job):
        return made
    repair, start = _Repair(job, made), time.monotonic()
    lines = [f"the result does not build: {_why(made)}"]
    for words, remedy in repair.remedies():
        spent = time.monotonic() - start
        if spent > job.request.repair_seconds:
            lines.append(f"stopped after {spent:.0f} s (--repair-seconds)")
            break
        job.progress(f"{LASTING}repair, {spent:.0f} s: {words}", 0, 0)
        before, repair.latest = repair.latest, once(remedy)
        repair.latest.seconds = _sum(before.seconds, repair.latest.seconds)
        if not _is_ours(repair.latest):
            lines.append(f"{words}: it builds")
            break
        lines.append(f"{words}: {_why(repair.latest)}")
    return replace(repair.latest, repairs=[*lines, *repair.latest.repairs])


def _sum(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


@dataclass
class _Repair:
    """The remedies for one job.

    Attributes:
        latest: The result of the last run.
    """

    job: FixJob
    latest: FixResult

    def remedies(self) -> Iterator[tuple[str, FixJob]]:
        """Yields remedies in words with their jobs, each after the result of the one before it is known."""
        changed = {step.name for step in self.latest.passes if step.changes}
        yield from self._in_fp32()
        for step in self.job.steps:
            if step.name in changed and step.stage is not Stage.LOWERING:
                yield f"without {step.name}", self.job.without(step)
        yield "all of it in FP32 (TF32)", in_fp32(self.job)
        yield "all of it in FP32 (TF32), unchanged", replace(in_fp32(self.job), steps=())

    def _in_fp32(self) -> Iterator[tuple[str, FixJob]]:
        """Refused nodes in FP32; all nodes of an operator if they have no name, or another one is refused."""
        names, operators, seen = set[str](), set[str](), set[str]()
        for _ in range(REFUSALS):
            refused = _build(self.latest).refused
            whole = {op for name, op in refused if not name or op in seen} - operators
            single = {name for name, op in refused if name and op not in seen} - names
            if not whole | single:
                return
            names, operators, seen = names | single, operators | whole, seen | {op for _, op in refused}
            rules = (*self.job.wish.rules, _refused(frozenset(names), frozenset(operators)))
            words = ", ".join([*(f"all {op}" for op in sorted(whole)), *sorted(single)])
            yield f"{words} in FP32", replace(self.job, wish=replace(self.job.wish, rules=rules))


def _refused(names: frozenset[str], operators: frozenset[str]) -> Callable[[Survey], Iterator[Hazard]]:
    """A rule for nodes that the parser of TensorRT refuses."""

    def refused(survey: Survey) -> Iterator[Hazard]:
        for node in survey.nodes:
            if node.name in names or node.op_type in operators:
                reason = f"TensorRT refuses {label(node)} ({node.op_type}) in {survey.low_name}"
                yield Hazard(node, "no-lower-type", reason)

    return refused


def _is_ours(made: FixResult) -> bool:
    """True if TensorRT builds the original alone; it is tried only where the result does not build."""
    return any(check.name == ORIGINAL and check.passed for check in _checks(made))


def _build(made: FixResult) -> Check:
    """The check of the build; there is one wherever `_is_ours` holds."""
    return next(check for check in _checks(made) if check.name == "build")


def _why(made: FixResult) -> str:
    build = _build(made)
    return next(iter(build.details), build.summary)


def _checks(made: FixResult) -> tuple[Check, ...]:
    return made.verdict.checks if made.verdict is not None else ()
