"""`rewriter scan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rewriter.cli import complete
from rewriter.cli.exits import FAILED, exit_codes, reader_may_leave
from rewriter.cli.options import (
    FLAG,
    OUTCOME,
    PRECISION,
    Inputs,
    InputShape,
    ModelPath,
    Seed,
    Verbose,
    check_extra,
    configured,
    option,
    shapes,
)

if TYPE_CHECKING:
    from rewriter.jobs.findings import ScanResult


def scan(
    model: ModelPath,
    inputs: Inputs = None,
    input_shape: InputShape = None,
    seed: Seed = None,
    precision: Annotated[
        Literal["fp16", "bf16"] | None,
        option(PRECISION, "TYPE", "What MODEL shall compute in: fp16 (default) or bf16"),
    ] = None,
    target: Annotated[
        str | None,
        option(
            PRECISION,
            "NAME",
            "tensorrt (default), tensorrt-rtx or 10.3",
            autocompletion=complete.targets,
        ),
    ] = None,
    json: Annotated[Path | None, option(OUTCOME, "FILE", "Write the findings as JSON, too")] = None,
    sarif: Annotated[Path | None, option(OUTCOME, "FILE", "Write them as SARIF 2.1.0, too")] = None,
    fail_on: Annotated[
        Literal["warning", "error"] | None, option(OUTCOME, "LEVEL", "Exit with 1 from warning or error on")
    ] = None,
    verbose: Verbose = False,
    quiet: Annotated[bool, option(OUTCOME, FLAG, "Print the counts alone", "-q", "--quiet")] = False,
) -> None:
    """Find where MODEL goes wrong in FP16, and what would repair it; change nothing.

    Exits with 0, with 1 if --fail-on says so, with 2 on bad usage or model.
    """
    with exit_codes():
        from rewriter.jobs import scan as scanner
        from rewriter.report.progress import progress

        in_force = configured(
            model,
            quiet=quiet,
            inputs=inputs,
            input_shapes=shapes(input_shape),
            seed=seed,
            precision=precision,
            target=target,
            fail_on=fail_on,
        )
        for option, path in (("--json", json), ("--sarif", sarif)):
            check_extra(option, path, [model])
        with in_force.blaming(), progress(shown=not quiet) as shown:
            result = scanner.scan(model, progress=shown, **in_force.arguments("scan"))
        _show_findings(result, json, sarif, verbosity=int(verbose) - int(quiet))
        least = in_force.settings.fail_on
        if least is not None and result.reaches(least):
            raise typer.Exit(FAILED)


def _show_findings(result: ScanResult, json: Path | None, sarif: Path | None, *, verbosity: int) -> None:
    from rewriter.model import write_json
    from rewriter.report import sarif as sarif_report
    from rewriter.report import scan as scan_report
    from rewriter.report import terminal

    if json is not None:
        write_json(scan_report.as_dict(result), json)
    if sarif is not None:
        write_json(sarif_report.as_sarif(result), sarif)
    with reader_may_leave():
        scan_report.print_result(result, terminal.console(), verbosity=verbosity)
