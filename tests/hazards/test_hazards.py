"""Each rule on a graph where it must report, and on a similar one where it must not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hazard_rules import NAMES, Ranges, found, one, said, surveyed

from rewriter.hazards import RULES, SCAN_RULES, PrecisionRequest, types
from rewriter.ir.plan import Precision, Range

FP16: Precision = "fp16"
BF16: Precision = "bf16"
NAN = Range(-1.0, 1.0, math.nan, False)


class TestRequests:
    TEXT = """
        g (float[2] x) => (float[2] y) {
            enc_a = Exp(x)
            enc_b = Neg(enc_a)
            y = Exp(enc_b)
        }"""

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            pytest.param(PrecisionRequest(keep_nodes=("enc_*",)), "enc_a enc_b", id="a pattern"),
            pytest.param(PrecisionRequest(keep_nodes=("enc_b", "y")), "enc_b y", id="two names"),
            pytest.param(PrecisionRequest(keep_nodes=("enc",)), "", id="a pattern is no prefix"),
            pytest.param(PrecisionRequest(keep_ops=("Exp",)), "enc_a y", id="an operator"),
            pytest.param(PrecisionRequest(), "", id="nothing requested"),
        ],
    )
    def test_user_choice(self, asked: PrecisionRequest, expected: str) -> None:
        assert found("user_choice", self.TEXT, request=asked) == expected


class TestTypes:
    @pytest.mark.parametrize(
        ("text", "opset", "low", "expected"),
        [
            pytest.param(
                "g (float a, float b, float c) => (float[n] y) { y = Range(a, b, c) }",
                17,
                FP16,
                "y",
                id="Range",
            ),
            pytest.param("g (float[2] x) => (float[2] y) { y = Exp(x) }", 17, FP16, "", id="Exp"),
            pytest.param(
                "g (float[1,1,4,4] x, float[1,1,3,3] w) => (float[1,1,2,2] y) { y = Conv(x, w) }",
                17,
                BF16,
                "y",
                id="Conv in BF16 below opset 22",
            ),
            pytest.param(
                "g (float[2] x) => (int64[1] y) { y = Shape(x) }",
                17,
                FP16,
                "",
                id="Shape computes in no precision",
            ),
            pytest.param(
                "g (float[2] x) => (int32[2] y) { y = BitCast<to = 6>(x) }",
                26,
                FP16,
                "y",
                id="BitCast reads bits",
            ),
            pytest.param(
                """g (float[4] x, int64 i) => (float[2] y) {
                    s = SplitToSequence<axis = 0>(x)
                    y = SequenceAt(s, i)
                }""",
                17,
                FP16,
                "s y",
                id="sequences",
            ),
        ],
    )
    def test_no_lower_type(self, text: str, opset: int, low: Precision, expected: str) -> None:
        assert found("no_lower_type", text, opset=opset, request=PrecisionRequest(low)) == expected

    def test_unmeasured(self) -> None:
        text = "g (float[2] x) => (float[2] y) { a = Exp(x)\n y = Neg(a) }"
        assert found("unmeasured", text, {"x": (0, 1), "y": (0, 1)}) == "a"

    BRANCH = """
        g (bool c, float[2] x) => (float[2] y) {
            y = If (c) <
                then_branch = yes () => (float[2] t) { i = Identity(x) t = Neg(i) },
                else_branch = no () => (float[2] e) { e = Abs(x) }
            >
        }"""

    @pytest.mark.parametrize(
        ("ranges", "reasons"),
        [
            pytest.param(
                {"i": (0, 1)}, {"no sample takes then_branch of If(y), whose condition is c"}, id="not taken"
            ),
            pytest.param({"i": (0, 1), "t": (0, 1)}, set(), id="taken"),
        ],
    )
    def test_a_branch_that_no_sample_takes(self, ranges: Ranges, reasons: set[str]) -> None:
        survey = surveyed(self.BRANCH, ranges, scope=1)
        assert {h.reason for h in types.unmeasured(survey)} == reasons

    def test_random_numbers(self) -> None:
        text = "g (float[2] x) => (float[2] y) { r = RandomNormalLike(x)\n y = Add(x, r) }"
        assert found("generated", text) == "r"


WEIGHTS = "g (float[2,4] x) => (float[2,4] y) <float[4,4] w = {VALUES}> { y = MatMul(x, w) }"
SUBNORMAL = "3.3e-6, -2.1e-6, 1.3e-6, 4.7e-6, -3.7e-6, 1.9e-6, 2.9e-6, -4.1e-6, " * 2
SCALED = "g (float[2] x) => (float[2] y) <float c = {C}> { y = OP(x, c) }"
MASK = """
    g (float[2,2] x) => (float[2,2] y) <float[2,2] m = {0, -1e9, 0, 0}> {
        s = Add(x, m)
        y = Softmax<axis = -1>(s)
    }"""


class TestConstants:
    @pytest.mark.parametrize(
        ("values", "low", "expected"),
        [
            pytest.param(SUBNORMAL, FP16, "warning y", id="subnormal in FP16"),
            pytest.param(SUBNORMAL, BF16, "", id="normal in BF16"),
            pytest.param(SUBNORMAL.replace("e-6", "e-4"), FP16, "", id="normal in FP16"),
            pytest.param(SUBNORMAL.replace("3.3e-6", "3.3e-2"), FP16, "", id="small beside a large one"),
            pytest.param(SUBNORMAL.replace("3.3e-6", "3.3e6"), FP16, "error y", id="beyond 65504"),
            pytest.param(SUBNORMAL.replace("e-6", "e-30"), FP16, "error y", id="zero in FP16"),
        ],
    )
    def test_weights_of_products(self, values: str, low: Precision, expected: str) -> None:
        assert said("weights", WEIGHTS.replace("VALUES", values.removesuffix(", ")), low=low) == expected

    @pytest.mark.parametrize(
        ("text", "low", "expected"),
        [
            pytest.param("y = Div(x, c)", FP16, "error y", id="divided by"),
            pytest.param("y = Mul(x, c)", BF16, "", id="in BF16's range"),
            pytest.param("y = Min(x, c)", FP16, "note y", id="a bound that nothing reaches"),
            pytest.param("y = Clip(x, , c)", FP16, "note y", id="a bound of Clip"),
        ],
    )
    def test_a_huge_scalar(self, text: str, low: Precision, expected: str) -> None:
        text = f"g (float[2] x) => (float[2] y) <float c = {{1e6}}> {{ {text} }}"
        assert said("weights", text, low=low) == expected

    def test_a_constant_mask_and_an_addend(self) -> None:
        assert said("weights", MASK) == "note s"
        added = "g (float[2,4] x) => (float[2,4] y) <float[4] w = {3e-6, 2e-6, 1e-6, 5e-6}> {y = Add(x, w)}"
        assert said("weights", added) == "", "an addend loses nothing that counts"

    @pytest.mark.parametrize(
        ("op", "value", "expected"),
        [
            pytest.param("Mul", "1e-9", "warning y", id="times zero"),
            pytest.param("Div", "1e-9", "error y", id="by zero"),
            pytest.param("Mul", "1e-6", "warning y", id="1e-6 is off by 1 %"),
            pytest.param("Mul", "1e-3", "", id="1e-3 is a normal number"),
            pytest.param("Add", "1e-9", "", id="adding nothing is harmless"),
        ],
    )
    def test_small_factors(self, op: str, value: str, expected: str) -> None:
        assert said("underflow", SCALED.replace("OP", op).replace("C", value)) == expected


class TestUnderflow:
    @pytest.mark.parametrize(
        ("largest", "low", "expected"),
        [
            pytest.param(1e-8, FP16, "error a, error b", id="below the smallest number: producer, consumer"),
            pytest.param(0.0, FP16, "", id="zero is exact"),
            pytest.param(1e-8, BF16, "", id="BF16 has FP32's exponents"),
        ],
    )
    def test_measured_ranges(self, largest: float, low: Precision, expected: str) -> None:
        ranges = {"a": (0.0, largest), "x": (0.0, 1.0), "b": (0.0, 1.0)}
        assert said("underflow", TestOverflow.TEXT, ranges, low=low) == expected


class TestOverflow:
    TEXT = "g (float[2] x) => (float[2] y) { a = Exp(x)\n b = Neg(a)\n y = Sin(b) }"

    @pytest.mark.parametrize(
        ("ranges", "low", "expected"),
        [
            pytest.param({"a": (0, 32752)}, FP16, "", id="at the limit"),
            pytest.param({"a": (0, 32753)}, FP16, "warning a, warning b", id="beyond: producer, consumer"),
            pytest.param({"b": (-1e5, 0)}, FP16, "error b, error y", id="negative"),
            pytest.param({"a": (0, 1e30)}, BF16, "", id="BF16 holds it"),
            pytest.param({"a": (0, 3e38)}, BF16, "warning a, warning b", id="BF16 has limits, too"),
            pytest.param({"a": NAN}, FP16, "warning a, warning b", id="NaN in FP32 already"),
            pytest.param({"a": (0, math.inf)}, FP16, "note a, note b", id="infinite in FP32 already"),
        ],
    )
    def test_measured_ranges(self, ranges: Ranges, low: Precision, expected: str) -> None:
        assert said("overflow", self.TEXT, ranges, low=low) == expected

    def test_a_chain_has_one_reason(self) -> None:
        survey = surveyed(self.TEXT, {"a": (0, 7e4), "b": (-8e4, 0)})
        hazards = list(NAMES["overflow"](survey))
        assert {h.reason for h in hazards} == {"a exceeds 65504"}
        assert {h.tensor for h in hazards} == {"a", "b"}

    GELU = """
        g (float[4] x) => (float[4] y) <float three = {3.0}, float c = {0.0447}, float k = {0.797}> {
            p = Pow(x, three)
            q = Mul(p, c)
            r = Add(x, q)
            s = Mul(r, k)
            y = END(s)
        }"""

    @pytest.mark.parametrize(
        ("end", "expected"),
        [
            pytest.param("Tanh", "warning p, warning q", id="Tanh"),
            pytest.param("Relu", "error p, error q", id="Relu is not bounded"),
            pytest.param("Neg", "error p, error q", id="the end of the graph"),
        ],
    )
    def test_an_infinite_cube_that_tanh_saturates_is_right(self, end: str, expected: str) -> None:
        ranges = {"x": (-45, 45), "p": (-9e4, 9e4), "q": (-4e3, 4e3), "r": (-4e3, 4e3), "s": (-3e3, 3e3)}
        assert said("overflow", self.GELU.replace("END", end), ranges) == expected

    def test_the_result_of_a_cast_has_the_range_of_its_input(self) -> None:
        text = """
            g (float[2] x) => (float[2] y) {
                a = Exp(x)
                h = Cast<to = 10>(a)
                b = Neg(h)
                y = Cast<to = 1>(b)
            }"""
        assert found("overflow", text, {"a": (0, 1e5)}, mixed=True) == "a b"

    MASKED = """
        g (float[2,2] q, float[2,2] k, float[2,2] mask) => (float[2,2] y) {
            s = MatMul(q, k)
            t = Add(s, mask)
            y = Softmax<axis = 1>(t)
        }"""

    @pytest.mark.parametrize(
        ("text", "mask", "expected"),
        [
            pytest.param(
                MASKED, Range(-math.inf, 9, math.inf, False), "", id="-inf before Softmax is a value"
            ),
            pytest.param(MASKED, Range(-65504, 9, 3e4, True), "", id="FP16's lowest number, too"),
            pytest.param(MASKED, Range(-3.4e38, 9, 3e37, True), "t y", id="-FLT_MAX is not: a note"),
            pytest.param(MASKED, Range(-math.inf, 9, math.nan, False), "t y", id="NaN among it"),
            pytest.param(MASKED, Range(-math.inf, 1e5, math.inf, False), "t y", id="large scores beside it"),
            pytest.param(
                MASKED.replace("y = Softmax", "r = Exp(t)\n y = Softmax"),
                Range(-math.inf, 9, math.inf, False),
                "r t y",
                id="another reader besides",
            ),
            pytest.param(
                MASKED.replace("Softmax<axis = 1>(t)", "Exp(t)"),
                Range(-math.inf, 9, math.inf, False),
                "t y",
                id="no Softmax",
            ),
            pytest.param(
                MASKED.replace("y = Softmax<axis = 1>(t)", "r = Add(t, mask)\n y = Exp(r)"),
                Range(-math.inf, 9, math.inf, False),
                "r t",
                id="no Softmax after another sum",
            ),
        ],
    )
    def test_masks(self, text: str, mask: Range, expected: str) -> None:
        assert found("overflow", text, {"s": (-9, 9), "t": mask, "mask": (0, 0)}) == expected


class TestNormsAndEpsilons:
    def test_unfused_norm(self) -> None:
        text = """
            g (float[2,4] x) => (float[2,4] y)
            <float two = {2.0}, float eps = {0.00001}, float[4] w = {1,2,3,4}> {
                s = Pow(x, two)
                m = ReduceMean<axes = [-1]>(s)
                e = Add(m, eps)
                d = Sqrt(e)
                n = Div(x, d)
                o = Mul(n, w)
                y = Relu(o)
            }"""
        assert found("unfused_norm", text) == "d e m n o s"

    def test_a_mean_is_not_a_norm(self) -> None:
        assert (
            found("unfused_norm", "g (float[2,4] x) => (float[2,1] y) { y = ReduceMean<axes = [-1]>(x) }")
            == ""
        )

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            pytest.param("d = Add(x, e)\n y = Div(w, d)", "d y", id="in a denominator"),
            pytest.param("d = Add(e, x)\n y = Reciprocal(d)", "d y", id="on the left, before Reciprocal"),
            pytest.param("d = Add(x, e)\n y = Div(d, w)", "", id="a numerator needs no guard"),
            pytest.param("d = Max(x, e)\n y = Log(d)", "d y", id="Max before Log"),
            pytest.param("d = Clip(x, e)\n y = Div(w, d)", "d y", id="Clip from below"),
            pytest.param("d = Clip(x, , e)\n y = Div(w, d)", "", id="Clip from above"),
            pytest.param("c = Less(x, w)\n d = Where(c, e, x)\n y = Div(w, d)", "d y", id="Where"),
            pytest.param("c = Less(x, w)\n d = Where(c, x, e)\n y = Div(w, d)", "d y", id="Where, else"),
            pytest.param("d = Max(e, x)\n y = Log(d)", "d y", id="Max, the other way round"),
            pytest.param("d = Max(x)\n y = Log(d)", "", id="Max of one operand"),
            pytest.param("d = Add(x, e)\n r = Sqrt(d)\n y = Div(w, r)", "d r y", id="through Sqrt"),
            pytest.param("d = Add(x, e)\n y = Pow(d, half)", "d y", id="a root as Pow"),
            pytest.param("d = Add(x, e)\n y = Pow(d, two)", "", id="a square"),
            pytest.param("d = Add(x, e)\n z = Neg(d)\n y = Div(w, d)", "d y", id="not what else reads it"),
            pytest.param("d = Add(x, large)\n y = Div(w, d)", "", id="1e-3 is a normal number"),
            pytest.param("d = Add(x, e)\n y = Mul(w, d)", "", id="guards nothing"),
            pytest.param("d = Sub(x, e)\n y = Div(w, d)", "", id="a difference is no guard"),
            pytest.param(
                "s = Mul(x, x)\n m = ReduceSum<keepdims = 1>(s)\n d = Add(m, e)\n y = Div(w, d)",
                "d m s y",
                id="with the sum of squares",
            ),
        ],
    )
    def test_lost_epsilon(self, body: str, expected: str) -> None:
        text = f"""
            g (float[2] x, float[2] w) => (float[2] y)
            <float e = {{1e-6}}, float large = {{1e-3}}, float half = {{0.5}}, float two = {{2.0}}>
            {{ {body} }}"""
        assert found("lost_epsilon", text) == expected

    TEXT = "g (float[2] x, float[2] w) => (float[2] y) <float e = {1e-6}> { d = Add(x, e)\n y = Div(w, d) }"

    @pytest.mark.parametrize(
        ("low", "range_", "expected"),
        [
            pytest.param(FP16, (0.0, 5.0), "d y", id="a small divisor"),
            pytest.param(FP16, (1.5, 5.0), "", id="a divisor far above it"),
            pytest.param(BF16, (0.0, 5.0), "", id="BF16 has FP32's exponents"),
        ],
    )
    def test_epsilon_matters_for_small_values(
        self, low: Precision, range_: tuple[float, float], expected: str
    ) -> None:
        assert found("lost_epsilon", self.TEXT, {"x": range_}, request=PrecisionRequest(low)) == expected


class TestPositions:
    TIMESTEP = """
        g (int64[1] t) => (float[1,4] y) <float[1,4] f = {1, 0.1, 0.01, 0.001}> {
            c = Cast<to = 1>(t)
            a = Mul(c, f)
            s = Sin(a)
            y = Neg(s)
        }"""

    @pytest.mark.parametrize(
        ("text", "angle", "expected"),
        [
            pytest.param(TIMESTEP, (0, 981), "a c s", id="a timestep of 981"),
            pytest.param(TIMESTEP, (0, 3.2), "", id="half a turn"),
            pytest.param(
                TIMESTEP.replace("Mul(c, f)", "MatMul(c2, f)").replace(
                    "Cast<to = 1>(t)",
                    "Cast<to = 1>(t)\nz = Constant<value = int64[1] {0}>()\n c2 = Unsqueeze(c, z)",
                ),
                (0, 981),
                "a c c2 s",
                id="an outer product",
            ),
            pytest.param(
                "g (float[1,8] x, float[8,4] w) => (float[1,4] s) { a = MatMul(x, w)\n s = Sin(a) }",
                (0, 30),
                "",
                id="features through a MatMul (SIREN)",
            ),
            pytest.param(
                """g (float[1,2,9] x, float[2,2,3] w, float[1,2,1] k) => (float[1,2,7] y) {
                    h = Conv(x, w)
                    a = Mul(h, k)
                    s = Sin(a)
                    y = Add(h, s)
                }""",
                (0, 30),
                "",
                id="features through a Conv (Snake)",
            ),
        ],
    )
    def test_phase(self, text: str, angle: tuple[float, float], expected: str) -> None:
        assert found("phase", text, {"a": angle}) == expected

    COUNTED = """
        g (int64[4] p, float[4] h) => (float[4] y) <float n = {5000.0}, float two = {2.0}> {
            c = Cast<to = 1>(p)
            d = Add(c, two)
            e = Div(d, n)
            y = Add(e, h)
        }"""

    @pytest.mark.parametrize(
        ("high", "low", "expected"),
        [
            pytest.param(2048, FP16, "", id="2048 is exact"),
            pytest.param(2049, FP16, "c d e", id="2049 is not"),
            pytest.param(5000, FP16, "c d e", id="until it is small again"),
            pytest.param(300, BF16, "c d e", id="BF16 counts to 256"),
            pytest.param(256, BF16, "", id="256 is exact"),
            pytest.param(257, BF16, "c d e", id="257 is not"),
        ],
    )
    def test_positions(self, high: float, low: Precision, expected: str) -> None:
        ranges = {"c": (0, high), "d": (0, high), "e": (0, high / 5000), "h": (-1, 1), "y": (-1, 2)}
        assert found("positions", self.COUNTED, ranges, request=PrecisionRequest(low)) == expected

    @pytest.mark.parametrize(
        ("to", "expected"),
        [
            pytest.param(7, "a b c", id="a size computed in floats"),
            pytest.param(9, "", id="a condition"),
            pytest.param(11, "", id="a wider float"),
        ],
    )
    def test_integers(self, to: int, expected: str) -> None:
        kind = {7: "int64", 9: "bool", 11: "double"}[to]
        text = f"""
            g (int64[2] n, float[1,1,3,3] w, float[1,1,4,4] x) => ({kind}[2] y, float[1,1,2,2] z)
            <float s = {{0.6}}> {{
                a = Cast<to = 1>(n)
                b = Mul(a, s)
                c = Floor(b)
                y = Cast<to = {to}>(c)
                z = Conv(x, w)
            }}"""
        assert found("integers", text) == expected

    STEPPING = """
        g (float[4] x, float[4] z, float[4,4] w) => (TYPE[4] y, float[4] o)
        <float s = {10.0}, float zero = {0.0}> {
            a = Mul(x, s)
            y = STEP
            o = Neg(z)
        }"""

    @pytest.mark.parametrize(
        ("step", "ranges", "expected"),
        [
            pytest.param("Floor(a)", {"a": (0, 9)}, "a y", id="Floor: back to the input"),
            pytest.param("Ceil(x)", {"x": (0, 9)}, "y", id="Ceil of an input"),
            pytest.param("Round(a)", {"a": (0.6, 1.4)}, "", id="Round: no half within the range"),
            pytest.param("Round(a)", {"a": (0.6, 1.4999)}, "a y", id="Round: a half is as near as rounding"),
            pytest.param("Floor(a)", {"a": (0.1, 0.9)}, "", id="Floor: no integer within the range"),
            pytest.param("Floor(a)", {"a": (0.1, 0.9999)}, "a y", id="Floor: one is as near as rounding"),
            pytest.param("Floor(a)", {}, "", id="not measured"),
            pytest.param("Greater(a, s)", {"a": (0, 11)}, "a y", id="a threshold"),
            pytest.param("Greater(a, s)", {"a": (0, 9)}, "", id="a threshold out of reach"),
            pytest.param("Greater(a, zero)", {"a": (-1, 1)}, "", id="no rounding changes a sign"),
            pytest.param("Less(a, x)", {"a": (0, 9), "x": (1, 2)}, "a y", id="two tensors"),
        ],
    )
    def test_steps_of_arithmetic_on_inputs(self, step: str, ranges: Ranges, expected: str) -> None:
        kind = "bool" if step.startswith(("Greater", "Less")) else "float"
        text = self.STEPPING.replace("STEP", step).replace("TYPE", kind)
        assert found("integers", text, ranges) == expected

    def test_a_fraction_keeps_what_it_is_taken_from(self) -> None:
        text = "g (float[4] x) => (float[4] y) { a = Exp(x) f = Floor(a) y = Sub(a, f) }"
        assert found("integers", text, {"a": (0, 9)}) == "a f y"

    def test_what_a_layer_computed_is_no_arithmetic_on_inputs(self) -> None:
        text = "g (float[4,4] x, float[4,4] w) => (float[4,4] y) { a = MatMul(x, w) b = Abs(a) y = Floor(b) }"
        assert found("integers", text, {"b": (0, 9)}) == ""


GRID = """
    g (float[1,2,4,4] x, float[1,4,4,8] h, float[8,2] w, float[1,4,4,2] base) => (float[1,2,4,4] y) {
        o = MatMul(h, w)
        t = Tanh(o)
        g0 = Add(base, t)
        i = Relu(x)
        y = GridSample(i, g0)
    }"""
RESIZE = """
    g (float[1,1,3,3] x, float[4] f) => (float y) {
        s = Div(f, f)
        r = Resize(x, , s)
        y = ReduceMax<keepdims = 0>(r)
    }"""
TOP = """
    g (float[1,9,8] h, float[8,4] w, int64[1] k) => (float[1,2] v, int64[1,2] i) {
        l = MatMul(h, w)
        s = Sigmoid(l)
        m = ReduceMax<axes = [2], keepdims = 0>(s)
        v, i = TopK(m, k)
    }"""
STREAM = """
    g (float[1,8] h, float[8,8] w) => (int64[1,1] i, float[1,8] z) {
        a = Add(h, h)
        r = Relu(a)
        i = ArgMax<axis = 1>(r)
        z = MatMul(r, w)
    }"""
WARNED = "warning g0, warning t, warning y"


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        pytest.param("coordinates", GRID, WARNED, id="the grid up to the MatMul, not the image"),
        pytest.param("coordinates", RESIZE, "note s", id="what computes the scales, not Resize itself"),
        pytest.param("coordinates", one("Neg"), "", id="no sampling"),
        pytest.param("order", TOP, "warning m, warning s, warning v", id="scores up to the MatMul"),
        pytest.param("order", STREAM, "note i", id="the stream of features is left alone"),
        pytest.param("order", one("Softmax"), "", id="nothing is ordered"),
        pytest.param(
            "order",
            "g (float[8] x) => (int64[1] i) { r = Relu(x) i = ArgMax(r) }",
            "note i, note r",
            id="ArgMax",
        ),
    ],
)
def test_coordinates_and_order(rule: str, text: str, expected: str) -> None:
    assert said(rule, text) == expected


class TestOthers:
    QDQ = """
        g (float[2] x) => (float[2] y) <float s = {SCALE}, int8 z = {0}> {
            q = QuantizeLinear(x, s, z)
            y = DequantizeLinear(q, s, z)
        }"""

    @pytest.mark.parametrize(
        ("scale", "low", "expected"),
        [
            pytest.param("1e-5", FP16, "q y", id="a scale below FP16's normal range"),
            pytest.param("1e-2", FP16, "", id="an ordinary scale"),
            pytest.param("1e-5", BF16, "", id="BF16 has FP32's exponents"),
        ],
    )
    def test_quantized(self, scale: str, low: Precision, expected: str) -> None:
        text = self.QDQ.replace("SCALE", scale)
        assert found("quantized", text, request=PrecisionRequest(low), opset=19) == expected

    def test_accumulation(self) -> None:
        text = """
            g (int64 n, bool c, float[2] x) => (float[2] y, float[2] z) <int64 a = {0}> {
                y = Loop(n, c, x) <
                    body = b (int64 i, bool ci, float[2] s) => (bool co, float[2] t) {
                        co = Identity(ci)
                        t = Neg(s)
                    }
                >
                u = CumSum(x, a)
                z = If(c) <then_branch = p () => (float[2] r) { r = Neg(u) },
                           else_branch = q () => (float[2] r) { r = Abs(u) }>
            }"""
        assert found("accumulation", text) == "u y"

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            pytest.param(
                """g (int64 n, bool c, float[1,2] x, float[2,2] w) => (float[1,2] y, float[k,1,2] s) {
                    y, s = Loop(n, c, x) <body = b (int64 i, bool ci, float[1,2] st) =>
                        (bool co, float[1,2] t, float[1,2] o) {
                            co = Identity(ci)
                            m = MatMul(st, w)
                            a = Neg(m)
                            t = Add(st, a)
                            o = Exp(st)
                        }>
                }""",
                "a t",
                id="Loop: up to the MatMul, without the scan output",
            ),
            pytest.param(
                """g (float[2] x, float[3,2] v) => (float[2] y, float[3,2] s) {
                    y, s = Scan<num_scan_inputs = 1, body = b (float[2] st, float[2] e) =>
                        (float[2] t, float[2] o) { t = Add(st, e)\n o = Neg(e) }>(x, v)
                }""",
                "t",
                id="Scan",
            ),
            pytest.param(
                """g (bool c, float[2] x) => (float[2] y) {
                    y = If(c) <then_branch = p () => (float[2] r) { r = Neg(x) },
                               else_branch = q () => (float[2] r) { r = Abs(x) }>
                }""",
                "",
                id="If has no states",
            ),
        ],
    )
    def test_state_update(self, text: str, expected: str) -> None:
        assert found("state_update", text, scope=1) == expected


class TestMasks:
    ADDED = """
        g (float[2,4] s, bool[2,4] m) => (float[2,4] y) <float c = {-3.4e38}, float zero = {0.0}> {
            b = Where(m, zero, c)
            a = Add(s, b)
            y = Softmax<axis = -1>(a)
        }"""
    GUARDED = ADDED.replace(
        "y = Softmax<axis = -1>(a)",
        """
            p = Softmax<axis = -1>(a)
            n = IsNaN(p)
            y = Where(n, zero, p)""",
    )
    TIMES = """
        g (float[2,4] s, float[2,4] m) => (float[2,4] y) <float c = {-1e9}> {
            b = Mul(m, c)
            a = Add(s, b)
            y = Softmax<axis = -1>(a)
        }"""

    @pytest.mark.parametrize(
        ("text", "low", "expected"),
        [
            pytest.param(ADDED, FP16, "warning b", id="selected: a row masked whole"),
            pytest.param(GUARDED, FP16, "note b", id="whose NaN is replaced"),
            pytest.param(ADDED.replace("-3.4e38", "-1e4"), FP16, "", id="selected, in range"),
            pytest.param(ADDED.replace("-3.4e38", "-1e9"), BF16, "", id="in BF16's range"),
            pytest.param(ADDED.replace("Softmax<axis = -1>", "Relu"), FP16, "", id="without Softmax no mask"),
            pytest.param(TIMES, FP16, "error a, error b, error y", id="a factor: 0 times infinity is NaN"),
            pytest.param(TIMES.replace("-1e9", "-1e4"), FP16, "", id="0 times a finite number"),
            pytest.param(TIMES.replace("-1e9", "-inf"), FP16, "", id="NaN in FP32, too"),
            pytest.param(TIMES.replace("Softmax<axis = -1>", "Relu"), FP16, "", id="a factor, no Softmax"),
        ],
    )
    def test_by_use_though_the_data_has_no_padding(self, text: str, low: Precision, expected: str) -> None:
        assert said("masks", text, {"b": (0.0, 0.0), "a": (-9.0, 9.0)}, low=low) == expected


def test_every_rule_is_tested() -> None:
    """`known_defects` and its like in test_quirks.py, `norm_operators` in test_probe.py."""
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    names = {rule.__name__ for rule in (*RULES, *SCAN_RULES)} - {"norm_operators", "kept_for_defects"}
    untested = {n for n in names if not any(f'"{n}"' in text or f"{n}(" in text for text in texts)}
    assert untested == set(), "each needs a case in which it reports, and one in which it must not"
