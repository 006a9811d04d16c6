"""Every option of `fix`, `scan` and `verify`, declared once.

The fields of these classes are the keywords of `rewriter.fix`, `rewriter.scan` and `rewriter.verify`. From
them come the commands' options, the keys of files and the environment, docs/configuration.md and the
keywords that type checkers know (`pipeline/keywords.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rewriter.pipeline import completion
from rewriter.pipeline import option_checks as checks
from rewriter.pipeline.declaration import (
    ONE_RUN,
    AnyPath,
    Declaration,
    Names,
    Paths,
    Place,
    Shapes,
    declarations,
    like,
    option,
)
from rewriter.plan import InputsOutputs, Plan, Precision

if TYPE_CHECKING:
    from types import EllipsisType

    from rewriter.base import Pass
    from rewriter.figures.tolerances import Tolerance
    from rewriter.hazards import Rule

Command = Literal["fix", "scan", "verify"]

DATA, PASSES, PRECISION, SEARCH = "Options", "Passes", "Precision", "Search for a plan"
ENGINE, OUTCOME, MANY = "Engine", "Verification and report", "Many models"
PANELS = (DATA, MANY, PASSES, PRECISION, SEARCH, ENGINE, OUTCOME)
"""Groups of options in `--help`, in their order."""

PROFILE = "NAME:1x3x8,..."

HERE: tuple[Place, ...] = ("command line",)
"""For what belongs to one command, and to no function of the API."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The sample data of a job.

    Attributes:
        inputs: Sample data: npz, a folder of npz, npy or photographs, or Polygraphy's JSON; in Python also
            arrays, dicts of arrays, and lists or loaders of either. Without it inputs are random.
        image_preprocess: How the photographs of a folder become samples: docs/inputs.md.
        seed: Seed of random data.
    """

    inputs: Any = option(
        None,
        "npz, folder, or Polygraphy JSON",
        DATA,
        "DATA",
        kind=Path,
        words=("data", "samples", "calibration"),
    )
    image_preprocess: str | None = option(
        None,
        "For a folder of photos: size=640",
        DATA,
        "STEPS",
        check=checks.image_steps,
        words=("preprocess", "transform"),
    )
    input_shapes: Shapes | None = option(
        None,
        "Shape of an input for random data",
        DATA,
        "NAME:1x3x8",
        flags=("--input-shape",),
        words=("shapes", "input-shape"),
    )
    seed: int = option(0, "Of random data [0]", DATA, "N", check=partial(checks.at_least, 0), least=0)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine that builds and runs the result, with the shapes that it is built for.

    Attributes:
        engine: What builds and runs the result: `auto` is the best engine here, `emulation` uses no GPU;
            `verify` also has `onnxruntime` and `onnxruntime-cuda`.
        max_shapes: Largest shapes of the profile.
    """

    engine: str = option(
        "auto", "auto, tensorrt, tensorrt-rtx, emulation", ENGINE, "NAME", check=checks.engine
    )
    plugin_lib: Paths = option((), "A library with TensorRT plugins", ENGINE, "FILE", words=("plugins",))
    min_shapes: Shapes | None = option(None, "Smallest shapes of the profile", ENGINE, PROFILE, commas=True)
    opt_shapes: Shapes | None = option(
        None, "Usual shapes [those of the samples]", ENGINE, PROFILE, commas=True
    )
    max_shapes: Shapes | None = option(None, "Largest shapes", ENGINE, PROFILE, commas=True)


