"""rewriter.compat: calls of public projects with the import exchanged; what callers of the originals see."""

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto
from tables import values

from rewriter import compat as autocast
from rewriter import compat as float16
from rewriter.base.errors import InputsError, UsageError
from rewriter.ir.model import Array, load

FP32, FP16, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16

SIMPLE = """
    g (float[1,5] X, float[5,3] w, float[3] b, float[1,3] c) => (float[1,3] Y) {
        [gemm_node] gemm_out = Gemm(X, w, b) [add_node] add_out = Add(gemm_out, c)
        [relu_node] Y = Relu(add_out) }"""
DETECTOR = """
    <ir_version: 8, opset_import: ["" : 17], producer_name: "exporter">
    g (float[1,3,8,8] images) => (float[1,4,16,16] output0) <float[4] scales = {1.0, 1.0, 2.0, 2.0}> {
        ["/stem/Conv"] a = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(images, w)
        ["/stem/Act"] s = Sigmoid(a) ["/stem/Mul"] m = Mul(a, s)
        ["/up/Resize"] output0 = Resize<mode = "nearest">(m, , scales) }"""


def simple() -> ModelProto:
    weights = graphs.random_weights({"w": (5, 3), "b": (3,), "c": (1, 3)})
    return graphs.with_weights(SIMPLE, weights, opset=20).whole()


def detector() -> ModelProto:
    proto = onnx.parser.parse_model(DETECTOR)
    proto.graph.initializer.append(
        onnx.numpy_helper.from_array(graphs.random_weights({"w": (4, 3, 3, 3)})["w"] * 0.1, "w")
    )
    proto.metadata_props.add(key="names", value="{0: 'person'}")
    return proto


def types(model: ModelProto) -> dict[str, int]:
    """Element type of the first output of every node but Casts, by the node's name."""
    known = load(model).facts().scopes[0]
    return {
        n.name: known[n.output[0]].dtype for n in model.graph.node if n.op_type not in ("Cast", "Constant")
    }


def ports(model: ModelProto) -> list[int]:
    return [v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)]


def run(model: ModelProto, feeds: Mapping[str, Array]) -> Array:
    onnx.checker.check_model(model, full_check=True)
    (result,) = graphs.run(load(model), feeds)
    return result.astype(np.float32)


# -- calls of public projects --------------------------------------------------------------------
def test_a_video_renderer_calibrates_rife(tmp_path: Path) -> None:
    source, calibration = tmp_path / "rife.onnx", tmp_path / "calibration.npz"
    onnx.save(detector(), source)
    np.savez(calibration, images=np.ones((1, 3, 8, 8), np.float32))
    autocast.configure_logging(logging.ERROR)
    with pytest.warns(UserWarning, match="`use_standalone_type_inference` has no meaning"):
        converted = autocast.convert_to_mixed_precision(
            onnx_path=str(source),
            low_precision_type="fp16",
            keep_io_types=False,
            calibration_data=str(calibration),
            providers=["cpu"],
            data_max=512,
            opset=20,
            init_max=65504,
            use_standalone_type_inference=True,
        )
    assert ports(converted) == [FP16, FP16] and converted.opset_import[0].version == 20


NORMED = """
    <ir_version: 8, opset_import: ["" : 17]>
    g (float[B,3,4,4] input) => (float[B,4] dets) <float eps = {1e-6}> {
        [conv] c = Conv<kernel_shape = [3,3], pads = [1,1,1,1]>(input, w) [wide] f = Cast<to = 1>(c)
        [square] q = Mul(f, f) [mean] m = ReduceMean<axes = [1]>(q) [epsilon] e = Add(m, eps)
        [root] r = Sqrt(e) [norm] n = Div(f, r) [pool] p = GlobalAveragePool(n)
        [flat] dets = Flatten(p) }"""
"""A norm that its author widened, as RF-DETR, KataGo's transformers and Whisper export it."""


CALLS = {
    "rf-detr": (float16.convert_float_to_float16, {"keep_io_types": False}, FP16),
    "katago": (
        float16.convert_float_to_float16,
        {"keep_io_types": False, "min_positive_val": 1e-7, "max_finite_val": 1e4},
        FP16,
    ),
    "wyoming-whisper-trt": (
        autocast.convert_to_f16,
        {"low_precision_type": "fp16", "keep_io_types": True, "op_block_list": []},
        FP32,
    ),
}


