"""How far a tensor of a front end grows with the results of its first transform."""

from typing import Any, cast

import graphs
import pytest

from rewriter.hazards.front_ends import _degree
from rewriter.ir.float_graph import FloatGraph

DEGREES = [
    pytest.param("y = MatMul(x, w)", 1.0, id="a transform"),
    pytest.param("a = Mul(x, x) y = MatMul(a, w)", 1.0, id="whatever comes before the first one"),
    pytest.param("a = MatMul(x, w) b = Mul(a, a) y = MatMul(b, w)", 2.0, id="a transform of squares"),
    pytest.param("y = Mul(x, x)", None, id="no transform"),
    pytest.param("a = MatMul(x, w) y = Mul(a, k)", 1.0, id="a factor"),
    pytest.param("a = MatMul(x, w) b = Mul(a, a) y = Mul(b, a)", 3.0, id="a product"),
    pytest.param("a = MatMul(x, w) y = Mul(a, x)", 1.0, id="a product with the input"),
    pytest.param("a = MatMul(x, w) y = Sqrt(a)", 0.5, id="a root"),
    pytest.param("a = MatMul(x, w) y = Pow(a, two)", 2.0, id="a power"),
    pytest.param("a = MatMul(x, w) y = ReduceSumSquare<axes = [1]>(a)", 2.0, id="a sum of squares"),
    pytest.param("a = MatMul(x, w) b = Mul(a, a) y = Sqrt(b)", 1.0, id="a magnitude"),
    pytest.param("a = MatMul(x, w) b = Mul(a, a) y = Add(a, b)", 1.0, id="the least degree of a sum"),
    pytest.param("a = MatMul(x, w) b = Mul(a, a) y = Div(b, a)", 1.0, id="a quotient"),
    pytest.param("a = MatMul(x, w) y = Div(a, k)", 1.0, id="over a constant"),
    pytest.param("a = MatMul(x, w) y = Div(x, a)", -1.0, id="the input over it"),
    pytest.param("a = MatMul(x, w) b = Mul(a, a) y = Reciprocal(b)", -2.0, id="a reciprocal"),
    pytest.param("a = MatMul(x, w) b = Cast<to = 10>(a) c = Cast<to = 1>(b) y = Mul(c, a)", 2.0, id="a Cast"),
]


@pytest.mark.parametrize(("body", "degree"), DEGREES)
def test_degree_of_a_tensor(body: str, degree: float | None) -> None:
    source = graphs.graph(
        f"""
        g (float[2,2] x) => (float[2,N] y)
        <float[2,2] w = {{1, 2, 3, 4}}, float k = {{0.5}}, float two = {{2}}> {{ {body} }}"""
    )
    analysis = cast("Any", FloatGraph.main(source))
    assert _degree(analysis, "y", {}) == degree
    assert _degree(analysis, "w", {}) is None
    assert _degree(analysis, "y", {"y": 7.0}) == 7.0, "computed once"
