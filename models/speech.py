"""The encoder of Whisper from transformers' own class, and a pitch tracker in the structure of CREPE."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from models.common import (
    Built,
    Sample,
    calibrate_batch_norms,
    export_classic,
    pick,
    rng_for,
    unit_gain,
)

# Dynamic range that Whisper's preprocessing keeps below the loudest bin, in powers of ten (arXiv 2212.04356).
DYNAMIC_RANGE = 8.0


def log_mel(rng: np.random.Generator, bands: int, frames: int) -> np.ndarray:
    """A log-mel spectrogram in Whisper's form, float32 [1, bands, frames], about -1 to 1.5.

    Syllables are bursts of 0.2 s (frames are 10 ms). Energy falls with frequency, and the end is silent.
    """
    bursts = np.convolve(rng.standard_normal(frames), np.hanning(20), mode="same")
    slope = np.linspace(0.0, -3.0, bands)[:, None]
    power = slope + 0.8 * bursts[None] + 0.7 * rng.standard_normal((bands, frames))
    power[:, int(frames * rng.uniform(0.6, 0.9)) :] = -10.0
    power = np.maximum(power, power.max() - DYNAMIC_RANGE)
    return ((power + 4.0) / 4.0).astype(np.float32)[None]


def whisper_encoder(full: bool) -> Built:
    """Whisper-small's encoder at opset 16: two Convs, then 12 pre-norm layers over 1,500 positions."""
    torch.manual_seed(24)
    config = WhisperConfig(
        num_mel_bins=80 if full else 8,
        d_model=768 if full else 32,
        encoder_layers=12 if full else 2,
        encoder_attention_heads=12 if full else 2,
        encoder_ffn_dim=3072 if full else 64,
        max_source_positions=1500 if full else 24,
    )
    config._attn_implementation = "eager"
    net = WhisperEncoder(config)
    unit_gain(net)
    with torch.no_grad():
        for conv in (net.conv1, net.conv2):
            conv.weight.normal_(std=conv.weight[0].numel() ** -0.5)

    def sample(index: int) -> Sample:
        rng = rng_for("whisper_encoder", index)
        return {"input_features": log_mel(rng, config.num_mel_bins, 2 * config.max_source_positions)}

    return Built(export_classic(pick(net, "last_hidden_state"), sample(0), ["hidden"], opset=16), sample)


class Pitch(torch.nn.Module):
    """Frames [N, 1024] of a sound at 16 kHz to pitch activations [N, 360] (CREPE, arXiv 1802.06182)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        filters = [1, *(width * times for times in (32, 4, 4, 4, 8, 16))]
        layers: list[torch.nn.Module] = []
        for before, after in pairwise(filters):
            kernel, stride = (512, 4) if before == 1 else (64, 1)
            layers += [
                torch.nn.ZeroPad2d((0, 0, (kernel - stride) // 2, (kernel - stride + 1) // 2)),
                torch.nn.Conv2d(before, after, (kernel, 1), (stride, 1)),
                torch.nn.ReLU(),
                torch.nn.BatchNorm2d(after),
                torch.nn.MaxPool2d((2, 1)),
            ]
        self.layers = torch.nn.Sequential(*layers)
        self.head = torch.nn.Linear(filters[-1] * 4, 360)

    def forward(self, frames):
        x = self.layers(frames[:, None, :, None])
        return torch.sigmoid(self.head(x.permute(0, 2, 1, 3).flatten(1)))


def crepe(full: bool) -> Built:
    """CREPE's largest form, 22 million weights, at opset 17 on 32 frames of harmonic tones with noise."""
    torch.manual_seed(43)
    net = Pitch(32 if full else 1)

    def sample(index: int) -> Sample:
        rng = rng_for("crepe", index)
        pitch = rng.uniform(80, 800, (32, 1, 1))
        harmonic = np.arange(1, 9)[:, None]
        phase = 2 * np.pi * (pitch * harmonic * np.arange(1024) / 16000 + rng.uniform(size=(32, 8, 1)))
        sound = (np.sin(phase) / harmonic).sum(1) + 0.05 * rng.standard_normal((32, 1024))
        return {
            "frames": ((sound - sound.mean(1, keepdims=True)) / sound.std(1, keepdims=True)).astype(
                np.float32
            )
        }

    unit_gain(net)
    calibrate_batch_norms(net, sample, 2)
    return Built(export_classic(net, sample(0), ["activation"], opset=17), sample)
