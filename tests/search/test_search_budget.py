"""A search with a budget: nodes that it does not change, and when it keeps the rules' plan."""

import time
from dataclasses import replace

import graphs
import numpy as np
import pytest
from searching import CANCELLING, tried

from rewriter import api
from rewriter.base import sandbox
from rewriter.hazards.analysis import PrecisionRequest
from rewriter.hazards.planning.planner import make_plan
from rewriter.ir.model import Array, Model
from rewriter.ir.plan import InputsOutputs, Plan
from rewriter.jobs.search.effort import FEWER, MOST, RunCost, affordable
from rewriter.jobs.search.goal import Budget, ErrorLimit, Goal
from rewriter.jobs.search.run import LEAST_GAIN, MOST_GAIN, _by_own_error, most_accurate
from rewriter.jobs.search.trials import AddedNodes, Trials
from rewriter.runtime.emulation import Accumulation, reference
from rewriter.runtime.emulation.accumulate import sum_error
from rewriter.runtime.ranges import measure
from rewriter.target import Target
from rewriter.verification.expected import run_all

STREAM = """
    g (float[8,4] x, float[4,4] v) => (float[8,4] y)
    <float[4,4] w = {0.7,0.1,0,0, 0,0.3,0.9,0, 0.2,0,0.7,0, 0,0.4,0,0.6}, float[4] b = {0.1,0.2,0.3,0.4}> {
        m = MatMul(x, w) a = Add(m, b) s = Add(a, x) n = LayerNormalization(s, b)
        t = Transpose<perm = [1, 0]>(s) u = Transpose<perm = [1, 0]>(t) o = LayerNormalization(u, b)
        p = Add(n, o) y = MatMul(p, v) }"""
"""A norm that reads a residual sum, and one that reads it through views."""

ATTENTION = """
    g (float[2,32,16] q, float[2,32,16] k, float[2,32,16] v, float[2,32,32] mask) => (float[2,32,16] y)
    <float h = {0.25}> {
        a = Mul(q, h) t = Transpose<perm = [0, 2, 1]>(k) s = MatMul(a, t) r = Add(s, mask)
        p = Softmax<axis = -1>(r) u = Neg(v) z = MatMul(p, u) y = Tanh(z) }"""


def trials_of(source: Model, target: Target | None = None, io: InputsOutputs = "keep") -> Trials:
    samples = [graphs.random_feeds(source)]
    widened = reference(source)
    exact, ranges = run_all(widened, samples), measure(widened, samples)
    plan = make_plan(source, ranges, PrecisionRequest(io=io, epilogues="all"))
    metric = Budget(1.0).measure
    return Trials(source, samples, exact, plan, metric, target=target or Target())


def test_a_node_that_is_wrong_in_fp32_is_no_candidate() -> None:
    text = ATTENTION.replace("mask) => (float[2,32,16] y)", "mask, float[32,16] w) => (float[1,32,16] y)")
    text = text.replace(
        " h = {0.25}", " h = {0.25}, int64[4] heads = {1,2,32,16}, int64[3] whole = {1,32,32}"
    )
    views = (
        "o = Reshape(z, heads) l = Transpose<perm = [0, 2, 1, 3]>(o) i = Reshape(l, whole) y = MatMul(i, w)"
    )
    source = graphs.graph(text.replace("y = Tanh(z)", views))
    for gpu in ("sm_80", "sm_90"):  # the row softmax-of-relative-positions
        trials = trials_of(source, Target.parse(f"tensorrt-rtx 1.6.1 {gpu}"))
        trials.plan = Plan("fp16")
        assert ("0:p" in trials.ranking) == (gpu == "sm_80")


def test_a_norm_that_reads_a_residual_sum_is_no_candidate() -> None:
    trials = trials_of(graphs.graph(STREAM))
    assert {"0:a", "0:s", "0:o"} <= trials.plan.fp32
    assert "0:n" not in trials.plan.fp32 | set(trials.useful_nodes())


CONVS = """
    g (float[1,64,6,6] x, float[64,64,3,3] w, float[64,1,3,3] v) => (float[1,64,6,6] y) {
        a = Conv<pads = [1,1,1,1]>(x, w) b = Mul(a, a) y = Conv<pads = [1,1,1,1], group = 64>(b, v)
    }"""


