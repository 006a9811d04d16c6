"""The build check: a real TensorRT build must have the types and norms of the model."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import cases, graph, model
from needs import needs_rtx, without_gpu
from onnx import TensorProto, helper, numpy_helper
from paths import MODELS
from tables import values

from rewriter.ir.model import Array, Model, load, save
from rewriter.report.remarks import worded
from rewriter.runtime.engines.build import BuildOptions, portable_capability, warnings_for_users
from rewriter.runtime.engines.tensor_files import Span, values_of
from rewriter.verification.build_check import BuildExpectation, check_build, expectation
from rewriter.verification.verdict import Check

NORM = """
    g (float16[2,8] x, float16[8] s, float16[8] b) => (float[2,8] y) {
        n = LayerNormalization(x, s, b) r = Relu(n) y = Cast<to = 1>(r) }"""


def checked(
    source: Model, folder: Path, sample: dict[str, Array] | None = None, spans: dict[str, Span] | None = None
) -> Check:
    shapes = {name: (array.shape,) * 3 for name, array in (sample or {}).items()} | (spans or {})
    options = BuildOptions(shapes, values_of([sample or {}]))
    return check_build(save(source, folder / "model.onnx"), expectation(source), options, timeout_s=120)


def details(check: Check) -> str:
    return "\n".join(check.details)


# -- what a model expects ----------------------------------------------------------------------
TWO_TYPES = """
    g (bool c, float[2] x, int64[2] i) => (float[2] y) {
        y = If (c) <
            then_branch = t () => (float[2] a) { h = Cast<to = 10>(x) a = Cast<to = 1>(h) },
            else_branch = e () => (float[2] b) { h = Cast<to = 1>(i) b = Neg(h) }
        >
    }"""
FUNCTION = """
    g (float[2] x) => (float[2] y) { w = Neg(x) y = own.f(w) }
    <domain: "own", opset_import: ["" : 17]>
    f (v) => (w) { w = Abs(v) }"""
BRANCHES = """
    g (bool c, float[2,8] x, float[8] s) => (float[2,8] y) {
        y = If (c) <
            then_branch = t () => (float[2,8] a) { a = LayerNormalization(x, s) },
            else_branch = e () => (float[2,8] b) { b = own.LayerNormalization(x, s) }
        >
    }"""


@pytest.mark.parametrize(
    ("text", "types", "norms"),
    [
        pytest.param(TWO_TYPES, "x y a b", 0, id="no integers, and no names with two types"),
        pytest.param(FUNCTION, "x y", 0, id="no names inside functions"),
        pytest.param(BRANCHES, "x s y a b", 1, id="norms in branches, but none of other domains"),
    ],
)
def test_what_is_expected_of_inner_graphs(text: str, types: str, norms: int) -> None:
    source = model('<ir_version: 8, opset_import: ["" : 17, "own" : 1]>\n' + text)
    expected = expectation(source)
    assert (set(expected.tensor_types), expected.layer_normalizations) == (set(types.split()), norms)


# -- builds that pass --------------------------------------------------------------------------
@needs_rtx
@pytest.mark.parametrize(("body", "opset", "norms"), cases("verification/sound.txt"))
def test_a_sound_model_passes(body: str, opset: str, norms: str, tmp_path: Path) -> None:
    source = graph(body, opset=int(opset), ir=10)
    assert expectation(source).layer_normalizations == int(norms)
    check = checked(source, tmp_path)
    assert check.passed is True, check
    assert not check.details and "types as planned" in worded(check).summary
    assert ("NORMALIZATION" in worded(check).summary) == (norms != "0")
    assert check.seconds > 0


@needs_rtx
def test_dynamic_shapes_come_from_the_sample_or_a_span(tmp_path: Path) -> None:
    source = graph("g (float[n,8] x) => (float[n,8] y) { y = Relu(x) }")
    assert checked(source, tmp_path, {"x": np.ones((2, 8), np.float32)}).passed
    assert checked(source, tmp_path, spans={"x": ((1, 8), (2, 8), (4, 8))}).passed
    two: Any = tuple(np.array([2, 8]))
    assert checked(source, tmp_path, spans={"x": (two, two, two)}).passed


# -- builds that fail --------------------------------------------------------------------------
@needs_rtx
@pytest.mark.parametrize(("body", "opset", "summary", "words"), cases("verification/failing.txt"))
def test_a_model_that_fails_is_told(body: str, opset: str, summary: str, words: str, tmp_path: Path) -> None:
    check = checked(graph(body, opset=int(opset), ir=11), tmp_path)
    assert check.passed is False and summary in worded(check).summary
    assert all(word in details(check) for word in words.split("; "))


# -- no verdict --------------------------------------------------------------------------------
@needs_rtx
@pytest.mark.parametrize(
    ("body", "words", "node"),
    [
        pytest.param(
            """g (float[1,8,4] b, float[1,1,8] s) => (int64[n,3] y) <int64 k = {3}, float t = {0.5}> {
                y = NonMaxSuppression(b, s, k, t) }""",
            "no runners",
            "node_of_y",
            id="NonMaxSuppression, which it parses but cannot build",
        ),
        pytest.param(
            "g (float[2] x) => (float[2] y) { y = com.acme.Foo(x) }", "Foo", "Foo", id="a custom operator"
        ),
    ],
)
def test_an_operator_that_the_library_lacks_is_no_verdict(
    body: str, words: str, node: str, tmp_path: Path
) -> None:
    header = '<ir_version: 8, opset_import: ["" : 17, "com.acme" : 1]>\n'
    check = checked(load(onnx.parser.parse_model(header + body)), tmp_path)
    assert check.passed is None and f"lacks what {node} needs" in worded(check).summary
    assert words in details(check)
    assert "another TensorRT" in details(check)


@needs_rtx
def test_an_unknown_shape_is_no_verdict(tmp_path: Path) -> None:
    check = checked(graph("g (float[n,8] x) => (float[n,8] y) { y = Relu(x) }"), tmp_path)
    assert check.passed is None and "'x' has dynamic axes" in worded(check).summary
    assert "`input-shapes" in details(check)


def test_the_check_says_which_library_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child's imports really fail: a broken `tensorrt_rtx` is first in its path."""
    for name in ("tensorrt", "tensorrt_rtx"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('no libraries')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check = checked(graph(NORM), tmp_path)
    assert check.passed is None and "tensorrt_rtx does not load: no libraries" in worded(check).summary
    assert "pip install tensorrt-rtx" in details(check)


# -- crashes and hangs -------------------------------------------------------------------------
@values
def test_a_crash_or_hang_is_reported_with_the_log(
    fault: str, passed: bool | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is replaced by one that fails like native code."""
    broken = f"import sys; sys.stderr.write('last words\\n'); sys.stderr.flush()\n{fault}\n"
    for name in ("tensorrt", "tensorrt_rtx"):
        (tmp_path / f"{name}.py").write_text(broken)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = save(graph(NORM), tmp_path / "model.onnx")
    for limit in (5, 60):  # a child starts in 2 s, but for a busy machine
        check = check_build(path, BuildExpectation(), BuildOptions(), limit)
        if "log: last words" in check.details:
            break
    assert check.passed is passed and words in worded(check).summary
    assert "log: last words" in check.details


# -- types of some GPUs alone ------------------------------------------------------------------
def quantized(kind: int, opset: int) -> Model:
    """A product of weights in blocks of 16 that are FP8 or FP4."""
    weights = helper.make_tensor("q", kind, [32, 32], np.linspace(-6, 6, 1024).tolist())
    scales = numpy_helper.from_array(np.ones((32, 2), np.float32), "s")
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=1, block_size=16),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 32]) for name in "xy"]
    held = helper.make_graph(nodes, "g", ports[:1], ports[1:], [weights, scales])
    return load(helper.make_model(held, opset_imports=[helper.make_opsetid("", opset)], ir_version=11))


@needs_rtx
@without_gpu
@pytest.mark.parametrize(
    ("kind", "opset", "gpus", "built"),
    [
        (TensorProto.FLOAT8E4M3FN, 21, (), True),
        (TensorProto.FLOAT8E4M3FN, 21, ("sm_90",), True),
        (TensorProto.FLOAT8E4M3FN, 21, ("sm_87", "sm_110"), False),
        (TensorProto.FLOAT4E2M1, 23, (), True),
        (TensorProto.FLOAT4E2M1, 23, ("sm_110",), True),
        (TensorProto.FLOAT4E2M1, 23, ("sm_89",), False),
    ],
    ids=["FP8", "FP8 on sm_90", "FP8 on sm_87", "FP4", "FP4 on sm_110", "FP4 on sm_89"],
)
def test_types_of_some_gpus_are_built_for_a_gpu_that_has_them(
    kind: int, opset: int, gpus: tuple[str, ...], built: bool, tmp_path: Path
) -> None:
    path = save(quantized(kind, opset), tmp_path / "model.onnx")
    options = BuildOptions(library="tensorrt_rtx", gpus=gpus)
    check = check_build(path, BuildExpectation(), options, timeout_s=120)
    assert check.built is built, check.details
    assert built or "`target`" in check.advice


@pytest.mark.parametrize(
    ("gpus", "capability"), [((), 80), (("sm_75",), 75), (("sm_87", "sm_110"), 86), (("sm_121",), 121)]
)
def test_a_target_is_built_for(gpus: tuple[str, ...], capability: int) -> None:
    assert portable_capability({"FLOAT"}, gpus, (75, 80, 86, 89, 120, 121)) == capability


# -- the cases ---------------------------------------------------------------------------------
@needs_rtx
def test_a_quantised_bias_in_int32_is_refused_by_name(tmp_path: Path) -> None:
    check = checked(load(MODELS / "qdq.onnx"), tmp_path, dict(np.load(MODELS / "qdq.npz")))
    assert check.passed is False
    assert "bias_DequantizeLinear (DequantizeLinear)" in details(check) and "in INT32" in details(check)


@needs_rtx
def test_a_constant_of_a_refused_type_names_its_node_before_the_parser_names_none(tmp_path: Path) -> None:
    text = "g (uint64[2] n) => (float[2] y) <uint64[2] big = {8, 2}> { m = Add(n, big) y = Cast<to = 1>(m) }"
    feeds = {"n": np.ones(2, np.uint64)}
    check = checked(graph(text), tmp_path, feeds)
    assert check.details[0].endswith("takes no Add with n in UINT64"), check.details
    assert "Failed to import initializer: big" in check.details[-2]


@values
def test_precision_warnings_of_the_builder_are_explained(warning: str, meaning: str) -> None:
    (warned,) = warnings_for_users([warning, "Int64 binding of x"])
    assert warned.startswith("precision: ") and meaning in warned
    assert warning in warned


def test_other_warnings_are_unchanged() -> None:
    assert warnings_for_users(["something new"]) == ["warning: something new"]
