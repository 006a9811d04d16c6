"""Every option of the commands and of the API, declared once.

The fields of these classes are the keywords of `rewriter.fix`, `rewriter.scan` and `rewriter.verify`. From
them come the commands' options, the keys of files and the environment, and docs/configuration.md. The first
sentence of an entry is its line in `--help`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rewriter.ir.plan import IO_TYPES, Plan, Precision, io_parts, plugin_types
from rewriter.pipeline.schema import (
    COMMAND,
    ONE_RUN,
    AnyPath,
    Names,
    Option,
    Paths,
    Shapes,
    declarations,
    like,
    option,
)

if TYPE_CHECKING:
    from types import EllipsisType

    from rewriter.hazards import Rule
    from rewriter.ir.model import Model
    from rewriter.passes.base import Pass
    from rewriter.runtime.engines.deployment import Deployment
    from rewriter.runtime.inputs import Samples
    from rewriter.runtime.metrics.tolerances import Tolerance

Command = Literal["fix", "scan", "verify"]
Tool = Literal["trtexec", "python", "triton", "onnxruntime"]
Runner = Literal["auto", "tensorrt", "tensorrt-rtx", "onnxruntime", "onnxruntime-cuda", "emulation"]

DATA, PASSES, PRECISION, SEARCH = "Options", "Passes", "Precision", "Search for a plan"
ENGINE, OUTCOME, MANY = "Engine", "Verification and report", "Many models"
PANELS = (DATA, MANY, PASSES, PRECISION, SEARCH, ENGINE, OUTCOME)
"""Groups of options in `--help`, in their order."""

PROFILE = "NAME:1x3x8,..."
TARGETS = ("tensorrt", "tensorrt-rtx")  # libraries; a version may follow, or be given by itself

PRESETS, PIPELINE = "rewriter.pipeline.presets", "rewriter.pipeline.text:listed"
METRICS = "rewriter.runtime.metrics.metrics:METRICS"


def require_opset(number: int) -> None:
    """Accepts an operator set that the installed onnx has."""
    from onnx.defs import onnx_opset_version

    if not 1 <= number <= onnx_opset_version():
        raise ValueError(f"choose from 1 to {onnx_opset_version()}")


def finite(value: Any) -> None:
    """Refuses a limit that holds nothing; raises ValueError."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("it takes a finite number, such as 1e-3")


def share_from_text(text: str) -> float:
    """`5%` and `0.05` as 0.05, and `1.05x`, the latency in all, too.

    Raises:
        ValueError: it is no number, or one from 1 on without a unit, which may be meant either way.
    """
    share = text.strip()
    number, unit = (share[:-1], share[-1]) if share.endswith(("%", "x")) else (share, "")
    try:
        value = float(number)
    except ValueError:
        raise ValueError("such as 5%, or 0.05") from None
    if not unit and 1.0 <= value < math.inf:
        raise ValueError(f"say {number}% for that much more latency, or {number}x for that many times of it")
    return value / 100.0 if unit == "%" else value - 1.0 if unit else value


def values_from_text(text: str) -> dict[str, Any]:
    """`sr=16000,size=20x30` as numbers by input; raises ValueError for another form."""
    numbers = dict[str, list[float]]()
    try:
        for name, _, value in (part.strip().rpartition("=") for part in text.split(",")):
            numbers[name] = [float(n) if "." in n else int(n) for n in value.split("x")]
    except ValueError:
        raise ValueError("such as sr=16000, or size=20x30") from None
    return {name: values[0] if len(values) == 1 else values for name, values in numbers.items()}


def numbers_in(values: Mapping[str, Any]) -> None:
    """Accepts numbers and lists of numbers by name; raises ValueError for others."""
    import numpy as np

    if not all(isinstance(n, str) and n and np.asarray(v).dtype.kind in "biuf" for n, v in values.items()):
        raise ValueError("it takes numbers by input: { sr = 16000, size = [20, 30] }")


