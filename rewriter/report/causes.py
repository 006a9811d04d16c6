"""The causes of a model's errors, with their numbers and repairs, in words.

Every FP32 node that a hazard puts into the plan belongs to one cause. So do repairs that leave no trace in
the plan: norms that became one operator, tensors that were scaled, constants that were clamped.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewriter.base.text import count, figure
from rewriter.hazards.analysis import KINDS, LARGEST, LOW_TYPES
from rewriter.ir.plan import HEADROOM, Decision, NormHazard, Plan, Precision, Range
from rewriter.jobs.fix.repair_facts import BATCH, RepairFacts
from rewriter.passes.base import Clamped
from rewriter.pipeline.driver import PassResult

NAMES = {"layer-norm": "LayerNorm", "rms-norm": "RMSNorm", "l2-normalize": "L2 norm"}
"""Norms as people call them, by the name of the pattern."""


@dataclass(frozen=True)
class Cause:
    """One kind of hazard that a model had: what was wrong, what was done about it, and the nodes."""

    kind: str  # a key of `hazards.analysis.KINDS`
    what: str
    done: str
    nodes: tuple[str, ...]
    reach: float | None = None  # largest absolute value there; None: no single tensor is the evidence
    limit: float | None = None  # the number that `reach` is held against
    centre: str = ""  # the node that goes wrong; "" if it is the one with the largest values
    repaired_by: str = ""  # the pass without which a known defect stays; "" if there is none

    def __str__(self) -> str:
        return f"{self.what}: {self.done}"


def causes(plan: Plan | None, passes: Sequence[PassResult], facts: RepairFacts) -> tuple[Cause, ...]:
    """The hazards that `fix` found, those that overflow first; then known defects."""
    hazards = _hazards(plan, passes, facts) if plan is not None and plan.precision != "fp32" else []
    hazards.sort(key=lambda cause: not (cause.reach or 0.0) > (cause.limit or math.inf))
    return (*hazards, *_defects(facts))


def _defects(facts: RepairFacts) -> Iterator[Cause]:
    for quirk, nodes in facts.defects:
        name = quirk.repairing_pass
        done = f"repaired by {name}" if name else f"built with {' '.join(quirk.build)}"
        done = f"{' and '.join(quirk.lower)} in {facts.precision.upper()}" if quirk.lower else done
        what = f"{quirk.title} ({quirk.releases})"
        yield Cause("known-defect", what, done, nodes, repaired_by=name)


def _hazards(plan: Plan, passes: Sequence[PassResult], facts: RepairFacts) -> list[Cause]:
    low = plan.precision
    rules: dict[str, list[Decision]] = defaultdict(list)
    norms: dict[NormHazard, list[Decision]] = defaultdict(list)
    for decision in plan.decisions:
        if decision.norm is not None and decision.rule == "unfused-norm":
            norms[decision.norm].append(decision)
        elif decision.rule in KINDS:
            rules[decision.rule].append(decision)
    rows = [*_of_norms(norms, low), *_of_fused(facts.fused, low)]
    rows += _of_overflow(rules.pop("overflow", []), facts.unscaled, low)
    rows += _of_masks(passes, low)
    rows += [_of_rule(rule, members) for rule, members in rules.items()]
    if facts.folded and low == "fp16":
        names, reasons = zip(*facts.folded, strict=True)
        what = f"{count(len(names), BATCH)} with statistics that FP16 cannot hold ({reasons[0]})"
        rows.append(Cause("weights", what, "folded into weights in FP32", names))
    return rows


def _held(low: Precision, reach: float, headroom: float = HEADROOM) -> str:
    """The end of the sentence `... reach 8.2e7`; a factor of `headroom` has to be left for other data."""
    largest = _largest_of(low)
    end = f"{low.upper()} ends at {figure(largest)}"
    if reach > largest:
        return end
    spread = ", as the samples differ" if headroom > HEADROOM else ""
    return f"{end}, a factor of {largest / reach:.2g} away; {figure(headroom)} is kept free{spread}"


def _largest_of(low: Precision) -> float:
    return LARGEST[LOW_TYPES[low]]


def _reach(decision: Decision) -> float:
    return decision.range.absmax if decision.range else 0.0


def _largest(decisions: Iterable[Decision]) -> Decision:
    return max(decisions, key=_reach)


def _names(decisions: Iterable[Decision]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(d.node for d in decisions))


def _in_fp32(decisions: Sequence[Decision]) -> str:
    """`24 nodes in FP32`, and those in BF16 apart."""
    counts = {low: sum(d.repair == low for d in decisions) for low in ("fp32", "bf16")}
    return ", ".join(f"{count(n, 'node')} in {low.upper()}" for low, n in counts.items() if n)


def _of_norms(norms: Mapping[NormHazard, Sequence[Decision]], low: Precision) -> Iterator[Cause]:
    """Decomposed norms: those whose squares leave the range, and the others."""
    wide = {norm: members for norm, members in norms.items() if norm.evidence in ("squares", "values")}
    if wide:
        norm, reach = max(((n, _largest(m)) for n, m in wide.items()), key=lambda pair: _reach(pair[1]))
        top = _reach(reach)
        what = f"{norm.evidence} inside {_kinds(wide)} reach {figure(top)}, {_held(low, top)}"
        yield _of_members(wide, what, top, _largest_of(low))
    rest = {norm: members for norm, members in norms.items() if norm not in wide}
    if rest:
        what = f"{_kinds(rest)} {'have' if len(rest) > 1 else 'has'} squares of unknown or varying size"
        if all(norm.evidence == "epsilon" for norm in rest):
            what = f"the epsilon of {count(len(rest), 'norm')} is below {low.upper()}'s normal range"
        yield _of_members(rest, what)


def _of_members(
    norms: Mapping[NormHazard, Sequence[Decision]],
    what: str,
    reach: float | None = None,
    limit: float | None = None,
) -> Cause:
    members = [decision for group in norms.values() for decision in group]
    done = f"{count(len(norms), 'norm')} ({_in_fp32(members)})"
    return Cause("unfused-norm", what, done, _names(members), reach, limit)


def _kinds(norms: Iterable[NormHazard]) -> str:
    """`10 decomposed LayerNorms`."""
    kinds = [NAMES.get(norm.kind, "norm") for norm in norms]
    return count(len(kinds), f"decomposed {kinds[0] if len(set(kinds)) == 1 else 'norm'}")


def _of_fused(fused: Sequence[tuple[str, str, Range]], low: Precision) -> Iterator[Cause]:
    """Norms that compute in FP32 inside now, and whose squares leave the range."""
    wide = [norm for norm in fused if norm[2].absmax ** 2 > _largest_of(low)]
    if wide:
        nodes, ops, ranges = zip(*wide, strict=True)
        top = max(measured.absmax for measured in ranges)
        what = (
            f"squares inside {count(len(wide), 'decomposed norm')} reach {figure(top * top)} (inputs "
            f"{figure(top)}), {_held(low, top * top)}"
        )
        done = f"{'each is' if len(wide) > 1 else 'it is'} one {' or '.join(sorted({*ops}))} now, FP32 inside"
        yield Cause("unfused-norm", what, done, nodes, top * top, _largest_of(low))


def _of_overflow(
    decisions: Sequence[Decision], unscaled: Mapping[tuple[int, str], Range], low: Precision
) -> Iterator[Cause]:
    """Tensors out of range, in FP32 or scaled by powers of two."""
    reaches = {d.tensor or d.node: d.range for d in decisions if d.range is not None}
    reaches |= {tensor: measured_before for (_, tensor), measured_before in unscaled.items()}
    if not reaches:
        return
    done = [f"{count(len(unscaled), 'tensor')} rescaled by powers of two"] if unscaled else []
    done += [_in_fp32(decisions)] if decisions else []
    nodes = _names(decisions) or tuple(tensor for _, tensor in unscaled)
    worst, measured = max(reaches.items(), key=lambda item: item[1].absmax)
    top: float | None = measured.absmax
    if measured.finite:
        one = f"{worst} reaches" if len(reaches) == 1 else f"{count(len(reaches), 'tensor')} reach up to"
        what = f"{one} {figure(measured.absmax)}, {_held(low, measured.absmax, measured.headroom)}"
    else:
        what, top = f"{worst} has NaN or infinite values in FP32 already", None
    yield Cause("overflow", what, ", ".join(done), nodes, top, _largest_of(low))


def _of_masks(passes: Sequence[PassResult], low: Precision) -> Iterator[Cause]:
    changes = [change for step in passes for change in step.changes if isinstance(change, Clamped)]
    if changes:
        first, verb = changes[0], "are" if len(changes) > 1 else "is"
        such = f"{count(len(changes), 'constant')} such as {first.before:.4g}"
        what, nodes = f"{such} {verb} infinite in {low.upper()}", tuple(change.node for change in changes)
        yield Cause("mask", what, f"clamped to {first.after:.4g}", nodes, None, _largest_of(low))


def _of_rule(rule: str, decisions: Sequence[Decision]) -> Cause:
    """Any other hazard: its title, and the node with the widest range as the example."""
    worst = _largest(decisions)
    example = worst.reason
    if worst.range is not None and str(worst.range) not in example:
        example += f", range {worst.range}"
    what = f"{KINDS[rule].title} ({example})"
    reach = worst.range.absmax if worst.range else None
    centre = worst.about or worst.node
    return Cause(rule, what, _in_fp32(decisions), _names(decisions), reach, centre=centre)
