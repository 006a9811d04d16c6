"""Names that the shell completes: presets, passes, metrics and targets."""

from __future__ import annotations

from collections.abc import Iterable


def presets(incomplete: str) -> list[tuple[str, str]]:
    """Names of presets, each with its summary."""
    from rewriter.pipeline.presets import PRESETS

    return [(p.name, p.summary) for p in PRESETS.values() if p.name.startswith(incomplete)]


def passes(incomplete: str) -> list[str]:
    """Completes the last name of a list with commas; passes of other packages are among the names."""
    from rewriter.pipeline import registry

    before, comma, last = incomplete.rpartition(",")
    known = [*registry.own_passes(), *(plugin.name for plugin in registry.plugins())]
    return [before + comma + name for name in _matching(known, last)]


def metrics(incomplete: str) -> list[str]:
    """Names of metrics."""
    from rewriter.figures.metrics import METRICS

    return _matching(METRICS, incomplete)


def targets(incomplete: str) -> list[str]:
    """Names of libraries; a version may follow or stand alone."""
    return _matching(("tensorrt", "tensorrt-rtx"), incomplete)


def _matching(names: Iterable[str], start: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(start)]
