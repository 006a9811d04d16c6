"""Runs TensorRT's parser and builder in a child process.

`tensorrt` (10, 11) and `tensorrt_rtx` (1.4 on) are one code path; the module's name is the only
difference that callers see. Networks are always strongly typed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rewriter.ir import children
from rewriter.runtime.engines.build_in_child import build_here
from rewriter.runtime.engines.build_options import BuildOptions
from rewriter.runtime.engines.build_report import BuildReport

NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Environment in which NVIDIA's libraries compute FP32 in FP32; the builder's flag alone is not enough
(docs/engines.md#what-releases-do)."""


def build(
    path: Path,
    options: BuildOptions | None = None,
    *,
    timeout_s: float,
    memory_bytes: int | None = None,
) -> BuildReport:
    """Parse and build an ONNX file in a child process with these limits (see `children.run`).

    Raises:
        EngineError: no library is installed, or it lacks what the options ask for.
        NativeError: the child crashed, ran out of time, or raised another exception.
    """
    chosen = options or BuildOptions()
    report, log = children.run(
        build_here,
        path,
        chosen,
        doing="the TensorRT build",
        limit_s=timeout_s,
        env=None if chosen.tf32 else NO_TF32,
        memory_bytes=memory_bytes,
    )
    return replace(report, log=log)
