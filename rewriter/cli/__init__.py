"""The command line: its commands by name, and the one style of errors and of help that they have.

A command parses, calls one function of the API, and turns the outcome into an exit code. Its file is imported
when it is run: a shell that completes a word does not wait for the others.
"""

import gc
import pkgutil
import re
import sys
from signal import SIGINT
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from rewriter.base.errors import UsageError
from rewriter.cli.exits import BAD_INPUT, INTERRUPTED, echo, exit_codes, print_error, streams
from rewriter.cli.parameters import FLAG
from rewriter.report.signals import listening

MODELS, AROUND = "A model", "More"  # groups of commands in `rewriter --help`


class Entry(NamedTuple):
    """A command: its function or its Typer below `rewriter.cli`, and its line in `--help`."""

    code: str
    help: str
    panel: str = AROUND


COMMANDS = {
    "fix": Entry(".fix:fix", "Make MODEL accurate and fast in FP16, and check it", MODELS),
    "scan": Entry(".scan:scan", "Find nodes that would go wrong; change nothing", MODELS),
    "verify": Entry(".compare:verify", "Compare every output of two versions", MODELS),
    "locate": Entry(".compare:locate", "Find the first tensor that goes wrong", MODELS),
    "compare-inputs": Entry(".compare:compare_inputs", "Find how two preprocessings differ", MODELS),
    "batch": Entry(".fix:batch", "Fix many models, here or on a cluster", MODELS),
    "record": Entry(".more:record", "Run a script, and keep what its models get", MODELS),
    "report": Entry(".more:report", "Make a page from saved JSON"),
    "probe": Entry(".more:probe", "Measure how TensorRT computes on this GPU"),
    "rule": Entry(".more:rule", "Explain a kind of finding, and its remedy"),
    "why": Entry(".more:why", "Explain the type of a node of a result"),
    "config": Entry(".more:config", "Options in force, and where each comes from"),
    "presets": Entry(".more:presets", "Pipelines by name; `presets show NAME`"),
    "passes": Entry(".more:passes", "List the passes; `passes show NAME` explains one"),
    "hook": Entry(".scan:app", "Commands of the pre-commit hooks"),
    "help": Entry(":show_help", ""),
}


CACHING = ("fix", "scan", "verify", "locate", "batch", "probe")
"""Commands that use the user's cache folder."""


def show_help(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="[COMMAND]", show_default=False)] = None,
) -> None:
    """Show the options of a command, as its --help does."""
    context.find_root().command.main([*(words or ()), "--help"], prog_name="rewriter")


def _plain(params: list[Any], context: Any) -> list[Any]:
    """Options as they are shown: Typer would show `<bool>` after `--help`, which it makes itself.

    A shell that completes a word needs no values, and does not wait for Pydantic, which reads them.
    """
    for param in params:
        if context.resilient_parsing:
            param.process_value = lambda ctx, value: value
        if not isinstance(param, TyperOption):
            continue
        if param.is_flag and param.metavar is None:
            param.metavar = FLAG
    return params


class Command(TyperCommand):
    """One command; its errors become exit codes, and paragraphs of its help are as wide as the terminal."""

    def __init__(self, *args: Any, help: str | None = None, **more: Any) -> None:  # noqa: A002  # Typer's name
        super().__init__(*args, help=help and re.sub(r"(?<=\S)\n(?=\S)", " ", help), **more)

    def invoke(self, ctx: Any) -> Any:
        with exit_codes():
            if self.name in CACHING:
                from rewriter.runtime.engines import caches

                if problem := caches.obstacle():
                    echo(f"warning: it works without a cache: {problem}", err=True)
            return super().invoke(ctx)

    def get_params(self, ctx: Any) -> list[Any]:
        return _plain(super().get_params(ctx), ctx)


HIDDEN = ("help", "show_completion", "install_completion")
"""Options of every group; docs/commands.md has them."""


class Group(TyperGroup):
    """A command with subcommands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters of the group; a screen has no lines for `--help` itself and completion."""
        params = _plain(super().get_params(ctx), ctx)
        for param in params:
            if isinstance(param, TyperOption) and param.name in HIDDEN:
                param.hidden = True
        return params


class Root(Group):
    """`rewriter`: lists its commands by name, and imports one when it runs."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: Command(name, short_help=entry.help, rich_help_panel=entry.panel, hidden=not entry.help)
            for name, entry in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that arguments begin with, and those that follow."""
        if args[0] in COMMANDS:
            return args[0], loaded(args[0]), args[1:]
        return super().resolve_command(ctx, args)

    def main(  # type: ignore[override]
        self, args: Any = None, prog_name: Any = None, *, standalone_mode: bool = True, **more: Any
    ) -> Any:
        """Runs the named command; a wrong command line is reported like any other error."""
        try:
            code = super().main(args, prog_name, standalone_mode=False, **more)
        except typer.Abort:
            code = INTERRUPTED
        except Exception as error:
            if not hasattr(error, "format_message"):  # it is none of Typer's
                raise
            code = _refused(error)
        return sys.exit(code or 0) if standalone_mode else code


def loaded(name: str) -> Any:
    command = pkgutil.resolve_name(f"rewriter.cli{COMMANDS[name].code}")
    if isinstance(command, typer.Typer):
        command.info.name = name
        return typer.main.get_group(command)
    alone = typer.Typer(add_completion=False)
    alone.command(name, cls=Command)(command)
    return typer.main.get_command(alone)


def _refused(error: Any) -> int:
    """Prints what is wrong with the command line, and what to do."""
    context, message = getattr(error, "ctx", None), error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return BAD_INPUT
    path = context.command_path if context else "rewriter"
    where, hint = None, f"`{path} --help` shows how it is called"
    if "show" in getattr(context and context.command, "commands", ()):
        hint = f"`{path} show NAME` explains one"
    if option := getattr(error, "option_name", None):
        where = option
        if type(error).__name__ == "NoSuchOption":
            from rewriter.pipeline.schema import instead

            message = "there is no such option"
            hint = instead(option, [p.name for p in context.command.params if p.name]) if context else hint
    print_error(UsageError(message[0].lower() + message[1:].rstrip("."), where=where, hint=hint))
    return BAD_INPUT


app = typer.Typer(
    name="rewriter",
    cls=Root,
    help="Makes ONNX models accurate in TensorRT FP16.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

GARBAGE_THRESHOLD = 20_000
"""Objects made between two searches for cycles; Python's own 700 cost a graph of 20,000 nodes 8 % of the time
(19.9 s instead of 18.3 s), since its 10^5 objects all live on."""


def main() -> None:
    """Runs the command that `sys.argv` names, and exits."""
    gc.set_threshold(GARBAGE_THRESHOLD)
    with listening() as signals, streams() as out:
        try:
            try:
                app(prog_name="rewriter")
            finally:
                sys.stdout.flush()
                if out.error and not isinstance(out.error, BrokenPipeError):
                    echo(f"error: standard output: {out.error.strerror}: the output is incomplete", err=True)
                    raise SystemExit(BAD_INPUT)
        except SystemExit as end:
            if signals.received == SIGINT and not signals.reported:  # Typer ends in silence outside a command
                echo("interrupted", err=True)
            raise SystemExit(128 + signals.received if signals.received else end.code) from None
        except KeyboardInterrupt:  # while Typer makes the commands
            echo("interrupted", err=True)
            raise SystemExit(INTERRUPTED) from None


@app.callback()
def _root() -> None:
    pass
