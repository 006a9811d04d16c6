"""TF32: operands of 11 bits, as measured, and the reports that users see."""

import json
import math

import graphs
import numpy as np
import pytest
from onnx import helper
from paths import ROOT
from tables import values

import rewriter
from rewriter.ir.model import Array, Model
from rewriter.report.remarks import worded
from rewriter.runtime.emulation import emulation, rounded
from rewriter.runtime.emulation.tf32 import DOMAIN, round_to_tf32
from rewriter.runtime.metrics.pairwise_error import relative_l2
from rewriter.target.fusion import operands_of
from rewriter.verification.expected import run_all


def emulated(source: Model, feeds: dict[str, Array]) -> Array:
    (outputs,) = run_all(emulation(source, tf32=True), [feeds])
    return next(iter(outputs.values()))


def tf32(values: Array) -> Array:
    """Rounded to nearest in binary, 13 bits cut off: another way than the emulation's."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x0FFF) + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


def cut_off(values: Array) -> Array:
    """TF32 without its last bits."""
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def identity(rows: int, opset: int = 17) -> Model:
    """A MatMul on Tensor Cores that copies its first input [rows, 8]."""
    return graphs.graph(
        f"g (float[{rows},8] x, float[8,8] one) => (float[{rows},8] y) {{ y = MatMul(x, one) }}", opset=opset
    )


def few_channels(rows: int, opset: int) -> Model:
    """A Conv of few channels that copies its first input [1, 8, rows, 1]: kernel [3, 3], 1 in the middle."""
    image = f"float[1,8,{rows},1]"
    text = f"g ({image} x, float[8,8,3,3] w) => ({image} y) {{y = Conv<pads=[1,1,1,1]>(x, w)}}"
    return graphs.graph(text, opset=opset)


def all_magnitudes(*shape: int) -> Array:
    rng = np.random.default_rng(0)
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-30, 30, shape)).astype(np.float32)


OPSETS = pytest.mark.parametrize("opset", [9, 12, 17])


@OPSETS
def test_an_operand_keeps_eleven_bits(opset: int) -> None:
    values = all_magnitudes(2000, 8)
    alone = np.where(np.arange(8) == np.arange(2000)[:, None] % 8, values, 0)  # one a row: sums add nothing
    actual = emulated(identity(2000, opset), {"x": alone, "one": np.eye(8, dtype=np.float32)})
    assert np.array_equal(actual, tf32(alone))


@OPSETS
def test_convs_of_few_channels_cut_the_operands_off(opset: int) -> None:
    values = all_magnitudes(1, 8, 2000, 1)
    alone = np.where(np.arange(8)[None, :, None, None] == np.arange(2000)[None, None, :, None] % 8, values, 0)
    alone[..., ::2, :] = 0  # no neighbour in a window
    kernel = np.zeros((8, 8, 3, 3), np.float32)
    kernel[range(8), range(8), 1, 1] = 1
    actual = emulated(few_channels(2000, opset), {"x": alone, "w": kernel})
    assert np.array_equal(actual, cut_off(alone))


NODES = {
    "nearest": "g (float[8,64] x) => (float[8,64] y) {y = MatMul(x, w)}",
    "truncated": "g (float[1,3,64,1] x) => (float[1,16,64,1] y) {y = Conv<pads=[1,1,1,1]>(x, w)}",
    "shared": "g (float[64,64] x) => (float[64,64] y) {a = MatMul(x, w) y = Add(a, w)}",
}


@pytest.mark.parametrize("name", NODES)
def test_weights_are_rounded_ahead_as_in_the_graph_bit_for_bit(name: str) -> None:
    weights = all_magnitudes(*((16, 3, 3, 3) if name == "truncated" else (64, 64)))
    weights.flat[:6] = [0.0, -0.0, np.inf, -np.inf, 3.2e38, 1e-42]
    source = graphs.weighted(NODES[name], w=weights.shape)
    source.weights["w"] = weights
    ahead, in_graph = rounded(source), rounded(source)
    round_to_tf32(ahead, source)
    round_to_tf32(in_graph, source, graph_bytes=0)
    calls = [sum(node.domain == DOMAIN for node in m.proto.graph.node) for m in (ahead, in_graph)]
    assert calls == ([2, 2] if name == "shared" else [1, 2])
    feeds = graphs.random_feeds(source)
    (one,), (other,) = run_all(ahead, [feeds]), run_all(in_graph, [feeds])
    np.testing.assert_array_equal(one["y"], other["y"])


def test_the_recorded_nodes_run_as_predicted() -> None:
    """All in FP32 or TF32 as on the GPU, and 98 % of those in TF32 rounded or cut off as there."""
    recorded = json.loads((ROOT / "benchmarks/product_census.json").read_text())["fp32"]
    assert len(recorded) > 800
    alike = 0
    for op, left, right, attributes, measured, _ in recorded:
        predicted = operands_of(helper.make_node(op, ["x", "w"], ["y"], **attributes), left, right)
        assert (predicted == "fp32") == (measured == "fp32"), (op, left, right, attributes)
        alike += predicted == measured
    assert alike >= 0.98 * len(recorded)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3.4e38, 0.0], ids=str)
def test_values_without_a_neighbour_are_not_rounded(value: float) -> None:
    feeds: dict[str, Array] = {"x": np.full((2, 8), value, np.float32), "one": np.eye(8, dtype=np.float32)}
    exact = graphs.run(identity(2), feeds)[0]
    assert np.array_equal(emulated(identity(2), feeds), exact, equal_nan=True)


@pytest.mark.parametrize(("op", "shapes", "expected"), graphs.cases("emulation/kernels.txt"))
def test_kernels_by_shape_as_on_an_h100_and_an_h200(op: str, shapes: str, expected: str) -> None:
    left, right = [tuple(map(int, shape.split("x"))) for shape in shapes.split()] or [(), ()]
    assert operands_of(helper.make_node(op, ["x", "w"], ["y"]), left, right) == expected


@values
def test_a_depthwise_conv_has_nothing_for_tensor_cores(op: str, weight: str, exact: bool) -> None:
    groups = 2 if weight == "8,4,3,3" else 8
    source = graphs.graph(
        f"g (float[1,8,9,9] x, float[{weight}] w) => (float[N,C,H,W] y) {{ y={op}<group={groups}>(x, w) }}"
    )
    feeds = graphs.random_feeds(source)
    error = relative_l2(graphs.run(source, feeds)[0], emulated(source, feeds))
    assert (error == 0.0) == exact


EXACT = {
    "FP16 values": """g (float16[8,8] x, float16[8,8] w) => (float[8,8] y) {
        a = Cast<to = 1>(x) b = Cast<to = 1>(w) y = MatMul(a, b) }""",
    "dequantized": """g (float[8,8] x, float[8,8] w) => (float[8,8] y) <float s = {0.0173}, int8 z = {0}> {
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
        t = Transpose<perm = [0, 1]>(d) y = MatMul(t, w) }""",
}


@pytest.mark.parametrize("text", EXACT.values(), ids=list(EXACT))
def test_operands_of_few_digits_lose_nothing(text: str) -> None:
    source = graphs.graph(text)
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
        a = Add(x, c) s = ReduceSum(a) m = MatMul(a, w) y = Relu(m) }"""
