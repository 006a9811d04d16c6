"""`rewriter locate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rewriter.cli.exits import FAILED, exit_codes, reader_may_leave
from rewriter.cli.options import (
    ENGINE,
    OUTCOME,
    Inputs,
    InputShape,
    MaxShapes,
    MinShapes,
    OptShapes,
    PluginLib,
    Seed,
    check_extra,
    option,
    profile,
    shapes,
)

SEARCH = "Search"
AUTO = "auto"

Original = Annotated[Path, typer.Argument(metavar="ORIGINAL", help="The model as it was, taken in FP32")]
Other = Annotated[Path, typer.Argument(metavar="OTHER", help="The model that goes wrong")]


def locate(
    original: Original,
    other: Other,
    inputs: Inputs = None,
    input_shape: InputShape = None,
    seed: Seed = None,
    engine: Annotated[str, option(ENGINE, "NAME", "One of those above; auto: the best here")] = AUTO,
    plugin_lib: PluginLib = None,
    min_shapes: MinShapes = None,
    opt_shapes: OptShapes = None,
    max_shapes: MaxShapes = None,
    timeout: Annotated[float, option(ENGINE, "SECONDS", "For each build, and for each run [600]")] = 600.0,
    tolerance: Annotated[
        float, typer.Option(min=0.0, metavar="X", help="Error that is wrong [5e-3]", show_default=False)
    ] = 5e-3,
    marks: Annotated[int, option(SEARCH, "N", "Tensors to mark in one build [8]")] = 8,
    max_builds: Annotated[int, option(SEARCH, "N", "Builds to make at most [48]")] = 48,
    json: Annotated[Path | None, option(OUTCOME, "FILE", "Write the result as JSON, too")] = None,
) -> None:
    """Find the first tensor at which OTHER leaves ORIGINAL when an engine runs it.

    Engine: auto, tensorrt, tensorrt-rtx, onnxruntime, onnxruntime-cuda, emulation

    Exits with 0 if nothing is wrong, with 1 if something is, with 2 on bad usage or model.
    """
    with exit_codes():
        from rewriter.jobs.locate import locate as job
        from rewriter.model import write_json
        from rewriter.report import locate as report
        from rewriter.report.progress import progress
        from rewriter.report.terminal import console

        check_extra("--json", json, [original, other])
        with progress(shown=True) as shown:
            found = job(
                original,
                other,
                inputs=inputs,
                input_shapes=shapes(input_shape),
                seed=seed or 0,
                engine=engine,
                plugin_lib=plugin_lib or (),
                **profile(min_shapes, opt_shapes, max_shapes),
                tolerance=tolerance,
                marks=marks,
                max_builds=max_builds,
                timeout=timeout,
                progress=shown,
            )
        if json is not None:
            write_json(report.as_dict(found), json)
        with reader_may_leave():
            report.print_location(found, console())
        if found.wrong:
            raise typer.Exit(FAILED)
