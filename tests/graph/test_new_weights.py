"""New weights are shared like the given ones, and a Gemm gives the reason why it is no MatMul and Add."""

import numpy as np
import pytest
from graphs import graph

from rewriter.ir.graph import open_graphs
from rewriter.ir.graph.weights import NewWeights, gemm_obstacle, is_transposed, layout_obstacle

GEMM = "g (float[3,2] x, float[2,2] m) => (float[3,2] y) <float[2,2] w = {1, 2, 3, 4}, float[2] b = {5, 6}>"


def test_a_changed_weight_is_created_once() -> None:
    source = graph(f"{GEMM} {{ y = Gemm(x, w, b) }}")
    editor = open_graphs(source)[0]
    weights = NewWeights(editor)
    name = weights.changed("w", "turned", np.transpose)
    assert weights.changed("w", "turned", np.transpose) == name == "w/turned"
    np.testing.assert_array_equal(editor.value(name), [[1, 3], [2, 4]])
    assert editor.value(name).flags["C_CONTIGUOUS"]


GEMMS = [
    pytest.param("Gemm(x, w, b)", None, id="a MatMul and Add"),
    pytest.param("Gemm<beta = 2.0>(x, w)", None, id="beta without C"),
    pytest.param("MatMul(x, w)", None, id="a MatMul"),
    pytest.param("Gemm<transB = 1>(x, w, b)", None, id="a transposed weight"),
    pytest.param("Gemm<beta = 2.0>(x, w, b)", "its alpha or beta is not 1", id="beta"),
    pytest.param("Gemm<alpha = 2.0>(x, w)", "its alpha or beta is not 1", id="alpha"),
    pytest.param("Gemm<transA = 1>(m, w)", "it transposes its data", id="transposed data"),
]


@pytest.mark.parametrize(("call", "reason"), GEMMS)
def test_obstacles_of_a_gemm(call: str, reason: str | None) -> None:
    source = graph(f"{GEMM} {{ y = {call} }}".replace("float[3,2] y", "float[P,Q] y"))
    editor = open_graphs(source)[0]
    node = editor.nodes[0]
    assert gemm_obstacle(node) == reason
    assert is_transposed(node) == ("transB" in call)
    assert layout_obstacle(editor, "w") is None