"""Columns of w that sum to zero take the thousand away, and TF32 has taken the rest."""


def cancelling() -> tuple[Model, dict[str, Array]]:
    source = graphs.graph(CANCELLING)
    feeds = graphs.random_feeds(source)
    feeds["w"] = np.round(feeds["w"] * 8) / 8
    feeds["w"][0] -= feeds["w"].sum(axis=0)
    return source, feeds


def test_fix_to_fp32_reports_the_error_of_tf32() -> None:
    source, feeds = cancelling()
    result = rewriter.fix(source.whole(), precision="fp32", inputs=feeds, build=False)
    check = next(c for c in result.checks if c.name == "tf32")
    assert check.excuse == "tf32-off" and "NVIDIA_TF32_OVERRIDE=0" in worded(check).summary
    assert result.verified and not result.proven and "build it with TF32 off" in result.ending
    calm = graphs.graph("g (float[4,64] x, float[64,8] w) => (float[4,8] y) { y = MatMul(x, w) }")
    result = rewriter.fix(calm.whole(), precision="fp32", build=False)
    assert {c.name: c.passed for c in result.checks}["tf32"]


def test_scan_reports_the_error_of_tf32() -> None:
    source, feeds = cancelling()
    (finding,) = (f for f in rewriter.scan(source.whole(), inputs=feeds).findings if f.kind == "tf32")
    assert finding.severity == "warning" and "by TF32" in finding.reason
