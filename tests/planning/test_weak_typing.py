"""Weak typing: the constraints name the layers that a real parser makes."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import graphs
import numpy as np
import pytest
from nightly import some
from onnx import TensorProto
from paths import MODELS

import rewriter
from rewriter.base.errors import UsageError
from rewriter.hazards.planning import weak_typing
from rewriter.ir.model import Model, load, save, walk_graphs
from rewriter.ir.plan import Decision, Plan
from rewriter.report.fix import next_step

SOURCE = """
    g (float[4,64] x, float[64,8] w) => (float[4,8] y)
    <float[64] s = {SCALES}, float[64] b = {ZEROS}, float[8] c = {0,0,0,0,0,0,0,0}> {
        n = LayerNormalization(x, s, b)
        e = Mul(n, n)
        q = Softmax<axis = -1>(e)
        r = Gemm(q, w, c)
        y = Relu(r)
    }"""


def source() -> Model:
    text = SOURCE.replace("SCALES", ",".join(["1.0"] * 64)).replace("ZEROS", ",".join(["0.0"] * 64))
    made = graphs.graph(
        text.replace(", float[64,8] w,", ",").replace("float[4,64] x)", "float[4,64] x, float[64,8] w)")
    )
    names = ["", "mul:0, 'quoted' [x]", "soft max", "mul;0, 'quoted' [x]", "relu"]
    for node, name in zip(made.proto.graph.node, names, strict=True):
        node.name = name
    return made


ALREADY_AVOIDED = tuple(
    Decision("", op, f"0:{key}", "user", "", None, None, repair)  # type: ignore[arg-type]
    for key, op, repair in (("e", "Mul", "fp32"), ("q", "Softmax", "fp32"), ("r", "Gemm", "bf16"))
)


def test_names_become_unique_and_safe_and_nothing_else_changes() -> None:
    given = source()
    made = weak_typing.named(given)
    names = [node.name for node in made.proto.graph.node]
    assert names == [
        "n/LayerNormalization",
        "mul_0___quoted___x_",
        "soft_max",
        "mul_0___quoted___x_.1",
        "relu",
    ]
    feeds = graphs.random_feeds(given)
    assert np.array_equal(graphs.run(made, feeds)[0], graphs.run(given, feeds)[0])


def test_arguments_for_trtexec() -> None:
    made = weak_typing.named(source())
    wanted = weak_typing.constraints(made, Plan("fp16", decisions=ALREADY_AVOIDED))
    mul, soft, gemm = "mul_0___quoted___x_", "soft_max", "mul_0___quoted___x_.1"
    assert weak_typing.trtexec_arguments(wanted) == (
        "--fp16 --bf16 --precisionConstraints=obey "
        f"--layerPrecisions={mul}:fp32,{soft}:fp32,{gemm}:bf16 "
        f"--layerOutputTypes={mul}:fp32,{soft}:fp32,{gemm}:bf16"
    )
    assert weak_typing.trtexec_arguments(()) == "--fp16"


def test_integer_outputs_get_no_float_type() -> None:
    made = weak_typing.named(
        graphs.graph(
            "g (float[1,9] x) => (float[1,3] y, int64[1,3] i) <int64[1] k = {3}> { y, i = TopK(x, k) }"
        )
    )
    plan = Plan("fp16", decisions=(Decision("", "TopK", "0:y", "order", ""),))
    arguments = weak_typing.trtexec_arguments(weak_typing.constraints(made, plan))
    assert arguments == "--fp16 --precisionConstraints=obey --layerPrecisions=y/TopK:fp32"


# -- against a real parser ---------------------------------------------------------------------------


def module_of(code: str) -> ModuleType:
    module = ModuleType("constraints")
    exec(compile(code, "constraints.py", "exec"), module.__dict__)
    return module


def parsed(path: Path) -> tuple[Any, Any]:
    """TensorRT-RTX's network of a file, and what must outlive it."""
    trt = pytest.importorskip("tensorrt_rtx")
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
    assert parser.parse_from_file(str(path))
    return network, (builder, parser)


