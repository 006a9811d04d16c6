"""Models of FP32 products whose results are cast to FP16 and back (rewriter/patterns/round_trips.py)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rewriter.engines.probe.arithmetic import convolved, normal
from rewriter.engines.probe.question import Case
from rewriter.model import Array

ROWS, WIDTH = 128, 768
"""As in BERT; docs/engines.md#casts-to-fp16-and-back has the errors."""

CHANNELS, INNER, SIDE = 256, 64, 56
"""As in the first bottlenecks of ResNet-50."""

EPSILON = 1e-5

_ROUND_TRIP = "h = Cast<to = 10>(a) y = Cast<to = 1>(h)"


def _after_norm(name: str, steps: str, dtype: type) -> Case:
    """LayerNormalization, MatMul, FP32 bias, and the pair of Casts; `dtype` is that of norm and product."""
    weights = {
        "s": np.ones(WIDTH, dtype),
        "o": np.zeros(WIDTH, dtype),
        "w": normal(22, WIDTH, WIDTH, scale=WIDTH**-0.5, dtype=dtype),
        "b": normal(23, WIDTH, scale=0.1, dtype=np.float32),
    }
    return Case(
        name,
        f"{steps} {_ROUND_TRIP}",
        {"x": normal(21, 1, ROWS, WIDTH, dtype=np.float32)},
        weights,
        _projected,
    )


def _projected(t: Mapping[str, Array]) -> Array:
    centred = t["x"] - t["x"].mean(-1, keepdims=True)
    spread = np.sqrt((centred * centred).mean(-1, keepdims=True) + EPSILON)
    return np.asarray(centred / spread @ t["w"] + t["b"])


def _bottleneck() -> Case:
    """Three FP32 Convs with a pair of Casts after each ReLU."""
    back = "<to = 1>"
    return Case(
        "Convs",
        f"o = Cast<to = 10>(x) p = Cast{back}(o) c = Conv(p, u) d = Relu(c) "
        f"e = Cast<to = 10>(d) f = Cast{back}(e) "
        f"i = Conv<pads = [1,1,1,1]>(f, v) j = Relu(i) k = Cast<to = 10>(j) l = Cast{back}(k) "
        f"m = Conv(l, w) n = Add(m, p) a = Relu(n) {_ROUND_TRIP}",
        {"x": normal(24, 1, CHANNELS, SIDE, SIDE, dtype=np.float32)},
        {
            "u": normal(25, INNER, CHANNELS, 1, 1, scale=CHANNELS**-0.5, dtype=np.float32),
            "v": normal(26, INNER, INNER, 3, 3, scale=(9 * INNER) ** -0.5, dtype=np.float32),
            "w": normal(27, CHANNELS, INNER, 1, 1, scale=INNER**-0.5, dtype=np.float32),
        },
        _convolved_thrice,
    )


def _convolved_thrice(t: Mapping[str, Array]) -> Array:
    inner = np.maximum(convolved(t["x"], t["u"]), 0.0)
    padded = np.pad(inner, ((0, 0), (0, 0), (1, 1), (1, 1)))
    inner = np.maximum(convolved(padded, t["v"]), 0.0)
    return np.asarray(np.maximum(convolved(inner, t["w"]) + t["x"], 0.0))


CASES = (
    _after_norm(
        "FP16 product, FP32 bias",
        "d = Cast<to = 10>(x) n = LayerNormalization<axis = -1>(d, s, o) m = MatMul(n, w) "
        "c = Cast<to = 1>(m) a = Add(c, b)",
        np.float16,
    ),
    _after_norm(
        "FP32 product",
        "n = LayerNormalization<axis = -1>(x, s, o) m = MatMul(n, w) a = Add(m, b)",
        np.float32,
    ),
    _bottleneck(),
)
