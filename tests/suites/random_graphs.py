"""Random models from a seed: the patterns of passes and rules, in disguises and surroundings of exporters.

    cd tests && PYTHONPATH=.:suites python -m random_graphs 2000 46          # more of them, another seed
    cd tests && PYTHONPATH=.:suites python -m random_graphs 1 46 1234        # number 1234 of that seed again

Each model goes through every pass and through `fix`, in child processes: a crash of native code has a number.
"""

import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_text
import onnxruntime
from backend_check import RANDOM
from google.protobuf.message import Message
from graphs import run
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data
from onnx_text import sides
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel
from paths import ROOT
from worker_pool import Crash, over

import rewriter
from rewriter.base import sandbox as walls
from rewriter.base.errors import PassError, RewriterError
from rewriter.ir.graph.casts import LOWER
from rewriter.ir.model import Array, Model, check, load, walk_graphs, walk_nodes
from rewriter.ir.model.graphs import holds_graphs, replace_items, schema_of
from rewriter.passes import ALL
from rewriter.passes.base import Context, Pass, Stage
from rewriter.pipeline.driver import Driver
from rewriter.runtime.metrics.pairwise_error import Pair
from rewriter.target import Target

Rng = np.random.Generator
Shape = tuple[int, ...]
Work = tuple[int, int, tuple[int, ...]]
"""A seed, a number, and the indices of disguises that are left out."""

PROCESSES = 2
SLOW_SECONDS = 20.0  # processor time; a case needs about 0.3 s
CASE_SECONDS = 120.0  # wall time, on a busy machine and with the start of a child
FIXED = 0.4  # share of the cases that `fix` gets, too, which costs as much as all passes
STRUCTURAL = tuple(kind() for kind in ALL if kind.stage is Stage.STRUCTURE and kind.keeps_signature)

AMPLIFIED = 64.0
"""Changes of an output that a tolerance allows, in units of what a change of the inputs by it does: each of
the network's own roundings is of that size, and a random graph has up to some dozens of them in a row."""

ROUNDED = 2.0**-6  # what results of FP16 and BF16 may differ by: some spacings of BF16, 2^-8
SETTING = re.compile(r"^(with|opset|target|answers|keep|keep-ops|not-compared) .*\n", re.MULTILINE)

KINDS = ("normal", "large", "small", "ties", "special")
"""Values of a float input; `special` has NaN, infinities and negative zeros among them."""


@cache
def patterns() -> list[ModelProto]:
    """The graphs of tests/passes/text, the examples of passes, and the graphs of rules and defects."""
    texts = [text for kind in ALL for text in sides(kind.example)]
    for file in sorted((ROOT / "tests/passes/text").glob("*/*.txt")):
        texts += (SETTING.sub("", text) for text in re.split(r"^=== .*\n", file.read_text(), flags=re.M)[1:])
    for name in ("hazards/rules.txt", "hazards/quirks.txt", "model/sound.txt"):
        blocks = (ROOT / "tests" / name).read_text(encoding="utf-8").split("\n\n")
        texts += (block.split("\n- ")[0] for block in blocks if block.startswith(("g (", "<ir_version")))
    return [_at_least_ir_8(onnx_text.parse(text)) for text in texts]


def _at_least_ir_8(proto: ModelProto) -> ModelProto:
    proto.ir_version = max(8, proto.ir_version)
    return proto


# -- disguises: each edits a model; one that makes it invalid is undone -----------------------------
class Unfit(Exception):
    """The model has nothing to disguise."""


def _pick(rng: Rng, choices: Sequence[Any]) -> Any:
    if not choices:
        raise Unfit
    return choices[int(rng.integers(len(choices)))]


def _some(rng: Rng, choices: Sequence[Any], share: float = 0.5) -> list[Any]:
    return [choice for choice in choices if rng.random() < share]


def sizes(value: ValueInfoProto) -> Shape | None:
    """The shape of a tensor: a size of the name `d7` is 7, another unknown one 2; None without a rank."""
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None

    def size(dim: Any) -> int:
        named = re.fullmatch(r"d(\d+)", dim.dim_param)
        return int(dim.dim_value) if dim.HasField("dim_value") else int(named[1]) if named else 2

    return tuple(map(size, kind.shape.dim))


