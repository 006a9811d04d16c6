"""A probe: a question, small graphs with their data, and bounds that make an answer of what they give.

Probes are rows of TOML; `probes.toml` explains the form; rewriter/hazards/quirks.toml shares it.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from string import Template
from typing import Any, Literal

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from rewriter.ir.model import Array
from rewriter.runtime.figures.pair import Pair

IR_VERSION = 10
"""Of onnx 1.16, which every reader of opset 21 knows; opset 23 needs 11."""

UNKNOWN = "unknown"

Measure = Literal["error", "not-finite", "reciprocal", "us"]


@dataclass(frozen=True)
class Case:
    """One small graph with its data; probes.toml explains the fields."""

    name: str
    graph: str
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    measure: Measure = "error"
    opset: int = 17
    tf32: bool = True
    optional: bool = False

    @property
    def timed(self) -> bool:
        return self.measure == "us"

    def proto(self, *, fp32: bool = False, data: Mapping[str, Array] | None = None) -> onnx.ModelProto:
        """The model, weights included.

        Args:
            fp32: With FP32 in place of every FP16 and BF16.
            data: Values that replace some.
        """
        ir = IR_VERSION + (self.opset > 22)
        text = f'<ir_version: {ir}, opset_import: ["" : {self.opset}]> g {self.graph}'
        if fp32:
            text = re.sub(r"\bto = (10|16)\b", "to = 1", re.sub(r"\bb?float16\b", "float", text))
        model: onnx.ModelProto = onnx.parser.parse_model(text)
        weights = [*model.graph.value_info]
        del model.graph.value_info[:]
        values = {**self.values, **(data or {})}
        for info in weights:
            array = values[info.name].astype(_dtype(info))
            model.graph.initializer.append(numpy_helper.from_array(array, info.name))
        return model

    @functools.cached_property
    def values(self) -> dict[str, Array]:
        """Inputs and weights, in the types of the graph."""
        graph = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 17]> g {self.graph}').graph
        return {info.name: self._array(info) for info in (*graph.input, *graph.value_info)}

    def feeds(self, *, fp32: bool = False) -> dict[str, Array]:
        """The inputs, which `proto(fp32=...)` takes."""
        return {
            info.name: self.values[info.name].astype(_dtype(info))
            for info in self.proto(fp32=fp32).graph.input
        }

    def _array(self, info: onnx.ValueInfoProto) -> Array:
        """Seeded by the names, so that every machine asks the same."""
        spec = self.data.get(info.name) or self.data.get(info.name.rstrip("0123456789")) or {}
        shape = tuple(dim.dim_value for dim in info.type.tensor_type.shape.dim)
        rng = np.random.default_rng(zlib.crc32(f"{self.name}/{info.name}".encode()))
        if "fill" in spec:
            array = np.resize(np.asarray(spec["fill"], np.float64), shape)
        elif "uniform" in spec:
            low, high = spec["uniform"]
            array = rng.uniform(low, high, shape)
        else:
            array = rng.standard_normal(shape) * float(spec.get("scale", 1.0))
        for place, content in spec.get("at", ()):
            index = tuple(_index(part) for part in place.split(","))
            array[index] = np.resize(np.asarray(content, np.float64), array[index].shape)
        return np.asarray(array.astype(spec.get("exact", "float64")).astype(_dtype(info)))

    @property
    def by_reciprocal(self) -> dict[str, Array]:
        """The divisor with which a division in FP32 is a product with the reciprocal in FP16."""
        return {"c": np.asarray(1.0 / np.float64(np.float16(1.0 / np.float64(self.values["c"]))), np.float32)}


def _dtype(info: onnx.ValueInfoProto) -> np.dtype[Any]:
    return onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)


def _index(part: str) -> int | slice:
    if ":" not in part:
        return int(part)
    return slice(*(int(end) if end else None for end in part.split(":")))


@dataclass(frozen=True)
class Seen:
    """The result of a case on an engine.

    Attributes:
        value: Its first output; None if it did not run.
        expected: That of the graph in FP32; `other`: with reciprocals in place of divisions.
        problem: The reason if it did not run.
        us: Median latency; None if it was not timed.
    """

    value: Array | None = None
    expected: Array | None = None
    other: Array | None = None
    problem: str = ""
    us: float | None = None

    def figure(self, measure: Measure) -> float:
        """The measured figure; NaN if there is none."""
        if measure == "us":
            return math.nan if self.us is None else self.us
        if self.value is None:
            return math.nan
        value = self.value.astype(np.float64)
        if measure == "not-finite":
            return float(not np.isfinite(value).all())
        if measure == "error" or self.other is None:
            return math.nan if self.expected is None else Pair(self.expected, value).relative_l2
        assert self.expected is not None
        exact = self.expected.astype(np.float64)
        change = self.other.astype(np.float64) - exact
        return float(np.sum((value - exact) * change) / np.sum(change * change))


@dataclass(frozen=True)
class Answer:
    """The answer of one probe.

    Attributes:
        value: One of the probe's `values`, or `unknown`.
        figures: By case, or by "a / b" for ratios: relative L2 errors, microseconds ...
        problem: The reason if it is unknown, or if a defect shows in that nothing runs.
    """

    value: str
    figures: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Probe:
    """A question about TensorRT on a GPU.

    Attributes:
        name: Key of the answer for passes and rules.
        cases, answers: As probes.toml explains.
        used: The use of the answer.
        failing: The answer if a case does not build or run.
    """

    name: str
    question: str
    cases: tuple[Case, ...]
    answers: tuple[Mapping[str, Any], ...]
    used: str = ""
    failing: str = UNKNOWN

    @property
    def values(self) -> dict[str, str]:
        """The possible answers with their meanings."""
        return {row["value"]: row["meaning"] for row in self.answers}

    def answer(self, seen: Mapping[str, Seen]) -> Answer:
        """The answer, or the reason why there is none."""
        ran = [case for case in self.cases if not seen[case.name].problem]
        failed = [f"{c.name}: {seen[c.name].problem}" for c in self.cases if c not in ran and not c.optional]
        if failed:
            return Answer(self.failing, {}, "; ".join(failed))
        figures = {case.name: seen[case.name].figure(case.measure) for case in ran}
        value = next(row["value"] for row in self.answers if _holds(row.get("above"), figures))
        return Answer(value, {n: float(f"{v:.4g}") for n, v in figures.items() if math.isfinite(v)})


def _holds(above: Mapping[str, float] | None, figures: dict[str, float]) -> bool:
    """True if a figure is above its bound; ratios are added to the figures."""
    if above is None:
        return True
    for name in above:
        over, _, under = name.partition(" / ")
        if under:
            figures[name] = figures[over] / figures[under]
    bounds = {name: above.get(name, above.get("*", math.inf)) for name in figures}
    return any(not figures[name] <= bound for name, bound in bounds.items() if bound < math.inf)


def cases(rows: Sequence[Mapping[str, Any]]) -> Iterator[Case]:
    """The cases of rows of TOML, one for each value of `each`."""
    for row in rows:
        fields = {key: value for key, value in row.items() if key != "each"}
        for names in row.get("each", [{}]):
            filled = {key: _filled(value, names) for key, value in fields.items()}
            filled["graph"] = re.sub(r"\{\{(\d+): (.*?)\}\}", _repeated, filled["graph"], flags=re.S)
            yield Case(**filled)


def _filled(value: Any, names: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return Template(value).safe_substitute(names)
    if isinstance(value, dict):
        return {key: _filled(one, names) for key, one in value.items()}
    return [_filled(one, names) for one in value] if isinstance(value, list) else value


def _repeated(match: re.Match[str]) -> str:
    return "".join(Template(match[2]).safe_substitute(i=i, o=i + 1) for i in range(int(match[1])))


@functools.cache
def probes() -> tuple[Probe, ...]:
    """The rows of probes.toml."""
    text = files("rewriter.runtime.engines.probe").joinpath("probes.toml").read_text(encoding="utf-8")
    rows = tomllib.loads(text)["probe"]
    return tuple(
        Probe(row["name"], row["question"], tuple(cases(row["case"])), tuple(row["answers"]), row["used"])
        for row in rows
    )
