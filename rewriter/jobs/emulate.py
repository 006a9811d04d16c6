"""`emulate`: a model as a TensorRT engine computes it, behind ONNX Runtime's interface, on the CPU."""

from typing import Any

from rewriter.ir.model import load
from rewriter.ir.plan import Precision
from rewriter.jobs.fix.before import lowered
from rewriter.jobs.fix.provenance import sums_of
from rewriter.runtime.emulation import Accumulation, emulation
from rewriter.runtime.engines.local_session import LocalSession


def emulate(
    model: Any, *, precision: Precision | None = None, accumulation: Accumulation | None = None
) -> Any:
    """Load a model that computes as its strongly typed TensorRT engine does, on the CPU.

        session = rewriter.emulate("fixed.onnx")
        logits, *caches = session.run(None, feeds)

    Every tensor is rounded to the type that it has in the file, with that type's overflow and subnormal
    numbers. FP16 products sum as on the GPU, FP32 products round to TF32, and each step of an LSTM, GRU or
    RNN rounds its states. The graph is prepared once; axes that the file leaves open stay open.

    Args:
        model: Path, onnx.ModelProto, rewriter.Model or a result of `fix`.
        precision: None computes in the types of the file. "fp16" or "bf16" first lowers everything that can
            be, which shows what an FP32 file loses without a plan; "fp32" is the file itself.
        accumulation: The type in which FP16 products sum. By default as for `verify`: the one that `fix`
            judged the file by, else the one recorded of its target. "fp32" runs 2 to 8 times as fast.

    Returns:
        An `onnxruntime.InferenceSession` with the inputs and outputs of the file, in their types.

    Raises:
        RewriterError: the model cannot be read, or ONNX Runtime has no kernel for it.
    """
    source = load(getattr(model, "model", model))
    typed = source if precision in (None, "fp32") else lowered(source, precision)
    sums = accumulation or sums_of(source)
    return LocalSession(emulation(typed, sums, tf32=True, outputs="own"), constant=True).session
