"""Shows the result of `compare-inputs`: sentences for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from rewriter.ir.english import count
from rewriter.parity.comparison import ArrayComparison, InputComparison
from rewriter.report.json import document
from rewriter.report.terminal import listed


def print_result(result: InputComparison, out: Console, *, verbosity: int = 0) -> None:
    """Print the verdict, then each difference once, with its samples.

    With verbosity 1, arrays that agree are listed, too.
    """
    for line in _summary(result):
        out.print(line, soft_wrap=True)
    if verbosity < 0:
        return
    groups: dict[tuple[str, str], list[tuple[str, ArrayComparison]]] = {}
    for sample in result.samples:
        for array in sample.arrays:
            groups.setdefault((array.name, array.sentence), []).append((sample.ours, array))
    for (name, sentence), found in groups.items():
        array = found[0][1]
        if not array.differences and not verbosity and result.differ:
            continue
        where = "" if len(found) == len(result.samples) else f" (in {listed([w for w, _ in found], 3)})"
        out.print(Text(f"{name}: {sentence}{where}", style="bold red" if array.differences else "green"))
        for detail in _details(array, [a for _, a in found]):
            out.print(Text(f"  {detail}"), soft_wrap=True)


def _details(array: ArrayComparison, alike: list[ArrayComparison]) -> Iterator[str]:
    for difference in array.differences:
        yield f"{difference.kind}: {difference.text}"
    yield from (f"note: {note}" for note in array.notes)
    if array.differences:
        after = max(a.after for a in alike)
        yield f"relative L2: {array.before:.3g}, of which these differences leave {after:.3g}"


def _summary(result: InputComparison) -> Iterator[Text]:
    compared = f"{count(len(result.samples), 'sample')} compared"
    left = min(result.counts) - len(result.samples)
    compared += f" of {min(result.counts)} (`samples`)" if left else ""
    verdict, style = ("differ", "bold red") if result.differ else ("agree", "green")
    yield Text(f"The two pipelines {verdict}: {compared}", style=style)
    ours, theirs = result.counts
    if ours != theirs:
        yield Text(f"ours has {count(ours, 'sample')}, theirs {theirs}", style="bold red")


def as_dict(result: InputComparison) -> dict[str, Any]:
    """The result as objects that `json.dumps` takes."""
    fields: dict[str, Any] = {
        "differ": result.differ,
        "counts": {"ours": result.counts[0], "theirs": result.counts[1]},
        "samples": [
            {
                "ours": sample.ours,
                "theirs": sample.theirs,
                "arrays": [{**asdict(a), "sentence": a.sentence} for a in sample.arrays],
            }
            for sample in result.samples
        ],
    }
    return document(fields)
