"""ONNX Runtime as an engine: weights by reference, types, and failures that name the node."""

import gc
import sys
import weakref
from pathlib import Path

import graphs
import ml_dtypes
import numpy as np
import onnx
import pytest
from needs import without_gpu
from tables import values

from rewriter.base import sandbox
from rewriter.base.errors import ArithmeticRunError
from rewriter.ir.model import Array, Model
from rewriter.runtime.engines import local_session
from rewriter.runtime.engines.local_session import LIBRARIES, LocalSession
from rewriter.runtime.engines.onnxruntime import Session, on_cuda
from rewriter.runtime.engines.onnxruntime_library import NoKernelError, import_onnxruntime

ONES = {"x": np.ones((2, 64), np.float32)}


def linear() -> tuple[Model, Array]:
    """relu(x @ w) with a weight that is large enough to be detached, and its result for `ONES`."""
    array = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    body = "g (float[2,64] x, float[64,64] w) => (float[2,64] y) { [mm] t = MatMul(x, w) y = Relu(t) }"
    return graphs.with_weights(body, {"w": array}), np.maximum(ONES["x"] @ array, 0)


def run(body: str, feeds: dict[str, Array], **options: int) -> dict[str, Array]:
    with Session(graphs.graph(body, **options)) as session:
        return session.run(feeds)


@pytest.mark.parametrize("listed", [False, True], ids=["", "weights that are inputs, too"])
@pytest.mark.parametrize("optimize", [False, True], ids=["as written", "optimised"])
def test_detached_weights_reach_the_session(optimize: bool, listed: bool) -> None:
    model, expected = linear()
    if listed:
        model.proto.graph.input.append(onnx.helper.make_tensor_value_info("w", 1, [64, 64]))
    before = model.copy()
    assert "w" in model.weights
    session = Session(model, optimize=optimize)
    np.testing.assert_allclose(session.run(ONES)["y"], expected, rtol=1e-4, atol=1e-5)
    session.close()
    assert model.same_as(before)
    with pytest.raises(ArithmeticRunError, match="closed"):
        session.run(ONES)


@without_gpu
def test_where_cuda_fails_the_cpu_goes_on_with_one_line() -> None:
    model, expected = linear()
    with on_cuda(True) as notes:
        for _ in range(2):
            with Session(model) as session:
                np.testing.assert_allclose(session.run(ONES)["y"], expected, rtol=1e-4, atol=1e-5)
    (note,) = notes
    assert note.startswith("references and ranges come from the CPU, since CUDA failed: ")
    assert note.endswith(LIBRARIES)


def test_only_the_requested_outputs_are_returned() -> None:
    model = graphs.graph("g (float[2] x) => (float[2] a, float[2] b) { a = Abs(x) b = Neg(x) }")
    with Session(model) as session:
        assert list(session.run({"x": np.ones(2, np.float32)})) == ["a", "b"]
        assert list(session.run({"x": np.ones(2, np.float32)}, ["b"])) == ["b"]


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("size", [4, 4000], ids=["held by the session", "held by the model"])
def test_outputs_outlive_what_they_came_from(optimize: bool, size: int) -> None:
    """Inputs and constants that are outputs: ONNX Runtime returns the memory of the feed or the weight."""
    n = size
    body = f"""g (int64[{n}] x, float[{n}] w, float[{n}] u)
        => (int64[{n}] x, float[{n}] w, float[{n}] v, float[{n}] y) {{ v = Neg(u) y = Cast<to=1>(x) }}"""
    weights = {name: np.full(size, number, np.float32) for name, number in (("w", 7.0), ("u", -5.0))}
    session = LocalSession(graphs.with_weights(body, weights), optimize=optimize)
    del weights
    values, held = session.run({"x": np.full(size, 9, np.int64)}), weakref.ref(session.session)
    session.close()
    gc.collect()
    assert held() is None, "what ONNX Runtime allocated is free"
    _taking_their_memory = [np.full(size, -1, kind) for kind in (np.int64, np.float32) for _ in range(50)]
    assert {name: set(array.tolist()) for name, array in values.items()} == {
        "x": {9},
        "w": {7.0},
        "v": {5.0},
        "y": {9.0},
    }


def test_small_weights_are_copied_where_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = linear()
    monkeypatch.setattr(local_session, "MANY_NODES", 1)
    for least, inputs in ((0, ["w"]), (local_session.COPIED_BYTES, [])):
        monkeypatch.setattr(local_session, "COPIED_BYTES", least)
        session = LocalSession(model)
        assert list(session._inputs) == inputs
        np.testing.assert_allclose(session.run(ONES)["y"], expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_inputs_and_outputs() -> None:
    x = np.array([1, -2.5, 3e38], ml_dtypes.bfloat16)
    body = "g (bfloat16[3] x) => (bfloat16[3] y, float[3] z) { y = Identity(x) z = Cast<to=1>(x) }"
    result = run(body, {"x": x})
    assert result["y"].dtype == x.dtype
    np.testing.assert_array_equal(result["y"], x)
    np.testing.assert_array_equal(result["z"], x.astype(np.float32))


def test_non_contiguous_arrays_are_accepted() -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2).T
    np.testing.assert_array_equal(run("g (float[2,3] x) => (float[2,3] y) { y = Neg(x) }", {"x": x})["y"], -x)


