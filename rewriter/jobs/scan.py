"""`scan`: the hazards of a model as it is, by severity, with what would repair each. It changes nothing."""

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from rewriter import hazards
from rewriter.base.errors import SEVERITIES, ArithmeticRunError, Severity
from rewriter.base.stopwatch import Progress, Stopwatch, silent
from rewriter.base.text import Row, Summary, count, figure, rows_of
from rewriter.hazards.analysis import KINDS
from rewriter.hazards.planning.planner import analyses
from rewriter.hazards.user_rules import rules_of_the_user
from rewriter.ir.graph import display_name
from rewriter.ir.model import Model, load
from rewriter.ir.model.split import split_at_plugins
from rewriter.ir.plan import Precision, Range
from rewriter.jobs.fix.before import check_before
from rewriter.jobs.fix.provenance import recorded_sums
from rewriter.jobs.fix.workload import judged_samples
from rewriter.passes.base import Context
from rewriter.pipeline.driver import Driver, inlined
from rewriter.pipeline.options import ScanOptions, combined, documented
from rewriter.pipeline.text import parse
from rewriter.runtime.emulation import emulation, import_float64, reference
from rewriter.runtime.engines.probing import known_target
from rewriter.runtime.engines.this_machine import parser_here
from rewriter.runtime.expectations import data_warnings
from rewriter.runtime.inputs import Samples
from rewriter.runtime.inputs.samples import DataSource, Unshown
from rewriter.runtime.metrics.metrics import METRICS
from rewriter.runtime.metrics.tolerances import TOLERANCES
from rewriter.runtime.ranges import measure
from rewriter.target import Target
from rewriter.target.operators import REMEDY
from rewriter.verification.arithmetic_checks import conditioning, excused, quantisers
from rewriter.verification.compare_runs import Standard
from rewriter.verification.expected import run_all, unshown
from rewriter.verification.verdict import Check

LISTED = 3  # wrong outputs that a finding names

TF32_NOTED = 2e-3
"""Relative L2 error of TF32 that is worth a note: twice what well-conditioned networks show on an H200."""


@dataclass(frozen=True)
class Finding:
    """One hazard, with all the nodes that it concerns, in graph order, and their operators.

    `kind` is a key of `kinds.KINDS`. `tensor` and `range` are the evidence, where one tensor is; `link` is
    the page that a known defect is reported on.
    """

    kind: str
    severity: Severity
    reason: str
    repair: str
    nodes: tuple[str, ...]
    ops: tuple[str, ...]
    tensor: str | None = None
    range: Range | None = None
    link: str = ""


@dataclass(frozen=True, repr=False)
class ScanResult(Summary):
    """The outcome of `scan`.

    Attributes:
        path: The model's file; None if it was given as an object.
        findings: Errors first, then warnings, then notes; in the order of the rules within each.
        float_nodes: How many nodes compute on floating-point tensors.
        plain: The emulation of MODEL as it is in that precision, on the samples that `fix` judges by; None on
            random data.
        warnings: Sentences about the scan itself that the user should read.
    """

    path: Path | None
    precision: Precision
    target: Target
    findings: tuple[Finding, ...]
    data: DataSource
    float_nodes: int
    plain: Check | None = None
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def count(self, severity: Severity) -> int:
        return sum(f.severity == severity for f in self.findings)

    def reaches(self, severity: Severity) -> bool:
        """True if a finding is at least that severe."""
        return any(SEVERITIES.index(f.severity) >= SEVERITIES.index(severity) for f in self.findings)

    def summary(self) -> Iterator[Row]:
        counts = ", ".join(count(self.count(severity), severity) for severity in reversed(SEVERITIES))
        yield "found", f"{counts} in {count(self.float_nodes, 'float node')}, for {self.precision.upper()}"
        for severity in reversed(SEVERITIES[1:]):
            lines = (
                f"{count(len(f.nodes), 'node')}: {f.reason}" for f in self.findings if f.severity == severity
            )
            yield from rows_of(f"{severity}s", lines, 3)
        yield "data", self.data.text


