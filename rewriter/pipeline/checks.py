"""Names that options take: what the shell offers of them, and errors with the nearest one for a wrong one.

What they belong to is imported when it is needed: a shell that completes a word does not wait.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rewriter.ir.errors import nearest


def presets() -> Mapping[str, str]:
    """Presets with their summaries."""
    from rewriter.pipeline.presets import PRESETS

    return {preset.name: preset.summary for preset in PRESETS.values()}


def require_preset(name: str) -> None:
    """Accepts the name of a preset."""
    from rewriter.pipeline.presets import preset_named

    preset_named(name)


def passes() -> list[str]:
    """Passes, those of other packages among them."""
    from rewriter.pipeline import registry

    return [*registry.own_passes(), *(plugin.name for plugin in registry.plugins())]


def require_passes(names: Iterable[str]) -> None:
    """Accepts names of passes."""
    from rewriter.pipeline import registry

    for name in names:
        registry.check_name(name, "")


def require_pipeline(given: Any) -> None:
    """Accepts the text of a pipeline or a list of its parts; plug-ins that it names are imported."""
    from rewriter.pipeline.text import listed

    listed(given)


def targets() -> tuple[str, ...]:
    """Libraries; a version may follow or stand alone."""
    return ("tensorrt", "tensorrt-rtx")


def require_target(text: str) -> None:
    """Accepts a target: a library, a version, or both."""
    from rewriter.ir.base import Target

    Target.parse(text)


def metrics() -> Iterable[str]:
    """Metrics of ours."""
    from rewriter.runtime.figures.metrics import METRICS

    return METRICS


def require_metric(name: str) -> None:
    """Accepts a name of `METRICS`, or a `module:function` of the user's."""
    if name not in metrics() and ":" not in name:
        raise ValueError(nearest(name, metrics()))


def require_opset(number: int) -> None:
    """Accepts an operator set that the installed onnx has."""
    import onnx

    newest = onnx.defs.onnx_opset_version()
    if not 1 <= number <= newest:
        raise ValueError(f"choose from 1 to {newest}")


def require_image_steps(text: str) -> None:
    """Accepts the steps of `data.inputs.images.Preprocessing`."""
    from rewriter.runtime.inputs.images import Preprocessing

    Preprocessing.parse(text)


def share_from_text(text: str) -> float:
    """`5%` and `0.05` as 0.05, and `1.05x`, the latency in all, too.

    Raises:
        ValueError: it is no number, or one from 1 on without a unit, which may be meant either way.
    """
    given = text.strip()
    number, unit = (given[:-1], given[-1]) if given.endswith(("%", "x")) else (given, "")
    try:
        value = float(number)
    except ValueError:
        raise ValueError("such as 5%, or 0.05") from None
    if not unit and 1.0 <= value < math.inf:
        raise ValueError(f"say {number}% for that much more latency, or {number}x for that many times of it")
    return value / 100.0 if unit == "%" else value - 1.0 if unit else value
