"""Without data, the inputs of a decoder agree: mask and positions with the length of the past."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import rewriter
from rewriter.ir.model import Model, load, save
from rewriter.runtime.inputs import load_samples
from rewriter.runtime.inputs.random_samples import cache_pairs


@pytest.fixture
def decoder() -> Model:
    f, i = TensorProto.FLOAT, TensorProto.INT64
    total = "past_sequence_length + sequence_length"
    inputs = [
        helper.make_tensor_value_info("input_ids", i, ["batch_size", "sequence_length"]),
        helper.make_tensor_value_info("attention_mask", f, ["batch_size", total]),
        helper.make_tensor_value_info("position_ids", i, ["batch_size", "sequence_length"]),
        helper.make_tensor_value_info(
            "past_key_values.0.key", f, ["batch_size", 2, "past_sequence_length", 4]
        ),
    ]
    outputs = [
        helper.make_tensor_value_info("logits", f, ["batch_size", 2, "sequence_length", total]),
        helper.make_tensor_value_info("present.0.key", f, ["batch_size", 2, total, 4]),
    ]
    random = np.random.default_rng(0)
    weights = {
        "words": random.standard_normal((300, 8)).astype(np.float32),
        "places": random.standard_normal((100, 8)).astype(np.float32),
        "split": np.array([0, 0, 2, 4]),
        "axes": np.array([1, 2]),
    }
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["word"]),
        helper.make_node("Gather", ["places", "position_ids"], ["place"]),
        helper.make_node("Add", ["word", "place"], ["x"]),
        helper.make_node("Reshape", ["x", "split"], ["heads"]),
        helper.make_node("Transpose", ["heads"], ["new"], perm=[0, 2, 1, 3]),
        helper.make_node("Concat", ["past_key_values.0.key", "new"], ["present.0.key"], axis=2),
        helper.make_node("Transpose", ["present.0.key"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["new", "turned"], ["scores"]),
        helper.make_node("Unsqueeze", ["attention_mask", "axes"], ["mask"]),
        helper.make_node("Mul", ["scores", "mask"], ["logits"]),
    ]
    held = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    body = helper.make_graph(nodes, "g", inputs, outputs, held)
    return load(helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def test_lengths_masks_and_positions_agree(decoder: Model) -> None:
    samples = load_samples(None, decoder)
    (feeds,) = samples
    past, tokens = feeds["past_key_values.0.key"].shape[2], feeds["input_ids"].shape[1]
    assert past > 1
    assert feeds["attention_mask"].shape == (1, past + tokens)
    assert feeds["position_ids"].tolist() == [[*range(past, past + tokens)]]
    assert "rewriter record" in samples.source.text


def test_a_decoder_is_fixed_without_data(decoder: Model) -> None:
    result = rewriter.fix(decoder, build=False)
    assert result.verdict is not None and result.verdict.passed


def test_caches_are_paired_by_their_names(decoder: Model) -> None:
    model = rewriter.fix(decoder, io="links=fp16,logits=fp32", build=False).model
    types = {port.name: port.dtype for port in (*model.signature.inputs, *model.signature.outputs)}
    assert types["past_key_values.0.key"] == types["present.0.key"] == TensorProto.FLOAT16
    assert types["logits"] == types["attention_mask"] == TensorProto.FLOAT


def test_positions_stay_within_their_table(decoder: Model) -> None:
    (feeds,) = load_samples(None, decoder, input_shapes={"past_key_values.0.key": (1, 2, 90, 4)})
    assert feeds["position_ids"].max() == 99
    assert feeds["attention_mask"].shape[1] == 90 + feeds["input_ids"].shape[1]


def test_names_of_genai_pair_caches(decoder: Model, tmp_path: Path) -> None:
    assert cache_pairs(decoder) == {"past_key_values.0.key": "present.0.key"}
    save(decoder, tmp_path / "model.onnx")
    proto = onnx.load(tmp_path / "model.onnx")
    for value, name in ((proto.graph.input[3], "kv_in_0"), (proto.graph.output[1], "kv_out_0")):
        old, value.name = value.name, name
        for node in proto.graph.node:
            for tensors in (node.input, node.output):
                tensors[:] = [name if other == old else other for other in tensors]
    onnx.save(proto, tmp_path / "model.onnx")
    assert cache_pairs(load(tmp_path / "model.onnx")) == {}
    roles = {"inputs": {"past_key_names": "kv_in_%d"}, "outputs": {"present_key_names": "kv_out_%d"}}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"decoder": roles}}))
    assert cache_pairs(load(tmp_path / "model.onnx")) == {"kv_in_0": "kv_out_0"}
    (feeds,) = load_samples(None, load(tmp_path / "model.onnx"))
    assert feeds["position_ids"][0, 0] == feeds["kv_in_0"].shape[2]


def test_both_branches_of_a_merged_decoder_are_measured(tmp_path: Path) -> None:
    branch = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy")
    sides = [
        helper.make_graph(
            [helper.make_node(op, ["x"], [op])], op, [], [helper.make_empty_tensor_value_info(op)]
        )
        for op in ("Exp", "Sigmoid")
    ]
    node = helper.make_node("If", ["use_cache_branch"], ["y"], then_branch=sides[0], else_branch=sides[1])
    body = helper.make_graph([node], "g", [x, branch], [y])
    model = load(helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert [feeds["use_cache_branch"].tolist() for feeds in load_samples(None, model)] == [[True], [False]]
    findings = rewriter.scan(model).findings
    assert [f for f in findings if f.kind == "unmeasured"] == []