def _values(value: ValueInfoProto, rng: Rng, kind: str) -> Array:
    """Floats of a kind; 0 and 1 by turns for other types."""
    shape = sizes(value) or ()
    dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    if not np.issubdtype(dtype, np.floating) and dtype.name != "bfloat16":
        turns = (np.arange(np.prod(shape, dtype=int)).reshape(shape) + rng.integers(2)) % 2
        return np.asarray(turns).astype(dtype)
    array = np.asarray(rng.standard_normal(shape) * {"large": 1e4, "small": 1e-4}.get(kind, 1.0))
    if kind == "ties":
        array = np.rint(array)
    if kind == "special":
        odd = rng.random(shape) < 0.2
        array = np.where(odd, rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], shape), array)
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _constants(proto: ModelProto, rng: Rng) -> None:
    """Inputs become initializers, and initializers Constant nodes, Identities of others, or overridable."""
    graph = proto.graph
    for value in _some(rng, list(graph.input)):
        graph.initializer.append(numpy_helper.from_array(_values(value, rng, "normal"), value.name))
        graph.input.remove(value)
    first: list[NodeProto] = []
    for tensor in _some(rng, list(graph.initializer)):
        form = _pick(rng, ("Constant", "Identity", "listed"))
        if form == "listed":
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        elif form == "Constant":
            first.append(helper.make_node("Constant", [], [tensor.name], value=tensor))
            graph.initializer.remove(tensor)
        else:
            first.append(helper.make_node("Identity", [f"{tensor.name}/held"], [tensor.name]))
            tensor.name += "/held"
    replace_items(graph.node, [*first, *graph.node])


def _left_out(proto: ModelProto, rng: Rng) -> None:
    """Optional inputs and outputs are left out, those that are outputs of the model among them."""
    for graph in walk_graphs(proto.graph):
        read = {name for node in walk_nodes(graph) for name in node.input}
        for node in (node for node in graph.node if not holds_graphs(node)):  # a Loop would never end
            schema = schema_of(node.op_type, node.domain, _opset(proto))
            for formal, names in (
                ((schema.inputs, node.input), (schema.outputs, node.output)) if schema else ()
            ):
                for index, (port, name) in enumerate(zip(formal, names, strict=False)):
                    optional = port.option == onnx.defs.OpSchema.FormalParameterOption.Optional
                    if not optional or rng.random() < 0.5 or (names is node.output and name in read):
                        continue
                    names[index] = ""
                    if names is node.output and graph is proto.graph:
                        replace_items(graph.output, [value for value in graph.output if value.name != name])
                while names and not names[-1]:
                    del names[-1]


def _opset(proto: ModelProto) -> int:
    return next((int(o.version) for o in proto.opset_import if o.domain in ("", "ai.onnx")), 1)


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for descriptor, value in message.ListFields():
        if descriptor.type == descriptor.TYPE_MESSAGE:
            for item in value if descriptor.is_repeated else (value,):
                yield from _messages(item)


def _typed(proto: ModelProto, rng: Rng) -> None:
    """FP32 becomes another float type, everywhere."""
    to = _pick(rng, (TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.FLOAT16, TensorProto.BFLOAT16))
    dtype = helper.tensor_dtype_to_np_dtype(to)
    for message in list(_messages(proto)):
        if isinstance(message, onnx.TypeProto.Tensor) and message.elem_type == TensorProto.FLOAT:
            message.elem_type = to
        elif isinstance(message, TensorProto) and message.data_type == TensorProto.FLOAT:
            with np.errstate(over="ignore"):
                array = numpy_helper.to_array(message).astype(dtype)
            message.CopyFrom(numpy_helper.from_array(array, message.name))
        elif isinstance(message, onnx.AttributeProto) and message.name in ("to", "dtype"):
            message.i = to if message.i == TensorProto.FLOAT else message.i


def _of_another_opset(proto: ModelProto, rng: Rng) -> None:
    for opset in proto.opset_import:
        if opset.domain == "":
            opset.version = _pick(rng, range(9, 24))


def _dynamic(proto: ModelProto, rng: Rng) -> None:
    """Sizes of inputs get names, and those of the rest are unknown."""
    for value in proto.graph.input:
        for dim in _some(rng, list(value.type.tensor_type.shape.dim)):
            if dim.dim_value > 1:
                dim.dim_param = f"d{dim.dim_value}"
    for number, value in enumerate(proto.graph.output):
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"o{number}_{axis}"
    for graph in walk_graphs(proto.graph):
        del graph.value_info[:]


def _exposed(proto: ModelProto, rng: Rng) -> None:
    """Tensors between nodes are outputs, too."""
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    made = {name for node in proto.graph.node for name in node.output}
    proto.graph.output.extend(_some(rng, [v for v in inferred.value_info if v.name in made], 0.3))


