"""FP32 where it is free: most graphs are in free_fp32.txt; here are requests, and answers of probes."""

from dataclasses import replace

import graphs
import numpy as np
import pytest
from plans import kept, planned

from rewriter.hazards.analysis import PrecisionRequest
from rewriter.hazards.planning.free_fp32 import FREE, PROBE, SOFTMAX_PROBE, refusals
from rewriter.ir.plan import Epilogues
from rewriter.target import Target

WISH = PrecisionRequest(epilogues="all")

HEAD = """
    g (float[2,4] x, float[2,4] r, float[4,4] v) => (float[2,4] y)
    <float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}, float[4] b = {1,2,3,4}> {
"""
BIAS = f"{HEAD} m = MatMul(x, w)\n a = Add(m, b)\n y = MatMul(a, v) }}"
VIT_B = "m = MatMul(x, w) a = Add(m, b) y = MatMul(a, v)"
NORMED = f"""{HEAD} m = MatMul(x, w)
    a = Add(m, r)
    u = Unsqueeze(a, first)
    n = LayerNormalization(u, b)
    l = Squeeze(n, first)
    y = MatMul(l, v) }}""".replace("> {", ", int64[1] first = {0}> {")


def epilogues(text: str, wanted: PrecisionRequest = WISH) -> str:
    """First outputs of the nodes that the rule keeps."""
    return " ".join(
        name for name, rule in kept(planned(graphs.graph(text), wanted)).items() if rule == "epilogue"
    )


@pytest.mark.parametrize(("text", "option", "expected"), graphs.cases("planning/free_fp32.txt"))
def test_what_is_free_in_a_graph(text: str, option: Epilogues, expected: str) -> None:
    found = kept(planned(graphs.graph(text), replace(WISH, epilogues=option)))
    assert ", ".join(f"{rule} {name}" for name, rule in found.items()) == expected


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(PrecisionRequest(), id="nobody asked"),
        pytest.param(replace(WISH, precision="bf16"), id="BF16 sums in FP32 anyway"),
        pytest.param(replace(WISH, target=Target(answers={PROBE: "fp16"})), id="the GPU says no"),
    ],
)
def test_requests_without_epilogues_and_fp32_norms(wanted: PrecisionRequest) -> None:
    assert epilogues(BIAS, wanted) == ""
    assert epilogues(BIAS, replace(wanted, precision="fp16", epilogues="all", target=Target())) == "a"
    assert "norm" not in kept(planned(graphs.graph(NORMED), wanted)).values()


def test_a_product_in_fp32_has_no_epilogue() -> None:
    assert epilogues(BIAS, replace(WISH, keep_nodes=("m",))) == ""


def test_the_evidence_is_the_product() -> None:
    (decision,) = planned(graphs.graph(BIAS), WISH).decisions
    assert (decision.rule, decision.tensor) == ("epilogue", "m")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(197, "a", id="one image"),
        pytest.param(512, "a", id="launches decide"),
        pytest.param(3152, "", id="16 images: arithmetic decides"),
    ],
)
def test_a_product_has_an_own_epilogue_where_arithmetic_does_not_decide(rows: int, expected: str) -> None:
    text = f"g (float[N,768] x) => (float[N,768] y) {{ {VIT_B} }}"
    shapes = {"w": (768, 3072), "b": (3072,), "v": (3072, 768)}
    sample = {"x": np.broadcast_to(np.float32(), (rows, 768))}
    found = planned(graphs.weighted(text, **shapes), PrecisionRequest(epilogues="own", sample=sample))
    assert " ".join(kept(found)) == expected


SCALED = """
    g (float[1,2,4,4] x, float[1,1,4,4] mask) => (float[1,2,4,4] y)
    <float s = {0.5}, float[4,4] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}> {
        q = Neg(x) k = Transpose<perm = [0,1,3,2]>(q) m = MatMul(q, k) t = Mul(m, s)
        p = Softmax<axis = -1>(t) o = MatMul(p, q) l = MatMul(o, w) y = Add(l, x) }"""


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
    target = Target(answers=answers)
    found = planned(graphs.graph(SCALED), replace(WISH, target=target))
    assert {d.rule for d in found.decisions} & FREE == expected
    assert len(list(refusals(target))) == len({"softmax", "epilogue"} - expected)
