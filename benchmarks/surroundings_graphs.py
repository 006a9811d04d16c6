"""The draws of surroundings.py: a pattern in other sizes, with producers before it and consumers after it."""

from __future__ import annotations

import functools
import json
import re
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

import rewriter
from rewriter.ir.model import Array, Model
from rewriter.passes.base import Context, Stage
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.pipeline.driver import Driver
from rewriter.pipeline.presets import DEFAULT_PRESET, PRESETS, with_epilogues
from rewriter.pipeline.text import parse
from rewriter.runtime.engines.tensorrt_library import import_tensorrt
from rewriter.target import Target
from tests import onnx_text

ROOT = Path(__file__).resolve().parent.parent
Shape = tuple[int, ...]
Rng = np.random.Generator

PRIMES = (2, 3, 5, 7)
SIZES = ((2, 4, 4, 6, 8), (3, 3, 4, 8, 12), (5, 8, 16), (7, 8, 14))
"""What a factor of a size may become: products of sizes stay products, so that Reshapes hold."""

BATCHES = (1, 1, 2, 4, 8, 16, 32, 64)
"""How many times as large the first axis of the data becomes; 1 after half of the attempts."""

MOST_ELEMENTS = 2**20
WIDTHS = (16, 24, 32, 64, 96, 128, 192, 256)
READ_TWICE = 6
"""Each so many-th tensor between neighbours is an output, too."""

SETTING = re.compile(r"(with|opset|target|answers|keep|keep-ops|not-compared) ")
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum")
UNRUN = ("has no kernel", "no such plugin", "unknown axes", "pads no dilated")
"""Cases of tests/passes/text that ONNX Runtime does not run."""


@dataclass(frozen=True)
class Example:
    """A graph in which a pass has something to do, or in which a rule keeps nodes in FP32."""

    pattern: str
    text: str
    settings: dict[str, str]
    rule: str = ""
    free: bool = False
    keep: tuple[str, ...] = ()

    def lowered(self, model: Model, feeds: Mapping[str, Array]) -> Model | None:
        """A draw as the tool hands it out; None if the pass or the rule has nothing to do with it."""
        common: dict[str, Any] = {"inputs": [dict(feeds)], "verify": False, "target": "tensorrt-rtx"}
        if self.rule:
            steps = list(with_epilogues() if self.free else PRESETS[DEFAULT_PRESET].steps)
            result = rewriter.fix(model.whole(), passes=steps, keep_fp32_op=list(self.keep), **common)
            rules = {decision.rule for decision in result.plan.decisions} if result.plan else set()
            return result.model if self.rule in rules else None
        settings = self.settings
        (step,) = parse(settings.get("with", self.pattern))
        answers = dict(answer.split("=") for answer in settings.get("answers", "").split())
        if step.stage is not Stage.LOWERING:
            opset = int(settings.get("opset", max(17, model.opset)))
            context = Context(opset, Target("tensorrt", (), answers))
            model, results = Driver().run(model, [step], context)
            if not results[0].changes:
                return None
        return rewriter.fix(model.whole(), passes=[MixedPrecision(), "clean-casts"], **common).model


@functools.cache
def examples() -> dict[str, list[Example]]:
    """By the name of the pass, or `fp32-` and the rule."""
    found: dict[str, list[Example]] = {}
    for file in sorted((ROOT / "tests/passes/text").glob("*/becomes.txt")):
        name = file.parent.name.replace("_", "-")
        common, *cases = re.split(r"^=== .*\n", file.read_text(), flags=re.MULTILINE)
        for case in cases:
            own = list(takewhile(SETTING.match, case.lstrip("\n").split("\n")))
            settings = dict(line.split(" ", 1) for line in [*filter(SETTING.match, common.split("\n")), *own])
            text = "\n".join(case.lstrip("\n").split("\n")[len(own) :])
            if not any(reason in settings.get("not-compared", "") for reason in UNRUN):
                found.setdefault(name, []).append(Example(name, text, settings))
    for row in _table()["pattern"]:
        name = f"fp32-{row['rule']}"
        one = Example(name, row["graph"], {}, row["rule"], row.get("free", False), tuple(row.get("keep", ())))
        found.setdefault(name, []).append(one)
    return found