@dataclass(frozen=True, kw_only=True)
class FixOptions(DataOptions, EngineOptions):
    """The options of `rewriter.fix`. None means that the preset or the model decides.

    Attributes:
        preset: A pipeline by name, with defaults for other options: `rewriter presets`.
        passes: A pipeline in place of the preset's, with the options of its passes. In Python also a list
            of names and passes of your own, in which `...` stands for the preset's.
        opset: Operator set of the result. Default: 17; 22 for BF16; 23 for FP16 models that write out
            RMSNorms, if the target maps RMSNormalization (TensorRT 10.15, TensorRT-RTX 1.6).
        target: The TensorRT that the result is for: `tensorrt`, `tensorrt-rtx`, or a version such as
            `10.3`.
        precision: The type that nodes compute in; `fp32` rewrites the structure only.
        io: Types of the model's float inputs and outputs.
        keep_fp32: Patterns of node or output names; these nodes stay in FP32.
        keep_fp32_op: Operators whose nodes stay in FP32.
        plan: A plan to apply exactly, with its precision and io, as `--save-plan` wrote it. It excludes
            `keep-fp32` and `keep-fp32-op`.
        save_plan: Where to write the plan that was made, as JSON; also with `dry_run`.
        weak_typing: Write the model in FP32 for TensorRT 8 to 10, with the plan beside it as constraints
            for the builder: arguments of trtexec, and Python code.
        tolerance: fix: search for the cheapest plan whose emulation stays within this for every output;
            verify: the largest error allowed. In the unit of `metric`.
        max_latency_cost: Search for the most accurate plan that adds at most this share of latency (`0.05`)
            to the rules' plan. Latencies are estimated from recorded costs.
        metric: The measure of accuracy that `tolerance` is given in: a name, or a Python function of yours.
        verify: Emulate the result, compare it with the original, build it, and run it if there is a GPU.
        build: Build with TensorRT as a part of `verify`.
        accumulation: The type in which the emulation sums the products of FP16 MatMul, Gemm and Conv.
            `fp16` is what GPUs were measured to do; it needs 2 to 8 times as long. By default `fix` takes
            what is recorded of the target, and FP32 where nothing is, or an emulation would take minutes.
        repair: Repair a result that fails its checks: leave out what our own passes broke, keep more nodes
            in FP32, and at last all of them.
        repair_seconds: No repair starts later than this, in seconds.
        build_timeout: Deadline of TensorRT's build, in seconds.
    """

    in_place: bool = option(False, "The result may replace MODEL", DATA, places=ONE_RUN)
    dry_run: bool = option(False, "Do everything, but write no model", DATA, places=ONE_RUN)
    preset: str = option(
        "trt-fp16",
        "A line of `rewriter presets`; trt-fp16 by default",
        PASSES,
        "NAME",
        check=checks.preset,
        complete=completion.presets,
    )
    passes: str | Sequence[str | Pass | EllipsisType] | None = option(
        None,
        "Instead of the preset's pipeline",
        PASSES,
        "A,B{X=Y}",
        kind=str,
        check=checks.pipeline,
        complete=completion.passes,
        words=("pipeline",),
    )
    skip: Names = option(
        (),
        "Leave these passes out",
        PASSES,
        "A,B",
        check=checks.passes,
        complete=completion.passes,
        commas=True,
        words=("exclude",),
    )
    opset: int | None = option(
        None, "Operator set [17; BF16: 22; RMSNorms: 23]", PASSES, "N", check=checks.opset
    )
    target: str | None = option(
        None,
        "tensorrt (default), tensorrt-rtx or 10.3",
        PASSES,
        "NAME",
        check=checks.target,
        complete=completion.targets,
    )
    precision: Precision | None = option(
        None, "fp16, bf16, or fp32: structure only", PRECISION, "TYPE", words=("dtype",)
    )
    io: InputsOutputs | None = option(
        None, "Inputs and outputs: keep, fp32 or fp16", PRECISION, "TYPE", words=("io-types",)
    )
    keep_fp32: Names = option(
        (),
        "Keep nodes of this name in FP32: '*/attn/*'",
        PRECISION,
        "PATTERN",
        words=("nodes", "kept-nodes", "nodes-to-exclude"),
    )
    keep_fp32_op: Names = option(
        (),
        "Keep every node of this operator in FP32",
        PRECISION,
        "OP",
        commas=True,
        words=("ops", "op-types", "op-types-to-exclude"),
    )
    plan: AnyPath | Plan | None = option(
        None, "Apply this plan exactly, measure nothing", PRECISION, "PLAN.json", kind=Path
    )
    save_plan: AnyPath | None = option(
        None, "Write the plan that was made, to edit it", PRECISION, "PLAN.json", kind=Path, places=ONE_RUN
    )
    hazards: Sequence[Rule] = option(
        (), "Rules of your own, which keep nodes in FP32", PRECISION, places=("python",), kind=tuple
    )
    weak_typing: bool | None = option(None, "TensorRT 8-10: FP32, constraints", PRECISION)
    tolerance: float | None = option(
        None, "The cheapest plan this accurate: 1e-3", SEARCH, "ERROR", check=checks.a_number
    )
    max_latency_cost: float | None = option(
        None,
        "The best plan for 5% more latency",
        SEARCH,
        "SHARE",
        check=checks.a_share,
        read=checks.share_from_text,
        words=("latency-cost", "budget"),
    )
    metric: str | None = option(
        None,
        "Of accuracy; by default relative-l2",
        SEARCH,
        "NAME",
        check=checks.metric,
        complete=completion.metrics,
    )
    verify: bool = option(True, "Run the checks [on]", OUTCOME, flags=("--verify/--no-verify",))
    build: bool = option(True, "TensorRT's build and run [on]", OUTCOME, flags=("--build/--no-build",))
    accumulation: Literal["fp32", "fp16"] | None = option(
        None, "Emulated sums: fp32 or fp16", OUTCOME, "TYPE"
    )
    repair: bool = option(True, "Repair what fails [on]", OUTCOME, flags=("--repair/--no-repair",))
    repair_seconds: float = option(300.0, "For repairs [300]", OUTCOME, "SECONDS", check=checks.positive)
    strict: bool = option(False, "Write nothing if a check fails", OUTCOME, flags=("--strict/--no-strict",))
    build_timeout: float = option(
        600.0, "For TensorRT's build [600]", OUTCOME, "SECONDS", check=checks.positive
    )


