"""Weights in Constant nodes and behind Identities become initializers; everything else stays."""

import numpy as np
import pytest
from graphs import graph, model, ops, random_feeds, run

from rewriter.ir.model import DETACH_BYTES, walk_graphs
from rewriter.ir.model.normalization import with_lifted_weights

WEIGHT = "k = Constant<value = float[4] {4, 3, 2, 1}>()"

LIFTED = [
    pytest.param(f"{WEIGHT} y = Mul(x, k)", ["Mul"], {"k"}, id="a Constant"),
    pytest.param(f"{WEIGHT} i = Identity(k) y = Mul(x, i)", ["Mul"], {"k"}, id="an Identity of it"),
    pytest.param("i = Identity(w) j = Identity(i) y = Mul(x, j)", ["Mul"], {"w"}, id="Identity of a weight"),
]

STAYS = [
    pytest.param("k = Constant<value = float {2}>() y = Mul(x, k)", "float[4] y", id="a single number"),
    pytest.param(
        "k = Constant<value = int64[2] {2, 2}>() r = Reshape(x, k) y = Relu(r)", "float[2,2] y", id="a shape"
    ),
    pytest.param(f"{WEIGHT} y = Mul(x, k)", "float[4] y, float[4] k", id="a graph output"),
    pytest.param("i = Identity(x) y = Mul(i, w)", "float[4] y", id="an Identity of an input"),
]


def body(text: str, output: str = "float[4] y") -> str:
    return f"g (float[4] x) => ({output}) <float[4] w = {{1, 2, 3, 4}}> {{ {text} }}"


@pytest.mark.parametrize(("text", "left", "weights"), LIFTED)
def test_weights_become_initializers(text: str, left: list[str], weights: set[str]) -> None:
    source = graph(body(text))
    result = with_lifted_weights(source)
    assert ops(result) == left
    assert weights <= {t.name for t in result.proto.graph.initializer}
    feeds = random_feeds(source)
    assert np.array_equal(run(source, feeds)[0], run(result, feeds)[0])


@pytest.mark.parametrize(("text", "output"), STAYS)
def test_what_is_no_weight_stays(text: str, output: str) -> None:
    source = graph(body(text, output))
    assert with_lifted_weights(source) is source


def test_large_weights_are_detached() -> None:
    size = DETACH_BYTES // 4
    values = ", ".join("1" for _ in range(size))
    source = graph(
        f"g (float[{size}] x) => (float[{size}] y) {{"
        f" k = Constant<value = float[{size}] {{{values}}}>() y = Mul(x, k) }}"
    )
    assert not source.weights
    assert with_lifted_weights(source).weights["k"].shape == (size,)


def test_weights_of_branches_become_their_own() -> None:
    source = model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (bool c, float[4] x) => (float[4] y) <float[4] w = {{1, 2, 3, 4}}> {{
            o = Identity(w)
            y = If (c) <
                then_branch = yes () => (float[4] t) {{ {WEIGHT} t = Mul(x, k) }},
                else_branch = no () => (float[4] e) {{ e = Mul(x, o) }}
            >
        }}""")
    result = with_lifted_weights(source)
    names = [[t.name for t in g.initializer] for g in walk_graphs(result.proto.graph)]
    assert names == [["w"], ["k"], []]
    for condition in (True, False):
        feeds = random_feeds(source) | {"c": np.array(condition)}
        assert np.array_equal(run(source, feeds)[0], run(result, feeds)[0])
