"""Probes of how accumulators, normalisations, TF32 and Casts compute.

Thresholds stand between what one H200 with TensorRT-RTX 1.6.1 was measured to give: rounding an exact result
to FP16 costs 2.1e-4 to 2.9e-4 (relative L2), FP16 accumulators 1.05e-3 and more from a depth of 768 on.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rewriter.engines.probe.question import Case, Probe, Seen
from rewriter.model import Array

ROUNDED_ONCE = 5e-4
"""Below: computed in FP32 and rounded once, whose standard error is 2^-11 / sqrt(3) = 2.8e-4 of a value."""

NOT_TF32 = 5e-5
"""TF32 rounds inputs to 11 bits (2.9e-4 measured), FP32 to 24 (3.8e-6 measured)."""

DEPTHS = (768, 3072, 4096)

INSIDE = {"fp32": "computes in FP32 inside", "fp16": "loses accuracy or overflows in FP16 inside"}
ACCUMULATES = {"fp32": "accumulates in FP32", "fp16": "accumulates in FP16"}


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: type = np.float16) -> Array:
    """Seeded normal data, so that every machine asks the same."""
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def _matmul(depth: int) -> Case:
    return Case(
        f"depth {depth}",
        f"g (float16[64,{depth}] x, float16[{depth},64] w) => (float16[64,64] y) {{ y = MatMul(x, w) }}",
        {"x": normal(depth, 64, depth)},
        {"w": normal(depth + 1, depth, 64, scale=0.05)},
        lambda t: t["x"] @ t["w"],
    )


def _conv(channels: int) -> Case:
    shape = f"[1,{channels},14,14]"
    return Case(
        f"depth {channels * 9}",
        f"g (float16{shape} x, float16[64,{channels},3,3] w) => (float16[1,64,12,12] y) {{ y = Conv(x, w) }}",
        {"x": normal(channels, 1, channels, 14, 14)},
        {"w": normal(channels + 1, 64, channels, 3, 3, scale=0.05)},
        lambda t: convolved(t["x"], t["w"]),
    )


def convolved(x: Array, w: Array) -> Array:
    """Conv without padding, stride 1, float64."""
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))
    return np.asarray(np.einsum("nchwij,ocij->nohw", windows, w, optimize=True))


def _transposed(channels: int, size: int) -> Case:
    """3x3, as many channels as it reads, padded to the same size: what a Conv of stride 1 becomes."""
    shape = f"float16[1,{channels},{size},{size}]"
    weight = normal(channels + 1, channels, channels, 3, 3, scale=0.05)
    return Case(
        f"depth {channels * 9}",
        f"g ({shape} x, float16[{channels},{channels},3,3] w, float16[{channels}] b) => ({shape} y) "
        "{ y = ConvTranspose<pads = [1, 1, 1, 1]>(x, w, b) }",
        {"x": normal(channels, 1, channels, size, size)},
        {"w": weight, "b": normal(channels + 2, channels)},
        lambda t: convolved_back(t["x"], t["w"], t["b"]),
    )


def convolved_back(x: Array, w: Array, b: Array | None = None) -> Array:
    """ConvTranspose of a square, odd kernel, padded to the same size, stride 1, float64."""
    margin = w.shape[2] // 2
    field = np.pad(x, ((0, 0), (0, 0), (margin, margin), (margin, margin)))
    result = convolved(field, np.flip(w, (2, 3)).swapaxes(0, 1))
    return result if b is None else np.asarray(result + b[:, None, None])


def _partial_sums() -> Case:
    """Terms of 100 whose sum is 512 x 100 x 2 half-way and 0 at the end: out of FP16's range between."""
    signs = np.repeat([1.0, -1.0], 2048)
    return Case(
        "partial sums of 204800",
        "g (float16[64,4096] x, float16[4096,64] w) => (float16[64,64] y) { y = MatMul(x, w) }",
        {"x": np.full((64, 4096), 10.0, np.float16)},
        {"w": np.asarray(np.tile(10.0 * signs[:, None], (1, 64)), np.float16)},
    )


