"""Commands inside this process and as processes of their own, and command lines of documents."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer
from paths import ROOT
from typer.testing import CliRunner, Result

from rewriter.cli import app


def invoke(*words: str | Path, **variables: str) -> Result:
    """Runs a command inside this process, with variables of the environment."""
    return CliRunner().invoke(app, [str(word) for word in words], env=variables)


def quick(*words: str | Path, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command inside this process."""
    done = invoke(*words, **variables)
    return done.exit_code, done.stdout, done.stderr


def python(
    *arguments: str | Path, cwd: Path | None = None, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs Python with the checkout on its path; a variable of the environment that is None is removed."""
    merged = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    environment = {name: value for name, value in merged.items() if value is not None}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, check=False
    )


def parsed(line: str) -> None:
    """Go down to the command that is meant, and parse what stands behind it; nothing runs.

    Raises:
        Exception: no such command, option or value, or an argument that is missing.
    """
    command: Any = typer.main.get_command(app)
    words = shlex.split(line, comments=True)[1:]
    context = command.make_context("rewriter", list(words), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, command, words = command.resolve_command(context, rest)
        context = command.make_context(name, list(words), parent=context)


def flat(text: str) -> str:
    """Without line breaks, wherever a terminal of some width put them."""
    return " ".join(text.split())
