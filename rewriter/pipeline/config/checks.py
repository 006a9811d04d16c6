"""Whether a value of the right type makes sense, so that a bad one is told where it stands.

Each raises `UsageError` or `ValueError`, whose text says what is expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rewriter.pipeline import registry
from rewriter.pipeline.pass_options import nearest


def pipeline(text: str) -> None:
    """Names, options and syntax of a pipeline; plug-ins that it names are imported."""
    from rewriter.pipeline.text import parse

    parse(text)


def passes(names: Iterable[str]) -> None:
    """Names of passes."""
    for name in names:
        registry.check_name(name, "")


def metric(name: str) -> None:
    """A name of `figures.metrics.METRICS`, or a function of the user's, looked up when it is used."""
    from rewriter.figures.metrics import METRICS

    if name not in METRICS and ":" not in name:
        raise ValueError(nearest(name, METRICS))


def opset(number: int) -> None:
    """An operator set that the installed onnx knows."""
    import onnx

    newest = onnx.defs.onnx_opset_version()
    if not 1 <= number <= newest:
        raise ValueError(f"choose from 1 to {newest}")


def a_number(value: float) -> None:
    """Anything but NaN."""
    if math.isnan(value):
        raise ValueError("it takes a number, such as 1e-3")


def a_share(value: float) -> None:
    """A share of 0 or more."""
    if not 0.0 <= value < math.inf:
        raise ValueError("such as 0.05")


def positive(value: float) -> None:
    """More than 0."""
    if not value > 0:
        raise ValueError("it takes a number above 0")


def at_least_one(value: int) -> None:
    """From 1 on."""
    if value < 1:
        raise ValueError("it takes a whole number from 1 on")


def engine(name: str) -> None:
    """A name that `verify` takes; whether it runs here, and whether `fix` takes it, is seen there."""
    from rewriter.engines.deployment import ENGINES

    if name not in ENGINES:
        raise ValueError(nearest(name, ENGINES))


def not_negative(value: int) -> None:
    """From 0 on."""
    if value < 0:
        raise ValueError("it takes a whole number from 0 on")
