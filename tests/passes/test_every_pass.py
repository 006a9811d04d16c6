"""The contract of every pass: the promises of its class, on its own example and on every case model."""

import importlib
import inspect
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_text
import pytest
from graphs import apply, graph, random_feeds, run, same_results
from onnx import helper
from onnx.defs import OpSchema
from paths import MODELS
from written_norms import units

import rewriter.passes
from rewriter.hazards.planning.free_fp32 import PROBE
from rewriter.ir.graph import TAG, GraphEditor, display_name
from rewriter.ir.graph.match import produced
from rewriter.ir.model import Array, Model, load, walk_graphs
from rewriter.ir.model.graphs import schema_of
from rewriter.ir.model.tensors import FLOATS
from rewriter.passes.base import Change, Context, Event, Exactness, GraphPass, ModelPass, Pass
from rewriter.pipeline.driver import Driver
from rewriter.pipeline.text import parse
from rewriter.runtime.metrics.tolerances import TOLERANCES
from rewriter.target import Target


def _discovered() -> dict[str, type[Pass]]:
    """Every pass by the name of the file that defines it."""
    found: dict[str, type[Pass]] = {}
    for info in pkgutil.iter_modules(rewriter.passes.__path__):
        if info.name == "base":  # what a pass is
            continue
        module = importlib.import_module(f"rewriter.passes.{info.name}")
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, Pass) and kind.__module__ == module.__name__:
                assert info.name not in found, f"{info.name} holds two passes"
                found[info.name] = kind
    return found


FILES = _discovered()
EVERY = [pytest.param(kind, id=kind.name) for kind in FILES.values()]
STRUCTURAL = [kind() for kind in rewriter.passes.ALL if kind.keeps_signature]
CASES = [pytest.param(path, id=path.stem) for path in sorted(MODELS.glob("*.onnx"))]
Feeds = dict[str, Array]
every_pass = pytest.mark.parametrize("kind", EVERY)


def test_all_lists_every_pass_once() -> None:
    assert Counter(rewriter.passes.ALL) == Counter(FILES.values()), "see rewriter/passes/__init__.py"


@pytest.mark.parametrize(("file", "kind"), [pytest.param(f, k, id=f) for f, k in FILES.items()])
def test_a_pass_is_a_frozen_dataclass_named_after_its_file(file: str, kind: type[Pass]) -> None:
    assert kind.name == file.replace("_", "-")
    assert kind.__name__ == "".join(part.capitalize() for part in file.split("_"))
    assert issubclass(kind, GraphPass) or issubclass(kind, ModelPass)
    assert is_dataclass(kind)
    kind()  # every option has a default
    here = Path(__file__).parent
    tested = (here / "text" / file).is_dir() or (here / f"test_{file}.py").is_file()
    assert tested, f"write graphs into tests/passes/text/{file}/becomes.txt and stays.txt"


@every_pass
def test_it_says_why_it_exists_and_what_its_options_do(kind: type[Pass]) -> None:
    text = kind.__doc__ or ""
    assert not text.startswith(f"{kind.__name__}("), "dataclass made this docstring"
    assert len(text.split()) > 20, "its docstring gives the reason in more than 20 words"
    for option in fields(kind):
        assert f"{option.name}:" in text, "its docstring explains every field under `Options:`"
    assert isinstance(kind.exactness, Exactness)
    assert kind.exactness.source
    assert kind.exactness.tolerance <= TOLERANCES["fp16"].value, "no pass may cost more than FP16 itself"


def _listed_as_inputs(source: onnx.ModelProto) -> onnx.ModelProto:
    """Initializers that callers may override, as IR 3 had it."""
    for tensor in source.graph.initializer:
        source.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return source


def _as_constant_nodes(source: onnx.ModelProto) -> onnx.ModelProto:
    nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in source.graph.initializer]
    nodes += [onnx.NodeProto.FromString(n.SerializeToString()) for n in source.graph.node]
    del source.graph.initializer[:], source.graph.node[:]
    source.graph.node.extend(nodes)
    return source