def _shared(proto: ModelProto, rng: Rng) -> None:
    """Two inputs of one type are one."""
    pairs = [(a, b) for a in proto.graph.input for b in proto.graph.input if a != b and a.type == b.type]
    kept, gone = _pick(rng, pairs)
    proto.graph.node.insert(0, helper.make_node("Identity", [kept.name], [gone.name]))
    proto.graph.input.remove(gone)


def _unnamed(proto: ModelProto, rng: Rng) -> None:
    for node in _some(rng, list(walk_nodes(proto.graph))):
        node.name = ""


def _joined(proto: ModelProto, rng: Rng) -> None:
    """Another pattern that reads an output of this one, or stands beside it."""
    other = ModelProto()
    other.CopyFrom(_pick(rng, patterns()))
    for name in ("ir_version", "opset_import"):
        other.ClearField(name)
    other.ir_version = proto.ir_version
    other.opset_import.extend(proto.opset_import)
    other = onnx.compose.add_prefix(other, "z/")
    fits = [(o.name, i.name) for o in proto.graph.output for i in other.graph.input if o.type == i.type]
    links = [_pick(rng, fits)] if fits else []
    kept = [value.name for value in (*proto.graph.output, *other.graph.output)]
    proto.CopyFrom(onnx.compose.merge_models(proto, other, links, outputs=kept if links else None))
    replace_items(proto.opset_import, {opset.domain: opset for opset in proto.opset_import}.values())


# -- surroundings ----------------------------------------------------------------------------------
def _info(value: ValueInfoProto, name: str, length: int | None = 0) -> ValueInfoProto:
    """A tensor of another name; with a length, it has one more axis in front, of unknown size for None."""
    copy = ValueInfoProto(name=name)
    copy.type.CopyFrom(value.type)
    if length != 0 and copy.type.tensor_type.HasField("shape"):
        shape = copy.type.tensor_type.shape
        front = onnx.TensorShapeProto.Dimension()
        if length is not None:
            front.dim_value = length
        replace_items(shape.dim, [front, *shape.dim])
    return copy


def _wrapped(graph: GraphProto, node: NodeProto, inputs: Any, outputs: Any, outer: Any) -> None:
    graph.CopyFrom(helper.make_graph([node], "outer", inputs, outputs, outer))


def _inner(proto: ModelProto, rng: Rng) -> tuple[GraphProto, list[TensorProto], list[ValueInfoProto]]:
    """The graph without inputs, those initializers that the outer graph has, and inputs that have none."""
    body, listed = GraphProto(), {value.name for value in proto.graph.input}
    body.CopyFrom(proto.graph)
    outer = [t for t in body.initializer if t.name in listed or rng.random() < 0.5]
    held = {tensor.name for tensor in outer}
    replace_items(body.initializer, [t for t in body.initializer if t.name not in held])
    del body.input[:]
    return body, outer, [value for value in proto.graph.input if value.name not in held]


def _in_if(proto: ModelProto, rng: Rng) -> None:
    """The graph is one branch; the other is the same or has constants alone."""
    body, outer, _ = _inner(proto, rng)
    other, outputs, inputs = body, list(proto.graph.output), list(proto.graph.input)
    if rng.random() < 0.4 and all(sizes(value) is not None for value in outputs):
        values = [numpy_helper.from_array(_values(v, rng, "normal")) for v in outputs]
        infos = [_info(v, f"{v.name}/else") for v in outputs]
        nodes = [
            helper.make_node("Constant", [], [v.name], value=a) for v, a in zip(infos, values, strict=True)
        ]
        other = helper.make_graph(nodes, "else", [], infos)
    yes, no = _pick(rng, ((body, other), (other, body)))
    condition, results = f"{outputs[0].name}/if", [_info(v, f"{v.name}/c") for v in outputs]
    if rng.random() < 0.5:
        inputs.append(helper.make_tensor_value_info(condition, TensorProto.BOOL, []))
    else:
        outer.append(numpy_helper.from_array(np.array(rng.random() < 0.5), condition))
    names = [value.name for value in results]
    node = helper.make_node("If", [condition], names, "if", then_branch=yes, else_branch=no)
    _wrapped(proto.graph, node, inputs, results, outer)


