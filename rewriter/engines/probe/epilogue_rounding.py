"""Probes of FP16 products with FP32 consumers: does a fused kernel leave the sum unrounded?"""

from __future__ import annotations

import numpy as np

from rewriter.engines.probe.arithmetic import DEPTHS, ROUNDED_ONCE, convolved_back, normal
from rewriter.engines.probe.question import Case, Probe, by_error
from rewriter.model import Array

SUM_UNROUNDED = 2e-3
"""Between the cost of one rounding of each of two results, and of a rounding of the sums of
`_after_transposed` to FP16 (docs/engines.md#thresholds-of-probes)."""

CANCELLED = 96.0
"""In the middle of the binade of 64 to 128, where FP16's spacing is 2^-4."""

ACTIVATIONS = {"Relu": "a = Relu(c)", "SiLU": "g = Sigmoid(c) a = Mul(c, g)"}


def _after_matmul(depth: int) -> Case:
    return Case(
        f"depth {depth}",
        "m = MatMul(x, w) c = Cast<to = 1>(m) a = Add(c, b) y = Cast<to = 10>(a)",
        {"x": normal(depth, 64, depth)},
        {"w": normal(depth + 1, depth, 64, scale=0.05), "b": normal(depth + 2, 64, dtype=np.float32)},
        lambda t: t["x"] @ t["w"] + t["b"],
        (64, 64),
    )


def _after_transposed(channels: int, kernel: int, size: int, activation: str) -> Case:
    """A ConvTranspose with an activation in FP32, and a ConvTranspose that reads it.

    The bias cancels most of the sum, so that a sum that is rounded before the bias is added shows. The second
    ConvTranspose makes the activation an inner one. docs/engines.md#thresholds-of-probes has the reasons.
    """
    margin = kernel // 2
    transposed = f"ConvTranspose<pads = [{', '.join([str(margin)] * 4)}]>"
    return Case(
        f"{activation}, depth {channels * kernel**2}",
        f"h = Cast<to = 10>(x) t = {transposed}(h, w, b) c = Cast<to = 1>(t) "
        f"{ACTIVATIONS[activation]} d = Cast<to = 10>(a) u = {transposed}(d, v) y = Cast<to = 1>(u)",
        {"x": _with_ones(channels, size)},
        _cancelling(channels, kernel) | {"v": _weight(channels + 2, channels, kernel)},
        lambda t: convolved_back(_activated(convolved_back(t["x"], t["w"], t["b"]), activation), t["v"]),
    )


def _with_ones(channels: int, size: int) -> Array:
    """Data that FP16 holds, as float32."""
    x = normal(channels, 1, channels, size, size)
    x[0, 0] = 1.0
    return x.astype(np.float32)


def _weight(seed: int, channels: int, kernel: int) -> Array:
    return normal(seed, channels, channels, kernel, kernel, scale=(channels * kernel**2) ** -0.5)


def _cancelling(channels: int, kernel: int) -> dict[str, Array]:
    weight = _weight(channels + 1, channels, kernel)
    signs = np.asarray(np.where(np.arange(channels) % 2, -CANCELLED, CANCELLED), np.float16)
    weight[0] = 0.0
    weight[0, :, kernel // 2, kernel // 2] = signs
    return {"w": weight, "b": -signs}


def _activated(x: Array, activation: str) -> Array:
    return np.asarray(np.maximum(x, 0.0) if activation == "Relu" else x / (1.0 + np.exp(-x)))


PROBES: tuple[Probe, ...] = (
    Probe(
        "matmul-epilogue",
        "Does an FP32 bias make an FP16 MatMul sum in FP32?",
        {"fp32": "yes, and it is rounded once", "fp16": "no"},
        tuple(map(_after_matmul, DEPTHS)),
        by_error(ROUNDED_ONCE, "fp32", "fp16"),
        "mixed-precision{epilogues=true} keeps nothing in FP32 where it does not",
    ),
    Probe(
        "conv-transpose-epilogue",
        "Does an FP32 activation leave the sum and bias of an FP16 ConvTranspose of stride 1 unrounded?",
        {"fp32": "yes: the sum is not rounded before the bias is added", "fp16": "no"},
        (
            _after_transposed(64, 3, 56, "Relu"),
            _after_transposed(256, 3, 14, "Relu"),
            _after_transposed(256, 1, 56, "Relu"),
            _after_transposed(256, 3, 40, "SiLU"),
        ),
        by_error(SUM_UNROUNDED, "fp32", "fp16"),
        "mixed-precision{epilogues=true} keeps activations after ConvTransposes in FP32 unless it is fp16",
    ),
)
