"""shuffle-pixels: ConvTransposes that become sub-pixel convolutions, those that stay, and equal results."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from graphs import apply, graph, keeps_results, ops, with_constants
from hypothesis import given, settings
from hypothesis import strategies as st

from rewriter.base import Context, Kept
from rewriter.jobs.fix import api
from rewriter.model import Model
from rewriter.passes.shuffle_pixels import ShufflePixels

SHUFFLED = ["Conv", "DepthToSpace"]
PLAIN = "ConvTranspose<strides = [2, 2]>"


def _model(
    body: str,
    outputs: str = "float[N,1,8,12] y",
    weights: Mapping[str, tuple[int, ...]] | None = None,
    opset: int = 17,
) -> Model:
    """A graph with random FP32 weights: `w` and `b` of a ConvTranspose from 3 channels to one."""
    shapes = {"w": (3, 1, 2, 2), "b": (1,)} | dict(weights or {})
    return with_constants(body, shapes, "float[N,3,4,6] x", outputs, opset=opset)


@pytest.mark.parametrize("opset", [11, 17, 22])
@pytest.mark.parametrize(
    ("body", "outputs", "weights"),
    [
        pytest.param(f"{{ y = {PLAIN}(x, w, b) }}", "float[N,1,8,12] y", {}, id="a bias"),
        pytest.param(f"{{ y = {PLAIN}(x, w) }}", "float[N,1,8,12] y", {}, id="no bias"),
        pytest.param(
            "{ y = ConvTranspose<strides = [4, 4], kernel_shape = [4, 4]>(x, w, b) }",
            "float[N,5,16,24] y",
            {"w": (3, 5, 4, 4), "b": (5,)},
            id="an upscaler by 4",
        ),
        pytest.param(
            '{ y = ConvTranspose<strides = [2, 2], auto_pad = "SAME_UPPER">(x, w, b) }',
            "float[N,1,8,12] y",
            {},
            id="auto_pad, which has nothing to pad",
        ),
    ],
)
def test_shuffled(body: str, outputs: str, weights: dict[str, tuple[int, ...]], opset: int) -> None:
    before = _model(body, outputs, weights, opset)
    after, report = apply(ShufflePixels(), before)
    assert ops(after) == SHUFFLED
    assert len(report.changes) == 1
    assert not report.refusals
    keeps_results(before, after, ShufflePixels())


def test_sizes_need_not_be_known() -> None:
    before = with_constants(
        f"{{ y = {PLAIN}(x, w) }}", {"w": (3, 1, 2, 2)}, "float[N,3,H,W] x", "float[N,1,R,S] y"
    )
    after, _ = apply(ShufflePixels(), before)
    assert ops(after) == SHUFFLED


def test_names_and_words() -> None:
    before = _model(f"{{ y = {PLAIN}(x, w, b) }}")
    before.proto.graph.node[0].name = "/head/up"
    after, report = apply(ShufflePixels(), before)
    assert [node.name for node in after.proto.graph.node] == [
        "/head/up/shuffled",
        "/head/up/shuffled/DepthToSpace",
    ]
    assert (report.changes[0].node, report.changes[0].what) == (
        "/head/up",
        "a pointwise Conv and DepthToSpace by 2",
    )


def test_nodes_that_share_a_weight_go_on_sharing_it() -> None:
    before = with_constants(
        f"{{ u = {PLAIN}(x, w, b)  n = Neg(x)  v = {PLAIN}(n, w, b)  y = Add(u, v) }}",
        {"w": (3, 1, 2, 2), "b": (1,)},
        "float[N,3,4,6] x",
        "float[N,1,8,12] y",
    )
    after, _ = apply(ShufflePixels(), before)
    convs = [node for node in after.proto.graph.node if node.op_type == "Conv"]
    assert convs[0].input[1:] == convs[1].input[1:]
    keeps_results(before, after, ShufflePixels())


@pytest.mark.parametrize(
    ("body", "weights", "reason"),
    [
        pytest.param(
            "{ y = ConvTranspose<strides = [2, 2], pads = [1, 1, 1, 1]>(x, w) }", {}, "it pads", id="padding"
        ),
        pytest.param(
            "{ y = ConvTranspose<strides = [2, 2], output_padding = [1, 1]>(x, w) }",
            {},
            "its result is larger or smaller than its windows",
            id="output_padding",
        ),
        pytest.param(
            "{ y = ConvTranspose<strides = [2, 2], output_shape = [8, 12]>(x, w) }",
            {},
            "its result is larger or smaller than its windows",
            id="output_shape",
        ),
        pytest.param(
            "{ y = ConvTranspose<strides = [2, 2], dilations = [2, 2]>(x, w) }",
            {},
            "its windows are dilated",
            id="dilation",
        ),
        pytest.param(
            "{ y = ConvTranspose<strides = [2, 2], group = 3>(x, w) }",
            {},
            "its groups would have to be written one by one",
            id="groups",
        ),
        pytest.param(
            f"{{ n = Neg(b)  y = {PLAIN}(x, w, n) }}", {}, "its bias n is computed", id="a computed bias"
        ),
    ],
)
def test_declined(body: str, weights: dict[str, tuple[int, ...]], reason: str) -> None:
    before = _model(body, "float[N,O,R,S] y", weights)
    after, report = apply(ShufflePixels(), before)
    assert after is before
    assert [refusal.reason for refusal in report.refusals] == [f"it stays a ConvTranspose: {reason}"]


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        pytest.param(f"{{ y = {PLAIN}(x, w) }}", {"w": (3, 8, 2, 2)}, id="eight channels"),
        pytest.param(f"{{ y = {PLAIN}(x, w) }}", {"w": (3, 1, 4, 4)}, id="windows that overlap"),
        pytest.param("{ y = ConvTranspose<strides = [4, 4]>(x, w) }", {}, id="gaps"),
        pytest.param(
            "{ y = ConvTranspose<strides = [2, 1]>(x, w) }", {"w": (3, 1, 2, 1)}, id="unequal strides"
        ),
        pytest.param("{ y = ConvTranspose(x, w) }", {"w": (3, 1, 1, 1)}, id="one element"),
        pytest.param(f"{{ v = Neg(w)  y = {PLAIN}(x, v) }}", {}, id="a computed weight"),
    ],
)
def test_skipped_without_a_report(body: str, weights: dict[str, tuple[int, ...]]) -> None:
    before = _model(body, "float[N,O,R,S] y", weights)
    after, report = apply(ShufflePixels(), before)
    assert after is before
    assert not report.refusals


@pytest.mark.parametrize(("depth", "changes"), [(3, 1), (2, 0)])
def test_deep_sums_stay_in_fp32(depth: int, changes: int) -> None:
    _, report = apply(ShufflePixels(depth=depth), _model(f"{{ y = {PLAIN}(x, w) }}"))
    assert len(report.changes) == changes
    assert not report.refusals


def test_a_sequence_of_one_axis_is_skipped() -> None:
    before = graph(
        "g (float[1,2,8] x) => (float[1,1,16] y) <float[2,1,2] w = {1,2,3,4}>"
        " { y = ConvTranspose<strides = [2]>(x, w) }"
    )
    assert apply(ShufflePixels(), before)[0] is before


def test_what_the_user_keeps_stays() -> None:
    before = _model(f"{{ y = {PLAIN}(x, w) }}")
    after, report = apply(ShufflePixels(), before, Context(kept=Kept(ops=("ConvTranspose",))))
    assert after is before
    assert "kept in FP32 by your request" in report.refusals[0].reason


@settings(deadline=None, max_examples=25)
@given(step=st.integers(2, 4), channels=st.integers(1, 7), read=st.integers(1, 5), high=st.integers(1, 4))
def test_any_size_keeps_its_results(step: int, channels: int, read: int, high: int) -> None:
    before = with_constants(
        f"{{ y = ConvTranspose<strides = [{step}, {step}]>(x, w, b) }}",
        {"w": (read, channels, step, step), "b": (channels,)},
        f"float[N,{read},{high},3] x",
        f"float[N,{channels},{high * step},{3 * step}] y",
    )
    after, _ = apply(ShufflePixels(), before)
    assert ops(after) == SHUFFLED
    keeps_results(before, after, ShufflePixels())


def test_the_default_preset_has_it() -> None:
    """In FP16 the two nodes stay what they are."""
    source = with_constants(
        f"{{ a = Relu(x)  d = {PLAIN}(a, w, b)  y = Sigmoid(d) }}",
        {"w": (3, 1, 2, 2), "b": (1,)},
        "float[1,3,4,6] x",
        "float[1,1,8,12] y",
    )
    fixed = api.fix(source.whole(), target="tensorrt-rtx", verify=False).model
    assert [op for op in ops(fixed) if op in (*SHUFFLED, "ConvTranspose")] == SHUFFLED
