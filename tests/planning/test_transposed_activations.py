"""Activations in FP32 after ConvTransposes: the rule, the emulated rounding, and `fix`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import graph, run
from needs import needs_rtx
from onnx import NodeProto
from paths import MODELS

from rewriter.hazards.planning.activations import PROBE, extend_over_activations, refusals
from rewriter.hazards.planning.free_fp32 import RULE
from rewriter.ir.base import Target
from rewriter.ir.model import Array, facts, load
from rewriter.ir.plan import Plan, Precision
from rewriter.jobs.fix import api
from rewriter.runtime.emulation import emulation
from rewriter.runtime.figures.pair import relative_l2

TARGET = Target(answers={"conv-transpose-accumulation": "fp32"})

HEAD = """
    g (float[1,2,4,4] x, float[1,2,4,4] r) => (float[1,2,H,W] y)
    <float[2,2,1,1] w = {1,2,3,4}, float[2] b = {1,2}, float[1,2,1,1] s = {2,3}> {
        t = ConvTranspose(x, w, b)
"""


def activations(body: str, target: Target = TARGET, precision: Precision = "fp16") -> str:
    """First outputs of what is kept in FP32 behind the ConvTranspose `t`."""
    model = graph(f"{HEAD} {body} }}")
    plan = extend_over_activations(model, Plan(precision, "keep"), target)
    assert {d.rule for d in plan.decisions} <= {RULE}
    assert {d.tensor for d in plan.decisions} <= {"t"}
    return " ".join(d.key.removeprefix("0:") for d in plan.decisions)


LAST = "y = ConvTranspose(a, w)"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(f"a = Relu(t)\n {LAST}", "a", id="Relu"),
        pytest.param(f"g = Sigmoid(t)\n a = Mul(t, g)\n {LAST}", "g a", id="SiLU"),
        pytest.param(f"g = Sigmoid(t)\n a = Mul(g, t)\n {LAST}", "g a", id="SiLU, gate first"),
        pytest.param(f"m = Mul(t, s)\n a = Relu(m)\n {LAST}", "m a", id="a scale"),
        pytest.param("y = Relu(t)", "y", id="an output after it"),
        pytest.param(f"m = Relu(t)\n a = Add(m, r)\n {LAST}", "m", id="up to a residual sum"),
        pytest.param(f"m = Add(t, r)\n a = Relu(m)\n {LAST}", "", id="a residual sum first"),
        pytest.param(f"m = Relu(t)\n a = Add(m, x)\n {LAST}", "m", id="what the Conv read is another tensor"),
        pytest.param(f"m = Relu(t)\n n = Add(t, r)\n a = Mul(m, n)\n {LAST}", "", id="read by a sum, too"),
        pytest.param(f"a = Softmax(t)\n {LAST}", "", id="not elementwise"),
        pytest.param(f"a = Identity(t)\n {LAST}", "", id="a view"),
    ],
)
def test_which(body: str, expected: str) -> None:
    assert activations(body) == expected


def test_a_result_that_is_an_output_has_none() -> None:
    head = HEAD.replace("=> (", "=> (float[1,2,4,4] t, ")
    model = graph(f"{head} y = Relu(t) }}")
    plan = extend_over_activations(model, Plan("fp16", "keep"), TARGET)
    assert plan.decisions == ()


def test_other_strides_were_not_measured() -> None:
    model = graph(f"{HEAD} u = ConvTranspose<strides = [2,2]>(t, w)\n y = Relu(u) }}")
    plan = extend_over_activations(model, Plan("fp16", "keep"), TARGET)
    assert plan.decisions == ()


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param({}, id="not asked"),
        pytest.param({"conv-transpose-accumulation": "fp16"}, id="sums in FP16"),
        pytest.param({**TARGET.answers, PROBE: "fp16"}, id="rounded all the same"),
    ],
)
def test_the_target_decides(answers: dict[str, str]) -> None:
    assert activations("y = Relu(t)", Target(answers=answers)) == ""


@pytest.mark.parametrize("quantised", ["weight", "activation"])
def test_quantised_tensors_are_skipped(quantised: str) -> None:
    body = "t = ConvTranspose(x, v, b)\n y = Relu(t)"
    if quantised == "activation":
        body = (
            "t = ConvTranspose(x, w, b)\n a = Relu(t)\n q = QuantizeLinear(a, k)\n y = DequantizeLinear(q, k)"
        )
    model = graph(
        f"""
        g (float[1,2,4,4] x) => (float[1,2,H,W] y)
        <float[2,2,1,1] w = {{1,2,3,4}}, float[2] b = {{1,2}}, float k = {{0.1}},
         int8[2,2,1,1] i = {{1,2,3,4}}> {{
            v = DequantizeLinear(i, k)
            {body}
        }}""",
        opset=21,
    )
    plan = extend_over_activations(model, Plan("fp16", "keep"), TARGET)
    assert plan.decisions == ()


def test_a_model_without_any_keeps_its_plan() -> None:
    """A custom operator may have attributes of the same names and other types."""
    proto = graph("g (float[1,2] x) => (float[1,2] y) { t = Neg(x)\n y = Relu(t) }").proto
    proto.graph.node[0].domain = "my"
    proto.graph.node[0].attribute.add(name="strides", type=2, i=2)
    proto.opset_import.add(domain="my", version=1)
    plan = Plan("fp16", "keep")
    assert extend_over_activations(load(proto), plan, TARGET) is plan


def test_a_negative_probe_is_reported() -> None:
    (reported,) = refusals(Target(answers={PROBE: "fp16"}))
    assert "activations after ConvTransposes stay FP16" in reported
    assert list(refusals(TARGET)) == []


def test_bf16_has_none() -> None:
    assert activations("y = Relu(t)", precision="bf16") == ""


CHANNELS, SIZE, LAYERS = 64, 14, 4
SILU = "s{n} = Sigmoid({x})\n {y} = Mul({x}, s{n})"
RELU = "{y} = Relu({x})"


def chain(activation: str, kernel: int, *, fp32: bool) -> str:
    """Layers of ConvTranspose with bias and activation, all FP16 but for the activations."""
    lines = []
    for n in range(LAYERS):
        out = f"a{n + 1}" if n + 1 < LAYERS else "y"
        pad = kernel // 2
        lines.append(f"t{n} = ConvTranspose<pads = [{pad},{pad},{pad},{pad}]>(a{n}, w{n}, b{n})")
        if fp32:
            lines.append(f"c{n} = Cast<to = 1>(t{n})\n {activation.format(n=n, x=f'c{n}', y=f'h{n}')}")
            lines.append(f"{out} = Cast<to = 10>(h{n})")
        else:
            lines.append(activation.format(n=n, x=f"t{n}", y=out))
    shape = f"float16[1,{CHANNELS},{SIZE},{SIZE}]"
    weights = "".join(
        f", float16[{CHANNELS},{CHANNELS},{kernel},{kernel}] w{n}, float16[{CHANNELS}] b{n}"
        for n in range(LAYERS)
    )
    return f"g ({shape} a0{weights}) => ({shape} y) {{ " + "\n".join(lines) + " }"


@pytest.mark.parametrize(
    ("activation", "kernel", "fp16", "fp32"),
    [
        pytest.param(RELU, 3, 4.95e-4, 4.02e-4, id="3x3 and Relu"),
        pytest.param(RELU, 1, 6.18e-4, 4.79e-4, id="1x1 and Relu"),
        pytest.param(SILU, 3, 8.30e-4, 5.53e-4, id="3x3 and SiLU"),
    ],
)
def test_errs_as_measured_on_an_h200(activation: str, kernel: int, fp16: float, fp32: float) -> None:
    """The figures are of 64 channels at 56x56 and of 256 at 56x56 (1x1) and 40x40 (SiLU).

    With FP32 activations the last layer was two kernels there, and rounded before its bias all the same.
    """
    rng = np.random.default_rng(0)
    scale = np.sqrt(2 / (CHANNELS * kernel * kernel))
    feeds = {"a0": rng.standard_normal((1, CHANNELS, SIZE, SIZE)).astype(np.float16)}
    for n in range(LAYERS):
        weight = rng.standard_normal((CHANNELS, CHANNELS, kernel, kernel)) * scale
        feeds |= {f"w{n}": weight.astype(np.float16)}
        feeds |= {f"b{n}": (rng.standard_normal(CHANNELS) * 0.3).astype(np.float16)}
    (exact,) = run(graph(chain(activation, kernel, fp32=False).replace("float16", "float")), feeds32(feeds))
    errors = []
    for wide in (False, True):
        model = graph(chain(activation, kernel, fp32=wide))
        (found,) = run(emulation(model, facts.infer(model), "fp16"), feeds)
        errors.append(relative_l2(exact, found))
    assert errors[0] == pytest.approx(fp16, rel=0.15)
    assert 0.7 * fp32 < errors[1] < fp32


@pytest.mark.parametrize("bias", ["b", '""'], ids=["a bias", "an empty one"])
def test_a_kernel_shape_need_not_be_given(bias: str) -> None:
    text = f"""
        g (type[1,8,16] x, type[8,4,3] w, type[4] b) => (type[1,4,16] y) {{
            y = ConvTranspose<pads = [1,1]>(x, w, {bias})
        }}"""
    rng = np.random.default_rng(0)
    feeds = {
        name: rng.standard_normal(shape).astype(np.float16)
        for name, shape in {"x": (1, 8, 16), "w": (8, 4, 3), "b": (4,)}.items()
    }
    (exact,) = run(graph(text.replace("type", "float")), feeds32(feeds))
    model = graph(text.replace("type", "float16"))
    (found,) = run(emulation(model, facts.infer(model), "fp16"), feeds)
    assert 1e-4 < relative_l2(exact, found) < 1e-3


def feeds32(feeds: dict[str, Array]) -> dict[str, Array]:
    return {name: value.astype(np.float32) for name, value in feeds.items()}


CASE = {"inputs": MODELS / "resnet.npz", "target": "tensorrt-rtx", "build": False}
PIPELINE = "transpose-convs{depth=1 work=0},mixed-precision{epilogues=true},clean-casts"


def test_fix_plans_them_after_the_convs_that_it_turned(tmp_path: Path) -> None:
    case: dict[str, Any] = {**CASE, "passes": PIPELINE}
    saved = tmp_path / "plan.json"
    first = api.fix(MODELS / "resnet.onnx", save_plan=saved, **case)
    assert first.plan is not None
    planned = [d for d in first.plan.decisions if d.rule == RULE and d.op == "Relu"]
    assert first.verdict is not None
    assert first.verdict.passed
    made = {name: node for node in first.proto.graph.node for name in node.output}
    behind = [
        node
        for node in first.proto.graph.node
        if node.op_type == "Relu" and _cast_from(made, node.input[0]) == "ConvTranspose"
    ]
    assert len(behind) == len(planned) > 0
    again = api.fix(MODELS / "resnet.onnx", plan=saved, **case)
    assert again.proto.SerializeToString() == first.proto.SerializeToString()


def _cast_from(made: dict[str, NodeProto], name: str) -> str:
    """The operator whose result a Cast makes `name` of; of what no Cast makes, Cast."""
    cast = made[name]
    return made[cast.input[0]].op_type if cast.op_type == "Cast" and cast.input[0] in made else "Cast"


def test_a_plan_that_is_given_stays_as_it_is(tmp_path: Path) -> None:
    case: dict[str, Any] = {**CASE, "verify": False}
    saved = tmp_path / "plan.json"
    api.fix(MODELS / "resnet.onnx", save_plan=saved, **case, passes=PIPELINE.replace("{epilogues=true}", ""))
    result = api.fix(MODELS / "resnet.onnx", plan=saved, **case, passes=PIPELINE)
    assert result.plan is not None
    assert RULE not in {d.rule for d in result.plan.decisions}


@needs_rtx
@pytest.mark.parametrize("name", ["resnet", "nafnet", "rtdetr"])
def test_tensorrt_builds_them(name: str) -> None:
    result = api.fix(
        MODELS / f"{name}.onnx", inputs=MODELS / f"{name}.npz", target="tensorrt-rtx", passes=PIPELINE
    )
    assert result.verdict is not None
    build = next(check for check in result.verdict.checks if check.name == "build")
    assert build.passed
    assert "types as planned" in build.summary
