"""Checks the committed cases against cases.toml: `python models/check.py [NAME ...]`. Needs no torch.

Every model must pass onnx.checker, be finite in FP32 on ONNX Runtime, have the counted patterns, and give the naive FP16
errors of the table. `--full DIR` checks the `full` entries of models that `build.py --full --samples` wrote to DIR.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import inliner

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # so that `models` imports when this file is run as a script

from models import measure  # noqa: E402
from models.common import graphs  # noqa: E402


def norm_counts(model: onnx.ModelProto) -> collections.Counter[str]:
    """Counts decomposed norms, Sqrt(ReduceMean(square) + epsilon), by kind: the axes and a Sub before the square decide.

    Local functions are inlined first, so a norm that is called twice counts twice.
    """
    counts: collections.Counter[str] = collections.Counter()
    model = inliner.inline_local_functions(model) if model.functions else model
    for graph in graphs(model.graph):
        makers = {name: node for node in graph.node for name in node.output}
        constants = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
        for root in (node for node in graph.node if node.op_type == "Sqrt"):
            shifted = makers.get(root.input[0])
            means = [makers[name] for name in getattr(shifted, "input", ()) if name in makers]
            for mean in (node for node in means if node.op_type == "ReduceMean"):
                square = makers.get(mean.input[0])
                base = makers.get(square.input[0]) if square is not None else None
                axes = [list(a.ints) for a in mean.attribute if a.name == "axes"] or [
                    list(constants[mean.input[1]])
                ]
                centred = base is not None and base.op_type == "Sub"
                counts[
                    "rms_norms" if not centred else "channel_layer_norms" if axes == [[1]] else "layer_norms"
                ] += 1
    return counts


def op_counts(model: onnx.ModelProto) -> collections.Counter[str]:
    """Counts nodes by op type, inner graphs and function bodies included."""
    bodies = [*graphs(model.graph), *model.functions]
    return collections.Counter(node.op_type for body in bodies for node in body.node)


def naive_error(
    case: Mapping[str, Any], model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], fix: str = ""
) -> float:
    """The naive FP16 error of the worst output, NaN if any is; with `fix`, the error after that cheapest repair."""
    keep = measure.NORM_OPS if fix == "islands" else ()
    want = measure.run(model, feeds)
    got = measure.run(measure.naive_fp16(measure.clamped(model) if fix == "clamp" else model, keep), feeds)
    if case.get("compare") == "detections":
        return measure.detections_error(got, want)
    every = [measure.relative_error(got[name], want[name]) for name in want if want[name].dtype.kind == "f"]
    return float(np.max(every))


def findings(
    case: Mapping[str, Any],
    expected: Mapping[str, Any],
    model: onnx.ModelProto,
    feeds: Mapping[str, np.ndarray],
) -> Iterator[tuple[str, object, bool]]:
    """Yields (name, measured value, True if as expected) for every expectation in `expected`."""
    onnx.checker.check_model(model, full_check=True)
    outputs = measure.run(model, feeds)
    finite = all(np.isfinite(v.astype(np.float64)).all() for v in outputs.values() if v.dtype.kind == "f")
    yield "finite in FP32", finite, finite
    norms, ops = norm_counts(model), op_counts(model)
    for kind in ("layer_norms", "channel_layer_norms", "rms_norms"):
        yield kind, norms[kind], norms[kind] == expected.get(kind, 0)
    for op, count in expected.get("ops", {}).items():
        yield op, ops[op], ops[op] == count
    naive = naive_error(case, model, feeds)
    yield (
        f"naive FP16 ({expected['naive_fp16']})",
        f"{naive:.2e}",
        np.isnan(naive) == (expected["naive_fp16"] == "nan"),
    )
    if "naive_fp16_error_above" in expected:
        yield "naive above", f"{naive:.2e}", naive > expected["naive_fp16_error_above"]
    if "naive_fp16_error_below" in expected:
        yield "naive below", f"{naive:.2e}", naive < expected["naive_fp16_error_below"]
    if "fixed_error_below" in expected:
        fixed = naive_error(case, model, feeds, expected["fixed_by"])
        yield f"fixed by {expected['fixed_by']}", f"{fixed:.2e}", fixed < expected["fixed_error_below"]
    if "elementwise_error_above" in expected:
        worst = np.max(list(measure.errors(model, feeds).values()))
        yield "element by element", f"{worst:.2e}", worst > expected["elementwise_error_above"]
    if "random_naive_fp16" in expected:
        yield from random_findings(expected["random_naive_fp16"], model, feeds)


def random_findings(
    kind: str, model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, object, bool]]:
    """Yields the naive outcome on uniform and on normal random inputs; the only kind in use is "nan"."""
    rng = np.random.default_rng(0)
    for draw in (rng.random, rng.standard_normal):
        noise = {name: draw(array.shape).astype(array.dtype) for name, array in feeds.items()}
        finite = all(np.isfinite(v).all() for v in measure.run(model, noise).values())
        worst = np.max(list(measure.errors(model, noise).values()))
        yield (
            f"naive FP16 on {draw.__name__} noise",
            f"{worst:.2e}",
            finite and np.isnan(worst) == (kind == "nan"),
        )


def main() -> None:
    """Checks the named cases (default: all); exits with 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--full", type=Path, metavar="DIR")
    args = parser.parse_args()
    table = tomllib.loads((HERE / "cases.toml").read_text())
    wrong = 0
    for name in args.names or table:
        case = table[name]
        if args.full and "full" not in case:
            continue
        expected = case["full"] if args.full else case
        model = onnx.load((args.full / name).with_suffix(".onnx") if args.full else HERE / case["file"])
        feeds = dict(np.load(args.full / name / "0.npz" if args.full else HERE / case["inputs"]))
        for what, measured, right in findings(case, expected, model, feeds):
            wrong += not right
            print(f"{'ok ' if right else 'BAD'}  {name:15}  {what}: {measured}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