def test_the_code_finds_every_layer_of_its_nodes_in_a_real_network(tmp_path: Path) -> None:
    made = weak_typing.named(source())
    path = save(made, tmp_path / "m.onnx")
    _, python = weak_typing.write(made, Plan("fp16", decisions=ALREADY_AVOIDED), path)
    code = python.read_text()
    assert "'FP16', 'BF16'" in code
    network, _alive = parsed(path)
    kinds = {layer.name: kind for layer, kind in module_of(code).chosen(network)}
    gemm = {name for name in kinds if name.startswith("mul_0___quoted___x_.1")}
    assert len(gemm) > 1, "the parser makes a product and a sum of Gemm"
    assert {kinds.pop(name) for name in gemm} == {"BF16"}
    assert kinds == {"mul_0___quoted___x_": "FLOAT", "soft_max": "FLOAT"}


def test_a_network_of_another_model_is_refused(tmp_path: Path) -> None:
    other = graphs.graph("g (float[4] x) => (float[4] y) { y = Relu(x) }")
    network, _alive = parsed(save(other, tmp_path / "m.onnx"))
    code = weak_typing.python_code([weak_typing.Constraint("/a/Softmax", "fp32", True, 1)], "m.onnx")
    with pytest.raises(ValueError, match="/a/Softmax"):
        module_of(code).chosen(network)


FOLDED = {"if_loop": {"same/Mul"}}
"""Nodes of which the parser makes no layer of that name: in a branch of If."""


@pytest.mark.filterwarnings("ignore:these nodes have no layer")
@pytest.mark.parametrize("name", some("if_loop", "t5_encoder", "nafnet", "rtdetr"))
def test_every_constraint_of_a_case_names_a_layer(name: str, tmp_path: Path) -> None:
    output = tmp_path / f"{name}.onnx"
    result = rewriter.fix(
        MODELS / f"{name}.onnx", output, inputs=MODELS / f"{name}.npz", weak_typing=True, build=False
    )
    assert result.plan is not None and result.plan.fp32
    made = load(output)
    low = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
    assert not any(f.dtype in low for scope in made.facts().scopes for f in scope.values())
    trtexec, python = output.with_suffix(".trtexec.txt"), output.with_name(f"{output.stem}_constraints.py")
    network, _alive = parsed(output)
    module_of(python.read_text()).chosen(network)
    layers = {network.get_layer(index).name for index in range(network.num_layers)}
    listed = re.search(r"--layerPrecisions=(\S+)", trtexec.read_text())
    assert listed is not None
    wanted = [entry.rpartition(":")[0] for entry in listed[1].split(",")]
    assert len(wanted) == sum(d.op not in {"Loop", "Scan"} for d in result.plan.decisions)
    assert set(wanted) - layers <= FOLDED.get(name, set())
    nodes = [n.name for g in walk_graphs(made.proto.graph) for n in g.node]
    assert len(set(nodes)) == len(nodes)


@pytest.mark.parametrize("target", ["11", "11.4", "tensorrt-rtx"])
def test_targets_that_are_always_strongly_typed_are_refused(target: str, tmp_path: Path) -> None:
    path = save(source(), tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="only has strongly typed networks") as caught:
        rewriter.fix(path, weak_typing=True, target=target, verify=False)
    assert caught.value.options == ("weak-typing",)


def test_the_preset_does_the_same_and_names_the_command(tmp_path: Path) -> None:
    case = MODELS / "t5_encoder.onnx"
    output = tmp_path / "m.onnx"
    result = rewriter.fix(
        case, output, inputs=case.with_suffix(".npz"), preset="weak-typing", build=False, verify=False
    )
    trtexec = output.with_suffix(".trtexec.txt")
    assert trtexec.exists() and output.with_name(f"{output.stem}_constraints.py").exists()
    following, engine = next_step(result), output.with_suffix(".engine")
    assert following.build == f"trtexec --onnx={output} --saveEngine={engine} $(cat {trtexec})"
    assert not following.remarks, "nothing about --stronglyTyped"


@pytest.mark.parametrize("name", ['a"""\nraise SystemExit\n""".onnx', "it's \\", "'\"\u202e"])
def test_the_name_of_a_file_is_no_code(name: str) -> None:
    assert name in str(module_of(weak_typing.python_code((), name)).__doc__)
