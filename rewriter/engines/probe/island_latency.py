"""Probes of the latency of FP32 islands and of attention. They need a GPU's clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from rewriter.engines.probe.arithmetic import normal
from rewriter.engines.probe.question import Case, Probe, Seen
from rewriter.model import Array

FUSED = 1.3
"""Ratio of latencies up to which attention is still one kernel (docs/engines.md#thresholds-of-probes)."""

CHEAP = 1.15
"""Ratio up to which an island is cheap (docs/engines.md#thresholds-of-probes)."""


def _attention(name: str, nodes: str) -> Case:
    feeds = {
        "q": normal(20, 1, 12, 1024, 64, scale=0.35),
        "k": normal(21, 1, 12, 64, 1024, scale=0.35),
        "v": normal(22, 1, 12, 1024, 64),
    }
    return Case(name, nodes, feeds, timed=True)


def _fusion(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    us = {name: s.us or 0.0 for name, s in seen.items()}
    plain = us["FP16"] or 1.0
    softmax, product = (us[name] / plain <= FUSED for name in ("FP32 Softmax", "FP32 QK^T and Softmax"))
    return ("any" if softmax and product else "softmax" if softmax else "none"), us


def _whole_attention(name: str, nodes: str, opset: int) -> Case:
    feeds = {n: normal(20 + i, 1, 12, 1024, 64, scale=0.35) for i, n in enumerate("qkv")}
    return Case(name, nodes, feeds, opset=opset, timed=True)


def _operator(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    us = {name: s.us or 0.0 for name, s in seen.items()}
    ratio = us["the operator"] / (us["written out"] or 1.0)
    return "faster" if ratio < 1.0 else "no-faster", us | {"ratio": ratio}


def _pair(size: int, product: str, x: Array, w: Array) -> Iterator[Case]:
    """A product in FP16, and in an FP32 island."""
    island = f"a = Cast<to = 1>(x) b = Cast<to = 1>(w) c = {product}(a, b) y = Cast<to = 10>(c)"
    for kind, nodes in (("FP16", f"y = {product}(x, w)"), ("FP32", island)):
        yield Case(f"{size}, {kind}", nodes, {"x": x}, {"w": w}, timed=True)


def _matmul(size: int) -> Iterator[Case]:
    return _pair(size, "MatMul", normal(23, size, size), normal(24, size, size, scale=0.02))


def _conv(channels: int) -> Iterator[Case]:
    weight = np.asarray(normal(26, channels, channels, 3, 3) * np.float16(0.02))
    return _pair(channels, "Conv<pads = [1,1,1,1]>", normal(25, 1, channels, 56, 56), weight)


def _ratio(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    us = {name: s.us or 0.0 for name, s in seen.items()}
    sizes = dict.fromkeys(name.split(",")[0] for name in us)
    ratios = {f"{size}, ratio": us[f"{size}, FP32"] / (us[f"{size}, FP16"] or 1.0) for size in sizes}
    return "cheap" if max(ratios.values()) <= CHEAP else "expensive", us | ratios


COST = {"cheap": f"at most {CHEAP} times as long", "expensive": "more"}

PROBES: tuple[Probe, ...] = (
    Probe(
        "attention-islands",
        "Which FP32 islands leave attention fused?",
        {
            "any": "round Softmax, and round the product before it, too",
            "softmax": "round Softmax alone",
            "none": "none",
        },
        (
            _attention("FP16", "s = MatMul(q, k) p = Softmax<axis = -1>(s) y = MatMul(p, v)"),
            _attention(
                "FP32 Softmax",
                "s = MatMul(q, k) t = Cast<to = 1>(s) u = Softmax<axis = -1>(t) p = Cast<to = 10>(u) "
                "y = MatMul(p, v)",
            ),
            _attention(
                "FP32 QK^T and Softmax",
                "a = Cast<to = 1>(q) b = Cast<to = 1>(k) s = MatMul(a, b) t = Softmax<axis = -1>(s) "
                "p = Cast<to = 10>(t) y = MatMul(p, v)",
            ),
        ),
        _fusion,
        "mixed-precision{epilogues=true} leaves attention's Softmax in FP16 where it is none",
    ),
    Probe(
        "attention-operator",
        "Is the operator Attention of opset 23 faster than attention in small operators?",
        {"faster": "yes", "no-faster": "no"},
        (
            _whole_attention(
                "written out",
                "t = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, t) p = Softmax<axis = -1>(s) "
                "y = MatMul(p, v)",
                17,
            ),
            _whole_attention("the operator", "y = Attention<scale = 1.0>(q, k, v)", 23),
        ),
        _operator,
        "no pass writes it (docs/accuracy.md#the-operator-attention)",
    ),
    Probe(
        "matmul-island",
        "What does an FP32 island round a MatMul cost?",
        COST,
        tuple(case for size in (1024, 2048) for case in _matmul(size)),
        _ratio,
        "recorded costs of the plan",
    ),
    Probe(
        "conv-island",
        "What does an FP32 island round a Conv cost?",
        COST,
        tuple(case for channels in (64, 256, 512) for case in _conv(channels)),
        _ratio,
        "recorded costs of the plan",
    ),
)
