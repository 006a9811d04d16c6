"""FP32 where it is free: where epilogues start and end, norms, Softmax, and models without any of them."""

from __future__ import annotations

from dataclasses import replace

import graphs
import pytest
from plans import kept, planned

from rewriter.hazards.planning.free_fp32 import FREE, PROBE, SOFTMAX_PROBE, refusals
from rewriter.hazards.survey import PrecisionRequest
from rewriter.ir.base import Target

WISH = PrecisionRequest(epilogues="all")

HEAD = """
    g (float[2,4] x, float[2,4] r, float[4,4] v) => (float[2,4] y)
    <float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float[4] b = {1,2,3,4}> {
"""
BIAS = f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n y = MatMul(a, v) }}"


def epilogues(text: str, wish: PrecisionRequest = WISH) -> str:
    """First outputs of the nodes that the rule keeps."""
    return " ".join(
        name for name, rule in kept(planned(graphs.graph(text), wish)).items() if rule == "epilogue"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(BIAS, "a", id="a bias"),
        pytest.param(BIAS.replace("Add(m, b)", "Add(b, m)"), "a", id="a bias that comes first"),
        pytest.param(BIAS.replace("Add(m, b)", "Add(m, r)"), "a", id="a residual sum"),
        pytest.param(BIAS.replace("MatMul(x, w)", "Gemm(x, w)"), "a", id="after Gemm"),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n e = Erf(a)\n p = Mul(a, e)\n s = Add(p, r)\n"
            " y = MatMul(s, v) }",
            "a e p s",
            id="elementwise up to the next product",
        ),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n s = Add(a, r)\n n = LayerNormalization(s, b)\n"
            " y = MatMul(n, v) }",
            "a s",
            id="no further than a norm, which would take the sum",
        ),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n t = Transpose(a)\n u = Neg(t)\n y = MatMul(v, u) }}",
            "a",
            id="no further than a view",
        ),
        pytest.param(BIAS.replace("MatMul(x, w)", "MatMul(x, v)"), "", id="both operands are computed"),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n n = MatMul(x, w)\n c = Add(n, b)\n"
            " y = MatMul(a, c) }",
            "",
            id="products of one tensor, which are merged",
        ),
        pytest.param(BIAS.replace("Add(m, b)", "Mul(m, b)"), "a", id="a scale"),
        pytest.param(BIAS.replace("Add(m, b)", "Sigmoid(m)"), "a", id="an activation"),
        pytest.param(BIAS.replace("Add(m, b)", "Mul(m, m)"), "a", id="a square"),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n g = Sigmoid(m)\n a = Mul(m, g)\n y = MatMul(a, v) }}",
            "g a",
            id="an activation of two operators that both read the product",
        ),
        pytest.param(BIAS.replace("Add(m, b)", "Identity(m)"), "", id="a product that nothing is done to"),
        pytest.param(
            BIAS.replace("Add(m, b)", "LayerNormalization(m, b)"),
            "",
            id="a norm, which is no part of the kernel",
        ),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n c, d = Split<axis = 1>(a)\n"
            " e = Sigmoid(c)\n f = Mul(e, d)\n g = Concat<axis = 1>(f, f)\n y = MatMul(g, v) }",
            "a",
            id="no further than a Split: the Cast stands before it",
        ),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n y = MatMul(a, m) }}",
            "",
            id="a product that is read in FP16, too",
        ),
    ],
)
def test_nodes_of_an_epilogue(text: str, expected: str) -> None:
    assert epilogues(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(BIAS, "a", id="a bias"),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n e = Erf(a)\n p = Mul(a, e)\n s = Add(p, r)\n"
            " n = LayerNormalization(s, b)\n z = Add(n, s)\n y = MatMul(z, v) }",
            "a e p",
            id="up to a residual sum that a norm and another sum read",
        ),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n s = Add(a, r)\n n = LayerNormalization(s, b)\n"
            " y = MatMul(n, v) }",
            "",
            id="a norm takes a residual sum that it alone reads",
        ),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n n = LayerNormalization(a, b)\n y = MatMul(n, v) }}",
            "",
            id="a norm takes a bias",
        ),
        pytest.param(
            f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n t = Transpose(a)\n y = MatMul(v, t) }}",
            "",
            id="a Transpose takes a bias",
        ),
        pytest.param(BIAS.replace("Add(m, b)", "Add(m, r)"), "", id="a sum with another tensor"),
    ],
)
def test_own_epilogues(text: str, expected: str) -> None:
    assert epilogues(text, replace(WISH, epilogues="own")) == expected


