"""FP32 nodes and Casts as the side-by-side benchmark counts them."""

from __future__ import annotations

import onnx.parser
import pytest

from benchmarks.census import Census, census


def counted(text: str) -> Census:
    return census(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}'))


@pytest.mark.parametrize(
    ("text", "fp32_nodes", "casts", "nodes"),
    [
        pytest.param("g (float[2] x) => (float[2] y) { a = Exp(x)\n y = Neg(a) }", 2, 0, 2, id="all FP32"),
        pytest.param(
            """g (float[2] x) => (float[2] y) {
                h = Cast<to = 10>(x)
                a = Exp(h)
                y = Cast<to = 1>(a)
            }""",
            0,
            2,
            1,
            id="FP16 between FP32 ends",
        ),
        pytest.param(
            """g (float16[2] x) => (float16[2] y) {
                a = Exp(x)
                f = Cast<to = 1>(a)
                b = Sqrt(f)
                c = Neg(b)
                h = Cast<to = 10>(c)
                y = Abs(h)
            }""",
            2,
            2,
            4,
            id="an island of two",
        ),
        pytest.param(
            """g (float16[1,1,4,4] x) => (float16[1,1,8,8] y) <float[4] scales = {1, 1, 2, 2}> {
                y = Resize<mode = "nearest">(x, , scales)
            }""",
            0,
            0,
            1,
            id="FP32 scales are constants",
        ),
        pytest.param(
            """g (float16[n,4] x) => (int64[1] y) {
                s = Shape(x)
                f = Cast<to = 1>(s)
                d = Div(f, f)
                y = Cast<to = 7>(d)
            }""",
            0,
            0,
            0,
            id="shape arithmetic in floats",
        ),
        pytest.param(
            """g (float16[2] x) => (float16[2] y) <float[2] w = {1, 2}> {
                v = Exp(w)
                h = Cast<to = 10>(v)
                y = Mul(x, h)
            }""",
            0,
            0,
            1,
            id="constants that are folded",
        ),
        pytest.param(
            """g (int64[2] i, float16[2] x) => (float16[2] y) {
                m = Cast<to = 10>(i)
                y = Mul(x, m)
            }""",
            0,
            0,
            1,
            id="a Cast of integers is not counted",
        ),
        pytest.param(
            """g (bool b, float16[2] x) => (float[2] y) {
                y = If (b) <
                    then_branch = t () => (float[2] p) { f = Cast<to = 1>(x) p = Exp(f) },
                    else_branch = e () => (float[2] q) { q = Cast<to = 1>(x) }
                >
            }""",
            2,
            2,
            2,
            id="an If and the Exp inside it",
        ),
    ],
)
def test_fp32_nodes_and_casts_are_counted(text: str, fp32_nodes: int, casts: int, nodes: int) -> None:
    found = counted(text)
    assert (found.fp32_nodes, found.casts, found.nodes, found.untyped) == (fp32_nodes, casts, nodes, 0)


def test_bodies_of_local_functions_are_counted() -> None:
    text = """
        <ir_version: 8, opset_import: ["" : 17, "own" : 1]>
        g (float[2] x) => (float[2] y) { y = own.Twice(x) }
        <opset_import: ["" : 17], domain: "own">
        Twice (a) => (b) { c = Exp(a) b = Neg(c) }
    """
    assert census(onnx.parser.parse_model(text)).fp32_ops == {"Exp": 1, "Neg": 1}
