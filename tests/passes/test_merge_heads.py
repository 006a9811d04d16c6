"""merge-projections where results are split into attention's heads: one Reshape, and a Split by heads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graphs import apply, random_feeds, run
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from paths import MODELS

from rewriter.ir.base import Context
from rewriter.ir.model import Array, Model, load
from rewriter.passes.merge_projections import MergeProjections
from rewriter.pipeline.driver import Driver
from rewriter.pipeline.text import parse


def _holds(before: Model, after: Model, feeds: dict[str, Array] | None = None) -> None:
    """The very results but for the order of sums, same signature, and nothing left to do."""
    assert after.signature == before.signature
    onnx.checker.check_model(after.whole(), full_check=True)
    feeds = feeds or random_feeds(before)
    for wanted, found in zip(run(before, feeds), run(after, feeds), strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * float(np.abs(wanted).max()))
    assert not apply(MergeProjections(), after)[1].changes


@st.composite
def attentions(draw: st.DrawFn) -> tuple[Model, dict[str, Array]]:
    """Products cut into 1 to 4 heads each, with targets that write, keep or count the axes before them."""
    batch, length, size = (draw(st.integers(1, 3)) for _ in range(3))
    named = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes, held, outputs = [], [], []
    for i in range(draw(st.integers(2, 4))):
        heads = draw(st.integers(1, 4))
        target = draw(
            st.sampled_from(
                [[batch, length], [0, 0], [0, -1], [-1, 0], [-1, length], [batch, -1], [length, batch]]
            )
        )
        target = [*target, -1 if -1 not in target and draw(st.booleans()) else heads, size]
        held.append(
            numpy_helper.from_array(rng.standard_normal((5, heads * size)).astype(np.float32), f"w{i}")
        )
        held.append(numpy_helper.from_array(np.asarray(target, np.int64), f"t{i}"))
        nodes.append(helper.make_node("MatMul", ["x", f"w{i}"], [f"m{i}"]))
        nodes.append(helper.make_node("Reshape", [f"m{i}", f"t{i}"], [f"y{i}"]))
        outputs.append(helper.make_tensor_value_info(f"y{i}", 1, [None] * 4))
    x = helper.make_tensor_value_info("x", 1, ["b", "l", 5] if named else [batch, length, 5])
    made = helper.make_graph(nodes, "g", [x], outputs, held)
    source = load(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    return source, {"x": rng.standard_normal((batch, length, 5)).astype(np.float32)}


@given(attentions())
def test_any_heads_keep_their_results(case: tuple[Model, dict[str, Array]]) -> None:
    before, feeds = case
    after, report = apply(MergeProjections(), before)
    assert len(report.changes) == 1
    _holds(before, after, feeds)


GROUPS = {"vit": 12, "bert": 2, "swin": 4, "t5_encoder": 2, "llama_block": 2}
"""Groups with heads in the case models: all but a Llama's gate and up."""


@pytest.mark.parametrize("name", GROUPS)
def test_all_heads_of_a_case_are_found(name: str) -> None:
    """Their targets are computed as exported; `simplify` folds them."""
    steps = parse("upgrade-opset,simplify,merge-projections")
    _, reports = Driver().run(load(MODELS / f"{name}.onnx"), steps, Context())
    assert sum("heads" in change.what for change in reports[-1].changes) == GROUPS[name]
