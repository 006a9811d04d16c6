"""upgrade-opset: equal results for every operator that changed, and refusals by name."""

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import apply, graph, random_feeds, run

from rewriter.ir.model import Array, Model, load
from rewriter.passes.base import Context
from rewriter.passes.upgrade_opset import UpgradeOpset

LINE = re.compile(r"(\d+) (.+?): (.+)")
OPERATORS = [
    (int(opset), name, text)
    for opset, name, text in LINE.findall(Path(__file__).with_name("operators.txt").read_text())
]
"""Operators that changed: the operator set that a graph is written for, its name, and the graph."""


def _source(opset: int, text: str) -> Model:
    """The model of a graph whose outputs may stand without types."""
    outputs = text.split("=> (")[1].split(")")[0]
    typed = ", ".join(o if " " in o else f"float {o}" for o in outputs.split(", "))
    header = f'<ir_version: 4, opset_import: ["" : {opset}]> g '
    proto = onnx.parser.parse_model(header + text.replace(f"=> ({outputs})", f"=> ({typed})"))
    for value, output in zip(proto.graph.output, outputs.split(", "), strict=True):
        if " " not in output:
            value.ClearField("type")
    return load(onnx.shape_inference.infer_shapes(proto))


def _equal(ours: list[Array], theirs: list[Array]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("opset", "text", "target"),
    [
        pytest.param(opset, text, target, id=f"{name} {opset} at {target}")
        for opset, name, text in OPERATORS
        for target in (17, 18, 20, 21, 22, 23)
        if (opset < 17 if target == 17 else opset >= 13 or name.startswith(("Resize", "Hardmax")))
    ],
)
def test_bit_equal(opset: int, text: str, target: int) -> None:
    source = _source(opset, text)
    result, report = apply(UpgradeOpset(), source, Context(opset=target))
    assert not report.refusals
    assert result.opset == max(target, opset)
    assert target > 17 or result.proto.ir_version >= 8
    feeds = random_feeds(source)
    _equal(run(result, feeds), run(source, feeds))


def test_names_and_metadata_survive() -> None:
    source = _source(
        11,
        """(float[2,3,4] x) => (y) {
            [first] s = Softmax(x) [second] u = Unsqueeze<axes = [0]>(s) [third] y = Relu(u) }""",
    )
    node = source.proto.graph.node[1]
    node.doc_string = "line 12 of model.py"
    node.metadata_props.add(key="scope", value="head")
    source.proto.metadata_props.add(key="author", value="someone")
    source.proto.producer_name = "exporter"
    source.proto.graph.value_info[0].doc_string = "probabilities"
    result, _ = apply(UpgradeOpset(), source)
    by_name = {n.name: n for n in result.proto.graph.node}
    assert by_name["first"].output[0] == "s"
    assert by_name["second"].doc_string == "line 12 of model.py"
    assert [(p.key, p.value) for p in by_name["second"].metadata_props] == [("scope", "head")]
    assert by_name["third"] == source.proto.graph.node[2]
    assert result.proto.metadata_props == source.proto.metadata_props
    assert result.proto.producer_name == "exporter"
    assert result.proto.graph.value_info == source.proto.graph.value_info
    assert all(n.name for n in result.proto.graph.node)


def test_weights_stay_detached() -> None:
    body = "{ m = MatMul(x, w) y = Unsqueeze<axes = [0]>(m) }"
    source = _source(11, "(float[2,3] x, float[3,400] w) => (y) " + body)
    del source.proto.graph.input[1]
    source.proto.graph.initializer.append(source.detached_tensor("w", np.ones((3, 400), np.float32)))
    result, _ = apply(UpgradeOpset(), source)
    assert result.weights["w"] is source.weights["w"]
    feeds = random_feeds(source)
    _equal(run(result, feeds), run(source, feeds))


def test_group_normalization_18_loads_though_the_checker_refuses_it() -> None:
    source = graph(
        """g (float[2,4,3,3] x, float[2] s, float[2] b) => (float[2,4,3,3] y)
        { y = GroupNormalization<num_groups = 2>(x, s, b) }""",
        opset=18,
    )
    assert source.opset == 18


def test_many_nodes_go_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "{ s = Softmax(x) u = Unsqueeze<axes = [0]>(s) y = ReduceSum<axes = [1]>(u) }"
    source = _source(11, "(float[2,3,4] x) => (y) " + body)
    calls: list[int] = []
    convert = onnx.version_converter.convert_version

    def counted(proto: onnx.ModelProto, target: int) -> onnx.ModelProto:
        calls.append(len(proto.graph.node))
        return convert(proto, target)

    monkeypatch.setattr(onnx.version_converter, "convert_version", counted)
    monkeypatch.setattr("rewriter.base.sandbox.inside", True)  # no child, whose calls are not counted here
    result, _ = apply(UpgradeOpset(), source)
    assert calls == [3]
    feeds = random_feeds(source)
    _equal(run(result, feeds), run(source, feeds))
