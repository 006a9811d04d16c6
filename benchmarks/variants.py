"""Makes the compared variants of a model, each with its tool in a process of its own.

    python benchmarks/variants.py VARIANT MODEL.onnx SAMPLES OUT.onnx

SAMPLES is a folder of .npz files; every tool that takes data gets all of them. Graph inputs and outputs keep their
types. Only `naive` imports rewriter, so that every tool can run in an environment of its own.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def fp32(model: Path, samples: Path, out: Path) -> None:
    """The user's file, unchanged."""
    shutil.copyfile(model, out)


def naive(model: Path, samples: Path, out: Path) -> None:
    """All FP32 tensors in FP16, weights included; constants beyond FP16's range become infinities, as in a Cast."""
    import numpy as np
    import onnx
    from onnx import TensorProto, numpy_helper

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from rewriter.graph.casts import TypeRequest, retype
    from rewriter.model import facts, load, save, walk_graphs

    proto = onnx.load(model)
    graphs = list(walk_graphs(proto.graph))
    values = [
        a.t
        for g in graphs
        for n in g.node
        if n.op_type == "Constant"
        for a in n.attribute
        if a.name == "value"
    ]
    for tensor in [*values, *(t for g in graphs for t in g.initializer)]:
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor)
            if np.abs(array).max(initial=0.0) > np.finfo(np.float16).max:
                with np.errstate(over="ignore"):
                    array = array.astype(np.float16).astype(np.float32)
                tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    loaded = load(proto)
    wanted = TypeRequest(lambda _scope, _node: TensorProto.FLOAT16)
    save(retype(loaded, facts.infer(loaded), wanted), out)


def converter_common(model: Path, samples: Path, out: Path) -> None:
    """onnxconverter-common's float16, which uses no data."""
    import onnx
    from onnxconverter_common import float16

    onnx.save(float16.convert_float_to_float16(onnx.load(model), keep_io_types=True), out)


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


def fix(model: Path, samples: Path, out: Path, *extra: str) -> None:
    """`rewriter fix` for the TensorRT that is installed.

    It neither compares nor builds, because AutoCast does neither.
    """
    rewriter_fix(model, samples, out, "--save-plan", str(out.with_suffix(".plan")), "--no-verify", *extra)


def fix_on_gpu(model: Path, samples: Path, out: Path) -> None:
    """`rewriter fix` as a user with a GPU runs it: it builds and times what is in doubt, and checks the result."""
    rewriter_fix(model, samples, out, "--report", str(out.with_suffix(".report")))


def rewriter_fix(model: Path, samples: Path, out: Path, *extra: str) -> None:
    """Becomes the process of `rewriter fix` with these options."""
    command = [
        sys.executable,
        "-m",
        "rewriter",
        "fix",
        str(model),
        "--inputs",
        str(samples),
        "-o",
        str(out),
        "-q",
    ]
    command += ["--target", "tensorrt" if find_spec("tensorrt") else "tensorrt-rtx", *extra]
    os.execv(command[0], command)  # so that limits, memory and exit code are those of `fix`


def accurate(model: Path, samples: Path, out: Path) -> None:
    """`rewriter fix --preset accurate`."""
    fix(model, samples, out, "--preset", "accurate")


def accurate_50(model: Path, samples: Path, out: Path) -> None:
    """The same, with a budget of 50 % more latency than `fix`."""
    fix(model, samples, out, "--preset", "accurate", "--max-latency-cost", "50%")


CHECKED = "fix-on-gpu"
"""A variant that the prepare stage makes on request, on a machine with a GPU."""

VARIANTS = {
    "fp32": fp32,
    "naive": naive,
    "onnxconverter-common": converter_common,
    "autocast": autocast,
    "fix": fix,
    CHECKED: fix_on_gpu,
    "fix-accurate": accurate,
    "fix-accurate-50": accurate_50,
}
"""All variants, in the order of the table."""

FOREIGN = frozenset({"autocast", "onnxconverter-common"})
"""Variants that need an interpreter with their tool."""

EFFORT = {
    "fix-accurate": 8.0,
    "fix-accurate-50": 8.0,
    "autocast": 4.0,
    CHECKED: 8.0,
    "fix": 2.0,
}
"""Rough effort of a variant with its emulation, relative to a plain conversion; the longest jobs start first."""


if __name__ == "__main__":
    name, source, data, target, *more = sys.argv[1:]
    VARIANTS[name](Path(source), Path(data), Path(target), *more)
