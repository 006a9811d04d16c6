"""Small values that matter: each rule where it must report, and where a similar graph is right in FP16."""

from __future__ import annotations

import pytest
from hazard_rules import NAMES, Ranges, found, surveyed

from rewriter.hazards import PrecisionRequest
from rewriter.ir.plan import Range

BF16 = PrecisionRequest("bf16")

CHAIN = """
    g (float[4] x, float[4] w) => (float[4] y) <float half = {0.5}, float back = {-0.5}> {
        s = Mul(x, x)
        END
    }"""
LOG, ROOT = "y = Log(s)", "y = Sqrt(s)"


@pytest.mark.parametrize(
    ("end", "ranges", "expected"),
    [
        pytest.param(LOG, {"s": (1e-8, 1)}, "s y", id="a logarithm of what becomes zero"),
        pytest.param(LOG, {"s": (1e-6, 1)}, "s y", id="a logarithm of a subnormal number"),
        pytest.param(LOG, {"s": (1e-3, 1)}, "", id="a logarithm of normal numbers"),
        pytest.param(LOG, {"s": (0, 1)}, "", id="a logarithm of zero is infinite in FP32 already"),
        pytest.param(LOG, {"s": (-1, 1)}, "", id="a signed operand"),
        pytest.param("y = Reciprocal(s)", {"s": (1e-8, 1)}, "s y", id="a reciprocal"),
        pytest.param("y = Div(w, s)", {"s": (1e-8, 1)}, "s y", id="a divisor"),
        pytest.param("y = Div(s, w)", {"s": (1e-8, 1), "w": (1, 2)}, "", id="a small dividend"),
        pytest.param("y = Pow(s, back)", {"s": (1e-8, 1)}, "s y", id="the power -0.5"),
        pytest.param(ROOT, {"s": (1e-8, 1e-4), "y": (1e-4, 1e-2)}, "s y", id="small roots"),
        pytest.param(ROOT, {"s": (0, 1e-4), "y": (0, 1e-2)}, "s y", id="small roots and zeros"),
        pytest.param(ROOT, {"s": (1e-8, 25), "y": (1e-4, 5)}, "", id="roots that are mostly large"),
        pytest.param("y = Pow(s, half)", {"s": (0, 1e-4), "y": (0, 1e-2)}, "s y", id="the power 0.5"),
        pytest.param(ROOT, {"s": (2.0**-14, 1e-4), "y": (1e-4, 1e-2)}, "", id="roots of normal numbers"),
        pytest.param(LOG, {"s": (2.0**-17, 1)}, "", id="a logarithm of eight bits"),
        pytest.param(LOG, {"s": (0.99 * 2.0**-17, 1)}, "s y", id="a logarithm of seven bits"),
    ],
)
def test_small_operands(end: str, ranges: Ranges, expected: str) -> None:
    assert found("small_operands", CHAIN.replace("END", end), ranges) == expected


def test_small_operands_are_no_matter_of_bf16() -> None:
    assert found("small_operands", CHAIN.replace("END", LOG), {"s": (1e-8, 1)}, request=BF16) == ""


def test_the_island_ends_where_values_are_no_longer_small() -> None:
    text = "g (float[4] x) => (float[4] y) { a = Exp(x)\n b = Relu(a)\n c = Mul(b, b)\n y = Log(c) }"
    assert found("small_operands", text, {"a": (0.01, 2), "b": (1e-5, 2), "c": (1e-10, 4)}) == "b c y"


GUARDED = """
    g (float[4,8] x, float[4,8] mask) => (float[4,8] y)
    <float zero = {0.0}, float one = {1.0}, int64[1] last = {1}> {
        p = Softmax<axis = 1>(x)
        m = Mul(p, mask)
        s = ReduceSum(m, last)
        some = Greater(s, zero)
        d = Where(some, s, one)
        y = Div(m, d)
    }"""


def test_the_guard_of_a_division_compares_in_fp32() -> None:
    """jax2onnx writes a masked Softmax so; a sum that becomes zero in FP16 would take the other branch."""
    ranges = {"p": (1e-12, 1), "m": (0, 0.5), "s": (1e-9, 0.5), "d": (1e-9, 0.5)}
    assert found("small_operands", GUARDED, ranges) == "d m p s some y"


EXPM1 = "g (float[8] x) => (float[8] y) <float one = {1.0}, float minus = {-1.0}> { e = Exp(x) y = END }"


