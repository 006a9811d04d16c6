"""convtranspose-to-depth-to-space: ConvTransposes that become sub-pixel convolutions, and others."""

from __future__ import annotations

from graphs import apply, keeps_results, ops, with_constants
from hypothesis import given
from hypothesis import strategies as st

from rewriter.passes.convtranspose_to_depth_to_space import ConvtransposeToDepthToSpace

SHUFFLED = ["Conv", "DepthToSpace"]


@given(step=st.integers(2, 4), channels=st.integers(1, 7), read=st.integers(1, 5), high=st.integers(1, 4))
def test_any_size_keeps_its_results(step: int, channels: int, read: int, high: int) -> None:
    before = with_constants(
        f"{{ y = ConvTranspose<strides = [{step}, {step}]>(x, w, b) }}",
        {"w": (read, channels, step, step), "b": (channels,)},
        f"float[N,{read},{high},3] x",
        f"float[N,{channels},{high * step},{3 * step}] y",
    )
    after, _ = apply(ConvtransposeToDepthToSpace(), before)
    assert ops(after) == SHUFFLED
    keeps_results(before, after, ConvtransposeToDepthToSpace())
