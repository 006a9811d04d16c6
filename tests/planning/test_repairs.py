"""A model for each rule of `scan`: found, repaired by `fix`, and then, emulated, within 2e-3 of FP32."""

from collections.abc import Mapping

import graphs
import numpy as np
import pytest
from nightly import some
from paths import MODELS

import rewriter
from rewriter.base.errors import PassError
from rewriter.hazards import SCAN_RULES, GraphAnalysis, PrecisionRequest
from rewriter.ir.graph import open_graphs
from rewriter.ir.graph.casts import retype
from rewriter.ir.model import Array, Model
from rewriter.ir.plan import Plan
from rewriter.passes.mixed_precision import request
from rewriter.runtime.emulation import emulation, reference
from rewriter.runtime.metrics.outputs import compare
from rewriter.runtime.ranges import measure
from rewriter.verification.expected import run_all

REPAIRED = 2e-3  # relative L2 error of every output, or the share of elements that differ
RULES = {rule.__name__: rule for rule in SCAN_RULES}


def span(low: float, high: float, *shape: int) -> Array:
    """Values from `low` to `high`, evenly spaced."""
    return np.linspace(low, high, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def normal(scale: float, *shape: int) -> Array:
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(np.float32)


RNG = np.random.default_rng(1)
SIGNS = np.where(np.arange(4096) < 2048, 10.0, -10.0).astype(np.float32)[:, None]
FILTERS = normal(0.5, 64)

CASES = graphs.cases("planning/repairs.txt")
NO_REPAIR = {
    "float64_differences": "no type of TensorRT's is enough: test_float64.py has models",
    "cast_pairs": "the model's own arithmetic: fix keeps it, bit by bit",
    "known_defects": "about TensorRT's code: each row of the table names its workaround",
    "refused_operators": "about the target's parser: test_quirks.py has the types of each release",
    "norm_operators": "silent without answers of `rewriter probe`: test_probe.py has the plan after one",
    "unmeasured": "about missing samples: what was not seen stays in FP32, and nothing can be compared",
}
"""Rules that no rewriting can answer, and why."""


def test_no_rule_is_forgotten() -> None:
    repaired = {case.values[1] for case in CASES}
    assert repaired | NO_REPAIR.keys() == RULES.keys(), "each has a model in repairs.txt or a reason here"
    assert not repaired & NO_REPAIR.keys()


def found(rule: str, source: Model, feeds: Mapping[str, Array]) -> set[str]:
    """Operators that the rule names in any graph of the model, with ranges measured on the data."""
    measured = measure(source, [feeds])
    settings = PrecisionRequest("fp16")
    named: set[str] = set()
    made: dict[int, GraphAnalysis] = {}
    for scope, graph in enumerate(open_graphs(source)):
        parent = made.get(id(graph.parent))
        made[id(graph)] = analysis = GraphAnalysis(
            graph, source.opsets, settings.low, scope, measured, settings, False, parent
        )
        named |= {hazard.node.op_type for hazard in RULES[rule](analysis)}
    return named


def error(expected: Mapping[str, Array], model: Model, feeds: Mapping[str, Array]) -> float:
    """Of a model in mixed precision, emulated with FP16 accumulators; infinite if it is not finite."""
    (actual,) = run_all(emulation(model, "fp16"), [feeds])
    return max(c.relative_l2 if c.finite else np.inf for c, _ in compare(expected, actual, REPAIRED))


def error_in_fp16(expected: Mapping[str, Array], source: Model, feeds: Mapping[str, Array]) -> float:
    """With every node in FP16; infinite if a constant does not fit."""
    try:
        return error(expected, retype(source, request(source, Plan("fp16"), "")), feeds)
    except PassError:
        return np.inf


@pytest.mark.parametrize(("text", "rule", "plain", "data"), CASES)
def test_found_and_repaired(text: str, rule: str, plain: str, data: str) -> None:
    text = text.replace("FILTERS", ", ".join(f"{value:.6g}" for value in FILTERS.reshape(-1)))
    source, feeds = graphs.graph(text), eval(f"dict({data})", globals())
    (expected,) = run_all(reference(source), [feeds])
    assert found(rule, source, feeds), "the rule says nothing"
    naive = error_in_fp16(expected, source, feeds)
    assert (naive > REPAIRED) == (plain == "wrong"), f"everything in FP16 gives {naive:.2g}"
    result = rewriter.fix(source.whole(), inputs=feeds, accumulation="fp16", build=False)
    assert result.verdict is not None and result.verdict.passed, result.verdict
    repaired = error(expected, result.model, feeds)
    assert repaired <= REPAIRED, f"{repaired:.2g}, kept {result.plan}"


# -- masks: the data has no padding, and then a row is masked whole --------------------------------
MASKED = "g (float[2,4,4] s, TYPE[2,1,4] m) => (float[2,4,4] y) <VALUES> { BODY y = Softmax<axis = -1>(a) }"
CHOSEN = MASKED.replace("TYPE", "bool").replace("BODY", "b = Where(m, zero, c)\n a = Add(s, b)")
FILLED = MASKED.replace("TYPE", "bool").replace("BODY", "a = Where(m, s, c)")
TIMES = MASKED.replace("TYPE", "float").replace("BODY", "i = Sub(one, m)\n b = Mul(i, c)\n a = Add(s, b)")
TWICE = MASKED.replace("TYPE", "bool").replace(
    "BODY", "b = Where(m, zero, c)\n t = Add(s, b)\n d = Where(m, zero, c)\n a = Add(t, d)"
)


@pytest.mark.parametrize("value", some("-1e9", "-3.4028235e38", "-65504.0", "-1e4"))
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(CHOSEN, id="added, selected"),
        pytest.param(FILLED, id="filled in"),
        pytest.param(TIMES, id="added, multiplied"),
        pytest.param(TWICE, id="added twice"),
    ],
)
def test_a_row_masked_whole_is_finite_though_no_data_had_padding(text: str, value: str) -> None:
    values = f"float c = {{{value}}}, float zero = {{0.0}}, float one = {{1.0}}"
    source = graphs.graph(text.replace("VALUES", values))
    kind = np.float32 if "float[2,1,4] m" in text else np.bool_
    scores = normal(2, 2, 4, 4)
    feeds = {"s": scores, "m": np.ones((2, 1, 4), kind)}
    result = rewriter.fix(source.whole(), inputs=feeds, accumulation="fp16", build=False)
    assert result.verdict is not None and result.verdict.passed
    for open_entries in (0, 1, 3):
        mask: Array = (np.arange(8).reshape(2, 1, 4) % 4 < open_entries).astype(kind)
        fed = {"s": scores, "m": mask}
        (actual,) = run_all(emulation(result.model, "fp16"), [fed])
        assert np.isfinite(actual["y"]).all()
        if open_entries:
            (expected,) = run_all(source, [fed])
            assert np.abs(actual["y"] - expected["y"]).max() < 2e-3


def test_bert_with_a_row_masked_whole_is_finite_though_no_data_had_padding() -> None:
    path = MODELS / "bert"
    with np.load(path.with_suffix(".npz")) as archive:
        feeds = {k: np.ones_like(v) if "mask" in k else v for k, v in archive.items()}
    result = rewriter.fix(path.with_suffix(".onnx"), inputs=feeds, build=False)
    blank = {k: np.zeros_like(v) if "mask" in k else v for k, v in feeds.items()}
    (actual,) = run_all(emulation(result.model), [blank])
    assert all(np.isfinite(array).all() for array in actual.values())