@pytest.mark.parametrize(
    ("end", "mean", "expected"),
    [
        pytest.param("Sub(e, one)", 0.01, "e y", id="small differences"),
        pytest.param("Add(minus, e)", 0.01, "e y", id="as a sum"),
        pytest.param("Sub(e, one)", 0.5, "", id="large differences"),
        pytest.param("Sub(e, one)", 0.125, "", id="an eighth"),
        pytest.param("Sub(e, one)", 0.1249, "e y", id="less than an eighth"),
        pytest.param("Sub(e, one)", 0.0, "", id="no difference at all"),
        pytest.param("Sub(one, e)", 0.01, "e y", id="one minus an exponential"),
        pytest.param("Add(e, one)", 0.01, "", id="one more"),
    ],
)
def test_exponential_differences(end: str, mean: float, expected: str) -> None:
    text, ranges = EXPM1.replace("END", end), {"y": Range(-1, 1, mean, True)}
    assert found("exponential_differences", text, ranges) == expected
    assert found("exponential_differences", text, ranges, request=BF16) == ""


SPECTROGRAM = """
    g (float[1,1,64] x) => (float[1,4,61] y)
    <float[4,1,4] f = {1, 0, -1, 2, 1, 0, -1, 2, 1, 0, -1, 2, 1, 0, -1, 2},
    float two = {2.0}, float e = {1e-10}> {
        c = Conv(x, f)
        MIDDLE
        a = Add(s, e)
        y = Log(a)
    }"""
SQUARE = SPECTROGRAM.replace("MIDDLE", "s = Pow(c, two)")


WIDE = Range(1e-10, 200, 0.4, True)


@pytest.mark.parametrize(
    ("text", "power", "expected"),
    [
        pytest.param(SQUARE, WIDE, "a c s y", id="a spectrogram"),
        pytest.param(SQUARE, Range(0.01, 200, 0.4, True), "", id="a small span"),
        pytest.param(
            SPECTROGRAM.replace("MIDDLE", "r = Relu(c) s = Pow(r, two)"), WIDE, "", id="after an activation"
        ),
        pytest.param(
            SPECTROGRAM.replace("MIDDLE", "z = Pow(c, two) s = Max(z, e)"),
            WIDE,
            "a c s y z",
            id="bounded by an epsilon",
        ),
        pytest.param(
            SPECTROGRAM.replace("MIDDLE", "s = Pow(x, two)").replace("[1,4,61]", "[1,1,64]"),
            WIDE,
            "",
            id="without filters",
        ),
        pytest.param(SQUARE.replace("Log", "Sqrt"), WIDE, "", id="a magnitude is no steeper than its input"),
        pytest.param(
            SQUARE.replace("Log(a)", "Pow(a, third)"), WIDE, "a c s y", id="the power 0.3 of a square"
        ),
        pytest.param(SQUARE.replace("y = Log(a)", "z = Sqrt(a) y = Sqrt(z)"), WIDE, "", id="measured before"),
        pytest.param(SQUARE.replace("Log(a)", "Reciprocal(a)"), WIDE, "a c s y", id="a reciprocal"),
        pytest.param(SQUARE.replace("Log(a)", "Div(c, a)"), WIDE, "a c s y", id="a quotient"),
        pytest.param(
            SPECTROGRAM.replace("Conv(x, f)", "Conv(n, f)").replace(
                "MIDDLE", "s = Mul(c, c) b = Abs(x) m = ReduceMax(b) n = Div(x, m)"
            ),
            WIDE,
            "a b c m n s y",
            id="back to the input, through what scales it",
        ),
        pytest.param(
            SPECTROGRAM.replace("float[1,1,64] x", "int16[1,1,64] i").replace(
                "MIDDLE", "s = Mul(c, c) x = Cast<to = 1>(i)"
            ),
            WIDE,
            "a c s x y",
            id="back to integers",
        ),
    ],
)
def test_steep_functions(text: str, power: Range, expected: str) -> None:
    text = text.replace("float e = {1e-10}", "float e = {1e-10}, float third = {0.3}")
    assert found("steep_functions", text, {"a": power}) == expected