@dataclass(frozen=True, kw_only=True)
class FixCommand(FixOptions):
    """The options of `rewriter fix`: those of `rewriter.fix`, and a report."""

    report: Path | None = option(
        None,
        "A page (.html) or JSON, too",
        OUTCOME,
        "FILE",
        places=("command line", "file"),
        words=("json",),
    )


@dataclass(frozen=True, kw_only=True)
class BatchCommand(FixOptions):
    """The options of `rewriter batch`: those of `rewriter.fix` for every model, and how they are run.

    Attributes:
        manifest: A TOML file that names models and gives each its options: docs/batch.md.
        jobs: Models at a time on this machine. They share its cores and its memory.
        memory: Memory that all models together may need on this machine, in GiB. Default: four fifths of
            what is free.
        time_limit: Deadline of each model, in seconds; a model that needs longer is stopped.
        again: Run models that are finished, too.
        ray: Address of a Ray cluster that runs the models; `auto` is the one on this machine.
        gpus: GPUs that Ray reserves for each model; a share such as 0.5 lets models share a GPU.
        verify_on: Types of GPU, by Ray's names, on each of which every fixed model is verified.
    """

    in_place: bool = like(FixOptions, "in_place", places=("python",))
    dry_run: bool = like(FixOptions, "dry_run", places=("python",))
    save_plan: AnyPath | None = like(FixOptions, "save_plan", places=("python",))
    manifest: Path | None = option(None, "Models and their options, as TOML", MANY, "FILE.toml", places=HERE)
    jobs: int = option(0, "Models at a time [half the cores]", MANY, "N", places=HERE, least=1)
    memory: float | None = option(None, "For all of them together", MANY, "GIB", places=HERE)
    time_limit: float = option(3600.0, "For each model [3600]", MANY, "SECONDS", places=HERE)
    again: bool = option(False, "Run finished models, too", MANY, places=HERE)
    ray: str | None = option(None, "Run on this Ray cluster, or auto", MANY, "ADDRESS", places=HERE)
    gpus: float = option(0.0, "On Ray: reserved for each model [0]", MANY, "N", places=HERE)
    verify_on: Names = option(
        (), "On Ray: verify on each of these GPUs", MANY, "L4,H100", places=HERE, commas=True
    )
    report: Paths = option((), "Summary: .html, .json or .xml (JUnit)", OUTCOME, "FILE", places=HERE)


