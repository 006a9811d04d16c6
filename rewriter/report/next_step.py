"""Suggests the commands that build an engine from the written file: trtexec or tensorrt_rtx, Polygraphy."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewriter.hazards.quirks import build_arguments
from rewriter.ir.base import ALWAYS_TYPED_SINCE, TYPED_SINCE, Target
from rewriter.ir.model import Port
from rewriter.jobs.fix.result import FixResult
from rewriter.runtime.engines.tensor_files import Shape

LARGEST_BATCH = 8
"""Proposed for a dynamic first axis of which one size was seen, if that is smaller."""

GRAIN = 32
"""Networks halve their images five times as a rule, so sizes are multiples of 32: proposals stay that."""

Spans = Mapping[str, tuple[Shape, Shape, Shape]]
"""Smallest, typical and largest shape of each input."""

PROPOSED = "sizes of dynamic axes that no sample had are proposals: --min-shapes and --max-shapes set yours"


@dataclass(frozen=True)
class NextStep:
    """What to run after `fix`.

    Attributes:
        commands: By tool, the usual one first; the user replaces `?` by the size of an unknown axis.
        remarks: What to know before, one sentence each.
    """

    commands: Mapping[str, str]
    remarks: tuple[str, ...] = ()

    @property
    def first(self) -> str | None:
        """The command of the usual tool."""
        return next(iter(self.commands.values()), None)


def next_step(result: FixResult) -> NextStep:
    """Returns the commands for a result; none if no file was written, or a check failed."""
    if result.output is None or result.verified is False:
        return NextStep({})
    profile = _profile(result.model.signature.inputs, result.data.spans if result.data else {})
    remarks = [PROPOSED] if any(one.proposed for one in profile) else []
    engine = str(result.output.with_suffix(".engine"))
    if result.constraints is not None:  # the shell splits the arguments in the file
        words = ["trtexec", f"--onnx={result.output}", f"--saveEngine={engine}", *_trtexec_shapes(profile)]
        command = f"{shlex.join(words)} $(cat {shlex.quote(str(result.constraints))})"
        return NextStep({"trtexec": command}, tuple(remarks))
    target, typing = result.target, _typing(result.target, _lowered(result))
    if target.library == "tensorrt" and not target.version:
        remarks.append(
            "TensorRT 11 types every network strongly: leave out --stronglyTyped and --strongly-typed there"
        )
    if _chooses_types(target) and _lowered(result):
        remarks.append(
            f"the builder of {target} chooses types itself: --weak-typing writes constraints for it"
        )
    tool = "tensorrt_rtx" if target.library == "tensorrt-rtx" else "trtexec"
    words = [
        tool,
        f"--onnx={result.output}",
        *typing[:1],
        f"--saveEngine={engine}",
        *_trtexec_shapes(profile),
        *build_arguments(result.model, target),
    ]
    other = _polygraphy(target, str(result.output), engine, typing[1:], profile)
    return NextStep({tool: shlex.join(words), "polygraphy": other}, tuple(remarks))


def _chooses_types(target: Target) -> bool:
    """True for a release without strongly typed networks."""
    return target.library == "tensorrt" and () < target.version < TYPED_SINCE


def _typing(target: Target, lowered: str | None) -> list[str]:
    """The flags of trtexec and of Polygraphy that make it use the model's types, if it needs one."""
    if _chooses_types(target):
        return [f"--{lowered}"] * 2 if lowered else []
    needed = target.library == "tensorrt" and target.version < ALWAYS_TYPED_SINCE
    return ["--stronglyTyped", "--strongly-typed"] if needed else []


def _lowered(result: FixResult) -> str | None:
    """The low precision of the model; None if it is in FP32."""
    return result.plan.precision if result.plan and result.plan.precision != "fp32" else None


@dataclass(frozen=True)
class _Axes:
    """The profile of one dynamic input: three shapes, as texts; `proposed` if a size was made up."""

    name: str
    shapes: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    proposed: bool


def _profile(inputs: Sequence[Port], spans: Spans) -> list[_Axes]:
    return [_axes(port, spans.get(port.name)) for port in inputs if _is_dynamic(port)]


def _is_dynamic(port: Port) -> bool:
    return port.shape is None or not all(isinstance(d, int) for d in port.shape)


def _axes(port: Port, span: tuple[Shape, Shape, Shape] | None) -> _Axes:
    if span is None:
        dims = tuple(str(d) if isinstance(d, int) else "?" for d in port.shape or ("?",))
        return _Axes(port.name, (dims, dims, dims), False)
    proposed = False
    columns = []
    for axis, sizes in enumerate(zip(*span, strict=True)):
        fixed = port.shape is not None and isinstance(port.shape[axis], int)
        if not fixed and len(set(sizes)) == 1 and sizes[1] > 0:
            sizes, proposed = _around(sizes[1], first=axis == 0 and len(span[1]) > 1), True
        columns.append(tuple(map(str, sizes)))
    low, usual, high = zip(*columns, strict=True) if columns else ((), (), ())
    return _Axes(port.name, (low, usual, high), proposed)


def _around(size: int, *, first: bool) -> tuple[int, int, int]:
    """Sizes around the only one seen: of a batch from 1, of any other axis from a half to twice of it."""
    if first:
        return 1, size, max(LARGEST_BATCH, size)
    grain = math.gcd(size, GRAIN)
    return max(grain, size // 2 // grain * grain), size, 2 * size


def _trtexec_shapes(profile: Sequence[_Axes]) -> Iterator[str]:
    for index, flag in enumerate(("minShapes", "optShapes", "maxShapes")):
        if profile:
            yield f"--{flag}=" + ",".join(f"{one.name}:{'x'.join(one.shapes[index])}" for one in profile)


def _polygraphy(
    target: Target, path: str, engine: str, typing: Sequence[str], profile: Sequence[_Axes]
) -> str:
    words = ["polygraphy", "convert", path, "--convert-to", "trt", *typing, "-o", engine]
    for index, flag in enumerate(("min", "opt", "max")):
        if profile:
            words += [f"--trt-{flag}-shapes"]
            words += [f"{one.name}:[{','.join(one.shapes[index])}]" for one in profile]
    variable = "POLYGRAPHY_USE_TENSORRT_RTX=1 " if target.library == "tensorrt-rtx" else ""
    return variable + shlex.join(words)