def test_conv_sums_in_fp16_all_the_same() -> None:
    text = """
        g (float[1,4,2,2] x) => (float[1,4,2,2] y)
        <float[4,4,1,1] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float[4,1,1] b = {1,2,3,4}> {
            m = Conv(x, w)
            a = Add(m, b)
            y = Conv(a, w)
        }"""
    assert epilogues(text) == ""


@pytest.mark.parametrize(
    "wish",
    [
        pytest.param(PrecisionRequest(), id="nobody asked"),
        pytest.param(replace(WISH, precision="bf16"), id="BF16 sums in FP32 anyway"),
        pytest.param(replace(WISH, target=Target(answers={PROBE: "fp16"})), id="the GPU says no"),
    ],
)
def test_requests_without_epilogues(wish: PrecisionRequest) -> None:
    assert epilogues(BIAS, wish) == ""
    assert epilogues(BIAS, replace(wish, precision="fp16", epilogues="all", target=Target())) == "a"


def test_a_product_in_fp32_has_no_epilogue() -> None:
    assert epilogues(BIAS, replace(WISH, keep_nodes=("m",))) == ""


def test_the_evidence_is_the_product() -> None:
    (decision,) = planned(graphs.graph(BIAS), WISH).decisions
    assert (decision.rule, decision.tensor) == ("epilogue", "m")


ATTENTION = """
    g (float[1,2,4,4] x, float[1,1,4,4] mask) => (float[1,2,4,4] y)
    <float s = {0.5}, float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}> {
        q = Neg(x)
        k = Transpose<perm = [0,1,3,2]>(q)
        m = MatMul(q, k)
        SCORES
        p = Softmax<axis = -1>(t)
        y = MatMul(p, q)
    }"""
SCALED = ATTENTION.replace("SCORES", "t = Mul(m, s)")
MASKED = ATTENTION.replace("SCORES", "a = Mul(m, s)\n t = Add(a, mask)")
GUARDED = MASKED.replace("float s = {0.5}", "float s = {0.5}, float zero = {0.0}").replace(
    "y = MatMul(p, q)", "masked = IsNaN(p)\n safe = Where(masked, zero, p)\n y = MatMul(safe, q)"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(ATTENTION.replace("SCORES", "t = Identity(m)"), "", id="a view between is not known"),
        pytest.param(SCALED, "p", id="scaled scores"),
        pytest.param(SCALED.replace("Mul(m, s)", "Div(m, s)"), "p", id="divided scores"),
        pytest.param(MASKED, "p", id="a mask, which stays FP16"),
        pytest.param(GUARDED, "p", id="a guard against rows masked whole, which stays FP16"),
        pytest.param(GUARDED.replace("zero, p)", "zero, q)"), "", id="other weights"),
        pytest.param(GUARDED.replace("IsNaN(p)", "IsNaN(q)"), "", id="a guard of other weights"),
        pytest.param(GUARDED.replace("IsNaN(p)", "IsInf(p)"), "", id="a guard against infinity"),
        pytest.param(GUARDED.replace("masked, zero, p", "masked, q, p"), "", id="weights in place of NaN"),
        pytest.param(
            GUARDED.replace("masked = IsNaN(p)\n", "").replace("mask)", "mask, bool[1,1,4,4] masked)", 1),
            "",
            id="a mask of the model's",
        ),
        pytest.param(
            GUARDED.replace("=> (float[1,2,4,4] y)", "=> (float[1,2,4,4] y, float[1,2,4,4] safe)"),
            "",
            id="guarded weights are an output",
        ),
        pytest.param(GUARDED.replace("MatMul(safe, q)", "Mul(safe, q)"), "", id="guarded, no second product"),
        pytest.param(SCALED.replace("MatMul(p, q)", "Mul(p, q)"), "", id="no second product"),
        pytest.param(SCALED.replace("MatMul(q, k)", "MatMul(q, w)"), "", id="a product with a weight"),
        pytest.param(SCALED.replace("MatMul(p, q)", "MatMul(p, w)"), "", id="a second product with a weight"),
    ],
)
def test_which_softmax_is_fp32(text: str, expected: str) -> None:
    found = kept(planned(graphs.graph(text), WISH))
    assert " ".join(name for name, rule in found.items() if rule == "softmax") == expected
    assert not expected or list(found) == [expected], "scale and mask are FP16"


