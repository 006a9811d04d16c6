"""Probes of how accumulators, normalisations, TF32 and Casts compute.

docs/engines.md#thresholds-of-probes has the measurements that the thresholds separate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from rewriter.engines.probe.question import Case, Probe, Seen, by_error
from rewriter.model import Array

ROUNDED_ONCE = 5e-4
"""Below: computed in FP32 and rounded once, whose standard error is 2^-11 / sqrt(3) = 2.8e-4 of a value."""

NOT_TF32 = 5e-5
"""Between the errors of TF32, which rounds inputs to 11 bits, and of FP32, which rounds them to 24."""

DEPTHS = (768, 3072, 4096)

ACCUMULATES = {"fp32": "accumulates in FP32", "fp16": "accumulates in FP16"}


def normal(seed: int, *shape: int, scale: float = 1.0, dtype: type = np.float16) -> Array:
    """Seeded normal data, so that every machine asks the same."""
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, dtype)


def _matmul(depth: int) -> Case:
    return Case(
        f"depth {depth}",
        "y = MatMul(x, w)",
        {"x": normal(depth, 64, depth)},
        {"w": normal(depth + 1, depth, 64, scale=0.05)},
        lambda t: t["x"] @ t["w"],
        (64, 64),
    )


def _conv(channels: int) -> Case:
    return Case(
        f"depth {channels * 9}",
        "y = Conv(x, w)",
        {"x": normal(channels, 1, channels, 14, 14)},
        {"w": normal(channels + 1, 64, channels, 3, 3, scale=0.05)},
        lambda t: convolved(t["x"], t["w"]),
        (1, 64, 12, 12),
    )


def convolved(x: Array, w: Array) -> Array:
    """Conv without padding, stride 1, float64."""
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=(2, 3))
    return np.asarray(np.einsum("nchwij,ocij->nohw", windows, w, optimize=True))


def _transposed(channels: int, size: int) -> Case:
    """3x3, as many channels as it reads, padded to the same size: what a Conv of stride 1 becomes."""
    weight = normal(channels + 1, channels, channels, 3, 3, scale=0.05)
    return Case(
        f"depth {channels * 9}",
        "y = ConvTranspose<pads = [1, 1, 1, 1]>(x, w, b)",
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
        "y = MatMul(x, w)",
        {"x": np.full((64, 4096), 10.0, np.float16)},
        {"w": np.asarray(np.tile(10.0 * signs[:, None], (1, 64)), np.float16)},
        shape=(64, 64),
    )


def _accumulation(seen: Mapping[str, Seen]) -> tuple[str, Mapping[str, float]]:
    """By the errors and by the range of partial sums."""
    depths = {name: s for name, s in seen.items() if name.startswith("depth")}
    value, errors = by_error(ROUNDED_ONCE, "fp32", "fp16")(depths)
    finite = {f"{name}: finite": float(s.finite) for name, s in seen.items() if name not in depths}
    return value if all(finite.values()) else "fp16", {**errors, **finite}


def _normalized(x: Array, *axes: int, centre: bool = True) -> Array:
    x = x - x.mean(axes, keepdims=True) * centre
    return np.asarray(x / np.sqrt(np.mean(x * x, axes, keepdims=True) + 1e-5))


def _norm(
    name: str,
    call: str,
    shape: tuple[int, ...],
    weights: Mapping[str, Array],
    exact: Callable[[Array], Array],
    opset: int = 17,
) -> Probe:
    case = Case(
        "deviation 1000",
        f"y = {call}",
        {"x": normal(7, *shape, scale=1000.0)},
        weights,
        lambda t: exact(t["x"]),
        opset=opset,
    )
    return Probe(
        name,
        f"Does {call.partition('(')[0].partition('<')[0]} keep FP32 inside if its input is FP16?",
        {"fp32": "computes in FP32 inside", "fp16": "loses accuracy or overflows in FP16 inside"},
        (case,),
        by_error(2 * ROUNDED_ONCE, "fp32", "fp16"),
        "the plan keeps the operator in FP32 where it does not",
    )


def _affine(size: int) -> dict[str, Array]:
    return {"s": np.ones(size, np.float16), "b": np.zeros(size, np.float16)}


IMAGE, TOKENS = (2, 64, 32, 32), (4, 256, 768)

NORMS = (
    _norm(
        "layer-normalization",
        "LayerNormalization<axis = -1>(x, s, b)",
        TOKENS,
        _affine(768),
        lambda x: _normalized(x, -1),
    ),
    _norm(
        "instance-normalization",
        "InstanceNormalization(x, s, b)",
        IMAGE,
        _affine(64),
        lambda x: _normalized(x, 2, 3),
    ),
    _norm(
        "group-normalization",
        "GroupNormalization<num_groups = 8>(x, s, b)",
        IMAGE,
        _affine(64),
        lambda x: _normalized(x.reshape(2, 8, -1), 2).reshape(IMAGE),
        21,
    ),
    _norm(
        "rms-normalization",
        "RMSNormalization<axis = -1>(x, s)",
        TOKENS,
        {"s": np.ones(768, np.float16)},
        lambda x: _normalized(x, -1, centre=False),
        23,
    ),
)


def _tf32_case(name: str, *, tf32: bool) -> Case:
    return Case(
        name,
        "y = MatMul(x, w)",
        {"x": normal(1, 256, 512, dtype=np.float32)},
        {"w": normal(2, 512, 256, dtype=np.float32)},
        lambda t: t["x"] @ t["w"],
        (256, 256),
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
        tuple(map(_conv, (64, 256, 512))),
        by_error(ROUNDED_ONCE, "fp32", "fp16"),
        "partial sums out of range are no hazard where it is FP32",
    ),
    Probe(
        "conv-transpose-accumulation",
        "In which type does an FP16 ConvTranspose of stride 1 accumulate?",
        ACCUMULATES,
        (_transposed(64, 56), _transposed(256, 14), _transposed(512, 32)),
        by_error(ROUNDED_ONCE, "fp32", "fp16"),
        "transpose-convs makes Convs such where it is FP32, and conv-accumulation FP16",
    ),
    *NORMS,
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
        (Case("1e5", "h = Cast<to = 10>(x) y = Cast<to = 1>(h)", {"x": np.full(64, 1e5, np.float32)}),),
        _casts,
        "whether emulation's rounding is what the engine does",
    ),
)
