"""What ONNX Runtime gets: versions that it takes, and memory that it does not write to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from graphs import graph
from onnx import helper, numpy_helper
from paths import ROOT

from rewriter.ir.errors import ArithmeticRunError
from rewriter.ir.model import Array, Model, load
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.engines.onnxruntime_library import newest_ir, newest_opset

CHANNELS = 512
"""A weight of this many numbers is detached."""

TRAINING = "training_mode = 1"
MAIN = f"""
    g (float[2,{CHANNELS},4] x, float[{CHANNELS}] s, float[{CHANNELS}] b, float[{CHANNELS}] m,
       float[{CHANNELS}] v) => (float[2,{CHANNELS},4] y) {{
        y, m2, v2 = BatchNormalization<{TRAINING}>(x, s, b, m, v)
    }}"""
RESHAPED = MAIN.replace("y, m2, v2 =", "n = Identity(m)  y, m2, v2 =").replace("b, m, v)", "b, n, v)")
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
    pytest.param(RESHAPED, 17, id="after an operator that shares memory"),
    pytest.param(BRANCH, 17, id="in a branch"),
]


def values() -> dict[str, Array]:
    x = np.random.default_rng(0).standard_normal((2, CHANNELS, 4)).astype(np.float32)
    rest = {
        name: np.full(CHANNELS, value, np.float32) for name, value in zip("sbmv", (1, 0, 5, 7), strict=True)
    }
    return {"x": x, **rest}


@pytest.mark.parametrize(("body", "opset"), BODIES)
def test_feeds_stay_as_they_are(body: str, opset: int) -> None:
    feeds = values()
    with Session(graph(body, opset=opset)) as session:
        first = session.run(feeds)
        second = session.run(feeds)
    for name, value in values().items():
        np.testing.assert_array_equal(feeds[name], value)
    np.testing.assert_array_equal(first["y"], second["y"])
    assert abs(float(first["y"].mean())) < 1e-4, "of the batch, not of m and v"


def with_weights(body: str, opset: int) -> Model:
    proto = graph(body, opset=opset).proto
    del proto.graph.input[1:]
    held = {name: value for name, value in values().items() if name != "x"}
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in held.items())
    return load(proto)


@pytest.mark.parametrize(("body", "opset"), BODIES)
def test_weights_stay_as_they_are(body: str, opset: int) -> None:
    model = with_weights(body, opset)
    with Session(model) as session:
        session.run({"x": values()["x"]})
    assert set(model.weights) == {"s", "b", "m", "v"}
    for name, weight in model.weights.items():
        np.testing.assert_array_equal(weight, values()[name])


CASTS = """
    g (float[4] x) => (float[4] y) {
        c = Constant<value = bool {0}>()
        wide = Cast<to = 11>(x)
        narrow = Cast<to = 1>(wide)
        y = If (c) <
            then_branch = t () => (float[4] u) { u = Tanh(narrow) },
            else_branch = e () => (float[4] w) { w = Neg(narrow) }
        >
    }"""


@pytest.mark.parametrize("optimize", [False, True])
def test_casts_that_undo_each_other_reach_a_branch(optimize: bool) -> None:
    model = graph(CASTS)
    x = np.arange(4, dtype=np.float32)
    with Session(model, optimize=optimize) as session:
        np.testing.assert_array_equal(session.run({"x": x})["y"], -x)
    assert [node.op_type for node in model.proto.graph.node] == ["Constant", "Cast", "Cast", "If"]


MAPPED = """
import sys, numpy as np
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.ir.model import load
with Session(load(sys.argv[1])) as session:
    session.run({"x": np.ones((2, 512, 4), np.float32)})
print("lives")
"""


def test_mapped_weights_do_not_crash(tmp_path: Path) -> None:
    """In a process of its own: a write to a read-only page is SIGSEGV."""
    path = tmp_path / "m.onnx"
    whole = with_weights(MAIN, 17).whole()
    onnx.save(whole, path, save_as_external_data=True, location="m.data", size_threshold=0)
    data = (tmp_path / "m.data").read_bytes()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MAPPED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr
    assert (tmp_path / "m.data").read_bytes() == data


def negated(ir: int, opset: int) -> Model:
    ports = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [3]) for name in "xy"]
    made = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", ports[:1], ports[1:])
    return load(helper.make_model(made, ir_version=ir, opset_imports=[helper.make_opsetid("", opset)]))


@pytest.mark.parametrize("ir", range(8, onnx.IR_VERSION + 1))
def test_every_ir_of_onnx_runs(ir: int) -> None:
    model = negated(ir, 17)
    with Session(model) as session:
        np.testing.assert_array_equal(session.run({"x": np.ones(3, np.float32)})["y"], -np.ones(3))
    assert model.proto.ir_version == ir, "the model itself keeps its version"


def test_a_newer_operator_set_is_declined_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewriter.runtime.engines.onnxruntime_library.newest_opset", lambda: 20)
    model = negated(8, 21)
    model.path = Path("m.onnx")
    with pytest.raises(
        ArithmeticRunError, match=r"^m\.onnx: operator set 21 is newer than 20, the ne"
    ) as caught:
        Session(model)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("export the model with opset 20 or older")


def test_the_newest_versions_load_and_later_ones_do_not() -> None:
    assert newest_ir() <= onnx.IR_VERSION
    with Session(negated(newest_ir(), newest_opset())):
        pass
    if newest_opset() < onnx.defs.onnx_opset_version():
        with pytest.raises(ArithmeticRunError, match="is newer than"):
            Session(negated(8, newest_opset() + 1))
