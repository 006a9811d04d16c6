"""TF32 in the emulation: operands of FP32 products, and nothing else."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

from rewriter import facts, verify
from rewriter.emulation import emulation
from rewriter.model import Array, Model, load

PRODUCT = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[64,K] a, float[K,32] b) => (float[64,32] y) { y = MatMul (a, b) }
"""
HALVES = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[64,K] a, float[K,32] b) => (float[64,32] y) {
        c = Cast <to = 10> (a)
        d = Cast <to = 10> (b)
        z = MatMul (c, d)
        y = Cast <to = 1> (z)
    }
"""


def model(text: str) -> Model:
    return load(onnx.parser.parse_model(text.replace("K", "768")))


def ran(given: Model, feeds: dict[str, Array], tf32: bool) -> Array:
    (outputs,) = verify.run_all(emulation(given, facts.infer(given), tf32=tf32), [feeds])
    return outputs["y"]


@pytest.fixture
def feeds() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {"a": (64, 768), "b": (768, 32)}
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def eleven_bits(x: Array) -> Array:
    """Rounded to nearest with 11 significant bits, by another way than the emulation's."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    rounded: Array = np.ldexp(np.rint(mantissa * 2**11), exponent - 11).astype(np.float32)
    return rounded


def test_an_fp32_product_errs_as_measured_on_a_gpu(feeds: dict[str, Array]) -> None:
    exact = feeds["a"].astype(np.float64) @ feeds["b"].astype(np.float64)
    error = np.linalg.norm(ran(model(PRODUCT), feeds, True) - exact) / np.linalg.norm(exact)
    assert 2.6e-4 < error < 3.2e-4  # measured: 2.9e-4


def test_operands_are_rounded_to_nearest(feeds: dict[str, Array]) -> None:
    rounded = {n: eleven_bits(x) for n, x in feeds.items()}
    np.testing.assert_array_equal(ran(model(PRODUCT), feeds, True), ran(model(PRODUCT), rounded, False))


def test_fp16_products_stay_as_they_are(feeds: dict[str, Array]) -> None:
    np.testing.assert_array_equal(ran(model(HALVES), feeds, True), ran(model(HALVES), feeds, False))


def test_dequantized_operands_stay_as_they_are(feeds: dict[str, Array]) -> None:
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[64,768] a, float[768,32] b) => (float[64,32] y)
        <float s = {0.0173}, int8 z = {0}>
        {
            q = QuantizeLinear (a, s, z)
            d = DequantizeLinear (q, s, z)
            t = Transpose <perm = [0, 1]> (d)
            y = MatMul (t, b)
        }
    """
    np.testing.assert_array_equal(ran(model(text), feeds, True), ran(model(text), feeds, False))


@pytest.mark.parametrize("value", [0.0, 1.0, -3.4e38, 1e-30, 2.0**-100])
def test_the_ends_of_the_range_survive(value: float) -> None:
    text = PRODUCT.replace("64,K", "1,1").replace("K,32", "1,1").replace("64,32", "1,1")
    given = load(onnx.parser.parse_model(text))
    one = {"a": np.full((1, 1), value, np.float32), "b": np.ones((1, 1), np.float32)}
    np.testing.assert_array_equal(ran(given, one, True), eleven_bits(one["a"]))


def test_a_convolution_and_an_inner_graph() -> None:
    text = """
        <ir_version: 8, opset_import: ["" : 17]>
        g (bool go, float[1,8,6,6] x, float[4,8,3,3] w) => (float[1,4,4,4] y) {
            y = If (go) <
                then_branch = t () => (float[1,4,4,4] p) { p = Conv (x, w) },
                else_branch = e () => (float[1,4,4,4] q) { c = Conv (x, w) q = Neg (c) }
            >
        }
    """
    rng = np.random.default_rng(1)
    feeds = {
        "x": rng.standard_normal((1, 8, 6, 6)).astype(np.float32),
        "w": rng.standard_normal((4, 8, 3, 3)).astype(np.float32),
    }
    rounded = {n: eleven_bits(x) for n, x in feeds.items()}
    given = load(onnx.parser.parse_model(text))
    for go in (np.array(True), np.array(False)):
        np.testing.assert_allclose(
            ran(given, {"go": go, **feeds}, True), ran(given, {"go": go, **rounded}, False), rtol=1e-6
        )