def _in_loop(proto: ModelProto, rng: Rng) -> None:
    """The graph is the body of a Loop that carries one of its inputs, or none; other outputs are stacked."""
    body, outer, free = _inner(proto, rng)
    outputs, mark = list(proto.graph.output), f"{proto.graph.output[0].name}/l"
    pairs = [(i, o) for i in free for o in outputs if i.type == o.type and i.name != o.name]
    carried = _some(rng, [_pick(rng, pairs)], 0.7) if pairs else []
    outputs.sort(key=lambda v: not any(v is o for _, o in carried))
    number, go = (
        helper.make_tensor_value_info(f"{mark}/{n}", kind, [])
        for n, kind in (("i", TensorProto.INT64), ("g", TensorProto.BOOL))
    )
    body.input.extend([number, go, *(i for i, _ in carried)])
    body.node.append(helper.make_node("Identity", [go.name], [f"{mark}/n"]))
    replace_items(body.output, [_info(go, f"{mark}/n"), *outputs])
    outer.append(numpy_helper.from_array(np.array(_pick(rng, (1, 2, 3))), f"{mark}/m"))
    starts = [_info(i, f"{i.name}/s") for i, _ in carried]
    inputs = [v for v in proto.graph.input if not any(v is i for i, _ in carried)] + starts
    results = [_info(v, f"{v.name}/c", 0 if n < len(carried) else None) for n, v in enumerate(outputs)]
    names = [f"{mark}/m", "", *(v.name for v in starts)]
    node = helper.make_node("Loop", names, [v.name for v in results], "loop", body=body)
    _wrapped(proto.graph, node, inputs, results, outer)


def _in_scan(proto: ModelProto, rng: Rng) -> None:
    """The graph is the body of a Scan of some of its inputs; it captures the others."""
    body, outer, free = _inner(proto, rng)
    length = int(rng.integers(1, 4))
    scanned = _some(rng, free) or [_pick(rng, free)]
    body.input.extend(scanned)
    starts = [_info(v, f"{v.name}/s", length) for v in scanned]
    inputs = [v for v in proto.graph.input if v not in scanned] + starts
    results = [_info(v, f"{v.name}/c", length) for v in proto.graph.output]
    reads, writes = ([v.name for v in side] for side in (starts, results))
    node = helper.make_node("Scan", reads, writes, "scan", body=body, num_scan_inputs=len(scanned))
    _wrapped(proto.graph, node, inputs, results, outer)


def _in_function(proto: ModelProto, rng: Rng) -> None:
    """The graph is a local function, with one attribute by reference; it is called once or twice."""
    graph, name = proto.graph, f"F{len(proto.functions)}"
    held = _some(rng, [t for t in graph.initializer if t.name not in {v.name for v in graph.input}])
    nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in held] + list(graph.node)
    replace_items(graph.initializer, [t for t in graph.initializer if t not in held])
    inputs = list(dict.fromkeys([v.name for v in graph.input] + [t.name for t in graph.initializer]))
    if all(opset.domain != "local" for opset in proto.opset_import):
        proto.opset_import.add(domain="local", version=1)
    opsets, outputs = list(proto.opset_import), [v.name for v in graph.output]
    function = helper.make_function("local", name, inputs, outputs, nodes, opsets)
    given: dict[str, Any] = {}
    plain = [a for node in function.node for a in node.attribute if not a.HasField("g")]
    for attribute in _some(rng, plain, 0.3)[:1]:
        given["p"] = helper.get_attribute_value(attribute)
        attribute.CopyFrom(onnx.AttributeProto(name=attribute.name, type=attribute.type, ref_attr_name="p"))
        function.attribute.append("p")
    again = [_info(v, f"{v.name}/2") for v in graph.output] if rng.random() < 0.3 else []
    calls = [outputs, [v.name for v in again]][: 1 + bool(again)]
    proto.functions.append(function)
    replace_items(
        graph.node, [helper.make_node(name, inputs, names, domain="local", **given) for names in calls]
    )
    del graph.value_info[:]
    graph.output.extend(again)


SURROUNDINGS = (_in_if, _in_if, _in_loop, _in_scan, _in_function)
Disguise = Callable[[ModelProto, Rng], None]
DISGUISES: dict[Disguise, float] = {
    _joined: 0.4,
    _shared: 0.1,
    _exposed: 0.2,
    _typed: 0.25,
    _left_out: 0.3,
    _of_another_opset: 0.25,
    _constants: 0.6,
    _unnamed: 0.3,
}
"""With the share of models that each is tried on."""


