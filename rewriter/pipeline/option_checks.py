"""Checks of option values that have the right type, so that an error names the place that set them.

Each raises `UsageError` or `ValueError` with a text that says what is expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rewriter.pipeline.pass_options import nearest


def preset(name: str) -> None:
    """Accepts the name of a preset."""
    from rewriter.pipeline.presets import preset_named

    preset_named(name)


def pipeline(text: str) -> None:
    """Accepts the text of a pipeline; plug-ins that it names are imported."""
    from rewriter.pipeline.text import parse

    parse(text)


def passes(names: Iterable[str]) -> None:
    """Accepts names of passes."""
    from rewriter.pipeline import registry

    for name in names:
        registry.check_name(name, "")


def target(text: str) -> None:
    """Accepts a target: a library, a version, or both."""
    from rewriter.base import Target

    Target.parse(text)


def metric(name: str) -> None:
    """Accepts a name of `figures.metrics.METRICS`, or a `module:function` of the user's."""
    from rewriter.figures.metrics import METRICS

    if name not in METRICS and ":" not in name:
        raise ValueError(nearest(name, METRICS))


def opset(number: int) -> None:
    """Accepts an operator set that the installed onnx has."""
    import onnx

    newest = onnx.defs.onnx_opset_version()
    if not 1 <= number <= newest:
        raise ValueError(f"choose from 1 to {newest}")


def engine(name: str) -> None:
    """Accepts an engine of `verify`; `fix` itself checks whether it takes it and whether it runs here."""
    from rewriter.engines.deployment import ENGINES

    if name not in ENGINES:
        raise ValueError(nearest(name, ENGINES))


def a_number(value: float) -> None:
    """Accepts anything but NaN."""
    if math.isnan(value):
        raise ValueError("it takes a number, such as 1e-3")


def a_share(value: float) -> None:
    """Accepts a share from 0 on."""
    if not 0.0 <= value < math.inf:
        raise ValueError("such as 0.05")


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


def positive(value: float) -> None:
    """Accepts numbers above 0."""
    if not value > 0:
        raise ValueError("it takes a number above 0")


def at_least(least: int, value: int) -> None:
    """Accepts whole numbers from `least` on."""
    if value < least:
        raise ValueError(f"it takes a whole number from {least} on")


def image_steps(text: str) -> None:
    """Accepts the steps of `data.inputs.images.Preprocessing`."""
    from rewriter.data.inputs.images import Preprocessing

    Preprocessing.parse(text)
