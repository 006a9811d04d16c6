"""Round trips to FP16 after products: `fix` writes none in any model, `scan` reports given ones."""

import numpy as np
import pytest
from graphs import graph, matrix
from hypothesis import given
from hypothesis import strategies as st

import rewriter
from rewriter.ir.graph import open_graphs
from rewriter.ir.model import Model
from rewriter.target.quirks import lost_round_trips

STEPS = {
    "bias": "{out} = Add({read}, b)",
    "relu": "{out} = Relu({read})",
    "gelu": "{out}i = Sigmoid({read}) {out} = Mul({read}, {out}i)",
    "residual": "{out} = Add({read}, {other})",
    "norm": "{out} = LayerNormalization({read}, b)",
    "softmax": "{out} = Softmax({read})",
    "reshape": "{out}i = Reshape({read}, flat) {out} = Reshape({out}i, square)",
    "transpose": "{out} = Transpose<perm = [1, 0]>({read})",
}
PRODUCT, ROUND = "{out} = MatMul({read}, w)", "{out}i = Cast<to = 10>({read}) {out} = Cast<to = 1>({out}i)"


def trips(source: Model) -> list[str]:
    """Inputs of the first Casts."""
    opened = open_graphs(source)
    return [trip.down.input[0] for view in opened for trip in lost_round_trips(view)]


@st.composite
def random_networks(draw: st.DrawFn) -> Model:
    """Products, elementwise operators, norms and views over FP32 [4,4]; some results go to FP16 and back."""
    tensors, lines = ["x"], []
    for index in range(draw(st.integers(2, 7))):
        step = draw(st.sampled_from([PRODUCT, ROUND, ""])) or STEPS[draw(st.sampled_from(sorted(STEPS)))]
        read = draw(st.sampled_from([*tensors, *tensors[-1:] * 2 * index]))
        lines.append(step.format(out=f"t{index}", read=read, other=draw(st.sampled_from(tensors))))
        tensors.append(f"t{index}")
    outputs = ", ".join(f"float[4,4] {n}" for n in sorted({tensors[-1], draw(st.sampled_from(tensors[1:]))}))
    constants = f"{matrix('w', 1.0)}, float[4] b = {{0.1, -1, 0.6, 2}}, int64[1] flat = {{16}}"
    body = f"<{constants}, int64[2] square = {{4, 4}}> {{ {' '.join(lines)} }}"
    return graph(f"g (float[4,4] x) => ({outputs}) {body}")


@given(source=random_networks(), data=st.data())
def test_fix_writes_none(source: Model, data: st.DataObject) -> None:
    computed = [node.output[0] for node in source.proto.graph.node]
    result = rewriter.fix(
        source.whole(),
        io=data.draw(st.sampled_from(["keep", "fp16"])),
        keep_fp32=data.draw(st.lists(st.sampled_from([*computed, "*"]), max_size=3, unique=True)),
        preset=data.draw(st.sampled_from(["trt-fp16", "trt11-migrate"])),
        target=data.draw(st.sampled_from(["tensorrt", "tensorrt-rtx"])),
        verify=False,
    )
    assert not trips(result.model)


ROUNDED = """
    g (float[2,4] x, float[4,4] w, float[4] b) => (float[2,4] y) {
        m = MatMul(x, w)
        a = Add(m, b)
        h = Cast<to = 10>(a)
        y = Cast<to = 1>(h)
    }"""


@pytest.mark.parametrize(
    ("target", "severity"),
    [
        pytest.param("tensorrt-rtx 1.6", "error", id="seen there"),
        pytest.param("tensorrt-rtx", "error", id="recorded of some release"),
        pytest.param("tensorrt-rtx 1.7", "error", id="the same kernels"),
        pytest.param("tensorrt-rtx 1.5", None, id="not tried"),
        pytest.param("tensorrt", None, id="another library"),
    ],
)
def test_scan_reports_a_user_s(target: str, severity: str | None) -> None:
    sample = {"x": np.ones((2, 4), np.float32), "w": np.eye(4, dtype=np.float32), "b": np.ones(4, np.float32)}
    result = rewriter.scan(graph(ROUNDED).whole(), inputs=sample, target=target)
    found = [f for f in result.findings if f.kind == "known-defect"]
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert all("drop-round-trips" in f.repair for f in found)


def test_fix_takes_a_user_s_out_and_says_so() -> None:
    source = graph(ROUNDED)
    result = rewriter.fix(source.whole(), target="tensorrt-rtx", build=False)
    assert result.verdict is not None and result.verdict.passed
    assert [len(r.changes) for r in result.passes if r.name == "drop-round-trips"] == [1]
    assert not trips(result.model)
    assert trips(source) == ["a"]
    kept = rewriter.fix(source.whole(), target="10.13", verify=False)
    assert trips(kept.model) == ["a"]
