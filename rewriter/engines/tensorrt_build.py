"""Runs TensorRT's parser and builder in a child process.

`tensorrt` (10, 11) and `tensorrt_rtx` (1.4 on) are one code path; the module's name is the only
difference that callers see. Networks are always strongly typed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rewriter.engines.build_in_child import build_here
from rewriter.engines.build_options import BuildOptions
from rewriter.engines.build_report import BuildReport
from rewriter.engines.child_process import ChildResult, run_in_child
from rewriter.errors import EngineError

NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""Environment in which NVIDIA's libraries compute FP32 in FP32; the builder's flag alone is not enough
(docs/engines.md#what-releases-do)."""


def build(
    path: Path,
    options: BuildOptions | None = None,
    *,
    timeout_s: float,
    memory_bytes: int | None = None,
) -> BuildReport | ChildResult:
    """Parse and build an ONNX file in a child process with these limits (see `run_in_child`).

    Returns:
        The report, or the child's end if it crashed or ran out of time.

    Raises:
        EngineError: no library is installed, or it lacks what the options ask for.
    """
    chosen = options or BuildOptions()
    child = run_in_child(
        build_here,
        path,
        chosen,
        timeout_s=timeout_s,
        env=None if chosen.tf32 else NO_TF32,
        memory_bytes=memory_bytes,
    )
    if child.status == "ok":
        report: BuildReport = child.result
        return replace(report, log=child.log)
    if child.status == "error" and child.result["type"] == "EngineError":
        error = child.result
        raise EngineError(error["message"], where=error["where"], hint=error["hint"])
    return child
