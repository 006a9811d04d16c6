"""`rewriter locate` as a user runs it: a rescaled model, several samples, options that cannot be."""

import json
from pathlib import Path

import graphs
import numpy as np
import onnx
import pytest
from command_lines import invoke
from onnx import numpy_helper
from typer.testing import Result

import rewriter
from rewriter.ir.model import load, save
from rewriter.passes.rescale import EXPONENTS, between, record, recorded

TWO = "g (float[n,4] x) => (float[n,4] y) { a = Tanh(x) y = Add(a, x) }"


def run(*arguments: str | Path) -> Result:
    return invoke("locate", *arguments, COLUMNS="160")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(graphs.graph(TWO), tmp_path / "model.onnx")


OVERFLOWING = """
    g (float[1,8,16,16] x, float[8,8,3,3] u, float[8,8,3,3] v, float[8,8,3,3] w) => (float[1,8,16,16] y) {
        a = Conv<pads = [1,1,1,1]>(x, u)  b = Relu(a)
        c = Conv<pads = [1,1,1,1]>(b, v)  d = Relu(c)
        e = Conv<pads = [1,1,1,1]>(d, w)  y = Tanh(e) }"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose stream exceeds FP16, its data, and the rescaled file with a wrong Conv."""
    folder, rng = tmp_path_factory.mktemp("rescaled"), np.random.default_rng(0)
    scales = {"u": 1e5, "v": 0.1, "w": 1e-5}
    weights = {name: (size * rng.standard_normal((8, 8, 3, 3))).astype("f4") for name, size in scales.items()}
    original = save(graphs.with_weights(OVERFLOWING, weights), folder / "model.onnx")
    np.savez(folder / "data.npz", x=rng.standard_normal((1, 8, 16, 16)).astype("f4"))
    fixed = rewriter.fix(original, inputs=folder / "data.npz", passes="rescale,mixed-precision", verify=False)
    proto = fixed.proto
    assert recorded(load(proto))
    (conv,) = (node for node in proto.graph.node if node.output[0] == "c")
    (weight,) = (tensor for tensor in proto.graph.initializer if tensor.name == conv.input[1])
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float16(1.5), weight.name))
    onnx.save(proto, folder / "wrong.onnx")
    return folder


@pytest.mark.parametrize("engine", ["emulation", "onnxruntime"])
def test_what_is_rescaled_is_not_wrong(wrong: Path, engine: str, tmp_path: Path) -> None:
    written, data = tmp_path / "found.json", wrong / "data.npz"
    files = wrong / "model.onnx", wrong / "wrong.onnx"
    result = run(*files, "--inputs", data, "--engine", engine, "--json", written)
    assert result.exit_code == 1, result.output
    found = json.loads(written.read_text())
    assert (found["first"]["tensor"], found["exact"]) == ("c", True)
    assert all(step["error"] < 5e-3 for step in found["right"])


MASKED = """
    g (float[2,8] x, int64[2,8] open, float[8,8] w, float[8,8] v) => (float[2,8] y)
    <float one = {1.0}, float lowest = {-1e9}> {
        f = Cast<to = 1>(open) shut = Sub(one, f) bias = Mul(shut, lowest) s = MatMul(x, w)
        masked = Add(s, bias) p = Softmax<axis = -1>(masked) y = MatMul(p, v) }"""


def test_a_smaller_mask_is_not_wrong(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((8, 8)).astype("f4") for name in "wv"}
    original = save(graphs.with_weights(MASKED, weights), tmp_path / "model.onnx")
    data = {"x": rng.standard_normal((2, 8)).astype("f4"), "open": np.repeat([[1, 0]], 8, 0).reshape(2, 8)}
    proto = rewriter.fix(original, inputs=data, build=False).proto
    product = next(node for node in proto.graph.node if node.op_type == "MatMul" and "v" in node.input[1])
    (weight,) = (tensor for tensor in proto.graph.initializer if tensor.name == product.input[1])
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float16(2), weight.name))
    first = rewriter.locate(original, proto, inputs=data).first
    assert first is not None and first.op == "MatMul", "its bias of -16384 is right"


STATE = """
    g (float[3,2,8] x, float[8,8] m, float[1,16,8] w, float[1,16,16] r, float[16,4] v) => (float[3,2,4] y)
    <float far = {1e4}, int64[1] axis = {1}> {
        n = MatMul(x, m) h = RNN<hidden_size = 16>(n, w, r) s = Squeeze(h, axis)
        a = MatMul(s, v) y = Add(a, far) }"""


def test_the_fault_before_a_state_that_verify_rejects_is_found(tmp_path: Path) -> None:
    """No output shows it: a large constant makes the difference small."""
    rng, shapes = np.random.default_rng(0), {"m": (8, 8), "w": (1, 16, 8), "r": (1, 16, 16), "v": (16, 4)}
    weights = {name: 0.2 * rng.standard_normal(shape).astype("f4") for name, shape in shapes.items()}
    files = [
        save(graphs.with_weights(STATE, weights | {"m": scale * weights["m"]}), tmp_path / f"{scale}.onnx")
        for scale in (1.0, 2.0)
    ]
    np.savez(tmp_path / "data.npz", x=rng.standard_normal((3, 2, 8)).astype("f4"))
    result = run(*files, "--inputs", tmp_path / "data.npz")
    assert result.exit_code == 1
    assert result.output.startswith("The first wrong tensor is n of node MatMul(n)"), result.output