def test_a_mask_that_a_product_computes_stays_fp16() -> None:
    """In FP32 it would cost the kernel that attention is."""
    text = MASKED.replace("q = Neg(x)", "q = Neg(x)\n n = MatMul(mask, w)\n bias = Mul(n, s)").replace(
        "Add(a, mask)", "Add(a, bias)"
    )
    found = kept(planned(graphs.graph(text), WISH))
    assert found == {"p": "softmax"}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param({}, {"softmax", "epilogue"}, id="not asked"),
        pytest.param({SOFTMAX_PROBE: "softmax", PROBE: "fp32"}, {"softmax", "epilogue"}, id="yes"),
        pytest.param({SOFTMAX_PROBE: "none"}, {"epilogue"}, id="no FP32 in attention"),
        pytest.param({PROBE: "fp16"}, {"softmax"}, id="no FP32 sums"),
    ],
)
def test_answers_of_probes_switch_rules_off(answers: dict[str, str], expected: set[str]) -> None:
    text = SCALED.replace("y = MatMul(p, q)", "o = MatMul(p, q)\n l = MatMul(o, w)\n y = Add(l, x)")
    target = Target(answers=answers)
    found = planned(graphs.graph(text), replace(WISH, target=target))
    assert {d.rule for d in found.decisions} & FREE == expected
    assert len(list(refusals(target))) == len({"softmax", "epilogue"} - expected)


NORMED = f"""{HEAD} m = MatMul(x, w)
    a = Add(m, r)
    u = Unsqueeze(a, first)
    n = LayerNormalization(u, b)
    l = Squeeze(n, first)
    y = MatMul(l, v) }}""".replace("> {", ", int64[1] first = {0}> {")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(NORMED, "u n", id="a norm that reads the sum through a view, and the view"),
        pytest.param(
            NORMED.replace("y = MatMul(l, v)", "k = MatMul(l, w)\n s = Add(k, l)\n y = MatMul(s, v)"),
            "u n l",
            id="the view after it as well, where an FP32 sum reads it",
        ),
        pytest.param(
            NORMED.replace("LayerNormalization(u, b)", "LayerNormalization(a, b)"),
            "",
            id="no view: it would take the sum",
        ),
        pytest.param(
            f"{HEAD} n = LayerNormalization(x, b)\n y = MatMul(n, v) }}", "n", id="a norm that no sum feeds"
        ),
        pytest.param(NORMED.replace("LayerNormalization(u, b)", "Softmax(u)"), "", id="no norm"),
        pytest.param(NORMED.replace("Unsqueeze(a", "Unsqueeze(r"), "n", id="a view of what stays FP16"),
        pytest.param(
            NORMED.replace("u = Unsqueeze(a, first)", "e = Unsqueeze(a, first)\n u = Identity(e)"),
            "e u n",
            id="two views",
        ),
    ],
)
def test_which_norms_are_fp32(text: str, expected: str) -> None:
    found = kept(planned(graphs.graph(text), WISH))
    assert " ".join(name for name, rule in found.items() if rule == "norm") == expected


@pytest.mark.parametrize(
    "wish",
    [
        pytest.param(PrecisionRequest(), id="nobody asked"),
        pytest.param(replace(WISH, precision="bf16"), id="BF16"),
        pytest.param(replace(WISH, target=Target(answers={PROBE: "fp16"})), id="the GPU says no"),
    ],
)
def test_requests_without_fp32_norms(wish: PrecisionRequest) -> None:
    assert "norm" not in kept(planned(graphs.graph(NORMED), wish)).values()


def test_a_product_that_a_norm_reads_through_a_view_and_a_sum_reads() -> None:
    """The start of a stage in Swin: its kernel writes FP32 for both."""
    text = NORMED.replace("a = Add(m, r)", "a = Identity(m)").replace("Unsqueeze(a", "Unsqueeze(m")
    text = text.replace("a = Identity(m)", "").replace(
        "y = MatMul(l, v)", "z = MatMul(l, w)\n s = Add(z, m)\n y = MatMul(s, v)"
    )
    assert epilogues(text) == "u s"