def _accumulation(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    errors = {name: s.error for name, s in seen.items() if name.startswith("depth")}
    finite = {name: float(s.finite) for name, s in seen.items() if name.startswith("partial")}
    exact = max(errors.values()) <= ROUNDED_ONCE and all(finite.values())
    return "fp32" if exact else "fp16", errors | {f"{name}: finite": f for name, f in finite.items()}


def _normalized(t: Mapping[str, Array], axes: tuple[int, ...], *, centre: bool = True) -> Array:
    x = t["x"] - t["x"].mean(axes, keepdims=True) * centre
    return np.asarray(x / np.sqrt(np.mean(x * x, axes, keepdims=True) + 1e-5))


def _norm(
    name: str,
    call: str,
    opset: int,
    shape: tuple[int, ...],
    weights: Mapping[str, Array],
    axes: tuple[int, ...],
) -> Probe:
    declared = ", ".join(f"float16[{','.join(map(str, a.shape))}] {n}" for n, a in weights.items())
    sizes = ",".join(map(str, shape))

    def exact(t: Mapping[str, Array]) -> Array:
        if name == "GroupNormalization":
            grouped = {"x": t["x"].reshape(shape[0], 8, -1)}
            return _normalized(grouped, (2,)).reshape(shape)
        return _normalized(t, axes, centre=name != "RMSNormalization")

    case = Case(
        "deviation 1000",
        f"g (float16[{sizes}] x, {declared}) => (float16[{sizes}] y) {{ y = {call} }}",
        {"x": normal(7, *shape, scale=1000.0)},
        weights,
        exact,
        opset,
    )
    words = "".join(f"-{c.lower()}" if c.isupper() else c for c in name.replace("RMS", "Rms")).lstrip("-")
    return Probe(
        words,
        f"Does {name} keep FP32 inside if its input is FP16?",
        INSIDE,
        (case,),
        lambda seen: (
            "fp32" if seen["deviation 1000"].error <= 2 * ROUNDED_ONCE else "fp16",
            {"deviation 1000": seen["deviation 1000"].error},
        ),
        "the plan keeps the operator in FP32 where it does not",
    )


def _ones(*shape: int) -> Array:
    return np.ones(shape, np.float16)


def _zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float16)


def _tf32_case(name: str, *, tf32: bool) -> Case:
    return Case(
        name,
        "g (float[256,512] x, float[512,256] w) => (float[256,256] y) { y = MatMul(x, w) }",
        {"x": normal(1, 256, 512, dtype=np.float32)},
        {"w": normal(2, 512, 256, dtype=np.float32)},
        lambda t: t["x"] @ t["w"],
        tf32=tf32,
    )


def _tf32(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    default, off = (seen[name].error for name in ("as it comes", "switched off"))
    value = "stays" if off > NOT_TF32 else "off" if default > NOT_TF32 else "unused"
    return value, {"as it comes": default, "switched off": off}


def _casts(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    value = seen["1e5"].value
    kept = value is not None and bool(np.isinf(value.astype(np.float64)).all())
    return "kept" if kept else "removed", {}


PROBES: tuple[Probe, ...] = (
    Probe(
        "matmul-accumulation",
        "In which type does an FP16 MatMul accumulate?",
        ACCUMULATES,
        (*map(_matmul, DEPTHS), _partial_sums()),
        _accumulation,
        "partial sums out of range are no hazard where it is FP32",
    ),
    Probe(
        "conv-accumulation",
        "In which type does an FP16 Conv accumulate?",
        ACCUMULATES,
        (*map(_conv, (64, 256, 512)),),
        _accumulation,
        "partial sums out of range are no hazard where it is FP32",
    ),
    Probe(
        "conv-transpose-accumulation",
        "In which type does an FP16 ConvTranspose of stride 1 accumulate?",
        ACCUMULATES,
        (_transposed(64, 56), _transposed(256, 14), _transposed(512, 32)),
        _accumulation,
        "transpose-convs makes Convs such where it is FP32, and conv-accumulation FP16",
    ),
    _norm(
        "LayerNormalization", "LayerNormalization<axis = -1>(x, s, b)", 17, (4, 256, 768),
        {"s": _ones(768), "b": _zeros(768)}, (-1,),
    ),
    _norm(
        "InstanceNormalization", "InstanceNormalization(x, s, b)", 17, (2, 64, 32, 32),
        {"s": _ones(64), "b": _zeros(64)}, (2, 3),
    ),
    _norm(
        "GroupNormalization", "GroupNormalization<num_groups = 8>(x, s, b)", 21, (2, 64, 32, 32),
        {"s": _ones(64), "b": _zeros(64)}, (),
    ),
    _norm(
        "RMSNormalization", "RMSNormalization<axis = -1>(x, s)", 23, (4, 256, 768), {"s": _ones(768)}, (-1,)
    ),
    Probe(
        "tf32",
        "Can TF32 be switched off (BuilderFlag and NVIDIA_TF32_OVERRIDE=0)?",
        {"off": "yes", "stays": "no: FP32 references are TF32", "unused": "it is not used here"},
        (_tf32_case("as it comes", tf32=True), _tf32_case("switched off", tf32=False)),
        _tf32,
        "whether an FP32 engine can be a reference",
    ),
    Probe(
        "cast-round-trip",
        "Is a Cast from FP32 to FP16 and back kept?",
        {"kept": "yes: 1e5 becomes infinite", "removed": "no: it is optimised away"},
        (
            Case(
                "1e5",
                "g (float[64] x) => (float[64] y) { h = Cast<to = 10>(x) y = Cast<to = 1>(h) }",
                {"x": np.full(64, 1e5, np.float32)},
            ),
        ),
        _casts,
        "whether emulation's rounding is what the engine does",
    ),
)  # fmt: skip
