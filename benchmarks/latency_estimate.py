"""The recorded costs against measured engines: estimated and measured latency, and the fit made again.

    python benchmarks/latency_estimate.py FOLDER [--json FILE]

FOLDER as for gpu_cases.py (NAME.onnx, or NAME/NAME.onnx), whose results (gpu_cases.json) are the measured side.
Needs no GPU. `left_out` are estimates by a fit on the other networks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

import rewriter
from rewriter import costs, facts
from rewriter.model import Model
from rewriter.plan import Plan

ENGINES = Path(__file__).with_name("gpu_cases.json")
Floats = NDArray[np.float64]


def features(model: Model) -> tuple[float, float, float]:
    """Matrix operators, their multiply-adds, and the elements that all move."""
    graph, known = model.proto.graph, facts.infer(model)
    shapes = {name: found.shape for name, found in known.main.items()}
    constants = {t.name for t in graph.initializer}
    constants |= {n.output[0] for n in graph.node if n.op_type == "Constant"}
    nodes = [n for n in graph.node if n.op_type != "Constant" and n.output[0] in shapes]
    counted = [costs.products(n, shapes) for n in nodes]
    moved = sum(costs.moved_elements(n, shapes, constants) for n in nodes if n.op_type not in costs.UNMOVED)
    return float(sum(bool(kind) for kind, _ in counted)), sum(p for _, p in counted), float(moved)


def everything(model: Model, prices: costs.Prices) -> tuple[float, float]:
    """Estimated latency with all in FP16, and with all in FP32."""
    low = prices.total_us(Plan("fp16"))
    return low, low + sum(prices.extra.values())


def rows(folder: Path) -> Iterator[tuple[dict[str, Any], tuple[float, float, float]]]:
    measured: dict[str, dict[str, float]] = {}
    for row in json.loads(ENGINES.read_text())["rows"]:
        if row["latency_us"]:
            measured.setdefault(row["model"], {})[row["variant"]] = row["latency_us"]
    for name, times in measured.items():
        path = next(
            (p for p in (folder / f"{name}.onnx", folder / name / f"{name}.onnx") if p.exists()), None
        )
        if path is None or not {"fp32", "naive fp16"} <= times.keys():
            continue
        model = rewriter.fix(path, preset="structure-only", verify=False).model
        low, high = everything(model, costs.Prices.of(model, facts.infer(model)))
        row = {"model": name, "fp16_us": times["naive fp16"], "fp32_us": times["fp32"]}
        row |= {"fp16_ratio": round(low / row["fp16_us"], 2), "fp32_ratio": round(high / row["fp32_us"], 2)}
        yield row, features(model)


def fitted(of: Floats, wanted: Floats, unit: Floats) -> Floats:
    """Non-negative coefficients with the least squared error in the unit of each row."""
    found: Floats = nnls(of / unit[:, None], wanted / unit)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found, table = map(list, zip(*rows(arguments.folder), strict=True))
    of = np.asarray(table, np.float64)
    low, high = (np.asarray([row[key] for row in found]) for key in ("fp16_us", "fp32_us"))
    for index, row in enumerate(found):
        rest = np.arange(len(found)) != index
        guess = of[index] @ fitted(of[rest], low[rest], low[rest])
        row["fp16_ratio_left_out"] = round(float(guess / low[index]), 2)
        print(row)
    base, extra = fitted(of, low, low), fitted(of, high - low, high)
    fit = {"columns": ["matrix operators", "multiply-adds", "elements moved"]}
    fit |= {"fp16_us": base.tolist(), "fp32_extra_us": extra.tolist()}
    print(fit)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": found, "fit": fit}, indent=1) + "\n")


if __name__ == "__main__":
    main()
