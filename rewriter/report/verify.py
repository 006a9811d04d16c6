"""Shows the result of `verify`: a summary, tables for those who ask for them, and JSON."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from rewriter.base.text import Row, command_line, count, figure
from rewriter.report import checks
from rewriter.report.json import data_dict, document
from rewriter.report.results import VerifyResult
from rewriter.report.tables import Cell, Kind, State, Table, number, table
from rewriter.report.terminal import data_words, facts, last_rows, print_report
from rewriter.runtime.engines.protocol import Latency
from rewriter.verification.verdict import PLUGINS


def as_dict(result: VerifyResult) -> dict[str, Any]:
    figures = map(checks.check_dict, result.checks)
    own = {"ending": result.ending, "proven": result.proven, "gaps": result.gaps}
    own |= {"data": data_dict(result.data), "checks": list(figures)}
    left = {name: value for name, value in vars(result).items() if name != "verdict"}
    return document({"passed": result.passed, **left, **own})


def print_result(result: VerifyResult, out: Console, *, verbosity: int = 0) -> None:
    commands = [("Next", next_command(result))]
    last = facts(None, result.seconds)
    line, all_tables = verdict_line(result), tables(result)
    print_report(line, state(result), rows(result), all_tables, out, verbosity, commands, last)


def state(result: VerifyResult) -> State:
    return "bad" if not result.passed else "good" if result.proven else "warn"


def verdict_line(result: VerifyResult) -> str:
    where = "" if result.engine == "emulation" else f" ({result.engine} on {result.device})"
    return f"{result.ending}{where}: {result.fixed or 'the fixed model'}"


def next_command(result: VerifyResult) -> str:
    """The command that finds the tensor at which a failure begins; "" if there is none."""
    if result.passed or not (result.original and result.fixed):
        return ""
    words = ["rewriter", "locate", Path(result.original), Path(result.fixed), *data_words(result.data)]
    return command_line(words)


def rows(result: VerifyResult) -> Iterator[Row]:
    yield from (("Missing", gap.reason) for gap in result.gaps)
    compared = [check for check in result.checks if check.name in ("run", "emulation")]
    for check in compared:
        yield "Failed" if check.passed is False else "Error", check.summary
        yield from (("", text) for text in (*checks.limit_lines(check), *checks.part_lines(check)))
        if check.passed is False:
            failed = [output for output in check.outputs if not output.passed]
            failed.sort(key=lambda o: (o.finite, -o.relative_l2))
            lines = (f"{o.name}: {checks.size(o)}, allowed {figure(o.tolerance)}" for o in failed[:FEW])
            yield from (("Failed", line) for line in (*check.details[:FEW], *lines))
    if result.latency is not None:
        original = result.reference_latency
        before = f"; the original in FP32 without TF32: {_time(original, result.device)}" if original else ""
        yield "Latency", _time(result.latency, result.device) + before
    for check in result.checks:
        said = check.passed is None and check.name in ("build", PLUGINS) and bool(result.gaps)
        if check not in compared and not said:
            label = {True: "Passed", False: "Failed", None: "Missing"}[check.passed]
            yield label, f"{check.name}: {check.summary}"
            yield from ((label, detail) for detail in check.details[: FEW if check.passed is False else 0])
    yield from last_rows(result.data, result.warnings, result.seconds)


FEW = 3  # details and failed outputs of a check in the summary


def tables(result: VerifyResult) -> Iterator[Table]:
    outputs, verification = checks.tables(result.checks, result.outputs, result.data)
    yield outputs
    if len(result.builds) > 1:
        yield _builds(result)
    yield verification


def _builds(result: VerifyResult) -> Table:
    lead = "Builds of one model differ; the worst is judged."
    columns: dict[str, Kind] = {"Build": "number", "Result": "text", "Error": "number"}
    columns |= {"us": "number", "+-": "number"}
    rows = [
        [
            number(run.number, "{:d}"),
            Cell(run.problem or run.status, state="plain" if run.error is not None else "bad"),
            number(run.error),
            number(run.latency.median_us if run.latency else None, "{:.1f}"),
            number(run.latency.iqr_us if run.latency else None, "{:.1f}"),
        ]
        for run in result.builds
    ]
    return table("builds", "Builds of the fixed model", lead, columns, rows)


def _time(latency: Latency, device: str) -> str:
    how = "wall clock" if device == "CPU" else "CUDA graph" if latency.cuda_graph else "plain launches"
    return f"{latency.median_us:.1f} us (+- {latency.iqr_us:.1f}, {count(latency.repeats, 'repeat')}, {how})"
