"""The passes and the presets for people: lists, and a page each. docs/catalogue.py makes files of them."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rewriter.ir.base import Exactness, Pass, Stage, with_header
from rewriter.ir.errors import UsageError
from rewriter.pipeline.presets import DEFAULT_PRESET, PRESETS, Preset
from rewriter.pipeline.reader import to_text
from rewriter.pipeline.registry import clashes, origin, own_passes, plugins
from rewriter.pipeline.schema import entries
from rewriter.pipeline.text import PassOption, options_of, render

GROUPS: Mapping[Stage, str] = {
    Stage.STRUCTURE: "structure",
    Stage.RANGES: "after ranges were measured",
    Stage.LOWERING: "carries the plan out",
}
"""Titles of the stages."""

WIDTH = 78
_SECTION = re.compile(r"^(Options|Declines):$", re.MULTILINE)


def passes(warnings: list[str]) -> list[dict[str, Any]]:
    """Every pass that a pipeline may name, as data: ours in their order, then those of other packages.

    Args:
        warnings: Gets a sentence for each pass of another package that cannot be used.
    """
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
        for kind, package in _offered(warnings)
    ]


def _offered(warnings: list[str]) -> Iterator[tuple[type[Pass], str | None]]:
    own, others = own_passes(), plugins()
    yield from ((kind, None) for kind in own.values())
    warnings.extend(clashes(others))
    names = Counter([*own, *(plugin.name for plugin in others)])
    for plugin in others:
        if names[plugin.name] == 1:
            try:
                yield plugin.load(), plugin.distribution
            except UsageError as error:
                warnings.append(f"{error.where}: {error.what}")


def presets() -> list[dict[str, Any]]:
    """Every preset as data."""
    return [
        {
            "name": preset.name,
            "default": preset.name == DEFAULT_PRESET,
            "summary": preset.summary,
            "sets": {name.replace("_", "-"): value for name, value in preset.defaults.items()},
            "pipeline": preset.pipeline,
        }
        for preset in PRESETS.values()
    ]


def preset_entry(preset: Preset) -> str:
    """A preset in a few lines for the terminal: its summary, what it sets, and its pipeline."""
    name = f"{preset.name} (default)" if preset.name == DEFAULT_PRESET else preset.name
    folded = textwrap.fill(preset.pipeline.replace(",", ", "), WIDTH, break_on_hyphens=False)
    parts = [textwrap.fill(preset.summary, WIDTH - 2), f"sets {settings(preset)}", folded.replace(", ", ",")]
    return "\n".join([name, textwrap.indent("\n".join(parts), "  ")])


def preset_page(preset: Preset) -> str:
    """A preset in full for the terminal: the same, when to use it, and its table of old and new."""
    paragraphs = preset.about.split("\n\n")
    about = [
        one if one.startswith(" ") else textwrap.fill(" ".join(one.split()), WIDTH) for one in paragraphs
    ]
    table = "\n".join(f"  {old}\n      {now}" for old, now in preset.table)
    return "\n\n".join(filter(None, [preset_entry(preset), *about, table]))


def settings(preset: Preset) -> str:
    """`precision = "fp16", tolerance = 0.001`, as a file would have them."""
    return ", ".join(f"{name.replace('_', '-')} = {to_text(v)}" for name, v in preset.defaults.items())


def page(kind: type[Pass]) -> str:
    """One pass as Markdown: why, options with types and defaults, example, exactness, refusals."""
    why, sections = _documentation(kind)
    package = origin(kind)
    texts = entries(kind.__doc__ or "", "Options")
    declines = sections.get("Declines") or _bullets(refusals(kind))
    if floor := kind.requires.opset:
        declines = "\n".join([*declines.splitlines(), f"- a model below opset {floor}"])
    using = f" (`{render([kind(**kind.example)])}`)" if kind.example else ""
    parts = [
        f"## {kind.name}",
        f"From {package}, not a part of rewriter." if package else "",
        why,
        f"FP32 result: {exactness_text(kind.exactness)} ({kind.exactness.source}).",
        _bullets(_option(option, texts.get(option.name, "")) for option in options_of(kind).values()),
        f"It declines, and says on which node:\n\n{declines}" if declines else "",
        f"Before{using}:\n\n```\n{with_header(kind.before)}\n```",
        f"After:\n\n```\n{with_header(kind.after)}\n```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def summary(kind: type[Pass]) -> str:
    """The first sentence of the pass's docstring."""
    first = " ".join(_documentation(kind)[0].split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", first)[0]


def exactness_text(exactness: Exactness) -> str:
    """`bit-equal`, or the tolerance."""
    return f"within {exactness.tolerance:.2g}" if exactness.tolerance else "bit-equal"


def refusals(kind: type[Pass]) -> list[str]:
    """The reasons for which a pass declines, as its source file states them.

    Parts that depend on the model are shown as `...`.
    """
    tree = ast.parse(inspect.getsource(sys.modules[kind.__module__]))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return list(dict.fromkeys(text for call in calls for text in _reasons(call)))


def _reasons(call: ast.Call) -> Iterator[str]:
    if not (isinstance(call.func, ast.Name) and call.func.id == "Refusal"):
        return
    named = (keyword.value for keyword in call.keywords if keyword.arg == "reason")
    reason = call.args[1] if len(call.args) > 1 else next(named, None)
    if isinstance(reason, ast.Constant) and isinstance(reason.value, str):
        yield reason.value
    elif isinstance(reason, ast.JoinedStr):
        yield "".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in reason.values)


def _documentation(kind: type[Pass]) -> tuple[str, dict[str, str]]:
    """The docstring's text and its sections."""
    why, *rest = _SECTION.split(inspect.cleandoc(kind.__doc__ or ""))
    sections = zip(rest[::2], rest[1::2], strict=True)
    return why.strip(), {title: textwrap.dedent(body).strip() for title, body in sections}


def _option(option: PassOption, text: str) -> str:
    default = option.default_text or "nothing"
    return f"`{option.name}` ({option.type_text}; default {default})" + (f": {text}" if text else "")


def _bullets(texts: Iterable[str]) -> str:
    return "\n".join(f"- {text}" for text in texts)