@dataclass(frozen=True)
class Draw:
    """A model, and the disguises that it wears."""

    proto: ModelProto
    worn: tuple[str, ...]


def drawn(seed: int, number: int, without: Sequence[int] = ()) -> Draw:
    """The model of a number; `without` has the indices of disguises that are left out."""
    rng = np.random.default_rng([seed, number])
    proto = ModelProto()
    proto.CopyFrom(_pick(rng, patterns()))
    chosen = [disguise for disguise, share in DISGUISES.items() if rng.random() < share]
    for _ in range(int(_pick(rng, (0, 1, 1, 2)))):
        chosen += [_pick(rng, SURROUNDINGS), *_some(rng, [_constants], 0.4)]
    chosen += _some(rng, [_dynamic], 0.3)
    worn = []
    for index, disguise in enumerate(chosen):
        if index in without:
            continue
        draft = ModelProto()
        draft.CopyFrom(proto)
        try:
            disguise(draft, np.random.default_rng([seed, number, index]))
            onnx.checker.check_model(draft, full_check=True)
        except Exception:  # whatever the checker, or an edit of a graph that has no such place, raises
            continue
        proto = draft
        worn.append(f"{index} {disguise.__name__.strip('_')}")
    return Draw(proto, tuple(worn))


# -- what holds for each of them -------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """How a case ended: `ok`, `invalid` (ONNX Runtime does not run it), `refused` or `DEFECT`."""

    kind: str
    text: str = ""
    seconds: float = 0.0


def tried(work: Work) -> Outcome:
    """Tries the case of a seed and a number, without some of its disguises."""
    onnxruntime.set_default_logger_severity(4)
    walls.inside = True
    seed, number, without = work
    begin = time.process_time()
    with tempfile.TemporaryDirectory(prefix="random-graphs-") as folder:
        proto = drawn(seed, number, without).proto
        try:
            kind, text = _judged(proto, np.random.default_rng([seed, number]), Path(folder))
        except Exception:
            kind, text = "DEFECT", traceback.format_exc()
    return Outcome(kind, text, time.process_time() - begin)


def _judged(proto: ModelProto, rng: Rng, folder: Path) -> tuple[str, str]:
    try:
        source = load(_written(proto, folder) if rng.random() < 0.15 else proto)
        feeds = [_feeds(proto, rng, kind) for kind in ("normal", _pick(rng, KINDS[1:]))]
        bodies: list[GraphProto | onnx.FunctionProto] = [source.proto.graph, *source.proto.functions]
        draws = any(node.op_type in RANDOM for body in bodies for node in walk_nodes(body))
        runs = not draws and _ran(source, feeds[0]) is not None
        feeds = feeds if runs else []
        steps = [STRUCTURAL[i] for i in rng.permutation(len(STRUCTURAL))]
        context = Context(int(_pick(rng, (17, 17, 20, 23))), Target())
        current = source
        for step in STRUCTURAL:
            _holds(source, step, context, feeds)
        for step in steps:
            current = _holds(current, step, context, feeds[:1])
        if rng.random() < FIXED:
            fixed = rewriter.fix(
                source.path or proto,
                inputs=_feeds(proto, rng, "normal") if rng.random() < 0.7 else None,
                build=False,
            )
            check(fixed.model)
            lines = [one.failure for one in fixed.passes] + [r for r in fixed.repairs if "no result" in r]
            lines += [str(one) for one in fixed.checks if one.name == "structure" and one.passed is False]
            if any(lines):
                return "DEFECT", "\n".join(lines)
    except RewriterError as error:
        if isinstance(error, PassError) or not error.hint:
            return "DEFECT", f"{type(error).__name__} without help: {error}\n{traceback.format_exc()}"
        return "refused", f"{type(error).__name__}: {error}"
    return ("ok" if runs else "invalid"), ""


