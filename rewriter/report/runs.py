"""Two runs of one command, read from their JSON reports and compared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from rewriter.english import count
from rewriter.errors import UsageError
from rewriter.report.checks import JUDGING
from rewriter.report.json import SCHEMA_VERSION
from rewriter.report.terminal import listed, new_table

MARKS = {"fix": "pipeline", "scan": "findings", "verify": "builds"}
"""Commands whose reports can be compared, each with a field that only its report has."""

HINT = "give two reports of one command, as `--report a.json` of fix, scan or verify writes them"

SHOWN = 5
"""Outputs, passes and nodes listed of each kind without `-v`."""

NOTICED = 1.2
"""Ratio of two errors from which one is called larger: two emulations of a network differ by less."""


@dataclass(frozen=True)
class OutputDistance:
    """The error of an output, its limit, and if it passed."""

    error: float
    allowed: float
    passed: bool


@dataclass(frozen=True)
class Run:
    """One report.

    Attributes:
        verb: The command. `passed`: its verdict; None if nothing was checked.
        facts: What it ran on and with, as text.
        figures: Numbers by name.
        outputs: Errors of the check that decides, by output.
        nodes: Reason by node: in the plan, or with a finding.
        passes: Number of changes by pass.
    """

    path: Path
    verb: str
    passed: bool | None
    facts: Mapping[str, str]
    figures: Mapping[str, float]
    outputs: Mapping[str, OutputDistance]
    nodes: Mapping[str, str] = field(default_factory=dict)
    passes: Mapping[str, int] = field(default_factory=dict)

    @property
    def error(self) -> float | None:
        """The largest error of an output; None if no outputs were compared."""
        return max((one.error for one in self.outputs.values()), default=None)


@dataclass(frozen=True)
class Compared:
    """Two runs of one command."""

    before: Run
    after: Run

    @property
    def figures(self) -> list[tuple[str, float | None, float | None]]:
        """Numbers of both, by name."""
        names = dict.fromkeys((*self.before.figures, *self.after.figures))
        return [(name, self.before.figures.get(name), self.after.figures.get(name)) for name in names]

    @property
    def outputs(self) -> list[tuple[str, OutputDistance | None, OutputDistance | None]]:
        """Errors of both, by output."""
        names = dict.fromkeys((*self.before.outputs, *self.after.outputs))
        return [(name, self.before.outputs.get(name), self.after.outputs.get(name)) for name in names]

    @property
    def facts(self) -> list[tuple[str, str, str]]:
        """What differs in what they ran on and with."""
        names = dict.fromkeys((*self.before.facts, *self.after.facts))
        found = ((name, self.before.facts.get(name, ""), self.after.facts.get(name, "")) for name in names)
        return [(name, old, new) for name, old, new in found if old != new]

    @property
    def passes(self) -> list[tuple[str, int, int]]:
        """Changes of both, by pass, where they differ."""
        names = dict.fromkeys((*self.before.passes, *self.after.passes))
        found = ((name, self.before.passes.get(name, 0), self.after.passes.get(name, 0)) for name in names)
        return [(name, old, new) for name, old, new in found if old != new]

    @property
    def gone(self) -> dict[str, str]:
        """Nodes with their reasons that only the first run has."""
        return {node: why for node, why in self.before.nodes.items() if node not in self.after.nodes}

    @property
    def new(self) -> dict[str, str]:
        """Nodes with their reasons that only the second run has."""
        return {node: why for node, why in self.after.nodes.items() if node not in self.before.nodes}

    @property
    def verdict(self) -> str:
        """One sentence: both verdicts, and which run is more accurate."""
        words = {True: "passed", False: "failed", None: "was not checked"}
        first, second = words[self.before.passed], words[self.after.passed]
        both = f"Both {first}" if first == second else f"The first {first}, the second {second}"
        return f"{both.replace('Both was', 'Neither was')}{self._errors()}"

    def _errors(self) -> str:
        old, new = self.before.error, self.after.error
        if old is None or new is None:
            return ""
        if max(old, new) <= NOTICED * min(old, new):
            return f"; their errors are alike: {old:.2g} and {new:.2g}"
        which = "second" if new < old else "first"
        return f"; the {which} is more accurate: largest error {old:.2g} and {new:.2g}"


def compare_runs(before: Path, after: Path) -> Compared:
    """Reads two reports.

    Raises:
        UsageError: a file is no report of fix, scan or verify, or they are of two commands.
    """
    runs = read_run(before), read_run(after)
    if runs[0].verb != runs[1].verb:
        what = f"one is a report of {runs[0].verb}, the other of {runs[1].verb}"
        raise UsageError(what, where=f"{before}, {after}", hint=HINT)
    return Compared(*runs)


def read_run(path: Path) -> Run:
    """Reads one report; see `compare_runs` for what it raises."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"it cannot be read as JSON: {error}", where=str(path), hint=HINT) from error
    verb = next((v for v, mark in MARKS.items() if isinstance(content, dict) and mark in content), None)
    if verb is None or content.get("schema_version") != SCHEMA_VERSION:
        raise UsageError("it is no report that can be compared", where=str(path), hint=HINT)
    try:
        return _run(path, verb, content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"the report is not whole: {type(error).__name__}: {error}"
        raise UsageError(what, where=str(path), hint=HINT) from error


def _run(path: Path, verb: str, content: Mapping[str, Any]) -> Run:
    passed = {"fix": "verified", "verify": "passed"}.get(verb)
    return Run(
        path,
        verb,
        content[passed] if passed else not content["counts"]["error"],
        dict(_facts(content)),
        dict(_figures(content)),
        _outputs(content.get("checks", ())),
        dict(_nodes(content)),
        {step["name"]: len(step["changes"]) for step in content.get("passes", ())},
    )


def _facts(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("input", "original", "fixed", "output", "target", "probe", "engine", "device", "pipeline"):
        if content.get(name):
            yield name, str(content[name])
    if content.get("data"):
        yield "data", str(content["data"]["text"])
    yield from ((f"{name} (library)", str(version)) for name, version in content["versions"].items())


def _figures(content: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    plan = content.get("plan")
    if plan:
        yield "nodes in FP32", float(len(plan["fp32"]))
        yield "nodes in BF16", float(len(plan["bf16"]))
        yield "float nodes", float(plan["float_nodes"])
    for severity, number in content.get("counts", {}).items():
        yield f"{severity}s", float(number)
    for name, words in (("latency", "latency, us"), ("reference_latency", "latency of the original, us")):
        if content.get(name):
            yield words, float(content[name]["median_us"])
    yield "seconds of the run", sum(map(float, content["seconds"].values()))


def _outputs(checks: Sequence[Mapping[str, Any]]) -> dict[str, OutputDistance]:
    """Those of the check that decides; JSON has "inf" and "nan" as strings."""
    made = {check["name"]: check["outputs"] for check in checks if check["outputs"]}
    found = next((made[name] for name in JUDGING if name in made), ())
    return {
        one["name"]: OutputDistance(float(one["relative_l2"]), float(one["tolerance"]), bool(one["passed"]))
        for one in found
    }


def _nodes(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for precision in ("fp32", "bf16"):
        for decision in (content.get("plan") or {}).get(precision, ()):
            yield str(decision["node"]), f"{precision.upper()}, {decision['rule']}: {decision['reason']}"
    for finding in reversed(content.get("findings", ())):
        for node in finding["nodes"]:
            yield str(node), f"{finding['severity']}, {finding['kind']}: {finding['reason']}"


SHOWN = 5
"""Outputs, passes and nodes listed of each kind without `-v`."""


def print_comparison(found: Compared, out: Console, *, verbosity: int = 0) -> None:
    """Print the verdict, and what differs."""
    style = {True: "green", False: "bold red", None: "yellow"}[found.after.passed]
    out.print(Text(found.verdict, style=style), soft_wrap=True)
    limit = None if verbosity > 0 else SHOWN
    if verbosity >= 0:
        names = found.before.path.name, found.after.path.name
        right = (*names, "change")
        out.print(new_table("Figures", "", *right, rows=_figure_rows(found), right=right))
        if found.outputs:
            rows = list(_output_rows(found))[:limit]
            out.print(new_table("Errors (relative L2)", "output", *right, rows=rows, right=right))
        if found.passes:
            counts = ([name, str(old), str(new)] for name, old, new in found.passes[:limit])
            out.print(new_table("Changes by pass", "pass", *names, rows=counts, right=names))
        what = "with findings" if found.before.verb == "scan" else "in FP32 or BF16"
        for which, nodes in (("first", found.gone), ("second", found.new)):
            if nodes:
                names_of = listed(list(nodes), limit)
                out.print(Text(f"{count(len(nodes), 'node')} {what} in the {which} only: {names_of}"))
        for name, old, new in found.facts:
            out.print(Text(f"{name}: {_difference(old, new)}"), soft_wrap=True)


def _difference(old: str, new: str) -> str:
    """Both texts; of two lists, what only one of them has."""
    parts = [text.split(",") for text in (old, new)]
    if min(map(len, parts)) < 2:
        return f"{old or 'none'} -> {new or 'none'}"
    only = [[item for item in parts[i] if item not in parts[1 - i]] for i in (0, 1)]
    sides = zip(("first", "second"), only, strict=True)
    found = [f"only in the {which}: {', '.join(items)}" for which, items in sides if items]
    return "; ".join(found) or "another order"


def _figure_rows(found: Compared) -> Iterator[list[str]]:
    for name, old, new in found.figures:
        yield [name, plain_number(old), plain_number(new), change(old, new)]


def _output_rows(found: Compared) -> Iterator[list[str]]:
    for name, old, new in found.outputs:
        before, after = error_of(old), error_of(new)
        yield [name, plain_number(before), plain_number(after), change(before, after)]


def error_of(one: OutputDistance | None) -> float | None:
    """Returns the error of an output; None for an output that a run lacks."""
    return one.error if one else None


def plain_number(value: float | None) -> str:
    """Whole numbers in full, others with three digits; empty for None."""
    if value is None:
        return ""
    return str(int(value)) if value.is_integer() else f"{value:.3g}"


def change(old: float | None, new: float | None) -> str:
    """The change as a factor where it is large, and in percent where it is small."""
    if old is None or new is None or old == new:
        return ""
    if not old or not new:
        return f"{new - old:+.3g}"
    ratio = new / old
    return f"x {ratio:.3g}" if ratio > 2.0 or ratio < 0.5 else f"{ratio - 1.0:+.1%}"
