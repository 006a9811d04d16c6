"""Each rule of `scan` alone in a graph where it must speak, and in one much like it where it must not."""

from __future__ import annotations

import math

import pytest
from hazard_rules import NAMES, Ranges, one, said, surveyed

from rewriter.ir.plan import Precision, Range

FP16: Precision = "fp16"
BF16: Precision = "bf16"
NAN = Range(-1.0, 1.0, math.nan, False)


class TestInternalOverflow:
    @pytest.mark.parametrize(
        ("op", "value", "wrong"),
        [
            pytest.param("ReduceLogSumExp", 0.0, False, id="LogSumExp of 256 zeros"),
            pytest.param("ReduceLogSumExp", 5.4, False, id="LogSumExp of 5.4"),
            pytest.param("ReduceLogSumExp", 5.6, True, id="LogSumExp of 5.6 was infinite"),
            pytest.param("ReduceLogSumExp", -20.0, True, id="LogSumExp of -20 was minus infinite"),
            pytest.param("LpNormalization", 10.0, False, id="LpNormalization of 64 tens"),
            pytest.param("LpNormalization", 31.0, False, id="LpNormalization of 31"),
            pytest.param("LpNormalization", 33.0, True, id="LpNormalization of 33 was zero"),
            pytest.param("LpNormalization", 1e-4, True, id="LpNormalization of 1e-4 was 1e-4"),
            pytest.param("ReduceLogSum", 3e3, True, id="LogSum of 3000 was infinite"),
            pytest.param("ReduceL2", 300.0, False, id="L2 of 300 was right"),
        ],
    )
    def test_an_error_is_reported_where_an_h200_was_wrong(self, op: str, value: float, wrong: bool) -> None:
        text = one(op, result="4,64" if op == "LpNormalization" else "1,1")
        hazards = said("hidden_sums", text, {"x": Range(value, value, abs(value), True)})
        assert (hazards == "error y") == wrong

    @pytest.mark.parametrize(
        ("op", "low", "ranges", "expected"),
        [
            pytest.param("ReduceLogSumExp", FP16, (-9, 5), "warning y", id="256 exp(5) are near the limit"),
            pytest.param("ReduceLogSumExp", FP16, (-9, 4), "", id="256 exp(4) are in range"),
            pytest.param("ReduceLogSumExp", BF16, (-9, 80), "", id="BF16 reaches to ln 3e38"),
            pytest.param("ReduceLogSumExp", BF16, (-9, 89), "error y", id="and no farther"),
            pytest.param("LpNormalization", FP16, (-1e-3, 1e-3), "warning y", id="squares of 1e-3 lose bits"),
            pytest.param("LpNormalization", BF16, (-300, 300), "", id="squares in BF16's range"),
            pytest.param("ReduceSum", FP16, (0, 3e3), "", id="ReduceSum shows its sum"),
        ],
    )
    def test_hidden_sums(self, op: str, low: Precision, ranges: tuple[float, float], expected: str) -> None:
        text = one(op, result="4,64" if op == "LpNormalization" else "1,1")
        assert said("hidden_sums", text, {"x": ranges}, low=low) == expected

    def test_an_l1_norm_squares_nothing(self) -> None:
        assert said("hidden_sums", one("LpNormalization", p=1), {"x": (-300, 300)}) == ""


