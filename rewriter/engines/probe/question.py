"""A probe: a question, small models, and a function from their outputs to an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

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
        graph: In the syntax of onnx.parser, without the header. Its inputs in `weights` become initializers.
        feeds, weights: Arrays in the graph's types.
        exact: The result in float64, from `feeds` and `weights`; None if only time or NaN matters.
        opset: Of the model.
        tf32: Whether TF32 is allowed. `timed`: whether its latency answers the question.
    """

    name: str
    graph: str
    feeds: Mapping[str, Array]
    weights: Mapping[str, Array] = field(default_factory=dict)
    exact: Callable[[Mapping[str, Array]], Array] | None = None
    opset: int = OPSET
    tf32: bool = True
    timed: bool = False

    def proto(self) -> onnx.ModelProto:
        """The model, weights included."""
        ir = IR_VERSION + (self.opset > 22)
        header = f'<ir_version: {ir}, opset_import: ["" : {self.opset}]>\n'
        model: onnx.ModelProto = onnx.parser.parse_model(header + self.graph)
        kept = [value for value in model.graph.input if value.name not in self.weights]
        del model.graph.input[:]
        model.graph.input.extend(kept)
        model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in self.weights.items())
        return model

    @cached_property
    def expected(self) -> Array | None:
        """The exact output, in float64."""
        if self.exact is None:
            return None
        given = {n: a.astype(np.float64) for n, a in {**self.feeds, **self.weights}.items()}
        return np.asarray(self.exact(given), np.float64)


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


@dataclass(frozen=True)
class Probe:
    """A question about TensorRT on a GPU.

    Attributes:
        name: Key of the answer for passes and rules.
        values: The possible answers, with their meanings.
        judge: Maps the results of the cases, by name, to a value and its figures. Called only if all cases
            but the `optional` ones ran.
        used: The use of the answer.
    """

    name: str
    question: str
    values: Mapping[str, str]
    cases: tuple[Case, ...]
    judge: Callable[[Mapping[str, Seen]], tuple[str, Mapping[str, float]]]
    used: str = ""
    optional: frozenset[str] = frozenset()

    def answer(self, seen: Mapping[str, Seen]) -> Answer:
        """The answer, or the reason why there is none."""
        failed = [f"{n}: {s.problem}" for n, s in seen.items() if s.value is None and n not in self.optional]
        if failed:
            return Answer(UNKNOWN, {}, "; ".join(failed))
        value, figures = self.judge(seen)
        return Answer(value, {n: float(f"{v:.4g}") for n, v in figures.items() if math.isfinite(v)})
