"""convtranspose-to-depth-to-space: ConvTransposes that become sub-pixel convolutions, and others."""

import pytest
from graphs import apply, keeps_results, ops, with_constants
from hypothesis import assume, given
from hypothesis import strategies as st

from rewriter.passes.convtranspose_to_depth_to_space import MOST_OVERLAP, ConvtransposeToDepthToSpace

sizes = st.integers(1, 5)


@pytest.mark.parametrize("axes", [1, 2])
@given(
    data=st.data(), step=st.integers(2, 4), channels=st.integers(1, 7), read=sizes, kernel=st.integers(1, 9)
)
def test_any_window(axes: int, data: st.DataObject, step: int, channels: int, read: int, kernel: int) -> None:
    length, longer = data.draw(sizes), data.draw(st.integers(0, step - 1))
    pads = data.draw(st.lists(st.integers(0, kernel // 2), min_size=2, max_size=2))
    end = (length - 1) * step + kernel + longer - sum(pads)
    assume(end >= 1 and (axes == 2 or kernel <= MOST_OVERLAP * step))
    attributes = {
        "kernel_shape": [kernel] * axes,
        "strides": [step] * axes,
        "pads": [pads[0]] * axes + [pads[1]] * axes,
        "output_padding": [longer] * axes,
    }
    has_bias = data.draw(st.booleans())
    weights = {"w": (read, channels, *[kernel] * axes)} | ({"b": (channels,)} if has_bias else {})
    shape = ",".join([str(length)] * axes) if data.draw(st.booleans()) else ",".join("LMN"[:axes])
    written = ", ".join(f"{name} = {value}" for name, value in attributes.items())
    before = with_constants(
        f"{{ y = ConvTranspose<{written}>(x, {', '.join(weights)}) }}",
        weights,
        f"float[B,{read},{shape}] x",
        f"float[B,{channels},{','.join('OPQ'[:axes])}] y",
    )
    after, _ = apply(ConvtransposeToDepthToSpace(), before)
    assert "ConvTranspose" not in ops(after)
    keeps_results(before, after, ConvtransposeToDepthToSpace())


@given(steps=st.tuples(*[st.integers(1, 3)] * 3), gap=st.integers(0, 1), read=sizes, high=sizes)
def test_volumes_without_overlap(steps: tuple[int, int, int], gap: int, read: int, high: int) -> None:
    assume(max(steps) > 1)
    kernel = [max(step - gap, 1) for step in steps]
    attributes = f"strides = {list(steps)}, pads = [0, 0, 0, 0, 0, {kernel[2] // 2}]"
    before = with_constants(
        f"{{ y = ConvTranspose<{attributes}>(x, w, b) }}",
        {"w": (read, 3, *kernel), "b": (3,)},
        f"float[B,{read},{high},2,3] x",
        "float[B,3,O,P,Q] y",
    )
    after, _ = apply(ConvtransposeToDepthToSpace(), before)
    assert "ConvTranspose" not in ops(after)
    keeps_results(before, after, ConvtransposeToDepthToSpace())
