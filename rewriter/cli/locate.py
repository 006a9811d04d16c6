"""`rewriter locate`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.cli.exits import FAILED, reader_may_leave
from rewriter.cli.parameters import check_extra, option, with_options
from rewriter.pipeline.options import ENGINE, OUTCOME, VerifyOptions

if TYPE_CHECKING:
    from rewriter.data.inputs import Samples
    from rewriter.engines.deployment import Deployment
    from rewriter.model import Model
    from rewriter.verification.locate import Location, Options

SEARCH = "Search"
_SHARED = ("inputs", "input_shapes", "seed", "engine", "plugin_lib", "min_shapes", "opt_shapes", "max_shapes")
"""Options that `locate` has in common with `verify`."""

MOST_SAMPLES = 4
"""Samples that are looked at: every build of the search runs all of them."""

Original = Annotated[Path, typer.Argument(metavar="ORIGINAL", help="The model as it was, taken in FP32")]
Other = Annotated[Path, typer.Argument(metavar="OTHER", help="The model that goes wrong")]


@with_options(VerifyOptions, *_SHARED)
def locate(
    original: Original,
    other: Other,
    timeout: Annotated[float, option(ENGINE, "SECONDS", "For each build, and for each run [600]")] = 600.0,
    tolerance: Annotated[
        float, typer.Option(min=0.0, metavar="X", help="Error that is wrong [5e-3]", show_default=False)
    ] = 5e-3,
    marks: Annotated[int, option(SEARCH, "N", "Tensors to mark in one build [8]")] = 8,
    max_builds: Annotated[int, option(SEARCH, "N", "Builds to make at most [48]")] = 48,
    json: Annotated[Path | None, option(OUTCOME, "FILE", "Write the result as JSON, too")] = None,
    **given: Any,
) -> None:
    """Find the first tensor at which OTHER leaves ORIGINAL when an engine runs it.

    Engine: auto, tensorrt, tensorrt-rtx, onnxruntime, onnxruntime-cuda, emulation

    Exits with 0 if nothing is wrong, with 1 if something is, with 2 on bad usage or model.
    """
    from rewriter.engines.deployment import deployment
    from rewriter.errors import UsageError
    from rewriter.model import load, write_json
    from rewriter.report import locate as report
    from rewriter.report.terminal import console
    from rewriter.verification.locate import Options

    check_extra("--json", json, [original, other])
    if marks < 1 or max_builds < 1:
        raise UsageError("at least one is needed", where="--marks, --max-builds", hint="8 and 48 do well")
    if not timeout > 0:
        raise UsageError(f"it cannot be {timeout:g}", where="--timeout", hint="seconds, such as 600")
    options = Options(tolerance=tolerance, marks=marks, max_builds=max_builds)
    chosen = VerifyOptions(**given)
    deployed = deployment(
        chosen.engine, chosen.plugin_lib, chosen.min_shapes, chosen.opt_shapes, chosen.max_shapes
    )
    samples, notes = _data(load(original), chosen, deployed)
    found = _located(original, other, samples, deployed, options, timeout)
    found = replace(found, notes=(*notes, *found.notes))
    if json is not None:
        write_json(report.as_dict(found), json)
    with reader_may_leave():
        report.print_location(found, console())
    if found.wrong:
        raise typer.Exit(FAILED)


def _data(model: Model, chosen: VerifyOptions, deployed: Deployment) -> tuple[Samples, list[str]]:
    """The samples to look at, and what the user should know of them."""
    from rewriter.data.expectations import data_warnings
    from rewriter.data.inputs import load_samples

    samples = load_samples(
        chosen.inputs, model, input_shapes=chosen.input_shapes, seed=chosen.seed, deployment=deployed
    )
    notes = [*([] if samples.source.real else [samples.source.text]), *data_warnings(model, samples)]
    if len(samples) > MOST_SAMPLES:
        notes.append(f"the first {MOST_SAMPLES} of {len(samples)} samples were looked at")
    return samples.first(MOST_SAMPLES), notes


def _located(
    original: Path, other: Path, samples: Samples, deployed: Deployment, options: Options, timeout: float
) -> Location:
    from rewriter.engines.protocol import Settings
    from rewriter.model import load
    from rewriter.report.progress import progress
    from rewriter.verification import locate as search

    engine = deployed.choose().engine
    if engine is None:
        return search.locate_by_emulation(load(original), load(other), samples, options)
    settings = Settings(engine, plugins=deployed.plugins, build_timeout_s=timeout, run_timeout_s=timeout)
    with progress(shown=True) as shown:
        return search.locate(original, other, samples, engine, options, settings, deployed.profile, shown)
