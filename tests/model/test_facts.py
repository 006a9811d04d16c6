"""Facts: element types and shapes of every scope."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import graph
from onnx import TensorProto, helper

from rewriter.ir.errors import ModelError
from rewriter.ir.model import Model, facts, load
from rewriter.ir.model.facts import TensorFacts


def test_inputs_initializers_results_and_outputs() -> None:
    known = facts.infer(
        graph(
            "g (float16[n,3] x, int64[2] i) => (float[n,4] y) <float[3,4] w = {0,0,0,0,0,0,0,0,0,0,0,0}> {"
            " a = Cast<to = 1>(x) y = MatMul(a, w) }"
        )
    ).main
    assert known["x"] == TensorFacts(TensorProto.FLOAT16, ("n", 3))
    assert known["i"] == TensorFacts(TensorProto.INT64, (2,))
    assert known["w"] == TensorFacts(TensorProto.FLOAT, (3, 4))
    assert known["a"] == TensorFacts(TensorProto.FLOAT, ("n", 3))
    assert known["y"] == TensorFacts(TensorProto.FLOAT, ("n", 4))


def test_a_scalar_has_rank_0_and_an_unknown_rank_is_none() -> None:
    known = facts.infer(
        graph("g (float x, int64[r] s) => (float[a,b] y) { z = Reshape(x, s) y = Expand(z, s) }")
    ).main
    assert known["x"].shape == ()
    assert known["z"].shape is None


def test_computed_shapes_are_inferred() -> None:
    known = facts.infer(
        graph(
            "g (float[2,3,4] x) => (float[m,n] y)"
            " <int64[1] minus = {-1}, int64 zero = {0}, int64[1] at = {0}> {"
            " s = Shape(x) d = Gather(s, zero) u = Unsqueeze(d, at) t = Concat<axis = 0>(u, minus)"
            " z = Reshape(x, t) y = Relu(z) }"
        )
    ).main
    assert known["t"].shape == (2,)
    assert known["z"].shape == (2, 12)


def test_a_detached_weight_has_facts_like_any_other() -> None:
    source = _big_weight()
    assert source.weights
    known = facts.infer(source).main
    assert known["w"] == TensorFacts(TensorProto.FLOAT, (64, 64))
    assert known["y"] == TensorFacts(TensorProto.FLOAT, (2, 64))


def test_sibling_branches_may_share_a_tensor_name() -> None:
    source = graph(
        """
        g (float[4] x, bool c) => (float[4] y) {
            y = If (c) <
                then_branch = t () => (float[4] u) { a = Cast<to = 10>(x) u = Cast<to = 1>(a) },
                else_branch = e () => (float[4] v) { a = Cast<to = 11>(x) v = Cast<to = 1>(a) }
            >
        }"""
    )
    known = facts.infer(source)
    assert len(known.scopes) == 3
    assert known.main is known.scopes[0]
    assert "a" not in known.main
    assert [scope["a"].dtype for scope in known.scopes[1:]] == [TensorProto.FLOAT16, TensorProto.DOUBLE]


def test_results_of_an_operator_without_schema_are_unknown() -> None:
    known = facts.infer(graph("g (float[4] x) => (float[4] y) { a = NoSuchOp(x) y = Relu(a) }")).main
    assert "a" not in known
    assert known["y"].dtype == TensorProto.FLOAT


def test_strict_inference_names_the_contradicting_node() -> None:
    source = graph("g (float[2,3] x, float[4,5] w) => (float[2,5] y) { y = MatMul(x, w) }")
    with pytest.raises(ModelError, match=r"types or shapes contradict each other: .*MatMul"):
        facts.infer(source, strict=True)
    assert facts.infer(source).main["y"].shape == (2, 5)


def test_inference_does_not_change_the_model() -> None:
    source = _big_weight()
    untouched = source.copy()
    facts.infer(source, strict=True)
    assert source.same_as(untouched)


def _big_weight() -> Model:
    weight = helper.make_tensor(
        "w", TensorProto.FLOAT, [64, 64], np.ones((64, 64), np.float32).tobytes(), raw=True
    )
    made = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 64])],
        [weight],
    )
    return load(helper.make_model(made, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]))


def test_facts_of_a_graph_are_kept_and_no_caller_changes_those_of_another() -> None:
    source = graph("g (float[2,3] x) => (float[2,3] y) { h = Relu(x)  y = Tanh(h) }")
    first = facts.infer(source)
    first.main["new"] = first.main["h"]
    assert "new" not in facts.infer(source).main
    source.proto.graph.node[0].op_type = "Transpose"
    assert facts.infer(source).main["h"].shape == (3, 2)
    source.proto.graph.input[0].type.tensor_type.elem_type = 10
    assert facts.infer(source).main["h"].dtype == 10


def test_facts_at_the_sizes_of_a_sample_follow_them_through_the_graph() -> None:
    source = graph("g (float[batch,3,height,width] x) => (float[batch,n] y) { f = Flatten(x)  y = Relu(f) }")
    before = source.proto.SerializeToString()
    found = facts.at_sizes(source, {"x": np.zeros((2, 3, 4, 5), np.float32)}).main
    assert (found["f"].shape, found["y"].shape) == ((2, 60), (2, 60))
    assert source.proto.SerializeToString() == before
    assert facts.at_sizes(source, {}).main["x"].shape == ("batch", 3, "height", "width")


def test_an_stft_without_onesided_has_half_of_the_frequencies() -> None:
    model = graph(
        "g (float[1,1000,1] x) => (float[1,f,b,2] y) <int64 step = {160}, int64 length = {400}>"
        " { y = STFT(x, step, , length) }"
    )
    assert facts.infer(model).main["y"].sizes == (1, 4, 201, 2)
    assert not model.proto.graph.node[0].attribute