def test_a_root_may_read_zeros_and_a_logarithm_may_not() -> None:
    zeros = {"a": Range(0, 200, 0.4, True)}
    root = SQUARE.replace("Log(a)", "Pow(a, third)").replace("float e", "float third = {0.3}, float e")
    assert found("steep_functions", root, zeros) == "a c s y"
    assert found("steep_functions", SQUARE, zeros) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(SQUARE, "", id="a Conv of 4 taps of one channel runs in FP32"),
        pytest.param(SQUARE.replace("4,1,4", "4,1,16").replace("61", "49"), "c", id="a Conv of 16 taps"),
        pytest.param(SQUARE.replace("-1", "1"), "", id="weights of one sign cancel nothing"),
    ],
)
def test_tf32_transforms(text: str, expected: str) -> None:
    basis = "{1, 0, -1, 2, 1, 0, -1, 2, 1, 0, -1, 2, 1, 0, -1, 2}"
    if "4,1,16" in text:
        text = text.replace(basis, "{" + ", ".join([basis[1:-1]] * 4) + "}")
    hazards = NAMES["steep_functions"](surveyed(text, {"a": WIDE}))
    assert " ".join(h.node.output[0] for h in hazards if h.rule == "tf32") == expected


VARIANCE = """
    g (float[4,8] x) => (float[4,1] y) {
        m = ReduceMean<axes = [1]>(x)
        p = Mul(m, m)
        q = Mul(x, x)
        a = ReduceMean<axes = [1]>(q)
        v = Sub(LEFT, p)
        y = Sqrt(v)
    }"""


@pytest.mark.parametrize(
    ("left", "ranges", "expected"),
    [
        pytest.param("a", {"a": (90, 110), "p": (90, 110), "v": (0, 2)}, "a m p q v", id="little remains"),
        pytest.param("a", {"a": (3, 4), "p": (1, 1), "v": (2, 3)}, "", id="most remains"),
        pytest.param("m", {"m": (90, 110), "p": (90, 110), "v": (0, 2)}, "", id="one of them is no square"),
        pytest.param("a", {"a": (90, 110), "p": (90, 110)}, "", id="not measured"),
        pytest.param("a", {"a": (8, 8), "p": (8, 8), "v": (2, 2)}, "", id="a quarter remains"),
        pytest.param("a", {"a": (8, 8), "p": (8.5, 8.5), "v": (2, 2)}, "a m p q v", id="less than a quarter"),
    ],
)
def test_square_differences(left: str, ranges: Ranges, expected: str) -> None:
    assert found("square_differences", VARIANCE.replace("LEFT", left), ranges) == expected


def test_a_product_of_two_tensors_is_no_square() -> None:
    other = "k = Neg(x) n = ReduceMean<axes = [1]>(k) p = Mul(m, n)"
    text = VARIANCE.replace("LEFT", "a").replace("p = Mul(m, m)", other)
    assert found("square_differences", text, {"a": (90, 110), "p": (90, 110), "v": (0, 2)}) == ""


def bank(*columns: float) -> str:
    rows = [columns if i // 4 == 0 else (0.0,) * len(columns) for i in range(16)]
    return ", ".join(str(v) for row in rows for v in row)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        pytest.param(bank(0.5, 0.5, 0.5, 1e-7), "y", id="one tiny filter"),
        pytest.param(bank(0.5, 0.5, 0.5, 0.4), "", id="filters of one size"),
        pytest.param(bank(0.5, -0.5, 0.5, 1e-7), "", id="negative weights are no bank"),
        pytest.param(", ".join(["0.5, 0.5, 0.5, 1e-7"] * 16), "", id="neither are dense ones"),
    ],
)
def test_filter_banks(weights: str, expected: str) -> None:
    text = f"g (float[2,16] x) => (float[2,4] y) <float[16,4] w = {{{weights}}}> {{ y = MatMul(x, w) }}"
    assert found("filter_banks", text) == expected


@pytest.mark.parametrize(
    ("variance", "scale", "expected"),
    [
        pytest.param("1, 2", "1, 2", "", id="ordinary statistics"),
        pytest.param("1, 9.8e7", "1, 2", "y", id="a variance beyond FP16"),
        pytest.param("1, 2", "1, 2e5", "y", id="a scale beyond FP16"),
        pytest.param("1, 1e-6", "1, 2", "", id="a subnormal variance beside its epsilon"),
        pytest.param("1, 1e-9", "1, 2", "", id="a variance that only its epsilon outweighs"),
        pytest.param("1, 2", "1, 1e-6", "y", id="a subnormal scale"),
        pytest.param("1, 2", "1, 1e-12", "", id="a channel that is switched off"),
    ],
)
def test_batch_statistics(variance: str, scale: str, expected: str) -> None:
    text = f"""
        g (float[1,2,4] x) => (float[1,2,4] y) <float[2] s = {{{scale}}}, float[2] b = {{0, 1}},
        float[2] m = {{0, 1}}, float[2] v = {{{variance}}}> {{
            y = BatchNormalization(x, s, b, m, v)
        }}"""
    assert found("batch_statistics", text) == expected
