"""The last section of every page: what ran, on what, and how to run it again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from markupsafe import Markup

from rewriter.ir.base import Target
from rewriter.report.html.render import part
from rewriter.report.html.view import Fact, Section
from rewriter.report.json import installed_versions
from rewriter.report.terminal import about_target
from rewriter.runtime.inputs.samples import DataSource


def run_section(
    command: str,
    *,
    facts: Iterable[Fact] = (),
    target: Target | None = None,
    data: DataSource | None = None,
    seconds: Mapping[str, float] | None = None,
    following: Mapping[str, str] | None = None,
    verify: str = "",
    repair: str = "",
) -> Section:
    """Returns the section.

    Args:
        command: The command that made the page; "" where Python did.
        following: The commands that build the engine, by tool. `verify`: the one that runs it on a GPU.
        repair: The command that repairs what was found; "" if there is nothing to repair.
    """
    rows = list(facts)
    if data is not None:
        rows.append(Fact("Data", data.text))
    if target is not None:
        rows.append(Fact("Target", about_target(target).removeprefix("Target: ")))
    if seconds:
        total = sum(seconds.values())
        parts = ", ".join(f"{stage} {spent:.1f} s" for stage, spent in seconds.items())
        rows.append(Fact("Time", f"{total:.1f} s: {parts}"))
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    rows.append(Fact("Versions", versions))
    steps = (following or {}).items()
    bodies = [command_line(f"Builds the engine, with {tool}", line) for tool, line in steps]
    if verify:
        bodies.append(command_line("Runs it where there is a GPU, and compares", verify))
    if repair:
        bodies.append(command_line("Repairs what was found", repair))
    if command:
        bodies.append(command_line("Repeats this run", command))
    lead = "What this was made with, and the commands that repeat and continue it."
    return Section("run", "This run", lead, [*bodies, part("facts.html", rows=rows)])


def command_line(label: str, text: str) -> Markup:
    """A line to be copied into a shell."""
    return part("command.html", label=label, text=text)
