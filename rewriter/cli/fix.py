"""`rewriter fix`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rewriter.cli.exits import FAILED, exit_codes, reader_may_leave
from rewriter.cli.options import (
    FLAG,
    OUTCOME,
    PASSES,
    PRECISION,
    Inputs,
    InputShape,
    ModelPath,
    Seed,
    Verbose,
    check_extra,
    check_pareto,
    option,
    shape,
    share,
    split,
)
from rewriter.errors import UsageError

if TYPE_CHECKING:
    from rewriter.result import FixResult


def fix(
    model: ModelPath,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT", help="Where the fixed model goes")
    ] = None,
    inputs: Inputs = None,
    input_shape: InputShape = None,
    seed: Seed = 0,
    in_place: Annotated[
        bool, typer.Option("--in-place", metavar=FLAG, help="The result may replace MODEL")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar=FLAG, help="Do everything, but write no model")
    ] = False,
    preset: Annotated[
        str, option(PASSES, "NAME", "trt-fp16 (default), trt-bf16 or structure-only")
    ] = "trt-fp16",
    passes: Annotated[
        str | None, option(PASSES, "A,B{X=Y}", "Run these passes instead of a preset's")
    ] = None,
    skip: Annotated[list[str] | None, option(PASSES, "A,B", "Leave these passes out")] = None,
    opset: Annotated[int | None, option(PASSES, "N", "Operator set of the result [17; BF16: 22]")] = None,
    target: Annotated[str, option(PASSES, "NAME", "tensorrt (default), tensorrt-rtx or 10.3")] = "tensorrt",
    precision: Annotated[
        Literal["fp16", "bf16", "fp32"] | None,
        option(PRECISION, "TYPE", "fp16, bf16, or fp32: structure only"),
    ] = None,
    io: Annotated[
        Literal["keep", "fp32", "fp16"], option(PRECISION, "TYPE", "Inputs and outputs: keep, fp32 or fp16")
    ] = "keep",
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
    tolerance: Annotated[
        float | None, option(PRECISION, "ERROR", "Search a plan that emulates within this: 1e-3")
    ] = None,
    max_latency_cost: Annotated[
        str | None, option(PRECISION, "SHARE", "Search the most accurate plan that costs at most 5%")
    ] = None,
    pareto: Annotated[
        Path | None, option(PRECISION, "FILE.html", "Plot accuracy against latency, here and there")
    ] = None,
    weak_typing: Annotated[
        bool, option(PRECISION, FLAG, "For TensorRT 8-10: an FP32 model and constraints", "--weak-typing")
    ] = False,
    metric: Annotated[
        str, option(PRECISION, "NAME", "Of a search: relative-l2 (default), psnr, my.py:f ...")
    ] = "relative-l2",
    search: Annotated[
        Literal["emulation", "gpu"],
        option(PRECISION, "BY", "Who judges its plans: emulation, gpu"),
    ] = "emulation",
    no_verify: Annotated[bool, option(OUTCOME, FLAG, "Skip the checks", "--no-verify")] = False,
    no_build: Annotated[bool, option(OUTCOME, FLAG, "Check without TensorRT", "--no-build")] = False,
    accumulation: Annotated[
        Literal["fp32", "fp16"], option(OUTCOME, "TYPE", "Emulated sums of FP16: fp32 (quick) or fp16")
    ] = "fp32",
    strict: Annotated[bool, option(OUTCOME, FLAG, "Write nothing if a check fails", "--strict")] = False,
    build_timeout: Annotated[float, option(OUTCOME, "SECONDS", "For TensorRT's build [600]")] = 600.0,
    report: Annotated[Path | None, option(OUTCOME, "FILE", "Write the outcome as JSON, too")] = None,
    verbose: Verbose = False,
    quiet: Annotated[bool, option(OUTCOME, FLAG, "Print the verdict alone", "-q", "--quiet")] = False,
) -> None:
    """Rewrite MODEL so that TensorRT builds it in FP16 and it stays accurate.

    Exits with 0 if it is verified, 1 if a check failed, 2 on bad usage or model.
    """
    with exit_codes():
        from rewriter import api
        from rewriter.report.progress import progress

        if output is None and not (in_place or dry_run):
            raise UsageError("nowhere to write to", hint="add -o OUT, --in-place or --dry-run")
        read = [path for path in (model, output, plan) if path is not None]
        check_extra("--report", report, [*read, *([save_plan] if save_plan else [])])
        check_extra("--save-plan", save_plan, read)
        check_pareto(pareto, read)
        with progress(shown=not quiet) as shown:
            result = api.fix(
                model,
                output or (model if in_place else None),
                inputs=inputs,
                passes=passes,
                skip=split(skip),
                preset=preset,
                precision=precision,
                io=io,
                opset=opset,
                keep_fp32=keep_fp32 or (),
                keep_fp32_op=split(keep_fp32_op),
                plan=plan,
                save_plan=save_plan,
                tolerance=tolerance,
                max_latency_cost=share(max_latency_cost, "--max-latency-cost"),
                pareto=pareto is not None,
                weak_typing=weak_typing,
                metric=metric,
                search=search,
                input_shapes=dict(map(shape, input_shape or ())),
                target=target,
                seed=seed,
                verify=not no_verify,
                build=not no_build,
                accumulation=accumulation,
                dry_run=dry_run,
                in_place=in_place,
                strict=strict,
                build_timeout=build_timeout,
                progress=shown,
            )
        _show(result, report, pareto, verbosity=int(verbose) - int(quiet))
        if result.verdict is not None and not result.verdict.passed:
            raise typer.Exit(FAILED)


def _show(result: FixResult, report: Path | None, pareto: Path | None, *, verbosity: int) -> None:
    from rewriter.report import frontier, json, terminal

    if pareto is not None and result.frontier is not None:
        frontier.write(result.frontier, pareto)
    if report is not None:
        json.write(result, report)
    with reader_may_leave():
        terminal.print_result(result, terminal.console(), verbosity=verbosity)
