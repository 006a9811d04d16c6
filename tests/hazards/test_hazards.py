"""Rules on graphs where they must report, and on similar ones where they must not; most are in rules.txt."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import graphs
import pytest
from hazard_rules import NAMES, Ranges, analyzed, found
from tables import values

from rewriter.base.errors import SEVERITIES
from rewriter.hazards import RULES, SCAN_RULES, Hazard, PrecisionRequest
from rewriter.hazards.analysis import is_already_avoided
from rewriter.hazards.small_values import _degree
from rewriter.ir.float_graph import FloatGraph
from rewriter.ir.plan import Range
from rewriter.target import Target

CASES, BORDERS = graphs.cases("hazards/rules.txt"), graphs.cases("hazards/borders.txt")


@pytest.mark.parametrize(("text", "rule", "words", "expected"), CASES)
def test_a_rule_in_a_graph(text: str, rule: str, words: str, expected: str) -> None:
    ranges: dict[str, Range | tuple[float, float]] = {}
    options = {}
    for name, value in (word.split("=", 1) for word in words.split()):
        low, *more = value.split(":")
        match more:
            case []:
                options[name] = value
            case [high]:
                ranges[name] = (float(low), float(high))
            case [high, mean, finite]:
                ranges[name] = Range(float(low), float(high), float(mean), finite == "finite")
            case [high, mean, _, step]:
                ranges[name] = Range(float(low), float(high), float(mean), finite=True, step=float(step))
    request = PrecisionRequest(
        options.pop("low", "fp16"),  # type: ignore[arg-type]
        keep_nodes=tuple(filter(None, options.pop("keep_nodes", "").split(","))),
        keep_ops=tuple(filter(None, options.pop("keep_ops", "").split(","))),
        target=Target.parse(options.pop("target", "tensorrt")),
        measured_norms=options.pop("measured", "") == "norms",
    )
    mixed, opset, scope = (options.pop("mixed", ""), options.pop("opset", 17), options.pop("scope", 0))
    assert not options, "options that no rule has"
    analysis = analyzed(
        text, ranges, request=request, mixed=mixed == "yes", opset=int(opset), scope=int(scope)
    )
    assert found(rule, analysis, severities=expected.startswith(SEVERITIES)) == expected


BRANCH = """
    g (bool c, float[2] x) => (float[2] y) {
        y = If (c) <
            then_branch = yes () => (float[2] t) { i = Identity(x) t = Neg(i) },
            else_branch = no () => (float[2] e) { e = Abs(x) }
        >
    }"""


@values
def test_a_branch_that_no_sample_takes(ranges: Ranges, reasons: set[str]) -> None:
    analysis = analyzed(BRANCH, ranges, scope=1)
    assert {h.reason for h in NAMES["unmeasured"](analysis)} == reasons


def test_a_chain_has_one_reason() -> None:
    analysis = analyzed(
        "g (float[2] x) => (float[2] y) { a = Exp(x) b = Neg(a) y = Sin(b) }", {"a": (0, 7e4), "b": (-8e4, 0)}
    )
    hazards = list(NAMES["overflow"](analysis))
    assert {h.reason for h in hazards} == {"a exceeds 65504"}
    assert {h.tensor for h in hazards} == {"a", "b"}


NORM = """
    g (float[2,8] x) => (float[2,8] y) <float two = {2.0}, float e = {1e-12}> {
        s = Pow(x, two) m = ReduceMean<axes = [1]>(s) a = Add(m, e) r = Sqrt(a) y = Div(x, r) }"""


L2_NORM = NORM.replace("ReduceMean<axes = [1]>(s)", "ReduceL2<axes = [1]>(x)").replace("Sqrt", "Identity")


@pytest.mark.parametrize(
    ("text", "tensor", "words", "end"),
    [
        pytest.param(NORM, "s", "squares inside the decomposed rms-norm", "exceed 65504", id="a square"),
        pytest.param(NORM, "m", "values inside the decomposed rms-norm", "exceed 65504", id="a mean"),
        pytest.param(L2_NORM, "x", "1e-12 in the decomposed l2-normalize", "is below FP16's normal range"),
    ],
)
def test_a_norm_names_what_goes_wrong(text: str, tensor: str, words: str, end: str) -> None:
    known: Ranges = {**dict.fromkeys("xsmary", (0.1, 1.0)), tensor: (0.0, 1e6)}
    analysis = analyzed(text, known, request=PrecisionRequest(measured_norms=True))
    assert {h.reason for h in NAMES["unfused_norm"](analysis)} == {f"{words} that ends in y {end}"}


SQUARE = """
    g (float[1,1,64] x) => (float[1,4,N] y)
    <float[4,1,TAPS] f = {WEIGHTS}, float two = {2.0}, float e = {1e-10}> {
        c = Conv(x, f) s = Pow(c, two) a = Add(s, e) y = Log(a) }"""


@values
def test_tf32_transforms(taps: int, weights: str, expected: str) -> None:
    text = SQUARE.replace("TAPS", f"{taps}").replace("N]", f"{65 - taps}]")
    text = text.replace("WEIGHTS", ", ".join([weights] * taps))
    hazards = NAMES["steep_functions"](analyzed(text, {"a": Range(1e-10, 200, 0.4, True)}))
    assert " ".join(h.node.output[0] for h in hazards if h.kind == "tf32") == expected


def test_every_rule_is_tested() -> None:
    """`known_defects` and its like in test_quirks.py, `norm_operators` in test_probe.py."""
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    elsewhere = {"norm_operators", "kept_for_defects", *(case.values[1] for case in CASES + BORDERS)}
    names = {rule.__name__ for rule in (*RULES, *SCAN_RULES)} - elsewhere
    untested = {n for n in names if not any(f'"{n}"' in text or f"{n}(" in text for text in texts)}
    assert untested == set(), "each needs a case in which it reports, and one in which it must not"


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


@pytest.mark.parametrize(("text", "rule", "ranges", "expected"), BORDERS)
def test_the_border_of_a_rule(text: str, rule: str, ranges: str, expected: str) -> None:
    """The last value that it allows, and the first that it reports, in numbers that FP32 holds exactly."""
    analysis = analyzed(text, eval(f"dict({ranges})", globals()), opset=22 if rule == "cast_pairs" else 17)
    assert found(rule, analysis, severities=True) == expected


MIXED = """
    g (float16[2] x, float[2] w) => (float16[2] y, float[2] z) {
        f = Cast<to = 1>(x) a = Exp(f) h = Cast<to = 10>(a) y = Neg(h) z = Exp(w) }"""


@values
def test_what_fp32_settles(node: str, rule: str, largest: float, kept: bool) -> None:
    analysis = analyzed(MIXED, {"a": (0, largest), "z": (0, largest)}, mixed=True)
    (found,) = (one for one in analysis.graph.nodes if one.output[0] == node)
    assert is_already_avoided(analysis, Hazard(found, rule, "a reason")) is kept
    assert not is_already_avoided(
        replace(analysis, mixed=False), Hazard(found, rule, "all in FP32: nothing is settled")
    )


@pytest.mark.parametrize(("body", "degree"), graphs.cases("hazards/degrees.txt"))
def test_degree_of_a_tensor(body: str, degree: str) -> None:
    source = graphs.graph(
        f"""
        g (float[2,2] x) => (float[2,N] y)
        <float[2,2] w = {{1, 2, 3, 4}}, float k = {{0.5}}, float two = {{2}}> {{ {body} }}"""
    )
    analysis = cast("Any", FloatGraph.main(source))
    assert str(_degree(analysis, "y", {})) == degree
    assert _degree(analysis, "w", {}) is None
    assert _degree(analysis, "y", {"y": 7.0}) == 7.0, "computed once"
