"""Prints benchmarks/trained.json as the tables of benchmarks/README.md: on a GPU, without one, and the packages' own results.

python benchmarks/trained_table.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("trained.json")
VARIANTS = ("plain", "rules", "fix", "accurate", "autocast", "fp32")

Rows = Mapping[str, Mapping[str, Any]]


def _measured(row: Mapping[str, Any]) -> str:
    error, us = row.get("error"), row.get("us")
    return "-" if us is None else f"{'not finite' if error is None else f'{error:.1e}'}, {us:.0f}"


def on_gpu(found: Rows) -> Iterator[str]:
    """Worst error and latency in microseconds of every variant."""
    yield f"| network | {' | '.join(VARIANTS)} |"
    yield "|" + "---|" * (len(VARIANTS) + 1)
    for name, rows in found.items():
        if "fix" in rows:
            yield f"| {name} | {' | '.join(_measured(rows.get(one, {})) for one in VARIANTS)} |"


def _result(result: Mapping[str, Any]) -> str:
    if not result or "problem" in result:
        return "not judged"
    least = f", IoU {result['least_iou']:.3f} or more" if result["least_iou"] < 1 else ""
    return f"{result['same']} of {result['items']} equal{least}"


def of_packages(found: Rows) -> Iterator[str]:
    """The packages' own results with engines in place of their networks: how many are equal to FP32's."""
    shown = ("plain", "fix", "accurate", "fp32")
    yield f"| network | results | {' | '.join(shown)} |"
    yield "|" + "---|" * (len(shown) + 2)
    for name, rows in found.items():
        if results := rows.get("engine_results"):
            cells = (str(results[one]["same"]) if one in results else "-" for one in shown)
            yield f"| {name} | {results['fix']['items']} | {' | '.join(cells)} |"


def on_cpu(found: Rows) -> Iterator[str]:
    """Ending, cost and the package's own result of every network."""
    yield "| network | exit, ending | emulated error | FP32 nodes | user s, MB | the package's own result |"
    yield "|---|---|---|---|---|---|"
    for name, rows in found.items():
        if row := rows.get("cpu"):
            cells = (
                f"{row['exit']}, {row['ending']}",
                f"{row['error']:.1e}",
                str(row["fp32_nodes"]),
                f"{row['user_s']}, {row['mb']}",
                _result(rows.get("result", {})),
            )
            yield f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    networks = json.loads(FILE.read_text())
    print("\n".join([*on_gpu(networks), "", *of_packages(networks), "", *on_cpu(networks)]))