@documented(ScanOptions)
def scan(
    model: str | os.PathLike[str] | Any,
    options: ScanOptions | None = None,
    *,
    progress: Progress | None = None,
    **keywords: Any,
) -> ScanResult:
    """Find where a model would go wrong in a lower precision, and in which releases of TensorRT.

    Local functions are looked into; nothing else is rewritten, and nothing is written. Without sample data,
    what was measured is a warning at most.

    Args:
        model: Path, onnx.ModelProto or onnx_graphsurgeon.Graph; FP32, FP16 or mixed.
        options: Options as a whole; keywords replace single ones.

    Raises:
        RewriterError: bad model, data or option.
    """
    request = combined(ScanOptions, options, keywords)
    target, stage = known_target(Target.parse(request.target)), Stopwatch(progress or silent)
    lowering = f"emulating {request.precision.upper()}"
    stage.steps = ("reading", "measuring ranges", "looking for hazards", lowering, "emulating TF32")
    rules = (*hazards.SCAN_RULES, *rules_of_the_user(request.hazards))
    with stage("reading"):
        original = load(model)
        samples = request.samples(original)
        whole = inlined(original)
    with stage("measuring ranges"):
        done = partial(stage.report, "measuring ranges", total=len(samples))
        ranges = measure(reference(whole), samples, steps=samples.source.steps, progress=done)
    with stage("looking for hazards"):
        wanted = hazards.PrecisionRequest(request.precision, target=target, stand_in=parser_here(target))
        seen = list(analyses(whole, ranges, wanted))
        findings = list(_unrepaired(whole, samples, target, [*_findings(seen, rules)]))
    plain, hidden = None, Unshown()
    if samples.source.real:
        with stage(lowering):
            plain, hidden = _plain(original, samples, request.precision, target)
        findings = list(_with_verdict(findings, plain))
    with stage("emulating TF32"):
        findings.extend(_tf32(whole, list(islice(samples, 1))))
    if not samples.source.real:
        kind, text = KINDS["random-data"], samples.source.text
        doubt = Finding("random-data", kind.severity, text, kind.repair, (), ())
        findings = [*_at_most_warnings(findings, MEASURED), doubt]  # they may be false alarms
    lacking = f"ONNX Runtime has no kernel for {', '.join(ranges.unsupported)}"
    unmeasured = [f"{lacking}: what depends on it was not measured"] if ranges.unsupported else []
    findings.sort(key=lambda f: -SEVERITIES.index(f.severity))
    return ScanResult(
        original.path,
        request.precision,
        target,
        tuple(findings),
        replace(samples.source, unshown=hidden),
        sum(len(s.nodes) for s in seen),
        plain,
        (*original.notes, *unmeasured, *data_warnings(original, samples)),
        stage.seconds,
    )


MEASURED = frozenset(name for name, kind in KINDS.items() if kind.measured) | {"unfused-norm"}
"""Kinds of findings whose evidence is measured."""


def _at_most_warnings(findings: Iterable[Finding], kinds: Container[str]) -> Iterator[Finding]:
    """The findings, errors of some kinds as warnings."""
    for finding in findings:
        error = finding.severity == "error" and finding.kind in kinds
        yield replace(finding, severity="warning") if error else finding


def _plain(
    original: Model, samples: Samples, precision: Precision, target: Target
) -> tuple[Check | None, Unshown]:
    """The emulation of a model as it is, as `fix` makes it before any repair, and `unshown`.

    The check is None if the model does not run.

    A model with plugins is emulated up to them.
    """
    split = split_at_plugins(original)
    original = split.head if split else original
    try:
        sums, _, judged, expected = judged_samples(original, samples, recorded_sums(target), default=True)
    except ArithmeticRunError:
        return None, Unshown()  # the measured ranges have said so
    standard = Standard.of(original, TOLERANCES[precision])
    check = check_before(original, expected, judged, precision, sums, standard)
    if check is not None and quantisers(original):
        check = excused(check, lambda: conditioning(original, judged, expected), quantised=True)
    return check, unshown(expected.of_model)


def _with_verdict(findings: Sequence[Finding], plain: Check | None) -> Iterator[Finding]:
    """The findings: an error if outputs are wrong, and none that is measured if they are right."""
    if plain is not None and plain.passed:
        yield from _at_most_warnings(findings, MEASURED | {"weights", "mask", "epsilon"})
        return
    yield from findings
    explained = any(finding.severity == "error" for finding in findings)
    if plain is not None and plain.passed is False and not explained:
        kind = KINDS["wrong-outputs"]
        wrong = [f"error {figure(o.relative_l2)} in {o.name}" for o in plain.outputs if not o.passed]
        reason = f"emulated, {', '.join(wrong[:LISTED]) or f'detections: {plain.detections}'}"
        yield Finding("wrong-outputs", kind.severity, reason, kind.repair, (), ())