RANDOM_DATA = ("input_shapes", "input_values")
"""Options for random data, which contradict `inputs`."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The sample data of a job.

    Attributes:
        inputs: npz, folder, or Polygraphy JSON. The samples; a folder holds npz, npy or photographs. In
            Python also arrays, dicts of arrays, and lists or loaders of either. Without it inputs are random.
        image_preprocess: For a folder of photos: size=640. docs/inputs.md lists the steps.
        input_shapes: Shapes of inputs for random data.
        input_values: Values of random inputs: sr=16000. One number for all elements, or one for
            each: `size=20x30`.
        seed: Seed of random data.
    """

    inputs: Any = option(None, DATA, "DATA", kind=Path)
    image_preprocess: str | None = option(
        None, DATA, "STEPS", check="rewriter.runtime.inputs.images:Preprocessing.parse"
    )
    input_shapes: Shapes | None = option(None, DATA, "NAME:1x3,...")
    input_values: dict[str, Any] | None = option(
        None, DATA, "NAME=1,...", kind=dict, read=values_from_text, check=numbers_in
    )
    seed: int = option(0, DATA, least=0)

    def samples(self, model: Model, deployment: Deployment | None = None) -> Samples:
        """The samples of a run of `model`, as `load_samples` reads them."""
        from rewriter.base.errors import UsageError
        from rewriter.runtime.inputs import load_samples

        for name in RANDOM_DATA if self.inputs is not None else ():
            if getattr(self, name):
                option = name.replace("_", "-")
                hint = f"leave out `inputs` or `{option}`"
                raise UsageError("it is for random data, and `inputs` are given", option=option, hint=hint)
        more: Any = {name: getattr(self, name) for name in (*RANDOM_DATA, "image_preprocess")}
        return load_samples(self.inputs, model, seed=self.seed, deployment=deployment, **more)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine that builds and runs the result, with the shapes that it is built for.

    Attributes:
        engine: auto, tensorrt, onnxruntime, emulation. It builds and runs the result: `auto` is the best
            engine here, `emulation` uses no GPU. Also `tensorrt-rtx` and `onnxruntime-cuda`.
        plugin_lib: A library with TensorRT plugins.
        min_shapes: Smallest shapes of the profile.
        opt_shapes: Usual shapes; by default the samples'.
        max_shapes: Largest shapes of the profile.
    """

    engine: Runner = option("auto", ENGINE, "NAME")
    plugin_lib: Paths = option((), ENGINE, commas=False)
    min_shapes: Shapes | None = option(None, ENGINE, PROFILE)
    opt_shapes: Shapes | None = option(None, ENGINE, PROFILE)
    max_shapes: Shapes | None = option(None, ENGINE, PROFILE)

    def deployment(self) -> Deployment:
        """The engine of a run, with its plugins and its profile."""
        from rewriter.runtime.engines.deployment import deployment

        return deployment(self.engine, self.plugin_lib, self.min_shapes, self.opt_shapes, self.max_shapes)


@dataclass(frozen=True, kw_only=True)
class FixOptions(DataOptions, EngineOptions):
    """The options of `rewriter.fix`. None means that the preset or the model decides.

    Attributes:
        in_place: The result may replace MODEL.
        dry_run: Do everything, but write no model.
        preset: A pipeline by name. It has defaults for other options, too: `rewriter presets`.
        passes: Passes instead of the preset's. Options stand in braces. In Python also a list of names and
            of your own passes, in which `...` stands for the preset's.
        add: Also run these passes. Each runs at its place: before the first pass of a later stage.
        skip: Leave these passes out.
        refittable: Keep weights and their names. Leaves out the passes that merge, fold or scale weights.
            TensorRT can then refit an engine of the result by name, in the types of the result.
        opset: Operator set [17; Q/DQ: 19; BF16: 22].
        target: tensorrt, tensorrt-rtx, 10.3. The TensorRT that will build the result; by default
            TensorRT-RTX if it checks the result here. A GPU may follow (`10.13 sm_110`). Other names are
            jetpack-6.2, jetpack-7.1, jetpack-7.2.2 and dla.
        deploy: trtexec, python, triton, onnxruntime. Writes a script beside the result that builds it with
            this tool: `fixed.build.sh` or `fixed.build.py`. By default only the command is printed: of
            tensorrt_rtx for that target, of trtexec otherwise.
        precision: fp16, bf16, or fp32: structure only. The type that nodes compute in.
        io: Inputs and outputs: fp16,logits=fp32. Types of the model's float inputs and outputs: keep, fp32,
            fp16 or bf16 for all of them. NAME=TYPE is for names that match the pattern NAME. links=TYPE is
            for outputs that become inputs, in a recording or by names of caches, if both compute in it.
        keep_fp32: Keep nodes of this name in FP32: '*/attn/*'. Patterns of node or output names; each has to
            match a node of the model.
        keep_fp32_op: Keep every node of this operator in FP32.
        lower: Lower nodes of this name: '*/ffn/*'. It overrides rules, `keep-fp32` and `keep-fp32-op`. A
            repair may still keep them in FP32 if a check fails; `no-repair` prevents that.
        lower_op: Lower every node of this operator. As for `lower`.
        plugin_types: Types of a custom operator: OP:fp16:fp32. First the types of its inputs, then of its
            outputs (`OP:fp16,int32:fp32`); the last type holds for all that follow. `OP:fp16` is for all its
            floats. By default an operator that ONNX does not know keeps the model's types.
        plan: Apply this plan exactly, measure nothing. It sets precision and io, and excludes `keep-fp32`,
            `lower`, their `-op` and `plugin-types`; `save-plan` writes one.
        save_plan: Write the plan, to edit it. As JSON; also with `dry-run`.
        hazards: Your own rules, which keep nodes in FP32.
        tolerance: The cheapest plan this accurate: 1e-3. fix: search for the cheapest plan whose emulation
            is within this for every output. verify: the largest error allowed. In the unit of `metric`.
        max_latency_cost: The best plan for 5% more latency. Search for the most accurate plan that adds at
            most this share of latency (`0.05`) to the rules' plan. Latencies are estimated from recorded
            costs.
        metric: Measure of accuracy; by default relative-l2. The unit of `tolerance`: a name, or your own
            Python function.
        against: Judge by this model, such as the one before quantisation. A result may be as far from it as
            MODEL itself, and further by the tolerance. Its inputs and outputs have the same names and shapes.
        verify: Run the checks. Emulate the result, compare it with the original, build it, and run it if
            there is a GPU.
        build: Build and run an engine. A part of the checks.
        accumulation: Emulated sums: fp32 or fp16. The type in which the emulation sums the products of FP16
            MatMul, Gemm and Conv. GPUs were measured to use `fp16`, which needs 2 to 8 times as long. By
            default `fix` uses the target's recorded type. It uses FP32 if none is recorded, or if an
            emulation would take minutes.
        repair: Repair a failed check. Leave out passes that broke something, then keep more nodes in FP32, at
            last all of them.
        repair_seconds: Time limit of repairs, which hand out the best result so far. It counts from the check
            of the rules' plan, or from the search for your goal. Candidates end within 10 % of it, in the
            middle of a run if they have to. It also limits the emulation of plain FP16. The first steps, the
            build of the result and its writing are not limited.
        strict: Write nothing unless proven. By an engine or its emulation. Random, constant or repeated
            samples prove nothing. Neither does a result that is all FP32.
        timeout: For each build and run. In seconds.
        page: For `report.html`. Compute the outputs of the worst sample in plain FP16, and the error along
            the depth.
    """

    in_place: bool = option(False, DATA, set_in=ONE_RUN)
    dry_run: bool = option(False, DATA, set_in=ONE_RUN)
    preset: str = option(
        "trt-fp16", PASSES, "NAME", check=f"{PRESETS}:preset_named", offers=f"{PRESETS}:summaries"
    )
    passes: str | Sequence[str | Pass | EllipsisType] | None = option(
        None, PASSES, "A,B{X=Y}", kind=str | Names, check=PIPELINE, offers=f"{PRESETS}:pass_names"
    )
    add: str | Sequence[str | Pass] = option(
        (), PASSES, "A,B{X=Y}", kind=str | Names, check=PIPELINE, offers=f"{PRESETS}:pass_names"
    )
    skip: Names = option((), PASSES, check="rewriter.pipeline.text:require", offers=f"{PRESETS}:pass_names")
    refittable: bool = option(False, PASSES)
    opset: int | None = option(None, PASSES, check=require_opset)
    target: str | None = option(None, PASSES, "NAME", check="rewriter.target:Target.parse", offers=TARGETS)
    deploy: Tool | None = option(None, ENGINE, "TOOL")
    precision: Precision | None = option(None, PRECISION)
    io: str | None = option(None, PRECISION, "TYPE,...", kind=str, check=io_parts, offers=IO_TYPES)
    keep_fp32: Names = option((), PRECISION, "PATTERN", commas=False)
    keep_fp32_op: Names = option((), PRECISION, "OP")
    lower: Names = option((), PRECISION, "PATTERN", commas=False)
    lower_op: Names = option((), PRECISION, "OP")
    plugin_types: Names = option(
        (), PRECISION, "OP:IN:OUT", commas=False, read=lambda text: text.split(";"), check=plugin_types
    )
    plan: AnyPath | Plan | None = option(None, PRECISION, "PLAN.json", kind=Path)
    save_plan: AnyPath | None = option(None, PRECISION, "PLAN.json", kind=Path, set_in=ONE_RUN)
    hazards: Sequence[Rule] = option((), PRECISION, set_in=("python",), kind=tuple)
    tolerance: float | None = option(None, SEARCH, "ERROR", check=finite)
    max_latency_cost: float | None = option(None, SEARCH, "SHARE", read=share_from_text, least=0.0)
    metric: str | None = option(None, SEARCH, "NAME", offers=f"{METRICS}.keys")
    against: AnyPath | Any = option(None, OUTCOME, "FLOAT.onnx", kind=Path, set_in=ONE_RUN)
    verify: bool = option(True, OUTCOME)
    build: bool = option(True, OUTCOME)
    accumulation: Literal["fp32", "fp16"] | None = option(None, OUTCOME)
    repair: bool = option(True, OUTCOME)
    repair_seconds: float = option(300.0, OUTCOME, "SECONDS", above=0.0)
    strict: bool = option(False, OUTCOME)
    timeout: float = option(600.0, OUTCOME, "SECONDS", above=0.0)
    page: bool = option(False, set_in=("python",))


@dataclass(frozen=True, init=False, repr=False, eq=False)
class FixCommand(FixOptions):
    """The options of `rewriter fix`: all options of `rewriter.fix`, and a report.

    Attributes:
        report: A page (.html) or JSON, too.
        loop_seconds: For a recording's loop. The recorded script runs again with the fixed
            files, with FP32 in TF32 and with plain FP16. In seconds; 0 leaves it out.
    """

    report: Path | None = option(None, OUTCOME, set_in=("command line", "file"))
    loop_seconds: float = option(600.0, OUTCOME, "SECONDS", set_in=COMMAND, least=0.0)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class BatchCommand(FixOptions):
    """The options of `rewriter batch`: options of `rewriter.fix` for every model, and how models are run.

    Attributes:
        manifest: Models and their options, as TOML. docs/batch.md has an example.
        jobs: Models at a time [half the cores]. They share this machine's cores and memory.
        memory: Memory of all models together. In GiB; by default four fifths of the free memory.
        time_limit: Time limit of each model. In seconds; a model that needs longer is stopped.
        again: Run finished models, too.
        ray: Run on this Ray cluster, or auto. `auto` is the one on this machine.
        gpus: On Ray: GPUs reserved for each model. A share such as 0.5 lets models share a GPU.
        report: Summary: a page (.html), .json or .xml (JUnit).
    """

    in_place: bool = like(FixOptions, "in_place", set_in=("python",))
    dry_run: bool = like(FixOptions, "dry_run", set_in=("python",))
    save_plan: AnyPath | None = like(FixOptions, "save_plan", set_in=("python",))
    against: AnyPath | Any = like(FixOptions, "against", set_in=("python",))
    manifest: Path | None = option(None, MANY, "FILE.toml", set_in=COMMAND)
    jobs: int = option(0, MANY, set_in=COMMAND, least=1)
    memory: float | None = option(None, MANY, "GIB", set_in=COMMAND, above=0)
    time_limit: float = option(3600.0, MANY, "SECONDS", set_in=COMMAND, above=0)
    again: bool = option(False, MANY, set_in=COMMAND)
    ray: str | None = option(None, MANY, "ADDRESS", set_in=COMMAND)
    gpus: float = option(0.0, MANY, "N", set_in=COMMAND, least=0)
    report: Paths = option((), OUTCOME, set_in=COMMAND)


@dataclass(frozen=True, kw_only=True)
class ScanOptions(DataOptions):
    """The options of `rewriter.scan`.

    Attributes:
        precision: The type that MODEL is to compute in: fp16 or bf16.
        target: tensorrt, tensorrt-rtx, 10.3. As for `fix`: defects of other releases are not reported.
        hazards: Your own rules, which report hazards.
    """

    precision: Literal["fp16", "bf16"] = like(FixOptions, "precision", default="fp16", kind=None)
    target: str = like(FixOptions, "target", default="tensorrt", panel=PRECISION)
    hazards: Sequence[Rule] = like(FixOptions, "hazards")


@dataclass(frozen=True, init=False, repr=False, eq=False)
class ScanCommand(ScanOptions):
    """The options of `rewriter scan`: all options of `rewriter.scan`, and what the exit code depends on.

    Attributes:
        fail_on: Exit with 1 from warning or error on. The least severe finding with which `scan` does.
    """

    preset: str = like(FixOptions, "preset", set_in=("file",))
    fail_on: Literal["warning", "error"] | None = option(
        None, OUTCOME, "LEVEL", set_in=("command line", "file")
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(DataOptions, EngineOptions):
    """The options of `rewriter.verify`.

    Attributes:
        builds: Build N times, judge the worst. Builds of one model differ.
        tolerance: What is allowed [by the types]. Largest error of the worst output, sample and build, in
            the unit of `metric`. A `Tolerance` has its own metric and source.
        metric: Of the tolerance.
        against: As for `fix`: the fixed model may be as far from this one as the original is.
        accumulation: Emulated sums of FP16 [as in `fix`]. Default: what `fix` judged the file by, else the
            target's.
        build: Without a GPU, TensorRT-RTX's build.
        timing: Measure latency, too.
    """

    builds: int = option(1, ENGINE, least=1)
    timeout: float = like(FixOptions, "timeout", panel=ENGINE)
    tolerance: float | Tolerance | None = like(FixOptions, "tolerance", panel=OUTCOME, metavar="VALUE")
    metric: str = like(FixOptions, "metric", default="relative-l2", panel=OUTCOME)
    against: AnyPath | Any = like(FixOptions, "against")
    accumulation: Literal["fp32", "fp16"] | None = like(FixOptions, "accumulation")
    build: bool = like(FixOptions, "build", set_in=("python",))
    timing: bool = option(True, set_in=("python",))


@dataclass(frozen=True, kw_only=True)
class LocateOptions(DataOptions, EngineOptions):
    """The options of `rewriter.locate`.

    Attributes:
        tolerance: Error that is wrong [as for `verify`]. Relative L2.
    """

    timeout: float = like(VerifyOptions, "timeout", set_in=ONE_RUN)
    tolerance: float | None = option(None, SEARCH, "ERROR", set_in=ONE_RUN, least=0.0, check=finite)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class CompareCommand:
    """The options of `rewriter compare-inputs`.

    Attributes:
        samples: Samples to look at.
    """

    samples: int = option(8, DATA, set_in=COMMAND, least=1)


JOBS: Mapping[Command, type] = {"fix": FixOptions, "scan": ScanOptions, "verify": VerifyOptions}
COMMANDS: Mapping[Command, type] = {"fix": FixCommand, "scan": ScanCommand, "verify": VerifyOptions}


_FIX = declarations(FixCommand)
_DECLARED = {**_FIX, **declarations(VerifyOptions), **declarations(ScanCommand), **_FIX}
KEYS: Mapping[str, Option] = {
    name: _DECLARED[name]
    for name in sorted(_DECLARED, key=lambda name: PANELS.index(_DECLARED[name].panel or DATA))
    if "file" in _DECLARED[name].set_in
}
"""Every option that files and the environment may set, by name, in the order of the panels."""

EVERY: frozenset[str] = frozenset(
    option.key
    for kind in (FixCommand, BatchCommand, ScanCommand, VerifyOptions, LocateOptions, CompareCommand)
    for option in declarations(kind).values()
) | {"output", "json", "sarif", "ask"}
"""Keys of all options, as messages name them in backticks."""


def with_flags(text: str) -> str:
    """A message for the terminal: `keep-fp32` in backticks as --keep-fp32, `build=false` as --no-build."""

    def flag(match: re.Match[str]) -> str:
        key, value = match.groups()
        words = {None: f"--{key}", "true": f"--{key}", "false": f"--no-{key}"}
        return words.get(value, f"--{key} {value}") if key in EVERY else match[0]

    return re.sub(r"`([a-z][a-z0-9-]*)(?:=([^`]*))?`", flag, text)


Options = TypeVar("Options", FixOptions, LocateOptions, ScanOptions, VerifyOptions)
Function = TypeVar("Function", bound=Callable[..., Any])


def combined(kind: type[Options], options: Options | None, keywords: Mapping[str, Any]) -> Options:
    """The options, or the defaults of `kind`, with some replaced by keywords; each is checked.

    Raises:
        UsageError: a keyword is no option, or a value has the wrong type or makes no sense.
    """
    from rewriter.base.errors import UsageError, shortened
    from rewriter.pipeline.schema import read, type_hints, unknown

    if options is not None and not isinstance(options, kind):
        hint = f"give options by name, such as inputs=...; or a rewriter.{kind.__name__}"
        raise UsageError(f"it cannot be {shortened(options)}", where="options", hint=hint)
    owner: Any = kind
    options_of, hints = declarations(owner), type_hints(owner)
    if wrong := next((name for name in keywords if name not in options_of), None):
        raise unknown(wrong, "there is no such keyword", "", options_of)
    values = {**(vars(options) if options else {}), **keywords}
    return kind(**{n: read(options_of[n], value, kind=hints[n]) for n, value in values.items()})


def documented(kind: type) -> Callable[[Function], Function]:
    """Decorator that adds a section about the options to a docstring, for `help(rewriter.fix)`."""

    def decorate(function: Function) -> Function:
        lines = [f"    {name}: {option.text}" for name, option in declarations(kind).items()]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines])
        return function

    return decorate
