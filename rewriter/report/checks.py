"""The checks of a verification: their tables, and their JSON."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rewriter.base.text import figure
from rewriter.report.remarks import SENTENCES, worded, wrong_states
from rewriter.report.tables import Cell, Kind, State, Table, number, table
from rewriter.runtime.inputs.samples import DataSource
from rewriter.runtime.metrics.outputs import ROUNDING_NOISE, OutputComparison, OutputStatistics
from rewriter.runtime.metrics.probabilities import ProbabilityError
from rewriter.runtime.metrics.tolerances import USABLE
from rewriter.verification.verdict import ARITHMETIC, Check, deciding

RESULTS: Mapping[bool | None, tuple[str, State]] = {
    True: ("passed", "good"),
    False: ("FAILED", "bad"),
    None: ("not done", "warn"),
}


def judging_check(checks: Sequence[Check]) -> Check | None:
    """The check whose outputs decide: the run on an engine, or else its emulation."""
    return deciding((check for check in checks if check.outputs), (*ARITHMETIC, "structure"))


def check_dict(check: Check) -> dict[str, Any]:
    own = {"outputs": [output_dict(output) for output in check.outputs], "wrong_states": wrong_states(check)}
    shown = vars(worded(check)) | own
    return {name: shown[name] for name in shown if name not in ("pictures", "rounds", "remarks")}


def output_dict(output: OutputComparison) -> dict[str, Any]:
    shown = {name: value for name, value in vars(output).items() if name not in ("part", "carriers")}
    return {**shown, "passed": output.passed}


def decisive(whole: OutputComparison, outputs: Iterable[OutputComparison]) -> OutputComparison:
    """The output, or the one of its parts that fails further; `outputs` has the parts."""
    parts = (output for output in outputs if output.of == whole.name and not output.passed)
    return max((whole, *parts), key=furthest)


def furthest(output: OutputComparison) -> tuple[bool, float]:
    """Orders outputs by their distance from the tolerance."""
    return not output.finite, output.excess


def size(output: OutputComparison) -> str:
    noise = output.note if output.note == ROUNDING_NOISE else f"{output.relative_l2:.2g}"
    return noise if output.finite else "NaN or infinity"


def relation(output: OutputComparison) -> str:
    """`within 0.005`, or that it is not; `limit_lines` says why one beyond it passes."""
    if output.passed and fair_text(output):
        return f"beyond {figure(output.tolerance)}, but fair"
    return f"{'' if output.passed else 'NOT '}within {figure(output.tolerance)}"


def fair_text(output: OutputComparison) -> str:
    """The distances of probabilities that a relative error would fail; "" for other outputs."""
    fair = output.probability
    if not output.finite or output.relative_l2 <= output.tolerance or fair is None:
        return ""
    if output.of and not output.passed:
        return ""
    beyond = f"; but a relative error beyond {USABLE} never passes by another measure"
    words = f"{output.name} holds probabilities ({fair.reason}): {distances(fair)}"
    return words + (beyond if output.relative_to_use > 1.0 else "")


def distances(fair: ProbabilityError) -> str:
    """The distances of probabilities from the original, and their limits."""
    if fair.mean is None and (fair.areas is None or fair.difference <= fair.allowed):
        return f"largest difference {fair.difference:.2g}, {fair.allowed:.2g} allowed"
    if fair.areas is not None:
        return (
            f"{fair.areas.distance:.2g} of the map's area differs, {fair.allowed:.2g} allowed; beyond "
            f"the values around a pixel at most {fair.areas.beyond:.2g}, {USABLE:.2g} allowed"
        )
    rows = f", the same best class in {100 * fair.top_1:.4g} % of the rows" if fair.top_1 is not None else ""
    ties = "" if fair.decided else ", and ties do not explain it"
    return (
        f"mean distance of the rows {fair.mean:.2g}, {fair.allowed:.2g} allowed, at most "
        f"{fair.difference:.2g}, {fair.row_limit:.2g} allowed{rows}{ties}"
    )


def scores_text(output: OutputComparison) -> str:
    """A hint to a metric for classes, if a failed output may hold their scores; else ""."""
    if not output.finite or output.relative_l2 <= output.tolerance or output.same_best is None:
        return ""
    return (
        f"the largest element of each row of {output.name} is at the same place in "
        f"{100 * output.same_best:.4g} % of the rows; if it holds scores of classes, `metric='top-1'` "
        "`tolerance=0.99` judges by that"
    )


def limit_lines(check: Check) -> Iterator[str]:
    """One line for each limit that is not the tolerance itself, with its origin."""
    for output in check.outputs:
        if text := fair_text(output) or scores_text(output):
            yield text
        elif output.allowance is not None and output.passed:
            usual, why = figure(output.allowance.usual), SENTENCES[output.allowance.reason]
            why = why.format(figure(output.allowance.measured))
            yield f"{output.name}: {figure(output.tolerance)} instead of {usual}, since {why}"


def part_lines(check: Check) -> Iterator[str]:
    """One line for each output that is judged by its parts, the parts with the largest errors first."""
    for whole in check.outputs:
        wrong = (o for o in check.outputs if o.of == whole.name and o.excess)
        own = sorted(wrong, key=lambda o: -o.excess)
        shown = [f"{'scores, ' * bool(o.probability)}{o.part or o.note}: {size(o)}" for o in own[:PARTS]]
        if shown:
            more = f" and {len(own) - PARTS} more" if own[PARTS:] else ""
            yield f"{whole.name}: {size(whole)}, of its parts {'; '.join(shown)}{more}"
    if check.detections is not None:
        yield f"detections: {check.detections}"


PARTS = 3  # parts of an output in its line


def sample_name(data: DataSource | None, number: int) -> str:
    names = data.names if data is not None else ()
    name = Path(names[number]).name if number < len(names) else f"number {number}"
    return name if name.startswith("sample ") else f"sample {name}"


def tables(
    checks: Sequence[Check],
    statistics: Sequence[OutputStatistics],  # of the outputs of the check that decides
    data: DataSource | None,
    before: Iterable[OutputComparison] = (),  # the same outputs in plain FP16 or BF16
) -> Iterator[Table]:
    """The outputs of the check that decides and of those that failed, worst first; and all checks."""
    judging = judging_check(checks)
    shown = [check for check in checks if check is judging or (check.passed is False and check.outputs)]
    plain, figures = {o.name: size(o) for o in before}, {entry.name: entry for entry in statistics}
    rows = [
        [
            Cell(check.name),
            Cell(output.name, state="plain" if output.passed else "bad"),
            Cell(size(output), order=output.excess, state="good" if output.passed else "bad"),
            number(output.tolerance, "{:.2g}"),
            Cell(plain.get(output.name, "")),
            _worst(output, figures.get(output.name) if check is judging else None, data),
        ]
        for check in shown
        for output in sorted(check.outputs, key=lambda output: (output.passed, -output.excess))
    ]
    lead = "Every output against the original in FP32, in its worst sample and build."
    columns: dict[str, Kind] = {"Check": "choice", "Output": "code", "Error": "number", "Allowed": "number"}
    columns |= {"Before": "number", "Largest difference": "text"}
    yield table("outputs", "Outputs", lead, columns, rows)
    rows = [
        [
            Cell(check.name),
            Cell(RESULTS[check.passed][0], state=RESULTS[check.passed][1]),
            number(check.seconds, "{:.1f}"),
            Cell(check.summary, names=check.details),
        ]
        for check in checks
    ]
    lead = "Every check; a skipped one gives the reason."
    columns = {"Check": "choice", "Result": "choice", "Seconds": "number", "Summary": "text"}
    yield table("verification", "Verification", lead, columns, rows)


def _worst(output: OutputComparison, figures: OutputStatistics | None, data: DataSource | None) -> Cell:
    """The worst element, and what an average hides: the error that a share of the elements stays below."""
    lines = [output.note] if output.note else []
    if figures is None:
        return Cell(f"{output.max_abs:.3g}", names=tuple(lines))
    at = ", ".join(map(str, figures.at))
    where = f" at [{at}]: {figures.actual:.5g}, not {figures.expected:.5g}" if figures.max_abs else ""
    psnr = f"PSNR {figures.psnr:.1f} dB, " if math.isfinite(figures.psnr) else ""
    build = f", build {figures.build}" if figures.build else ""
    shares = ", ".join(f"{share} % below {error:.2g}" for share, error in figures.percentiles.items())
    lines += [shares, f"{psnr}cosine {output.cosine:.6f}", f"in {sample_name(data, figures.sample)}{build}"]
    return Cell(f"{output.max_abs:.3g}{where}", names=tuple(lines))
