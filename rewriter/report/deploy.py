"""The command that builds an engine from the written file, and a script with all of it, by tool."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from string import Template

from rewriter.base.text import command_line
from rewriter.ir.model import Port, write_text
from rewriter.jobs.fix.result import FixOutcome
from rewriter.pipeline.options import Tool
from rewriter.runtime.engines.tensor_files import Span
from rewriter.runtime.inputs.sizes import shape_inputs
from rewriter.target import TYPED_SINCE, Target, title
from rewriter.target.quirks import build_arguments

Profile = Mapping[str, Sequence[Sequence[str]]]
"""Smallest, usual and largest shape by input, as texts; `?` for a size that is not known."""


@dataclass(frozen=True)
class Build:
    """One build of a result."""

    result: FixOutcome
    where: Path  # the file, as the command names it

    @property
    def target(self) -> Target:
        return self.result.target

    @property
    def engine(self) -> Path:
        return self.where.with_suffix(".engine")

    @cached_property
    def shapes(self) -> Profile:
        """Of the inputs with dynamic axes: the user's, or from the model's smallest to twice the samples'."""
        ports = self.result.model.signature.inputs
        dynamic = [p for p in ports if p.shape is None or not all(isinstance(s, int) for s in p.shape)]
        return {port.name: [[*map(str, shape)] for shape in self._span(port)] for port in dynamic}

    @cached_property
    def values(self) -> Profile:
        """Of the inputs that are shapes themselves: the user's, or the samples'."""
        data = self.result.data
        if data is None:
            return {}
        names = shape_inputs(self.result.model)
        spans = {n: data.spans[n] if n in data.profiled else data.values.get(n) for n in names}
        return {name: [[*map(str, row)] for row in span] for name, span in spans.items() if span}

    @property
    def profile(self) -> dict[str, str]:
        """`x:1x3,size:20x30` for each of min, opt and max, as trtexec and ONNX Runtime take it."""
        both = {**self.shapes, **self.values}
        return {
            least: ",".join(f"{name}:{'x'.join(shapes[index])}" for name, shapes in both.items())
            for index, least in enumerate(("min", "opt", "max") if both else ())
        }

    @property
    def proposed(self) -> bool:
        """True if a shape of the profile is not the user's own."""
        data = self.result.data
        return data is not None and not {*self.shapes, *self.values} <= data.profiled

    def _span(self, port: Port) -> Span | Sequence[tuple[object, ...]]:
        data = self.result.data
        if data is None or port.name not in data.spans:
            return [tuple(s if isinstance(s, int) else "?" for s in port.shape or ("?",))] * 3
        span = data.spans[port.name]
        return span if port.name in data.profiled else data.room.profile(port, span)

    @property
    def typing(self) -> list[str]:
        """The flag that makes trtexec use the model's types, if the release needs one."""
        if chooses_types(self.target):
            return [f"--{low}"] if (low := lowered(self.result)) else []
        return ["--stronglyTyped"] if self.target.weakly_typed else []

    def trtexec(self, engine: Path, typing: Sequence[str]) -> list[str]:
        """The words of the command."""
        tool = "tensorrt_rtx" if self.target.library == "tensorrt-rtx" else "trtexec"
        words = [tool, f"--onnx={self.where}", *typing, f"--saveEngine={engine}"]
        words += [f"--{least}Shapes={text}" for least, text in self.profile.items()]
        words += build_arguments(self.result.model, self.target)
        words += ["--noTF32"] * self.tf32_off
        return [command_line([word]) for word in words]

    @property
    def tf32_off(self) -> bool:
        """True if the result is right only without TF32."""
        return "tf32" in self.result.gap_kinds


def chooses_types(target: Target) -> bool:
    """True for a release without strongly typed networks."""
    return target.library == "tensorrt" and () < target.version < TYPED_SINCE


def lowered(result: FixOutcome) -> str | None:
    """The low precision of the model; None if it is in FP32."""
    return result.plan.precision if result.plan and result.plan.precision != "fp32" else None


def command(result: FixOutcome) -> str:
    """The command that builds the engine: the script, if one was written; "" if there is nothing to build."""
    if result.output is None or result.verified is False:
        return ""
    if result.script is not None:
        return command_line(["python" if result.script.suffix == ".py" else "sh", result.script])
    build = Build(result, result.output)
    return " ".join(build.trtexec(build.engine, build.typing))


