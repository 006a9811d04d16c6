"""The catalogue of passes: the page `passes/README.md` and what `rewriter passes` prints."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rewriter.ir.base import Exactness, Pass, Stage, with_header
from rewriter.ir.errors import UsageError
from rewriter.pipeline.presets import DEFAULT_PRESET, PRESETS
from rewriter.pipeline.registry import clashes, origin, own_passes, plugins
from rewriter.pipeline.schema import entries
from rewriter.pipeline.text import PassOption, options_of, render

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEADER = """\
# The passes

Written by `python -m rewriter.pipeline.catalogue` from the passes themselves: change them, not this page.
"""

GROUPS: Mapping[Stage, str] = {
    Stage.STRUCTURE: "structure",
    Stage.RANGES: "after ranges were measured",
    Stage.ADAPTING: "for a plan",
    Stage.LOWERING: "carries the plan out",
}
"""Titles of the stages."""

_SECTION = re.compile(r"^(Options|Declines):$", re.MULTILINE)


def catalogue() -> str:
    """The whole page as Markdown."""
    kinds = own_passes().values()
    lines = [
        f"| [{kind.name}](#{kind.name}) | {exactness_text(kind.exactness)} | {summary(kind)} |"
        for kind in kinds
    ]
    table = "\n".join(["| pass | FP32 result | why |", "|---|---|---|", *lines])
    return "\n".join([_HEADER, table, "", _presets(), "", *(page(kind) for kind in kinds)]).rstrip() + "\n"


def page(kind: type[Pass]) -> str:
    """One pass as Markdown: why, options with types and defaults, example, exactness, refusals."""
    why, sections = _documentation(kind)
    package = origin(kind)
    parts = [
        f"## {kind.name}",
        *([f"From {package}, not a part of rewriter."] if package else []),
        why,
        f"FP32 result: {exactness_text(kind.exactness)} ({kind.exactness.source}).",
    ]
    options = options_of(kind)
    if options:
        texts = entries(kind.__doc__ or "", "Options")
        parts.append(
            "\n".join(_option_line(option, texts.get(option.name, "")) for option in options.values())
        )
    declines = sections.get("Declines") or _bullets(refusals(kind))
    if floor := kind.requires.opset:
        declines = "\n".join([*declines.splitlines(), f"- a model below opset {floor}"])
    if declines:
        parts.append("It declines, and says on which node:\n\n" + declines)
    using = f" (`{render([kind(**kind.example)])}`)" if kind.example else ""
    parts += [f"Before{using}:\n\n{_fenced(kind.before)}", f"After:\n\n{_fenced(kind.after)}"]
    return "\n\n".join(parts) + "\n"


def as_list() -> list[dict[str, Any]]:
    """Every pass that a pipeline may name, as data: ours in their order, then those of other packages."""
    default = {step.name for step in PRESETS[DEFAULT_PRESET].steps}
    return [
        {
            "name": kind.name,
            "default": kind.name in default,
            "group": GROUPS[kind.stage],
            "exactness": exactness_text(kind.exactness),
            "summary": summary(kind),
            "options": {
                o.name: {"type": o.type_text, "default": o.default} for o in options_of(kind).values()
            },
            "package": package,
        }
        for kind, package in _offered([])
    ]


def _offered(warnings: list[str]) -> Iterator[tuple[type[Pass], str | None]]:
    """The passes with the packages of those that are not ours; adds what is wrong with a package."""
    yield from ((kind, None) for kind in own_passes().values())
    found = list(plugins())
    warnings.extend(clashes(found))
    names = Counter([*own_passes(), *(plugin.name for plugin in found)])
    for plugin in found:
        if names[plugin.name] > 1:
            continue
        try:
            yield plugin.load(), plugin.distribution
        except UsageError as error:
            warnings.append(f"{error.where}: {error.what}")


def overview() -> RenderableType:
    """A table of all passes for the terminal; * marks those of the default preset."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    warnings = list[str]()
    offered = list(_offered(warnings))
    default = {step.name for step in PRESETS[DEFAULT_PRESET].steps}
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    table.add_column("pass", no_wrap=True)
    table.add_column("FP32 result", no_wrap=True)
    table.add_column("why", overflow="fold")
    for stage, title in GROUPS.items():
        table.add_row(f"[{title}]")
        for kind, package in offered:
            if kind.stage is stage:
                why = summary(kind) + (f" [{package}]" if package else "")
                table.add_row(
                    f"{'*' if kind.name in default else ' '} {kind.name}", exactness_text(kind.exactness), why
                )
    note = f"* runs in {DEFAULT_PRESET}, the default. `rewriter passes show NAME` explains one."
    parts: list[RenderableType] = [table, "", Text(note)]
    if warnings:
        parts += ["", *[Text(f"warning: {text}") for text in warnings]]
    return Group(*parts)


def summary(kind: type[Pass]) -> str:
    """The first sentence of the pass's docstring."""
    why, _ = _documentation(kind)
    first = " ".join(why.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", first)[0]


def exactness_text(exactness: Exactness) -> str:
    """`bit-equal`, or the tolerance."""
    return f"within {exactness.tolerance:.2g}" if exactness.tolerance else "bit-equal"


def refusals(kind: type[Pass]) -> list[str]:
    """The reasons for which a pass declines, as its source file states them.

    Parts that depend on the model are shown as `...`.
    """
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    found = [text for node in ast.walk(tree) if isinstance(node, ast.Call) for text in _reasons(node)]
    return list(dict.fromkeys(found))


def _reasons(call: ast.Call) -> Iterator[str]:
    if not (isinstance(call.func, ast.Name) and call.func.id == "Refusal"):
        return
    reason = (
        call.args[1]
        if len(call.args) > 1
        else next((k.value for k in call.keywords if k.arg == "reason"), None)
    )
    if isinstance(reason, ast.Constant) and isinstance(reason.value, str):
        yield reason.value
    elif isinstance(reason, ast.JoinedStr):
        yield "".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in reason.values)


def _documentation(kind: type[Pass]) -> tuple[str, dict[str, str]]:
    """The docstring's text and its sections."""
    text = inspect.cleandoc(kind.__doc__ or "")
    why, *rest = _SECTION.split(text)
    return why.strip(), {
        title: textwrap.dedent(body).strip() for title, body in zip(rest[::2], rest[1::2], strict=True)
    }


def _option_line(option: PassOption, text: str) -> str:
    default = option.default_text or "nothing"
    return f"- `{option.name}` ({option.type_text}; default {default})" + (f": {text}" if text else "")


def _bullets(texts: list[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)


def _fenced(text: str) -> str:
    return f"```\n{with_header(text)}\n```"


def _presets() -> str:
    lines = [f"- `{name}`: {preset.summary}.\n  `{preset.pipeline}`" for name, preset in PRESETS.items()]
    return "\n".join(["Presets:", "", *lines])
