"""Suggests the command that builds an engine from the written file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from rewriter.base import Target
from rewriter.data.source import Shape
from rewriter.jobs.fix.result import FixResult
from rewriter.model import Port

ALWAYS_TYPED_SINCE = (11,)
"""TensorRT 11 has only strongly typed networks and does not need `--stronglyTyped`."""

Spans = Mapping[str, tuple[Shape, Shape, Shape]]
"""Smallest, typical and largest shape of each input."""


def next_command(result: FixResult) -> str | None:
    """Returns the shell command, with shapes if inputs are dynamic; None without a file that passed.

    The user has to replace `?` by the size of an axis that is unknown.
    """
    if result.output is None or not result.conclusion.usable:
        return None
    spans = result.data.spans if result.data else {}
    shapes = _shapes(result.model.signature.inputs, spans)
    if result.constraints is not None:  # the shell splits the arguments in the file
        words = shlex.join(["trtexec", f"--onnx={result.output}", *shapes])
        return f"{words} $(cat {shlex.quote(str(result.constraints))})"
    return shlex.join([*_tool(result.target, result.output), *shapes])


def remark(result: FixResult) -> str | None:
    """Returns how to change the command for TensorRT 11, if the target's version is unknown."""
    target = result.target
    if target.library == "tensorrt" and not target.version and result.constraints is None:
        return "TensorRT 11: omit --stronglyTyped"
    return None


def _tool(target: Target, path: Path) -> list[str]:
    if target.library == "tensorrt-rtx":
        return ["tensorrt_rtx", f"--onnx={path}"]
    typed = [] if target.version >= ALWAYS_TYPED_SINCE else ["--stronglyTyped"]
    return ["trtexec", f"--onnx={path}", *typed]


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