def files_beside(output: Path) -> tuple[Path, ...]:
    """The files that `fix` may write beside a result, but for weights."""
    return tuple(output.with_name(f"{output.stem}.build{suffix}") for suffix in (".sh", ".py"))


def write(result: FixOutcome, tool: Tool) -> Path:
    """Writes the script of a tool beside the result, and returns its path; all paths in it are relative."""
    assert result.output is not None
    suffix, text = SCRIPTS[tool](Build(result, Path(result.output.name)))
    path = result.output.with_name(f"{result.output.stem}.build{suffix}")
    write_text(text, path, "the script")
    return path


def _trtexec(build: Build) -> tuple[str, str]:
    return ".sh", _filled(
        "shell",
        does=f"Builds {command_line([build.engine])} with TensorRT's trtexec.",
        command=_lines(build, build.engine),
        more="",
    )


def _triton(build: Build) -> tuple[str, str]:
    name = build.where.stem
    folder = Path("model_repository", name)
    words = command_line([folder / "1"]), command_line([folder / "config.pbtxt"])
    more = _filled("triton", config=words[1], name=name)
    return ".sh", _filled(
        "shell",
        does="Makes a model repository for Triton; run it with the trtexec of the server's image.",
        command=f"mkdir -p {words[0]}\n" + _lines(build, folder / "1" / "model.plan"),
        more=more,
    )


def _lines(build: Build, engine: Path) -> str:
    """The command over several lines; trtexec itself is asked for a flag that only some releases have."""
    unknown = build.target.library == "tensorrt" and not build.target.version and build.typing
    words = build.trtexec(engine, [] if unknown else build.typing)
    asked = f"typed=$({words[0]} --help | grep -o -m1 -e {build.typing[0]} || true)\n" if unknown else ""
    return asked + " \\\n    ".join(words[:2] + ["$typed"] * bool(unknown) + words[2:])


def _python(build: Build) -> tuple[str, str]:
    target = build.target
    library = f"import {target.library.replace('-', '_')} as trt"
    if target == Target():  # whichever is installed
        library = f"try:\n    {library}\nexcept ModuleNotFoundError:\n    import tensorrt_rtx as trt"
    flag = lowered(build.result) if chooses_types(target) else None
    return ".py", _filled(
        "python",
        model=repr(str(build.where)),
        engine=repr(str(build.engine)),
        title=title(target.library),
        library=library,
        flags=(f"config.set_flag(trt.BuilderFlag.{flag.upper()})\n" if flag else "")
        + "config.clear_flag(trt.BuilderFlag.TF32)\n" * build.tf32_off,
        shapes=_table(build.shapes),
        values=_table(build.values),
    )


def _table(profile: Profile) -> str:
    """A dict in Python's syntax; the `?` of an unknown size is left for the user."""
    rows = [
        f"    {name!r}: ({', '.join('(' + ', '.join(s) + ',)' if s else '()' for s in shapes)}),\n"
        for name, shapes in profile.items()
    ]
    return "{\n" + "".join(rows) + "}" if rows else "{}"


def _onnxruntime(build: Build) -> tuple[str, str]:
    rtx = build.target.library == "tensorrt-rtx"
    prefix, kept = ("nv", "nv_runtime_cache_path") if rtx else ("trt", "trt_engine_cache_path")
    options = {kept: f"str(HERE / {build.where.stem + '.cache'!r})"}
    options |= {} if rtx else {"trt_engine_cache_enable": "True"}
    options |= {f"{prefix}_profile_{least}_shapes": repr(text) for least, text in build.profile.items()}
    return ".py", _filled(
        "onnxruntime",
        model=repr(str(build.where)),
        title=title(build.target.library),
        provider="NvTensorRTRTXExecutionProvider" if rtx else "TensorrtExecutionProvider",
        options="\n".join(f"    {name!r}: {text}," for name, text in options.items()),
    )


def _filled(template: str, **values: str) -> str:
    text = files("rewriter.report").joinpath("scripts", f"{template}.template").read_text(encoding="utf-8")
    return Template(text).substitute(values)


SCRIPTS: Mapping[Tool, Callable[[Build], tuple[str, str]]] = {
    "trtexec": _trtexec,
    "python": _python,
    "triton": _triton,
    "onnxruntime": _onnxruntime,
}
"""By tool: the suffix and the text of its script."""
