"""Shows several fixed files and their closed loop: lines and tables of a batch and of a pipeline."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from rewriter.base.text import Row, figure
from rewriter.jobs.closed_loop.result import LoopEnding, LoopResult, OtherWord, Stream
from rewriter.jobs.fix.selection import LatencyShare
from rewriter.report.tables import Cell, Kind, State, Table, number, table


class FileLine(NamedTuple):
    """One file among several."""

    name: str
    ending: str
    state: State
    nodes: str = ""  # those in FP32, as text
    error: float | None = None  # relative L2 error of the worst output
    latency: str = ""  # as shares of FP32's and plain FP16's
    seconds: str = ""
    page: str = ""  # its own page, relative to the page of all


def latency(shares: Iterable[LatencyShare]) -> str:
    """The latency as shares of others: `45 % of FP32's (estimated), 98 % of plain FP16's`."""
    sources = ((share, "" if share.measured else " (estimated)") for share in shares)
    return ", ".join(f"{100 * share.share:.0f} % of {share.of}'s{source}" for share, source in sources)


def files_table(lines: Iterable[FileLine]) -> Table:
    columns: dict[str, Kind] = {"model": "text", "verdict": "choice", "FP32 nodes": "number"}
    columns |= {"rel. L2": "number", "latency": "text", "s": "number"}
    rows = [
        [
            Cell(line.name, page=line.page),
            Cell(line.ending, state=line.state),
            Cell(line.nodes),
            number(line.error),
            Cell(line.latency),
            Cell(line.seconds),
        ]
        for line in lines
    ]
    return table("files", "Files", "Each file by itself, on its own samples.", columns, rows)


def verdict_line(loop: LoopResult) -> str:
    if loop.ending == "refused":
        return f"The loop was not compared: {REFUSALS[loop.refusal].format(loop.detail)}"
    assert loop.fixed is not None
    calls = f"{loop.fixed.calls} of {loop.calls} calls" + (" (ended early)" if loop.stopped else "")
    if loop.ending == "failed":
        state = f", state {loop.state}" if loop.state else ""
        return f"FAILED in the loop: {loop.culprit}{state}, error {figure(loop.error)} after {calls}"
    if loop.ending == "as-original":
        return f"As the original in the loop: {calls}"
    if loop.fixed.other is None:
        differing = f"{loop.fixed.other_printed} of {loop.fixed.printed} printed words differ"
        return f"As close as rounding allows in the loop: {calls}; {differing}"
    same = loop.tf32 is not None and loop.tf32.other is not None
    how = "as FP32 with TF32 does" if same else "within the limit"
    return f"Differs at call {loop.fixed.other.call + 1} of {loop.calls}, {how}"


REFUSALS = {
    "no-command": "Python recorded itself, so that there is no command to run again",
    "failed-again": "the script ended with exit code {} when it ran again; run it where it was recorded",
    "random": "two runs of the original differ from call {} on; give the script's random numbers a seed",
    "other-calls": "the script called none of the recorded files; record it again",
    "no-time": "the time limit ended the script before its first call",
    "not-run": "{}",
}
"""Sentences for `LoopResult.refusal`; {} is its detail."""


def state(loop: LoopResult) -> State:
    return STATES[loop.ending]


STATES: Mapping[LoopEnding, State] = {
    "as-original": "good",
    "within-limit": "good",
    "failed": "bad",
    "refused": "warn",
}


RUNS = {"plain": "plain FP16", "fixed": "fixed", "tf32": "FP32 with TF32"}
"""Captions of the runs of a loop, by their fields of `LoopResult`."""


def runs(loop: LoopResult) -> dict[str, Stream]:
    return {name: getattr(loop, name) for name in RUNS if getattr(loop, name) is not None}


def rows(loop: LoopResult) -> Iterator[Row]:
    errors = ", ".join(f"{figure(run.error)} {RUNS[name]}" for name, run in runs(loop).items())
    if loop.fixed is not None:
        yield "Loop", f"relative L2 of the worst output: {errors}; allowed {figure(loop.limit)}"
        yield from (("", f"{RUNS[n]}: {_word(run.other)}") for n, run in runs(loop).items() if run.other)
    for name, error in loop.single.items():
        yield "By file", f"{name}: {figure(error)}"
    for repair in loop.repairs:
        done = STEPS[repair.step].format(repair.file)
        yield "Repair", f"{done}: {figure(repair.error)}{'' if repair.helped else ', not enough'}"
    if loop.fixed is not None:
        yield "How", f"{loop.engine or 'emulated'}, {loop.seconds:.0f} s"


STEPS = {
    "states": "{}: slow states in FP32",
    "search": "{}: searched for a smaller error",
    "fp32": "{}: all of it in FP32",
}


def _word(other: OtherWord) -> str:
    margin = ""
    if other.margin is not None and other.usual_margin is not None:
        usual = figure(other.usual_margin)
        margin = f", where {other.output} decides by {figure(other.margin)} (usually {usual})"
    return f"another word after call {other.call + 1}, of {other.file}{margin}"


def outputs_table(loop: LoopResult) -> Table:
    """The error of every output over all compared calls."""
    columns: dict[str, Kind] = {"file": "text", "output": "code", "read again": "choice"}
    columns |= dict.fromkeys(("plain FP16", "fixed", "TF32", "largest difference"), "number")
    by_run = {name: {(o.file, o.output): o for o in run.outputs} for name, run in runs(loop).items()}
    table_rows = []
    for port, output in by_run["fixed"].items():
        ran = (by_run.get(name, {}).get(port) for name in RUNS)
        errors = [number(run.relative_l2 if run is not None else None) for run in ran]
        again = Cell("yes" if output.state else "no")
        table_rows.append([Cell(port[0]), Cell(port[1]), again, *errors, number(output.largest)])
    lead = (
        "Relative L2 error over all calls before the first other word, and the largest difference when fixed."
    )
    return table("loop-outputs", "Outputs in the loop", lead, columns, table_rows)


def as_dict(loop: LoopResult | None) -> dict[str, Any] | None:
    """The loop for JSON; the errors of single calls are left to the page."""
    if loop is None:
        return None
    content = asdict(loop)
    for name, stream in runs(loop).items():
        del content[name]["errors"]
        content[name] |= {"error": stream.error, "same": stream.same}
    return {"verdict": verdict_line(loop), "passed": loop.passed, **content}
