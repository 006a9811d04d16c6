"""Every option of `fix`, `scan` and `verify`, declared once.

The fields of these classes are the keywords of `rewriter.fix`, `rewriter.scan` and `rewriter.verify`. From
them come the commands' options, the keys of files and the environment, docs/configuration.md and the
keywords that type checkers know (`pipeline/keywords.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
    Shapes,
    declarations,
    like,
    option,
)
from rewriter.plan import InputsOutputs, Plan, Precision

if TYPE_CHECKING:
    from rewriter.figures.tolerances import Tolerance

Command = Literal["fix", "scan", "verify"]

DATA, PASSES, PRECISION, SEARCH = "Options", "Passes", "Precision", "Search for a plan"
ENGINE, OUTCOME = "Engine", "Verification and report"
PANELS = (DATA, PASSES, PRECISION, SEARCH, ENGINE, OUTCOME)
"""Groups of options in `--help`, in their order."""

PROFILE = "NAME:1x3x8,..."


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The sample data of a job."""

    inputs: Any = option(
        None,
        "Samples: npz, folder, Polygraphy JSON",
        about="Sample data: npz, a folder of npz or npy, or Polygraphy's JSON; in Python also a dict of "
        "arrays or an iterable of dicts. Without it inputs are random, from a fixed seed.",
        panel=DATA,
        metavar="DATA",
        kind=Path,
        words=("data", "samples", "calibration"),
    )
    input_shapes: Shapes | None = option(
        None,
        "Shape of an input for random data",
        panel=DATA,
        metavar="NAME:1x3x8",
        flags=("--input-shape",),
        words=("shapes", "input-shape"),
    )
    seed: int = option(
        0,
        "Of random data [0]",
        about="Seed of random data.",
        panel=DATA,
        metavar="N",
        check=partial(checks.at_least, 0),
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The engine that builds and runs the result, with the shapes that it is built for."""

    engine: str = option(
        "auto",
        "auto, tensorrt, tensorrt-rtx, emulation",
        about="What builds and runs the result: `auto` is the best engine here, `emulation` uses no GPU; "
        "`verify` also has `onnxruntime` and `onnxruntime-cuda`.",
        panel=ENGINE,
        metavar="NAME",
        check=checks.engine,
    )
    plugin_lib: Paths = option(
        (), "A library with TensorRT plugins", panel=ENGINE, metavar="FILE", words=("plugins",)
    )
    min_shapes: Shapes | None = option(
        None, "Smallest shapes of the profile", panel=ENGINE, metavar=PROFILE, commas=True
    )
    opt_shapes: Shapes | None = option(
        None, "Usual shapes [those of the samples]", panel=ENGINE, metavar=PROFILE, commas=True
    )
    max_shapes: Shapes | None = option(
        None,
        "Largest shapes",
        about="Largest shapes of the profile.",
        panel=ENGINE,
        metavar=PROFILE,
        commas=True,
    )


@dataclass(frozen=True, kw_only=True)
class FixOptions(DataOptions, EngineOptions):
    """The options of `rewriter.fix`. None means that the preset or the model decides."""

    in_place: bool = option(False, "The result may replace MODEL", panel=DATA, places=ONE_RUN)
    dry_run: bool = option(False, "Do everything, but write no model", panel=DATA, places=ONE_RUN)
    preset: str = option(
        "trt-fp16",
        "A line of `rewriter presets`; trt-fp16 by default",
        about="A pipeline by name, with defaults for other options: `rewriter presets`.",
        panel=PASSES,
        metavar="NAME",
        check=checks.preset,
        complete=completion.presets,
    )
    passes: str | None = option(
        None,
        "Instead of the preset's pipeline",
        about="A pipeline in place of the preset's, with the options of its passes.",
        panel=PASSES,
        metavar="A,B{X=Y}",
        check=checks.pipeline,
        complete=completion.passes,
        words=("pipeline",),
    )
    skip: Names = option(
        (),
        "Leave these passes out",
        panel=PASSES,
        metavar="A,B",
        check=checks.passes,
        complete=completion.passes,
        commas=True,
        words=("exclude",),
    )
    opset: int | None = option(
        None,
        "Operator set [17; BF16: 22; RMSNorms: 23]",
        about="Operator set of the result. Default: 17; 22 for BF16; 23 for FP16 models that write out "
        "RMSNorms, if the target maps RMSNormalization (TensorRT 10.15, TensorRT-RTX 1.6).",
        panel=PASSES,
        metavar="N",
        check=checks.opset,
    )
    target: str | None = option(
        None,
        "tensorrt (default), tensorrt-rtx or 10.3",
        about="The TensorRT that the result is for: `tensorrt`, `tensorrt-rtx`, or a version such as `10.3`.",
        panel=PASSES,
        metavar="NAME",
        check=checks.target,
        complete=completion.targets,
    )
    precision: Precision | None = option(
        None,
        "fp16, bf16, or fp32: structure only",
        about="The type that nodes compute in; `fp32` rewrites the structure only.",
        panel=PRECISION,
        metavar="TYPE",
        words=("dtype",),
    )
    io: InputsOutputs | None = option(
        None,
        "Inputs and outputs: keep, fp32 or fp16",
        about="Types of the model's float inputs and outputs.",
        panel=PRECISION,
        metavar="TYPE",
        words=("io-types",),
    )
    keep_fp32: Names = option(
        (),
        "Keep nodes of this name in FP32: '*/attn/*'",
        about="Patterns of node or output names; these nodes stay in FP32.",
        panel=PRECISION,
        metavar="PATTERN",
        words=("nodes", "kept-nodes", "nodes-to-exclude"),
    )
    keep_fp32_op: Names = option(
        (),
        "Keep every node of this operator in FP32",
        about="Operators whose nodes stay in FP32.",
        panel=PRECISION,
        metavar="OP",
        commas=True,
        words=("ops", "op-types", "op-types-to-exclude"),
    )
    plan: AnyPath | Plan | None = option(
        None,
        "Apply this plan exactly, measure nothing",
        about="A plan to apply exactly, with its precision and io, as `--save-plan` wrote it. It excludes "
        "`keep-fp32` and `keep-fp32-op`.",
        panel=PRECISION,
        metavar="PLAN.json",
        kind=Path,
    )
    save_plan: AnyPath | None = option(
        None,
        "Write the plan that was made, to edit it",
        about="Where to write the plan that was made, as JSON; also with `dry_run`.",
        panel=PRECISION,
        metavar="PLAN.json",
        kind=Path,
        places=ONE_RUN,
    )
    weak_typing: bool | None = option(
        None,
        "TensorRT 8-10: FP32, constraints",
        about="Write the model in FP32 for TensorRT 8 to 10, with the plan beside it as constraints for "
        "the builder: arguments of trtexec, and Python code.",
        panel=PRECISION,
    )
    tolerance: float | None = option(
        None,
        "The cheapest plan this accurate: 1e-3",
        about="fix: search for the cheapest plan whose emulation stays within this for every output; "
        "verify: the largest error allowed. In the unit of `metric`.",
        panel=SEARCH,
        metavar="ERROR",
        check=checks.a_number,
    )
    max_latency_cost: float | None = option(
        None,
        "The best plan for 5% more latency",
        about="Search for the most accurate plan that adds at most this share of latency (`0.05`) to the "
        "rules' plan. Latencies are estimated from recorded costs.",
        panel=SEARCH,
        metavar="SHARE",
        check=checks.a_share,
        read=checks.share_from_text,
        words=("latency-cost", "budget"),
    )
    pareto: bool = option(
        False,
        "Evaluate a sequence of candidates",
        about="Evaluate a sequence of plans, and return the frontier of accuracy and latency.",
        places=("python",),
    )
    metric: str | None = option(
        None,
        "Of accuracy; by default relative-l2",
        about="The measure of accuracy that `tolerance` is given in: a name, or a Python function of yours.",
        panel=SEARCH,
        metavar="NAME",
        check=checks.metric,
        complete=completion.metrics,
    )
    search: Literal["emulation", "gpu"] = option(
        "emulation",
        "Who judges: emulation (default), gpu",
        about="What judges the candidates of a search: the emulation with recorded costs, or the engine on "
        "this machine's GPU, whose error and latency are measured. On the GPU with neither `tolerance` nor "
        "`max_latency_cost`, the search looks for the fastest plan that is no less accurate than the "
        "rules' plan, or else the most accurate that is no slower.",
        panel=SEARCH,
        metavar="BY",
        places=ONE_RUN,
    )
    search_seconds: float = option(
        300.0,
        "For the whole search on the GPU [300]",
        about="Deadline of the whole search on the GPU, in seconds: the best plan so far is used then. "
        "Loading, passes, ranges and verification come on top.",
        panel=SEARCH,
        metavar="SECONDS",
        places=ONE_RUN,
    )
    verify: bool = option(
        True,
        "Run the checks [on]",
        about="Emulate the result, compare it with the original, build it, and run it if there is a GPU.",
        panel=OUTCOME,
        flags=("--verify/--no-verify",),
    )
    build: bool = option(
        True,
        "TensorRT's build and run [on]",
        about="Build with TensorRT as a part of `verify`.",
        panel=OUTCOME,
        flags=("--build/--no-build",),
    )
    accumulation: Literal["fp32", "fp16"] | None = option(
        None,
        "Emulated sums: fp32 or fp16",
        about="The type in which the emulation sums the products of FP16 MatMul, Gemm and Conv. `fp16` is "
        "what GPUs were measured to do; it needs 2 to 8 times as long.",
        panel=OUTCOME,
        metavar="TYPE",
    )
    strict: bool = option(
        False, "Write nothing if a check fails", panel=OUTCOME, flags=("--strict/--no-strict",)
    )
    build_timeout: float = option(
        600.0,
        "For TensorRT's build [600]",
        about="Deadline of TensorRT's build, in seconds.",
        panel=OUTCOME,
        metavar="SECONDS",
        check=checks.positive,
    )


@dataclass(frozen=True, kw_only=True)
class FixCommand(FixOptions):
    """The options of `rewriter fix`: those of `rewriter.fix`, and a report."""

    report: Path | None = option(
        None,
        "Write the outcome as JSON, too",
        panel=OUTCOME,
        metavar="FILE",
        places=("command line", "file"),
        words=("json",),
    )


@dataclass(frozen=True, kw_only=True)
class ScanOptions(DataOptions):
    """The options of `rewriter.scan`."""

    precision: Literal["fp16", "bf16"] = like(
        FixOptions,
        "precision",
        default="fp16",
        kind=None,
        help="What MODEL shall compute in: fp16 (default) or bf16",
        about="The type that the model shall compute in.",
    )
    target: str = like(
        FixOptions,
        "target",
        default="tensorrt",
        panel=PRECISION,
        about="`tensorrt`, `tensorrt-rtx`, or a version: defects known of other releases are not reported.",
    )


@dataclass(frozen=True, kw_only=True)
class ScanCommand(ScanOptions):
    """The options of `rewriter scan`: those of `rewriter.scan`, and what its exit code depends on."""

    preset: str = like(FixOptions, "preset", places=("file",))
    fail_on: Literal["warning", "error"] | None = option(
        None,
        "Exit with 1 from warning or error on",
        about="The least severe finding with which `scan` exits with 1.",
        panel=OUTCOME,
        metavar="LEVEL",
        places=("command line", "file"),
    )


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(DataOptions, EngineOptions):
    """The options of `rewriter.verify`."""

    engine: str = like(FixOptions, "engine", help="One of those above; auto: the best")
    builds: int = option(
        1,
        "Build N times, judge the worst [1]",
        about="How often the fixed model is built. Builds differ; the worst one is judged.",
        panel=ENGINE,
        metavar="N",
        check=partial(checks.at_least, 1),
    )
    timeout: float = option(
        600.0,
        "For each build, and for the run [600]",
        about="Deadline of each build and of the run, in seconds.",
        panel=ENGINE,
        metavar="SECONDS",
        places=ONE_RUN,
    )
    tolerance: float | Tolerance | None = like(
        FixOptions,
        "tolerance",
        help="What is allowed [by the types]",
        about="Largest error of the worst output, sample and build, in the unit of `metric`. None: from "
        "the types that the fixed model computes in. A `Tolerance` has its own metric and source.",
        panel=OUTCOME,
        metavar="VALUE",
    )
    metric: str = like(
        FixOptions, "metric", default="relative-l2", help="Of --tolerance [relative-l2]", panel=OUTCOME
    )
    accumulation: Literal["fp32", "fp16"] = like(
        FixOptions, "accumulation", default="fp16", help="Emulated sums of FP16: fp16 or fp32"
    )
    timing: bool = option(True, "Measure latency, too", places=("python",))


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
    """Each as the first command that has it declares it."""
    found: dict[str, Declaration] = {}
    for kind in COMMANDS.values():
        found |= {name: option for name, option in declarations(kind).items() if name not in found}
    return {option.name: option for option in by_panel(found.values()) if readers(option.name)}


def by_panel(options: Iterable[Declaration]) -> list[Declaration]:
    """The options in the order of the panels of `--help`."""
    return sorted(options, key=lambda option: PANELS.index(option.panel) if option.panel else len(PANELS))


KEYS: Mapping[str, Declaration] = _keys()
"""Every option that files and the environment may set, by name."""


Options = TypeVar("Options", FixOptions, ScanOptions, VerifyOptions)
Function = TypeVar("Function", bound=Callable[..., Any])


def combined(options: Options, keywords: Mapping[str, Any]) -> Options:
    """The options with some replaced by keywords.

    Raises:
        TypeError: a keyword is no option.
    """
    return replace(options, **keywords)


def documented(kind: type) -> Callable[[Function], Function]:
    """Decorator that adds a section about the options to a docstring, for `help(rewriter.fix)`."""

    def decorate(function: Function) -> Function:
        lines = [f"    {name}: {option.text}" for name, option in declarations(kind).items()]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines])
        return function

    return decorate
