"""Each rule of `scan` alone in a graph where it must speak, and in one much like it where it must not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

import pytest
from hazard_rules import SCANNED, Ranges, one, said, surveyed

from rewriter.hazards import RULES, SCAN_RULES
from rewriter.ir.plan import Precision, Range

FP16: Precision = "fp16"
BF16: Precision = "bf16"
NAN = Range(-1.0, 1.0, math.nan, False)


class TestOverflow:
    CHAIN = "g (float[2] x) => (float[2] y) { a = Exp(x)\n b = Relu(a)\n y = Softmax<axis = -1>(b) }"

    @pytest.mark.parametrize(
        ("ranges", "low", "expected"),
        [
            pytest.param({"a": (0, 3e4), "b": (0, 3e4)}, FP16, "", id="in range"),
            pytest.param({"a": (0, 65504 / 2)}, FP16, "", id="just with head-room"),
            pytest.param({"a": (0, 4e4)}, FP16, "warning a", id="in range on these samples"),
            pytest.param({"a": (0, 65504)}, FP16, "warning a", id="FP16's largest number"),
            pytest.param({"a": (0, 7e4), "b": (0, 7e4)}, FP16, "error a, error b", id="beyond it"),
            pytest.param({"a": (0, 7e4)}, BF16, "", id="in BF16's"),
            pytest.param({"a": (0, math.inf)}, FP16, "note a", id="infinite in FP32 already"),
            pytest.param({"a": NAN}, FP16, "warning a", id="NaN in FP32 already"),
        ],
    )
    def test_by_the_measured_range(self, ranges: Ranges, low: Precision, expected: str) -> None:
        assert said("overflowing", self.CHAIN, ranges, low=low) == expected

    def test_a_chain_has_one_reason(self) -> None:
        survey = surveyed(self.CHAIN, {"a": (0, 7e4), "b": (0, 7e4)})
        assert {h.reason for h in SCANNED["overflowing"](survey)} == {"a exceeds 65504"}

    def test_a_sum_of_squares_is_an_ordinary_tensor(self) -> None:
        text = one("ReduceSumSquare", result="1,1")
        assert said("overflowing", text, {"x": (0, 300), "y": (0, 5e6)}) == "error y"

    MASK = """
        g (float[2,4] s, float[2,4] m) => (float[2,4] y) {
            b = Add(s, m)
            y = Softmax<axis = -1>(b)
        }"""

    def test_negative_numbers_of_a_mask_become_zeros_of_softmax(self) -> None:
        assert said("overflowing", self.MASK, {"b": (-1e9, 10)}) == ""
        assert said("overflowing", self.MASK, {"b": (-1e9, 1e6)}) == "error b"

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
            pytest.param("Tanh", "note p", id="Tanh"),
            pytest.param("Relu", "error p", id="Relu is not bounded"),
            pytest.param("Neg", "error p", id="the end of the graph"),
        ],
    )
    def test_an_infinite_cube_that_tanh_saturates_is_right(self, end: str, expected: str) -> None:
        ranges = {"x": (-45, 45), "p": (-9e4, 9e4), "q": (-4e3, 4e3), "r": (-4e3, 4e3), "s": (-3e3, 3e3)}
        assert said("overflowing", self.GELU.replace("END", end), ranges) == expected


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

    @pytest.mark.parametrize(
        ("shape", "axis", "expected"),
        [
            pytest.param("2,65536", -1, "warning y", id="65536 keys"),
            pytest.param("2,65504", -1, "", id="65504 keys"),
            pytest.param("65536,2", -1, "", id="along the other axis"),
        ],
    )
    def test_long_softmax(self, shape: str, axis: int, expected: str) -> None:
        assert said("long_softmax", one("Softmax", shape=shape, result=shape, axis=axis)) == expected

    @pytest.mark.parametrize(
        ("shape", "expected"),
        [
            pytest.param("1,65536", "note y", id="65536 of five on the average"),
            pytest.param("1,4096", "", id="4096 of them"),
            pytest.param("1,n", "", id="an unknown number"),
        ],
    )
    def test_means_of_many(self, shape: str, expected: str) -> None:
        text = one("ReduceMean", shape=shape, result="1,1", axes="[1]")
        assert said("long_sums", text, {"x": (0, 10), "y": (0, 5)}) == expected


class TestAccumulation:
    MATMUL = "g (float[2,K] a, float[K,2] b) => (float[2,2] y) { y = MatMul(a, b) }"

    @pytest.mark.parametrize(
        ("depth", "high", "expected"),
        [
            pytest.param("4096", 10.0, "warning y", id="4096 terms of 25 on the average"),
            pytest.param("4096", 6.0, "note y", id="4096 terms of 9, and of 36 at most"),
            pytest.param("4096", 3.0, "", id="4096 terms of 9 at most"),
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
                id="a Conv of one: the weights' own norm counts",
            ),
            pytest.param(
                "g (float[2,3] x) => (float[2,2] y) <float[2,3] w = {1,1,1,1,1,1}>"
                " { y = Gemm<transB = 1>(x, w) }",
                "note y",
                id="a Gemm of three ones",
            ),
            pytest.param(
                "g (float[2,3] x) => (float[2] y) <float[3] w = {1,1,1}> { y = MatMul(x, w) }",
                "note y",
                id="a vector of three ones",
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

    @pytest.mark.parametrize(
        ("depth", "low", "expected"),
        [
            pytest.param("768", FP16, "", id="768: measured 1.05e-3"),
            pytest.param("3072", FP16, "note y", id="3072: measured 2.05e-3"),
            pytest.param("32768", FP16, "warning y", id="32768"),
            pytest.param("32768", BF16, "", id="BF16 accumulates in FP32"),
        ],
    )
    def test_error_grows_with_the_root_of_the_depth(self, depth: str, low: Precision, expected: str) -> None:
        assert said("accumulator_error", self.MATMUL.replace("K", depth), low=low) == expected

    def test_running_sums(self) -> None:
        text = "g (float[9] x) => (float[9] y) <int64 axis = {0}> { y = CumSum(x, axis) }"
        assert said("accumulation", text) == "warning y"
        assert said("accumulation", one("ReduceSum", result="1,1")) == ""


class TestLoss:
    @pytest.mark.parametrize(
        ("high", "low", "expected"),
        [
            pytest.param(1e-4, FP16, "", id="normal numbers"),
            pytest.param(5e-5, FP16, "note y", id="ten bits left"),
            pytest.param(5e-6, FP16, "warning y", id="seven bits left"),
            pytest.param(2e-8, FP16, "error y", id="none left"),
            pytest.param(0.0, FP16, "", id="zero is zero"),
            pytest.param(2e-8, BF16, "", id="BF16 has FP32's exponents"),
        ],
    )
    def test_vanishing(self, high: float, low: Precision, expected: str) -> None:
        assert said("vanishing", one("Relu"), {"y": (0, high)}, low=low) == expected

    @pytest.mark.parametrize(
        ("op", "value", "expected"),
        [
            pytest.param("Mul", "1e-9", "warning y", id="times zero"),
            pytest.param("Div", "1e-9", "error y", id="by zero"),
            pytest.param("Mul", "1e-6", "warning y", id="1e-6 is off by 1 %"),
            pytest.param("Mul", "1e-3", "", id="1e-3 is a normal number"),
            pytest.param("Mul", "5.9604645e-08", "", id="2^-24 is exact"),
            pytest.param("Add", "1e-9", "", id="adding nothing is harmless"),
        ],
    )
    def test_flushed_constants(self, op: str, value: str, expected: str) -> None:
        text = f"g (float[2] x) => (float[2] y) <float c = {{{value}}}> {{ y = {op}(x, c) }}"
        assert said("flushed_constants", text) == expected

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            pytest.param("0.1, 0.7", "", id="usual weights"),
            pytest.param("1e5, 0.7", "error y", id="beyond 65504"),
            pytest.param("1e-8, 1e-8", "error y", id="all become zero"),
            pytest.param("1e-6, 3e-6", "warning y", id="subnormal"),
            pytest.param("1e-8, 1.0", "", id="one becomes zero beside a large one"),
        ],
    )
    def test_weights(self, values: str, expected: str) -> None:
        text = f"g (float[3,1] x) => (float[3,2] y) <float[1,2] w = {{{values}}}> {{ y = MatMul(x, w) }}"
        assert said("weights", text) == expected

    @pytest.mark.parametrize(
        ("body", "low", "expected"),
        [
            pytest.param("y = Div(x, c)", FP16, "error y", id="divided by"),
            pytest.param("y = Mul(x, c)", FP16, "error y", id="multiplied by"),
            pytest.param("y = Mul(x, c)", BF16, "", id="in BF16's range"),
            pytest.param("y = Min(x, c)", FP16, "", id="a bound that nothing reaches"),
            pytest.param("y = Clip(x, , c)", FP16, "", id="a bound of Clip"),
        ],
    )
    def test_a_huge_scalar(self, body: str, low: Precision, expected: str) -> None:
        text = f"g (float[2] x) => (float[2] y) <float c = {{1e6}}> {{ {body} }}"
        assert said("weights", text, low=low) == expected

    def test_a_constant_mask_is_no_weight(self) -> None:
        text = """
            g (float[2,2] x) => (float[2,2] y) <float[2,2] m = {0, -1e9, 0, 0}> {
                s = Add(x, m)
                y = Softmax<axis = -1>(s)
            }"""
        assert said("weights", text) == ""

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
        reasons = {h.reason for h in SCANNED["unfused_norm"](surveyed(self.NORM, known))}
        assert all(reason.startswith(words) and "exceed 65504" in reason for reason in reasons)


class TestAttention:
    ADDED = """
        g (float[2,4] s, bool[2,4] m) => (float[2,4] y) <float c = {-3.4e38}, float zero = {0.0}> {
            b = Where(m, zero, c)
            a = Add(s, b)
            y = Softmax<axis = -1>(a)
        }"""
    MULTIPLIED = """
        g (float[2,4] s, int64[2,4] m) => (float[2,4] y) <float c = {-3.4e38}, float one = {1.0}> {
            f = Cast<to = 1>(m)
            i = Sub(one, f)
            b = Mul(i, c)
            a = Add(s, b)
            y = Softmax<axis = -1>(a)
        }"""
    OPEN: ClassVar[Ranges] = {"i": (0.0, 0.0), "b": (0.0, 0.0), "a": (-9.0, 9.0)}
    """As measured on data without padding."""

    @pytest.mark.parametrize(
        ("text", "low", "expected"),
        [
            pytest.param(ADDED, FP16, "warning b", id="selected: a row masked whole"),
            pytest.param(ADDED.replace("-3.4e38", "-1e4"), FP16, "", id="selected, in range"),
            pytest.param(ADDED.replace("-3.4e38", "-1e9"), BF16, "", id="in BF16's range"),
            pytest.param(MULTIPLIED, FP16, "error b", id="0 times infinity, without any padding"),
            pytest.param(MULTIPLIED.replace("-3.4e38", "-1e4"), FP16, "", id="0 times a finite number"),
            pytest.param(ADDED.replace("Softmax<axis = -1>", "Relu"), FP16, "", id="without Softmax no mask"),
        ],
    )
    def test_masks(self, text: str, low: Precision, expected: str) -> None:
        assert said("masks", text, self.OPEN, low=low) == expected

    def test_a_row_whose_nan_is_replaced(self) -> None:
        text = self.ADDED.replace(
            "y = Softmax<axis = -1>(a)",
            """
            p = Softmax<axis = -1>(a)
            n = IsNaN(p)
            y = Where(n, zero, p)
        """,
        )
        assert said("masks", text, self.OPEN) == "note b"

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

    @pytest.mark.parametrize(
        ("high", "low", "expected"),
        [
            pytest.param(1e4, FP16, "note y", id="steps of 8"),
            pytest.param(1000, FP16, "", id="steps below one"),
            pytest.param(math.inf, FP16, "", id="infinite scores are another rule's"),
            pytest.param(1e4, BF16, "", id="BF16"),
        ],
    )
    def test_large_logits(self, high: float, low: Precision, expected: str) -> None:
        text = "g (float[2,8] s) => (float[2,8] y) { y = Softmax<axis = -1>(s) }"
        assert said("large_logits", text, {"s": (-1e9, high)}, low=low) == expected


class TestResolution:
    ORDER = "g (float[1,9] x) => (float[1,9] y, int64[1,k] i) { y = Neg(x)\n i = ArgMax<axis = 1>(y) }"
    TOP = """
        g (float[1,9] x) => (float[1,3] y, int64[1,3] i) <int64[1] k = {3}> {
            y, i = TopK(x, k)
        }"""

    def test_order(self) -> None:
        assert said("order", self.ORDER) == "note i, note y"
        assert said("order", self.TOP) == "warning y"
        assert said("order", one("ReduceMax", result="1,1")) == ""


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
        (found,) = SCANNED["outside_statistics"](surveyed(self.NORM, {"x": (0, 255)}))
        assert found.tensor == "x" and found.range is not None and found.range.high == 255

    def test_fp16_reference(self) -> None:
        assert said("fp16_reference", one("Relu"), mixed=True) == "note y"
        assert said("fp16_reference", one("Relu")) == ""


OF_TARGETS = {"known_defects", "refused_operators"}
"""They are tested in test_quirks.py."""


def test_every_rule_that_only_scan_uses_is_tested_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    own = {rule.__name__ for rule in SCAN_RULES if rule not in RULES} - OF_TARGETS
    assert {name for name in own if f'said("{name}"' not in text} == set()
