"""Models with plugins that are not here are fixed and checked up to them."""

from pathlib import Path

import graphs
import numpy as np
import onnx
import pytest
from onnx_text import with_header

import rewriter
from rewriter.ir.model import Model, load
from rewriter.ir.model.split import split_at_plugins
from rewriter.verification.verdict import PLUGINS

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
    proto = onnx.parser.parse_model(DETECTOR)
    weight = np.random.default_rng(0).normal(0.0, 0.2, (8, 3, 3, 3)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    del proto.graph.input[1:]
    raw = onnx.helper.make_tensor_value_info("kept", onnx.TensorProto.FLOAT, [1, 100, 4])
    proto.graph.value_info.append(raw)
    return load(proto)


def test_a_model_is_split_before_its_plugins() -> None:
    split = split_at_plugins(detector())
    assert split is not None
    head = split.head.signature
    assert [port.name for port in head.outputs] == ["scores", "raw"]
    assert [node.op_type for node in split.tail.proto.graph.node] == ["EfficientNMS_TRT", "Squeeze", "Mul"]
    assert split_at_plugins(graphs.graph("g (float[2] x) => (float[2] y) { y = Relu(x) }")) is None


def test_a_plugin_that_reads_the_input_leaves_nothing_to_check() -> None:
    text = "g (float[2] x) => (float[2] y) { r = Preprocess_TRT(x) y = Relu(r) }"
    assert split_at_plugins(load(onnx.parser.parse_model(with_header(text)))) is None


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