@values
def test_an_operator_without_kernel_is_named(body: str, op: str) -> None:
    text = f'<ir_version: 8, opset_import: ["" : 17, "acme" : 1]>\n{body}'
    model = Model(onnx.parser.parse_model(text))
    with pytest.raises(NoKernelError) as caught:
        Session(model)
    assert caught.value.op == op
    assert op in str(caught.value)


@pytest.mark.parametrize(
    ("version", "op", "advice"), [(6, "Div", "onnx.version_converter"), (17, "Custom", "with its plugin")]
)
def test_a_missing_kernel_of_onnx_is_no_plugin(version: int, op: str, advice: str) -> None:
    text = (
        f'<ir_version: 3, opset_import: ["" : {version}]> g (float[3] x) => (float[3] y) {{ y = {op}(x, x) }}'
    )
    with pytest.raises(NoKernelError) as caught:
        Session(Model(onnx.parser.parse_model(text)))
    assert caught.value.op == op
    assert advice in str(caught.value.hint)


BROKEN = [
    pytest.param(
        "g (float[N] x, float[M] z) => (float[K] y) { [add1] y = Add(x, z) }",
        {"x": np.ones(3, np.float32), "z": np.ones(4, np.float32)},
        "node add1 (Add)",
        "3 by 4",
        id="a named node",
    ),
    pytest.param(
        "g (float[N] x, int64[1] z) => (float[K] y) { y = Gather(x, z) }",
        {"x": np.ones(3, np.float32), "z": np.array([7])},
        "node Gather(y) (Gather)",
        "idx=7",
        id="an unnamed node is identified by its output",
    ),
    pytest.param(
        "g (float[3] x) => (float[3] y) { y = Abs(x) }",
        {"x": np.ones(4, np.float32)},
        None,
        "Got: 4 Expected: 3",
        id="a feed of the wrong shape",
    ),
    pytest.param("g (float[3] x) => (float[3] y) { y = Abs(x) }", {}, None, "['x']) are missing", id="none"),
]


@pytest.mark.parametrize(("body", "feeds", "where", "why"), BROKEN)
def test_a_failed_run_names_the_node(body: str, feeds: dict[str, Array], where: str | None, why: str) -> None:
    with pytest.raises(ArithmeticRunError) as caught:
        run(body, feeds)
    assert caught.value.where == where
    assert why in str(caught.value)
    assert "onnxruntime_src" not in str(caught.value)
    assert "\n" not in caught.value.what


def test_the_error_names_the_file_before_the_node() -> None:
    model = graphs.graph("g (float[N] x, float[M] z) => (float[K] y) { [add1] y = Add(x, z) }")
    model.path = Path("dir/model.onnx")
    with Session(model) as session, pytest.raises(ArithmeticRunError, match=r"^dir/model\.onnx: node add1 "):
        session.run({"x": np.ones(3, np.float32), "z": np.ones(4, np.float32)})


def growth() -> int:
    """MiB that a session of a weight of 64 MiB adds to this process."""

    def resident() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) // 1024

    size = 4096
    text = f"g (float[1,{size}] x, float[{size},{size}] w) => (float[1,{size}] y) {{ y = MatMul(x, w) }}"
    graph = graphs.with_weights(text, {"w": np.ones((size, size), np.float32)})
    import_onnxruntime()
    before = resident()
    session = LocalSession(graph)
    assert session.run({"x": np.ones((1, size), np.float32)})["y"][0, 0] == size
    return resident() - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_are_not_copied() -> None:
    assert sandbox.run(growth, doing="the growth", limit_s=60)[0] < 32, "MiB, of a weight of 64"


def test_an_unsupported_type_names_the_node() -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (int8[3] x) => (int8[3] y) { [bad] y = Erf(x) }'
    with pytest.raises(ArithmeticRunError, match=r"node bad \(Erf\)") as caught:
        Session(Model(onnx.parser.parse_model(text)))
    assert "tensor(int8)" in caught.value.what


NARROW = ["float8e4m3fn", "float8e5m2", "float8e4m3fnuz", "float8e5m2fnuz", "int4", "uint4", "bfloat16"]


@pytest.mark.parametrize("kind", NARROW)
def test_outputs_of_types_that_numpy_lacks_are_read(kind: str) -> None:
    """ONNX Runtime hands these out as bytes, INT4 with two numbers in each."""
    dtype = getattr(onnx.TensorProto, kind.upper())
    body = f"g (float[3] x) => ({kind}[3] y) {{ y = Cast <to = {dtype}> (x) }}"
    found = run(body, {"x": np.array([0, 2, 6], np.float32)}, opset=21, ir=10)["y"]
    assert found.dtype == onnx.helper.tensor_dtype_to_np_dtype(dtype)
    assert found.astype(np.float32).tolist() == [0, 2, 6]


