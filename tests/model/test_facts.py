"""Facts: element types and shapes of every scope."""

import numpy as np
import pytest
from graphs import graph, weighted
from onnx import TensorProto

from rewriter.base.errors import ModelError
from rewriter.ir.graph import open_graphs
from rewriter.ir.model import Model
from rewriter.ir.model.tensors import Shape, TensorFacts

F16, F32, I64 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT64

KNOWN = [
    pytest.param(
        "g (float16[n,3] x, int64[2] i) => (float[n,4] y) <float[3,4] w = {0,0,0,0,0,0,0,0,0,0,0,0}> {"
        " a = Cast<to = 1>(x) y = MatMul(a, w) }",
        {
            "x": (F16, ("n", 3)),
            "i": (I64, (2,)),
            "w": (F32, (3, 4)),
            "a": (F32, ("n", 3)),
            "y": (F32, ("n", 4)),
        },
        id="inputs, initializers, results and outputs",
    ),
    pytest.param(
        "g (float x, int64[r] s) => (float[a,b] y) { z = Reshape(x, s) y = Expand(z, s) }",
        {"x": (F32, ()), "z": (F32, None)},
        id="a scalar has rank 0, and an unknown rank is None",
    ),
    pytest.param(
        "g (float[2,3,4] x) => (float[m,n] y)"
        " <int64[1] minus = {-1}, int64 zero = {0}, int64[1] at = {0}> {"
        " s = Shape(x) d = Gather(s, zero) u = Unsqueeze(d, at) t = Concat<axis = 0>(u, minus)"
        " z = Reshape(x, t) y = Relu(z) }",
        {"t": (I64, (2,)), "z": (F32, (2, 12))},
        id="computed shapes",
    ),
    pytest.param(
        "g (float[4] x) => (float[4] y) { a = NoSuchOp(x) y = Relu(a) }",
        {"a": None, "y": (F32, (4,))},
        id="results of an operator without schema",
    ),
]


@pytest.mark.parametrize(("text", "expected"), KNOWN)
def test_types_and_shapes(text: str, expected: dict[str, tuple[int, Shape | None] | None]) -> None:
    known = graph(text).facts().main
    assert {name: known.get(name) for name in expected} == {
        name: value and TensorFacts(*value) for name, value in expected.items()
    }


def test_a_detached_weight_has_facts_like_any_other() -> None:
    source = _big_weight()
    assert source.weights
    known = source.facts().main
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
    known = source.facts()
    assert len(known.scopes) == 3
    assert known.main is known.scopes[0] and "a" not in known.main
    assert [scope["a"].dtype for scope in known.scopes[1:]] == [TensorProto.FLOAT16, TensorProto.DOUBLE]


def test_strict_inference_names_the_contradicting_node() -> None:
    source = graph("g (float[2,3] x, float[4,5] w) => (float[2,5] y) { y = MatMul(x, w) }")
    with pytest.raises(ModelError, match=r"types or shapes contradict each other: .*MatMul"):
        source.facts(strict=True)
    assert source.facts().main["y"].shape == (2, 5)


def test_inference_does_not_change_the_model() -> None:
    source = _big_weight()
    untouched = source.copy()
    source.facts(strict=True)
    assert source.same_as(untouched)


def _big_weight() -> Model:
    return weighted("g (float[2,64] x) => (float[2,64] y) { y = MatMul(x, w) }", w=(64, 64))


def test_facts_of_a_graph_are_kept_and_no_caller_changes_those_of_another() -> None:
    source = graph("g (float[2,3] x) => (float[2,3] y) { h = Relu(x)  y = Tanh(h) }")
    assert open_graphs(source)[0].tensor("new", "h") == "new"
    assert "new" not in source.facts().main
    source.proto.graph.node[0].op_type = "Transpose"
    source.mark_edited()
    assert source.facts().main["h"].shape == (3, 2)
    source.proto.graph.input[0].type.tensor_type.elem_type = 10
    source.mark_edited()
    assert source.facts().main["h"].dtype == 10


def test_facts_at_the_sizes_of_a_sample_follow_them_through_the_graph() -> None:
    source = graph("g (float[batch,3,height,width] x) => (float[batch,n] y) { f = Flatten(x)  y = Relu(f) }")
    before = source.proto.SerializeToString()
    found = source.at_sizes({"x": np.zeros((2, 3, 4, 5), np.float32)}).facts().main
    assert (found["f"].shape, found["y"].shape) == ((2, 60), (2, 60))
    assert source.proto.SerializeToString() == before
    assert source.at_sizes({}).facts().main["x"].shape == ("batch", 3, "height", "width")


def test_an_stft_without_onesided_has_half_of_the_frequencies() -> None:
    model = graph(
        "g (float[1,1000,1] x) => (float[1,f,b,2] y) <int64 step = {160}, int64 length = {400}>"
        " { y = STFT(x, step, , length) }"
    )
    assert model.facts().main["y"].sizes == (1, 4, 201, 2)
    assert not model.proto.graph.node[0].attribute
