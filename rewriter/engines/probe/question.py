"""A probe: a question, small models, and a function from their outputs to an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from rewriter.figures.pair import Pair
from rewriter.model import Array

IR_VERSION = 10
"""Of onnx 1.16, which every reader of opset 21 knows; opset 23 needs 11."""

OPSET = 17


@dataclass(frozen=True)
class Case:
    """One small model with its data.

    Attributes:
        name: Within its probe.
        nodes: The body of the graph in the syntax of onnx.parser; its output is `y`.
        feeds, weights: The inputs and the initializers, in the graph's types.
        exact: The result in float64, from `feeds` and `weights`; None if only time or NaN matters.
        shape: Of `y`, whose type is that of the first input; None: its shape, too.
        opset: Of the model.
        tf32: Whether TF32 is allowed. `timed`: whether its latency answers the question.
    """

    name: str
    nodes: str
    feeds: Mapping[str, Array]
    weights: Mapping[str, Array] = field(default_factory=dict)
    exact: Callable[[Mapping[str, Array]], Array] | None = None
    shape: tuple[int, ...] | None = None
    opset: int = OPSET
    tf32: bool = True
    timed: bool = False

    def proto(self) -> onnx.ModelProto:
        """The model, weights included."""
        ir = IR_VERSION + (self.opset > 22)
        header = f'<ir_version: {ir}, opset_import: ["" : {self.opset}]>'
        feeds = {name: _type(array.dtype, array.shape) for name, array in self.feeds.items()}
        first = next(iter(self.feeds.values()))
        output = _type(first.dtype, first.shape if self.shape is None else self.shape)
        inputs = ", ".join(f"{kind} {name}" for name, kind in feeds.items())
        text = f"{header} g ({inputs}) => ({output} y) {{ {self.nodes} }}"
        model: onnx.ModelProto = onnx.parser.parse_model(text)
        model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in self.weights.items())
        return model

    @cached_property
    def expected(self) -> Array | None:
        """The exact output, in float64."""
        if self.exact is None:
            return None
        given = {n: a.astype(np.float64) for n, a in {**self.feeds, **self.weights}.items()}
        return np.asarray(self.exact(given), np.float64)


def _type(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """The type of a tensor in the syntax of onnx.parser."""
    name = "float" if dtype == np.float32 else dtype.name
    return f"{name}[{','.join(map(str, shape))}]"


@dataclass(frozen=True)
class Seen:
    """The result of a case on an engine.

    Attributes:
        value: Its first output; None if it did not run.
        problem: The reason if it did not run.
        us: Median latency; None if it was not timed.
    """

    value: Array | None = None
    expected: Array | None = None
    problem: str = ""
    us: float | None = None

    @property
    def error(self) -> float:
        """Relative L2 error; infinite for NaN and infinity."""
        if self.value is None or self.expected is None:
            return math.nan
        return Pair(self.expected, self.value).relative_l2

    @property
    def finite(self) -> bool:
        return self.value is not None and bool(np.isfinite(self.value.astype(np.float64)).all())


@dataclass(frozen=True)
class Answer:
    """The answer of one probe.

    Attributes:
        value: One of the probe's `values`, or `unknown`.
        figures: What was measured: relative L2 errors, microseconds, ratios of them.
        problem: The reason if it is unknown.
    """

    value: str
    figures: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


UNKNOWN = "unknown"

Judge = Callable[[Mapping[str, Seen]], tuple[str, Mapping[str, float]]]
"""Maps the results of the cases, by name, to an answer's value and figures."""


def by_error(bound: float, good: str, bad: str) -> Judge:
    """Judges by the errors of all cases that ran: `good` if each is at most `bound`, else `bad`."""

    def judge(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
        errors = {name: s.error for name, s in seen.items() if s.value is not None}
        return good if errors and all(e <= bound for e in errors.values()) else bad, errors

    return judge


@dataclass(frozen=True)
class Probe:
    """A question about TensorRT on a GPU.

    Attributes:
        name: Key of the answer for passes and rules.
        values: The possible answers, with their meanings.
        judge: Called only if all cases but the `optional` ones ran.
        used: The use of the answer.
    """

    name: str
    question: str
    values: Mapping[str, str]
    cases: tuple[Case, ...]
    judge: Judge
    used: str = ""
    optional: frozenset[str] = frozenset()

    def answer(self, seen: Mapping[str, Seen]) -> Answer:
        """The answer, or the reason why there is none."""
        failed = [f"{n}: {s.problem}" for n, s in seen.items() if s.value is None and n not in self.optional]
        if failed:
            return Answer(UNKNOWN, {}, "; ".join(failed))
        value, figures = self.judge(seen)
        return Answer(value, {n: float(f"{v:.4g}") for n, v in figures.items() if math.isfinite(v)})
