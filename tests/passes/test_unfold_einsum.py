"""unfold-einsum: MatMul with equal results in every order of axes, and refusals with their reasons."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, graph, ops, random_feeds, run

from rewriter.model import Model
from rewriter.passes.unfold_einsum import UnfoldEinsum

SIZES = {"b": 2, "n": 3, "q": 4, "k": 5, "h": 6, "d": 7, "e": 8, "c": 9}


def build(equation: str, sizes: dict[str, int | str] | None = None, *, constant: bool = False) -> Model:
    known = {**SIZES, **(sizes or {})}
    inputs, _, output = equation.partition("->")
    left, right = (",".join(str(known[letter]) for letter in labels) for labels in inputs.split(","))
    shape = ",".join(str(known[letter]) for letter in output)
    count = int(np.prod([SIZES[letter] for letter in inputs.split(",")[1]]))
    values = ", ".join(f"{v:.4f}" for v in np.random.default_rng(0).standard_normal(count))
    weight, given = (f"<float[{right}] z = {{{values}}}>", "") if constant else ("", f", float[{right}] z")
    return graph(
        f"""g (float[{left}] x{given}) => (float[{shape}] y) {weight} {{
            y = Einsum<equation = "{equation}">(x, z) }}"""
    )


WRITTEN = [
    pytest.param("bqhd,bkhd->bhqk", False, ["Transpose", "Transpose", "MatMul"], id="scores of attention"),
    pytest.param("bhqk,bkhd->bqhd", False, ["Transpose", "MatMul", "Transpose"], id="values of attention"),
    pytest.param("bhqd,bhkd->bhqk", False, ["Transpose", "MatMul"], id="scores, heads first"),
    pytest.param("qd,de->qe", False, ["MatMul"], id="a matrix product"),
    pytest.param("bnd,de->bne", True, ["MatMul"], id="a Dense layer"),
    pytest.param("bnd,ed->bne", True, ["MatMul"], id="a Dense layer with a turned weight"),
    pytest.param("bnd,dhe->bnhe", True, ["Reshape", "MatMul", "Reshape"], id="Flax: projection into heads"),
    pytest.param("bnhd,hde->bne", True, ["Reshape", "MatMul", "Reshape"], id="Flax: projection out of heads"),
    pytest.param("bqc,bchk->bqhk", False, ["Reshape", "MatMul", "Reshape"], id="masks of Mask2Former"),
]


@pytest.mark.parametrize(("equation", "constant", "nodes"), WRITTEN)
def test_equal_results_as_a_product(equation: str, constant: bool, nodes: list[str]) -> None:
    before = build(equation, constant=constant)
    result, report = apply(UnfoldEinsum(), before)
    assert ops(result) == nodes
    assert not report.refusals
    feeds = random_feeds(before)
    assert np.allclose(run(before, feeds)[0], run(result, feeds)[0], rtol=1e-4, atol=1e-5)


def test_a_batch_and_a_length_of_unknown_size() -> None:
    before = build("bqhd,bkhd->bhqk", {"b": "B", "q": "Q", "k": "K"})
    result, report = apply(UnfoldEinsum(), before)
    assert ops(result) == ["Transpose", "Transpose", "MatMul"]
    assert not report.refusals


REFUSED = [
    pytest.param("bnhd,hde->bne", {"h": "H", "n": "N", "b": "B"}, "not known", id="two unknown sizes"),
    pytest.param("bn,bn->bn", {}, "no product", id="elementwise"),
    pytest.param("bn,dk->bndk", {}, "no product", id="an outer product"),
    pytest.param("bnd,k->bk", {}, "no product", id="a sum over one operand"),
]


@pytest.mark.parametrize(("equation", "sizes", "reason"), REFUSED)
def test_refusals_and_their_reasons(equation: str, sizes: dict[str, int | str], reason: str) -> None:
    before = build(equation, sizes)
    result, report = apply(UnfoldEinsum(), before)
    assert result.same_as(before)
    (refusal,) = report.refusals
    assert reason in refusal.reason


def test_a_label_that_is_broadcast_is_declined() -> None:
    before = graph(
        """g (float[2,4] x, float[1,3] z) => (float[2,3] y) { y = Einsum<equation = "qd,de->qe">(x, z) }"""
    )
    result, report = apply(UnfoldEinsum(), before)
    assert result.same_as(before)
    assert [r.reason for r in report.refusals] == ["one of its labels has two sizes"]
