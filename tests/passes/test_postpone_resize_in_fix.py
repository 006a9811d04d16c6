"""postpone-resize as a part of `fix`: a head as torch writes it, plans, and a real build."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from graphs import ops, random_feeds
from onnx import TensorProto, numpy_helper
from resized import LINEAR

from rewriter.jobs.fix import api
from rewriter.model import Model, load
from rewriter.pipeline.presets import PRESETS

LEVELS = {"a": (4, 16), "b": (6, 8), "c": (5, 4), "d": (8, 2)}


def _head(batch: str = "1") -> Model:
    """Four levels as torch exports SegFormer's head: sizes computed, coarse ones first, then Relu."""
    parts = [
        f"n{x} = Shape({x}) h{x} = Slice(n{x}, zero, two) s{x} = Concat<axis = 0>(h{x}, size)"
        f" r{x} = {LINEAR}({x}, , , s{x})"
        for x in LEVELS
    ]
    inputs = ", ".join(f"float[{batch},{c},{s},{s}] {x}" for x, (c, s) in LEVELS.items())
    rng = np.random.default_rng(3)
    weights = {"w": rng.standard_normal((4, 23, 1, 1)), "bias": rng.standard_normal(4)}
    body = f"""<ir_version: 8, opset_import: ["" : 16]> g ({inputs}) => (float[{batch},4,16,16] y)
        <int64[2] size = {{16, 16}}, int64[1] zero = {{0}}, int64[1] two = {{2}}> {{
            {" ".join(parts)}
            j = Concat<axis = 1>(rd, rc, rb, ra)
            [mix] m = Conv<kernel_shape = [1, 1]>(j, w, bias)
            y = Relu(m)
        }}"""
    source = onnx.parser.parse_model(body)
    source.graph.initializer.extend(
        numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()
    )
    return load(source)


FP16_PRESETS = ["trt-fp16", "trt-fp16-rescaled", "accurate"]


@pytest.mark.parametrize("preset", FP16_PRESETS)
def test_presets_for_fp16_have_it_before_ranges_are_measured(preset: str) -> None:
    names = PRESETS[preset].pipeline.split(",")
    assert names.index("postpone-resize") < next(i for i, n in enumerate(names) if n.startswith("rescale"))


def _fixed(**options: Any) -> Any:
    before = _head()
    return api.fix(before.whole(), inputs=[random_feeds(before, seed) for seed in range(3)], **options)


def test_fix_shortens_the_head() -> None:
    result = _fixed(build=False)
    assert result.verdict.passed
    left = ops(load(result.proto))
    assert (left.count("Conv"), left.count("Resize"), "Concat" in left) == (4, 3, False)
    convs = [node for node in result.proto.graph.node if node.op_type == "Conv"]
    types = {t.name: t.data_type for t in result.proto.graph.initializer}
    assert {types[node.input[1]] for node in convs} == {TensorProto.FLOAT16}


def test_a_plan_fits_the_shortened_head_again(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    first = _fixed(verify=False, save_plan=plan)
    assert _fixed(verify=False, plan=plan).proto.SerializeToString() == first.proto.SerializeToString()


def test_a_kept_conv_stays_by_the_saved_plan_too(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    first = _fixed(verify=False, save_plan=plan, keep_fp32=["mix"])
    assert ops(load(first.proto)).count("Conv") == 1
    assert _fixed(verify=False, plan=plan).proto.SerializeToString() == first.proto.SerializeToString()


@pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason='needs pip install "rewriter[rtx]"'
)
def test_tensorrt_builds_the_shortened_head() -> None:
    result = _fixed()
    build = next(check for check in result.verdict.checks if check.name == "build")
    assert build.passed
    assert "types as planned" in build.summary
