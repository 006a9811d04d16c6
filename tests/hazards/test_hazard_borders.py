"""The last value that a rule allows, and the first that it reports, in numbers that FP32 holds exactly."""

import pytest
from hazard_rules import Ranges, analyzed, found, one

from rewriter.ir.plan import Range

LARGEST, LIMIT = 65504.0, 32752.0
"""FP16's largest number, and the largest measured value that leaves a head-room of 2."""

NORMAL, FLUSH = 2.0**-14, 2.0**-25
"""FP16's smallest normal number, and the largest that it rounds to zero."""

JUST = 2.0**-30  # a step that binary64 resolves beside each of these numbers, relative to them


def above(value: float) -> float:
    return value * (1.0 + JUST)


def below(value: float) -> float:
    return value * (1.0 - JUST)


def mean(size: float, *, low: float = 0.0) -> Range:
    """A range whose values all have one size."""
    return Range(low, size, size, True)


LOG_SUM = one("ReduceLogSum", shape="1,2", result="1,1")
SOFTMAX = one("Softmax", shape="N,2", result="N,2", axis=-2)
DEEP = "g (float[2,K] a, float[K,2] b) => (float[2,2] y) { y = MatMul(a, b) }"
TINY = "g (float[3,1] x) => (float[3,2] y) <float[1,2] w = {1e-6, 3e-6}> { y = MatMul(x, w) }"
ANGLE = "g (int64[4] n) => (float[4] y) { x = Cast<to = 1>(n) y = Sin(x) }"
PAIR = "g (float[2] x) => (float[2] y) { h = Cast<to = 10>(x) b = Cast<to = 1>(h) y = Neg(b) }"
PAIRS: Ranges = {"a": (0, 2), "b": (0, 32)}

TABLE: list[tuple[str, str, Ranges, str, str]] = [
    ("overflow", one("Exp"), {"y": (0, LIMIT)}, "", "head-room, just"),
    ("overflow", one("Exp"), {"y": (0, above(LIMIT))}, "warning y", "head-room, no more"),
    ("overflow", one("Exp"), {"y": (0, LARGEST)}, "warning y", "FP16's largest number"),
    ("overflow", one("Exp"), {"y": (0, above(LARGEST))}, "error y", "more than FP16's largest number"),
    # a has 1 on the average, b 16
    ("partial_sums", DEEP.replace("K", "4094"), {**PAIRS, "y": (0, 1)}, "", "a usual sum of 65504"),
    ("partial_sums", DEEP.replace("K", "4095"), {**PAIRS, "y": (0, 1)}, "warning y", "one term more"),
    ("partial_sums", DEEP.replace("K", "4095"), {**PAIRS, "y": (0, LARGEST)}, "warning y", "in range"),
    ("partial_sums", DEEP.replace("K", "4095"), {**PAIRS, "y": (0, above(LARGEST))}, "", "overflow has it"),
    ("hidden_sums", LOG_SUM, {"x": mean(LIMIT / 2)}, "", "two of half a limit"),
    ("hidden_sums", LOG_SUM, {"x": mean(LIMIT / 2 + 1)}, "warning y", "a sum beyond the limit"),
    ("hidden_sums", LOG_SUM, {"x": mean(LIMIT)}, "warning y", "65504 in all"),
    ("hidden_sums", LOG_SUM, {"x": mean(LIMIT + 1)}, "error y", "65506 in all"),
    ("hidden_sums", LOG_SUM, {"x": mean(NORMAL)}, "", "normal terms"),
    ("hidden_sums", LOG_SUM, {"x": mean(below(NORMAL))}, "warning y", "subnormal terms"),
    ("hidden_sums", LOG_SUM, {"x": mean(FLUSH)}, "error y", "terms become zero"),
    ("hidden_sums", LOG_SUM, {"x": mean(0.0)}, "", "zeros"),
    ("hidden_sums", LOG_SUM, {"x": (-LIMIT, 1)}, "warning y", "signs cancel"),
    ("long_softmax", SOFTMAX.replace("N", "65504"), {}, "", "65504 keys"),
    ("long_softmax", SOFTMAX.replace("N", "65505"), {}, "warning y", "65505 keys"),
    ("long_softmax", SOFTMAX.replace("N", "65505").replace("-2", "-1"), {}, "", "along the other axis"),
    ("underflow", one("Relu"), {"y": (0, NORMAL)}, "", "normal, just"),
    ("underflow", one("Relu"), {"y": (0, below(NORMAL))}, "note y", "subnormal"),
    ("underflow", one("Relu"), {"y": (0, 2.0**-17)}, "note y", "eight bits"),
    ("underflow", one("Relu"), {"y": (0, below(2.0**-17))}, "warning y", "fewer than eight bits"),
    ("underflow", one("Relu"), {"y": (0, above(FLUSH))}, "warning y", "one bit"),
    ("underflow", one("Relu"), {"y": (0, FLUSH)}, "error y", "it rounds to zero"),
    ("weights", TINY, {}, "warning y", "subnormal weights"),
    ("weights", TINY, {"w": (1e-6, 3e-6)}, "warning y", "as measured"),
    ("weights", TINY, {"w": mean(5.9e-5)}, "warning y", "subnormals may err by a thousandth of 5.9e-5"),
    ("weights", TINY, {"w": mean(6.0e-5)}, "", "and by less of 6e-5"),
    ("weights", TINY, {"w": mean(0.01)}, "", "their measured norm excludes a loss"),
    ("phase", ANGLE, {"x": (0, 4.0)}, "", "an angle of 4"),
    ("phase", ANGLE, {"x": (0, above(4.0))}, "warning x, warning y", "a larger angle"),
    ("cast_pairs", PAIR, {"x": (0, LARGEST)}, "note h", "in range on the way"),
    ("cast_pairs", PAIR, {"x": (0, above(LARGEST))}, "error h", "beyond it on the way"),
]


@pytest.mark.parametrize(
    ("rule", "text", "ranges", "expected"),
    [pytest.param(*row[:4], id=f"{row[0]}: {row[4]}") for row in TABLE],
)
def test_the_border_of_a_rule(rule: str, text: str, ranges: Ranges, expected: str) -> None:
    analysis = analyzed(text, ranges, opset=22 if rule == "cast_pairs" else 17)
    assert found(rule, analysis, severities=True) == expected
