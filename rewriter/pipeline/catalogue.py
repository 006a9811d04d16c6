"""The passes and the presets for people: lists, and a page each. docs/catalogue.py makes files of them."""

import inspect
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from rewriter.passes.base import Exactness, Pass, Stage, WeightPass
from rewriter.pipeline.presets import DEFAULT_PRESET, PRESETS, Preset
from rewriter.pipeline.schema import entries, expected, to_text
from rewriter.pipeline.text import options_of, own_passes, render, value_text

GROUPS: Mapping[Stage, str] = {
    Stage.STRUCTURE: "structure",
    Stage.RANGES: "after ranges were measured",
    Stage.LOWERING: "applies the plan",
}
"""Titles of the stages."""

OF_WEIGHTS = (
    "- nodes that --keep-fp32, --keep-fp32-op or an edited plan names",
    "- weights that are quantised, or that belong to an enclosing graph",
)
"""Declined by every pass that replaces weights."""

WIDTH = 78
_SECTION = re.compile(r"^(Options|Declines):$", re.MULTILINE)


def passes() -> list[dict[str, Any]]:
    default = {step.name for step in PRESETS[DEFAULT_PRESET].steps}
    return [
        {
            "name": kind.name,
            "default": kind.name in default,
            "group": GROUPS[kind.stage],
            "exactness": exactness_text(kind.exactness),
            "summary": summary(kind),
            "options": {
                o.name: {"type": expected(o.kind), "default": o.default} for o in options_of(kind).values()
            },
        }
        for kind in own_passes().values()
    ]


def presets() -> list[dict[str, Any]]:
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
    folded, *parts = (
        textwrap.fill(text, WIDTH - 2, break_on_hyphens=False)
        for text in (preset.pipeline.replace(",", ", "), preset.summary, f"sets {settings(preset)}")
    )
    parts.append(folded.replace(", ", ","))
    return "\n".join([name, textwrap.indent("\n".join(parts), "  ")])


def preset_page(preset: Preset) -> str:
    """A preset in full for the terminal: the same, when to use it, and its table of old and new."""
    paragraphs = preset.about.split("\n\n")
    filled = (textwrap.fill(" ".join(part.split()), WIDTH) for part in paragraphs)
    about = [part if part.startswith(" ") else text for part, text in zip(paragraphs, filled, strict=True)]
    table = "\n".join(f"  {old}\n      {now}" for old, now in preset.table)
    return "\n\n".join(filter(None, [preset_entry(preset), *about, table]))


def settings(preset: Preset) -> str:
    """`precision = "fp16", tolerance = 0.001`, as a file would have them."""
    return ", ".join(f"{name.replace('_', '-')} = {to_text(v)}" for name, v in preset.defaults.items())


def page(kind: type[Pass]) -> str:
    """One pass as Markdown: why, options with types and defaults, example, exactness, refusals."""
    why, sections = _documentation(kind)
    texts = entries(kind.__doc__ or "", "Options")
    options = [
        f"- `{o.name}` ({expected(o.kind)}; default {value_text(o.default)}): {texts.get(o.name, '')}"
        for o in options_of(kind).values()
    ]
    declines = sections.get("Declines", "").splitlines()
    if issubclass(kind, WeightPass):
        why += "\n\nThe new weights stay in memory until they are lowered, even if they were external data."
        declines += OF_WEIGHTS
    if floor := kind.requires.opset:
        declines.append(f"- a model below opset {floor}")
    using = f" (`{render([kind(**kind.example_options)])}`)" if kind.example_options else ""
    parts = [
        f"## {kind.name}",
        why,
        f"FP32 result: {exactness_text(kind.exactness)} ({kind.exactness.source}).",
        "\n".join(options),
        "It declines, and says on which node:\n\n" + "\n".join(declines) if declines else "",
        f"Example{using}:\n\n```diff\n{textwrap.dedent(kind.example).strip(chr(10))}\n```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def summary(kind: type[Pass]) -> str:
    first = " ".join(_documentation(kind)[0].split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", first)[0]


def exactness_text(exactness: Exactness) -> str:
    """`bit-equal`, or the tolerance."""
    return f"within {exactness.tolerance:.2g}" if exactness.tolerance else "bit-equal"


def _documentation(kind: type[Pass]) -> tuple[str, dict[str, str]]:
    """The docstring's text and its sections."""
    why, *rest = _SECTION.split(inspect.cleandoc(kind.__doc__ or ""))
    sections = zip(rest[::2], rest[1::2], strict=True)
    return why.strip(), {title: textwrap.dedent(body).strip() for title, body in sections}
