"""Makes a variant that `rewriter` does not make, in a process of its own.

    python benchmarks/variants.py fp32|autocast MODEL.onnx SAMPLES OUT.onnx

SAMPLES is a folder of .npz files; a tool that takes data gets all of them. Graph inputs and outputs keep their types.
`autocast` needs an environment with nvidia-modelopt.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path
from typing import Any


def fp32(model: Path, samples: Path, out: Path) -> None:
    """The user's file, unchanged."""
    shutil.copyfile(model, out)


def autocast(model: Path, samples: Path, out: Path) -> None:
    """NVIDIA's AutoCast (nvidia-modelopt) with the samples as its calibration data, and defaults otherwise."""
    import onnx
    from modelopt.onnx.autocast import convert_to_mixed_precision

    share_the_cores()
    made = convert_to_mixed_precision(
        str(model), low_precision_type="fp16", calibration_data=str(samples), keep_io_types=True
    )
    onnx.save(made, out)


def share_the_cores() -> None:
    """Limits the threads of ONNX Runtime's sessions to OMP_NUM_THREADS, which it does not read by itself.

    By default each session starts one thread for every core, and they spin. With several tools at a time that slows all
    of them, and counts as user seconds. `rewriter` starts two.
    """
    import onnxruntime

    if not (threads := os.environ.get("OMP_NUM_THREADS")):
        return
    given = onnxruntime.InferenceSession

    @functools.wraps(given)
    def limited(model: Any, sess_options: Any = None, **more: Any) -> Any:
        options = sess_options or onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(threads)
        return given(model, options, **more)

    onnxruntime.InferenceSession = limited


if __name__ == "__main__":
    name, source, data, target = sys.argv[1:]
    {"fp32": fp32, "autocast": autocast}[name](Path(source), Path(data), Path(target))
