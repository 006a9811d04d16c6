"""Metrics that a tolerance may be about: one number for the error of all outputs."""

import functools
import importlib
import math
import runpy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from rewriter.base.errors import UsageError, nearest
from rewriter.ir.model import Array
from rewriter.runtime.metrics.outputs import OutputComparison, compare
from rewriter.runtime.metrics.pairwise_error import Pair
from rewriter.runtime.metrics.parts import Parts, parts_of
from rewriter.runtime.metrics.probabilities import Probabilities
from rewriter.runtime.metrics.tolerances import RELATIVE_L2, USABLE

Outputs = Mapping[str, Array]


@dataclass(frozen=True)
class Metric:
    """A measure of all outputs of one sample."""

    # the value of the original's outputs and the result's, by name: the worst output's, if it is of one
    worst: Callable[[Outputs, Outputs], float]
    least: bool = False  # True if the tolerance is a lower limit (PSNR), not an upper one (an error)

    @property
    def failed(self) -> float:
        return -math.inf if self.least else math.inf

    def meets(self, value: float, tolerance: float) -> bool:
        return value >= tolerance if self.least else value <= tolerance

    def worst_of(self, values: Iterable[float]) -> float | None:
        """The worst of some values; None if there are none."""
        return (min if self.least else max)(values, default=None)


def per_output(of: Callable[[Pair], float], *, least: bool = False) -> Metric:
    """The worst value of a measure of one output; an output that is not finite has the value `failed`."""

    def worst(expected: Outputs, actual: Outputs) -> float:
        pairs = (Pair(expected[name], actual[name]) for name in expected)
        value = metric.worst_of(of(pair) if pair.finite else metric.failed for pair in pairs)
        return value if value is not None else math.inf if least else 0.0

    metric = Metric(worst, least)
    return metric


def of_the_user(function: Callable[[Outputs, Outputs], Any], name: str) -> Metric:
    """Wraps the function `name` of the user's, which maps the two dicts of arrays to a number.

    If the function has a true attribute `least`, more is better and the tolerance is a lower limit. NaN is
    the worst value there is.

    Raises (when it is used):
        UsageError: the function raises, or returns no number.
    """

    def worst(expected: Outputs, actual: Outputs) -> float:
        try:
            value = float(function(dict(expected), dict(actual)))
        except Exception as error:
            text = f"the function fails: {type(error).__name__}: {error}"
            hint = "it gets two dicts of arrays, the original's outputs and the result's, and returns a float"
            raise UsageError(text, option="metric", where=name, hint=hint) from error
        return metric.failed if math.isnan(value) else value

    metric = Metric(worst, bool(getattr(function, "least", False)))
    return metric


def detections(expected: Outputs, actual: Outputs) -> float:
    """Relative L2 error of the worst output, with the rows of detections matched as sets; see `compare`.

    Other outputs are compared element by element. A part that is of no use, such as all scores, counts as an
    output; so does a range of rows where they are in the original's order.
    """
    parts = parts_of([expected])
    sets, plain = (
        [o for o, _ in compare(expected, actual, limit, as_sets=as_sets, parts=parts)]
        for limit, as_sets in ((-math.inf, dict.fromkeys(expected, (0, 1))), (math.inf, None))
    )
    in_order = {o.name for o in plain if o.relative_l2 <= USABLE}
    shown = [o for o in sets if not o.of] + [o for o in plain if o.of in in_order]
    shown += [o for o in sets if o.of and o.of not in in_order]
    telling = [o for o in shown if not o.of or o.relative_l2 > USABLE * o.chance]
    return max((o.relative_l2 if o.finite else math.inf for o in telling), default=0.0)


def by_parts(
    expected: Sequence[Outputs],  # of all samples
    # the same by the network's FP32 engine, called if there are parts: an error of a part passes if it is at
    # most `floor` times this engine's
    own: Callable[[], Sequence[Outputs]],
    floor: float,
    tolerance: float,
    kinds: Mapping[str, Probabilities],
    parts: Parts,
) -> Metric:
    """Relative L2 of the worst output, or of a part beyond its tolerance, in units of the output's."""
    limits = dict[str, float]()
    for exact, outputs in zip(expected, own() if any(parts.values()) else (), strict=False):
        for output in (output for output, _ in compare(exact, outputs, tolerance, parts=parts) if output.of):
            error = min(USABLE, floor * output.chance**2 * output.relative_l2)
            limits[output.name] = max(limits.get(output.name, 0.0), error)

    def worst(expected: Outputs, actual: Outputs) -> float:
        pairs = compare(expected, actual, tolerance, kinds=kinds, parts=parts)
        return max((value(output) if output.finite else math.inf for output, _ in pairs), default=0.0)

    def value(output: OutputComparison) -> float:
        if not output.of:
            return output.relative_l2
        limit = max(output.tolerance, limits.get(output.name, 0.0))
        return 0.0 if output.passed else output.relative_l2 * (tolerance / limit if limit else 1.0)

    return Metric(worst)


def top_k(k: int) -> Callable[[Pair], float]:
    """Share of rows along the last axis whose `k` largest entries are the same set."""

    def agreement(pair: Pair) -> float:
        rows = [array.reshape(-1, array.shape[-1] if array.ndim else 1) for array in pair.wide]
        # positions of the largest entries of each row, in order; ties go to the first
        expected, actual = (np.sort(np.argsort(-a, axis=-1, kind="stable")[:, :k], axis=-1) for a in rows)
        return float(np.mean(np.all(expected == actual, axis=-1))) if pair.expected.size else 1.0

    return agreement


DETECTIONS = "detections"  # the metric of models that select their rows

METRICS: dict[str, Metric] = {
    RELATIVE_L2: per_output(attrgetter("relative_l2")),
    "max-abs": per_output(attrgetter("max_abs")),
    "cosine": per_output(attrgetter("cosine"), least=True),
    "psnr": per_output(attrgetter("psnr"), least=True),
    "top-1": per_output(top_k(1), least=True),
    "top-5": per_output(top_k(5), least=True),
    DETECTIONS: Metric(detections),
}
"""Metrics by their names in `--metric`."""


@functools.cache
def named(name: str) -> Metric:
    """A metric of `METRICS`, `file.py:function` or `package.module:function`, or a UsageError."""
    if name in METRICS:
        return METRICS[name]
    module, colon, attribute = name.rpartition(":")
    if not (module and colon and attribute):
        hint = f"{nearest(name, METRICS)}, or name a function: file.py:function"
        raise UsageError(f"it cannot be {name!r}", option="metric", hint=hint)
    function = _names_in(module).get(attribute)
    if not callable(function):
        hint = f"define `def {attribute}(expected, actual) -> float` there"
        raise UsageError(f"{module} has no function {attribute}", option="metric", hint=hint)
    return of_the_user(function, name)


def _names_in(module: str) -> Mapping[str, Any]:
    """The names that a file of the user's, or a module on the path, defines."""
    try:
        return runpy.run_path(module) if module.endswith(".py") else vars(importlib.import_module(module))
    except FileNotFoundError as error:
        raise UsageError("no such file", option="metric", where=module, hint="check the path") from error
    except Exception as error:
        text = f"it cannot be imported: {type(error).__name__}: {error}"
        raise UsageError(text, option="metric", where=module, hint="does it import by itself?") from error
