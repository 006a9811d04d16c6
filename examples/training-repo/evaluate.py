"""PSNR on held-out pictures: FP32, plain FP16, and the hook's result in FP16 arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from data import WHITE, Pictures

import rewriter
from rewriter.runtime import emulation
from rewriter.runtime.engines.onnxruntime import Session

PICTURES, SIZE = 8, 128


def held_out() -> Pictures:
    """Pictures that are used neither for training nor for calibration."""
    return Pictures(PICTURES, SIZE, seed=2)


def plain_fp16(path: Path) -> rewriter.Model:
    """Every tensor in FP16 if its operator allows it, like a converter that measures nothing."""
    plan = rewriter.Plan("fp16")
    return rewriter.fix(path, passes="mixed-precision,clean-casts", plan=plan, verify=False).model


def psnr(model: rewriter.Model, *, emulate: bool) -> float:
    """Mean PSNR over the pictures, in dB, with the white level as the peak.

    Args:
        emulate: Round every tensor to its type, as FP16 hardware does; ONNX Runtime's own FP16 does not.
    """
    runnable = (emulation.emulation if emulate else emulation.reference)(model)
    (name,) = (port.name for port in model.signature.inputs)
    with Session(runnable) as session:
        return float(np.mean([_psnr(session.run({name: noisy}), clean) for noisy, clean in _pairs()]))


def _pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for noisy, clean in held_out():
        yield noisy[None].numpy(), clean[None].numpy()


def _psnr(outputs: dict[str, np.ndarray], clean: np.ndarray) -> float:
    (restored,) = outputs.values()
    error = np.nan_to_num(restored.astype(np.float64), nan=0.0, posinf=WHITE, neginf=0.0) - clean
    return float(10 * np.log10(WHITE**2 / np.mean(error**2)))