class TestAccumulation:
    MATMUL = "g (float[2,K] a, float[K,2] b) => (float[2,2] y) { y = MatMul(a, b) }"

    @pytest.mark.parametrize(
        ("depth", "high", "expected"),
        [
            pytest.param("4096", 10.0, "warning y", id="4096 terms of 25 on the average"),
            pytest.param("4096", 6.0, "", id="4096 terms of 9, and of 36 at most"),
            pytest.param("k", 100.0, "", id="of unknown depth"),
        ],
    )
    def test_partial_sums(self, depth: str, high: float, expected: str) -> None:
        ranges = {"a": (-high, high), "b": (-high, high), "y": (-1, 1)}
        assert said("partial_sums", self.MATMUL.replace("K", depth), ranges) == expected

    def test_partial_sums_are_not_reported_in_bf16_or_for_a_result_out_of_range(self) -> None:
        text = self.MATMUL.replace("K", "4096")
        ranges = {"a": (-10, 10), "b": (-10, 10), "y": (-1, 1)}
        assert said("partial_sums", text, ranges, low=BF16) == ""
        assert said("partial_sums", text, {**ranges, "y": (0, 1e5)}) == ""

    SOFTMAX = """
        g (float[2,4096] s, float[4096,8] v) => (float[2,8] y) {
            p = Softmax<axis = -1>(s)
            y = MatMul(p, v)
        }"""

    def test_rows_of_softmax_sum_to_one(self) -> None:
        assert said("partial_sums", self.SOFTMAX, {"p": (0, 1), "v": (-99, 99), "y": (-9, 9)}) == ""

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            pytest.param(
                "g (float[1,1,4,4] x) => (float[1,1,2,2] y) <float[1,1,3,3] w = {1,1,1,1,1,1,1,1,1}>"
                " { y = Conv(x, w) }",
                "warning y",
                id="a Conv of nine ones",
            ),
            pytest.param(
                "g (float[1,1,4,4] x) => (float[1,1,2,2] y) <float[1,1,3,3] w = {1,0,0,0,0,0,0,0,0}>"
                " { y = Conv(x, w) }",
                "",
                id="a Conv of one: the mean of the weights counts",
            ),
            pytest.param(
                "g (float[1,2,4,4] x) => (float[1,1,6,6] y)"
                " <float[2,1,3,3] w = {1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1}> { y = ConvTranspose(x, w) }",
                "warning y",
                id="a ConvTranspose of two times nine ones",
            ),
        ],
    )
    def test_partial_sums_over_weights(self, text: str, expected: str) -> None:
        assert said("partial_sums", text, {"x": (-3e4, 3e4), "y": (-1, 1)}) == expected

    def test_running_sums(self) -> None:
        text = "g (float[9] x) => (float[9] y) <int64 axis = {0}> { y = CumSum(x, axis) }"
        assert said("accumulation", text) == "warning y"
        assert said("accumulation", one("ReduceSum", result="1,1")) == ""


class TestNorms:
    NORM = """
        g (float[2,8] x) => (float[2,8] y) <float two = {2.0}, float e = {1e-12}> {
            s = Pow(x, two)
            m = ReduceMean<axes = [1]>(s)
            a = Add(m, e)
            r = Sqrt(a)
            y = Div(x, r)
        }"""

    @pytest.mark.parametrize(
        ("rule", "ranges", "expected"),
        [
            pytest.param("lost_epsilon", {"m": (0.5, 9)}, "note", id="far above the epsilon"),
            pytest.param("lost_epsilon", {"m": (1e-6, 9)}, "warning", id="near it"),
            pytest.param("lost_epsilon", {"m": (0, 9)}, "error", id="division by zero"),
            pytest.param("lost_epsilon", {"m": (2.0**-14, 9)}, "note", id="all values are normal"),
            pytest.param("lost_epsilon", {"m": (0.99 * 2.0**-14, 9)}, "warning", id="one is not"),
            pytest.param("lost_epsilon", {"m": (2.0**-25, 9)}, "warning", id="none becomes zero"),
            pytest.param("lost_epsilon", {"m": (0.99 * 2.0**-25, 9)}, "error", id="one becomes zero"),
            pytest.param("unfused_norm", {"s": (0, 32752)}, "note", id="squares at the limit"),
            pytest.param("unfused_norm", {"s": (0, 65504)}, "warning", id="the largest square"),
            pytest.param("unfused_norm", {"s": (0, 9)}, "note", id="squares in range"),
            pytest.param("unfused_norm", {"s": (0, 4e4)}, "warning", id="squares near the limit"),
            pytest.param("unfused_norm", {"s": (0, 1e6)}, "error", id="squares beyond it"),
        ],
    )
    def test_a_norm_has_the_severity_of_its_inside(self, rule: str, ranges: Ranges, expected: str) -> None:
        known: Ranges = dict.fromkeys("xsmary", (0.1, 1.0))
        hazards = said(rule, self.NORM, {**known, **ranges}).split(", ")
        assert {hazard.split()[0] for hazard in hazards} == {expected}

    @pytest.mark.parametrize(
        ("tensor", "words"),
        [
            pytest.param("s", "squares inside the decomposed", id="a square"),
            pytest.param("m", "values inside the decomposed", id="a mean"),
        ],
    )
    def test_a_norm_names_what_overflows(self, tensor: str, words: str) -> None:
        known: Ranges = {**dict.fromkeys("xsmary", (0.1, 1.0)), tensor: (0.0, 1e6)}
        reasons = {h.reason for h in NAMES["unfused_norm"](surveyed(self.NORM, known))}
        assert all(reason.startswith(words) and "exceed 65504" in reason for reason in reasons)


