"""decompose-dot-products: products that become sums, products that stay, and the planned FP32 nodes."""

import numpy as np
import pytest
from graphs import cases, graph, ops, weighted
from plans import kept, planned

import rewriter
from rewriter.hazards.analysis import PrecisionRequest
from rewriter.ir.model import Array, Model, load


def _network() -> tuple[Model, list[dict[str, Array]]]:
    """A Conv, pooling, a head."""
    source = weighted(
        "g (float[1,8,9,9] x) => (float[1,24] y)"
        " { c = Conv(x, v) p = GlobalAveragePool(c) f = Flatten(p) y = Gemm<transB = 1>(f, w, b) }",
        v=(48, 8, 1, 1),
        w=(24, 48),
        b=(24,),
    )
    rng = np.random.default_rng(3)
    return source, [{"x": rng.standard_normal((1, 8, 9, 9)).astype(np.float32)} for _ in range(2)]


def test_fix_keeps_the_head_in_fp32_with_its_pooling_and_nothing_before_it() -> None:
    source, samples = _network()
    result = rewriter.fix(source.whole(), inputs=samples)
    assert result.verdict is not None and result.verdict.passed
    assert result.plan is not None
    rules = {d.op: d.rule for d in result.plan.decisions}
    assert set(rules) == {"GlobalAveragePool", "Flatten", "Mul", "ReduceSum", "Add", "Reshape"}
    assert set(rules.values()) == {"dot-product"}
    model = load(result.proto)
    (found,) = (model.array(t) for t in model.proto.graph.initializer if t.name == "w")
    np.testing.assert_array_equal(found, source.weights["w"])


@pytest.mark.parametrize("preset", ["trt11-migrate", "trt-bf16"])
def test_elsewhere_the_head_stays_a_product(preset: str) -> None:
    source, samples = _network()
    result = rewriter.fix(source.whole(), inputs=samples, build=False, preset=preset)
    assert "Gemm" in ops(load(result.proto))
    assert "ReduceSum" not in ops(load(result.proto))
    assert result.plan is not None and not result.plan.decisions


WRITTEN = "g (float[1,8,4,4] x, float[5,8] v) => (OUT) <float[5,8] w = {W}, int64[1] one = {1}> {"


@pytest.mark.parametrize(("body", "outputs", "expected"), cases("passes/kept_sums.txt"))
def test_nodes_of_decomposed_sums_that_the_plan_keeps(body: str, outputs: str, expected: str) -> None:
    numbers = ", ".join(["0.5"] * 40)
    text = WRITTEN.replace("OUT", outputs).replace("W}", numbers + "}") + body + "}"
    source = graph(text)
    found = kept(planned(source, PrecisionRequest()))
    assert " ".join(sorted(name for name, rule in found.items() if rule == "dot-product")) == expected
