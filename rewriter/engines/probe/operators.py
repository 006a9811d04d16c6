"""Probes of operators that some releases get wrong, or that FP16 does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rewriter.engines.probe.arithmetic import convolved, normal
from rewriter.engines.probe.cast_round_trips import CASES as ROUND_TRIPS
from rewriter.engines.probe.question import Case, Probe, Seen, by_error
from rewriter.model import Array

RIGHT = 5e-3
"""Relative L2 error of a right result in FP16, accumulators included; lost bounds and coordinates cost more
(docs/engines.md#thresholds-of-probes)."""


def _bounds(dtype: type, low: float, high: float) -> dict[str, Array]:
    return {"low": np.asarray(low, dtype), "high": np.asarray(high, dtype)}


def _conv_clip(dtype: type) -> Case:
    return Case(
        np.dtype(dtype).name,
        "c = Conv(x, w) y = Clip(c, low, high)",
        {"x": normal(3, 1, 16, 32, 32, dtype=dtype)},
        {"w": normal(4, 16, 16, 3, 3, dtype=dtype), **_bounds(dtype, -1.0, 6.0)},
        lambda t: np.clip(convolved(t["x"], t["w"]), t["low"], t["high"]),
        (1, 16, 30, 30),
    )


def _matmul_clip(dtype: type) -> Case:
    weights = {"w": normal(6, 128, 64, dtype=dtype), "b": normal(8, 64, dtype=dtype)}
    return Case(
        np.dtype(dtype).name,
        "m = MatMul(x, w) a = Add(m, b) y = Clip(a, low, high)",
        {"x": normal(5, 64, 128, dtype=dtype)},
        {**weights, **_bounds(dtype, -2.0, 3.0)},
        lambda t: np.clip(t["x"] @ t["w"] + t["b"], t["low"], t["high"]),
        (64, 64),
    )


SIDE = 256


def _grid_case(name: str, opset: int, *, island: bool = False) -> Case:
    mode = "bilinear" if opset < 20 else "linear"
    sample = f'GridSample<mode = "{mode}", align_corners = 1>'
    nodes = f"h = Cast<to = 10>(g) y = {sample}(x, h)"
    if island:
        nodes = f"a = Cast<to = 1>(x) c = {sample}(a, g) y = Cast<to = 10>(c)"
    rng = np.random.default_rng(11)
    return Case(
        name,
        nodes,
        {
            "x": normal(9, 1, 4, SIDE, SIDE),
            "g": np.asarray(rng.uniform(-0.99, 0.99, (1, 64, 64, 2)), np.float32),
        },
        {},
        lambda t: bilinear(t["x"], t["g"]),
        (1, 4, 64, 64),
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
    return Case(name, "a = Add(x, m) y = Softmax<axis = -1>(a)", {"x": normal(12, 8, 64), "m": bias})


def _mask(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    if not seen["-65504"].finite:
        return "nan-always", {}
    return ("finite" if seen["-inf"].finite else "nan"), {}


def _correct(name: str, question: str, used: str, *cases: Case) -> Probe:
    """Asks if the results of all cases are right."""
    values = {"right": "right", "wrong": "wrong"}
    return Probe(name, question, values, cases, by_error(RIGHT, "right", "wrong"), used)


PROBES: tuple[Probe, ...] = (
    _correct(
        "conv-clip",
        "Is Clip right after Conv?",
        "isolate-clip runs, and scan warns, where it is wrong",
        _conv_clip(np.float32),
        _conv_clip(np.float16),
    ),
    _correct(
        "matmul-add-clip",
        "Is Clip right after MatMul and Add?",
        "isolate-clip runs, and scan warns, where it is wrong",
        _matmul_clip(np.float32),
        _matmul_clip(np.float16),
    ),
    _correct(
        "cast-round-trip-output",
        "Is an FP32 result of a product right that is cast to FP16 and back, as an output and for a Conv?",
        "drop-round-trips runs, and scan warns, where it is wrong",
        *ROUND_TRIPS,
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
    _correct(
        "cumsum-twice",
        "Are two CumSum nodes in one graph right?",
        "scan warns where it is wrong (NVIDIA/TensorRT#4551)",
        Case(
            "float32",
            "a = CumSum(x, one) b = CumSum(x, two) c = CumSum(a, two) y = Add(b, c)",
            {"x": normal(13, 4, 32, 32, dtype=np.float32)},
            {"one": np.asarray(1, np.int64), "two": np.asarray(2, np.int64)},
            lambda t: t["x"].cumsum(2) + t["x"].cumsum(1).cumsum(2),
        ),
    ),
    _correct(
        "reduce-log-sum-exp",
        "Is ReduceLogSumExp of FP16 values up to 20 right?",
        "the plan keeps it in FP32 where the sum inside leaves FP16",
        Case(
            "float16",
            "y = ReduceLogSumExp<axes = [1], keepdims = 0>(x)",
            {"x": np.asarray(np.random.default_rng(14).uniform(0, 20, (64, 256)), np.float16)},
            {},
            lambda t: np.log(np.exp(t["x"]).sum(1)),
            (64,),
        ),
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