class TestAttention:
    LINEAR = """
        g (float[2,64,8] x) => (float[2,64,8] y) {
            q = Relu(x)
            k = Sigmoid(x)
            t = Transpose<perm = [0,2,1]>(k)
            v = Neg(x)
            c = MatMul(t, v)
            END
        }"""

    @pytest.mark.parametrize(
        ("end", "expected"),
        [
            pytest.param("y = MatMul(q, c)", "warning c", id="(K^T V), then Q"),
            pytest.param(
                "p = Softmax<axis = -1>(c)\n y = MatMul(q, p)", "", id="channel attention has its Softmax"
            ),
            pytest.param("y = Expand(c, c)", None, id="no second product"),
        ],
    )
    def test_linear_attention(self, end: str, expected: str | None) -> None:
        if expected is None:
            text = self.LINEAR.replace("float[2,64,8] y", "float[2,8,8] y").replace("END", "y = Relu(c)")
            assert said("linear_attention", text) == ""
        else:
            assert said("linear_attention", self.LINEAR.replace("END", end)) == expected


class TestConverted:
    PAIR = """
        g (float[2] x) => (TYPE[2] y) {
            h = Cast<to = 10>(x)
            b = Cast<to = TO>(h)
            y = Neg(b)
        }"""

    @pytest.mark.parametrize(
        ("to", "kind", "high", "expected"),
        [
            pytest.param("1", "float", 9.0, "note h", id="there and back"),
            pytest.param("1", "float", 1e5, "error h", id="beyond 65504 on the way"),
            pytest.param("16", "bfloat16", 9.0, "", id="on to another type"),
        ],
    )
    def test_cast_pairs(self, to: str, kind: str, high: float, expected: str) -> None:
        text = self.PAIR.replace("TO", to).replace("TYPE", kind)
        assert said("cast_pairs", text, {"x": (0, high)}, opset=22) == expected

    WIDE = "g (int64[2] x) => (int64[2] y) <int64[1] c = {C}> { y = Add(x, c) }"
    SLICE = """
        g (float[9] x) => (float[8] y) <int64[1] a = {1}, int64[1] c = {9223372036854775807}> {
            y = Slice(x, a, c)
        }"""

    @pytest.mark.parametrize(
        ("text", "target", "expected"),
        [
            pytest.param(WIDE.replace("C", "3000000000"), "8.6", "error y", id="clamped by 8.6"),
            pytest.param(WIDE.replace("C", "3000000000"), "tensorrt", "note y", id="by a release unknown"),
            pytest.param(WIDE.replace("C", "3000000000"), "10.3", "", id="not by 10.3"),
            pytest.param(WIDE.replace("C", "2000000000"), "8.6", "", id="fits"),
            pytest.param(SLICE, "8.6", "", id="as far as it goes"),
        ],
    )
    def test_wide_integers(self, text: str, target: str, expected: str) -> None:
        assert said("wide_integers", text, target=target) == expected


class TestData:
    NORM = """
        g (float[1,1,2,2] x) => (float[1,1,2,2] y)
        <float[1] s = {1.0}, float[1] b = {0.0}, float[1] mean = {0.5}, float[1] var = {0.04}> {
            y = BatchNormalization(x, s, b, mean, var)
        }"""

    @pytest.mark.parametrize(
        ("high", "expected"),
        [
            pytest.param(255.0, "warning y", id="pixels from 0 to 255, trained on 0 to 1"),
            pytest.param(1.0, "", id="as trained"),
        ],
    )
    def test_data_far_from_the_trained_range(self, high: float, expected: str) -> None:
        assert said("outside_statistics", self.NORM, {"x": (0, high)}) == expected

    def test_the_tensor_whose_data_it_is(self) -> None:
        (found,) = NAMES["outside_statistics"](surveyed(self.NORM, {"x": (0, 255)}))
        assert found.tensor == "x" and found.range is not None and found.range.high == 255

    def test_fp16_reference(self) -> None:
        assert said("fp16_reference", one("Relu"), mixed=True) == "note y"
        assert said("fp16_reference", one("Relu")) == ""
