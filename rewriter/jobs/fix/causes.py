"""The causes of a model's errors, with their numbers and repairs, from the plan and the passes.

Every FP32 node that a hazard puts into the plan belongs to one cause. So do repairs that leave no trace in
the plan: norms that became one operator, tensors that were scaled, constants that were clamped.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewriter.base.text import count, figure
from rewriter.hazards.analysis import KINDS, LARGEST, LOW_TYPES, PrecisionRequest
from rewriter.hazards.planning.planner import analyses
from rewriter.hazards.weights import batch_statistics
from rewriter.ir.graph import display_name
from rewriter.ir.graph.editor import made_by
from rewriter.ir.graph.ops import ROW_NORMS
from rewriter.ir.model import Model, walk_graphs
from rewriter.ir.plan import HEADROOM, Decision, NormHazard, Plan, Precision, Range
from rewriter.passes.base import Clamped
from rewriter.pipeline.driver import PassResult
from rewriter.target import Target
from rewriter.target.quirks import met, repairs

BATCH = "BatchNormalization"

FUSING = ("fuse-layer-norm", "keep-epilogues")
"""Passes whose name a fused norm may carry: the last one moves norms and makes them anew."""

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


def fused_norms(model: Model, ranges: Mapping[tuple[int, str], Range]) -> list[tuple[str, str, Range]]:
    """Name and operator of each norm that our passes made one operator, with the range of its input."""
    return [
        (display_name(node), node.op_type, ranges[scope, node.input[0]])
        for scope, graph in enumerate(walk_graphs(model.proto.graph))
        for node in graph.node
        if node.op_type in ROW_NORMS and made_by(node, FUSING) and (scope, node.input[0]) in ranges
    ]


def folded_statistics(original: Model, rewritten: Model) -> tuple[Cause, ...]:
    """BatchNormalizations whose statistics FP16 cannot hold, where our passes folded them away."""
    left = {n.output[0] for g in walk_graphs(rewritten.proto.graph) for n in g.node if n.op_type == BATCH}
    if not any(n.op_type == BATCH for g in walk_graphs(original.proto.graph) for n in g.node):
        return ()
    seen = analyses(original, {}, PrecisionRequest("fp16"))
    hazards = [h for analysis in seen for h in batch_statistics(analysis) if h.node.output[0] not in left]
    if not hazards:
        return ()
    what = f"{count(len(hazards), BATCH)} with statistics that FP16 cannot hold ({hazards[0].reason})"
    return (
        Cause("weights", what, "folded into weights in FP32", tuple(display_name(h.node) for h in hazards)),
    )


def repaired_defects(
    original: Model, target: Target, precision: Precision, passes: Sequence[PassResult]
) -> Iterator[Cause]:
    """Known defects of the target that the model met, and that a pass, the plan or the build repairs."""
    changed = {step.name for step in passes if step.changes}
    for quirk, nodes in met(original, repairs(target, LOW_TYPES[precision])):
        name = quirk.steps.partition("{")[0]
        if name in changed or quirk.build or quirk.lower:
            done = f"repaired by {name}" if name else f"built with {' '.join(quirk.build)}"
            done = f"{' and '.join(quirk.lower)} in {precision.upper()}" if quirk.lower else done
            what = f"{quirk.title} ({quirk.releases})"
            yield Cause("known-defect", what, done, tuple(map(display_name, nodes)), repaired_by=name)


def causes(
    plan: Plan | None,
    passes: Sequence[PassResult],
    fused: Sequence[tuple[str, str, Range]],  # of `fused_norms`, which leave no trace in the plan
    unscaled: Mapping[tuple[int, str], Range],  # before `rescale` scaled what was out of range
    folded: Sequence[Cause] = (),  # of `folded_statistics`
) -> tuple[Cause, ...]:
    """The hazards that `fix` found, those that overflow first."""
    if plan is None or plan.precision == "fp32":
        return ()
    low = plan.precision
    rules: dict[str, list[Decision]] = defaultdict(list)
    norms: dict[NormHazard, list[Decision]] = defaultdict(list)
    for decision in plan.decisions:
        if decision.norm is not None and decision.rule == "unfused-norm":
            norms[decision.norm].append(decision)
        elif decision.rule in KINDS:
            rules[decision.rule].append(decision)
    rows = [*_of_norms(norms, low), *_of_fused(fused, low)]
    rows += [*_of_overflow(rules.pop("overflow", []), unscaled, low), *_of_masks(passes, low)]
    rows += [_of_rule(rule, members) for rule, members in rules.items()]
    rows += folded if plan.precision == "fp16" else ()
    return tuple(sorted(rows, key=lambda cause: not (cause.reach or 0.0) > (cause.limit or math.inf)))


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
