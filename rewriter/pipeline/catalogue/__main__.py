"""Writes the generated pages, or checks them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from rewriter.pipeline.catalogue import configuration, hazards, keywords, passes, presets

ROOT = Path(__file__).resolve().parents[3]

PAGES: dict[Path, Callable[[str], str]] = {
    Path("passes", "README.md"): lambda _: passes.catalogue(),
    Path("docs", "trt11-migration.md"): lambda _: presets.migration_page(),
    Path("docs", "findings.md"): lambda _: hazards.page(),
    Path("docs", "configuration.md"): configuration.with_table,
    Path("rewriter", "pipeline", "keywords.py"): lambda _: keywords.module(),
}
"""Pages of a checkout, which installed packages do not have; each is made from what it holds now."""


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Write the pages; with `--check` compare them instead: 0 if all are fresh, 1 if one is stale."""
    stale = False
    for name, make in PAGES.items():
        path = root / name
        now = path.read_text(encoding="utf-8") if path.is_file() else ""
        if now == make(now):
            continue
        if "--check" in arguments:
            sys.stderr.write(f"{path} is stale: run `python -m rewriter.pipeline.catalogue`\n")
            stale = True
        else:
            path.write_text(make(now), encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
