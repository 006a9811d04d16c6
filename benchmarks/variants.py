"""The variants of a model that are compared, each made by its tool in a process of its own.

    python benchmarks/variants.py VARIANT MODEL.onnx SAMPLES OUT.onnx

SAMPLES is a folder of .npz files; every tool that takes data gets all of them. Graph inputs and outputs keep their
types. This script imports nothing of rewriter but for `naive`, so that a tool can run in an environment of its own.
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
    """The user's file as it is."""
    shutil.copyfile(model, out)


def naive(model: Path, samples: Path, out: Path) -> None:
    """Every FP32 tensor FP16, weights included; constants beyond FP16's range become infinities, as casting them does."""
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
    """onnxconverter-common's float16, which takes no data."""
    import onnx
    from onnxconverter_common import float16

    onnx.save(float16.convert_float_to_float16(onnx.load(model), keep_io_types=True), out)


def autocast(model: Path, samples: Path, out: Path) -> None:
    """NVIDIA's AutoCast (nvidia-modelopt) with the samples as its calibration data, all else at its defaults."""
    import onnx
    from modelopt.onnx.autocast import convert_to_mixed_precision

    share_the_cores()
    made = convert_to_mixed_precision(
        str(model), low_precision_type="fp16", calibration_data=str(samples), keep_io_types=True
    )
    onnx.save(made, out)


def share_the_cores() -> None:
    """As many threads for ONNX Runtime's sessions as OMP_NUM_THREADS says, which it does not read by itself.

    By default each session starts one thread for every core, and they spin: with several tools at a time that is slower
    for all, and counts as user seconds. `rewriter` starts two.
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
    """`rewriter fix` as a user calls it who knows what it is for: the TensorRT that is installed.

    AutoCast compares and builds nothing, so neither happens here.
    """
    command = [sys.executable, "-m", "rewriter", "fix", str(model), "--inputs", str(samples), "-o", str(out)]
    command += ["--save-plan", str(out.with_suffix(".plan")), "--no-verify", "-q"]
    command += ["--target", "tensorrt" if find_spec("tensorrt") else "tensorrt-rtx", *extra]
    os.execv(command[0], command)  # so that its limits, its memory and its exit code are this process's


def rescaled(model: Path, samples: Path, out: Path) -> None:
    """`rewriter fix --preset trt-fp16-rescaled`."""
    fix(model, samples, out, "--preset", "trt-fp16-rescaled")


def nearest(model: Path, samples: Path, out: Path) -> None:
    """`rewriter fix` without the pass that rounds weights together: each goes to the nearest FP16 number."""
    fix(model, samples, out, "--skip", "compensate-rounding")


def accurate(model: Path, samples: Path, out: Path) -> None:
    """`rewriter fix --preset accurate`."""
    fix(model, samples, out, "--preset", "accurate")


def accurate_50(model: Path, samples: Path, out: Path) -> None:
    """The same, with half as much latency again to spend as `fix` takes."""
    fix(model, samples, out, "--preset", "accurate", "--max-latency-cost", "50%")


def searched(model: Path, samples: Path, out: Path, *extra: str) -> None:
    """`rewriter fix --search gpu` with a limit of seconds, which the measure stage hands over; needs a GPU."""
    fix(model, samples, out, "--search", "gpu", "--report", str(out.with_suffix(".report")), *extra)


def searched_accurate(model: Path, samples: Path, out: Path, *extra: str) -> None:
    """`rewriter fix --preset accurate --search gpu`: the budget of `accurate`, measured."""
    searched(model, samples, out, "--preset", "accurate", *extra)


SEARCHED = "fix-search-gpu"
SEARCHED_ACCURATE = "fix-accurate-search-gpu"
SEARCHES = (SEARCHED, SEARCHED_ACCURATE)
"""Made in the measure stage, if at all."""

VARIANTS = {
    "fp32": fp32,
    "naive": naive,
    "onnxconverter-common": converter_common,
    "autocast": autocast,
    "fix": fix,
    "fix-nearest": nearest,
    "fix-rescaled": rescaled,
    "fix-accurate": accurate,
    "fix-accurate-50": accurate_50,
    SEARCHED: searched,
    SEARCHED_ACCURATE: searched_accurate,
}
"""In the order of the table."""

FOREIGN = frozenset({"autocast", "onnxconverter-common"})
"""Made by an interpreter that has the tool."""

EFFORT = {
    "fix-accurate": 8.0,
    "fix-accurate-50": 8.0,
    "autocast": 4.0,
    "fix": 2.0,
    "fix-nearest": 2.0,
    "fix-rescaled": 2.0,
}
"""What a variant takes, emulated, in one that converts and emulates alone; about, to start what takes longest first."""


if __name__ == "__main__":
    name, source, data, target, *more = sys.argv[1:]
    VARIANTS[name](Path(source), Path(data), Path(target), *more)