def test_an_output_that_is_no_tensor_is_declined_by_name() -> None:
    body = "g (float[3] x) => (seq(float[3]) y) { y = SequenceConstruct(x) }"
    with pytest.raises(ArithmeticRunError, match=r"output 'y' is seq\(tensor\(float\)\), and only tensors"):
        run(body, {"x": np.zeros(3, np.float32)})


def test_what_a_timed_run_reads_stays_in_memory() -> None:
    """ONNX Runtime 1.28 does not keep what is bound: it read freed memory, and crashed."""
    session = LocalSession(graphs.graph("g (float[1,4] x) => (float[1,4] y) { y = Relu(x) }"))
    array = np.ones((1, 4), np.float32)
    held = weakref.ref(array)
    timed = session.bound({"x": array})
    del array
    gc.collect()
    assert held() is not None
    timed()


# -- what ONNX Runtime gets ---------------------------------------------------------------------
CHANNELS = 512  # a weight of this many numbers is detached
TRAINING = "training_mode = 1"
MAIN = f"""
    g (float[2,{CHANNELS},4] x, float[{CHANNELS}] s, float[{CHANNELS}] b, float[{CHANNELS}] m,
       float[{CHANNELS}] v) => (float[2,{CHANNELS},4] y) {{
        y, m2, v2 = BatchNormalization<{TRAINING}>(x, s, b, m, v) }}"""
BRANCH = f"""
    g (float[2,{CHANNELS},4] x, float[{CHANNELS}] s, float[{CHANNELS}] b, float[{CHANNELS}] m,
       float[{CHANNELS}] v) => (float[2,{CHANNELS},4] y) {{
        c = Constant<value = bool {{1}}>()
        y = If (c) <
            then_branch = t () => (float[2,{CHANNELS},4] u) {{
                u, m2, v2 = BatchNormalization<{TRAINING}>(x, s, b, m, v)
            }},
            else_branch = e () => (float[2,{CHANNELS},4] w) {{ w = Identity(x) }}
        >
    }}"""
BODIES = [
    pytest.param(MAIN, 17, id="main graph"),
    pytest.param(MAIN, 14, id="opset 14"),
    pytest.param(MAIN.replace("v2 =", "v2, sm, sv =").replace(f"<{TRAINING}>", ""), 9, id="opset 9"),
    pytest.param(BRANCH, 17, id="in a branch"),
]


@pytest.mark.parametrize(("body", "opset"), BODIES)
def test_weights_stay_as_they_are(body: str, opset: int) -> None:
    numbers = dict(zip("sbmv", (1, 0, 5, 7), strict=True))
    model = graphs.with_weights(
        body, {name: np.full(CHANNELS, n, np.float32) for name, n in numbers.items()}, opset=opset
    )
    x = np.random.default_rng(0).standard_normal((2, CHANNELS, 4)).astype(np.float32)
    session = LocalSession(model)  # here, not in a child that has a copy
    first, second = session.run({"x": x}), session.run({"x": x})
    np.testing.assert_array_equal(first["y"], second["y"])
    assert abs(float(first["y"].mean())) < 1e-4, "of the batch, not of m and v"
    assert {name: set(weight) for name, weight in model.weights.items()} == {
        n: {v} for n, v in numbers.items()
    }


CASTS = """
    g (float[4] x) => (float[4] y) {
        c = Constant<value = bool {0}>() wide = Cast<to = 11>(x) narrow = Cast<to = 1>(wide)
        y = If (c) <
            then_branch = t () => (float[4] u) { u = Tanh(narrow) },
            else_branch = e () => (float[4] w) { w = Neg(narrow) }
        >
    }"""


@pytest.mark.parametrize("optimize", [False, True])
def test_casts_that_undo_each_other_reach_a_branch(optimize: bool) -> None:
    model = graphs.graph(CASTS)
    x = np.arange(4, dtype=np.float32)
    with Session(model, optimize=optimize) as session:
        np.testing.assert_array_equal(session.run({"x": x})["y"], -x)
    assert [node.op_type for node in model.proto.graph.node] == ["Constant", "Cast", "Cast", "If"]


def negated(ir: int, opset: int) -> Model:
    body = "g (float[3] x) => (float[3] y) { y = Neg(x) }"
    return Model(onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]> {body}'))


@pytest.mark.parametrize("ir", [8, 10, onnx.IR_VERSION])
def test_every_ir_of_onnx_runs(ir: int) -> None:
    model = negated(ir, 17)
    with Session(model) as session:
        np.testing.assert_array_equal(session.run({"x": np.ones(3, np.float32)})["y"], -np.ones(3))
    assert model.proto.ir_version == ir, "the model itself keeps its version"


def test_a_newer_operator_set_is_declined_by_name() -> None:
    model = negated(8, 99)
    model.path = Path("m.onnx")
    with pytest.raises(
        ArithmeticRunError, match=r"^m\.onnx: operator set 99 of ai.onnx is newer than"
    ) as caught:
        Session(model)
    assert caught.value.hint.startswith("export the model with opset 2")
