"""Presets: what they stand for, what they set, and that `fix` does it."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_lines import quick
from graphs import graph
from paths import MODELS

from rewriter import api
from rewriter.passes import ALL
from rewriter.passes.base import Pass
from rewriter.pipeline.options import KEYS, FixOptions
from rewriter.pipeline.presets import OTHERWISE, PRESETS, preset_named
from rewriter.pipeline.schema import declarations, read
from rewriter.pipeline.text import render

MATMUL = "g (float[4,64] x, float[64,64] w) => (float[4,64] y) { y = MatMul(x, w) }"


def data(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((4, 64)).astype(np.float32),
        "w": rng.standard_normal((64, 64)).astype(np.float32),
    }


@pytest.fixture
def matmul() -> onnx.ModelProto:
    """One MatMul of two inputs."""
    return graph(MATMUL).proto


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_a_preset_sets_what_fix_leaves_to_it(preset: Any) -> None:
    """Every default is an argument of `fix` that is None unless given, with a value for a file."""
    declared = declarations(FixOptions)
    for name, value in preset.defaults.items():
        assert declared[name].default is None
        assert read(KEYS[name], value, folder=Path()) == value
    assert render(preset.steps) == preset.pipeline
    assert preset.about


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.name)
def test_a_pass_is_in_a_preset_or_stands_alone(kind: type[Pass]) -> None:
    named = {type(step) for preset in PRESETS.values() for step in preset.steps}
    assert (kind in named) != kind.stands_alone, "either a preset names it, or it has `stands_alone = True`"


def test_what_is_given_comes_before_the_preset() -> None:
    accurate = preset_named("accurate")
    assert accurate.choose("max_latency_cost", 0.5) == 0.5
    assert accurate.choose("max_latency_cost") == 0.16
    assert accurate.choose("io") == OTHERWISE["io"]


def test_accurate_spends_a_budget_with_fp16_accumulators(matmul: onnx.ModelProto) -> None:
    result = api.fix(matmul, preset="accurate", inputs=[data()], build=False)
    assert result.verdict is not None and result.verdict.passed
    told = " ".join(check.summary for check in result.verdict.checks)
    assert "at most 0.16 more latency: relative-l2" in told and "sums in FP16" in told


def test_accurate_takes_an_error_in_place_of_its_budget() -> None:
    """Both weights are 1 in FP16, and the difference is all that is left."""
    text = """
        g (float[4,8] x) => (float[4,2] y)
        <float[8,2] w = {1.0004,1.0004, -1.0001,-1.0001, 0,0, 0,0, 0,0, 0,0, 0,0, 0,0}> {
            m = MatMul(x, w) y = Relu(m) }"""
    ones = np.ones((4, 8), np.float32)
    result = api.fix(graph(text).proto, preset="accurate", tolerance=1e-3, inputs=[{"x": ones}], build=False)
    assert result.verdict is not None and not result.proven, result.ending
    assert "TF32 off" in result.ending


def test_a_plan_or_a_pipeline_needs_no_budget_of_the_preset(matmul: onnx.ModelProto, tmp_path: Path) -> None:
    api.fix(matmul, inputs=[data()], verify=False, save_plan=tmp_path / "plan.json")
    api.fix(matmul, preset="accurate", plan=tmp_path / "plan.json", verify=False)
    api.fix(matmul, preset="accurate", passes="clean-casts", verify=False)


def test_migrate_keeps_inputs_and_outputs_and_names_the_command_of_trtexec_11(tmp_path: Path) -> None:
    model = MODELS / "conv_clip.onnx"
    out = tmp_path / "fixed.onnx"
    options = ("--preset", "trt11-migrate", "--inputs", model.with_suffix(".npz"), "--no-build")
    code, told, error = quick("fix", model, "-o", out, *options)
    assert code == 0, error
    assert f"trtexec --onnx={out}" in told.replace("\n", "")
    assert "--stronglyTyped" not in told
    before, after = onnx.load(model).graph, onnx.load(out).graph
    assert list(before.input) == list(after.input)
    assert list(before.output) == list(after.output)
    assert onnx.TensorProto.FLOAT16 in {t.data_type for t in after.initializer}


def test_presets_are_listed_with_their_pipelines() -> None:
    code, out, _ = quick("presets", COLUMNS="80")
    assert code == 0
    packed = re.sub(r"\s", "", out)
    for preset in PRESETS.values():
        assert preset.name in {line.removesuffix(" (default)") for line in out.splitlines()}
        assert re.sub(r"\s", "", preset.pipeline) in packed
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_shown_in_full(name: str) -> None:
    code, out, _ = quick("presets", "show", name)
    assert code == 0
    assert out.startswith(name) and PRESETS[name].summary[:60] in out
    assert re.sub(r"\s", "", PRESETS[name].pipeline) in re.sub(r"\s", "", out)


def test_the_table_of_old_flags_is_shown_and_on_the_page() -> None:
    shown = re.sub(r"\s", "", quick("presets", "show", "trt11-migrate")[1])
    page = (MODELS.parent / "docs" / "trt11-migration.md").read_text(encoding="utf-8")
    for old, now in PRESETS["trt11-migrate"].table:
        assert re.sub(r"\s", "", now).split("`")[0] in shown, old
        assert now in page


def test_what_the_table_says_of_our_options_is_true() -> None:
    """Every option of ours that the table names is one of `rewriter fix`, and every preset exists."""
    theirs = {"--memPoolSize", "--fp16", "--int8"}
    known = quick("fix", "--help")[1]
    for _, now in PRESETS["trt11-migrate"].table:
        for flag in re.findall(r"--[\w-]+", now):
            assert flag in theirs or flag in known, flag
        for name in re.findall(r"--preset (\S+)", now):
            preset_named(name)
