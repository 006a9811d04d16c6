"""`rewriter locate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rewriter.cli.exits import FAILED, exit_codes, reader_may_leave
from rewriter.cli.options import FLAG, OUTCOME, Inputs, InputShape, Seed, check_extra, option, shapes

if TYPE_CHECKING:
    from rewriter.locate import Location, Options

SEARCH = "Search"
EMULATION = "emulation"

Original = Annotated[Path, typer.Argument(metavar="ORIGINAL", help="The model as it was, taken in FP32")]
Other = Annotated[Path, typer.Argument(metavar="OTHER", help="The model that goes wrong")]


def locate(
    original: Original,
    other: Other,
    inputs: Inputs = None,
    input_shape: InputShape = None,
    seed: Seed = None,
    engine: Annotated[
        str,
        option(
            SEARCH,
            "NAME",
            "auto (the best on this GPU, else emulation), tensorrt, tensorrt-rtx, onnxruntime, "
            "onnxruntime-cuda or emulation",
        ),
    ] = "auto",
    tolerance: Annotated[
        float, typer.Option(min=0.0, metavar="X", help="Error that is wrong [5e-3]", show_default=False)
    ] = 5e-3,
    marks: Annotated[int, option(SEARCH, "N", "Tensors to mark in one build [8]")] = 8,
    max_builds: Annotated[int, option(SEARCH, "N", "Builds to make at most [48]")] = 48,
    rescaled: Annotated[
        bool, option(SEARCH, FLAG, "OTHER keeps tensors times powers of two (pass rescale)")
    ] = False,
    json: Annotated[Path | None, option(OUTCOME, "FILE", "Write the result as JSON, too")] = None,
) -> None:
    """Find the first tensor at which OTHER leaves ORIGINAL when an engine runs it.

    Exits with 0 if nothing is wrong, with 1 if something is, with 2 on bad usage or model.
    """
    with exit_codes():
        from rewriter.errors import UsageError
        from rewriter.locate import Options
        from rewriter.report import locate as report
        from rewriter.report.terminal import console

        check_extra("--json", json, [original, other])
        if marks < 1 or max_builds < 1:
            raise UsageError("at least one is needed", where="--marks, --max-builds", hint="8 and 48 do well")
        options = Options(tolerance=tolerance, marks=marks, max_builds=max_builds, rescaled=rescaled)
        found = _located(original, other, inputs, shapes(input_shape), seed or 0, engine, options)
        if json is not None:
            report.write_json(found, json)
        with reader_may_leave():
            report.print_location(found, console())
        if found.wrong:
            raise typer.Exit(FAILED)


def _located(
    original: Path,
    other: Path,
    inputs: Path | None,
    sizes: dict[str, tuple[int, ...]],
    seed: int,
    engine: str,
    options: Options,
) -> Location:
    from rewriter import locate as search
    from rewriter.engines import host
    from rewriter.inputs import load_samples, random_samples
    from rewriter.model import load
    from rewriter.report.progress import progress

    model = load(original)
    samples = (
        load_samples(inputs, model)
        if inputs is not None
        else random_samples(model, seed=seed, input_shapes=sizes)
    )
    choice = host.choose().engine or EMULATION if engine == "auto" else engine
    if choice == EMULATION:
        return search.locate_by_emulation(model, load(other), samples, options)
    with progress(shown=True) as shown:
        return search.locate(original, other, samples, host.require(choice), options, progress=shown)