@pytest.mark.parametrize(("convert", "options", "border"), CALLS.values(), ids=CALLS.keys())
def test_casts_of_the_export_stay_valid(
    convert: Callable[..., ModelProto],
    options: dict[str, Any],
    border: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proto = onnx.parser.parse_model(NORMED)
    weights = graphs.random_weights({"w": (4, 3, 3, 3)})
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weights["w"], "w"))
    image = graphs.random_feeds(load(proto))
    converted = convert(proto, **options)
    assert ports(converted) == [border] * 2 and types(converted)["conv"] == FP16
    given = {
        name: array.astype(np.float16 if border == FP16 else np.float32) for name, array in image.items()
    }
    assert np.allclose(run(converted, given), run(proto, image), atol=2e-3)
    onnx.save(converted, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    monkeypatch.chdir(tmp_path.parent)  # Whisper's weights lie beside the file
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)


# -- what callers of the originals see -----------------------------------------------------------
@pytest.mark.parametrize("keep_io_types", [True, False])
@pytest.mark.parametrize("low", ["fp16", "bf16"])
def test_a_simple_model(tmp_path: Path, keep_io_types: bool, low: str) -> None:
    path = str(tmp_path / "model.onnx")
    onnx.save(simple(), path)
    converted = autocast.convert_to_mixed_precision(path, low, keep_io_types=keep_io_types)
    lower = FP16 if low == "fp16" else BF16
    assert [n.op_type for n in converted.graph.node if n.op_type != "Cast"] == ["Gemm", "Add", "Relu"]
    assert ports(converted) == [FP32 if keep_io_types else lower] * 2
    assert types(converted)["gemm_node"] == lower


CHAIN = """g (float[2] x, float[2,2] v, float[2,2] u) => (float[2] y) {
    ["/enc/a"] a = MatMul(x, v) ["/enc/b"] b = MatMul(a, u) ["/dec/a"] c = MatMul(b, u)
    ["/dec/b"] y = MatMul(c, u) }"""


@values
def test_what_stays_in_fp32(tmp_path: Path, options: dict[str, Any], kept: set[str]) -> None:
    weights = {"v": np.array([[3, 0], [0, 1]], np.float32), "u": np.array([[2, 0], [0, 1]], np.float32)}
    onnx.save(graphs.with_weights(CHAIN, weights).whole(), tmp_path / "m.onnx")
    feeds = {"x": np.array([2, 1], np.float32)}
    found = autocast.convert_to_mixed_precision(str(tmp_path / "m.onnx"), calibration_data=feeds, **options)
    assert {name for name, dtype in types(found).items() if dtype == FP32} == kept


def test_a_rule_of_the_caller_decides(tmp_path: Path) -> None:
    class Rule:
        def check(self, node: onnx.NodeProto) -> bool:
            return node.name == "gemm_node"

    onnx.save(simple(), tmp_path / "m.onnx")
    found = autocast.convert_to_mixed_precision(str(tmp_path / "m.onnx"), custom_rule=Rule())
    assert types(found)["gemm_node"] == FP32


@pytest.mark.parametrize(("options", "kept"), [({}, FP32), ({"op_block_list": []}, FP16)])
def test_the_list_of_the_converter_holds_where_none_is_given(options: dict[str, Any], kept: int) -> None:
    assert types(float16.convert_float_to_float16(detector(), **options))["/up/Resize"] == kept
    blocked = float16.convert_float_to_float16(detector(), node_block_list=["/stem/Conv"], op_block_list=[])
    assert types(blocked)["/stem/Conv"] == FP32 and types(blocked)["/up/Resize"] == FP16


def test_the_body_of_a_loop_is_converted() -> None:
    loop = graphs.graph("""
        g (float[3,2] x) => (float[2] y) <int64 n = {3}, bool t = {1}, float[2] z = {0.0, 0.0}> {
        y = Loop(n, t, z) <body = b (int64 i, bool c, float[2] s) => (bool d, float[2] r) {
            d = Identity(c)  v = Gather(x, i)  r = Add(s, v) }> }""").whole()
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert np.array_equal(run(float16.convert_float_to_float16(loop), {"x": x.astype(np.float16)}), [6, 9])
    assert np.array_equal(run(float16.convert_float_to_float16(loop, keep_io_types=True), {"x": x}), [6, 9])
    assert ports(float16.convert_float_to_float16(simple(), keep_io_types=["Y"])) == [FP16, FP32]