def weighted(text: str) -> Model:
    """A graph whose inputs after the first become random weights, with sums of variance 1."""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {}
    for value in graphs.graph(text).proto.graph.input[1:]:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        depth = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
        weights[value.name] = (rng.standard_normal(shape) / np.sqrt(depth)).astype(np.float32)
    return graphs.with_weights(text, weights)


def test_a_ranking_with_fp32_sums_includes_the_error_of_deep_convs() -> None:
    """Models too large for emulated FP16 sums: the depth gives the error, and nodes in FP32 add none."""
    trials = trials_of(weighted(CONVS))
    trials.ranking_sums = "fp32"
    ranking = trials.ranking
    assert ranking.index("0:a") < ranking.index("0:y"), "the deep one first, although it costs more"
    assert sum_error(768) == pytest.approx(1.05e-3, rel=0.05)
    assert sum_error(4096) == pytest.approx(2.36e-3, rel=0.05)


def test_attention_keeps_the_types_of_the_rules_plan() -> None:
    trials = trials_of(graphs.graph(ATTENTION))
    assert trials.plan.fp32 == {"0:p"}
    assert set(trials.useful_nodes()) <= {"0:t", "0:u", "0:y"}
    assert set(trials.all_nodes()) == set(trials.ranking) > {"0:s", "0:r", "0:z"}
    first = trials.useful_nodes()
    assert trials.all_nodes()[: len(first)] == first, "the others as a last resort"


def test_attention_is_searched_if_the_target_fuses_it_in_any_type() -> None:
    found = trials_of(graphs.graph(ATTENTION), replace(Target(), answers={"attention-islands": "any"}))
    assert {"0:s", "0:r", "0:z"} <= set(found.useful_nodes())


def test_a_clearly_better_plan_is_chosen() -> None:
    found = most_accurate(trials_of(graphs.graph(CANCELLING)), Budget(10.0))
    assert {"0:a", "0:s"} <= found.plan.fp32
    assert found.value <= (1.0 - LEAST_GAIN) * found.before


LITTLE = "g (float[4096] x) => (float[4096] y) <float k = {0.1}> { a = Mul(x, k) y = Add(a, x) }"


def test_the_rules_plan_is_kept_if_the_gain_is_small() -> None:
    """Input and output are FP16 and always rounded: that is most of the error."""
    found = most_accurate(trials_of(graphs.graph(LITTLE), io="fp16"), Budget(10.0))
    assert not found.plan.fp32 and found.value == found.before and found.cost_us == 0.0


SELECTING = """
    g (float[64,8] x, float[8,8] w, float[8,1] v) => (float[1,16,8] y)
    <int64[1] k = {16}, int64[1] first = {0}, int64[1] last = {1}> {
        h = MatMul(x, w) s = MatMul(h, v) scores = Squeeze(s, last) best, places = TopK(scores, k)
        rows = Gather(h, places) y = Unsqueeze(rows, first) }"""


def test_rows_that_a_model_selects_are_matched_as_sets() -> None:
    """FP16 changes their order, so an elementwise comparison would compare different rows."""
    model = weighted(SELECTING)
    feeds = {"x": np.random.default_rng(1).standard_normal((64, 8)).astype(np.float32)}
    for metric, words in ((None, "detections"), ("max-abs", "max-abs")):
        result = api.fix(model.proto, preset="accurate", inputs=[feeds], build=False, metric=metric)
        assert result.verdict is not None
        (check,) = [check for check in result.verdict.checks if check.name == "max-latency-cost"]
        assert words in check.summary


NET = """
    g (float[1,16,8,8] x, float[16,16,3,3] w, float[16,16,1,1] u, float[16,16,3,3] v, float[16,16,1,1] z)
        => (float[1,16,6,6] y) {
        a = Conv<pads = [1,1,1,1]>(x, w) b = Tanh(a) c = Conv(b, u) d = Sigmoid(c)
        e = Conv<pads = [1,1,1,1]>(d, v) f = Tanh(e) h = Conv(f, z)
        y = AveragePool<kernel_shape = [3, 3]>(h) }"""


