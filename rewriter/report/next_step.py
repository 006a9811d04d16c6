"""Suggests the commands that build an engine from the written file: trtexec or tensorrt_rtx, Polygraphy."""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rewriter.hazards.quirks import build_arguments
from rewriter.ir.base import ALWAYS_TYPED_SINCE, TYPED_SINCE, Target
from rewriter.ir.model import Port
from rewriter.jobs.fix.result import FixResult
from rewriter.judge.verdict import ran
from rewriter.report.json import installed_versions
from rewriter.runtime.engines.tensor_files import Shape

LARGEST_BATCH = 8
"""Proposed for a dynamic first axis of which one size was seen, if that is smaller."""

GRAIN = 32
"""Networks halve their images five times as a rule, so sizes are multiples of 32: proposals stay that."""

Spans = Mapping[str, tuple[Shape, Shape, Shape]]
"""Smallest, typical and largest shape of each input."""

PROPOSED = (
    "the profile's optimum is a typical sample; the smallest batch of 1, and room above the largest sample, "
    "are proposals: --min-shapes, --opt-shapes and --max-shapes set yours"
)


@dataclass(frozen=True)
class NextStep:
    """What to run after `fix`.

    Attributes:
        commands: By tool, the one to use first; the user replaces `?` by the size of an unknown axis.
        verify: The command that runs the result where there is a GPU; "" if it ran here.
        remarks: What to know before, one sentence each.
    """

    commands: Mapping[str, str]
    verify: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def first(self) -> str | None:
        """The command of the tool to use."""
        return next(iter(self.commands.values()), None)


def next_step(result: FixResult) -> NextStep:
    """Returns the commands for a result; none if no file was written, or a check failed."""
    if result.output is None or result.verified is False:
        return NextStep({})
    data = result.data
    profile = _profile(
        result.model.signature.inputs,
        data.spans if data else {},
        data.profiled if data else frozenset(),
    )
    remarks = [PROPOSED] if any(one.proposed for one in profile) else []
    engine = str(result.output.with_suffix(".engine"))
    if result.constraints is not None:  # the shell splits the arguments in the file
        words = ["trtexec", f"--onnx={result.output}", f"--saveEngine={engine}", *_trtexec_shapes(profile)]
        command = f"{shlex.join(words)} $(cat {shlex.quote(str(result.constraints))})"
        return NextStep({"trtexec": command}, _verify(result), tuple(remarks))
    target = _with_installed(result.target)
    typing = _typing(target, _lowered(result))
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
    commands = {tool: shlex.join(words), "polygraphy": other}
    if shutil.which(tool) is None:  # wheels of TensorRT have no such program
        commands = dict(reversed(commands.items()))
    return NextStep(commands, _verify(result), tuple(remarks))


def _with_installed(target: Target) -> Target:
    """The target, with the release that is installed here if none was named."""
    installed = installed_versions().get("tensorrt", "")
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    return target if target.library != "tensorrt" or target.version else replace(target, version=numbers)


def _verify(result: FixResult) -> str:
    """The whole command that verifies the file where there is a GPU; "" for models in memory."""
    source, data = result.model.path, result.data
    if source is None or (result.verdict is not None and ran(result.verdict.checks)):
        return ""
    words = ["rewriter", "verify", str(source), str(result.output)]
    if data is not None and data.real:
        words += ["--inputs", data.path or "YOUR_DATA.npz"]
        words += ["--image-preprocess", data.preprocess] if data.preprocess else []
    for flag, place in (("--min-shapes", 0), ("--opt-shapes", 1), ("--max-shapes", 2)):
        spans = data.spans if data is not None else {}
        given = sorted(data.profiled) if data is not None else ()
        words += [f"{flag}={name}:{'x'.join(map(str, spans[name][place]))}" for name in given]
    return shlex.join(words)


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


def _profile(inputs: Sequence[Port], spans: Spans, profiled: frozenset[str]) -> list[_Axes]:
    return [
        _axes(port, spans.get(port.name), given=port.name in profiled) for port in inputs if _is_dynamic(port)
    ]


def _is_dynamic(port: Port) -> bool:
    return port.shape is None or not all(isinstance(d, int) for d in port.shape)


def _axes(port: Port, span: tuple[Shape, Shape, Shape] | None, *, given: bool) -> _Axes:
    if span is None:
        dims = tuple(str(d) if isinstance(d, int) else "?" for d in port.shape or ("?",))
        return _Axes(port.name, (dims, dims, dims), False)
    proposed = False
    columns = []
    for axis, sizes in enumerate(zip(*span, strict=True)):
        fixed = port.shape is not None and isinstance(port.shape[axis], int)
        if not (fixed or given) and sizes[1] > 0:
            sizes, proposed = _around(sizes, batch=axis == 0 and len(span[1]) > 1), True
        columns.append(tuple(map(str, sizes)))
    low, usual, high = zip(*columns, strict=True) if columns else ((), (), ())
    return _Axes(port.name, (low, usual, high), proposed)


def _around(sizes: tuple[int, int, int], *, batch: bool) -> tuple[int, int, int]:
    """Sizes around those of the samples: a batch from 1, another axis that had one size from half of it.

    The largest has room above the largest sample.
    """
    low, usual, high = sizes
    if batch:
        return 1, usual, max(LARGEST_BATCH, high)
    grain = math.gcd(usual, GRAIN)
    return low if low < high else max(grain, usual // 2 // grain * grain), usual, 2 * high


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
