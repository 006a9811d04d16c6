"""`rewriter rule` and `rewriter why`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rewriter.cli.exits import echo


def rule(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", show_default=False)] = None,
) -> None:
    """Explain a kind of finding, a rule of a plan or a known defect; without KIND, list them."""
    from rewriter.jobs.explain import rule as explanation
    from rewriter.jobs.explain import rules

    if kind is None:
        width = max(map(len, rules()))
        echo(*(f"{name:<{width}}  {title}" for name, title in rules().items()))
    else:
        _print(explanation(kind))


def why(
    node: Annotated[str, typer.Argument(help="A node's name, or one of its outputs")],
    model: Annotated[Path, typer.Argument(metavar="FIXED.onnx", help="A result of `fix`")],
) -> None:
    """Explain the type of a node in a result of `fix`: the reason, its neighbours, and the rule."""
    from rewriter.jobs.explain import why as explanation

    found = explanation(node, model)
    _print(found)
    if found.rule is not None:
        echo("")
        _print(found.rule)


def _print(explanation: Any) -> None:
    from rewriter.report.terminal import console, print_rows

    out = console()
    (name, text), *rows = explanation.summary()
    out.print(f"{name}: {text}", soft_wrap=True)
    print_rows(rows, out)
    if picture := getattr(explanation, "picture", ""):
        echo("", *(f"    {line}" for line in picture.split("\n")), "")
