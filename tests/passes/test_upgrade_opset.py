"""upgrade-opset: equal results for every operator that changed, and refusals by name."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import apply, graph, random_feeds, run

from rewriter.ir.base import Context
from rewriter.ir.model import Array, Model, load
from rewriter.passes.upgrade_opset import UpgradeOpset

NORM = """(float[2,3,4] x, float[3] a, float[3] b, float[3] c, float[3] d) => (y)
    { v = Abs(d) y = BatchNormalization(x, a, b, c, v) }"""
ROI = "<float[1,4] r = {1, 1, 5, 6}, int64[1] b = {0}>"
ENLARGE = "<float[4] s = {1, 1, 1.5, 1.5}>"
REDUCE = "<float[4] s = {1, 1, 0.7, 0.75}>"

OPERATORS = [
    # opset, identifier, graph
    (8, "Upsample nearest", "(float[1,2,3,4] x) => (y) { y = Upsample<scales = [1.0,1.0,2.0,2.0]>(x) }"),
    (
        8,
        "Upsample linear",
        '(float[1,2,3,4] x) => (y) { y = Upsample<mode = "linear", scales = [1.0,1.0,2.0,2.0]>(x) }',
    ),
    (9, "Upsample nearest", f"(float[1,2,3,4] x) => (y) {ENLARGE} {{ y = Upsample(x, s) }}"),
    (9, "Upsample linear", f'(float[1,2,3,4] x) => (y) {ENLARGE} {{ y = Upsample<mode = "linear">(x, s) }}'),
    (
        9,
        "Upsample, scales computed",
        """(float[1,2,3,4] x, float[4] t) => (y) <float[4] one = {1,1,1,1}>
        { m = Max(t, one) s = Min(m, one) y = Upsample(x, s) }""",
    ),
    (10, "Resize nearest, enlarging", f"(float[1,2,3,4] x) => (y) {ENLARGE} {{ y = Resize(x, s) }}"),
    (10, "Resize nearest, reducing", f"(float[1,2,6,8] x) => (y) {REDUCE} {{ y = Resize(x, s) }}"),
    (10, "Resize linear", f'(float[1,2,3,4] x) => (y) {ENLARGE} {{ y = Resize<mode = "linear">(x, s) }}'),
    (
        10,
        "Resize linear, reducing",
        f'(float[1,2,6,8] x) => (y) {REDUCE} {{ y = Resize<mode = "linear">(x, s) }}',
    ),
    (
        11,
        "Resize cubic",
        f"(float[1,2,6,8] x) => (y) {REDUCE.replace('<', '<float[0] r = {}, ')} "
        '{ y = Resize<mode = "cubic">(x, r, s) }',
    ),
    (
        11,
        "Resize with a roi that is read",
        """(float[1,2,6,8] x) => (y)
        <float[8] r = {0, 0, 0.1, 0.1, 1, 1, 0.8, 0.9}, float[4] s = {1, 1, 0.7, 0.75}>
        { y = Resize<mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize">(x, r, s) }""",
    ),
    (
        13,
        "Resize by sizes",
        '(float[1,2,6,8] x) => (y) <int64[4] z = {1,2,4,6}> { y = Resize<mode = "linear">(x, "", "", z) }',
    ),
    (7, "BatchNormalization", NORM),
    (9, "BatchNormalization", NORM),
    (13, "BatchNormalization", NORM),
    (7, "Dropout", "(float[2,3,4] x) => (y) { y = Dropout<ratio = 0.3>(x) }"),
    (10, "Dropout, mask unread", "(float[2,3,4] x) => (y) { y, m = Dropout(x) }"),
    (9, "Softmax, default axis", "(float[2,3,4] x) => (y) { y = Softmax(x) }"),
    (11, "Softmax, dynamic", "(float[N,3,M] x) => (y) { y = Softmax(x) }"),
    (11, "Softmax, last axis", "(float[2,3,4] x) => (y) { y = Softmax<axis = 2>(x) }"),
    (11, "Softmax, negative axis", "(float[2,3,4] x) => (y) { y = Softmax<axis = -2>(x) }"),
    (11, "LogSoftmax", "(float[2,3,4] x) => (y) { y = LogSoftmax(x) }"),
    (11, "Hardmax, default axis", "(float[2,3] x) => (y) { y = Hardmax(x) }"),
    (11, "Hardmax, last axis", "(float[2,3,4] x) => (y) { y = Hardmax<axis = 2>(x) }"),
    (9, "Pad with a value", "(float[2,3] x) => (y) { y = Pad<pads = [1,1,1,1], value = 2.5>(x) }"),
    (10, "Pad reflecting", '(float[2,3] x) => (y) { y = Pad<pads = [1,1,1,1], mode = "reflect">(x) }'),
    (10, "Pad of float16", "(float16[2,3] x) => (y) { y = Pad<pads = [1,1,1,1], value = 2.5>(x) }"),
    (9, "Slice", "(float[4,5] x) => (y) { y = Slice<axes = [0,1], starts = [1,0], ends = [3,-2]>(x) }"),
    (9, "Slice without axes", "(float[4,5] x) => (y) { y = Slice<starts = [1], ends = [3]>(x) }"),
    (9, "Clip", "(float[4,5] x) => (y) { y = Clip<min = -0.5, max = 0.5>(x) }"),
    (10, "Clip, one bound", "(float[4,5] x) => (y) { y = Clip<max = 0.3>(x) }"),
    (10, "Clip of float16", "(float16[4,5] x) => (y) { y = Clip<min = -0.5, max = 0.5>(x) }"),
    (9, "TopK", "(float[4,5] x) => (y, i) { y, i = TopK<k = 2, axis = 0>(x) }"),
    (10, "TopK", "(float[4,5] x) => (y, i) <int64[1] k = {2}> { y, i = TopK(x, k) }"),
    (11, "ReduceSum", "(float[2,3,4] x) => (y) { y = ReduceSum<axes = [-1,1]>(x) }"),
    (9, "ReduceSum over all", "(float[2,3,4] x) => (y) { y = ReduceSum<keepdims = 0>(x) }"),
    (13, "ReduceMean", "(float[2,3,4] x) => (y) { y = ReduceMean<axes = [-1,1]>(x) }"),
    (13, "ReduceL2", "(float[2,3,4] x) => (y) { y = ReduceL2<axes = [2], keepdims = 0>(x) }"),
    (9, "Squeeze", "(float[2,1,4] x) => (y) { y = Squeeze<axes = [1]>(x) }"),
    (9, "Squeeze of all ones", "(float[2,1,4] x) => (y) { y = Squeeze(x) }"),
    (11, "Unsqueeze", "(float[2,4] x) => (y) { y = Unsqueeze<axes = [-1]>(x) }"),
    (9, "Split", "(float[2,6] x) => (y, z) { y, z = Split<axis = 1, split = [2,4]>(x) }"),
    (13, "Split in equal parts", "(float[2,6] x) => (y, z) { y, z = Split<axis = 1>(x) }"),
    (16, "GridSample bilinear", "(float[1,2,5,5] x, float[1,3,3,2] q) => (y) { y = GridSample(x, q) }"),
    (
        16,
        "GridSample bicubic",
        """(float[1,2,5,5] x, float[1,3,3,2] q) => (y)
        { y = GridSample<mode = "bicubic", align_corners = 1>(x, q) }""",
    ),
    (
        10,
        "RoiAlign",
        f"(float[1,2,8,8] x) => (y) {ROI} {{ y = RoiAlign<output_height = 3, output_width = 3>(x, r, b) }}",
    ),
    (9, "Cast", "(float[2,3] x) => (y) { y = Cast<to = 7>(x) }"),
    (11, "CumSum", "(float[2,3] x) => (y) <int32 a = {1}> { y = CumSum<exclusive = 1>(x, a) }"),
    (9, "ArgMax", "(float[2,3] x) => (y) { y = ArgMax<axis = 1>(x) }"),
    (
        10,
        "MaxPool, rounding up",
        "(float[1,2,5,5] x) => (y) { y = MaxPool<kernel_shape = [2,2], ceil_mode = 1>(x) }",
    ),
    (7, "Gemm", "(float[2,3] x, float[3,4] w, float[4] b) => (y) { y = Gemm(x, w, b) }"),
    (7, "PRelu", "(float[2,3] x, float[3] w) => (y) { y = PRelu(x, w) }"),
    (
        9,
        "Scatter",
        "(float[4,3] x) => (y) <int64[1,3] i = {2,0,1}, float[1,3] u = {1,2,3}> { y = Scatter(x, i, u) }",
    ),
    (
        10,
        "DequantizeLinear",
        """(float[2,3] x) => (y) <float s = {0.1}, uint8 z = {128}>
        { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }""",
    ),
    (9, "OneHot", "(int64[2] x) => (y) <int64 d = {3}, float[2] v = {0, 1}> { y = OneHot(x, d, v) }"),
    (
        18,
        "GroupNormalization",
        """(float[2,4,3,3] x, float[4] s, float[4] b) => (float[2,4,3,3] y)
        { y = GroupNormalization<num_groups = 4>(x, s, b) }""",
    ),
    (17, "DFT", "(float[1,8,1] x) => (y) { y = DFT<onesided = 1>(x) }"),
]


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
    ("opset", "text"),
    [pytest.param(opset, text, id=f"{name} {opset}") for opset, name, text in OPERATORS if opset < 17],
)
def test_bit_equal_at_17(opset: int, text: str) -> None:
    source = _source(opset, text)
    result, report = apply(UpgradeOpset(), source)
    assert not report.refusals
    assert result.opset == 17
    assert result.proto.ir_version >= 8
    feeds = random_feeds(source)
    _equal(run(result, feeds), run(source, feeds))


@pytest.mark.parametrize("target", [18, 20, 21, 22, 23])
@pytest.mark.parametrize(
    ("opset", "text"),
    [
        pytest.param(opset, text, id=f"{name} {opset}")
        for opset, name, text in OPERATORS
        if opset >= 13 or name.startswith(("Resize", "Hardmax"))
    ],
)
def test_bit_equal_above_17(opset: int, text: str, target: int) -> None:
    source = _source(opset, text)
    result, report = apply(UpgradeOpset(), source, Context(opset=target))
    assert not report.refusals
    assert result.opset == max(target, opset)
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
    monkeypatch.setattr("rewriter.ir.children.inside", True)  # no child, whose calls are not counted here
    result, _ = apply(UpgradeOpset(), source)
    assert calls == [3]
    feeds = random_feeds(source)
    _equal(run(result, feeds), run(source, feeds))