def _through_identity(source: onnx.ModelProto) -> onnx.ModelProto:
    """Initializers behind Identity nodes, as exporters write shared ones."""
    nodes = []
    for tensor in source.graph.initializer:
        nodes.append(helper.make_node("Identity", [f"{tensor.name}/shared"], [tensor.name]))
        tensor.name += "/shared"
    nodes += [onnx.NodeProto.FromString(n.SerializeToString()) for n in source.graph.node]
    del source.graph.node[:]
    source.graph.node.extend(nodes)
    return source


def _in_a_branch(source: onnx.ModelProto) -> onnx.ModelProto:
    """The whole graph as both branches of an If."""
    inside = onnx.GraphProto()
    inside.CopyFrom(source.graph)
    del inside.input[:]
    outputs = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in source.graph.output]
    for value in outputs:
        value.name += "/chosen"
    inputs = [*source.graph.input, helper.make_tensor_value_info("condition", onnx.TensorProto.BOOL, [])]
    chosen = [v.name for v in outputs]
    node = helper.make_node("If", ["condition"], chosen, then_branch=inside, else_branch=inside)
    made = helper.make_graph([node], "outer", inputs, outputs)
    source.graph.CopyFrom(made)
    return source


VARIANTS = [
    pytest.param(lambda source: source, id="as it stands"),
    pytest.param(_listed_as_inputs, id="initializers listed as inputs"),
    pytest.param(_as_constant_nodes, id="Constant nodes"),
    pytest.param(_through_identity, id="constants through Identity"),
    pytest.param(_in_a_branch, id="in a branch"),
]


def _sides(kind: type[Pass]) -> tuple[Model, Model]:
    """The example of a pass before and after it."""
    before, after = (load(onnx_text.parse(text)) for text in onnx_text.sides(kind.example))
    return before, after


@every_pass
def test_the_example_becomes_what_it_shows(kind: type[Pass]) -> None:
    source, wanted = _sides(kind)
    step = kind(**kind.example_options)
    result, report = apply(step, source, _context(wanted.opset))
    assert report.changes, "it changes nothing in its own example"
    assert result.opset == wanted.opset
    assert _operators(result) == _operators(wanted)
    assert not kind.refittable or _weights(source) <= _weights(result), "its class has `refittable = False`"


def _weights(source: Model) -> set[str]:
    """Names of the float initializers that hold several numbers."""
    tensors = (t for t in source.proto.graph.initializer if t.data_type in FLOATS)
    return {t.name for t in tensors if np.unique(source.array(t)).size > 1}


@every_pass
def test_weights_stay_outside_the_proto(kind: type[Pass], monkeypatch: pytest.MonkeyPatch) -> None:
    """None is copied that stays as it is, and none can be written to."""
    monkeypatch.setattr("rewriter.ir.model.model.DETACH_BYTES", 0)
    before, after = _sides(kind)
    for tensor in before.proto.graph.initializer:
        tensor.CopyFrom(before.detached_tensor(tensor.name, before.array(tensor)))
    given = dict(before.weights)
    result, _ = apply(kind(**kind.example_options), before, _context(after.opset))
    assert before.weights.keys() == given.keys()
    assert result.weights.keys() == {t.name for t in result.proto.graph.initializer}
    for name, array in result.weights.items():
        assert not array.flags.writeable
        assert array is given.get(name) or array.tobytes() != given.get(name, np.array(())).tobytes()


