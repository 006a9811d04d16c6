"""Shows the result of `fix`: a summary, what to run next, tables for those who ask, and JSON."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rewriter.base.text import Row, command_line, count, figure
from rewriter.hazards.analysis import KINDS
from rewriter.hazards.planning.free_fp32 import FREE
from rewriter.hazards.types import NO_LOWER_TYPE
from rewriter.ir.plan import SEARCHED, Decision, Plan
from rewriter.jobs.fix.provenance import noted_tolerance
from rewriter.passes.base import Stage
from rewriter.pipeline.driver import PassResult
from rewriter.pipeline.text import own_passes
from rewriter.report import checks, deploy
from rewriter.report.json import attributes, data_dict, document
from rewriter.report.remarks import place, without_tf32
from rewriter.report.results import FixResult
from rewriter.report.tables import NAME, Cell, Kind, State, Table, grouped, number, table
from rewriter.report.terminal import MORE, data_words, facts, first_rows, last_rows, print_report, shortened
from rewriter.runtime.metrics.outputs import OutputComparison
from rewriter.runtime.metrics.tolerances import RELATIVE_L2
from rewriter.target import Target
from rewriter.target.costs import ORIGIN
from rewriter.verification.verdict import GOALS, PLUGINS, ran

CAUSES, WARNINGS, REPAIRS, OUTPUTS = 4, 3, 3, 4  # lines of each kind without `-v`


def print_result(result: FixResult, out: Console, *, verbosity: int = 0) -> None:
    """Print the result, and the next command; see `print_report`."""
    following = next_step(result)
    commands = [("Next", following.build), ("then", following.verify)]
    summary = rows(result, everything=verbosity > 0)
    last = facts(result.target, result.seconds)
    line, all_tables = verdict_line(result), tables(result)
    print_report(line, state(result), summary, all_tables, out, verbosity, commands, last)


def state(result: FixResult) -> State:
    failed = result.verified is False or result.conclusion.kind == "unbuildable"
    return "bad" if failed else "good" if result.proven else "warn"


def verdict_line(result: FixResult) -> str:
    """One line: how it was verified, the file, and the number of nodes in FP32."""
    if result.conclusion.kind == "unbuildable":
        return f"{result.ending}: {result.model.path or 'the model'}"
    share = _share(result) if result.conclusion.lowered or result.verified is False else ""
    return f"{result.ending}: {result.output or 'nothing written'}{share}"


def _share(result: FixResult) -> str:
    plan = result.plan
    if plan is None:
        return " (ALL of it in FP32)" if result.repairs else ""
    if plan.float_nodes and len(plan.fp32) == plan.float_nodes:
        return f" (ALL {plan.float_nodes} float nodes in FP32)"
    bf16 = f", {len(plan.bf16)} in BF16" if plan.bf16 else ""
    return f" ({len(plan.fp32)} of {count(plan.float_nodes, 'float node')} in FP32{bf16})"


def rows(result: FixResult, *, everything: bool) -> Iterator[Row]:
    """The lines after the verdict, each with its label; all of each kind if `everything`."""
    conclusion = result.conclusion
    yield from (("Missing", gap.reason) for gap in result.gaps)
    if conclusion.limit and conclusion.kind != "as-fp32":  # a gap, which has the remedy
        yield "Limit", conclusion.limit
        yield "Remedy", conclusion.remedy
    yield from _errors(result, None if everything else OUTPUTS)
    yield from _latency(result)
    causes = _causes(result)
    for index, cause in enumerate([] if everything else causes):
        for name, short in shortened(NAME.findall(cause)).items():  # two names stay two
            causes[index] = causes[index].replace(name, short)
    yield from first_rows("Wrong", causes, None if everything else CAUSES)
    yield from _done(result)
    yield from first_rows("Repair", result.repairs, None if everything else REPAIRS)
    yield from _checks(result)
    notes = [*result.warnings, *next_step(result).remarks]
    yield from last_rows(result.data, notes, result.seconds, None if everything else WARNINGS)


def _errors(result: FixResult, most: int | None) -> Iterator[Row]:
    """The error of each output, before and now, the furthest from its tolerance first; and its parts.

    Where a part fails, now or before, it is the part that is printed.
    """
    check = checks.judging_check(result.checks)
    if check is None or check.name == "structure":
        return
    how = f"run {place(check.device)}" if check.name == "run" else "emulated"
    if check.value is not None:
        value = result.before_value
        low = f"{figure(value.value)} in plain {result.precision.upper()}, now " if value else ""
        relation = "within" if check.value.met else "NOT within"
        words = f"{low}{figure(check.value.value)}, {relation} {figure(check.value.allowed)}"
        yield "Error", f"{check.value.metric} {words} (of the worst sample; {how})"
        return
    before, now = ({output.name: output for output in outputs} for outputs in (result.before, check.outputs))
    outputs = list[OutputComparison]()
    for whole in (output for output in check.outputs if not output.of):
        failed = checks.decisive(whole, check.outputs)
        if failed is whole and whole.name in before:
            failed = now.get(checks.decisive(before[whole.name], result.before).name, whole)
        outputs.append(failed)
    outputs.sort(key=checks.furthest, reverse=True)
    for output in outputs[:most]:
        plain = before.get(output.name)
        low = f"{checks.size(plain)} in plain {result.precision.upper()}, now " if plain else ""
        indices = [s.sample for s in check.statistics if s.name == output.name and result.judged > 1]
        where = "".join(f" in {checks.sample_name(result.data, index)}" for index in indices[:1])
        error = f"{low}{checks.size(output)}, {checks.relation(output)}"
        yield "Error", f"{error} ({output.unit} of {output.name}{where}; {how})"
    if left := outputs[len(outputs[:most]) :]:
        yield "Error", f"... and {count(len(left), 'output')} more: {MORE}"
    lines = *without_tf32(check), *checks.limit_lines(check), *checks.part_lines(check)
    yield from (("", line) for line in lines)


def _latency(result: FixResult) -> Iterator[Row]:
    timed = [(c.latency, place(c.device)) for c in result.checks if c.latency is not None][:1]
    parts = [f"{time.median_us:.1f} us (+- {time.iqr_us:.1f}) {where}" for time, where in timed]
    for measured, source in ((True, "measured"), (False, f"estimated, {ORIGIN}")):
        shares = [share for share in result.latency_shares if share.measured is measured]
        if shares:
            words = " and ".join(f"{100 * share.share:.0f} % of {share.of}'s" for share in shares)
            parts.append(f"{words} ({source})")
    if parts:
        yield "Latency", "; ".join(parts)


def _causes(result: FixResult) -> list[str]:
    if result.causes:
        return [str(cause) for cause in result.causes]
    held = [output for output in result.before if math.isfinite(output.tolerance)]  # not by another metric
    if result.plan is None or not held or not result.depth:  # ranges were not measured
        return []
    low = result.plan.precision.upper()
    if all(output.passed for output in held):
        return [f"nothing: no hazard was found, and plain {low} passes, too"]
    if all(output.finite for output in held):
        return [f"plain {low} is NOT within the tolerance, by rounding: no value is out of range"]
    return []


def _done(result: FixResult) -> Iterator[Row]:
    stages = {name: kind.stage for name, kind in own_passes().items()}
    changed = [step for step in result.passes if step.changes]
    rewriting = [s for s in changed if stages.get(s.name) is not Stage.LOWERING]
    if rewriting:
        names = (s.name + (f" ({len(s.changes)})" if len(s.changes) > 1 else "") for s in rewriting)
        yield "Done", f"rewritten by {', '.join(names)}"
    if result.plan is not None:
        yield "Done", _types(result.plan, given=not result.depth)
        reasons = Counter(d.reason for d in result.plan.decisions if d.rule in NO_LOWER_TYPE)
        yield from (("", f"{reason}: {count(n, 'node')}") for reason, n in reasons.most_common(1))
    elif result.repairs:
        yield "Done", "ALL of it stays in FP32: no node is in reduced precision"


def _types(plan: Plan, *, given: bool) -> str:
    """`100 nodes in FP16, 91 in FP32 (90 for hazards, 1 between these)`."""
    low, total = plan.precision.upper(), plan.float_nodes
    if not plan.decisions:
        return f"all {count(total, 'float node')} in {low}: {'as planned' if given else 'none needs FP32'}"
    fp32 = [d for d in plan.decisions if d.repair == "fp32"]
    reasons = {
        "for hazards": sum(d.rule in KINDS and d.rule not in NO_LOWER_TYPE for d in fp32),
        "at no cost": sum(d.rule in FREE for d in fp32),
        "as asked": sum(d.rule == "user" for d in fp32),
        "by the search": sum(d.rule == SEARCHED for d in fp32),
        f"for lack of {low}": sum(d.rule in NO_LOWER_TYPE for d in fp32),
    }
    rest = len(fp32) - sum(reasons.values())
    parts = [f"{number} {why}" for why, number in (*reasons.items(), ("between these", rest)) if number]
    bf16 = f", {len(plan.bf16)} in BF16" if plan.bf16 else ""
    why = f" ({', '.join(parts)})" if len(parts) > 1 else f" {parts[0].partition(' ')[2]}" if parts else ""
    if len(fp32) == total:
        return f"ALL {count(total, 'float node')} in FP32, nothing in {low}{why}"
    lowered = count(total - len(plan.decisions), "node")
    return f"{lowered} in {low}, {len(fp32)} in FP32{why}{bf16}"


def _checks(result: FixResult) -> Iterator[Row]:
    for check in result.checks:
        if check.passed is False:
            yield "Failed", f"{check.name}: {check.summary}"
            yield from (("", detail) for detail in check.details[:2])
        elif check.passed is None and not (check.name in ("build", PLUGINS) and result.gaps):
            yield "Missing", f"{check.name}: {check.summary}"
        elif check.name in GOALS:
            yield "Goal", check.summary
        elif check.name == "build":
            yield "Build", check.summary


def tables(result: FixResult, graph_of: Callable[[str], str] = lambda node: "") -> Iterator[Table]:
    """Outputs and checks, the nodes that the plan keeps in another type, and what the passes did.

    Args:
        graph_of: Returns the id of the graph that a page has of a node; "" if there is none.
    """
    judging = checks.judging_check(result.checks)
    figures = judging.statistics if judging else ()
    outputs, verification = checks.tables(result.checks, figures, result.data, result.before)
    yield outputs
    if result.plan is not None:
        yield _decisions(result.plan, graph_of)
    yield _passes(result.passes)
    yield verification


def _passes(passes: Iterable[PassResult]) -> Table:
    done: list[tuple[str, str, State, list[tuple[str, list[Any]]]]] = []
    for step in passes:
        done.append((step.name, "changed", "plain", grouped(step.changes, lambda change: change.what)))
        done.append((step.name, "declined", "warn", grouped(step.refusals, lambda refusal: refusal.reason)))
    lead = "Edits of each pass, and patterns that it declined, with the reason."
    columns: dict[str, Kind] = {"Pass": "choice", "Outcome": "choice", "Nodes": "number"}
    columns |= {"Edit or reason, and nodes": "text"}
    rows = [
        [
            Cell(name),
            Cell(outcome, state=state),
            number(len(members), "{:d}"),
            Cell(what, names=tuple(member.node for member in members if member.node != "model")),
        ]
        for name, outcome, state, groups in done
        for what, members in groups
    ]
    return table("passes", "Changes and refusals", lead, columns, rows)


def _decisions(plan: Plan, graph_of: Callable[[str], str]) -> Table:
    """The nodes that the plan keeps out of the low precision, by rule and reason; those at no cost last."""
    low = plan.precision.upper()
    groups: dict[tuple[str, str], list[Decision]] = {}
    for decision in sorted(plan.decisions, key=lambda decision: decision.rule in FREE):
        groups.setdefault((decision.rule, decision.repair), []).append(decision)
    rows = [
        [
            Cell(rule),
            Cell(
                repair.upper() + (", at no cost" if rule in FREE else ""),
                link=next(filter(None, (graph_of(d.node) for d in alike)), ""),
            ),
            number(len(alike), "{:d}"),
            number(max((d.range.absmax for d in alike if d.range), default=None)),
            Cell(reason, names=tuple(f"{d.node} ({d.op})" for d in alike)),
        ]
        for (rule, repair), members in groups.items()
        for reason, alike in grouped(members, lambda decision: decision.reason)
    ]
    lead = f"{len(plan.decisions)} of {plan.float_nodes} float nodes keep another type than {low}."
    if plan.exponents:
        lead += f" Rescaled exactly by powers of two: {count(len(plan.exponents), 'tensor')}."
    columns: dict[str, Kind] = {"Rule": "choice", "Type": "choice", "Nodes": "number"}
    columns |= {"Largest |x|": "number", "Reason and nodes": "text"}
    kept = " and ".join(sorted({decision.repair.upper() for decision in plan.decisions}, reverse=True))
    return table("plan", f"Nodes kept in {kept}", lead, columns, rows)


def as_dict(result: FixResult) -> dict[str, Any]:
    model, following, plan = result.model, next_step(result), None
    if result.plan is not None:
        nodes: dict[str, list[Any]] = {"fp32": [], "bf16": []}
        for decision in result.plan.decisions:
            fields = {name: value for name, value in vars(decision).items() if name != "key"}
            nodes[fields.pop("repair")].append(fields)
        plan = {**attributes(result.plan, "precision", "io", "float_nodes"), **nodes}
    own = {
        "ending": result.ending,
        "input": model.path,
        "target": str(result.target),
        "probe": result.target.known_from or None,
        "opset": model.opset,
        "plan": plan,
        "data": data_dict(result.data),
        "checks": [checks.check_dict(check) for check in result.checks],
        "before": [checks.output_dict(output) for output in result.before],
        "next_command": following.build or None,
        "next_verify": following.verify or None,
        "next_remarks": following.remarks,
    }
    names = "output script pipeline passes causes before_value warnings seconds repairs verified"
    words = [*names.split(), "proven", "gaps", "conclusion", "latency_shares"]
    return document({**own, **attributes(result, *words)})


PROPOSED = (
    "suggested profile: from the model's smallest shapes to twice your largest sample, where the model takes "
    "that; `min-shapes`, `opt-shapes` and `max-shapes` set yours"
)


@dataclass(frozen=True)
class NextStep:
    """Commands to run after `fix`."""

    build: str  # builds the engine; the user replaces `?` by the size of an unknown axis
    verify: str = ""  # the command that runs the result where there is a GPU; "" if it ran here
    remarks: tuple[str, ...] = ()  # what to know before, one sentence each


def next_step(result: FixResult) -> NextStep:
    """Returns the commands for a result; none if no file was written, or a check failed."""
    build = deploy.command(result)
    return NextStep(build, _verify(result), tuple(_remarks(result))) if build else NextStep("")


def _remarks(result: FixResult) -> Iterator[str]:
    target = result.target
    if result.output is not None and deploy.Build(result, result.output).proposed:
        yield PROPOSED
    if result.script is not None:
        return
    if target == Target():
        yield "TensorRT 11 types every network strongly: leave out --stronglyTyped there"
    if deploy.chooses_types(target) and deploy.lowered(result):
        yield f"the builder of {target} chooses types itself, whatever the file's types are"


def _verify(result: FixResult) -> str:
    """The whole command that verifies the file where there is a GPU; "" for models in memory."""
    source, data = result.model.path, result.data
    if source is None or (result.verdict is not None and ran(result.verdict.checks)):
        return ""
    words = ["rewriter", "verify", source, Path(str(result.output)), *data_words(data)]
    words += ["--against", result.against] if result.against is not None else []
    if limit := noted_tolerance(result.model):
        words += ["--tolerance", f"{limit.value!r}"]
        words += ["--metric", limit.metric] if limit.metric != RELATIVE_L2 else []
    for flag, index in (("--min-shapes", 0), ("--opt-shapes", 1), ("--max-shapes", 2)):
        spans = data.spans if data is not None else {}
        inputs = sorted(data.profiled) if data is not None and not data.recorded else ()
        words += [f"{flag}={name}:{'x'.join(map(str, spans[name][index]))}" for name in inputs]
    return command_line(words)
