"""Parts of exact rescaling: classes of exponents, rules of operators, the integer programme."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import graph

from rewriter.graph import open_graphs
from rewriter.model import Model
from rewriter.model.facts import infer
from rewriter.rewriting.rescaling.apply import scaled
from rewriter.rewriting.rescaling.classes import ZERO, Classes
from rewriter.rewriting.rescaling.constraints import Constraints, collect
from rewriter.rewriting.rescaling.programme import Demand, solve


def constraints(source: Model) -> Constraints:
    return collect(open_graphs(source, infer(source))[0])


def test_opposite_terms_merge_and_a_single_term_is_zero() -> None:
    classes = Classes()
    a, b, c, d = (classes.add() for _ in range(4))
    classes.relate([(a, 1), (b, -1), (c, 1)])
    assert len(classes.equations()) == 1
    classes.pin(c)
    assert classes.root(a) == classes.root(b) != ZERO
    classes.relate([(d, 2), (a, 0)])
    assert classes.root(d) == ZERO
    assert not classes.equations()


def test_merges_propagate() -> None:
    classes = Classes()
    chain = [classes.add() for _ in range(50)]
    gates = [classes.add() for _ in range(49)]
    for left, right, gate in zip(chain, chain[1:], gates, strict=False):
        classes.relate([(left, 1), (gate, 1), (right, -1)])
    assert len(classes.equations()) == 49
    for gate in gates:
        classes.pin(gate)
    assert len({classes.root(number) for number in chain}) == 1
    assert classes.root(chain[0]) != ZERO
    classes.pin(chain[-1])
    assert classes.root(chain[0]) == ZERO


BODIES = [
    pytest.param("t = Relu(a)", "a = t", id="Relu"),
    pytest.param("t = Add(a, b)", "a = b = t", id="Add of two tensors"),
    pytest.param("t = Concat<axis = 0>(a, b)", "a = b = t", id="Concat"),
    pytest.param("t = Max(a, b)", "a = b = t", id="Max"),
    pytest.param("t = Mul(a, b)", "free", id="product of two tensors"),
    pytest.param("t = MatMul(a, b)", "free", id="MatMul of two tensors"),
    pytest.param("t = Mul(a, a)", "free", id="square"),
    pytest.param("t = Div(a, b)", "free", id="quotient"),
    pytest.param("t = Sqrt(a)", "free", id="root"),
    pytest.param("t = Reciprocal(a)", "free", id="reciprocal"),
    pytest.param("t = Sigmoid(a)", "a = t = 0", id="Sigmoid fixes both"),
    pytest.param("t = Softmax(a)", "a = t = 0", id="Softmax fixes both"),
    pytest.param("t = Sign(a)", "t = 0", id="Sign does not see the scale"),
    pytest.param("c = Greater(a, b)  t = Where(c, a, b)", "a = b = t", id="Greater and Where"),
    pytest.param("p = Constant<value_float = 2.0>()  t = Pow(a, p)", "free", id="Pow by 2"),
    pytest.param("p = Constant<value_float = 2.5>()  t = Pow(a, p)", "a = t = 0", id="Pow by 2.5"),
    pytest.param("t = LpNormalization(a)", "t = 0", id="LpNormalization lets its input free"),
    pytest.param("t = Cast<to = 10>(a)  s = Cast<to = 1>(t)", "a = 0", id="a Cast to FP16 fixes its input"),
    pytest.param("t = Foo<v = 1>(a)", "a = 0", id="unknown operator"),
]


@pytest.mark.parametrize(("body", "wanted"), BODIES)
def test_an_operator_constrains_its_exponents(body: str, wanted: str) -> None:
    """Which of a, b and t share an exponent, and which have 0; a and b are free by their weights."""
    source = (
        graph(
            f"""
        g (float[2,2] x) => (float[2,2] y) <float[2,2] w = {{1, 2, 3, 4}}> {{
            a = Mul(x, w)
            b = MatMul(x, w)
            {body.replace("Foo", "com.example.Foo") if "Foo" in body else body}
            y = Add(x, w)
        }}"""
        )
        if "Foo" not in body
        else _with_unknown_operator()
    )
    found = constraints(source)
    roots = {t: found.classes.root(found.tensors[t]) for t in "abt" if t in found.tensors}
    named = [name for name in wanted.split(" = ") if name in roots]
    zero = wanted.endswith("= 0")
    assert {t for t, root in roots.items() if root == ZERO} == (set(named) if zero else set())
    if not zero:
        together = {roots[name] for name in named}
        assert len(together) == (1 if named else 0)
        assert len(set(roots.values())) == len(roots) - max(0, len(named) - 1)


def _with_unknown_operator() -> Model:
    from graphs import model

    return model(
        """
        <ir_version: 8, opset_import: ["" : 17, "com.example" : 1]>
        g (float[2,2] x) => (float[2,2] y) <float[2,2] w = {1, 2, 3, 4}> {
            a = Mul(x, w)
            b = MatMul(x, w)
            t = com.example.Foo(a)
            y = Add(x, w)
        }"""
    )


def test_a_tensor_that_a_subgraph_reads_keeps_its_scale() -> None:
    found = constraints(
        graph(
            """
            g (float[2] x, bool c) => (float[2] y) <float[2] w = {1, 2}> {
                a = Mul(x, w)
                y = If (c) <
                    then_branch = t () => (float[2] u) { u = Neg(a) },
                    else_branch = e () => (float[2] v) { v = Abs(a) }
                >
            }"""
        )
    )
    assert found.classes.root(found.tensors["a"]) == ZERO
    assert found.pins["a"].startswith("If")


def test_the_smallest_exponents_that_end_overflow_are_found() -> None:
    """b = 2a, and b overflows by 5 binades, so a needs an exponent of -3."""
    demands = {1: Demand(), 2: Demand(hazards={"b": -5})}
    assert solve(demands, [{1: 2, 2: -1}]) == {1: -3, 2: -6}


def test_the_cost_of_small_values_limits_the_exponent() -> None:
    kept = Demand(hazards={"t": -3})
    kept.floor(0, cost=1000.0)
    assert solve({1: kept}, []) == {}
    kept = Demand(hazards={"t": -3})
    kept.floor(0, cost=1.0)
    assert solve({1: kept}, []) == {1: -3}


def test_bounds_hold_and_zero_stays_feasible() -> None:
    demand = Demand(hazards={"t": -9})
    demand.limit(-4, 12)
    assert solve({1: demand}, []) == {}
    demand.limit(3, -3)
    assert (demand.low, demand.high) == (0, 0)


@pytest.mark.parametrize("k", [-30, -1, 0, 7, 30])
def test_scaling_is_undone_by_the_opposite_exponent(k: int) -> None:
    value = np.array([1.1, -0.0, 3.4e-20, -7e20, 65504.0, np.inf], np.float32)
    there = scaled(value, k)
    assert there.dtype == np.float32
    np.testing.assert_array_equal(scaled(there, -k).view(np.uint32), value.view(np.uint32))
