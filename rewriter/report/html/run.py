"""The last section of every page: what ran, on what, and how to run it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rewriter.ir.base import Target
from rewriter.report.html.render import Fact, Section, part
from rewriter.report.json import installed_versions
from rewriter.report.terminal import about_target, time_line


def run_section(
    command: str,
    commands: Iterable[tuple[str, str]] = (),
    *,
    facts: Iterable[Fact] = (),
    target: Target | None = None,
    seconds: Mapping[str, float] | None = None,
) -> Section:
    """Returns the section.

    Args:
        command: The command that made the page; "" where Python did.
        commands: What to run next, each after the words that say what it does.
    """
    rows = list(facts)
    if target is not None:
        rows.append(Fact("Target", about_target(target).removeprefix("Target: ")))
    if seconds:
        rows.append(Fact("Time", time_line(seconds).removeprefix("Time: ")))
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    rows.append(Fact("Versions", versions))
    lines = [*commands, *([("Repeats this run", command)] if command else [])]
    lead = "What this was made with, and the commands that repeat and continue it."
    bodies = [part("command.html", label=label, text=line) for label, line in lines if line]
    return Section("run", "This run", lead, [*bodies, part("facts.html", rows=rows)])
