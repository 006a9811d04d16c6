"""Probes of what FP32 islands cost, and which ones attention stays fused in. They need a GPU's clock."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rewriter.engines.probe.arithmetic import normal
from rewriter.engines.probe.question import Case, Probe, Seen

FUSED = 1.3
"""Ratio of latencies up to which attention is still one kernel: 1.01 measured with an FP32 Softmax, 3.4 with
an FP32 product before it (H200, TensorRT-RTX 1.6.1)."""

CHEAP = 1.15
"""Ratio up to which an island is cheap: large MatMuls took 1.035 to 1.085, Conv 1.13 (64 channels) to 2.1."""

SHAPE = "1,12,1024,64"


def _attention(name: str, body: str) -> Case:
    return Case(
        name,
        f"g (float16[{SHAPE}] q, float16[1,12,64,1024] k, float16[{SHAPE}] v) => (float16[{SHAPE}] y)"
        f" {{ {body} }}",
        {
            "q": normal(20, 1, 12, 1024, 64, scale=0.35),
            "k": normal(21, 1, 12, 64, 1024, scale=0.35),
            "v": normal(22, 1, 12, 1024, 64),
        },
        timed=True,
    )


def _fusion(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    us = {name: s.us or 0.0 for name, s in seen.items()}
    plain = us["FP16"] or 1.0
    softmax, product = (us[name] / plain <= FUSED for name in ("FP32 Softmax", "FP32 QK^T and Softmax"))
    return ("any" if softmax and product else "softmax" if softmax else "none"), us


def _matmul(size: int, *, island: bool) -> Case:
    cast = "a = Cast<to = 1>(x) b = Cast<to = 1>(w) c = MatMul(a, b) y = Cast<to = 10>(c)"
    shape = f"{size},{size}"
    return Case(
        f"{size}, {'FP32' if island else 'FP16'}",
        f"g (float16[{shape}] x, float16[{shape}] w) => (float16[{shape}] y)"
        f" {{ {cast if island else 'y = MatMul(x, w)'} }}",
        {"x": normal(23, size, size)},
        {"w": normal(24, size, size, scale=0.02)},
        timed=True,
    )


def _conv(channels: int, *, island: bool) -> Case:
    conv = "Conv<pads = [1,1,1,1]>"
    cast = f"a = Cast<to = 1>(x) b = Cast<to = 1>(w) c = {conv}(a, b) y = Cast<to = 10>(c)"
    shape = f"1,{channels},56,56"
    return Case(
        f"{channels}, {'FP32' if island else 'FP16'}",
        f"g (float16[{shape}] x, float16[{channels},{channels},3,3] w) => (float16[{shape}] y)"
        f" {{ {cast if island else f'y = {conv}(x, w)'} }}",
        {"x": normal(25, 1, channels, 56, 56)},
        {"w": np.asarray(normal(26, channels, channels, 3, 3) * np.float16(0.02), np.float16)},
        timed=True,
    )


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
        "matmul-island",
        "What does an FP32 island round a MatMul cost?",
        COST,
        tuple(_matmul(size, island=island) for size in (1024, 2048) for island in (False, True)),
        _ratio,
        "recorded costs of the plan",
    ),
    Probe(
        "conv-island",
        "What does an FP32 island round a Conv cost?",
        COST,
        tuple(_conv(channels, island=island) for channels in (64, 256, 512) for island in (False, True)),
        _ratio,
        "recorded costs of the plan",
    ),
)
