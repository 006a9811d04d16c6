"""Writes the results of the side by side as Markdown: a page next to the JSON, and a part of a README.

    python benchmarks/report.py FOUND.json [--readme README.md]

writes FOUND.md, and the table between the marks of a README, from the JSON alone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.agreement import agreement_text
from benchmarks.comparison import worst
from benchmarks.headline import OURS, RIVAL, Row, engine_error, latency, mean, table
from benchmarks.preparation import note_of
from benchmarks.targets import targets_table

BEGIN, END = "<!-- side by side: begin -->", "<!-- side by side: end -->"
"""Marks of the part of benchmarks/README.md that is generated."""


def with_summary(readme: str, found: dict[str, Any]) -> str:
    """A README's text with a new part between the marks."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{summary(found)}\n{END}{after}"


def summary(found: dict[str, Any]) -> str:
    """Machine and versions, the targets, the table of errors and latencies, and the agreement of the emulation."""
    rows = found["rows"]
    parts = [_header(found), targets_table(rows), table(rows), agreement_text(rows, found["default_sums"])]
    return "\n\n".join(parts)


def _header(found: dict[str, Any]) -> str:
    """Machine, versions, and the data of tools and comparisons."""
    known, samples = found["versions"], found["data"]
    house, others = known.get("rewriter's", {}), known.get("other tools'", {})
    ort = house.get("onnxruntime") or house.get("onnxruntime-gpu", "")
    host = " ".join(known[key] for key in ("gpu", "library", "version") if known.get(key)) or "no GPU"
    tools = f"AutoCast {others.get('nvidia-modelopt', 'missing')}, ONNX Runtime {ort}"
    note = f" Note: {known['note']}." if known.get("note") else ""
    had = " or ".join(map(str, samples["calibration"]))
    compared = (
        f"Every tool had {had} samples; outputs are compared on one more, which no tool saw."
        if samples["held_out"]
        else f"Every tool had {had} samples; outputs are compared on the first of them."
    )
    return f"{host}; {tools}; commit {known['commit']}.{note} {compared}"


def markdown(found: dict[str, Any]) -> str:
    """The whole page."""
    rows: list[Row] = found["rows"]
    parts = [
        "# Side by side",
        "Written by `benchmarks/side_by_side.py report`; do not edit. Errors are relative L2 of the worst output "
        "against the original in FP32 on ONNX Runtime's CPU, as a set for models that select their rows; `inf` is "
        "not finite. FP32 nodes and Casts as `benchmarks/census.py` defines them. Tool seconds are user seconds.",
        summary(found),
        "## Everything",
        "Versions: " + json.dumps(found["versions"]),
        _table(rows),
        "## Against AutoCast",
        _duel(rows),
    ]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    head = (
        "model",
        "variant",
        "builds",
        "error",
        "emulated: FP32 sums",
        "FP16 sums",
        "us",
        "+-",
        "FP32 nodes",
        "Casts",
        "tool s",
        "MB",
        "note",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        tool, engine = row.get("tool", {}), row.get("engine", {})
        cells = [
            row["model"],
            row["variant"],
            _yes(row.get("builds", False if row.get("made") is False else None)),
            _short(engine_error(row)),
            _short(worst(row.get("emulated_fp32"))),
            _short(worst(row.get("emulated_fp16"))),
            _plain(engine.get("latency_us")),
            _plain(engine.get("spread_us")),
            _plain(row.get("fp32_nodes")),
            _plain(row.get("casts")),
            _plain(tool.get("user_s")),
            _plain(tool.get("peak_mb")),
            _note(row),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _note(row: Row) -> str:
    notes = (note_of(row), row.get("build_note"), row.get("engine", {}).get("note"))
    return next((str(n).strip().splitlines()[-1][:110].replace("|", "/") for n in notes if n), "")


def _duel(rows: Sequence[Row]) -> str:
    """Ratios of ours to AutoCast's for each model, and their geometric means."""
    by = {(r["model"], r["variant"]): r for r in rows}
    models = list(dict.fromkeys(r["model"] for r in rows))
    measures: dict[str, Callable[[Row], float | None]] = {
        "FP32 nodes": lambda r: r.get("fp32_nodes"),
        "Casts": lambda r: r.get("casts"),
        "emulated, FP32 sums": lambda r: worst(r.get("emulated_fp32")),
        "emulated, FP16 sums": lambda r: worst(r.get("emulated_fp16")),
        "error": engine_error,
        "latency": latency,
        "tool s": lambda r: r.get("tool", {}).get("user_s"),
        "tool MB": lambda r: r.get("tool", {}).get("peak_mb"),
    }
    lines = [
        "Ours in AutoCast's; of counts, (ours + 1) / (AutoCast's + 1), for zeros are common. The last line of each "
        "variant is the geometric mean over the models where both were measured.",
        "",
        "| model | variant | " + " | ".join(measures) + " |",
        "|---|---|" + "---|" * len(measures),
    ]
    for variant in OURS:
        ratios: dict[str, list[float]] = {m: [] for m in measures}
        for model in models:
            ours, rival = by.get((model, variant)), by.get((model, RIVAL))
            if not ours or not rival or not ours.get("made"):
                continue
            cells = []
            for title, value in measures.items():
                a, b = value(ours), value(rival)
                one = 1 if title in ("FP32 nodes", "Casts") else 0
                known = (
                    a is not None and b is not None and math.isfinite(a) and math.isfinite(b) and b + one > 0
                )
                if known:
                    ratios[title].append((a + one) / (b + one))
                shown = "" if a is None and b is None else f"{_short(a)} / {_short(b)}"
                cells.append(f"{ratios[title][-1]:.2f} ({shown})" if known else shown)
            lines.append(f"| {model} | {variant} | " + " | ".join(cells) + " |")
        if any(ratios.values()):
            means = [f"**{mean(r):.3f}**" if r else "" for r in ratios.values()]
            lines.append(f"| **geometric mean** | {variant} | " + " | ".join(means) + " |")
    return "\n".join(lines)


def _yes(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2g}" if value < 1 else f"{value:g}"


def _plain(value: object) -> str:
    return "" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path)
    parser.add_argument("--readme", type=Path)
    arguments = parser.parse_args()
    found = json.loads(arguments.json.read_text())
    arguments.json.with_suffix(".md").write_text(markdown(found))
    if arguments.readme:
        arguments.readme.write_text(with_summary(arguments.readme.read_text(), found))


if __name__ == "__main__":
    main()
