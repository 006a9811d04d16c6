"""drop-round-trips: pairs of Casts that are removed, pairs that end no kernel, and the targets concerned."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import apply, graph, ops, random_feeds, run

from rewriter.base import Context, Target
from rewriter.passes.drop_round_trips import PROBE, DropRoundTrips

HEAD = "g (float[2,4] x, float[4,4] w, float[4] b, float[4,4] v) => (float[2,4] y)"
SIZES = "<int64[2] flat = {1, 8}, int64[2] back = {2, 4}>"
SUM = "m = MatMul(x, w) a = Add(m, b)"
IMAGE = "g (float[1,2,4,4] x, float[2,2,1,1] w) => (float[1,2,4,4] y)"


TWICE = HEAD.replace("(float[2,4] y)", "(float[2,4] y, float[2,4] z)")


def trips(body: str, head: str) -> str:
    """Operators that are left, in order; the results are those of before but for the rounding."""
    before = graph(f"{head} {SIZES} {{ {body} }}")
    after, report = apply(DropRoundTrips(), before)
    assert not report.refusals
    feeds = random_feeds(before)
    for a, b in zip(run(before, feeds), run(after, feeds), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-3, atol=5e-3)
    return " ".join(ops(after))


GO = {
    "an output": (f"{SUM} h = Cast<to = 10>(a) y = Cast<to = 1>(h)", HEAD, "MatMul Add"),
    "an output behind Gemm": ("a = Gemm(x, w, b) h = Cast<to = 10>(a) y = Cast<to = 1>(h)", HEAD, "Gemm"),
    "an FP16 product with an FP32 bias": (
        "l = Cast<to = 10>(x) u = Cast<to = 10>(w) m = MatMul(l, u) f = Cast<to = 1>(m) a = Add(f, b)"
        " h = Cast<to = 10>(a) y = Cast<to = 1>(h)",
        HEAD,
        "Cast Cast MatMul Cast Add",
    ),
    "an activation between": (
        f"{SUM} s = Sigmoid(a) p = Mul(s, a) h = Cast<to = 10>(p) y = Cast<to = 1>(h)",
        HEAD,
        "MatMul Add Sigmoid Mul",
    ),
    "another product reads it": (
        f"{SUM} h = Cast<to = 10>(a) f = Cast<to = 1>(h) y = MatMul(f, v)",
        HEAD,
        "MatMul Add MatMul",
    ),
    "a Concat reads it": (
        f"{SUM} h = Cast<to = 10>(a) f = Cast<to = 1>(h) y = Concat<axis = 0>(f, x)",
        HEAD.replace("float[2,4] y", "float[4,4] y"),
        "MatMul Add Concat",
    ),
    "views that cancel out": (
        f"{SUM} h = Cast<to = 10>(a) r = Reshape(h, flat) s = Reshape(r, back) y = Cast<to = 1>(s)",
        HEAD,
        "MatMul Add",
    ),
    "an Identity between": (
        f"{SUM} h = Cast<to = 10>(a) i = Identity(h) y = Cast<to = 1>(i)",
        HEAD,
        "MatMul Add",
    ),
    "an output that a sum reads, too": (
        f"{SUM} h = Cast<to = 10>(a) y = Cast<to = 1>(h) z = Add(y, x)",
        TWICE,
        "MatMul Add Add",
    ),
    "between Convs": (
        "c = Conv(x, w) r = Relu(c) h = Cast<to = 10>(r) f = Cast<to = 1>(h) y = Conv(f, w)",
        IMAGE,
        "Conv Relu Conv",
    ),
}


@pytest.mark.parametrize(("body", "head", "left"), GO.values(), ids=GO.keys())
def test_removed_round_trips(body: str, head: str, left: str) -> None:
    assert trips(body, head) == left


STAY = {
    "nothing goes back": (f"{SUM} h = Cast<to = 10>(a) n = Neg(h) y = Cast<to = 1>(n)", HEAD),
    "FP16 is read as well": (
        f"{SUM} h = Cast<to = 10>(a) y = Cast<to = 1>(h) n = Neg(h) z = Cast<to = 1>(n)",
        TWICE,
    ),
    "FP32 is read as well": (
        f"{SUM} h = Cast<to = 10>(a) y = Cast<to = 1>(h) z = Neg(a)",
        TWICE,
    ),
    "a view between": (
        f"{SUM} h = Cast<to = 10>(a) r = Reshape(h, flat) y = Cast<to = 1>(r)",
        HEAD.replace("float[2,4] y", "float[1,8] y"),
    ),
    "a Transpose behind": (
        f"{SUM} h = Cast<to = 10>(a) f = Cast<to = 1>(h) y = Transpose(f)",
        HEAD.replace("float[2,4] y", "float[4,2] y"),
    ),
    "an activation behind": (f"{SUM} h = Cast<to = 10>(a) f = Cast<to = 1>(h) y = Relu(f)", HEAD),
    "a norm behind": (
        f"{SUM} h = Cast<to = 10>(a) f = Cast<to = 1>(h) y = LayerNormalization(f, b)",
        HEAD,
    ),
    "no product before": ("a = Add(x, x) h = Cast<to = 10>(a) y = Cast<to = 1>(h)", HEAD),
    "a Softmax after the product": (
        f"{SUM} s = Softmax(a) h = Cast<to = 10>(s) y = Cast<to = 1>(h)",
        HEAD,
    ),
    "BF16, which was not tried": (f"{SUM} h = Cast<to = 16>(a) y = Cast<to = 1>(h)", HEAD),
    "a Conv whose result is the output": ("c = Conv(x, w) h = Cast<to = 10>(c) y = Cast<to = 1>(h)", IMAGE),
}


@pytest.mark.parametrize(("body", "head"), STAY.values(), ids=STAY.keys())
def test_kept_round_trips(body: str, head: str) -> None:
    before = graph(f"{head} {SIZES} {{ {body} }}")
    assert apply(DropRoundTrips(when="always"), before)[0] is before


def test_fp16_cast_up_down_and_up_is_not_rounded() -> None:
    before = graph(
        "g (float16[2,4] x, float16[4,4] w) => (float[2,4] y) {"
        " m = MatMul(x, w) a = Cast<to = 1>(m) h = Cast<to = 10>(a) y = Cast<to = 1>(h) }"
    )
    assert apply(DropRoundTrips(when="always"), before)[0] is before


@pytest.mark.parametrize(
    ("when", "target", "answer", "applies"),
    [
        pytest.param("auto", "tensorrt-rtx", "", True, id="TensorRT-RTX without probe results"),
        pytest.param("auto", "tensorrt-rtx", "wrong", True, id="seen to be wrong"),
        pytest.param("auto", "tensorrt-rtx", "right", False, id="seen to be right"),
        pytest.param("auto", "tensorrt", "", True, id="an unknown release"),
        pytest.param("auto", "10.13", "", False, id="a release of which nothing is known"),
        pytest.param("auto", "10.13", "wrong", True, id="a release seen to be wrong"),
        pytest.param("never", "tensorrt-rtx", "wrong", False, id="never"),
        pytest.param("always", "10.13", "right", True, id="always"),
    ],
)
def test_when(when: str, target: str, answer: str, applies: bool) -> None:
    parsed = Target.parse(target)
    known = Target(parsed.library, parsed.version, {PROBE: answer} if answer else {})
    step = DropRoundTrips(when=when)  # type: ignore[arg-type]
    _, report = apply(step, graph(DropRoundTrips.before), Context(target=known))
    assert bool(report.changes) is applies
