"""Exports the trained denoiser with PyTorch alone: `denoiser.plain.onnx`."""

from __future__ import annotations

from pathlib import Path

import torch
from data import Pictures
from net import Denoiser

INPUTS = {"input_names": ["noisy"], "output_names": ["restored"], "opset_version": 17, "dynamo": False}


def export_plain(net: Denoiser, path: Path) -> None:
    example, _ = Pictures(1, 128, seed=3)[0]
    torch.onnx.export(net, (example[None],), path, **INPUTS)


if __name__ == "__main__":
    net = Denoiser().eval()
    net.load_state_dict(torch.load("denoiser.pt"))
    export_plain(net, Path("denoiser.plain.onnx"))