WRITTEN_OUT = "upgrade-opset,decompose-operators,clean-casts,decompose-einsum"
"""The passes that replace nodes which the target refuses."""


def _unrepaired(
    model: Model, samples: Samples, target: Target, findings: Sequence[Finding]
) -> Iterator[Finding]:
    """The findings: an error, with the reason, where a pass declines a node that it is to replace."""
    repaired = [f for f in findings if f.kind == "refused-operator" and f.severity == "warning"]
    declined = dict[str, str]()
    if repaired:
        context = Context(max(model.opset, 17), target, sample=next(iter(samples), {}))
        _, results = Driver(lenient=True).run(model, parse(WRITTEN_OUT), context)
        declined = {event.node: event.reason for result in results for event in result.refusals}
    for finding in findings:
        reasons = {name: declined.get(name, "") for name in finding.nodes} if finding in repaired else {}
        for reason in dict.fromkeys(reasons.values()):
            pairs = zip(finding.nodes, finding.ops, strict=True)
            names, ops = zip(*(pair for pair in pairs if reasons[pair[0]] == reason), strict=True)
            part = replace(finding, nodes=names, ops=ops)
            yield replace(part, severity="error", repair=f"{reason}; {REMEDY}") if reason else part
        if not reasons:
            yield finding


def _findings(seen: Iterable[hazards.GraphAnalysis], rules: Sequence[hazards.Rule]) -> Iterator[Finding]:
    """Hazards of one rule and one reason as one finding, in the order of rules and nodes."""
    groups: dict[tuple[str, str], list[hazards.Hazard]] = {}
    open_ends: set[tuple[str, str]] = set()
    for analysis in seen:
        for rule in rules:
            for hazard in rule(analysis):
                key = hazard.kind, hazard.reason
                groups.setdefault(key, []).append(hazard)
                if not hazards.is_already_avoided(analysis, hazard):
                    open_ends.add(key)
    for key in groups.keys() - open_ends:
        group = groups[key]
        groups[key] = [replace(h, severity="note", repair=hazards.ALREADY_AVOIDED) for h in group]
    whole = ("unfused-norm", "mask")
    reported = {id(h.node) for (kind, _), group in groups.items() if kind in whole for h in group}
    parts = {"epsilon", "underflow", "internal-overflow", "overflow", "weights"}
    for (kind, _), group in groups.items():
        # a note about a part of a norm or mask that is a finding itself: its epsilon, square or sum
        inside = kind in parts and all(id(h.node) in reported for h in group)
        if not (inside and _severity(group) == "note"):
            yield _finding(group)


def _finding(group: Sequence[hazards.Hazard]) -> Finding:
    first = group[0]
    nodes = {id(h.node): h.node for h in group}
    return Finding(
        first.kind,
        _severity(group),
        first.reason,
        first.repair or KINDS[first.kind].repair,
        tuple(display_name(node) for node in nodes.values()),
        tuple(node.op_type for node in nodes.values()),
        first.tensor,
        first.range,
        first.link,
    )


def _severity(group: Sequence[hazards.Hazard]) -> Severity:
    return SEVERITIES[max(SEVERITIES.index(h.severity or KINDS[h.kind].severity) for h in group)]


def _tf32(model: Model, samples: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yields a finding if TF32, emulated on one sample, changes the outputs of the FP32 model."""
    exact = reference(import_float64(model))  # float64 has hazards of its own
    try:
        (expected,) = run_all(exact, samples)
        (actual,) = run_all(emulation(exact, tf32=True), samples)
    except ArithmeticRunError:
        return  # the measured ranges have said so
    error = METRICS["detections"].worst(expected, actual)
    if error > TF32_NOTED:
        kind, severe = KINDS["tf32"], error > TOLERANCES["tf32"].value
        reason = f"an FP32 engine has an error of {error:.2g} (relative L2) by TF32, emulated on one sample"
        yield Finding("tf32", "warning" if severe else kind.severity, reason, kind.repair, (), ())
