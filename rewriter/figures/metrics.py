"""What a tolerance may be about: one number for how far an output is from the original."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rewriter.errors import UsageError
from rewriter.figures.compare import compare, relative_l2
from rewriter.model import Array

Outputs = Mapping[str, Array]


@dataclass(frozen=True)
class Metric:
    """A measure of all outputs of one sample.

    Attributes:
        worst: From the original's outputs and the result's by name, of equal shapes: for measures of one
            output the worst of all.
        least: True if the tolerance is the least that is allowed (PSNR), not the most (an error).
    """

    worst: Callable[[Outputs, Outputs], float]
    least: bool = False

    def meets(self, value: float, tolerance: float) -> bool:
        return value >= tolerance if self.least else value <= tolerance


def per_output(of: Callable[[Array, Array], float], *, least: bool = False) -> Metric:
    """The worst of a measure of one output, in float64.

    NaN and infinity where the original is finite are the worst.
    """
    beyond = -math.inf if least else math.inf

    def one(expected: Array, actual: Array) -> float:
        if expected.dtype.kind != "f":
            return of(expected.astype(np.float64), actual.astype(np.float64))
        usable = np.isfinite(expected)
        if not _as_finite(expected, actual):
            return beyond
        zero = np.zeros((), np.float64)
        return of(np.where(usable, expected, zero), np.where(usable, actual, zero))

    def worst(expected: Outputs, actual: Outputs) -> float:
        values = [one(expected[name], actual[name]) for name in expected]
        return (min if least else max)(values, default=-beyond if least else 0.0)

    return Metric(worst, least)


def _as_finite(expected: Array, actual: Array) -> bool:
    """Whether a result has the original's NaN and infinities, and no others."""
    usable = np.isfinite(expected)
    special = np.array_equal(expected[~usable], actual[~usable], equal_nan=True)
    return bool(special and np.all(np.isfinite(actual[usable])))


def of_the_user(function: Callable[[Outputs, Outputs], Any], where: str) -> Metric:
    """A function of the user's, from the two dicts of arrays to a number.

    More is better if the function has an attribute `least` that is true: the tolerance is then the least
    that is allowed. NaN is the worst there is.

    Raises (when it is used):
        UsageError: the function raises, or returns no number.
    """
    least = bool(getattr(function, "least", False))

    def worst(expected: Outputs, actual: Outputs) -> float:
        try:
            value = float(function(dict(expected), dict(actual)))
        except Exception as error:
            text = f"the function fails: {type(error).__name__}: {error}"
            hint = "it gets two dicts of arrays, the original's outputs and the result's, and returns a float"
            raise UsageError(text, where=where, hint=hint) from error
        return value if not math.isnan(value) else -math.inf if least else math.inf

    return Metric(worst, least)


def detections(expected: Outputs, actual: Outputs) -> float:
    """Relative L2 error of the worst output, rows of one detection matched as sets; see `compare`.

    Outputs that are no rows are compared element by element; what is not finite is infinite.
    """
    found = compare(expected, actual, -1.0, as_sets=True)  # no error is below 0: all rows are matched
    return max((c.relative_l2 if c.finite else math.inf for c in found), default=0.0)


def max_abs(expected: Array, actual: Array) -> float:
    """Largest absolute difference, in the output's unit."""
    return float(np.max(np.abs(actual - expected), initial=0.0))


def cosine(expected: Array, actual: Array) -> float:
    """Cosine of the angle between the outputs as vectors; 1 for two zero vectors."""
    scale = float(np.linalg.norm(expected) * np.linalg.norm(actual))
    if not scale:
        return float(np.array_equal(expected, actual))
    return float(np.vdot(expected, actual)) / scale


def psnr(expected: Array, actual: Array) -> float:
    """Peak signal-to-noise ratio in dB: 20 log10(peak / RMSE), peak = the span of the original's values."""
    error = float(np.sqrt(np.mean(np.square(actual - expected)))) if expected.size else 0.0
    span = float(np.ptp(expected)) if expected.size else 0.0
    return 20.0 * math.log10((span or 1.0) / error) if error else math.inf


def top_k(k: int) -> Callable[[Array, Array], float]:
    """Share of rows along the last axis whose `k` largest entries are the same set."""

    def agreement(expected: Array, actual: Array) -> float:
        sides = [_best(array, k) for array in (expected, actual)]
        return float(np.mean(np.all(sides[0] == sides[1], axis=-1))) if expected.size else 1.0

    return agreement


def _best(array: Array, k: int) -> Array:
    """Positions of the `k` largest entries of each row, in order of position; ties go to the first."""
    rows = array.reshape(-1, array.shape[-1] if array.ndim else 1)
    return np.sort(np.argsort(-rows, axis=-1, kind="stable")[:, :k], axis=-1)


RELATIVE_L2 = "relative-l2"
"""The metric where nobody asks for another."""

DETECTIONS = "detections"
"""The metric of models that select their rows."""

METRICS: dict[str, Metric] = {
    RELATIVE_L2: per_output(relative_l2),
    "max-abs": per_output(max_abs),
    "cosine": per_output(cosine, least=True),
    "psnr": per_output(psnr, least=True),
    "top-1": per_output(top_k(1), least=True),
    "top-5": per_output(top_k(5), least=True),
    DETECTIONS: Metric(detections),
}
"""By the name that `--metric` takes."""


@functools.cache
def named(name: str) -> Metric:
    """The metric that `--metric` names: one of `METRICS`, `file.py:function`, or `package.module:function`.

    Raises:
        UsageError: no such metric, file, module or function; it is named.
    """
    if name in METRICS:
        return METRICS[name]
    place, colon, attribute = name.rpartition(":")
    if not (place and colon and attribute):
        hint = f"choose from {', '.join(METRICS)}, or name a function: file.py:function"
        raise UsageError(f"it cannot be {name!r}", where="--metric", hint=hint)
    function = getattr(_module(place), attribute, None)
    if not callable(function):
        hint = f"define `def {attribute}(expected, actual) -> float` there"
        raise UsageError(f"{place} has no function {attribute}", where="--metric", hint=hint)
    return of_the_user(function, f"--metric {name}")


def _module(place: str) -> ModuleType:
    """The user's code: a file is run under a name of its own, a module is imported from the path as it is."""
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place)
        spec = importlib.util.spec_from_file_location(f"rewriter_metric_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except FileNotFoundError as error:
        raise UsageError("there is no such file", where=f"--metric {place}", hint="check the path") from error
    except Exception as error:
        text = f"it cannot be imported: {type(error).__name__}: {error}"
        raise UsageError(text, where=f"--metric {place}", hint="does it import by itself?") from error
    return module
