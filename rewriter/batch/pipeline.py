"""A recording whose files a batch has fixed: its closed loop, and the outcomes of files that it repaired."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rewriter.base.stopwatch import Progress
from rewriter.batch.machine import outcome_of
from rewriter.batch.summary import Summary
from rewriter.jobs.closed_loop.api import loop_of
from rewriter.jobs.fix.result import FixResult
from rewriter.pipeline.options import FixOptions
from rewriter.runtime.recording.record import Recording


def closed_loop(folder: Path, summary: Summary, limit_s: float, progress: Progress) -> Summary:
    """Runs the script of a recording with the files that were written.

    Args:
        folder: The recording; the models of `summary` are its files. `limit_s`: 0 runs nothing.

    Returns:
        The summary with the recording, the loop, and the outcomes of its repairs.
    """
    recording, records = Recording.read(folder), summary.records
    named = dict(zip((file.name for file in recording.files), (entry for entry, _ in records), strict=True))
    outcomes = {entry.name: outcome for entry, outcome in records}
    fixed = {name: entry.output for name, entry in named.items() if outcomes[entry.name].files}
    summary = replace(summary, recording=recording)
    if not limit_s or not fixed:
        return summary

    def refixed(name: str, result: FixResult) -> None:
        entry = named[name]
        outcomes[entry.name] = replace(outcome_of(entry, result), seconds=outcomes[entry.name].seconds)

    options = FixOptions(**{name: value for name, value in records[0][0].options.items() if name != "inputs"})
    loop = loop_of(folder, fixed, options, limit_s, progress, refixed)
    return replace(summary, loop=loop, records=[(entry, outcomes[entry.name]) for entry, _ in records])
