"""Trains, exports without and with the hook, and measures both: `python run.py [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from evaluate import plain_fp16, psnr
from export import export_plain
from export_fixed import export_fixed
from train import train

import rewriter

LOST_AT_MOST = 0.05
"""dB that the fixed model may lose in FP16."""


def main(folder: Path) -> int:
    net = train()
    torch.save(net.state_dict(), folder / "denoiser.pt")
    plain, fixed = folder / "denoiser.plain.onnx", folder / "denoiser.onnx"
    export_plain(net, plain)
    export_fixed(net, fixed)
    exact = psnr(rewriter.load(plain), emulate=False)
    naive = psnr(plain_fp16(plain), emulate=True)
    safe = psnr(rewriter.load(fixed), emulate=True)
    print(f"FP32 {exact:.2f} dB")
    print(f"FP16, converted without the hook {naive:.2f} dB ({naive - exact:+.3f} dB)")
    print(f"FP16, exported with the hook {safe:.2f} dB ({safe - exact:+.3f} dB)")
    return 0 if safe >= exact - LOST_AT_MOST else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
