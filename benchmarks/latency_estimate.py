"""Compares estimated latencies with measured engines, and repeats the fit of the recorded costs.

    python benchmarks/latency_estimate.py FOLDER [--work WORK] [--json FILE]

FOLDER has NAME.onnx of the models of side_by_side.json. The latencies of `fp32` and `fix` there are the measured ones;
for models that are not in it, FILE keeps those of earlier runs. WORK is that benchmark's folder. With it, the estimated
costs of its plans (WORK/NAME/VARIANT.plan) relative to `fix` are compared, too. Needs no GPU. `left_out` are estimates by
a fit on the other networks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rewriter
from rewriter.base import Target
from rewriter.model import Model, facts, load
from rewriter.passes.fuse_rms_norm import FuseRmsNorm
from rewriter.pipeline.presets import DEFAULT_OPSETS, DEFAULT_PRESET, PRESETS
from rewriter.plan import Plan, plan_file
from rewriter.planning.costs.estimate import all_terms, priced
from rewriter.planning.costs.node_times import LOW_US, MORE_US
from rewriter.planning.costs.prices import Prices

ENGINES = Path(__file__).with_name("side_by_side.json")
TARGET = Target.parse("tensorrt-rtx")
LOWERING = frozenset({"rescale", "compensate-rounding", "transpose-convs", "mixed-precision"})
FITTED = tuple(name for name in LOW_US if name != "attention")
Floats = NDArray[np.float64]


def measured(earlier: Path | None) -> dict[str, dict[str, float]]:
    """Latency by model and variant; for models without one, that of `earlier` results of this script."""
    found: dict[str, dict[str, float]] = {}
    for row in json.loads(ENGINES.read_text())["rows"]:
        if row.get("engine", {}).get("latency_us"):
            found.setdefault(row["model"], {})[row["variant"]] = row["engine"]["latency_us"]
    if earlier is not None and earlier.exists():
        for row in json.loads(earlier.read_text())["rows"]:
            found.setdefault(row["model"], {"fix": row["fp16_us"], "fp32": row["fp32_us"]})
    return found


def structured(path: Path) -> Model:
    """The model that plans describe, without exponents of `rescale`, which do not change the nodes."""
    names = (
        step for step in PRESETS[DEFAULT_PRESET].pipeline.split(",") if step.split("{")[0] not in LOWERING
    )
    opset = max(DEFAULT_OPSETS["fp16"], FuseRmsNorm().opset_for(load(path), TARGET))
    return rewriter.fix(
        path, passes=",".join(names), precision="fp32", opset=opset, target=str(TARGET), verify=False
    ).model


def rows(
    folder: Path, work: Path | None, earlier: Path | None
) -> Iterator[tuple[dict[str, Any], Counter[str]]]:
    """Each model's estimates with its measured latencies, and the terms of its cost."""
    for name, times in measured(earlier).items():
        path = folder / f"{name}.onnx"
        if not path.exists() or not {"fp32", "fix"} <= times.keys():
            continue
        model = structured(path)
        known = facts.infer(model)
        prices, total = priced(model, known, TARGET), Counter[str]()
        for terms in all_terms(model, known):
            total.update(terms)
        low = prices.total_us(Plan("fp16"))
        high = low + sum(prices.own.values()) + sum(one.us for one in prices.attentions)
        row = {"model": name, "fp16_us": times["fix"], "fp32_us": times["fp32"]}
        row |= {"fp16_ratio": round(low / times["fix"], 2), "fp32_ratio": round(high / times["fp32"], 2)}
        yield row | (dict(_plans(work / name, prices, times)) if work else {}), total


def _plans(work: Path, prices: Prices, times: dict[str, float]) -> Iterator[tuple[str, list[float]]]:
    """Latency relative to `fix`, estimated and measured, of each variant with a plan."""
    if not (work / "fix.plan").exists():
        return
    base = prices.total_us(plan_file.read(work / "fix.plan"))
    for path in sorted(work.glob("*.plan")):
        if path.stem != "fix" and path.stem in times:
            estimate = prices.total_us(plan_file.read(path)) / base
            yield path.stem, [round(estimate, 3), round(times[path.stem] / times["fix"], 3)]


def fitted(of: Floats, wanted: Floats, unit: Floats) -> Floats:
    """Non-negative coefficients with the smallest squared error, each row in its own unit."""
    scale = np.maximum(of.max(axis=0), 1e-30)
    found: Floats = nnls(of / scale / unit[:, None], wanted / unit)[0] / scale
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found, table = map(list, zip(*rows(arguments.folder, arguments.work, arguments.json), strict=True))
    low, high = (np.asarray([row[key] for row in found]) for key in ("fp16_us", "fp32_us"))
    of = np.asarray([[terms[name] for name in FITTED] for terms in table], np.float64)
    rest = low - np.asarray([LOW_US["attention"] * terms["attention"] for terms in table])
    extras = (*MORE_US, "ragged", "attention")
    more = np.asarray([[terms[name] for name in extras] for terms in table], np.float64)
    for index, row in enumerate(found):
        others = np.arange(len(found)) != index
        guess = of[index] @ fitted(of[others], rest[others], low[others]) + low[index] - rest[index]
        row["fp16_ratio_left_out"] = round(float(guess / low[index]), 2)
        guess = low[index] + more[index] @ fitted(more[others], (high - low)[others], high[others])
        row["fp32_ratio_left_out"] = round(float(guess / high[index]), 2)
        print(row)
    fit = {
        "fp16_us": dict(zip(FITTED, fitted(of, rest, low).tolist(), strict=True)),
        "fp32_extra_us": dict(zip(extras, fitted(more, high - low, high).tolist(), strict=True)),
    }
    print(fit)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": found, "fit": fit}, indent=1) + "\n")


if __name__ == "__main__":
    main()