def _written(proto: ModelProto, folder: Path) -> Path:
    """The model as a file, with all its tensors in another."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    convert_model_to_external_data(copy, True, "w.bin", 0, True)
    onnx.save_model(copy, folder / "m.onnx")
    return folder / "m.onnx"


def _feeds(proto: ModelProto, rng: Rng, kind: str) -> dict[str, Array]:
    held = {tensor.name for tensor in proto.graph.initializer}
    return {v.name: _values(v, rng, kind) for v in proto.graph.input if v.name not in held}


def _ran(source: Model, feeds: dict[str, Array]) -> list[Array] | None:
    """Results; None if ONNX Runtime does not run the model."""
    try:
        return run(source, feeds)
    except Exception:
        return None


def _holds(source: Model, step: Pass, context: Context, feeds: list[dict[str, Array]]) -> Model:
    """The model after a pass, which keeps its results and does not change it twice."""
    result, (report,) = Driver().run(source, [step], context)
    if not report.changes:
        assert result is source, f"{step.name}: no change, and another model"
        return source
    declined = {refusal.node for refusal in report.refusals}  # a change may have brought shapes to light
    _, (second,) = Driver().run(result, [step], context)
    again = [change for change in second.changes if change.node not in declined]
    assert not again, f"{step.name} changes its own result: {again}"
    # on data that leave masks open; and a float64 sum keeps the scores that a mask of -1e9 absorbs in float32
    if step.name == "demote-float64" or any("relies on" in change.what for change in report.changes):
        return result
    allowed = AMPLIFIED * step.exactness.tolerance + (ROUNDED if _rounds(source) else 0.0)
    for one in feeds:
        if (before := _ran(source, one)) is None:
            continue
        try:
            after = run(result, one)
        except NoKernel:  # of a newer opset
            continue
        for number, (a, b) in enumerate(zip(before, after, strict=True)):
            where = f"{step.name}, output {number}: {a.ravel()[:8]} became {b.ravel()[:8]}: {report.changes}"
            assert (a.dtype, a.shape) == (b.dtype, b.shape), where
            if not allowed or a.dtype.kind in "OSUb":
                assert _same_bits(a, b), where
            elif one is feeds[0] and np.isfinite(a.astype(np.float64)).all():
                pair = Pair(a, b)
                assert pair.finite and pair.relative_l2 <= allowed, where
    return result


def _rounds(source: Model) -> bool:
    """True if a tensor is FP16 or BF16: ONNX Runtime rounds it or not, as it finds kernels."""
    return any(t.dtype in LOWER for scope in source.facts().scopes for t in scope.values())


def _same_bits(a: Array, b: Array) -> bool:
    """True if two arrays are equal to the sign of a zero; any NaN equals any other."""
    if a.dtype.kind in "OSUbiu":
        return bool(np.array_equal(a, b))
    one, other = a.astype(np.float64), b.astype(np.float64)
    return bool(np.array_equal(one, other, equal_nan=True)) and bool(
        (np.signbit(one) == np.signbit(other))[~np.isnan(one)].all()
    )


def over_cases(work: Iterable[Work], children: int = PROCESSES) -> Iterator[tuple[Work, Outcome]]:
    """The outcomes of cases; one that ends its child is a defect."""
    for item, answer in over(work, tried, children=children, timeout_s=CASE_SECONDS):
        yield item, Outcome("DEFECT", answer.how) if isinstance(answer, Crash) else answer


def findings(count: int, seed: int, first: int, counts: Counter[str]) -> Iterator[str]:
    """Tries cases from the number `first` on, counts them by kind, and yields the defects, reduced."""
    for work, outcome in over_cases((seed, number, ()) for number in range(first, first + count)):
        counts[outcome.kind] += 1
        counts["slow"] += outcome.seconds > SLOW_SECONDS
        if outcome.kind == "DEFECT":
            least, outcome = _smallest(work, outcome)
            draw = drawn(*least)
            yield f"== {least}: {', '.join(draw.worn)}\n{_text(draw.proto)}\n{outcome.text}\n"


def _smallest(work: Work, outcome: Outcome) -> tuple[Work, Outcome]:
    """The case without the disguises that it is as wrong without, and how."""
    seed, number, without = work
    for index in reversed([int(worn.split()[0]) for worn in drawn(*work).worn]):
        (smaller,) = over_cases([(seed, number, (*without, index))], children=1)
        if smaller[1].kind == "DEFECT":
            (_, _, without), outcome = smaller
    return (seed, number, without), outcome


def _text(proto: ModelProto) -> str:
    try:
        return onnx_text.render(proto)
    except Exception as error:
        return f"no text: {error!r}"


def main(count: int, seed: int, first: int = 0) -> int:
    """Prints the defects of `count` cases from the number `first` on, and how the cases ended."""
    counts: Counter[str] = Counter()
    for finding in findings(count, seed, first, counts):
        sys.stdout.write(finding + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(counts)}\n")
    return counts["DEFECT"]


if __name__ == "__main__":
    import random_graphs  # children import its functions by this name

    sys.exit(random_graphs.main(*map(int, sys.argv[1:])))
