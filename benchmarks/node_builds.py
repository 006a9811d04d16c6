"""Whether TensorRT builds single nodes after `fix` that it builds as they came: ONNX's own test cases. Needs no GPU.

    python benchmarks/node_builds.py OUT.json

At most eight cases of each operator with an input or output in FP32, at opset 22 or lower: newer ones run nowhere yet.
OUT.json has the number of cases by what became of them, and those that `fix` refuses or breaks, with the reasons.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rewriter
from rewriter.ir.errors import NativeError
from rewriter.ir.model import Array
from rewriter.runtime.engines.build import BuildOptions, build
from rewriter.runtime.engines.measure import shape_values

EACH, OPSET, IR = 8, 22, 10
"""Most cases of an operator, and the newest opset and IR version that ONNX Runtime has."""

Case = tuple[str, bytes, dict[str, Array]]
FINE, REFUSED, NOT_FIXED, BROKEN = "builds", "does not build as it came", "fix refuses it", "broken"


def cases() -> Iterator[Case]:
    """Name, model and feeds of each case."""
    from onnx.backend.test.case.node import collect_testcases

    by_operator: dict[str, list[Any]] = {}
    for case in collect_testcases(None):
        node = case.model.graph.node[0]
        ports = (*case.model.graph.input, *case.model.graph.output)
        floats = any(port.type.tensor_type.elem_type == TensorProto.FLOAT for port in ports)
        if floats and not node.domain and "expanded" not in case.name:
            by_operator.setdefault(node.op_type, []).append(case)
    for _, found in sorted(by_operator.items()):
        for case in found[:: max(1, len(found) // EACH)][:EACH]:
            model, given = case.model, case.data_sets[0][0]
            model.opset_import[0].version = min(OPSET, model.opset_import[0].version)
            model.ir_version = min(IR, model.ir_version)
            if all(isinstance(one, np.ndarray | np.generic) and one.dtype != object for one in given):
                ports = (port.name for port in model.graph.input)
                yield (
                    case.name,
                    model.SerializeToString(),
                    dict(zip(ports, map(np.asarray, given), strict=False)),
                )


def refusal(path: Path, feeds: dict[str, Array]) -> str:
    """Why TensorRT-RTX builds no engine; "" if it does."""
    shapes = {name: (array.shape,) * 3 for name, array in feeds.items()}
    options = BuildOptions(shapes=shapes, values=shape_values(feeds), library="tensorrt_rtx", engine=None)
    try:
        report = build(path, options, timeout_s=60.0)
    except NativeError as error:
        return error.what
    return "" if report.engine_bytes is not None else report.refusal


def tried(case: Case) -> tuple[str, str, str]:
    """Name of a case, what became of it, and why."""
    name, proto, feeds = case
    with tempfile.TemporaryDirectory() as folder:
        came, fixed = Path(folder) / "came.onnx", Path(folder) / "fixed.onnx"
        came.write_bytes(proto)
        if why := refusal(came, feeds):
            return name, REFUSED, why
        try:
            rewriter.fix(onnx.load(came), fixed, inputs=[feeds], target="tensorrt-rtx", verify=False)
        except rewriter.RewriterError as error:
            return name, NOT_FIXED, str(error)
        why = refusal(fixed, feeds)
        return name, BROKEN if why else FINE, why


def main(out: Path) -> None:
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(tried, cases()))
    counts = Counter(ending for _, ending, _ in rows)
    ours = {name: f"{ending}: {why}" for name, ending, why in rows if ending in (NOT_FIXED, BROKEN)}
    out.write_text(json.dumps({"cases": dict(counts), "ours": ours}, indent=1) + "\n")
    print(dict(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
