"""The page of several files: of a batch, or of a pipeline with its links and its closed loop."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rewriter.base.text import Row, count, figure
from rewriter.jobs.closed_loop.result import LoopResult
from rewriter.report import pipeline
from rewriter.report.html.depth import decades, logarithmic, power_of_ten
from rewriter.report.html.render import Page, Part, Section, part, run_section, table_sections
from rewriter.report.pipeline import FileLine
from rewriter.report.tables import State
from rewriter.runtime.recording.record import Recording

WIDTH, HEIGHT, STEP, DROP = 200, 54, 262, 92
"""A box, and the distance of boxes beside and below each other, in pixels."""

LEAST = 600  # least width: one box is not drawn larger than text
ROW = 4  # boxes in a row

POINTS = 500  # most points of a curve: of neighbouring calls the one with the largest error
TOP, BOTTOM, FIELD = 1.0, 1e-7, 180.0  # errors at the ends of the chart, and its height in pixels


class Box(NamedTuple):
    """A file: its position, and its lines; `own` is the text of its links to itself."""

    x: int
    y: int
    line: FileLine
    calls: str
    own: str


def page(
    title: Path | str,
    verdict: str,
    state: State,
    rows: Sequence[Row],
    lines: Sequence[FileLine],
    command: str = "",
    recording: Recording | None = None,
    loop: LoopResult | None = None,
) -> Page:
    """Returns the page of files whose results are in the folder `title`; a pipeline has a recording."""
    sections = table_sections([pipeline.files_table(lines)])
    if recording is not None:
        lead = "An arrow is an output that becomes an input of a later call; it is dashed for states."
        sections.append(Section("links", "Files and their links", lead, [_links(lines, recording)]))
    if loop is not None and loop.fixed is not None:
        lead = (
            "The largest error of an output that no model reads again, call by call, against the original. "
            "A curve ends at the first other word, since the calls after it have other inputs."
        )
        sections.append(Section("loop", "Error in the loop", lead, [_curves(loop)]))
        sections += table_sections([pipeline.outputs_table(loop)])
    verb = "batch" if recording is None else "fix"
    return Page(verb, title, verdict, state, rows, [*sections, run_section(command)])


def _links(lines: Sequence[FileLine], recording: Recording) -> Part:
    """The files as boxes in the order of their first calls, with arrows between them."""
    calls = Counter(file for file, _ in recording.calls)
    own = Counter(link.producer for link in recording.links if link.producer == link.consumer)
    boxes = {
        file.name: Box(
            index % ROW * STEP + 10,
            index // ROW * (HEIGHT + DROP) + 40,
            line,
            count(calls[file.name], "call"),
            count(own[file.name], "state") if own[file.name] else "",
        )
        for index, (file, line) in enumerate(zip(recording.files, lines, strict=True))
    }
    pairs = Counter(
        (link.producer, link.consumer) for link in recording.links if link.producer != link.consumer
    )
    arrows = [
        (*_arrow(boxes[start], boxes[end]), str(number))
        for (start, end), number in pairs.items()
        if start in boxes and end in boxes
    ]
    long = any(boxes[start].x + STEP < boxes[end].x for start, end in pairs if {start, end} <= boxes.keys())
    height = (len(lines) - 1) // ROW * (HEIGHT + DROP) + HEIGHT + (112 if long else 60)
    width = max(min(len(lines), ROW) * STEP - (STEP - WIDTH) + 20, LEAST)
    words = [f"{start} feeds {end}" for start, end in pairs]
    summary = f"{count(len(lines), 'file')}; {', '.join(words) or 'no links between them'}"
    shown = {"boxes": list(boxes.values()), "arrows": arrows, "summary": summary}
    return part("links.html", **shown, width=width, height=height)


def _arrow(start: Box, end: Box) -> tuple[str, float, float]:
    """The path of an arrow, and the position of its number; arrows back go above the boxes."""
    if start.y == end.y and end.x > start.x:
        x0, x1, y = float(start.x + WIDTH), float(end.x), start.y + HEIGHT / 2
        if end.x - start.x == STEP:
            return f"M{x0} {y}H{x1 - 6}", (x0 + x1) / 2, y - 5
        path = f"M{x0} {y + 12}C{x0 + 40} {y + 64} {x1 - 40} {y + 64} {x1 - 6} {y + 12}"
        return path, (x0 + x1) / 2, y + 62
    x0, y0, x1, y1 = start.x + WIDTH / 2, float(start.y), end.x + WIDTH / 2, float(end.y)
    if y0 == y1:
        return f"M{x0} {y0}C{x0 - 20} {y0 - 34} {x1 + 20} {y0 - 34} {x1} {y1 - 6}", (x0 + x1) / 2, y0 - 28
    y0 += HEIGHT if y1 > y0 else 0
    y1 += HEIGHT + 6 if y1 < y0 else -6
    return f"M{x0} {y0}L{x1} {y1}", (x0 + x1) / 2 + 6, (y0 + y1) / 2


def _curves(loop: LoopResult) -> Part:
    y = logarithmic(BOTTOM, TOP, FIELD, 0.0)
    curves, ends, words = [], [], []
    for kind, run in pipeline.runs(loop).items():
        if points := list(_thinned(run.errors)):
            ends += [(kind, run.other.call + 0.5, y(points[-1][1]))] if run.other is not None else []
            points += [(points[0][0] + 0.5, points[0][1])] if len(points) == 1 else []  # a point has no line
            path = "L".join(f"{call + 0.5:g} {y(error):.1f}" for call, error in points)
            curves.append((kind, pipeline.RUNS[kind], f"M{path}"))
            words.append(f"{pipeline.RUNS[kind]} {figure(run.error)}")
    ticks = [(y(value), power_of_ten(value)) for value in decades(BOTTOM, TOP, 8)]
    summary = f"Error over {count(loop.calls, 'call')}: {', '.join(words)}; allowed {figure(loop.limit)}"
    shown = {"curves": curves, "ends": ends, "ticks": ticks, "limit": y(loop.limit), "calls": loop.calls}
    return part("loop.html", **shown, height=FIELD, summary=summary)


def _thinned(errors: Sequence[float]) -> Iterator[tuple[float, float]]:
    judged = [(call, error) for call, error in enumerate(errors) if not math.isnan(error)]
    size = max(1, -(-len(judged) // POINTS))
    for start in range(0, len(judged), size):
        yield max(judged[start : start + size], key=lambda pair: pair[1])
