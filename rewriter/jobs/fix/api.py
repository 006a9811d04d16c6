"""`fix`: the way of a model through the tool, from the file to the verdict."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import onnx

from rewriter.base import Stage, Target
from rewriter.emulation import Accumulation
from rewriter.engines.deployment import AUTO, TENSORRT, Deployment, deployment
from rewriter.engines.probe.answers import known_target
from rewriter.engines.protocol import EngineName, Shape
from rewriter.errors import EngineError, UsageError
from rewriter.figures.metrics import named
from rewriter.jobs.fix import Options, run
from rewriter.jobs.fix.result import FixResult
from rewriter.model.stopwatch import Progress
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.passes.rescale import Rescale
from rewriter.pipeline.presets import DEFAULT_OPSETS, Preset, preset_named
from rewriter.pipeline.text import select
from rewriter.plan import InputsOutputs, Plan, Precision
from rewriter.planning.plan_file import given_plan
from rewriter.planning.planner import PlanRequest
from rewriter.search.goal import Aim, Budget, Fastest, Goal


def fix(
    model: str | os.PathLike[str] | Any,
    output: str | os.PathLike[str] | None = None,
    *,
    inputs: Any = None,
    passes: str | None = None,
    skip: Sequence[str] = (),
    preset: str = "trt-fp16",
    precision: Precision | None = None,
    io: InputsOutputs | None = None,
    opset: int | None = None,
    keep_fp32: Sequence[str] = (),
    keep_fp32_op: Sequence[str] = (),
    plan: str | os.PathLike[str] | Plan | None = None,
    save_plan: str | os.PathLike[str] | None = None,
    tolerance: float | None = None,
    max_latency_cost: float | None = None,
    pareto: bool = False,
    metric: str | None = None,
    search: Literal["emulation", "gpu"] = "emulation",
    search_seconds: float = 300.0,
    weak_typing: bool | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    target: str | None = None,
    seed: int = 0,
    verify: bool = True,
    build: bool = True,
    accumulation: Accumulation | None = None,
    dry_run: bool = False,
    in_place: bool = False,
    strict: bool = False,
    build_timeout: float = 600.0,
    engine: str = AUTO,
    plugin_lib: Sequence[str | os.PathLike[str]] = (),
    min_shapes: Mapping[str, Shape] | None = None,
    opt_shapes: Mapping[str, Shape] | None = None,
    max_shapes: Mapping[str, Shape] | None = None,
    progress: Progress | None = None,
) -> FixResult:
    """Make a model safe for a strongly typed TensorRT build in reduced precision, and check it.

    Args:
        model: Path, onnx.ModelProto or onnx_graphsurgeon.Graph; FP32, FP16 or mixed.
        output: Where to write; None writes nothing.
        inputs: Sample data: npz, folder of npz or npy, Polygraphy JSON, a dict of arrays, or an
            iterable of dicts. None: seeded random inputs, which the result says.
        preset: A name of `PRESETS`: a pipeline, and what holds for `precision`, `io`, `opset`,
            `tolerance`, `metric`, `target` and `accumulation` where they are None.
        passes: A pipeline's text; it replaces the preset's. `skip` drops passes by name.
        precision: `fp16`, `bf16`, or `fp32` for structure only.
        io: Types of float inputs and outputs: `keep`: as they are, all `fp32`, or all `fp16`.
        opset: Operator set to convert to; None: 17, 22 for BF16, and 23 for FP16 where the model writes out
            RMSNorms and the target is known to map RMSNormalization (TensorRT 10.15, TensorRT-RTX 1.6).
        keep_fp32: Patterns of node or output names that stay in FP32; `keep_fp32_op` operators.
        plan: A `Plan`, or the file of one: applied exactly, with its precision and io; no ranges are
            measured. It excludes `keep_fp32` and `keep_fp32_op`.
        save_plan: Where to write the plan that was made, as JSON; also with `dry_run`.
        tolerance: Search for the cheapest plan that reaches this, in the emulation with `accumulation`,
            for every output: of `metric`, in its own unit.
        max_latency_cost: Search for the most accurate plan by `metric` that costs at most this share (0.05:
            5 %) of latency more than the rules' plan. Latencies are estimated from recorded costs.
        pareto: Evaluate a row of plans, and give the frontier of accuracy and latency as `frontier`.
        metric: A name of `figures.metrics.METRICS`, or a Python function of yours: see `metrics.named`.
        weak_typing: Write the model in FP32 for TensorRT 8 to 10, and beside it the plan as constraints for
            their builder: arguments of trtexec, and Python code.
        search: What judges the plans of a search: the emulation and recorded costs, or the engine on this
            machine's GPU, whose error and latency are measured for each plan. With neither tolerance nor
            max_latency_cost the GPU is asked for the fastest plan that is no less accurate than the
            rules' one, or else the most accurate that is no slower.
        search_seconds: What the whole search on the GPU may take: the original's outputs, the ranking of
            nodes, builds and runs. What is under way then is ended, and the best plan so far is taken.
            Loading, passes, ranges and verification come on top.
        input_shapes: Shapes for random data, by input.
        target: `tensorrt`, `tensorrt-rtx`, or a version.
        verify: Emulate, compare, and, unless `build` is False, build with TensorRT and run it if there
            is a GPU; `build_timeout` in seconds.
        accumulation: Type in which the emulation's FP16 MatMul, Gemm and Conv sum up: `fp16` is what was
            measured on a GPU, and takes 2 to 8 times as long.
        dry_run: Do everything, write nothing.
        strict: Write nothing if verification fails.
        engine: What builds and runs the result: `tensorrt`, `tensorrt-rtx`, the best of them (`auto`), or
            `emulation`, which builds and runs nothing on a GPU.
        plugin_lib, min_shapes, opt_shapes, max_shapes: As for `verify`.

    Raises:
        RewriterError: bad model, data, option or output path; nothing is written then.
    """
    chosen = preset_named(preset)
    given = given_plan(plan, precision, io, keep_fp32, keep_fp32_op)
    if given is not None:
        precision, io = given.precision, given.io
    chosen_precision = precision or chosen.precision
    chosen_io: InputsOutputs = chosen.choose("io", io)
    sums: Accumulation = chosen.choose("accumulation", accumulation)
    _require("precision", chosen_precision, get_args(Precision))
    _require("io", chosen_io, get_args(InputsOutputs))
    _require("accumulation", sums, get_args(Accumulation))
    opset = chosen.choose("opset", opset)
    chosen_opset = DEFAULT_OPSETS[chosen_precision] if opset is None else opset
    _require("opset", chosen_opset, range(1, onnx.defs.onnx_opset_version() + 1))
    steps = select(preset, passes, skip)
    if passes is None:
        steps = tuple(step for step in steps if chosen_precision in step.requires.precisions)
    if chosen_precision == "fp32":
        steps = tuple(step for step in steps if not step.stage.reduces_precision)
    lowers = any(step.stage is Stage.LOWERING for step in steps)
    goal: Aim | None = _goal(tolerance, max_latency_cost, metric, given, chosen, lowers=lowers)
    for option, asked in (("--pareto", pareto), ("--search gpu", search == "gpu")):
        if asked and given is not None:
            raise UsageError("the plan is given", where=option, hint="leave one of the two out")
    if search == "gpu" and goal is None:
        goal = Fastest(metric or str(chosen.choose("metric")))
    weak = bool(chosen.choose("weak_typing", weak_typing))
    if weak:  # what is handed out is the original in FP32; its weights are the builder's to round
        steps = tuple(step for step in steps if step.stage not in (Stage.FITTING, Stage.LOWERED))
    if (given or save_plan or goal or pareto or weak) and not lowers:
        option = _planning(given, save_plan, goal, pareto)
        raise UsageError("no plan is needed", where=option, hint="the pipeline has no mixed-precision pass")
    deployed = deployment(engine, plugin_lib, min_shapes, opt_shapes, max_shapes, engines=TENSORRT)
    known = known_target(Target.parse(chosen.choose("target", target)))
    return run(
        Options(
            source=model,
            output=output,
            steps=steps,
            wish=PlanRequest(
                chosen_precision,
                chosen_io,
                tuple(keep_fp32),
                tuple(keep_fp32_op),
                measured_norms=any(isinstance(step, Rescale) and step.norms for step in steps),
                epilogues=any(isinstance(step, MixedPrecision) and step.epilogues for step in steps),
                target=known,
            ),
            opset=chosen_opset,
            free_opset=opset is None and chosen_precision == "fp16",
            target=known,
            inputs=inputs,
            input_shapes={name: tuple(shape) for name, shape in (input_shapes or {}).items()},
            seed=seed,
            verify=verify,
            build=build,
            dry_run=dry_run,
            in_place=in_place,
            strict=strict,
            build_timeout=build_timeout,
            progress=progress or (lambda stage, done, total: None),
            plan=given,
            plan_source="the plan" if plan is None or isinstance(plan, Plan) else str(plan),
            accumulation=sums,
            goal=goal,
            metric=metric or str(chosen.choose("metric")),
            pareto=pareto,
            weak_typing=weak,
            search_engine=_search_engine(search, search_seconds, deployed),
            search_seconds=search_seconds,
            deployment=deployed,
            save_plan=None if save_plan is None else Path(save_plan),
        )
    )


def _planning(given: Plan | None, save_plan: object, goal: Aim | None, pareto: bool) -> str:
    """The option that asks for a plan."""
    if given or save_plan:
        return "--plan" if given else "--save-plan"
    if goal is None:
        return "--pareto" if pareto else "--weak-typing"
    return "--search gpu" if isinstance(goal, Fastest) else f"--{goal.option}"


def _goal(
    tolerance: float | None,
    max_latency_cost: float | None,
    metric: str | None,
    given: Plan | None,
    preset: Preset,
    *,
    lowers: bool,
) -> Goal | Budget | None:
    """What to search for: the user's, or the preset's if there is a plan to search for."""
    metric = metric or str(preset.choose("metric"))
    measure = named(metric)
    if tolerance is None and max_latency_cost is None:
        own = preset.choose("max_latency_cost")
        return None if own is None or given is not None or not lowers else Budget(own, metric)
    option = "--tolerance" if tolerance is not None else "--max-latency-cost"
    if given is not None:
        raise UsageError("the plan is given", where=option, hint="leave one of the two out")
    if tolerance is not None and max_latency_cost is not None:
        raise UsageError("one goal at a time", where=option, hint="or leave out --max-latency-cost")
    if max_latency_cost is not None:
        if not 0.0 <= max_latency_cost < math.inf:
            raise UsageError(f"it cannot be {max_latency_cost}", where=option, hint="such as 5%, or 0.05")
        return Budget(max_latency_cost, metric)
    assert tolerance is not None
    if math.isnan(tolerance) or (tolerance < 0 and not measure.least):
        raise UsageError(f"it cannot be {tolerance}", where=option, hint="such as 1e-3")
    return Goal(tolerance, metric)


def _search_engine(search: str, seconds: float, deployed: Deployment) -> EngineName | None:
    """The engine of `--search gpu`; None for emulation.

    Raises:
        UsageError: no such search, or no time for it. EngineError: no engine runs here.
    """
    _require("search", search, ("emulation", "gpu"))
    if not seconds > 0.0:
        raise UsageError(f"it cannot be {seconds:g}", where="--search-seconds", hint="such as 300")
    if search == "emulation":
        return None
    choice = deployed.choose()
    if choice.engine is None:
        raise EngineError(
            f"no engine runs here: {'; '.join(choice.reasons)}",
            where="--search gpu",
            hint="search by emulation, or on a machine with a GPU",
        )
    return choice.engine


def _require(option: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        span = isinstance(choices, range)
        known = f"{choices[0]} to {choices[-1]}" if span else ", ".join(map(str, choices))
        raise UsageError(f"it cannot be {value!r}", where=f"--{option}", hint=f"choose from {known}")