@every_pass
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_example_keeps_the_contract(
    kind: type[Pass], variant: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> None:
    before, after = _sides(kind)
    source = load(variant(before.whole()))
    feeds = random_feeds(source)
    step = kind(**kind.example_options)
    _hold_to_contract(step, source, feeds, run(source, feeds), after.opset)


def _disguised(source: Model) -> Iterator[tuple[str, Model]]:
    """The model with one more optional input, or another attribute, in each operator of its main graph.

    Of the values to try, the first with which ONNX Runtime gives other results counts.
    """
    types, seen = source.facts().main, set[str]()
    for number, node in enumerate(source.proto.graph.node):
        schema = schema_of(node.op_type, node.domain, source.opset)
        if schema is None or node.op_type in seen or not node.input:
            continue
        seen.add(node.op_type)
        given = len([name for name in node.input if name])
        for index, formal in enumerate(schema.inputs[given:], given):
            if formal.option == OpSchema.FormalParameterOption.Optional:
                dtype = types[node.input[0]].dtype if formal.type_str == schema.inputs[0].type_str else 7
                yield from _first(source, number, formal.name, partial(_with_input, index, dtype), INPUTS)
        for name, declared in schema.attributes.items():
            if name not in {attribute.name for attribute in node.attribute}:
                values = ATTRIBUTES.get(declared.type, ())
                yield from _first(source, number, name, partial(_with_attribute, name), values)


INPUTS = [np.full(shape, 0.3) for shape in ((), (1,), (2,), (3,), (4,), (5,), (8,))]
ATTRIBUTES: dict[Any, tuple[Any, ...]] = {
    OpSchema.AttrType.INT: (1, 0, 2),
    OpSchema.AttrType.INTS: ([1] * 4, [2] * 2, [2], [1] * 2, [2, 1, 0]),
    OpSchema.AttrType.FLOAT: (0.3,),
    OpSchema.AttrType.STRING: ("edge", "nearest", "tanh", "SAME_UPPER"),
}


def _with_input(index: int, dtype: int, value: Array, graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    array = (value if dtype in FLOATS else value * 10).astype(helper.tensor_dtype_to_np_dtype(dtype))
    graph.initializer.append(onnx.numpy_helper.from_array(array, "disguise"))
    node.input.extend([""] * (index - len(node.input)))
    node.input.insert(index, "disguise")


def _with_attribute(name: str, value: Any, _: onnx.GraphProto, node: onnx.NodeProto) -> None:
    node.attribute.append(helper.make_attribute(name, value))


def _first(
    source: Model, number: int, what: str, change: Callable[..., None], values: Sequence[Any]
) -> Iterator[tuple[str, Model]]:
    feeds = random_feeds(source)
    plain = run(source, feeds)
    for value in values:
        proto = source.whole()
        change(value, proto.graph, proto.graph.node[number])
        with suppress(Exception):  # no value of this operator
            for output in proto.graph.output:
                output.type.tensor_type.ClearField("shape")
            results = run(load(proto), feeds)
            for output, result in zip(proto.graph.output, results, strict=True):
                output.CopyFrom(
                    helper.make_tensor_value_info(
                        output.name, output.type.tensor_type.elem_type, result.shape
                    )
                )
            onnx.checker.check_model(proto, full_check=True)
            if not all(np.array_equal(a, b) for a, b in zip(plain, results, strict=True)):
                yield f"{what} of {proto.graph.node[number].op_type}", load(proto)
                return


@dataclass(frozen=True)
class FoldPad(GraphPass):
    """A pass that does not look at the value of a Pad."""

    example = """
         g (float[1,1,4,4] x) => (float[1,1,4,4] y)
         <float[1,1,3,3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}, int64[8] pads = {0, 0, 1, 1, 0, 0, 1, 1}> {
        -    p = Pad(x, pads)
        -    y = Conv(p, w)
        +    y = Conv<pads = [1, 1, 1, 1]>(x, w)
         }"""
    name = "fold-pad"

    def rewrite(self, graph: GraphEditor, context: Context) -> Iterator[Event]:
        for conv in graph.nodes:
            pad = produced(graph, conv.input[0], "Pad")
            if pad is not None:
                new = graph.make("Conv", [pad.input[0], *conv.input[1:]], [conv.output[0]], pads=[1] * 4)
                graph.replace_producer(conv.output[0], new)
                yield Change(display_name(conv), "pads by itself")


def test_a_pass_that_ignores_an_optional_input_is_caught() -> None:
    with pytest.raises(AssertionError, match="with another constant_value of Pad"):
        test_no_optional_input_or_attribute_is_ignored(FoldPad)


@every_pass
def test_no_optional_input_or_attribute_is_ignored(kind: type[Pass]) -> None:
    before, after = _sides(kind)
    step = kind(**kind.example_options)
    for what, source in _disguised(before):
        feeds = random_feeds(source)
        try:
            _hold_to_contract(step, source, feeds, run(source, feeds), after.opset)
        except AssertionError as error:
            raise AssertionError(f"with another {what}") from error


@every_pass
def test_a_graph_without_the_pattern_stays_byte_identical(kind: type[Pass]) -> None:
    source = graph(
        """
        g (int64[2,3] x, bool c) => (int64[2,3] y) <int64[3] w = {1, 2, 3}> {
            a = Add(x, w)
            y = If (c) <
                then_branch = t () => (int64[2,3] u) { u = Mul(a, w) },
                else_branch = e () => (int64[2,3] v) { v = Neg(a) }
            >
        }"""
    )
    bytes_before = source.whole().SerializeToString(deterministic=True)
    result, report = apply(kind(), source)
    assert result is source
    assert not report.changes
    assert source.whole().SerializeToString(deterministic=True) == bytes_before


@pytest.mark.parametrize("path", CASES)
def test_every_case_keeps_its_results_after_each_pass(path: Path) -> None:
    source = load(path)
    samples = path.with_suffix(".npz")
    feeds = dict(np.load(samples)) if samples.exists() else random_feeds(source)
    results = run(source, feeds)
    for step in STRUCTURAL:
        source, results = _hold_to_contract(step, source, feeds, results)


FOUND = {
    "fold-strides": "resnet=1 mobilenet_v2=0 rtdetr=0 vit=0 nafnet=0 convnext=0",
    "unfold-patches": "vit=1 vit_massive=1 swin=1 convnext=1 nafnet=5 resnet=0 mobilenet_v2=0",
    "unfold-patches{depth=1}": "vit=1 vit_massive=1 swin=1 convnext=4 nafnet=7 resnet=0 mobilenet_v2=0",
    "upgrade-opset,simplify,merge-projections": "vit=12 bert=2 swin=4 t5_encoder=2 llama_block=4",
    "upgrade-opset,fuse-layer-norm": "vit=25 vit_massive=25 bert=5 convnext=10 swin=11 rtdetr=9",
}
"""Changes by the last pass on case models. `simplify` folds the computed targets of heads."""


@pytest.mark.parametrize(
    ("passes", "name", "count"),
    [(passes, *case.split("=")) for passes, row in FOUND.items() for case in row.split()],
)
def test_all_that_a_case_has_is_found(passes: str, name: str, count: str) -> None:
    result, reports = Driver().run(load(MODELS / f"{name}.onnx"), parse(passes), Context())
    assert (len(reports[-1].changes), reports[-1].refusals) == (int(count), ())
    if "merge-projections" in passes:  # Q, K and V have heads; a Llama's gate and up have none
        heads = sum("heads" in change.what for change in reports[-1].changes)
        assert heads == int(count) - (2 if name == "llama_block" else 0)
    assert "layer-norm" not in passes or units(result) == []


def _hold_to_contract(
    step: Pass, source: Model, feeds: Feeds, wanted: list[Array], opset: int = 17
) -> tuple[Model, list[Array]]:
    """The model after a pass, with its results."""
    context, untouched = _context(opset), source.copy()
    result, report = apply(step, source, context)
    assert source.same_as(untouched), f"{step.name} changed the model it was given"
    if not report.changes:
        assert result is source
        return source, wanted
    onnx.checker.check_model(result.whole(), full_check=True)
    again, second = apply(step, result, context)
    assert again is result, f"{step.name} changes its own result"
    assert not second.changes
    assert not step.keeps_signature or result.signature == source.signature
    assert step.imported or not _untagged(source, result, step)
    results = run(result, feeds)
    same_results(step.exactness, wanted, results)
    return result, results


def _context(opset: int) -> Context:
    """A target that gains by every pass."""
    return Context(opset, Target(answers={PROBE: "fp32", "pointwise-conv-heads": "wrong"}))


def _untagged(source: Model, result: Model, step: Pass) -> Counter[str]:
    """Operators of nodes that are new and do not say which pass made them.

    Counted, for a node that was there before may have other inputs and outputs now.
    """
    untagged = [
        n for n in _nodes(result) if (TAG, step.name) not in {(p.key, p.value) for p in n.metadata_props}
    ]
    return Counter(n.op_type for n in untagged) - Counter(n.op_type for n in _nodes(source))


def _nodes(source: Model) -> list[onnx.NodeProto]:
    functions = [node for function in source.proto.functions for node in function.node]
    return [node for inner in walk_graphs(source.proto.graph) for node in inner.node] + functions


def _operators(source: Model) -> Counter[str]:
    return Counter(node.op_type for node in _nodes(source) if node.op_type != "Constant")
