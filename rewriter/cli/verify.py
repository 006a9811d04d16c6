"""`rewriter verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rewriter.cli.exits import FAILED, exit_codes, reader_may_leave
from rewriter.cli.options import (
    ENGINE,
    FLAG,
    OUTCOME,
    Inputs,
    InputShape,
    PluginLib,
    Seed,
    Verbose,
    check_extra,
    option,
    shapes,
    split,
)

if TYPE_CHECKING:
    from rewriter.verification import VerifyResult

SHAPES = "NAME:1x3x8,..."


def verify(
    original: Annotated[Path, typer.Argument(metavar="ORIGINAL", hidden=True)],
    fixed: Annotated[Path, typer.Argument(metavar="FIXED", hidden=True)],
    inputs: Inputs = None,
    input_shape: InputShape = None,
    seed: Seed = None,
    engine: Annotated[str, option(ENGINE, "NAME", "One of those above; auto: the best")] = "auto",
    builds: Annotated[int, option(ENGINE, "N", "Build N times, judge the worst [1]")] = 1,
    min_shapes: Annotated[str, option(ENGINE, SHAPES, "Smallest shapes of the profile")] = "",
    opt_shapes: Annotated[str, option(ENGINE, SHAPES, "Usual shapes [those of the samples]")] = "",
    max_shapes: Annotated[str, option(ENGINE, SHAPES, "Largest shapes")] = "",
    plugin_lib: PluginLib = None,
    timeout: Annotated[float, option(ENGINE, "SECONDS", "For each build, and for the run [600]")] = 600.0,
    tolerance: Annotated[float | None, option(OUTCOME, "VALUE", "What is allowed [by the types]")] = None,
    metric: Annotated[str, option(OUTCOME, "NAME", "Of --tolerance [relative-l2]")] = "relative-l2",
    accumulation: Annotated[
        Literal["fp32", "fp16"], option(OUTCOME, "TYPE", "Emulated sums of FP16: fp16 or fp32")
    ] = "fp16",
    json: Annotated[Path | None, option(OUTCOME, "FILE", "Write the outcome as JSON, too")] = None,
    verbose: Verbose = False,
    quiet: Annotated[bool, option(OUTCOME, FLAG, "Print the verdict alone", "-q", "--quiet")] = False,
) -> None:
    """Run FIXED and compare every output with ORIGINAL in FP32.

    Engine: auto, tensorrt, tensorrt-rtx, onnxruntime, onnxruntime-cuda, emulation

    Exits with 0 if it is within the tolerance, 1 if not, 2 on bad usage or model.
    """
    with exit_codes():
        import rewriter
        from rewriter.report.progress import progress

        check_extra("--json", json, [original, fixed])
        with progress(shown=not quiet) as shown:
            result = rewriter.verify(
                original,
                fixed,
                inputs=inputs,
                input_shapes=shapes(input_shape),
                seed=seed or 0,
                engine=engine,
                builds=builds,
                tolerance=tolerance,
                metric=metric,
                min_shapes=shapes(split([min_shapes]), "--min-shapes"),
                opt_shapes=shapes(split([opt_shapes]), "--opt-shapes"),
                max_shapes=shapes(split([max_shapes]), "--max-shapes"),
                plugins=plugin_lib or (),
                accumulation=accumulation,
                timeout=timeout,
                progress=shown,
            )
        _show(result, json, verbosity=int(verbose) - int(quiet))
        if not result.passed:
            raise typer.Exit(FAILED)


def _show(result: VerifyResult, json: Path | None, *, verbosity: int) -> None:
    from rewriter.report import terminal
    from rewriter.report import verification as report

    if json is not None:
        report.write_json(result, json)
    with reader_may_leave():
        report.print_result(result, terminal.console(), verbosity=verbosity)
