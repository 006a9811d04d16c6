"""The command line: parse, call one function of the API, turn the outcome into an exit code.

Exit codes: 0 fixed and verified, or nothing found; 1 verification failed, or `scan --fail-on` found
something; 2 bad usage or bad model, nothing written;
70 a defect of this program (EX_SOFTWARE of sysexits.h); 130 interrupted (128 + SIGINT).
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from rewriter import __version__
from rewriter.errors import OutputError, RewriterError, UsageError

if TYPE_CHECKING:
    from rewriter.findings import ScanResult
    from rewriter.result import FixResult

FAILED, BAD_INPUT, DEFECT, INTERRUPTED = 1, 2, 70, 130

app = typer.Typer(
    name="rewriter",
    help="Makes ONNX models safe for a TensorRT build in FP16, and proves it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
passes_app = typer.Typer(help="List the passes; `passes show NAME` explains one.")
app.add_typer(passes_app, name="passes")

PASSES, PRECISION, OUTCOME = "Passes", "Precision", "Verification and report"


FLAG = " "
"""Metavar of an option without a value; Typer would print `<bool>`."""


def _option(panel: str, metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, show_default=False)


GARBAGE_THRESHOLD = 20_000
"""A graph of 20,000 nodes is some 10^5 Python objects that live on: looking for cycles among them after
every 700 new ones, as Python does, took a tenth of the time (18.3 s instead of 19.9 s)."""


def main() -> None:
    """Entry point of the console script."""
    gc.set_threshold(GARBAGE_THRESHOLD)
    app(prog_name="rewriter")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rewriter {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def fix(
    model: Annotated[Path, typer.Argument(metavar="MODEL", hidden=True)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT", help="Where the fixed model goes")
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Samples: npz, folder, Polygraphy JSON")
    ] = None,
    input_shape: Annotated[
        list[str] | None, typer.Option(metavar="NAME:1x3x8", help="Shape of an input for random data")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of random data [0]", show_default=False)] = 0,
    in_place: Annotated[
        bool, typer.Option("--in-place", metavar=FLAG, help="The result may replace MODEL")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar=FLAG, help="Do everything, but write no model")
    ] = False,
    preset: Annotated[
        str, _option(PASSES, "NAME", "trt-fp16 (default), trt-bf16 or structure-only")
    ] = "trt-fp16",
    passes: Annotated[
        str | None, _option(PASSES, "A,B{X=Y}", "Run these passes instead of a preset's")
    ] = None,
    skip: Annotated[list[str] | None, _option(PASSES, "A,B", "Leave these passes out")] = None,
    opset: Annotated[int | None, _option(PASSES, "N", "Operator set of the result [17; BF16: 22]")] = None,
    target: Annotated[str, _option(PASSES, "NAME", "tensorrt (default), tensorrt-rtx or 10.3")] = "tensorrt",
    precision: Annotated[
        Literal["fp16", "bf16", "fp32"] | None,
        _option(PRECISION, "TYPE", "fp16, bf16, or fp32: structure only"),
    ] = None,
    io: Annotated[
        Literal["keep", "fp32", "fp16"], _option(PRECISION, "TYPE", "Inputs and outputs: keep, fp32 or fp16")
    ] = "keep",
    keep_fp32: Annotated[
        list[str] | None, _option(PRECISION, "PATTERN", "Keep nodes of this name in FP32: '*/attn/*'")
    ] = None,
    keep_fp32_op: Annotated[
        list[str] | None, _option(PRECISION, "OP", "Keep every node of this operator in FP32")
    ] = None,
    plan: Annotated[
        Path | None, _option(PRECISION, "PLAN.json", "Apply this plan exactly, measure nothing")
    ] = None,
    save_plan: Annotated[
        Path | None, _option(PRECISION, "PLAN.json", "Write the plan that was made, to edit it")
    ] = None,
    tolerance: Annotated[
        float | None, _option(PRECISION, "ERROR", "Search a plan that emulates within this: 1e-3")
    ] = None,
    metric: Annotated[
        str, _option(PRECISION, "NAME", "Of --tolerance: relative-l2 (default), psnr ...")
    ] = "relative-l2",
    no_verify: Annotated[bool, _option(OUTCOME, FLAG, "Skip the checks", "--no-verify")] = False,
    no_build: Annotated[bool, _option(OUTCOME, FLAG, "Check without TensorRT's build", "--no-build")] = False,
    accumulation: Annotated[
        Literal["fp32", "fp16"], _option(OUTCOME, "TYPE", "Emulated sums of FP16: fp32 (quick) or fp16")
    ] = "fp32",
    strict: Annotated[bool, _option(OUTCOME, FLAG, "Write nothing if a check fails", "--strict")] = False,
    build_timeout: Annotated[float, _option(OUTCOME, "SECONDS", "For TensorRT's build [600]")] = 600.0,
    report: Annotated[Path | None, _option(OUTCOME, "FILE", "Write the outcome as JSON, too")] = None,
    verbose: Annotated[bool, _option(OUTCOME, FLAG, "List everything", "-v", "--verbose")] = False,
    quiet: Annotated[bool, _option(OUTCOME, FLAG, "Print the verdict alone", "-q", "--quiet")] = False,
) -> None:
    """Rewrite MODEL so that TensorRT builds it in FP16 and it stays accurate.

    Exits with 0 if it is verified, 1 if a check failed, 2 on bad usage or model.
    """
    with _exit_codes():
        from rewriter import api
        from rewriter.report.progress import progress

        if output is None and not (in_place or dry_run):
            raise UsageError("nowhere to write to", hint="add -o OUT, --in-place or --dry-run")
        read = [path for path in (model, output, plan) if path is not None]
        _check_extra("--report", report, [*read, *([save_plan] if save_plan else [])])
        _check_extra("--save-plan", save_plan, read)
        with progress(shown=not quiet) as shown:
            result = api.fix(
                model,
                output or (model if in_place else None),
                inputs=inputs,
                passes=passes,
                skip=_split(skip),
                preset=preset,
                precision=precision,
                io=io,
                opset=opset,
                keep_fp32=keep_fp32 or (),
                keep_fp32_op=_split(keep_fp32_op),
                plan=plan,
                save_plan=save_plan,
                tolerance=tolerance,
                metric=metric,
                input_shapes=dict(map(_shape, input_shape or ())),
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
        _show(result, report, verbosity=int(verbose) - int(quiet))
        if result.verdict is not None and not result.verdict.passed:
            raise typer.Exit(FAILED)


@app.command()
def scan(
    model: Annotated[Path, typer.Argument(metavar="MODEL", hidden=True)],
    inputs: Annotated[
        Path | None, typer.Option(metavar="DATA", help="Samples: npz, folder, Polygraphy JSON")
    ] = None,
    input_shape: Annotated[
        list[str] | None, typer.Option(metavar="NAME:1x3x8", help="Shape of an input for random data")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of random data [0]", show_default=False)] = 0,
    precision: Annotated[
        Literal["fp16", "bf16"], _option(PRECISION, "TYPE", "What MODEL shall compute in: fp16 or bf16")
    ] = "fp16",
    target: Annotated[
        str, _option(PRECISION, "NAME", "tensorrt (default), tensorrt-rtx or 10.3: known defects")
    ] = "tensorrt",
    json: Annotated[Path | None, _option(OUTCOME, "FILE", "Write the findings as JSON, too")] = None,
    sarif: Annotated[Path | None, _option(OUTCOME, "FILE", "Write them as SARIF 2.1.0, too")] = None,
    fail_on: Annotated[
        Literal["warning", "error"] | None, _option(OUTCOME, "LEVEL", "Exit with 1 from warning or error on")
    ] = None,
    verbose: Annotated[bool, _option(OUTCOME, FLAG, "List everything", "-v", "--verbose")] = False,
    quiet: Annotated[bool, _option(OUTCOME, FLAG, "Print the counts alone", "-q", "--quiet")] = False,
) -> None:
    """Find where MODEL goes wrong in FP16, and what would repair it; change nothing.

    Exits with 0, with 1 if --fail-on says so, with 2 on bad usage or model.
    """
    with _exit_codes():
        from rewriter import scanner
        from rewriter.report.progress import progress

        for option, path in (("--json", json), ("--sarif", sarif)):
            _check_extra(option, path, [model])
        with progress(shown=not quiet) as shown:
            result = scanner.scan(
                model,
                inputs=inputs,
                precision=precision,
                input_shapes=dict(map(_shape, input_shape or ())),
                target=target,
                seed=seed,
                progress=shown,
            )
        _show_findings(result, json, sarif, verbosity=int(verbose) - int(quiet))
        if fail_on is not None and result.reaches(fail_on):
            raise typer.Exit(FAILED)


@passes_app.callback(invoke_without_command=True)
def _list_passes(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        with _exit_codes(), _reader_may_leave():
            from rewriter.catalogue import overview
            from rewriter.report.terminal import console

            console().print(overview())


@passes_app.command("show")
def _show_pass(name: Annotated[str, typer.Argument(help="As `rewriter passes` lists it.")]) -> None:
    """Why a pass exists, its options, an example before and after, and what it declines."""
    with _exit_codes(), _reader_may_leave():
        from rewriter.catalogue import page
        from rewriter.pipeline import pass_named

        typer.echo(page(pass_named(name)).rstrip())


def _show(result: FixResult, report: Path | None, *, verbosity: int) -> None:
    from rewriter.report import json, terminal

    if report is not None:
        json.write(result, report)
    with _reader_may_leave():
        terminal.print_result(result, terminal.console(), verbosity=verbosity)


def _show_findings(result: ScanResult, json: Path | None, sarif: Path | None, *, verbosity: int) -> None:
    from rewriter.report import sarif as sarif_report
    from rewriter.report import scan as scan_report
    from rewriter.report import terminal

    if json is not None:
        scan_report.write_json(result, json)
    if sarif is not None:
        sarif_report.write(result, sarif)
    with _reader_may_leave():
        scan_report.print_result(result, terminal.console(), verbosity=verbosity)


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """`| head` may have read enough: no error, and the exit code still tells the verdict."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more


