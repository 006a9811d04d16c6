"""unfold-patches: Convs that become products, Convs that stay, equal results and layouts."""

import numpy as np
import pytest
from graphs import apply, keeps_results, model_of, ops
from hypothesis import given
from hypothesis import strategies as st
from nightly import some
from onnx import TensorProto, helper
from paths import MODELS

from rewriter import api
from rewriter.ir.model import Array, Model
from rewriter.passes.unfold_patches import UnfoldPatches
from rewriter.pipeline.presets import DEFAULT_PRESET, PRESETS

CONV = "Conv<kernel_shape = [2, 4], strides = [2, 4]>"


@st.composite
def convs(draw: st.DrawFn) -> tuple[Model, bool]:
    """A Conv of one to three axes whose windows step by their size, and whether they leave nothing over."""
    kernel = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda k: np.prod(k) > 1))
    counts = [draw(st.integers(1, 4)) for _ in kernel]
    over = [draw(st.sampled_from([0, 0, 0, 1])) % k for k in kernel]
    read, out, batch = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    held: dict[str, Array] = {"w": rng.standard_normal((out, read, *kernel))}
    if draw(st.booleans()):
        held["b"] = rng.standard_normal(out)
    behind = draw(st.sampled_from(["nothing", "last", "flat", "turned"]))
    nodes = [helper.make_node("Conv", ["x", *held], ["y" if behind == "nothing" else "c"], strides=kernel)]
    axes = list(range(len(kernel) + 2))
    if behind == "last":
        nodes.append(helper.make_node("Transpose", ["c"], ["y"], perm=[0, *axes[2:], 1]))
    elif behind == "turned":
        nodes.append(helper.make_node("Transpose", ["c"], ["y"], perm=axes[::-1]))
    elif behind == "flat":
        held["shape"] = np.asarray([0, out, -1])
        nodes.append(helper.make_node("Reshape", ["c", "shape"], ["f"]))
        nodes.append(helper.make_node("Transpose", ["f"], ["y"], perm=[0, 2, 1]))
    sizes = [c * k + o for c, k, o in zip(counts, kernel, over, strict=True)]
    rows: int | str = batch if draw(st.booleans()) else "N"
    opset = draw(st.sampled_from([11, 13, 17, 18, 21, 23]))
    return model_of(nodes, {"x": [rows, read, *sizes]}, "y", held, opset=opset), not any(over)


@given(convs())
def test_any_conv_of_patches_keeps_its_results(drawn: tuple[Model, bool]) -> None:
    before, divides = drawn
    after, report = apply(UnfoldPatches(depth=1), before)
    if not divides:
        assert after is before
        assert ["leave a remainder" in refusal.reason for refusal in report.refusals] == [True]
        return
    assert "Conv" not in ops(after)
    assert ops(after).count("MatMul") == 1
    keeps_results(before, after, UnfoldPatches())


PATCHES = {"vit": 1, "vit_massive": 1, "swin": 1, "convnext": 4, "nafnet": 7, "resnet": 0, "mobilenet_v2": 0}
"""Convs of the case models that become products."""


def _pipeline() -> str:
    """The default one, with all patches."""
    return PRESETS[DEFAULT_PRESET].pipeline.replace("unfold-patches", "unfold-patches{depth=1}")


@pytest.mark.parametrize("name", some("convnext", "vit", "swin", "nafnet"))
def test_the_product_gets_an_fp32_epilogue(name: str) -> None:
    """MatMul in FP16, Cast, Add in FP32: the form that sums in FP32."""
    model = MODELS / f"{name}.onnx"
    passes = _pipeline().replace("epilogues=own", "epilogues=all")
    result = api.fix(model, passes=passes, inputs=model.with_suffix(".npz"), build=False)
    assert result.verified
    nodes = list(result.proto.graph.node)
    readers = {name: node for node in nodes for name in node.input}
    products = [n for n in nodes if n.name.endswith("/unfolded")]
    assert len(products) == PATCHES[name]
    for product in products:
        cast = readers[product.output[0]]
        add = readers[cast.output[0]]
        assert (cast.op_type, cast.attribute[0].i, add.op_type) == ("Cast", TensorProto.FLOAT, "Add")
        assert add.name == f"{product.name}/Add"
