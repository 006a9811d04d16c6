"""Inputs of the networks of openWakeWord, and of two releases of silero-vad: a part of trained_more_inputs.py.

openWakeWord chains three networks: a mel spectrogram, an embedding of its windows, and a head for each phrase that reads the
latest embeddings. The first two run here to make the inputs of those after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

Array = NDArray[Any]
Samples = Sequence[dict[str, Array]]

LOUDEST = 20000.0
"""openWakeWord takes the numbers of 16-bit sound, as floats."""

HEADS = {"alexa": 16, "hey_jarvis": 16, "hey_marvin": 16, "hey_mycroft": 16, "timer": 34, "weather": 22}
"""Embeddings that the head of each phrase reads."""

FRAME, CONTEXT = 512, 64
"""Samples of sound in a frame of silero-vad; its sixth version sees some of the frame before."""


def of_wake_words(folder: Path, voices: Sequence[Array]) -> dict[str, Samples]:
    """Inputs of all networks for sounds at 16 kHz, float32 of three seconds and more.

    Args:
        folder: The networks of openWakeWord.
    """
    sounds = [(voice[:48000] / np.abs(voice).max() * LOUDEST)[None].astype(np.float32) for voice in voices]
    mel = onnxruntime.InferenceSession(folder / "melspectrogram.onnx")
    embedding = onnxruntime.InferenceSession(folder / "embedding_model.onnx")
    windows = [_windows(mel.run(None, {"input": sound})[0]) for sound in sounds]
    embedded = [embedding.run(None, {"input_1": one})[0].reshape(-1, 96) for one in windows]
    made: dict[str, Samples] = {
        "oww_mel": [{"input": sound} for sound in sounds],
        "oww_embedding": [{"input_1": one} for one in windows],
        "silero_v4": [_last(folder / "silero_vad.onnx", sound / LOUDEST) for sound in sounds],
        "silero_v6": [
            {"input": _frames(s / LOUDEST), "h": np.zeros((1, 1, 128), np.float32)}
            | {"c": np.zeros((1, 1, 128), np.float32)}
            for s in sounds
        ],
    }
    for name, length in HEADS.items():
        (port,) = onnxruntime.InferenceSession(folder / f"{name}_v0.1.onnx").get_inputs()
        many = [np.concatenate([one, one])[None, :length] for one in embedded]
        made[f"oww_{name}"] = [{port.name: one} for one in many]
    return made


def _windows(spectrogram: Array) -> Array:
    """[windows, 76, 32, 1], one every 8 rows of the spectrogram, scaled as the package does it."""
    rows = spectrogram.squeeze() / 10 + 2
    starts = range(0, len(rows) - 76, 8)
    return np.stack([rows[start : start + 76] for start in starts])[..., None].astype(np.float32)


def _last(model: Path, sound: Array) -> dict[str, Array]:
    """What silero-vad gets for the twelfth frame, with the state that it has then."""
    session = onnxruntime.InferenceSession(model)
    h, c = (np.zeros((2, 1, 64), np.float32) for _ in range(2))
    feeds: dict[str, Array] = {}
    for frame in _parts(sound[0], FRAME):
        feeds = {"input": frame[None], "sr": np.array(16000, np.int64), "h": h, "c": c}
        _, h, c = session.run(None, feeds)
    return feeds


def _parts(sound: Array, size: int, count: int = 12) -> Iterator[Array]:
    for start in range(0, count * FRAME, FRAME):
        yield sound[start : start + size].astype(np.float32)


def _frames(sound: Array) -> Array:
    """[frames, samples], each with the end of the frame before."""
    return np.stack(list(_parts(sound[0], FRAME + CONTEXT, 20)))
