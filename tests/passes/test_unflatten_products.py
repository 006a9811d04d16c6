"""unflatten-products: products that lose the Reshapes around them, and gain an FP32 epilogue."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graphs import apply, with_constants
from plans import kept, planned

import rewriter
from rewriter.hazards.survey import PrecisionRequest
from rewriter.ir.model import Model
from rewriter.passes.unflatten_products import UnflattenProducts
from rewriter.pipeline.presets import with_epilogues

SHAPES = {
    "w": (4, 5),
    "t": (5, 4),
    "b": (5,),
    "r": (1, 5),
    "s": (1,),
    "m": (12, 5),
    "u": (5, 5),
    "n": (12, 5),
    "cube": (1, 4, 5),
}


def _model(
    product: str,
    *,
    flat: str = "12, 4",
    back: str = "2, 6, 5",
    x: str = "float[2,6,4] x",
    y: str = "float[2,6,5] y",
    behind: str = "",
) -> Model:
    """Reshape, a product, Reshape; random weights where the product names them."""
    body = f"""{{
        flat = Constant<value_ints = [{flat}]>()
        back = Constant<value_ints = [{back}]>()
        f = Reshape(x, flat)
        p = {product}
        y = Reshape(p, back)
        {behind}
    }}"""
    return with_constants(body, SHAPES, x, y)


def test_the_epilogue_is_fp32_then() -> None:
    before = _model("Gemm(f, w, b)")
    after, _ = apply(UnflattenProducts(), before)
    wish = PrecisionRequest(epilogues=True)
    assert not kept(planned(before, wish))
    assert set(kept(planned(after, wish)).values()) == {"epilogue"}


def test_fix_makes_a_flattened_mlp_more_accurate() -> None:
    body = """{
        flat = Constant<value_ints = [12, 256]>() back = Constant<value_ints = [2, 6, 256]>()
        f = Reshape(x, flat) p = Gemm(f, w, b) h = Reshape(p, back) a = Relu(h)
        g = Reshape(a, flat) q = Gemm(g, v, b) k = Reshape(q, back) y = Add(k, x) }"""
    shapes = {"w": (256, 256), "v": (256, 256), "b": (256,)}
    source = with_constants(body, shapes, "float[2,6,256] x", "float[2,6,256] y")
    inputs = [
        {"x": np.random.default_rng(i).standard_normal((2, 6, 256)).astype(np.float32)} for i in range(2)
    ]
    errors = []
    for steps in (
        [step for step in with_epilogues() if step.name != "unflatten-products"],
        list(with_epilogues()),
    ):
        result = rewriter.fix(source.whole(), inputs=inputs, passes=steps, build=False, accumulation="fp16")
        assert result.verdict is not None
        (check,) = (check for check in result.verdict.checks if check.name == "emulation")
        errors.append(max(output.relative_l2 for output in check.outputs))
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize(
    ("product", "operator"),
    [pytest.param("Gemm(f, w, b)", "Add", id="C"), pytest.param("Gemm(f, w)", "MatMul", id="no C")],
)
def test_a_plan_with_a_node_that_took_over_a_name_fits_again(
    product: str, operator: str, tmp_path: Path
) -> None:
    source, plan = _model(product).whole(), tmp_path / "plan.json"
    steps = list(with_epilogues())
    first = rewriter.fix(source, passes=steps, keep_fp32_op=[operator], save_plan=plan, build=False)
    again = rewriter.fix(source, passes=steps, plan=plan, build=False)
    assert first.proto == again.proto
    assert again.plan is not None
    assert any(d.rule == "user" for d in again.plan.decisions)
