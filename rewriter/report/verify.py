"""Shows the result of `verify`: a summary, tables for those who ask for them, and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from rewriter.ir.english import count, figure
from rewriter.judge.verify_result import VerifyResult
from rewriter.report import checks
from rewriter.report.json import data_dict, document
from rewriter.report.terminal import Row, data_rows, new_table, print_report, time_line
from rewriter.runtime.engines.protocol import Latency
from rewriter.runtime.figures.outputs import OutputComparison, OutputStatistics


def as_dict(result: VerifyResult) -> dict[str, Any]:
    """The result as objects that `json.dumps` takes, in a fixed order."""
    fields = {
        "original": str(result.original) if result.original else None,
        "fixed": str(result.fixed) if result.fixed else None,
        "passed": result.passed,
        "ending": result.ending,
        "engine": result.engine,
        "device": result.device,
        "tolerance": asdict(result.tolerance),
        "data": data_dict(result.data),
        "checks": [checks.check_dict(check) for check in result.checks],
        "outputs": [asdict(output) for output in result.outputs],
        "builds": [asdict(run) for run in result.builds],
        "latency": asdict(result.latency) if result.latency else None,
        "reference_latency": asdict(result.reference_latency) if result.reference_latency else None,
        "warnings": list(result.warnings),
        "seconds": dict(result.seconds),
    }
    return document(fields)


def print_result(result: VerifyResult, out: Console, *, verbosity: int = 0) -> None:
    """Print the result; see `print_report`."""
    print_report(verdict_line(result), _rows(result), partial(_sections, result), out, verbosity)


def verdict_line(result: VerifyResult) -> Text:
    """One line: passed or not, how, and the file."""
    style = "bold red" if not result.passed else "green" if result.data.real else "yellow"
    where = "" if result.engine == "emulation" else f" ({result.engine} on {result.device})"
    return Text(f"{result.ending}{where}: {result.fixed or 'the fixed model'}", style=style)


def _rows(result: VerifyResult) -> Iterator[Row]:
    compared = [check for check in result.checks if check.name in ("run", "emulation")]
    for check in compared:
        yield "Failed" if check.passed is False else "Error", check.summary
        if check.passed is False:
            yield from (("Failed", detail) for detail in check.details[:FEW])
            yield from (("Failed", _failed(output)) for output in _worst(check.outputs)[:FEW])
    if result.latency is not None:
        original = result.reference_latency
        before = f"; the original in FP32 without TF32: {_time(original, result.device)}" if original else ""
        yield "Latency", _time(result.latency, result.device) + before
    for check in result.checks:
        if check not in compared:
            label = {True: check.name.capitalize(), False: "Failed", None: "Missing"}[check.passed]
            prefix = "" if check.passed else f"{check.name}: "
            yield label, prefix + check.summary
            yield from ((label, detail) for detail in check.details[: FEW if check.passed is False else 0])
    yield from data_rows(result.data, result.warnings)


FEW = 3
"""Details and failed outputs of a check in the summary."""


def _worst(outputs: Sequence[OutputComparison]) -> list[OutputComparison]:
    """The outputs that failed, the worst first."""
    failed = [output for output in outputs if not output.passed]
    return sorted(failed, key=lambda o: (o.finite, -o.relative_l2))


def _failed(output: OutputComparison) -> str:
    size = figure(output.relative_l2) if output.finite else "NaN or infinity"
    return f"{output.name}: {size}, allowed {figure(output.tolerance)}"


def _sections(result: VerifyResult) -> Iterator[RenderableType]:
    yield from checks.sections(result.checks)
    if result.outputs:
        yield _errors(result.outputs)
        yield ""
    if len(result.builds) > 1:
        yield _builds(result)
        yield ""
    yield time_line(result.seconds)


def _errors(outputs: Sequence[OutputStatistics]) -> RenderableType:
    numbers = ("PSNR dB", "50 %", "99 %", "99.9 %", "max")
    title = "Absolute error: worst sample and build"
    table = new_table(title, "output", *numbers, "at", right=numbers)
    for one in sorted(outputs, key=lambda o: -o.relative_l2):
        shares = [f"{one.percentiles.get(share, 0.0):.2g}" for share in ("50", "99", "99.9")]
        index = "[" + ",".join(map(str, one.at)) + "]"
        place = f"{index}: {one.actual:.4g}, not {one.expected:.4g}" if one.max_abs else ""
        table.add_row(one.name, f"{one.psnr:.1f}", *shares, f"{one.max_abs:.2g}", place)
    return table


def _builds(result: VerifyResult) -> RenderableType:
    numbers = (result.tolerance.metric, "us", "+-")
    table = new_table("Builds of the fixed model", "build", "result", *numbers, right=("build", *numbers))
    for run in result.builds:
        error = f"{run.error:.3g}" if run.error is not None else ""
        latency = (f"{run.latency.median_us:.1f}", f"{run.latency.iqr_us:.1f}") if run.latency else ("", "")
        table.add_row(str(run.number), run.problem or run.status, error, *latency)
    return table


def _time(latency: Latency, device: str) -> str:
    how = "wall clock" if device == "CPU" else "CUDA graph" if latency.cuda_graph else "plain launches"
    return f"{latency.median_us:.1f} us (+- {latency.iqr_us:.1f}, {count(latency.repeats, 'repeat')}, {how})"
