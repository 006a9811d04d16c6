"""`rewriter hook`: for training repositories."""

from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.base.errors import RewriterError
from rewriter.cli import Command, Group
from rewriter.cli.exits import BAD_INPUT, FAILED, echo, print_error
from rewriter.cli.parameters import Outputs, with_options
from rewriter.cli.scan import run_scan
from rewriter.ir.model.files import ENDINGS
from rewriter.pipeline.options import FixCommand, ScanCommand

app = typer.Typer(cls=Group, help="Commands of the pre-commit hooks, for repositories with models.")

Models = Annotated[
    list[Path], typer.Argument(metavar="MODEL...", show_default=False, help="Files, as pre-commit gives them")
]


class HookCommand(Command):
    """A command whose files follow its options: without `--`, where `args` of the user replace ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """A file called `--inputs=x.onnx` is a file."""
        if "--" not in args:
            files = [word for word in args if word.endswith(ENDINGS) and Path(word).is_file()]
            args = [*(word for word in args if word not in files), "--", *files]
        return super().parse_args(ctx, args)


@app.command(cls=HookCommand)
@with_options(ScanCommand, "inputs", "precision", "target", "fail_on", outputs=("json", "sarif", "verbose"))
def scan(models: Models, outputs: Outputs, **given: Any) -> None:
    """Scan committed models. Samples come from net.npz beside net.onnx, if it exists.

    --json and --sarif write the findings of all models into one file each.

    Exits with 0, with 1 if a model has an error, with 2 if one cannot be read.
    """
    outputs.check(models)
    todo = [model for model in models if not _skipped(model)]
    run_scan(todo, given, outputs, least="error")


@app.command(cls=HookCommand)
@with_options(FixCommand, "inputs", "preset", "target")
def fix(models: Models, **given: Any) -> None:
    """Fix committed models in place, once each, and keep net.raw.onnx. Samples as for `hook scan`.

    Exits with 0 if nothing was to be done, with 1 if a file changed, with 2 if one could not be fixed.
    """
    from rewriter.hooks.fixing import fix_committed, raw_path

    codes = [0]
    for model in models:
        try:
            if _skipped(model):
                continue
            if fix_committed(model, given):
                codes.append(FAILED)
                echo(f"{model}: fixed; review it, and add it; the original is {raw_path(model).name}")
            else:
                echo(f"{model}: nothing to do")
        except RewriterError as error:
            codes.append(BAD_INPUT)
            print_error(error)
    if max(codes):
        raise typer.Exit(max(codes))


def _skipped(model: Path) -> bool:
    """True if the model is to be skipped, which is printed."""
    from rewriter.hooks.fixing import skipped

    if reason := skipped(model):
        echo(f"{model}: {reason}")
    return bool(reason)