def test_a_net_of_convs_all_in_fp32_is_a_candidate_although_parts_cost_more() -> None:
    trials = trials_of(weighted(NET))
    ranked = trials.useful_nodes()
    whole = trials.latency_us(AddedNodes(ranked))
    own = _by_own_error(trials, ranked)
    parts = [trials.latency_us(AddedNodes(own[:count])) for count in range(1, len(own))]
    assert max(parts) > whole
    most_accurate(trials, Budget(whole / trials.latency_us(AddedNodes([])) - 1.0 + 1e-6))
    assert any(trials.plan_of(candidate).fp32 >= set(ranked) for candidate in tried(trials))


@pytest.mark.parametrize("share", [0.05, 0.5, 5.0])
def test_a_dearer_plan_must_save_a_share_of_error_as_large_as_its_latency(share: float) -> None:
    trials = trials_of(weighted(NET))
    found = most_accurate(trials, Budget(share))
    cost = found.cost_us / found.base_us
    kept = 1.0 - min(MOST_GAIN, max(LEAST_GAIN, cost))
    assert found.plan == trials.plan or found.value <= kept * found.before
    within = [one for one in tried(trials) if trials.latency_us(one) <= (1.0 + share) * found.base_us]
    dearer = [one for one in within if trials.latency_us(one) > found.base_us + found.cost_us]
    assert all(trials.value(one) > (1.0 - MOST_GAIN) * found.value for one in dearer)


def test_plans_are_priced_at_the_sizes_of_the_samples() -> None:
    text = "g (float[{n},32] x, float[32,32] v) => (float[{n},32] y) {{ a = MatMul(x, v)  y = Tanh(a) }}"
    fixed, dynamic = (graphs.graph(text.format(n=size)) for size in ("4096", "rows"))
    samples = [graphs.random_feeds(fixed)]
    exact = run_all(reference(fixed), samples)
    metric = Budget(1.0).measure
    first, second = (Trials(one, samples, exact, Plan("fp16"), metric).prices for one in (fixed, dynamic))
    assert first.base == second.base and first.own == second.own


# -- how much emulation a model gets -------------------------------------------------------------------
ERROR, BUDGET = ErrorLimit(1e-3), Budget(0.1)


@pytest.mark.parametrize(
    ("goal", "seconds", "requested", "left"),
    [
        pytest.param(ERROR, 0.01, "fp16", (4, "fp16", "fp16", MOST), id="a quick model"),
        pytest.param(ERROR, 1.0, "fp16", (1, "fp16", "fp16", MOST), id="fewer samples first"),
        pytest.param(ERROR, 2.0, "fp16", (4, "fp32", "fp32", FEWER), id="then FP32 sums"),
        pytest.param(ERROR, 11.0, "fp16", (1, "fp32", "fp32", FEWER), id="both"),
        pytest.param(ERROR, 11.0, "fp32", (1, "fp32", "fp32", MOST), id="FP32 sums on request"),
        pytest.param(BUDGET, 0.01, "fp32", (4, "fp16", "fp16", MOST), id="a budget: FP16 sums"),
        pytest.param(BUDGET, 1.0, "fp32", (1, "fp16", "fp16", MOST), id="a budget: fewer samples"),
        pytest.param(BUDGET, 2.0, "fp32", (1, "fp16", "fp32", FEWER), id="a budget: a ranking in FP32"),
    ],
)
def test_slow_models_get_less_emulation_and_that_is_reported(
    goal: Goal, seconds: float, requested: Accumulation, left: tuple[int, str, str, int]
) -> None:
    """A product of this size is emulated eight times as slowly with FP16 sums."""
    effort = affordable(goal, cost(seconds), 4, requested)
    assert (effort.samples, effort.judging_sums, effort.ranking_sums, effort.plans) == left
    whole = left[0] == 4 and left[2] == ("fp16" if goal is BUDGET else requested)
    assert ("s of a core" in effort.reduced) is not whole


def test_a_run_costs_what_its_process_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "inside", False)
    source = graphs.graph("g (float[1500,1500] x) => (float[1500,1500] y) { y = MatMul(x, x) }")
    own, all_of_it = time.thread_time(), sandbox.processor_s()
    run_all(source, 3 * [{"x": np.ones((1500, 1500), np.float32)}])
    child_s = sandbox.processor_s() - all_of_it - (time.thread_time() - own)
    assert child_s > 0.03 or not sandbox.FORKS


def cost(seconds: float) -> RunCost:
    source = graphs.graph("g (float[8,8] x) => (float[8,8] y) { y = MatMul(x, x) }")
    return RunCost.of(source, seconds)
