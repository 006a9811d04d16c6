"""Suggests the commands that build an engine from the written file: trtexec or tensorrt_rtx, Polygraphy."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewriter.base import Target
from rewriter.data.source import Shape
from rewriter.jobs.fix.result import FixResult
from rewriter.model import Port

ALWAYS_TYPED_SINCE = (11,)
"""TensorRT 11 has only strongly typed networks and does not need `--stronglyTyped`."""

TYPED_SINCE = (9,)
"""The first release with strongly typed networks."""

LARGEST_BATCH = 8
"""Proposed for a dynamic first axis of which one size was seen, if that is smaller."""

GRAIN = 32
"""Networks halve their images five times as a rule, so sizes are multiples of 32: proposals stay that."""

Spans = Mapping[str, tuple[Shape, Shape, Shape]]
"""Smallest, typical and largest shape of each input."""

PROPOSED = (
    "sizes that no sample had are proposals: give samples of several sizes, or --min-shapes, --max-shapes"
)


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
    target = result.target
    if _lacks_types(target):
        return NextStep({}, (f"{target} has no strongly typed networks: use --weak-typing",))
    if target.library == "tensorrt" and not target.version:
        remarks.append("TensorRT 11: omit --stronglyTyped and --strongly-typed")
    tool = "tensorrt_rtx" if target.library == "tensorrt-rtx" else "trtexec"
    typed = ["--stronglyTyped"] if _needs_flag(target) else []
    words = [tool, f"--onnx={result.output}", *typed, f"--saveEngine={engine}", *_trtexec_shapes(profile)]
    commands = {
        tool: shlex.join(words),
        "polygraphy": _polygraphy(target, str(result.output), engine, profile),
    }
    return NextStep(commands, tuple(remarks))


def _lacks_types(target: Target) -> bool:
    return target.library == "tensorrt" and () < target.version < TYPED_SINCE


def _needs_flag(target: Target) -> bool:
    """True if the release has weakly typed networks, too; TensorRT-RTX has none."""
    return target.library == "tensorrt" and target.version < ALWAYS_TYPED_SINCE


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


def _polygraphy(target: Target, path: str, engine: str, profile: Sequence[_Axes]) -> str:
    typed = ["--strongly-typed"] if _needs_flag(target) else []
    words = ["polygraphy", "convert", path, "--convert-to", "trt", *typed, "-o", engine]
    for index, flag in enumerate(("min", "opt", "max")):
        if profile:
            words += [f"--trt-{flag}-shapes"]
            words += [f"{one.name}:[{','.join(one.shapes[index])}]" for one in profile]
    variable = "POLYGRAPHY_USE_TENSORRT_RTX=1 " if target.library == "tensorrt-rtx" else ""
    return variable + shlex.join(words)
