"""Suggests the command that builds an engine from the written file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from rewriter.base import ALWAYS_TYPED_SINCE, TYPED_SINCE, Target
from rewriter.data.source import Shape
from rewriter.jobs.fix.result import FixResult
from rewriter.model import Port

Spans = Mapping[str, tuple[Shape, Shape, Shape]]
"""Smallest, typical and largest shape of each input."""


def next_command(result: FixResult) -> str | None:
    """Returns the shell command, with shapes if inputs are dynamic; None if no file was written.

    The user has to replace `?` by the size of an axis that is unknown.
    """
    if result.output is None:
        return None
    spans = result.data.spans if result.data else {}
    shapes = _shapes(result.model.signature.inputs, spans)
    if result.constraints is not None:  # the shell splits the arguments in the file
        words = shlex.join(["trtexec", f"--onnx={result.output}", *shapes])
        return f"{words} $(cat {shlex.quote(str(result.constraints))})"
    return shlex.join([*_tool(result, result.output), *shapes])


def remark(result: FixResult) -> str | None:
    """Returns what to know about the command: another for TensorRT 11, or types that do not hold."""
    target = result.target
    if target.library != "tensorrt" or result.constraints is not None:
        return None
    if not target.version:
        return "TensorRT 11: omit --stronglyTyped"
    if target.version < TYPED_SINCE and _lowered(result):
        return f"the builder of {target} chooses types itself: --weak-typing writes constraints for it"
    return None


def _tool(result: FixResult, path: Path) -> list[str]:
    target = result.target
    if target.library == "tensorrt-rtx":
        return ["tensorrt_rtx", f"--onnx={path}"]
    return ["trtexec", f"--onnx={path}", *_typing(target, _lowered(result))]


def _typing(target: Target, lowered: str | None) -> list[str]:
    """The flags of trtexec that make it use the model's types, as far as the release can."""
    if target.version and target.version < TYPED_SINCE:
        return [f"--{lowered}"] if lowered else []
    return [] if target.version >= ALWAYS_TYPED_SINCE else ["--stronglyTyped"]


def _lowered(result: FixResult) -> str | None:
    """The low precision of the model; None if it is in FP32."""
    return result.plan.precision if result.plan and result.plan.precision != "fp32" else None


def _shapes(inputs: tuple[Port, ...], spans: Spans) -> list[str]:
    dynamic = [port for port in inputs if _is_dynamic(port)]
    flags = ("minShapes", "optShapes", "maxShapes")
    return [
        f"--{flag}=" + ",".join(f"{port.name}:{_dims(port, spans, index)}" for port in dynamic)
        for index, flag in enumerate(flags)
        if dynamic
    ]


def _is_dynamic(port: Port) -> bool:
    return port.shape is None or not all(isinstance(d, int) for d in port.shape)


def _dims(port: Port, spans: Spans, index: int) -> str:
    if port.name in spans:
        return "x".join(map(str, spans[port.name][index]))
    return "x".join(str(d) if isinstance(d, int) else "?" for d in port.shape or ("?",))
