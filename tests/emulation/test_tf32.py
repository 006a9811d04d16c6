"""TF32: operands of 11 bits, as measured, and the reports that users see."""

from __future__ import annotations

import math

import graphs
import numpy as np
import pytest

import rewriter
from rewriter.emulation import emulation
from rewriter.figures.compare import relative_l2
from rewriter.model import Array, Model, facts
from rewriter.verification.checks import run_all


def emulated(source: Model, feeds: dict[str, Array]) -> Array:
    (outputs,) = run_all(emulation(source, facts.infer(source), tf32=True), [feeds])
    return next(iter(outputs.values()))


def tf32(values: Array) -> Array:
    """Rounded to nearest in binary, 13 bits cut off: another way than the emulation's."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x0FFF) + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


IDENTITY = "g (float[N,1] x, float[1,1] one) => (float[N,1] y) { y = MatMul(x, one) }"


def test_an_operand_keeps_eleven_bits() -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(2000) * 10.0 ** rng.uniform(-30, 30, 2000)).astype(np.float32)
    source = graphs.graph(IDENTITY.replace("N", "2000"))
    actual = emulated(source, {"x": values[:, None], "one": np.ones((1, 1), np.float32)})
    assert np.array_equal(actual[:, 0], tf32(values))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3.4e38, 0.0], ids=str)
def test_values_without_a_neighbour_are_not_rounded(value: float) -> None:
    source = graphs.graph(IDENTITY.replace("N", "1"))
    feeds: dict[str, Array] = {"x": np.full((1, 1), value, np.float32), "one": np.ones((1, 1), np.float32)}
    assert np.array_equal(emulated(source, feeds)[0], feeds["x"][0], equal_nan=True)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("float[64,768] x, float[768,64] w) => (float[64,64] y) { y = MatMul", id="MatMul"),
        pytest.param(
            "float[1,64,16,16] x, float[64,64,3,3] w) => (float[1,64,14,14] y) { y = Conv",
            id="Conv",
        ),
        pytest.param("float[64,768] x, float[768,64] w) => (float[64,64] y) { y = Gemm", id="Gemm"),
    ],
)
def test_products_of_random_numbers_err_as_on_an_h200(text: str) -> None:
    source = graphs.graph(f"g ({text}(x, w) }}")
    feeds = graphs.random_feeds(source)
    error = relative_l2(graphs.run(source, feeds)[0], emulated(source, feeds))
    assert error == pytest.approx(2.9e-4, rel=0.05)


@pytest.mark.parametrize(
    ("op", "weight", "exact"),
    [
        pytest.param("Conv", "8,1,3,3", True, id="depthwise"),
        pytest.param("Conv", "16,1,3,3", True, id="depthwise, two results of each channel"),
        pytest.param("Conv", "8,4,3,3", False, id="two groups of four channels"),
        pytest.param("ConvTranspose", "8,1,3,3", True, id="depthwise ConvTranspose"),
    ],
)
def test_a_depthwise_conv_has_nothing_for_tensor_cores(op: str, weight: str, exact: bool) -> None:
    groups = 2 if weight == "8,4,3,3" else 8
    source = graphs.graph(
        f"g (float[1,8,9,9] x, float[{weight}] w) => (float[N,C,H,W] y) {{ y={op}<group={groups}>(x, w) }}"
    )
    feeds = graphs.random_feeds(source)
    error = relative_l2(graphs.run(source, feeds)[0], emulated(source, feeds))
    assert (error == 0.0) == exact


def test_fp16_values_lose_nothing() -> None:
    source = graphs.graph("""
        g (float16[8,8] x, float16[8,8] w) => (float[8,8] y) {
            a = Cast<to = 1>(x)
            b = Cast<to = 1>(w)
            y = MatMul(a, b)
        }""")
    feeds = graphs.random_feeds(source)
    assert np.array_equal(graphs.run(source, feeds)[0], emulated(source, feeds))


def test_dequantized_operands_are_not_rounded() -> None:
    source = graphs.graph("""
        g (float[8,8] x, float[8,8] w) => (float[8,8] y) <float s = {0.0173}, int8 z = {0}> {
            q = QuantizeLinear(x, s, z)
            d = DequantizeLinear(q, s, z)
            t = Transpose<perm = [0, 1]>(d)
            y = MatMul(t, w)
        }""")
    feeds = graphs.random_feeds(source)
    assert np.array_equal(graphs.run(source, feeds)[0], emulated(source, feeds))


def test_a_product_in_a_branch_is_rounded_too() -> None:
    source = graphs.graph("""
        g (bool c, float[8,8] x) => (float[8,8] y) {
            y = If(c) <
                then_branch = yes () => (float[8,8] p) { p = MatMul(x, x) },
                else_branch = no () => (float[8,8] q) { q = Neg(x) }
            >
        }""")
    feeds = graphs.random_feeds(source)
    error = relative_l2(graphs.run(source, feeds)[0], emulated(source, feeds))
    assert 1e-4 < error < 1e-3


CANCELLING = """
    g (float[4,64] x, float[64,8] w) => (float[4,8] y) <float c = {1000.0}> {
        a = Add(x, c)
        s = ReduceSum(a)
        m = MatMul(a, w)
        y = Relu(m)
    }"""
"""Columns of w that sum to zero take the thousand away, and TF32 has taken the rest."""


def cancelling() -> tuple[Model, dict[str, Array]]:
    source = graphs.graph(CANCELLING.replace("        s = ReduceSum(a)\n", ""))
    feeds = graphs.random_feeds(source)
    feeds["w"] = np.round(feeds["w"] * 8) / 8
    feeds["w"][0] -= feeds["w"].sum(axis=0)
    return source, feeds


def test_fix_to_fp32_reports_the_error_of_tf32() -> None:
    source, feeds = cancelling()
    result = rewriter.fix(source.whole(), precision="fp32", inputs=feeds, build=False)
    assert result.verdict is not None
    check = next(c for c in result.verdict.checks if c.name == "tf32")
    assert check.passed is False and "NVIDIA_TF32_OVERRIDE=0" in check.summary
    calm = graphs.graph("g (float[4,64] x, float[64,8] w) => (float[4,8] y) { y = MatMul(x, w) }")
    result = rewriter.fix(calm.whole(), precision="fp32", build=False)
    assert result.verdict is not None
    assert {c.name: c.passed for c in result.verdict.checks}["tf32"]


def test_scan_reports_the_error_of_tf32() -> None:
    source, feeds = cancelling()
    (finding,) = (f for f in rewriter.scan(source.whole(), inputs=feeds).findings if f.kind == "tf32")
    assert finding.severity == "warning" and "through TF32" in finding.reason
