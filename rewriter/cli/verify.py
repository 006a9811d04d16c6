"""`rewriter verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rewriter.cli import complete
from rewriter.cli.exits import FAILED, exit_codes, reader_may_leave
from rewriter.cli.options import (
    ENGINE,
    FLAG,
    OUTCOME,
    Inputs,
    InputShape,
    MaxShapes,
    MinShapes,
    OptShapes,
    PluginLib,
    Seed,
    Verbose,
    check_extra,
    configured,
    option,
    profile,
    shapes,
)

if TYPE_CHECKING:
    from rewriter.pipeline.config import InForce
    from rewriter.verification.result import VerifyResult


USUAL = "relative-l2"
"""What a tolerance is one of, unless something else is said."""


def verify(
    original: Annotated[Path, typer.Argument(metavar="ORIGINAL", hidden=True)],
    fixed: Annotated[Path, typer.Argument(metavar="FIXED", hidden=True)],
    inputs: Inputs = None,
    input_shape: InputShape = None,
    seed: Seed = None,
    engine: Annotated[str | None, option(ENGINE, "NAME", "One of those above; auto: the best")] = None,
    builds: Annotated[int | None, option(ENGINE, "N", "Build N times, judge the worst [1]")] = None,
    min_shapes: MinShapes = None,
    opt_shapes: OptShapes = None,
    max_shapes: MaxShapes = None,
    plugin_lib: PluginLib = None,
    timeout: Annotated[float, option(ENGINE, "SECONDS", "For each build, and for the run [600]")] = 600.0,
    tolerance: Annotated[float | None, option(OUTCOME, "VALUE", "What is allowed [by the types]")] = None,
    metric: Annotated[
        str | None,
        option(OUTCOME, "NAME", "Of --tolerance [relative-l2]", autocompletion=complete.metrics),
    ] = None,
    accumulation: Annotated[
        Literal["fp32", "fp16"] | None,
        option(OUTCOME, "TYPE", "Emulated sums of FP16: fp16 or fp32"),
    ] = None,
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
        in_force = configured(
            original,
            quiet=quiet,
            inputs=inputs,
            input_shapes=shapes(input_shape),
            seed=seed,
            engine=engine,
            builds=builds,
            plugin_lib=plugin_lib,
            **profile(min_shapes, opt_shapes, max_shapes),
            tolerance=tolerance,
            metric=metric,
            accumulation=accumulation,
        )
        arguments = in_force.arguments("verify") | _held(in_force, metric)
        with in_force.blaming(), progress(shown=not quiet) as shown:
            result = rewriter.verify(original, fixed, timeout=timeout, progress=shown, **arguments)
        _show(result, json, verbosity=int(verbose) - int(quiet))
        if not result.passed:
            raise typer.Exit(FAILED)


def _held(in_force: InForce, metric: str | None) -> dict[str, Any]:
    """The tolerance with the place that set it; a file's metric alone is a goal of `fix`."""
    from rewriter.figures.tolerances import Tolerance

    set_here = in_force.arguments("verify")
    if "tolerance" not in set_here:
        return {"metric": metric or USUAL}
    held = Tolerance(set_here["tolerance"], set_here.get("metric", USUAL), in_force.where("tolerance"))
    return {"tolerance": held}


def _show(result: VerifyResult, json: Path | None, *, verbosity: int) -> None:
    from rewriter.model import write_json
    from rewriter.report import terminal
    from rewriter.report import verification as report

    if json is not None:
        write_json(report.as_dict(result), json)
    with reader_may_leave():
        report.print_result(result, terminal.console(), verbosity=verbosity)
