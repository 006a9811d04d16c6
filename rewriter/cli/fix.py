"""`rewriter fix`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rewriter.cli import complete
from rewriter.cli.exits import FAILED, exit_codes, reader_may_leave
from rewriter.cli.options import (
    ENGINE,
    FLAG,
    OUTCOME,
    PASSES,
    PRECISION,
    SEARCH,
    Inputs,
    InputShape,
    MaxShapes,
    MinShapes,
    ModelPath,
    OptShapes,
    PluginLib,
    Preset,
    Seed,
    Target,
    Verbose,
    check_extra,
    check_pareto,
    configured,
    option,
    profile,
    shapes,
    share,
    split,
)
from rewriter.errors import UsageError

if TYPE_CHECKING:
    from rewriter.jobs.fix.result import FixResult


def fix(
    model: ModelPath,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT", help="Where the fixed model goes")
    ] = None,
    inputs: Inputs = None,
    input_shape: InputShape = None,
    seed: Seed = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", metavar=FLAG, help="The result may replace MODEL")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar=FLAG, help="Do everything, but write no model")
    ] = False,
    preset: Preset = None,
    passes: Annotated[
        str | None,
        option(PASSES, "A,B{X=Y}", "Instead of the preset's pipeline", autocompletion=complete.passes),
    ] = None,
    skip: Annotated[
        list[str] | None, option(PASSES, "A,B", "Leave these passes out", autocompletion=complete.passes)
    ] = None,
    opset: Annotated[int | None, option(PASSES, "N", "Operator set [17; BF16: 22; RMSNorms: 23]")] = None,
    target: Target = None,
    precision: Annotated[
        Literal["fp16", "bf16", "fp32"] | None,
        option(PRECISION, "TYPE", "fp16, bf16, or fp32: structure only"),
    ] = None,
    io: Annotated[
        Literal["keep", "fp32", "fp16"] | None,
        option(PRECISION, "TYPE", "Inputs and outputs: keep, fp32 or fp16"),
    ] = None,
    keep_fp32: Annotated[
        list[str] | None, option(PRECISION, "PATTERN", "Keep nodes of this name in FP32: '*/attn/*'")
    ] = None,
    keep_fp32_op: Annotated[
        list[str] | None, option(PRECISION, "OP", "Keep every node of this operator in FP32")
    ] = None,
    plan: Annotated[
        Path | None, option(PRECISION, "PLAN.json", "Apply this plan exactly, measure nothing")
    ] = None,
    save_plan: Annotated[
        Path | None, option(PRECISION, "PLAN.json", "Write the plan that was made, to edit it")
    ] = None,
    weak_typing: Annotated[
        bool | None, option(PRECISION, FLAG, "TensorRT 8-10: FP32, constraints", "--weak-typing")
    ] = None,
    tolerance: Annotated[
        float | None, option(SEARCH, "ERROR", "The cheapest plan this accurate: 1e-3")
    ] = None,
    max_latency_cost: Annotated[
        str | None, option(SEARCH, "SHARE", "The best plan for 5% more latency")
    ] = None,
    pareto: Annotated[Path | None, option(SEARCH, "FILE.html", "Plot accuracy against latency")] = None,
    metric: Annotated[
        str | None,
        option(SEARCH, "NAME", "Of accuracy; by default relative-l2", autocompletion=complete.metrics),
    ] = None,
    search: Annotated[
        Literal["emulation", "gpu"], option(SEARCH, "BY", "Who judges: emulation (default), gpu")
    ] = "emulation",
    search_seconds: Annotated[
        float, option(SEARCH, "SECONDS", "For the whole search on the GPU [300]")
    ] = 300.0,
    verify: Annotated[
        bool | None, option(OUTCOME, FLAG, "Run the checks [on]", "--verify/--no-verify")
    ] = None,
    build: Annotated[
        bool | None, option(OUTCOME, FLAG, "TensorRT's build and run [on]", "--build/--no-build")
    ] = None,
    accumulation: Annotated[
        Literal["fp32", "fp16"] | None, option(OUTCOME, "TYPE", "Emulated sums: fp32 or fp16")
    ] = None,
    strict: Annotated[
        bool | None, option(OUTCOME, FLAG, "Write nothing if a check fails", "--strict/--no-strict")
    ] = None,
    build_timeout: Annotated[float | None, option(OUTCOME, "SECONDS", "For TensorRT's build [600]")] = None,
    engine: Annotated[str | None, option(ENGINE, "NAME", "auto, tensorrt, tensorrt-rtx, emulation")] = None,
    plugin_lib: PluginLib = None,
    min_shapes: MinShapes = None,
    opt_shapes: OptShapes = None,
    max_shapes: MaxShapes = None,
    report: Annotated[Path | None, option(OUTCOME, "FILE", "Write the outcome as JSON, too")] = None,
    verbose: Verbose = False,
    quiet: Annotated[bool, option(OUTCOME, FLAG, "Print the verdict alone", "-q", "--quiet")] = False,
) -> None:
    """Rewrite MODEL so that TensorRT builds it in FP16 and it stays accurate.

    Exits with 0 if it is verified, 1 if a check failed, 2 on bad usage or model.
    """
    with exit_codes():
        from rewriter.jobs.fix import api
        from rewriter.report.progress import progress

        if output is None and not (in_place or dry_run):
            raise UsageError("nowhere to write to", hint="add -o OUT, --in-place or --dry-run")
        in_force = configured(
            model,
            quiet=quiet,
            inputs=inputs,
            input_shapes=shapes(input_shape),
            seed=seed,
            preset=preset,
            passes=passes,
            skip=split(skip),
            opset=opset,
            target=target,
            precision=precision,
            io=io,
            keep_fp32=keep_fp32,
            keep_fp32_op=split(keep_fp32_op),
            plan=plan,
            tolerance=tolerance,
            max_latency_cost=share(max_latency_cost, "--max-latency-cost"),
            metric=metric,
            weak_typing=weak_typing,
            verify=verify,
            build=build,
            accumulation=accumulation,
            strict=strict,
            build_timeout=build_timeout,
            engine=engine,
            plugin_lib=plugin_lib,
            **profile(min_shapes, opt_shapes, max_shapes),
            report=report,
        )
        chosen = in_force.settings
        arguments = in_force.arguments("fix")
        read = [path for path in (model, output, chosen.plan) if path is not None]
        check_extra(in_force.where("report"), chosen.report, [*read, *([save_plan] if save_plan else [])])
        check_extra("--save-plan", save_plan, read)
        check_pareto(pareto, read)
        with in_force.blaming(), progress(shown=not quiet) as shown:
            result = api.fix(
                model,
                output or (model if in_place else None),
                save_plan=save_plan,
                pareto=pareto is not None,
                search=search,
                search_seconds=search_seconds,
                dry_run=dry_run,
                in_place=in_place,
                progress=shown,
                **arguments,
            )
        _show(result, chosen.report, pareto, verbosity=int(verbose) - int(quiet))
        if result.verdict is not None and not result.verdict.passed:
            raise typer.Exit(FAILED)


def _show(result: FixResult, report: Path | None, pareto: Path | None, *, verbosity: int) -> None:
    from rewriter.model import write_json
    from rewriter.report import frontier, json, terminal

    if pareto is not None and result.frontier is not None:
        frontier.write(result.frontier, pareto)
    if report is not None:
        write_json(json.as_dict(result), report)
    with reader_may_leave():
        terminal.print_result(result, terminal.console(), verbosity=verbosity)
