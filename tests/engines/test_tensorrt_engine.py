"""A real parse and build by TensorRT in a child process, without a GPU."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import cases, graph, model, with_weights
from needs import needs_rtx
from tables import values

from rewriter.base.errors import EngineError
from rewriter.ir.model import Model, save
from rewriter.runtime.engines.build import BuildOptions, BuildReport, NetworkLayer, build, onnx_node
from rewriter.runtime.engines.tensorrt_library import noiseless

pytestmark = needs_rtx
RTX = BuildOptions(library="tensorrt_rtx")

MATMUL = """
    g (float16[2,8] x, float16[8] scale, float16[8] bias) => (float[2,8] y)
    <float16[1,8] shift = {0, 1, 2, 3, 4, 5, 6, 7}> {
        normed = LayerNormalization(x, scale, bias) moved = Add(normed, shift)
        y = Cast<to = 1>(moved) }"""


def report(source: Model, folder: Path, options: BuildOptions = RTX) -> BuildReport:
    return build(save(source, folder / "model.onnx"), options, timeout_s=120)


def test_the_parsed_network_is_read_back(tmp_path: Path) -> None:
    built = report(graph(MATMUL), tmp_path)
    assert built.parsed and built.library == "tensorrt_rtx"
    assert not built.parser_errors
    assert built.inputs == (("x", "HALF"), ("scale", "HALF"), ("bias", "HALF"))
    by_node = {layer.node: layer for layer in built.layers if layer.node}
    assert by_node["node_of_normed"] == NetworkLayer(
        "node_of_normed", "NORMALIZATION", "node_of_normed", (("normed", "HALF"),)
    )
    assert [(layer.type, layer.outputs) for layer in built.layers][-2:] == [
        ("ELEMENTWISE", (("moved", "HALF"),)),
        ("CAST", (("y", "FLOAT"),)),
    ]
    assert built.count("NORMALIZATION") == 1


def test_an_engine_is_built_and_written(tmp_path: Path) -> None:
    engine = tmp_path / "model.engine"
    built = report(graph(MATMUL), tmp_path, BuildOptions(library="tensorrt_rtx", engine=engine))
    assert built.engine_bytes == engine.stat().st_size > 1000
    assert built.build_s > 0


def test_weights_in_external_data_are_found(tmp_path: Path) -> None:
    text, weight = (
        "g (float[2,64] x, float[64,64] w) => (float[2,64] y) { y = MatMul(x, w) }",
        np.eye(64, dtype="f4"),
    )
    source = with_weights(text, {"w": weight})
    source.external = True
    assert report(source, tmp_path).engine_bytes
    assert (tmp_path / "model.onnx.data").stat().st_size >= weight.nbytes


@pytest.mark.parametrize(("body", "node", "op", "words"), cases("engines/refused.txt"))
def test_the_parser_names_what_it_refuses(body: str, node: str, op: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    header = '<ir_version: 8, opset_import: ["" : 17, "com.acme" : 1]>\n'
    onnx.save(onnx.parser.parse_model(header + body), path)  # the checker would refuse some
    refused = build(path, RTX, timeout_s=120)
    assert not (refused.parsed or refused.layers)
    assert refused.engine_bytes is None
    (error,) = refused.parser_errors
    assert (error.node, error.op) == (node, op)
    assert re.search(words, error.message)
    assert "Cuda" not in error.message


DYNAMIC = "g (float[n,8] x) => (float[n,8] y) { y = Relu(x) }"
LOOP = """
    g (int64 times, float[2] x) => (float[2] y, float[n,2] trace) <bool go = {1}> {
        y, trace = Loop (times, go, x) <
            body = b (int64 i, bool on, float[2] s) => (bool again, float[2] t, float[2] seen) {
                again = Identity(on) t = Add(s, s) seen = Neg(t)
            }
        >
    }"""


@pytest.mark.parametrize(
    ("body", "words", "options"),
    [
        pytest.param(
            DYNAMIC,
            "'x' has dynamic axes",
            {"shapes": {"x": ((1, 8), (2, 8), (4, 8))}},
            id="a span of shapes",
        ),
        pytest.param(
            LOOP, "'times' is a shape or a trip count", {"values": {"times": ((3,),) * 3}}, id="a trip count"
        ),
    ],
)
def test_dynamic_axes_need_a_profile(body: str, words: str, options: dict[str, Any], tmp_path: Path) -> None:
    read = report(graph(body), tmp_path)
    assert words in read.obstacle and read.refusal == read.obstacle
    assert read.hint and read.layers
    assert read.engine_bytes is None
    assert report(graph(body), tmp_path, replace(RTX, **options)).engine_bytes


def test_the_error_of_a_missing_library_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="tensorrt_of_nobody is not installed") as raised:
        report(graph(DYNAMIC), tmp_path, BuildOptions(library="tensorrt_of_nobody"))
    assert "pip install tensorrt-rtx" in str(raised.value)


def test_functions_and_subgraphs_are_read(tmp_path: Path) -> None:
    source = model("""
        <ir_version: 8, opset_import: ["" : 17, "own" : 1]>
        g (bool c, float16[2,4] x) => (float16[2,4] y) {
            y = If (c) <
                then_branch = t () => (float16[2,4] a) { a = own.twice(x) },
                else_branch = e () => (float16[2,4] b) { b = Neg(x) }
            >
        }
        <domain: "own", opset_import: ["" : 17]>
        twice (v) => (w) { w = Add(v, v) }""")
    types = {layer.type for layer in report(source, tmp_path).layers}
    assert {"CONDITIONAL_OUTPUT", "ELEMENTWISE", "UNARY"} <= types


@pytest.mark.parametrize(
    ("metadata", "node"),
    [
        pytest.param("[ONNX Layer: conv]", "conv", id="a node of the main graph"),
        pytest.param("[ONNX Layer: a/b | keep (else_branch) | i (If)]", "a/b", id="a node in a branch"),
        pytest.param("[ONNX Layer: x[0]]", "x[0]", id="a name with brackets"),
        pytest.param("", "", id="a layer added by the parser"),
    ],
)
def test_the_node_of_a_layer_comes_from_its_metadata(metadata: str, node: str) -> None:
    assert onnx_node(metadata) == node


@values
def test_noise_is_removed_from_messages(message: str, clear: str) -> None:
    assert noiseless(message) == clear
