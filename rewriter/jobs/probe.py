"""`probe`: asks this machine's TensorRT and GPU what they do in FP16, and keeps the answers for `fix`."""

from __future__ import annotations

from rewriter.hazards.quirks import every_probe
from rewriter.ir.errors import EngineError
from rewriter.ir.model.stopwatch import Progress
from rewriter.runtime.engines import this_machine
from rewriter.runtime.engines.probe import ask as probes
from rewriter.runtime.engines.probe.answers import Answers, remember
from rewriter.runtime.engines.this_machine import AUTO


def probe(engine: str = AUTO, *, again: bool = False, progress: Progress | None = None) -> Answers:
    """Returns the answers of an engine on this machine: known ones, or measured and kept.

    Args:
        engine: `tensorrt`, `tensorrt-rtx`, `onnxruntime`, or `auto`: the best on this GPU.
        again: Measure even if the answers are known.

    Raises:
        EngineError: no such engine runs here.
    """
    choice = this_machine.choose(engine)
    if choice.engine is None:
        raise EngineError(
            f"nothing can be measured here: {'; '.join(choice.reasons)}",
            where="rewriter probe",
            hint="run it on a machine with a GPU",
        )
    on_cpu = choice.engine == "onnxruntime"
    found = None if again or on_cpu else probes.known_here(choice.engine, every_probe())
    if found is None:
        shown = progress or (lambda stage, done, total: None)
        found = probes.ask(choice.engine, every_probe(), progress=shown)
        if not on_cpu:
            remember(found)
    return found
