"""Options that several commands share, and how their text is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rewriter.cli import complete
from rewriter.errors import OutputError, UsageError

if TYPE_CHECKING:
    from rewriter.pipeline.config import InForce

PASSES, PRECISION, SEARCH, ENGINE = "Passes", "Precision", "Search for a plan", "Engine"
OUTCOME = "Verification and report"

FLAG = " "
"""Metavar of an option without a value; Typer would print `<bool>`."""


def option(panel: str, metavar: str, text: str, *names: str, **more: Any) -> Any:
    """An option of the panel `panel` of a command's help."""
    text = re.sub(r"\[(?=[a-z])", r"\\[", text)  # a default in brackets is no markup of rich
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, show_default=False, **more)


ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", hidden=True)]
Inputs = Annotated[Path | None, typer.Option(metavar="DATA", help="Samples: npz, folder, Polygraphy JSON")]
InputShape = Annotated[
    list[str] | None, typer.Option(metavar="NAME:1x3x8", help="Shape of an input for random data")
]
PluginLib = Annotated[list[Path] | None, option(ENGINE, "FILE", "A library with TensorRT plugins")]
SHAPES = "NAME:1x3x8,..."
MinShapes = Annotated[str | None, option(ENGINE, SHAPES, "Smallest shapes of the profile")]
OptShapes = Annotated[str | None, option(ENGINE, SHAPES, "Usual shapes [those of the samples]")]
MaxShapes = Annotated[str | None, option(ENGINE, SHAPES, "Largest shapes")]
Seed = Annotated[int | None, typer.Option(min=0, metavar="N", help="Of random data [0]", show_default=False)]
Preset = Annotated[
    str | None,
    option(
        PASSES, "NAME", "A line of `rewriter presets`; trt-fp16 by default", autocompletion=complete.presets
    ),
]
Target = Annotated[
    str | None,
    option(PASSES, "NAME", "tensorrt (default), tensorrt-rtx or 10.3", autocompletion=complete.targets),
]
Verbose = Annotated[bool, option(OUTCOME, FLAG, "List everything", "-v", "--verbose")]


def check_extra(option: str, path: Path | None, others: list[Path]) -> None:
    """Refuse before the work starts a file beside the model that could not be written after it."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise OutputError("its folder does not exist", where=f"{option} {path}", hint="make it first")
    for other in others:
        if path.resolve() == other.resolve():
            raise UsageError(
                f"it would overwrite {other}", where=f"{option} {path}", hint="name another file"
            )


def check_pareto(path: Path | None, others: list[Path]) -> None:
    """`check_extra`, and that it is a kind of drawing that there is."""
    check_extra("--pareto", path, others)
    if path is not None:
        from rewriter.report.frontier import check_path

        check_path(path)


def share(text: str | None, option: str) -> float | None:
    """`5%` or `0.05` as 0.05; None if nothing is given."""
    if text is None:
        return None
    percent = text.strip().endswith("%")
    try:
        return float(text.strip().removesuffix("%")) / (100.0 if percent else 1.0)
    except ValueError:
        raise UsageError(f"{text!r} is no share", where=option, hint="such as 5%, or 0.05") from None


def split(texts: list[str] | None) -> list[str]:
    """`["a,b", "c"]` as `["a", "b", "c"]`."""
    return [part.strip() for text in texts or () for part in text.split(",") if part.strip()]


def shapes(texts: list[str] | None, option: str = "--input-shape") -> dict[str, tuple[int, ...]]:
    """`["image:1x3x224x224"]` as `{"image": (1, 3, 224, 224)}`."""
    from rewriter.pipeline.config.values import shape_from_text

    found = {}
    for text in texts or ():
        try:
            name, dims = shape_from_text(text)
        except ValueError as error:
            raise UsageError(f"{text!r} is not a shape", where=option, hint=str(error)) from error
        found[name] = dims
    return found


def profile(low: str | None, usual: str | None, high: str | None) -> dict[str, Any]:
    """`--min-shapes`, `--opt-shapes` and `--max-shapes` as the API takes them."""
    texts = {"min_shapes": low, "opt_shapes": usual, "max_shapes": high}
    return {name: shapes(split([text or ""]), f"--{name.replace('_', '-')}") for name, text in texts.items()}


def configured(model: Path, *, quiet: bool, **given: Any) -> InForce:
    """Everything in force for `model` with these options of the command line; stderr tells what was read."""
    from rewriter.pipeline import config

    configuration = config.load(model)
    for warning in configuration.warnings:
        typer.echo(f"warning: {warning}", err=True)
    in_force = configuration.with_options(**given)
    for sentence in () if quiet else in_force.told():
        typer.echo(f"configuration: {sentence}", err=True)
    return in_force