@dataclass(frozen=True, kw_only=True)
class ScanOptions(DataOptions):
    """The options of `rewriter.scan`.

    Attributes:
        precision: The type that the model shall compute in.
        target: `tensorrt`, `tensorrt-rtx`, or a version: defects known of other releases are not reported.
    """

    precision: Literal["fp16", "bf16"] = like(
        FixOptions,
        "precision",
        default="fp16",
        kind=None,
        help="What MODEL shall compute in: fp16 (default) or bf16",
    )
    target: str = like(FixOptions, "target", default="tensorrt", panel=PRECISION)
    hazards: Sequence[Rule] = like(FixOptions, "hazards", help="Rules of your own, which report hazards")


@dataclass(frozen=True, kw_only=True)
class ScanCommand(ScanOptions):
    """The options of `rewriter scan`: those of `rewriter.scan`, and what its exit code depends on.

    Attributes:
        fail_on: The least severe finding with which `scan` exits with 1.
    """

    preset: str = like(FixOptions, "preset", places=("file",))
    fail_on: Literal["warning", "error"] | None = option(
        None, "Exit with 1 from warning or error on", OUTCOME, "LEVEL", places=("command line", "file")
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(DataOptions, EngineOptions):
    """The options of `rewriter.verify`.

    Attributes:
        builds: How often the fixed model is built. Builds differ; the worst one is judged.
        timeout: Deadline of each build and of the run, in seconds.
        tolerance: Largest error of the worst output, sample and build, in the unit of `metric`. None: from
            the types that the fixed model computes in. A `Tolerance` has its own metric and source.
        ranges: Measures the ranges of the original on one sample, for the chart of the page.
    """

    engine: str = like(FixOptions, "engine", help="One of those above; auto: the best")
    builds: int = option(
        1, "Build N times, judge the worst [1]", ENGINE, "N", check=partial(checks.at_least, 1)
    )
    timeout: float = option(600.0, "For each build, and for the run [600]", ENGINE, "SECONDS", places=ONE_RUN)
    tolerance: float | Tolerance | None = like(
        FixOptions, "tolerance", help="What is allowed [by the types]", panel=OUTCOME, metavar="VALUE"
    )
    metric: str = like(
        FixOptions, "metric", default="relative-l2", help="Of --tolerance [relative-l2]", panel=OUTCOME
    )
    accumulation: Literal["fp32", "fp16"] = like(
        FixOptions, "accumulation", default="fp16", help="Emulated sums of FP16: fp16 or fp32"
    )
    timing: bool = option(True, "Measure latency, too", places=("python",))
    ranges: bool = option(False, "Measure ranges for the page", places=("python",))


JOBS: Mapping[Command, type] = {"fix": FixOptions, "scan": ScanOptions, "verify": VerifyOptions}
COMMANDS: Mapping[Command, type] = {"fix": FixCommand, "scan": ScanCommand, "verify": VerifyOptions}


def readers(name: str) -> tuple[Command, ...]:
    """The commands for which a file may set an option."""
    return tuple(
        command
        for command, kind in COMMANDS.items()
        if name in declarations(kind) and "file" in declarations(kind)[name].places
    )


def _keys() -> dict[str, Declaration]:
    """Each as the first command that has it declares it, in the order of the panels."""
    found: dict[str, Declaration] = {}
    for kind in COMMANDS.values():
        found |= {name: option for name, option in declarations(kind).items() if name not in found}
    names = sorted(filter(readers, found), key=lambda name: PANELS.index(found[name].panel))
    return {name: found[name] for name in names}


KEYS: Mapping[str, Declaration] = _keys()
"""Every option that files and the environment may set, by name."""


Options = TypeVar("Options", FixOptions, ScanOptions, VerifyOptions)
Function = TypeVar("Function", bound=Callable[..., Any])


def combined(kind: type[Options], options: Options | None, keywords: Mapping[str, Any]) -> Options:
    """The options with some replaced by keywords, each of the type that its field declares.

    Args:
        kind: The options class; its defaults hold if `options` is None.

    Raises:
        UsageError: a keyword is no option, or a value has the wrong type.
    """
    from rewriter.pipeline.option_types import checked_options

    return kind(**checked_options(options, kind, keywords))


def documented(kind: type) -> Callable[[Function], Function]:
    """Decorator that adds a section about the options to a docstring, for `help(rewriter.fix)`."""

    def decorate(function: Function) -> Function:
        lines = [f"    {name}: {option.text}" for name, option in declarations(kind).items()]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines])
        return function

    return decorate