@dataclass(frozen=True)
class Draw:
    """A pattern in surroundings.

    Attributes:
        lifted: Whether inputs get two more axes if all have one.
        batch: Factor of the first axis of data, and of what Reshapes make of it.
        steps: Slot and seed of each neighbour: before input `slot` or, if that is negative, after output `~slot`.
            The first are the nearest.
    """

    pattern: str
    number: int
    example: int
    sizes: Shape
    steps: tuple[tuple[int, int], ...]
    lifted: bool = False
    batch: int = 1


def drawn(pattern: str, seed: int, number: int, attempt: int) -> Draw:
    """Attempts by turns have sizes of their own, such without another factor 2, and those of the example.

    Later ones have fewer steps.
    """
    rng = np.random.default_rng([zlib.crc32(pattern.encode()), seed, number, attempt])
    fixed = (0, 1, len(SIZES))[attempt % 3]
    sizes = (*PRIMES[:fixed], *(int(rng.choice(targets)) for targets in SIZES[fixed:]))
    most = max(1, 3 - attempt // 4)
    steps = [
        (slot, int(rng.integers(2**31)))
        for slot in (0, 1, 2, 3, ~0, ~1, ~2)
        for _ in range(rng.integers(0 if attempt > 8 else 1, most + 1))
    ]
    example = int(rng.integers(len(examples()[pattern])))
    batch = int(rng.choice(BATCHES)) if attempt < 6 else 1
    return Draw(pattern, number, example, sizes, tuple(steps), lifted=attempt % 4 < 3, batch=batch)


def smaller(draw: Draw) -> Iterator[Draw]:
    """Draws with a step less, or smaller."""
    yield from (
        replace(draw, batch=batch) for batch in sorted({1, draw.batch // 2}) if 0 < batch < draw.batch
    )
    for at in range(len(draw.steps) - 1, -1, -1):
        yield replace(draw, steps=(*draw.steps[:at], *draw.steps[at + 1 :]))
    for at, (size, prime) in enumerate(zip(draw.sizes, PRIMES, strict=True)):
        if size > prime:
            yield replace(draw, sizes=(*draw.sizes[:at], max(prime, size // 2), *draw.sizes[at + 1 :]))


# -- the pattern -----------------------------------------------------------------------------------


def scaled(size: int, sizes: Sequence[int]) -> int:
    """The size with each factor 2, 3, 5 and 7 replaced."""
    product = 1
    for prime, target in zip(PRIMES, sizes, strict=True):
        while size > 1 and size % prime == 0:
            size, product = size // prime, product * target
    if size * product > MOST_ELEMENTS:
        raise ValueError(f"a size of {size * product}")
    return size * product


def pattern_of(draw: Draw) -> ModelProto:
    """The example in the draw's sizes, with weights as trained ones: each product keeps the scale of its input."""
    model = onnx_text.parse(examples()[draw.pattern][draw.example].text)
    readers: dict[str, tuple[str, int]] = {}
    for node in model.graph.node:
        readers |= {name: (node.op_type, at) for at, name in enumerate(node.input)}
        for attribute in node.attribute:
            if attribute.name == "group":
                attribute.i = scaled(attribute.i, draw.sizes)
            if attribute.name == "split":
                attribute.ints[:] = [scaled(i, draw.sizes) for i in attribute.ints]
    unknown: dict[str, int] = {}
    for value in model.graph.input:
        for at, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.dim_value:
                dim.dim_value = unknown.setdefault(dim.dim_param, 2 + len(unknown))
            if at < 2 or "Conv" not in readers.get(value.name, ("", 0))[0] or readers[value.name][1] == 0:
                dim.dim_value = scaled(dim.dim_value, draw.sizes)
        if _is_batched(value, *readers.get(value.name, ("", 0))):
            value.type.tensor_type.shape.dim[0].dim_value *= draw.batch
    types = (value.type.tensor_type for value in model.graph.input)
    data = [one for one in types if one.elem_type in FLOATS]
    if draw.lifted and all(len(one.shape.dim) == 1 for one in data):
        for one in data:
            sizes = [draw.batch, 6 * draw.sizes[0], one.shape.dim[0].dim_value]
            one.CopyFrom(helper.make_tensor_type_proto(one.elem_type, sizes).tensor_type)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(_weight(tensor, *readers.get(tensor.name, ("", 0)), draw.sizes, draw.batch))
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return inferred(model)


def inferred(model: ModelProto) -> ModelProto:
    """The model with shapes.

    Raises:
        ValueError: one is not known, or too large.
    """
    del model.graph.value_info[:]
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    for value in [*model.graph.output, *model.graph.value_info]:
        shape = shape_of(value)
        if np.prod(shape) > MOST_ELEMENTS or (not all(shape) and value in model.graph.output):
            raise ValueError(f"{value.name} has shape {shape}")
    return model


def shape_of(value: ValueInfoProto) -> Shape:
    if not value.type.tensor_type.HasField("shape"):
        raise ValueError(f"the rank of {value.name} is not known")
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def _is_batched(value: ValueInfoProto, op: str, at: int) -> bool:
    """True for data of two or more axes: no vector, and no second input of a product but of a batch of them."""
    rank = len(value.type.tensor_type.shape.dim)
    return rank > 1 and not (
        at and (op in ("Gemm", "Conv", "ConvTranspose") or (op == "MatMul" and rank == 2))
    )


def _weight(tensor: TensorProto, op: str, at: int, sizes: Shape, batch: int) -> TensorProto:
    """A constant in other sizes; those that were equal stay equal."""
    array = numpy_helper.to_array(tensor)
    if array.dtype.kind == "i" and (op, at) in {("Reshape", 1), ("Expand", 1), ("Split", 1), ("Resize", 3)}:
        values = [scaled(int(i), sizes) if i > 1 else i for i in array.reshape(-1)]
        if op != "Split" and array.size > 1 and values[0] > 0:
            values[0] *= batch
        return numpy_helper.from_array(np.array(values, array.dtype).reshape(array.shape), tensor.name)
    if array.dtype.kind != "f" or not array.ndim:
        return tensor
    axes = min(2, array.ndim) if "Conv" in op and at == 1 else array.ndim
    shape = (*(scaled(i, sizes) for i in array.shape[:axes]), *array.shape[axes:])
    if np.prod(shape) > 4 * MOST_ELEMENTS:
        raise ValueError(f"{tensor.name} has shape {shape}")
    random = np.random.default_rng(zlib.crc32(array.tobytes())).standard_normal(shape)
    if op in PRODUCTS and array.ndim > 1:
        fan_in = np.prod(shape[1:]) if op == "Conv" else max(shape[:1] if "Conv" in op else shape[-2:])
        array = random / np.sqrt(fan_in)
    elif array.size > 16 and op == "BatchNormalization":
        array = 1 + 0.2 * np.clip(random, -2, 2)
    dtype = numpy_helper.to_array(tensor).dtype
    return numpy_helper.from_array(np.resize(array, shape).astype(dtype), tensor.name)


def build(draw: Draw) -> ModelProto:
    """The model of a draw.

    Raises:
        ValueError, InferenceError, ValidationError: the pattern cannot have these sizes.
    """
    model = pattern_of(draw)
    graph = model.graph
    writer = Writer(graph, next(one.version for one in model.opset_import if not one.domain))
    inputs, outputs = _data(graph.input), _data(graph.output)
    for slot, value in enumerate(inputs):
        _produce(writer, value, [seed for at, seed in draw.steps if at == slot])
    middle = len(writer.nodes)
    for slot, value in enumerate(outputs):
        _consume(writer, value, [seed for at, seed in draw.steps if at == ~slot])
    nodes = [*writer.nodes[:middle], *graph.node, *writer.nodes[middle:]]
    del graph.node[:]
    graph.node.extend(nodes)
    model = inferred(model)
    onnx.checker.check_model(model)
    return model


def _data(values: Iterable[ValueInfoProto]) -> list[ValueInfoProto]:
    """The float tensors; vectors only if there is nothing else, for they are weights otherwise."""
    floats = [value for value in values if value.type.tensor_type.elem_type in FLOATS and shape_of(value)]
    return [value for value in floats if len(shape_of(value)) > 1] or floats


def _produce(writer: Writer, value: ValueInfoProto, seeds: Sequence[int]) -> None:
    name, shape, chain = value.name, shape_of(value), []
    half = value.type.tensor_type.elem_type == TensorProto.FLOAT16
    for seed in seeds:
        one, letters, shape = writer.chosen(shape, seed, 1)
        chain.append((one, letters, seed))
    if not half:
        writer.shapes[name] = shape_of(value)
    if chain:
        x = value.name = f"in_{name}"
        value.type.CopyFrom(helper.make_tensor_type_proto(TensorProto.FLOAT, shape))
        for one, letters, seed in reversed(chain):
            x = writer.add(one, x, letters, seed)
        if half:
            writer.cast(x, TensorProto.FLOAT16)
        writer.nodes[-1].output[0] = name


def _consume(writer: Writer, value: ValueInfoProto, seeds: Sequence[int]) -> None:
    x, shape = value.name, shape_of(value)
    if seeds and value.type.tensor_type.elem_type == TensorProto.FLOAT16:
        x = writer.cast(x, TensorProto.FLOAT)
    for seed in seeds:
        if seed % READ_TWICE == 0:
            writer.graph.output.append(helper.make_tensor_value_info(x, TensorProto.FLOAT, None))
        one, letters, shape = writer.chosen(shape, seed, 0)
        x = writer.add(one, x, letters, seed)
    if seeds:
        value.CopyFrom(helper.make_tensor_value_info(x, TensorProto.FLOAT, None))


def feeds_of(model: ModelProto, seed: int) -> dict[str, Array]:
    """Normal floats, and 0 and 1 by turns for other types."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for value in model.graph.input:
        shape, dtype = shape_of(value), helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        turns = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2
        floating = np.issubdtype(dtype, np.floating)
        feeds[value.name] = np.asarray(rng.standard_normal(shape) if floating else turns, dtype)
    return feeds


def quirk(path: Path, draw: Draw, symptom: str) -> str:
    """The row of rewriter/target/quirks.toml for a file, to be completed by hand."""
    model = onnx.load(path)
    del model.metadata_props[:]
    for node in model.graph.node:
        node.name = ""
    text = onnx_text.render(model)
    version = next(one.version for one in model.opset_import if not one.domain)
    weights = [t for t in model.graph.initializer if re.search(rf'\] "?{re.escape(t.name)}"?[,\n>]', text)]
    data = ", ".join(f"{json.dumps(t.name)} = {_spread(numpy_helper.to_array(t))}" for t in weights)
    chain = [node.op_type for node in model.graph.node if node.op_type not in ("Cast", "Identity")]
    return f"""
[[quirk]]
id = "{draw.pattern}-{draw.number}"
title = ""
chain = {json.dumps(chain)}
library = "tensorrt-rtx"
first = "{import_tensorrt("tensorrt_rtx").__version__}"
last = ""
symptom = "{symptom}"
severity = "warning"
remedy = ""
source = "measured here"
[[quirk.case]]
name = "{draw.pattern}"
opset = {version}
graph = '''{text[text.index("(") :] if text.startswith("g ") else text}'''
data = {{ {data} }}"""


def _spread(array: Array) -> str:
    values = array.astype(np.float64)
    if abs(values.mean()) > values.std():
        return f"{{ uniform = [{values.min():.4g}, {values.max():.4g}] }}"
    return f"{{ scale = {values.std():.4g} }}"


# -- neighbours ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Neighbour:
    """A row of `neighbour` in surroundings.toml, which explains the fields."""

    shapes: str
    graph: str
    weights: Mapping[str, str] = field(default_factory=dict)
    ints: Mapping[str, str] = field(default_factory=dict)
    floats: Mapping[str, Sequence[float]] = field(default_factory=dict)
    opset: int = 13

    def other(self, shape: Shape, side: int, rng: Rng) -> tuple[dict[str, Shape], Shape] | None:
        """The letters and the shape on the other side, if `shape` fits side 0 (before it) or 1 (after it)."""
        sides = [text.split() for text in self.shapes.split("->")]
        letters = _matched(sides[side], shape)
        if letters is None:
            return None
        used = re.findall("[a-z]", " ".join([self.shapes, *self.weights.values()]))
        letters = {name: (int(rng.choice(WIDTHS)),) for name in used} | letters
        result = _filled(sides[1 - side], letters)
        return (letters, result) if np.prod(result) <= MOST_ELEMENTS else None


def _matched(tokens: Sequence[str], shape: Shape) -> dict[str, Shape] | None:
    """Sizes by letter; `*` has any number of axes."""
    letters: dict[str, Shape] = {}
    if "*" in tokens:
        at, more = tokens.index("*"), len(shape) - len(tokens) + 1
        if more < 0:
            return None
        letters["*"] = shape[at : at + more]
        tokens, shape = [t for t in tokens if t != "*"], shape[:at] + shape[at + more :]
    for token, size in zip(tokens, shape, strict=len(tokens) == len(shape)):
        factor, letter = _split(token)
        if (size % factor if letter else size != factor) or letters.setdefault(letter, (size // factor,)) != (
            size // factor,
        ):
            return None
    return letters if len(tokens) == len(shape) else None


def _filled(tokens: Sequence[str], letters: Mapping[str, Shape]) -> Shape:
    sizes: list[int] = []
    for token in tokens:
        factor, letter = _split(token)
        sizes += letters["*"] if token == "*" else (factor * letters.get(letter, (1,))[0],)
    return tuple(sizes)


def _split(token: str) -> tuple[int, str]:
    """Factor and letter of a size such as `2c`; of `2` no letter."""
    return int(re.sub("[a-z*]", "", token) or 1), token.strip("0123456789")


@dataclass
class Writer:
    """Adds neighbours to a graph; `shapes` has the tensors that a residual sum may read."""

    graph: GraphProto
    opset: int
    shapes: dict[str, Shape] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def chosen(self, shape: Shape, seed: int, side: int) -> tuple[Neighbour, dict[str, Shape], Shape]:
        """A neighbour that fits, its letters, and the shape on its other side."""
        rng = np.random.default_rng(seed)
        for one in rng.permutation(np.array(neighbours(), object)):
            fit = one.other(shape, side, rng) if self.opset >= one.opset else None
            if fit is not None:
                return one, *fit
        raise ValueError(f"nothing fits {shape}")

    def add(self, one: Neighbour, x: str, letters: Mapping[str, Shape], seed: int) -> str:
        """Adds a neighbour that reads x; returns its result, which the last node makes."""
        rng = np.random.default_rng(seed)
        prefix = f"n{len(self.nodes)}/"
        src = _filled(one.shapes.split("->")[0].split(), letters)
        same = [name for name, shape in self.shapes.items() if shape == src and name != x]
        names = {"x": x, "other": str(rng.choice(same)) if same else x, "": ""}
        for name, text in one.weights.items():
            self._constant(prefix + name, _neighbours_weight(name, _filled(text.split(), letters), rng))
        for name, text in one.ints.items():
            self._constant(prefix + name, np.array(_filled(text.split(), letters), np.int64))
        for name, values in one.floats.items():
            self._constant(prefix + name, np.array(values if len(values) > 1 else values[0], np.float32))
        for node in onnx.parser.parse_graph(f"g (float x) => (float y) {{ {one.graph} }}").node:
            for side in (node.input, node.output):
                side[:] = [names.get(name, prefix + name) for name in side]
            self.nodes.append(node)
        self.shapes[x] = src
        return str(self.nodes[-1].output[0])

    def cast(self, x: str, dtype: int) -> str:
        self.nodes.append(helper.make_node("Cast", [x], [f"n{len(self.nodes)}/cast"], to=dtype))
        return str(self.nodes[-1].output[0])

    def _constant(self, name: str, array: Array) -> None:
        self.graph.initializer.append(numpy_helper.from_array(array, name))


def _neighbours_weight(name: str, shape: Shape, rng: Rng) -> Array:
    """Normal: by the fan-in for a product, near 0 for a bias, near 1 for a scale, whose name begins with `s`."""
    random = rng.standard_normal(shape)
    if len(shape) == 1:
        return np.asarray(0.1 * random + name.startswith("s"), np.float32)
    return np.asarray(random / np.sqrt(np.prod(shape[1:]) if len(shape) > 2 else shape[0]), np.float32)


@functools.cache
def neighbours() -> list[Neighbour]:
    return [Neighbour(**row) for row in _table()["neighbour"]]


@functools.cache
def _table() -> dict[str, Any]:
    return tomllib.loads((ROOT / "benchmarks/surroundings.toml").read_text())