def _check_extra(option: str, path: Path | None, others: list[Path]) -> None:
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


def _split(texts: list[str] | None) -> list[str]:
    """`["a,b", "c"]` as `["a", "b", "c"]`."""
    return [part.strip() for text in texts or () for part in text.split(",") if part.strip()]


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    """`image:1x3x224x224`: the name may hold colons, the shape may be empty for a scalar."""
    name, colon, dims = text.rpartition(":")
    try:
        shape = tuple(int(dim) for dim in dims.split("x") if dim or dims)
    except ValueError:
        shape = (0,)
    if not (name and colon) or any(dim < 1 for dim in shape):
        raise UsageError(
            f"{text!r} is not a shape", where="--input-shape", hint="NAME:1x3x224x224, sizes from 1"
        )
    return name, shape


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Errors of ours go to stderr as they read; anything else is a defect and shows its traceback."""
    try:
        yield
    except RewriterError as error:
        _stop(f"error: {error}", BAD_INPUT)
    except KeyboardInterrupt:
        _stop("interrupted", INTERRUPTED)
    except (typer.Exit, typer.Abort):
        raise
    except Exception:
        traceback.print_exc()
        _stop("this is a defect of rewriter: please report it with the lines above", DEFECT)


def _stop(message: str, code: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code) from None
