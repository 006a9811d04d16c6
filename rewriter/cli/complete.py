"""What the shell may complete: names of presets, passes, metrics and targets."""

from __future__ import annotations

from collections.abc import Iterable


def presets(incomplete: str) -> list[tuple[str, str]]:
    """Names with what they are."""
    from rewriter.pipeline.presets import PRESETS

    return [(p.name, p.summary) for p in PRESETS.values() if p.name.startswith(incomplete)]


def passes(incomplete: str) -> list[str]:
    """The last name of a list with commas; names that other packages offer are among them."""
    from rewriter.pipeline import registry

    before, comma, last = incomplete.rpartition(",")
    known = [*registry.own_passes(), *(plugin.name for plugin in registry.plugins())]
    return [before + comma + name for name in _matching(known, last)]


def metrics(incomplete: str) -> list[str]:
    """Names of metrics."""
    from rewriter.figures.metrics import METRICS

    return _matching(METRICS, incomplete)


def targets(incomplete: str) -> list[str]:
    """The libraries; a version may follow or stand alone."""
    return _matching(("tensorrt", "tensorrt-rtx"), incomplete)


def _matching(names: Iterable[str], start: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(start)]
