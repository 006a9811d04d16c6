"""`probe`: what TensorRT and a GPU do in FP16, known already or measured now and kept for `fix`."""

from rewriter.base.errors import EngineError
from rewriter.base.stopwatch import Progress, silent
from rewriter.runtime.engines import probing, this_machine
from rewriter.runtime.engines.probing import measured, remember
from rewriter.runtime.engines.this_machine import AUTO, ENGINES
from rewriter.target.probes import Answers, recorded
from rewriter.target.quirks import every_probe


def probe(engine: str = AUTO, *, ask: bool = False, progress: Progress | None = None) -> Answers:
    """Returns the answers of an engine: those known of this machine or recorded, or measured now and kept.

    Args:
        engine: `tensorrt`, `tensorrt-rtx`, `onnxruntime`, or `auto`: the best on this GPU.
        ask: Build and run the graph of every question here.

    Raises:
        EngineError: nothing is known of the engine; with `ask`: no such engine runs here.
    """
    if not ask:
        for answers in (measured(), *recorded()):
            if answers is not None and engine in (AUTO, answers.library):
                return answers
        raise EngineError(
            f"nothing is recorded of {engine}, and nothing was measured here",
            where="rewriter probe",
            hint=f"rewriter probe --ask --engine {engine} measures it, on a machine with a GPU",
        )
    choice = this_machine.choose(engine)
    if choice.engine is None:
        raise EngineError(
            f"nothing can be measured here: {'; '.join(choice.reasons)}",
            where="rewriter probe --ask",
            hint="run it on a machine with a GPU; without `ask` it returns what is recorded",
        )
    answers = probing.ask(choice.engine, every_probe(), progress or silent)
    if ENGINES[choice.engine].on_gpu:
        remember(answers)
    return answers
