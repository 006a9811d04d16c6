"""Shows the result of `compare-inputs`: sentences for people, JSON for programs."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console

from rewriter.base.text import Row, count
from rewriter.input_comparison.job import ArrayComparison, InputComparison
from rewriter.report.json import document
from rewriter.report.terminal import listed, print_report


def print_result(result: InputComparison, out: Console, *, verbosity: int = 0) -> None:
    """Print the verdict, then each difference once, with its samples; see `print_report`."""
    compared, there = len(result.samples), min(result.counts)
    left = f" of {there} (`samples`)" if there > compared else ""
    verb, state = ("differ", "bad") if result.differ else ("agree", "good")
    line = f"The two pipelines {verb}: {count(compared, 'sample')} compared{left}"
    summary = rows(result, everything=verbosity > 0 or not result.differ)
    print_report(line, state, summary, (), out, verbosity)  # type: ignore[arg-type]


def rows(result: InputComparison, *, everything: bool) -> Iterator[Row]:
    ours, theirs = result.counts
    if ours != theirs:
        yield "Number", f"ours has {count(ours, 'sample')}, theirs {theirs}"
    groups: dict[tuple[str, str], list[tuple[str, ArrayComparison]]] = {}
    for sample in result.samples:
        for array in sample.arrays:
            groups.setdefault((array.name, array.sentence), []).append((sample.ours, array))
    for (name, sentence), members in groups.items():
        array = members[0][1]
        where = "" if len(members) == len(result.samples) else f" (in {listed([w for w, _ in members], 3)})"
        if array.differences:
            yield "Differs", f"{name}: {sentence}{where}"
            yield from (("", f"{difference.kind}: {difference.text}") for difference in array.differences)
            yield from (("", f"note: {note}") for note in array.notes)
            after = max(array.after for _, array in members)
            yield "", f"relative L2: {array.before:.3g}, and {after:.3g} without these differences"
        elif everything:
            yield "Same", f"{name}: {sentence}{where}"


def as_dict(result: InputComparison) -> dict[str, Any]:
    samples = [
        {**vars(sample), "arrays": [{**vars(a), "sentence": a.sentence} for a in sample.arrays]}
        for sample in result.samples
    ]
    ours, theirs = result.counts
    return document({"differ": result.differ, "counts": {"ours": ours, "theirs": theirs}, "samples": samples})
