"""Presets: the table of `rewriter presets`, a preset's page, and the page about TensorRT 11."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from rewriter.pipeline import migration
from rewriter.pipeline.presets import DEFAULT_PRESET, PRESETS, Preset
from rewriter.pipeline.reader import to_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDTH = 78


def as_list() -> list[dict[str, Any]]:
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


def overview() -> RenderableType:
    """Every preset: what it is, what it sets, and the pipeline that it stands for."""
    from rich.console import Group
    from rich.text import Text

    parts = []
    for preset in PRESETS.values():
        summary = textwrap.indent(textwrap.fill(preset.summary, WIDTH - 2), "  ")
        name = f"{preset.name} (default)" if preset.name == DEFAULT_PRESET else preset.name
        lines = [name, summary, f"  sets {_defaults(preset)}", _folded(preset.pipeline)]
        parts.append("\n".join(lines) + "\n")
    return Group(Text("\n".join(parts)), Text("rewriter presets show NAME tells more."))


def page(preset: Preset) -> RenderableType:
    """One preset in full."""
    from rich.console import Group
    from rich.text import Text

    about = "\n\n".join(map(_unfolded, preset.about.split("\n\n")))
    head = f"{preset.name}: {preset.summary}\n\n{about}\n\nSets {_defaults(preset)}. Pipeline:\n"
    parts: list[RenderableType] = [Text(head + _folded(preset.pipeline))]
    if preset.table:
        parts += ["", _rich_table(preset)]
    return Group(*parts)


def migration_page() -> str:
    """docs/trt11-migration.md."""
    preset = PRESETS["trt11-migrate"]
    table = [f"| {' | '.join(migration.HEAD)} |", "|---|---|"]
    table += [f"| {_code(old)} | {now} |" for old, now in preset.table]
    return "\n".join(
        [
            "# From `trtexec --fp16` to TensorRT 11",
            "",
            "Written by `python -m rewriter.pipeline.catalogue`; edit `rewriter/pipeline/migration.py`.",
            "`rewriter presets show trt11-migrate` prints the same.",
            "",
            preset.about,
            "",
            f"The preset sets {_defaults(preset)}. Its pipeline is that of `trt-fp16` without\n"
            "the passes that rewrite products for faster or more accurate kernels (docs/accuracy.md).",
            "",
            *table,
            "",
            f"The removed flags: [NVIDIA's migration guide]({migration.SOURCE}).",
            "NVIDIA's tool is AutoCast: [comparison.md](comparison.md) compares it.\n"
            "[recipes.md](recipes.md) leads from the export to the engine, project by project.",
            "",
        ]
    )


def _defaults(preset: Preset) -> str:
    """`precision = "fp16", tolerance = 0.001`, as a file would have them."""
    return ", ".join(f"{name.replace('_', '-')} = {to_text(v)}" for name, v in preset.defaults.items())


def _unfolded(paragraph: str) -> str:
    """A paragraph as one line, for the terminal to fold; what is indented stays as it is."""
    return paragraph if paragraph.startswith(" ") else " ".join(paragraph.split())


def _folded(pipeline: str) -> str:
    lines = textwrap.wrap(pipeline.replace(",", ", "), WIDTH, break_on_hyphens=False, break_long_words=False)
    return textwrap.indent("\n".join(lines).replace(", ", ","), "  ")


def _rich_table(preset: Preset) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for column in migration.HEAD:
        table.add_column(column, overflow="fold", ratio=1)
    for old, now in preset.table:
        table.add_row(old, now)
    return table


def _code(flags: str) -> str:
    return ", ".join(f"`{flag}`" for flag in flags.split(", "))
