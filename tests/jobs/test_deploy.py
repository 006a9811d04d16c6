"""`deploy`: what each script says, and that it runs where its tool is."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import graph
from tables import values

import rewriter
from rewriter.ir.model import Array, save
from rewriter.pipeline.options import Tool
from rewriter.runtime.inputs.samples import Room
from rewriter.runtime.inputs.sizes import room, shape_inputs

RESIZED = """
    g (float[b,3,h,w] x, int64[2] size) => (float[b,4,p,q] y) <int64[1] four = {4}> {
        k = Constant <value = float[4,3,1,1] {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.0,1.1,1.2}> ()
        c = Conv (x, k) p = AveragePool <kernel_shape = [5, 5]> (c) n = Shape <end = 1> (p)
        s = Concat <axis = 0> (n, four, size) y = Resize <mode = "linear"> (p, , , s) }"""
FEEDS: dict[str, Array] = {
    "x": np.random.default_rng(0).random((1, 3, 24, 16), dtype=np.float32),
    "size": np.array([20, 30]),
}


def fixed(folder: Path, tool: Tool, **options: Any) -> rewriter.FixResult:
    source = save(graph(RESIZED), folder / "it's.onnx")
    return rewriter.fix(source, folder / "my fixed.onnx", inputs=FEEDS, deploy=tool, build=False, **options)


def test_the_script_of_python_builds_with_shapes_and_values(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    profile = {"min_shapes": {"size": (1, 2)}, "max_shapes": {"size": (100, 200)}}
    result = fixed(tmp_path, "python", target="tensorrt-rtx", **profile)
    script = tmp_path / "my fixed.build.py"
    assert result.script == script
    text = script.read_text()
    assert "'size': ((1, 2,), (20, 30,), (100, 200,))" in text
    assert "'x': ((1, 3, 8, 8,), (1, 3, 24, 16,), (1, 3, 48, 32,))" in text, "a pool of 5x5 takes no 4x4"
    subprocess.run([sys.executable, script], check=True, env={}, cwd=tmp_path.parent)
    assert (tmp_path / "my fixed.engine").stat().st_size


TRTEXEC = """#!/bin/sh
if [ "$1" = --help ]; then echo "  --stronglyTyped  Create a strongly typed network"; exit; fi
for word in "$@"; do echo "$word" >> arguments; done
"""
"""Writes down what it was called with: there is no trtexec where there is no GPU."""


@values
def test_scripts_of_the_shell_call_trtexec(tool: Tool, engine: str, tmp_path: Path) -> None:
    result = fixed(tmp_path, tool)
    script = tmp_path / "my fixed.build.sh"
    assert result.script == script
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "trtexec"
    program.write_text(TRTEXEC)
    program.chmod(0o755)
    path = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    subprocess.run(["sh", script], check=True, env=path, cwd=tmp_path.parent)
    assert (tmp_path / "arguments").read_text().splitlines() == [
        "--onnx=my fixed.onnx",
        "--stronglyTyped",
        f"--saveEngine={engine}",
        "--minShapes=x:1x3x8x8,size:20x30",
        "--optShapes=x:1x3x24x16,size:20x30",
        "--maxShapes=x:1x3x48x32,size:20x30",
    ]
    assert (tmp_path / "model_repository" / "my fixed" / "config.pbtxt").exists() == (tool == "triton")


@values
def test_onnx_runtime_s_script_has_its_provider(
    target: str, provider: str, prefix: str, tmp_path: Path
) -> None:
    result = fixed(tmp_path, "onnxruntime", target=target)
    assert result.script is not None
    text = result.script.read_text()
    ast.parse(text)
    assert f"'{prefix}_profile_max_shapes': 'x:1x3x48x32,size:20x30'" in text
    done = subprocess.run([sys.executable, result.script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or provider in done.stderr or "fell back" in done.stderr, done.stderr


def test_no_script_without_a_request_or_a_file(tmp_path: Path) -> None:
    source = save(graph(RESIZED), tmp_path / "m.onnx")
    result = rewriter.fix(source, inputs=FEEDS, deploy="python", build=False)
    assert result.script is None and result.output is None
    with pytest.raises(rewriter.RewriterError, match="Triton has no TensorRT-RTX"):
        fixed(tmp_path, "triton", target="tensorrt-rtx")


def test_values_of_the_profile_are_counted_and_hold_the_samples(tmp_path: Path) -> None:
    for shapes, words in ({"size": (1, 2, 3)}, "takes 2 values, not 3"), ({"size": (4, 4)}, "20x30 in the"):
        with pytest.raises(rewriter.RewriterError, match=words):
            fixed(tmp_path, "trtexec", max_shapes=shapes)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (RESIZED, ["size"]),
        ("g (float[2,2] x, int64[2] i) => (float[2,2] y) { y = Gather(x, i) }", []),
        (
            "g (float[4] x, int64 n) => (float[m] y) <int64[1] one = {-1}, int64[1] zero = {0}> {"
            " l = Reshape(n, one)  y = Slice(x, zero, l) }",
            ["n"],
        ),
    ],
    ids=["sizes of a Resize", "indices of rows", "an end of a Slice"],
)
def test_inputs_that_are_shapes_are_recognised(text: str, names: list[str]) -> None:
    assert shape_inputs(graph(text)) == names


@values
def test_sizes_that_a_model_takes(
    line: str, shape: tuple[int, ...], least: tuple[int, ...], rigid: set[tuple[str, int]]
) -> None:
    weights = "<int64[2] s = {-1, 8}, float[1,8] w = {1, 2, 3, 4, 5, 6, 7, 8}>"
    model = graph(f"g (float[b,n] x) => (float[?,?] y) {weights} {{ {line} }}")
    assert room(model, {"x": np.ones(shape, np.float32)}) == Room({"x": least}, frozenset(rigid))


@pytest.mark.parametrize(("new", "one_less", "longest"), [(2, set(), 12), (1, {("mask", 1)}, 9)])
def test_a_mask_of_past_and_new_tokens_grows_with_both(
    new: int, one_less: set[tuple[str, int]], longest: int
) -> None:
    model = graph(
        "g (float[b,t] x, float[b,p] past, float[b,s] mask) => (float[?,?] y) {"
        " all = Concat<axis = 1>(past, x)  y = Mul(all, mask) }"
    )
    shapes = {"x": (1, new), "past": (1, 4), "mask": (1, 4 + new)}
    sizes = room(model, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    assert not sizes.rigid and sizes.one_less == frozenset(one_less)
    mask, given = model.signature.inputs[2], shapes["mask"]
    assert sizes.profile(mask, (given, given, given)) == ((1, 1), given, (1, longest))


def test_nothing_is_tried_where_all_sizes_are_1() -> None:
    model = graph("g (float[b,n] x) => (float[b,n] y) { y = Relu(x) }")
    assert room(model, {"x": np.ones((1, 1), np.float32)}) == Room()