def test_exponents_add_up_and_nonsense_is_none() -> None:
    first, second = graphs.graph(TWO), graphs.graph(TWO)
    assert recorded(first) == {}
    record(first, {"a": -6})
    record(second, {"a": -6})
    record(second, {"a": 2, "b": 3})
    assert recorded(second) == {"a": -4, "b": 3}
    assert between(first, second) == {"a": 2, "b": 3}
    record(second, {"a": 4})
    assert between(graphs.graph(TWO), second) == {"b": 3}
    for text in ("no JSON", "[1]", '{"a": "x"}'):
        other = graphs.graph(TWO)
        other.proto.metadata_props.add(key=EXPONENTS, value=text)
        assert recorded(other) == {}


def test_data_that_nobody_gave_is_told(model: Path) -> None:
    assert "Note     random inputs" in run(model, model).output


def test_the_sample_that_verify_calls_worst_is_looked_at(tmp_path: Path) -> None:
    """One of six is cut: 0.0099 of its values, and 0.004 of all."""
    folder = tmp_path / "data"
    folder.mkdir()
    text = "g (float[8,4] x) => (float[8,4] y) <float top = {%s}> { a = Min(x, top) y = Neg(a) }"
    model, other = (save(graphs.graph(text % top), tmp_path / f"{top}.onnx") for top in ("2.0", "1.0"))
    for number in range(6):
        np.savez(folder / f"{number}.npz", x=np.full((8, 4), 1.01 if number == 3 else 1.0, np.float32))
    output = " ".join(run(model, other, "--inputs", folder).output.split())
    assert "The first wrong tensor is a of node Min(a) (Min), error 0.0099" in output
    assert "3.npz, the worst of 6 samples by verify" in output and "all values are 1" in output


def test_what_verify_excuses_is_not_wrong(tmp_path: Path) -> None:
    """TF32 rounds the weight as FP16 does: `verify` passes, and so does `locate`."""
    text = "g (float[2,8] x, float[8,2] w) => (float[2,2] y) { y = MatMul(x, w) }"
    weights = {"w": np.array([[2049, 2049], [-2000, -2000], *[[0, 0]] * 6], np.float32)}
    model, data = save(graphs.with_weights(text, weights), tmp_path / "m.onnx"), tmp_path / "d.npz"
    fixed = tmp_path / "f.onnx"
    np.savez(data, x=np.ones((2, 8), np.float32))
    result = rewriter.fix(model, fixed, inputs=data, build=False)
    assert result.conclusion.kind == "as-fp32"
    output = run(model, fixed, "--inputs", data)
    assert output.exit_code == 0, output.output
    assert "allowed by verify: " in output.output


BAD_OPTIONS = {
    "an engine that there is not": (("--engine", "openvino"), "--engine: it cannot be 'openvino'"),
    "no time": (("--timeout", "0"), "--timeout: it cannot be '0'"),
    "a library that is not there": (("--plugin-lib", "gone.so"), "no such file"),
    "an input that there is not": (("--max-shapes", "z:1x2"), "the model has no input 'z'"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_bad_options_are_refused(model: Path, options: tuple[str, ...], message: str) -> None:
    result = run(model, model, *options)
    assert (result.exit_code, message in result.output) == (2, True), result.output


def test_what_verify_allows_and_measures_is_what_locate_does(tmp_path: Path) -> None:
    """And a model of another operator set is compared, too: BF16 needs one in which ReduceMean changed."""
    body = "{ a = MatMul(x, u) m = ReduceMean<axes = [1]>(a) b = Sub(a, m) y = MatMul(b, u) }"
    rng = np.random.default_rng(0)
    weights = {"u": rng.standard_normal((64, 64)).astype("f4")}
    net = graphs.with_weights(f"g (float[1,64] x, float[64,64] u) => (float[1,64] y) {body}", weights)
    model, data, fixed = save(net, tmp_path / "model.onnx"), tmp_path / "data.npz", tmp_path / "fixed.onnx"
    np.savez(data, x=rng.standard_normal((1, 64)).astype("f4"))
    rewriter.fix(model, fixed, inputs=data, tolerance=0.25, passes="mixed-precision", build=False)
    found = rewriter.locate(model, fixed, inputs=data, engine="emulation")
    verified = rewriter.verify(model, fixed, inputs=data, engine="emulation", build=False)
    assert found.tolerance == verified.tolerance.value == 0.005  # a file's own looser limit does not count
    assert verified.outputs[0].relative_l2
    assert found.outputs[0].error == pytest.approx(verified.outputs[0].relative_l2, rel=1e-6)
    assert "FP32 accumulators" in found.engine
    rewriter.fix(model, fixed, inputs=data, preset="trt-bf16", build=False)
    assert rewriter.locate(model, fixed, inputs=data, engine="emulation").tolerance == 0.04
    assert rewriter.locate(model, model, inputs=data, engine="emulation", tolerance=0.5).tolerance == 0.5
