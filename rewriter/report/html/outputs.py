"""Cards of outputs: error against what is allowed, worst element, and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from markupsafe import Markup

from rewriter.jobs.fix.before import SideBySide
from rewriter.judge.verdict import Check
from rewriter.report.html.render import part
from rewriter.report.html.tasks import boxes_of, images_of, words_of
from rewriter.report.html.view import Fact, State, Tile
from rewriter.runtime.figures.outputs import OutputComparison, OutputStatistics
from rewriter.runtime.inputs.samples import DataSource

MOST_CARDS = 24
"""Outputs with a card; all of them are in the table of checks."""

PICTURE_BYTES = 1_400_000
"""Length of all data URIs together: those of one output of 256 x 256 pixels in colour take up to 1.2 MB."""


def output_cards(
    check: Check,
    statistics: Sequence[OutputStatistics],
    data: DataSource | None,
    before: Sequence[OutputComparison] = (),
    side: SideBySide | None = None,
) -> Markup:
    """Returns the cards of a check's outputs, those that failed first.

    Args:
        before: The same outputs in the low precision, with nothing repaired.
        side: One sample before and after.
    """
    plain = {one.name: one for one in before}
    figures = {one.name: one for one in statistics}
    same = {n for n, one in figures.items() if side is not None and one.sample == side.sample}
    pictures = [(p.name, list(images_of(p, side if p.name in same else None))) for p in check.pictures]
    sizes = accumulate(sum(len(image.uri) for image in images) for _, images in pictures)
    shown = {name: i for (name, i), size in zip(pictures, sizes, strict=True) if size <= PICTURE_BYTES}
    worst_first = sorted(check.outputs, key=lambda one: (one.passed, -_share(one)))
    cards = [
        {
            "name": one.name,
            "state": "good" if one.passed else "bad",
            "sentence": _sentence(one),
            "facts": list(_facts(one, figures.get(one.name), plain.get(one.name), data)),
            "images": shown.get(one.name, ()),
            "boxes": None,
            "words": (),
        }
        | (_in_its_form(one, side) if side is not None else {})
        for one in worst_first[:MOST_CARDS]
    ]
    return part("outputs.html", cards=cards)


def _in_its_form(one: OutputComparison, side: SideBySide) -> dict[str, object]:
    """The boxes, or the best classes or tokens, of the three models."""
    boxes, array = boxes_of(one.name, side), side.expected[one.name]
    scores = one.same_best is not None or one.probability is not None
    told = not boxes and array.ndim > 0 and (scores or array.dtype.kind in "iu")
    return {"boxes": boxes, "words": words_of(one.name, side) if told else ()}


def _share(one: OutputComparison) -> float:
    """The error in units of what is allowed."""
    return one.relative_l2 / one.tolerance if one.tolerance else one.relative_l2


def error_tile(check: Check, *, failed: bool) -> Tile:
    """The largest error of a check; it is not green where another check failed."""
    worst = max(check.outputs, key=lambda one: (not one.passed, _share(one)))
    state: State = "bad" if not worst.passed else "plain" if failed else "good"
    return Tile("Largest error", size(worst), f"of {worst.tolerance:.2g} allowed, at {worst.name}", state)


def adding_most(checks: Sequence[Check]) -> Iterator[Fact]:
    """The nodes that add most of a failed emulation's error, in one line."""
    worst = next((check.worst for check in checks if check.worst), ())
    if worst:
        nodes = ", ".join(f"`{one.node}` ({one.op}) adds {one.added:.2g}" for one in worst)
        yield Fact("Nodes", nodes)


def size(one: OutputComparison) -> str:
    """The error of an output as text."""
    return f"{one.relative_l2:.2g}" if one.finite else "NaN or infinity"


def _sentence(one: OutputComparison) -> str:
    if not one.finite:
        return "NaN or infinity, where the original has numbers"
    if not one.tolerance:
        return "bit-equal" if one.passed else f"error {one.relative_l2:.2g}; it should be bit-equal"
    return f"error {one.relative_l2:.2g} of {one.tolerance:.2g} allowed"


def _facts(
    one: OutputComparison,
    figures: OutputStatistics | None,
    plain: OutputComparison | None,
    data: DataSource | None,
) -> Iterable[Fact]:
    if plain is not None:
        yield Fact("Unrepaired", size(plain))
    if one.note:
        yield Fact("Compared", one.note)
    yield Fact("Largest difference", f"{one.max_abs:.3g}")
    yield Fact("Cosine", f"{one.cosine:.6f}")
    if figures is None:
        return
    yield Fact("PSNR", f"{figures.psnr:.1f} dB" if math.isfinite(figures.psnr) else "no difference")
    if figures.not_finite:
        yield Fact("Not finite", f"{figures.not_finite} elements")
    shares = [
        f"{share}\N{NO-BREAK SPACE}% below\N{NO-BREAK SPACE}{error:.2g}"
        for share, error in figures.percentiles.items()
    ]
    if shares:
        yield Fact("Absolute error", ", ".join(shares))
    if figures.at and figures.max_abs:
        index = ", ".join(map(str, figures.at))
        yield Fact("Worst element", f"[{index}]: {figures.actual:.5g}, not {figures.expected:.5g}")
    build = f", build {figures.build}" if figures.build else ""
    names = data.names if data is not None else ()
    name = Path(names[figures.sample]).name if figures.sample < len(names) else f"number {figures.sample}"
    yield Fact("Worst sample", f"{name}{build}")
    shape = "x".join(map(str, figures.shape)) or "scalar"
    yield Fact("Shape", f"{shape}, {figures.dtype}")
