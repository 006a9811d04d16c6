"""Exports with the hook: `denoiser.onnx` is accurate in TensorRT FP16."""

from __future__ import annotations

from pathlib import Path

import torch
from data import Pictures
from export import INPUTS
from net import Denoiser
from torch.utils.data import DataLoader

import rewriter.hooks.torch


def export_fixed(net: Denoiser, path: Path) -> None:
    pictures = Pictures(16, 128, seed=3)
    example, _ = pictures[0]
    rewriter.hooks.torch.export(net, (example[None],), path, calibration=DataLoader(pictures), **INPUTS)


if __name__ == "__main__":
    net = Denoiser().eval()
    net.load_state_dict(torch.load("denoiser.pt"))
    export_fixed(net, Path("denoiser.onnx"))
