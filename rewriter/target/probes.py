"""A probe: a question, graphs that test it, and thresholds (probes.toml explains the rows); its answers."""

import functools
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Literal

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

from rewriter.base.text import Row, Summary, rows_of
from rewriter.ir.model import Array
from rewriter.ir.reading import own_table, read_json
from rewriter.target import Target, numbers

IR_VERSION = 10  # IR version of onnx 1.16, which every reader of opset 21 knows; opset 23 needs 11

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Case:
    """One small graph with its data; probes.toml explains the fields."""

    name: str
    graph: str
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timed: bool = False
    opset: int = 17

    def proto(self, *, fp32: bool = False) -> onnx.ModelProto:
        """The model, weights included; `fp32`: with FP32 in place of every FP16 and BF16."""
        model = self._parsed(fp32)
        for info in model.graph.value_info:
            array = self.values[info.name].astype(_dtype(info))
            model.graph.initializer.append(numpy_helper.from_array(array, info.name))
        del model.graph.value_info[:]
        return model

    def feeds(self, *, fp32: bool = False) -> dict[str, Array]:
        """The inputs, which `proto(fp32=...)` takes."""
        graph = self._parsed(fp32).graph
        return {info.name: self.values[info.name].astype(_dtype(info)) for info in graph.input}

    @functools.cached_property
    def values(self) -> dict[str, Array]:
        """Inputs and weights, in the types of the graph."""
        graph = self._parsed(fp32=False).graph
        return {info.name: self._array(info) for info in (*graph.input, *graph.value_info)}

    def _parsed(self, fp32: bool) -> onnx.ModelProto:
        ir = IR_VERSION + (self.opset > 22)
        text = f'<ir_version: {ir}, opset_import: ["" : {self.opset}]> g {self.graph}'
        if fp32:
            text = re.sub(r"\bto = (10|16)\b", "to = 1", re.sub(r"\bb?float16\b", "float", text))
        model: onnx.ModelProto = onnx.parser.parse_model(text)
        return model

    def _array(self, info: onnx.ValueInfoProto) -> Array:
        """The array of an input or weight, seeded by its name, so that it is the same on every machine."""
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
        for position, content in spec.get("at", ()):
            index = tuple(_index(part) for part in position.split(","))
            array[index] = np.resize(np.asarray(content, np.float64), array[index].shape)
        return np.asarray(array.astype(_dtype(info)))


def _dtype(info: onnx.ValueInfoProto) -> np.dtype[Any]:
    return onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)


def _index(part: str) -> int | slice:
    if ":" not in part:
        return int(part)
    return slice(*(int(end) if end else None for end in part.split(":")))


@dataclass(frozen=True)
class Answer:
    """The answer of one probe."""

    value: str  # one of the probe's `values`, or `unknown`
    # by case, or by "a / b" for ratios: relative L2 errors, microseconds
    figures: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""  # the reason if it is unknown, or if a defect shows in that nothing runs


@dataclass(frozen=True)
class Probe:
    """A question about TensorRT on a GPU, whose answer has its name; probes.toml explains the fields."""

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

    def answer(self, results: Mapping[str, float | str]) -> Answer:
        """The answer, from the figure of each case or the reason why there is none."""
        problems = [f"{name}: {why}" for name, why in results.items() if isinstance(why, str)]
        if problems:
            return Answer(self.failing, {}, "; ".join(problems))
        figures = {name: float(figure) for name, figure in results.items() if not isinstance(figure, str)}
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
        yield from (Case(**_filled(fields, names)) for names in row.get("each", [{}]))


def _filled(value: Any, names: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return Template(value).safe_substitute(names)
    if isinstance(value, dict):
        return {key: _filled(item, names) for key, item in value.items()}
    return [_filled(item, names) for item in value] if isinstance(value, list) else value


@functools.cache
def probes() -> tuple[Probe, ...]:
    rows = own_table("rewriter.target", "probes.toml")["probe"]
    return tuple(
        Probe(row["name"], row["question"], tuple(cases(row["case"])), tuple(row["answers"]), row["used"])
        for row in rows
    )


RECORDED = Path(str(files("rewriter.target"))) / "recorded"
"""Files of `rewriter probe --json`, one for each GPU and release."""


@dataclass(frozen=True, repr=False)
class Answers(Summary):
    """The answers of one library on one GPU.

    Attributes:
        library: `tensorrt` or `tensorrt-rtx`, as a target calls it; `version`: its release.
        gpu, driver, sm: Name of the GPU; newest CUDA that its driver supports; compute capability, `sm_90`.
        recorded: True if they come from the package, not from this machine.
    """

    # rises when a field changes its meaning or goes away; a new field leaves it
    schema_version: Literal[1] = field(default=1, kw_only=True)
    library: str
    version: str
    gpu: str
    driver: str = ""
    source: str = ""
    sm: str = ""
    recorded: bool = False
    answers: Mapping[str, Answer] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, str]:
        """The known answers, by probe."""
        return {name: a.value for name, a in self.answers.items() if a.value != UNKNOWN}

    @property
    def title(self) -> str:
        driver = f", driver {self.driver}" if self.driver else ""
        return f"{self.library} {self.version} on {self.gpu}{driver}"

    @property
    def origin(self) -> str:
        """`title`, with a remark whether that is this machine."""
        if self.recorded:
            return f"recorded of {self.title}, not measured here"
        return f"measured here: {self.title}"

    def summary(self) -> Iterator[Row]:
        yield "of", self.origin
        lines = (f"{name}: {answer.value}" for name, answer in self.answers.items())
        yield from rows_of("answers", lines, 10)

    def fits(self, target: Target) -> bool:
        """True if library, release and GPU match a target, which may leave some of them open."""
        release = numbers(self.version)[: len(target.version)]
        elsewhere = self.sm and target.gpus and self.sm not in target.gpus
        return self.library == target.library and release == target.version and not elsewhere


@functools.cache
def recorded() -> tuple[Answers, ...]:
    """The answers that come with the package, newest library first."""
    content = [replace(read(path), recorded=True) for path in RECORDED.glob("*.json")]
    return tuple(sorted(content, key=lambda a: (a.library, a.version, len(a.answers)), reverse=True))


def plain_fields(answers: Answers) -> dict[str, Any]:
    """The answers as they are written; a file in `RECORDED` has the same form."""
    plain = asdict(answers)
    del plain["recorded"]
    return plain


def read(path: Path) -> Answers:
    """Raises UsageError for a file that is broken or of another version."""
    answers: Answers = read_json(path, Answers, "measure them again with `rewriter probe --ask`")
    return answers
