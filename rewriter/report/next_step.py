"""Suggests the commands that build an engine from the written file: trtexec, Polygraphy, Python."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from json import dumps
from pathlib import Path

from rewriter.base.text import command_line
from rewriter.ir.model import Port
from rewriter.jobs.fix.provenance import noted_tolerance
from rewriter.jobs.fix.result import FixResult
from rewriter.report.json import installed_versions
from rewriter.runtime.engines.tensor_files import Span
from rewriter.runtime.inputs.samples import DataSource
from rewriter.runtime.metrics.tolerances import RELATIVE_L2
from rewriter.target import TYPED_SINCE, Target, numbers
from rewriter.target.quirks import build_arguments
from rewriter.verification.verdict import ran

PROPOSED = (
    "the profile's optimum is a typical sample; its batch from 1 and its maximum, twice the largest sample, "
    "are proposals: --min-shapes, --opt-shapes and --max-shapes set yours"
)

Profile = Sequence[tuple[str, Sequence[tuple[str, ...]]]]
"""Smallest, typical and largest shape of each dynamic input as texts; `?` for a size that is not known."""


@dataclass(frozen=True)
class NextStep:
    """Commands to run after `fix`.

    Attributes:
        commands: By tool, the one to use first; the user replaces `?` by the size of an unknown axis.
        verify: The command that runs the result where there is a GPU; "" if it ran here.
        remarks: What to know before, one sentence each.
    """

    commands: Mapping[str, str]
    verify: str = ""
    remarks: tuple[str, ...] = ()


def next_step(result: FixResult) -> NextStep:
    """Returns the commands for a result; none if no file was written, or a check failed."""
    if result.output is None or result.verified is False:
        return NextStep({})
    data = result.data
    profile = _profile(result.model.signature.inputs, data)
    asked = data is None or all(name in data.profiled for name, _ in profile)
    remarks = [] if asked else [PROPOSED]
    engine = str(result.output.with_suffix(".engine"))
    if result.constraints is not None:  # the shell splits the arguments in the file
        words = ["trtexec", f"--onnx={result.output}", f"--saveEngine={engine}", *_trtexec_shapes(profile)]
        command = f"{command_line(words)} $(cat {command_line([result.constraints])})"
        return NextStep({"trtexec": command}, _verify(result), tuple(remarks))
    target = result.target
    if target.library == "tensorrt" and not target.version:  # the release that is installed here
        target = replace(target, version=numbers(installed_versions().get("tensorrt", ""))[:2])
    # the flags of trtexec and of Polygraphy that make it use the model's types, if it needs one
    typing = ["--stronglyTyped", "--strongly-typed"] if target.weakly_typed else []
    if _chooses_types(target):
        typing = [f"--{_lowered(result)}"] * 2 if _lowered(result) else []
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
    commands = {tool: command_line(words), "polygraphy": other}
    if shutil.which(tool) is None:  # wheels of TensorRT have no such program
        commands = dict(reversed(commands.items()))
        if not (shutil.which("polygraphy") or find_spec("polygraphy") or _chooses_types(target)):
            commands = {"python": _python(target, str(result.output), engine, profile), **commands}
    return NextStep(commands, _verify(result), tuple(remarks))


def _verify(result: FixResult) -> str:
    """The whole command that verifies the file where there is a GPU; "" for models in memory."""
    source, data = result.model.path, result.data
    if source is None or (result.verdict is not None and ran(result.verdict.checks)):
        return ""
    words = ["rewriter", "verify", source, Path(str(result.output))]
    if data is not None and data.real:
        words += ["--inputs", Path(data.path or "YOUR_DATA.npz")]
        words += ["--image-preprocess", data.preprocess] if data.preprocess else []
    if limit := noted_tolerance(result.model):
        words += ["--tolerance", f"{limit.value!r}"]
        words += ["--metric", limit.metric] if limit.metric != RELATIVE_L2 else []
    for flag, place in (("--min-shapes", 0), ("--opt-shapes", 1), ("--max-shapes", 2)):
        spans = data.spans if data is not None else {}
        inputs = sorted(data.profiled) if data is not None else ()
        words += [f"{flag}={name}:{'x'.join(map(str, spans[name][place]))}" for name in inputs]
    return command_line(words)


def _chooses_types(target: Target) -> bool:
    """True for a release without strongly typed networks."""
    return target.library == "tensorrt" and () < target.version < TYPED_SINCE


def _lowered(result: FixResult) -> str | None:
    """The low precision of the model; None if it is in FP32."""
    return result.plan.precision if result.plan and result.plan.precision != "fp32" else None


def _profile(inputs: Sequence[Port], data: DataSource | None) -> Profile:
    profile = []
    for port in inputs:
        if port.shape is None or not all(isinstance(size, int) for size in port.shape):
            unknown = tuple(size if isinstance(size, int) else "?" for size in port.shape or ("?",))
            shapes = data.spans.get(port.name) if data is not None else None
            if shapes and data is not None and port.name not in data.profiled:
                shapes = _with_room(port, shapes)
            texts = [tuple(map(str, shape)) for shape in shapes or [unknown] * 3]
            profile.append((port.name, texts))
    return profile


def _with_room(port: Port, span: Span) -> Span:
    """Along dynamic axes, a batch from 1, and twice the largest sample: deployments see more than samples."""
    low, usual, high = span
    dynamic = [port.shape is None or not isinstance(port.shape[axis], int) for axis in range(len(usual))]
    if len(low) > 1 and dynamic[0]:
        low = (min(1, low[0]), *low[1:])
    return low, usual, tuple(size * (1 + varies) for size, varies in zip(high, dynamic, strict=True))


def _trtexec_shapes(profile: Profile) -> Iterator[str]:
    for index, flag in enumerate(("minShapes", "optShapes", "maxShapes")):
        if profile:
            yield f"--{flag}=" + ",".join(f"{name}:{'x'.join(shapes[index])}" for name, shapes in profile)


def _python(target: Target, path: str, engine: str, profile: Profile) -> str:
    """One line that needs only the library's wheel."""
    code = [
        f"import {target.library.replace('-', '_')} as trt; from pathlib import Path; log = trt.Logger()",
        'b = trt.Builder(log); typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)',
        "net = b.create_network(0 if typed is None else 1 << int(typed)); config = b.create_builder_config()",
        f"parser = trt.OnnxParser(net, log); parsed = parser.parse_from_file({dumps(path)})",
        "assert parsed, parser.get_error(0).desc(); profile = b.create_optimization_profile()",
    ]
    for name, span in profile:
        code.append(f"profile.set_shape({dumps(name)}, {', '.join('(' + ','.join(s) + ',)' for s in span)})")
    code += ["config.add_optimization_profile(profile)"] * bool(profile)
    code.append(f"Path({dumps(engine)}).write_bytes(b.build_serialized_network(net, config))")
    return command_line(["python", "-c", "; ".join(code)])


def _polygraphy(target: Target, path: str, engine: str, typing: Sequence[str], profile: Profile) -> str:
    words = ["polygraphy", "convert", Path(path), "--convert-to", "trt", *typing, "-o", Path(engine)]
    for index, flag in enumerate(("min", "opt", "max")):
        if profile:
            words += [f"--trt-{flag}-shapes"]
            words += [f"{name}:[{','.join(shapes[index])}]" for name, shapes in profile]
    variable = "POLYGRAPHY_USE_TENSORRT_RTX=1 " if target.library == "tensorrt-rtx" else ""
    return variable + command_line(words)