def test_a_plugin_gets_the_precision_of_the_list(tmp_path: Path) -> None:
    plugin = graphs.graph("g (float[2] x) => (float[2] y) { a = Relu(x) [p] b = Skip_TRT(a, x) y = Neg(b) }")
    onnx.save(plugin.whole(), tmp_path / "m.onnx")
    with pytest.warns(UserWarning, match="no operator of Other:fp16"):
        found = autocast.convert_to_mixed_precision(
            str(tmp_path / "m.onnx"), trt_plugins_precision=["Skip_TRT:[fp16,fp32]:[fp16]", "Other:fp16"]
        )
    (node,) = [n for n in found.graph.node if n.op_type == "Skip_TRT"]
    known = load(found).facts().scopes[0]
    assert [known[name].dtype for name in (*node.input, *node.output)] == [FP16, FP32, FP16]


def test_an_opset_below_the_models_is_a_warning(tmp_path: Path) -> None:
    onnx.save(simple(), tmp_path / "m.onnx")
    with pytest.warns(UserWarning, match="the model has 20, and keeps it"):
        found = autocast.convert_to_mixed_precision(str(tmp_path / "m.onnx"), opset=13)
    assert found.opset_import[0].version == 20


def test_weights_beyond_fp16_and_masks_keep_their_meaning() -> None:
    source = graphs.graph("""
        g (float[2] x) => (float[2] y) <float[2] big = {100000.0, 1.0}, float low = {-3e38}> {
        [big] a = Mul(x, big) [mask] m = Add(a, low) y = Softmax(m) }""").whole()
    found = float16.convert_float_to_float16(source, keep_io_types=True)
    assert types(found)["big"] == FP32
    assert np.isfinite(run(found, {"x": np.ones(2, np.float32)})).all()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"onnx_path": "nonexistent.onnx"}, FileNotFoundError, "`onnx_path`: no such file"),
        ({"low_precision_type": "fp8"}, UsageError, "`low_precision_type`: it cannot be 'fp8'"),
        ({"nodes_to_exclude": ["("]}, UsageError, "`nodes_to_exclude`: it cannot be ['(']"),
        ({"nodes_to_include": [3]}, UsageError, "`nodes_to_include`: it cannot be [3]"),
        ({"keep_io_types": ["Z"]}, UsageError, "`keep_io_types`: no float input or output has the name 'Z'"),
        (
            {"trt_plugins_precision": ["Relu:fp16"]},
            UsageError,
            "`trt_plugins_precision`: Relu is an operator",
        ),
        ({"trt_plugins": ["no.so"]}, UsageError, "`trt_plugins`: no such file"),
        ({"data_max": "512"}, UsageError, "`data_max`: it cannot be '512'"),
        ({"init_max": -1}, UsageError, "`init_max`: it cannot be -1"),
        ({"custom_rule": len}, UsageError, "`custom_rule`: it has no check(node)"),
        ({"calibration_data": {"Z": np.ones(5, np.float32)}}, InputsError, "Z"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, options: dict[str, Any], kind: type, words: str) -> None:
    onnx.save(simple(), tmp_path / "m.onnx")
    with pytest.raises(kind, match=re.escape(words)):
        autocast.convert_to_mixed_precision(**{"onnx_path": str(tmp_path / "m.onnx"), **options})


