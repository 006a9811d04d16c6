"""An engine for tests: the emulation with FP16 sums and TF32, behind `measure`."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from rewriter.ir.model import Model, load
from rewriter.runtime.emulation import emulation
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.protocol import EngineOutcome, Latency, MeasureSettings, Variant
from rewriter.runtime.engines.tensor_files import read_tensors, write_samples
from rewriter.runtime.engines.this_machine import Choice

FP16_US, FP32_US = 10.0, 20.0


def measure(variants: Sequence[Variant], settings: MeasureSettings, folder: Path) -> list[EngineOutcome]:
    """Runs the files by emulation; they take `latency_us`."""
    assert settings.engine == "onnxruntime"
    return [_outcome(variant, folder) for variant in variants]


def latency_us(model: Model) -> float:
    """`FP16_US` for models with FP16 in them; a test may have another opinion."""
    halves = any(tensor.dtype == 10 for tensor in model.facts().main.values())
    return FP16_US if halves else FP32_US


def _outcome(variant: Variant, folder: Path) -> EngineOutcome:
    model = load(variant.path)
    with Session(emulation(model, "fp16", tf32=variant.tf32)) as session:
        values = map(session.run, map(read_tensors, variant.samples))
        stored = write_samples(folder / f"out-{variant.name}", values)
    us = latency_us(model)
    return EngineOutcome(
        variant.name,
        0,
        "ok",
        device="CPU",
        library="emulation",
        outputs=stored,
        latency=Latency(us, 0.0, 1, False),
    )


def use_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ONNX Runtime the engine that judges results on this machine."""
    choice = Choice("onnxruntime")
    monkeypatch.setattr("rewriter.runtime.engines.this_machine.choose", lambda engine="auto": choice)


def use_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the emulation with FP16 sums the engine that judges results on this machine."""
    use_onnxruntime(monkeypatch)
    for user in ("rewriter.jobs.verify", "rewriter.verification.verifier"):
        monkeypatch.setattr(f"{user}.measure", measure)
