"""`rewriter.fix` as a library: what it writes, what it refuses, what it says."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graphs import graph, with_weights
from nightly import some
from paths import ROOT
from tables import values

import rewriter
from rewriter.base.errors import UsageError
from rewriter.ir.model import Array, Model, load, save
from rewriter.ir.model.split import split_at_plugins
from rewriter.verification.verdict import PLUGINS


def small() -> rewriter.Model:
    return graph("""
        g (float[2,3] x) => (float[2,4] y) <float[3,4] w = {1,2,3,4,5,6,7,8,9,10,11,12}> {
            m = MatMul(x, w) y = Relu(m) }""")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(small(), tmp_path / "model.onnx")


def quick(source: object, output: Path | None = None, **options: Any) -> rewriter.FixResult:
    """`fix` without the build, which test_cases.py makes for every case."""
    return rewriter.fix(source, output, build=False, **options)


@pytest.mark.parametrize("kind", ["path", "text", "proto", "graphsurgeon"])
def test_takes_a_path_a_proto_or_a_graphsurgeon_graph(kind: str, path: Path) -> None:
    proto = onnx.load(path)
    source = {"path": path, "text": str(path), "proto": proto, "graphsurgeon": gs.import_onnx(proto)}[kind]
    result = quick(source)
    assert result.verdict is not None and result.verdict.passed
    assert result.output is None
    assert result.proto.graph.initializer[0].data_type == onnx.TensorProto.FLOAT16


def test_a_proto_that_is_passed_in_is_not_changed() -> None:
    proto = small().whole()
    before = proto.SerializeToString(deterministic=True)
    quick(proto)
    assert proto.SerializeToString(deterministic=True) == before


def test_a_plugin_that_reads_the_input_is_reported() -> None:
    text = "g (float[2,3] x) => (float[2,3] y) { b = EfficientPlugin_TRT(x) y = Neg(b) }"
    result = quick(graph(text).whole())
    assert result.plan is not None
    assert {d.op: d.rule for d in result.plan.decisions}["EfficientPlugin_TRT"] == "no-schema"
    assert any("EfficientPlugin_TRT" in w for w in result.warnings)
    assert result.verdict is not None and not result.verdict.passed  # nothing could be checked


def plugin(reads: str = "a") -> onnx.ModelProto:
    return graph(f"""
        g (float[2,3] x, int32[2] i) => (float[2,3] y, float[2] s) {{
            a = Relu(x)
            b, s, n = EfficientPlugin_TRT({reads})
            y = Neg(b) }}""").whole()


@values
def test_a_plugin_gets_types_of_its_ports(given: str, reads: str, types: list[int], tmp_path: Path) -> None:
    options: dict[str, Any] = {"verify": False, "skip": ["simplify"]}
    save = tmp_path / "plan.json"
    result = quick(plugin(reads), plugin_types=[given], lower=["*"], save_plan=save, **options)
    known = result.model.facts().scopes[0]
    (node,) = [n for n in result.proto.graph.node if n.op_type == "EfficientPlugin_TRT"]
    assert [known[name].dtype for name in (*node.input, *node.output)] == types
    assert result.plan is not None and not result.plan.decisions  # FP16 goes on after it
    again = quick(plugin(reads), plan=save, **options)
    assert again.proto.graph == result.proto.graph


@values
def test_types_at_borders_that_make_no_sense_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        quick(plugin(), **options)
    assert words in str(caught.value)


@pytest.mark.parametrize("lower", [{"lower": ["m*"]}, {"lower_op": ["MatMul"]}])
def test_what_is_lowered_neither_a_rule_nor_an_option_keeps(path: Path, lower: dict[str, Any]) -> None:
    loud = {"x": np.full((2, 3), 3000.0, np.float32)}
    plan = quick(path, inputs=loud, keep_fp32_op=["Relu", "MatMul"], verify=False, **lower).plan
    assert plan is not None and {d.op for d in plan.decisions} == {"Relu"}


@pytest.mark.parametrize("name", some("resnet", "swin"))
def test_a_refittable_result_has_every_weight_under_its_name(name: str) -> None:
    path = ROOT / f"models/{name}.onnx"
    weights = {t.name: array for t, array in _weights(load(path)) if array.dtype == np.float32}
    done = rewriter.fix(
        path, inputs=path.with_suffix(".npz"), refittable=True, build=False, engine="emulation"
    )
    kept = {t.name: array for t, array in _weights(done.model)}
    assert done.verified
    for weight, array in weights.items():
        np.testing.assert_allclose(kept[weight].astype(np.float32), array, rtol=2**-10, atol=2**-24)


def _weights(model: Model) -> Iterator[tuple[onnx.TensorProto, Array]]:
    yield from ((t, model.array(t)) for t in model.proto.graph.initializer if math.prod(t.dims) > 1)


DETECTOR = """
    <ir_version: 8, opset_import: ["" : 11, "TRT" : 1]>
    g (float[1,3,16,16] x, float[8,3,3,3] w) => (int32[1,1] found, float[100,4] boxes, float[1,5,256] scores)
    <float half = {0.5}> {
        c = Conv <pads = [1, 1, 1, 1]> (x, w) b, s = Split <axis = 1, split = [4, 4]> (c)
        [flat] raw = Flatten <axis = 2> (b) four = Flatten <axis = 2> (s)
        m = ReduceMean <axes = [1], keepdims = 1> (four) all = Concat <axis = 1> (four, m)
        scores = Sigmoid(all)
        [nms] found, kept, kept_scores, classes = TRT.EfficientNMS_TRT <score_threshold = 0.25> (raw, scores)
        [first] one = Squeeze <axes = [0]> (kept) boxes = Mul(one, half)
    }"""


def detector() -> Model:
    weight = np.random.default_rng(0).normal(0.0, 0.2, (8, 3, 3, 3)).astype(np.float32)
    proto = with_weights(DETECTOR, {"w": weight}).proto
    raw = onnx.helper.make_tensor_value_info("kept", onnx.TensorProto.FLOAT, [1, 100, 4])
    proto.graph.value_info.append(raw)
    # before IR 4 every weight was an input, too: only the part behind the plugin reads this one
    proto.graph.input.append(onnx.helper.make_tensor_value_info("half", onnx.TensorProto.FLOAT, []))
    return load(proto)


def test_a_model_is_split_before_its_plugins() -> None:
    split = split_at_plugins(detector())
    assert split is not None
    head = split.head.signature
    assert [port.name for port in head.outputs] == ["scores", "raw"]
    assert [value.name for value in split.head.proto.graph.input] == ["x"]
    assert [node.op_type for node in split.tail.proto.graph.node] == ["EfficientNMS_TRT", "Squeeze", "Mul"]
    assert split_at_plugins(graphs.graph("g (float[2] x) => (float[2] y) { y = Relu(x) }")) is None


def test_a_norm_that_onnx_runtime_fused_below_its_operator_set_is_no_plugin() -> None:
    body = "a = Neg(x) n = LayerNormalization(a, s, b) y = Abs(n)"
    proto = graphs.graph(f"g (float[2,8] x, float[8] s, float[8] b) => (float[2,8] y) {{ {body} }}").whole()
    proto.opset_import[0].version = 12
    result = rewriter.fix(proto, build=False, engine="emulation")
    assert result.verified and "plugins" not in result.ending
    assert "LayerNormalization" in graphs.ops(result.model)
    assert "could not be measured" not in str(rewriter.scan(proto))


@pytest.mark.parametrize("io", ["keep", "fp16"])
def test_fix_and_verify_check_up_to_the_plugin_and_say_so(tmp_path: Path, io: str) -> None:
    """What comes after it is whole, at the operator set of the result."""
    source, out, data = tmp_path / "m.onnx", tmp_path / "o.onnx", tmp_path / "d.npz"
    rewriter.save(detector(), source)
    np.savez(data, x=np.random.default_rng(1).normal(size=(1, 3, 16, 16)).astype(np.float32))
    result = rewriter.fix(source, out, inputs=data, io=io)
    proto = onnx.load(out)
    onnx.checker.check_model(proto)
    assert [v.name for v in proto.graph.output] == ["found", "boxes", "scores"]
    (squeeze,) = (node for node in proto.graph.node if node.op_type == "Squeeze")
    assert len(squeeze.input) == 2, "axes are an input from opset 13 on"
    assert result.verified and not result.proven and "up to its plugins" in result.ending
    assert any(c.name == PLUGINS and "nms (EfficientNMS_TRT)" in c.summary for c in result.checks)
    verified = rewriter.verify(source, out, inputs=data)
    assert verified.passed and not verified.proven and "up to its plugins" in verified.ending
    nms = next(node for node in proto.graph.node if node.op_type == "EfficientNMS_TRT")
    facts = load(out).facts().main
    assert [facts[name].dtype for name in nms.input] == [onnx.TensorProto.FLOAT] * 2


def test_too_many_arguments_are_an_error_that_names_the_function() -> None:
    call: Any = rewriter.emulate
    with pytest.raises(TypeError, match=r"emulate\(\) takes 1 positional argument but 2 were given"):
        call(small(), {})
