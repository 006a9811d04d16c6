"""Probes of operators that some releases get wrong, or that FP16 does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rewriter.engines.probe.arithmetic import convolved, normal
from rewriter.engines.probe.cast_round_trips import CASES as ROUND_TRIPS
from rewriter.engines.probe.question import Case, Probe, Seen
from rewriter.model import Array

RIGHT = 5e-3
"""Relative L2 error of a right result in FP16, accumulators included. Lost bounds and coordinates cost 1e-2
(GridSample in FP16, measured) or more."""

CORRECT = {"right": "right", "wrong": "wrong"}


def _all_right(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    errors = {name: s.error for name, s in seen.items() if s.value is not None}
    return "right" if errors and all(e <= RIGHT for e in errors.values()) else "wrong", errors


def _conv_clip(kind: str, dtype: type) -> Case:
    return Case(
        np.dtype(dtype).name,
        f"""g ({kind}[1,16,32,32] x, {kind}[16,16,3,3] w, {kind} low, {kind} high) => ({kind}[1,16,30,30] y)
        {{ c = Conv(x, w) y = Clip(c, low, high) }}""",
        {"x": normal(3, 1, 16, 32, 32, dtype=dtype)},
        {
            "w": normal(4, 16, 16, 3, 3, dtype=dtype),
            "low": np.asarray(-1.0, dtype),
            "high": np.asarray(6.0, dtype),
        },
        lambda t: np.clip(convolved(t["x"], t["w"]), -1.0, 6.0),
    )


def _matmul_clip(kind: str, dtype: type) -> Case:
    return Case(
        np.dtype(dtype).name,
        f"""g ({kind}[64,128] x, {kind}[128,64] w, {kind}[64] b, {kind} low, {kind} high) => ({kind}[64,64] y)
        {{ m = MatMul(x, w) a = Add(m, b) y = Clip(a, low, high) }}""",
        {"x": normal(5, 64, 128, dtype=dtype)},
        {
            "w": normal(6, 128, 64, dtype=dtype),
            "b": normal(8, 64, dtype=dtype),
            "low": np.asarray(-2.0, dtype),
            "high": np.asarray(3.0, dtype),
        },
        lambda t: np.clip(t["x"] @ t["w"] + t["b"], -2.0, 3.0),
    )


SIDE = 256


def _grid_case(name: str, opset: int, *, island: bool = False) -> Case:
    mode = "bilinear" if opset < 20 else "linear"
    sample = f'GridSample<mode = "{mode}", align_corners = 1>'
    body = f"h = Cast<to = 10>(g) y = {sample}(x, h)"
    if island:
        body = f"a = Cast<to = 1>(x) c = {sample}(a, g) y = Cast<to = 10>(c)"
    rng = np.random.default_rng(11)
    return Case(
        name,
        f"graph (float16[1,4,{SIDE},{SIDE}] x, float[1,64,64,2] g) => (float16[1,4,64,64] y) {{ {body} }}",
        {
            "x": normal(9, 1, 4, SIDE, SIDE),
            "g": np.asarray(rng.uniform(-0.99, 0.99, (1, 64, 64, 2)), np.float32),
        },
        {},
        lambda t: bilinear(t["x"], t["g"]),
        opset,
    )


def bilinear(image: Array, grid: Array) -> Array:
    """GridSample<align_corners = 1> of a grid within -1..1, in float64."""
    height, width = image.shape[2:]
    x, y = (grid[0, ..., 0] + 1) / 2 * (width - 1), (grid[0, ..., 1] + 1) / 2 * (height - 1)
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    dx, dy = x - left, y - top
    corners = ((0, 0, (1 - dy) * (1 - dx)), (0, 1, (1 - dy) * dx), (1, 0, dy * (1 - dx)), (1, 1, dy * dx))
    found = sum(image[0][:, top + j, left + i] * share for j, i, share in corners)
    return np.asarray(found)[None]


def _grid(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    errors = {name: s.error for name, s in seen.items() if s.value is not None}
    if errors.get("FP32 island", 0.0) > RIGHT:
        return "wrong", errors
    return "accurate" if errors["FP16, opset 16"] <= RIGHT else "inaccurate", errors


def _softmax(name: str, masked: float) -> Case:
    bias = np.zeros((8, 64), np.float16)
    bias[0] = masked
    return Case(
        name,
        "g (float16[8,64] x, float16[8,64] m) => (float16[8,64] y)"
        " { a = Add(x, m) y = Softmax<axis = -1>(a) }",
        {"x": normal(12, 8, 64), "m": bias},
    )


def _mask(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    if not seen["-65504"].finite:
        return "nan-always", {}
    return ("finite" if seen["-inf"].finite else "nan"), {}


def _simple(name: str, question: str, case: Case, used: str) -> Probe:
    return Probe(name, question, CORRECT, (case,), _all_right, used)


PROBES: tuple[Probe, ...] = (
    Probe(
        "conv-clip",
        "Is Clip right after Conv?",
        CORRECT,
        (_conv_clip("float", np.float32), _conv_clip("float16", np.float16)),
        _all_right,
        "isolate-clip runs, and scan warns, where it is wrong",
    ),
    Probe(
        "matmul-add-clip",
        "Is Clip right after MatMul and Add?",
        CORRECT,
        (_matmul_clip("float", np.float32), _matmul_clip("float16", np.float16)),
        _all_right,
        "isolate-clip runs, and scan warns, where it is wrong",
    ),
    Probe(
        "cast-round-trip-output",
        "Is an FP32 result of a product right that is cast to FP16 and back, as an output and for a Conv?",
        CORRECT,
        ROUND_TRIPS,
        _all_right,
        "drop-round-trips runs, and scan warns, where it is wrong",
    ),
    Probe(
        "grid-sample",
        "Is GridSample accurate with an FP16 grid, and does opset 20 build?",
        {
            "accurate": "accurate in FP16",
            "inaccurate": "accurate in an FP32 island alone",
            "wrong": "wrong in FP32, too",
        },
        (
            _grid_case("FP16, opset 16", 16),
            _grid_case("FP32 island", 16, island=True),
            _grid_case("FP16, opset 20", 20),
        ),
        _grid,
        "GridSample goes into an FP32 island",
        frozenset({"FP16, opset 20"}),
    ),
    _simple(
        "cumsum-twice",
        "Are two CumSum nodes in one graph right?",
        Case(
            "float32",
            """g (float[4,32,32] x, int64 one, int64 two) => (float[4,32,32] y)
            { a = CumSum(x, one) b = CumSum(x, two) c = CumSum(a, two) y = Add(b, c) }""",
            {"x": normal(13, 4, 32, 32, dtype=np.float32)},
            {"one": np.asarray(1, np.int64), "two": np.asarray(2, np.int64)},
            lambda t: t["x"].cumsum(2) + t["x"].cumsum(1).cumsum(2),
        ),
        "scan warns where it is wrong (NVIDIA/TensorRT#4551)",
    ),
    _simple(
        "reduce-log-sum-exp",
        "Is ReduceLogSumExp of FP16 values up to 20 right?",
        Case(
            "float16",
            "g (float16[64,256] x) => (float16[64] y) { y = ReduceLogSumExp<axes = [1], keepdims = 0>(x) }",
            {"x": np.asarray(np.random.default_rng(14).uniform(0, 20, (64, 256)), np.float16)},
            {},
            lambda t: np.log(np.exp(t["x"]).sum(1)),
        ),
        "the plan keeps it in FP32 where the sum inside leaves FP16",
    ),
    Probe(
        "masked-softmax",
        "What is Softmax of a row that is masked everywhere?",
        {
            "finite": "finite, with -inf, too",
            "nan": "NaN with -inf, finite with -65504",
            "nan-always": "NaN with -65504, too",
        },
        (_softmax("-inf", -np.inf), _softmax("-65504", -65504.0)),
        _mask,
        "clamp-constants brings masks into range",
    ),
)