SIGNATURES = {
    "convert_to_mixed_precision": "onnx_path, low_precision_type='fp16', nodes_to_exclude=None, "
    "op_types_to_exclude=None, nodes_to_include=None, op_types_to_include=None, data_max=512, "
    "init_max=65504.0, keep_io_types=False, calibration_data=None, custom_rule=None, "
    "init_conversion_max_bytes=None, providers=('cpu',), trt_plugins=(), trt_plugins_precision=(), "
    "max_depth_of_reduction=None, opset=None, use_standalone_type_inference=False",
    "convert_to_f16": "model, low_precision_type='fp16', keep_io_types=True, op_block_list=(), "
    "tensor_block_dict=None, trt_plugins=(), use_standalone_type_inference=False, opset=None",
    "convert_float_to_float16": "model, min_positive_val=1e-07, max_finite_val=10000.0, keep_io_types=False, "
    "disable_shape_infer=False, op_block_list=None, node_block_list=None, check_fp16_ready=True",
}
"""Of AutoCast (August 2026) and onnxconverter-common 1.16; no list that nobody changes is shared here."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_are_those_of_the_originals(name: str) -> None:
    own = inspect.signature(getattr(autocast, name)).parameters.values()
    given = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in own]
    assert ", ".join(given).startswith(SIGNATURES[name])


@values
def test_an_argument_without_a_meaning_is_named(name: str, value: object, tmp_path: Path) -> None:
    path = str(tmp_path / "m.onnx")
    onnx.save(simple(), path)
    mixed = name in inspect.signature(autocast.convert_to_mixed_precision).parameters
    call: Callable[..., ModelProto] = (
        autocast.convert_to_mixed_precision if mixed else float16.convert_float_to_float16
    )
    with pytest.warns(UserWarning, match=f"`{name}` has no meaning here") as warned:
        call(path, **{name: value})
    assert len(warned) == 1 and warned[0].filename == __file__


def test_the_converter_takes_a_path_by_its_own_name(tmp_path: Path) -> None:
    onnx.save(simple(), tmp_path / "m.onnx")
    path = str(tmp_path / "m.onnx")
    found = float16.convert_float_to_float16_model_path(model_path=path, keep_io_types=True)
    assert ports(found) == [FP32, FP32] and set(types(found).values()) == {FP16}


AMPLIFIED = """
    g (float[1,64] X, float[64,3] w) => (float[1,3] Y, float[1,3] Z)
    <float big = {30000.0}, float small = {0.00003}> {
        [scaled] a = Mul(X, big) [product] b = MatMul(a, w)
        [back] Y = Mul(b, small)
        [plain] Z = MatMul(X, w) }"""


def amplified() -> ModelProto:
    """A product whose sums leave FP16's range, and one beside it whose sums do not."""
    return graphs.with_weights(AMPLIFIED, graphs.random_weights({"w": (64, 3)})).whole()


FEED: dict[str, Array] = {"X": np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32)}


@pytest.mark.parametrize("given", ["rtol", "validate_fn"])
@pytest.mark.parametrize("keep", [True, False])
def test_auto_convert_keeps_what_the_outputs_need(given: str, keep: bool) -> None:
    calls = []

    def close(first: list[Array], second: list[Array]) -> bool:
        calls.append((len(first), len(second)))
        return all(np.allclose(a, b, rtol=0.01, atol=0.01) for a, b in zip(first, second, strict=True))

    options: dict[str, Any] = (
        {"validate_fn": close} if given == "validate_fn" else {"rtol": 0.01, "atol": 0.01}
    )
    model = amplified()
    converted = autocast.auto_convert_mixed_precision(model, FEED, keep_io_types=keep, **options)
    found = types(converted)
    assert (found["scaled"], found["product"]) == (FP32, FP32) and found["plain"] == FP16
    assert {out.type.tensor_type.elem_type for out in converted.graph.output} == {FP32 if keep else FP16}
    assert set(calls) == ({(2, 2)} if given == "validate_fn" else set()), "outputs as lists"
    assert model == amplified(), "the caller's model is unchanged"


def test_auto_convert_raises_what_its_callers_know() -> None:
    with pytest.raises(ValueError, match="cannot both be `None`"):
        autocast.auto_convert_mixed_precision(amplified(), FEED)
    with pytest.raises(ValueError, match="validation failed for original fp32 model"):
        autocast.auto_convert_mixed_precision(amplified(), FEED, lambda first, second: False)
    passes = iter([True])
    with pytest.raises(ValueError, match="validation failed for final fp16 model"):
        autocast.auto_convert_mixed_precision(amplified(), FEED, lambda first, second: next(passes, False))
    signature = inspect.signature(autocast.auto_convert_mixed_precision)
    assert list(signature.parameters) == "model feed_dict validate_fn rtol atol keep_io_types".split()


def test_auto_convert_ends_in_fp32_where_nothing_else_is_accepted() -> None:
    converted = autocast.auto_convert_mixed_precision(amplified(), FEED, rtol=1e-6, keep_io_types=True)
    assert set(types(converted).values()) == {FP32}
