"""The search: the cheapest plan that meets a tolerance, or the reason why there is none."""

import time
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import pytest
from searching import CANCELLING, begin, most_emulations, reachable, tried
from typer.testing import CliRunner

import rewriter
from rewriter import api, cli
from rewriter.base import sandbox
from rewriter.base.stopwatch import OutOfTimeError
from rewriter.cli import exits
from rewriter.hazards.analysis import PrecisionRequest
from rewriter.hazards.planning.planner import make_plan
from rewriter.ir.model import Array, Model, save
from rewriter.ir.plan import Decision, InputsOutputs, Plan
from rewriter.jobs.search.effort import FEWER, MOST, RunCost, affordable
from rewriter.jobs.search.goal import Budget, ErrorLimit, Found, Goal
from rewriter.jobs.search.run import LEAST_GAIN, MOST_GAIN, best_in_time, most_accurate
from rewriter.jobs.search.trials import AddedNodes, Memory, Trials
from rewriter.passes.mixed_precision import lowered
from rewriter.report.remarks import worded
from rewriter.runtime.emulation import Accumulation, emulation, reference
from rewriter.runtime.emulation.accumulate import sum_error
from rewriter.runtime.metrics.pairwise_error import relative_l2
from rewriter.runtime.ranges import measure
from rewriter.target import Target
from rewriter.verification.expected import run_all


def searched(
    source: Model, goal: ErrorLimit, plan: Plan | None = None, feeds: dict[str, Array] | None = None
) -> Found:
    return reachable(begin(source, plan or Plan("fp16"), goal, feeds), goal)


def test_only_the_inaccurate_node_goes_to_fp32() -> None:
    found = searched(graphs.graph(CANCELLING), ErrorLimit(2e-3))
    assert found.met
    assert found.before > 2e-3 >= found.value
    assert {"0:a", "0:s"} <= found.plan.fp32
    assert not found.plan.fp32 & {"0:d", "0:e", "0:f", "0:y"}
    assert {d.rule for d in found.plan.decisions} <= {"tolerance", "between-islands"}
    assert found.emulations <= most_emulations(9)
    assert found.cost_us > 0.0
    loose = searched(graphs.graph(CANCELLING), ErrorLimit(0.5))
    assert (loose.met, loose.emulations, loose.plan, loose.cost_us) == (True, 1, Plan("fp16"), 0.0)


@dataclass
class Ending(Trials):
    """Trials whose time is up after so many evaluations."""

    last: int = 0

    def _by_sample(self, plan: Plan) -> list[float]:
        if self.count >= self.last:
            raise OutOfTimeError
        return super()._by_sample(plan)


def test_at_its_deadline_a_search_hands_out_the_best_plan_so_far() -> None:
    goal, budget = ErrorLimit(2e-3), Budget(1.0)

    def ending(last: int) -> Trials:
        trials = begin(graphs.graph(CANCELLING), Plan("fp16"), goal)
        given = {one.name: getattr(trials, one.name) for one in fields(trials) if one.init}
        return Ending(**given, last=last)

    found = best_in_time(ending(4), goal)
    assert found.met and {"0:a", "0:s", "0:y"} <= found.plan.fp32, "every node that adds an error"
    assert found.emulations == 4, "the rules' plan, the ranking, the first node, and all of these nodes"
    unmet = best_in_time(ending(1), goal)
    assert not unmet.met and unmet.plan == Plan("fp16") and unmet.value == unmet.before
    assert best_in_time(ending(2), budget).plan == Plan("fp16")
    with pytest.raises(OutOfTimeError):
        best_in_time(ending(0), goal)


def test_a_search_leaves_time_for_the_check_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of one sample takes 100 s here, so a check of three takes at most 600."""
    goal, passed, real = ErrorLimit(2e-3), [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])

    def slow(model: Model, sample: dict[str, Array]) -> dict[str, Array]:
        passed[0] += 100.0
        return sample

    monkeypatch.setattr("rewriter.jobs.search.trials.as_declared", slow)
    trials, start = begin(graphs.graph(CANCELLING), Plan("fp16"), goal), time.monotonic()
    trials.deadline, trials.checked = start + 1000.0, 3
    found = best_in_time(trials, goal)
    assert found.met and len(trials.tried) == 3, "the fourth would end after 400 s"
    assert time.monotonic() + 600.0 < trials.deadline + 60.0


def test_a_search_goes_on_from_the_runs_of_an_earlier_one() -> None:
    """For another limit, and with one more sample, the result is that of a search by itself."""
    source, memory, opened = graphs.graph(CANCELLING), Memory(), list[int]()
    more = {"x": graphs.random_feeds(source)["x"][::-1] * 0.5}
    for limit, places in ((2e-3, (4,)), (1e-3, (4,)), (1e-3, (4, 2))):
        goal = ErrorLimit(limit)
        own, later = (begin(source, Plan("fp16"), goal) for _ in range(2))
        for trials in (own, later):
            trials.samples = [*trials.samples, more][: len(places)]
            trials.expected = run_all(reference(source), trials.samples)
        later.places, later.memory = places, memory
        one, other = reachable(own, goal), reachable(later, goal)
        assert (one.plan, one.value, one.met) == (other.plan, other.value, other.met)
        opened.append(other.emulations - one.emulations)
    assert opened[0] == 0 and opened[1] < 0 and len(memory.ranked) == 1
    assert {key[-1] for key in memory.runs} == {4, 2}


def test_a_slow_model_gets_the_first_plan_that_is_cheap_enough() -> None:
    goal, trials = ErrorLimit(2e-3), begin(graphs.graph(CANCELLING), Plan("fp16"), ErrorLimit(2e-3))
    trials.memory.emulation_s = 60.0
    found = reachable(trials, goal)
    assert found.met and {"0:a", "0:s"} <= found.plan.fp32
    assert found.emulations == 4, "the rules' plan, the ranking, the first node, and all of these nodes"


def test_what_errs_at_the_start_and_is_amplified_goes_to_fp32_alone() -> None:
    """Every node adds as much error; that of the first is 100 times larger after a difference."""
    rest = " ".join(f"t{n} = Mul(t{n - 1}, k)" for n in range(1, 22))
    text = f"g (float[64] x) => (float[64] t21) <float k = {{1.01}}> {{a = Mul(x, k) t0 = Sub(a, x) {rest}}}"
    found = searched(graphs.graph(text), ErrorLimit(5e-3))
    assert found.met and {"0:a", "0:t0"} <= found.plan.fp32 and len(found.plan.fp32) <= 3


SLOW_SCAN = """
    g (float[T,8] x, float[8,8] w) => (float[T,8] y)
    <float keep = {0.999}, float share = {0.001}, float[8] zero = {0, 0, 0, 0, 0, 0, 0, 0},
     int64[1] first = {0}> {
        h, s = Scan <num_scan_inputs = 1, body = step (float[8] before, float[8] frame)
            => (float[8] after, float[8] out) {
            [kept] k = Mul(before, keep) [new] n = Mul(frame, share) [after] after = Add(k, n)
            [row] r = Unsqueeze(after, first) [product] p = MatMul(r, w) [out] out = Squeeze(p, first)
        }>(zero, x)
        y = Tanh(s) }"""


def test_a_state_inside_a_scan_goes_to_fp32() -> None:
    """FP16 stops a mean that moves by a thousandth a step."""
    weights: dict[str, Array] = {"w": np.eye(8, dtype="f4") * 0.7}
    rng = np.random.default_rng(0)
    feeds: dict[str, Array] = {"x": np.abs(rng.standard_normal((400, 8))).astype("f4")}
    found = searched(graphs.with_weights(SLOW_SCAN, weights), ErrorLimit(2e-3), feeds=feeds)
    assert found.met and found.before > 5e-3
    assert {"0:h", "1:k", "1:after"} <= found.plan.fp32


OUT_OF_REACH = """
    g (float[2,8] x) => (float[2,2] y) <float offset = {300.0}, float[8,2] w = {
        2049.0, 2049.0, -2000.0, -2000.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0}> {
        [a] a = Add(x, offset) [s] s = Sub(a, offset) [y] y = MatMul(s, w) }"""
"""TF32 rounds 2049 to 2048, too; FP16 loses digits of x beside 300."""


@pytest.mark.parametrize(("metric", "limit"), [("relative-l2", 1e-3), ("psnr", 200.0)])
def test_out_of_reach_the_plan_comes_as_close_as_fp32_does(metric: str, limit: float) -> None:
    feeds: dict[str, Array] = {"x": np.full((2, 8), 1.07, np.float32)}
    found = searched(graphs.graph(OUT_OF_REACH), ErrorLimit(limit, metric), feeds=feeds)
    assert not found.met and "0:a" in found.plan.fp32
    assert ("0:s" in found.plan.fp32) or metric == "psnr", "where FP32 is no closer, one node is as close"
    words = "cannot be met: with every node in FP32, matrix products in TF32, it is"
    assert words in worded(found.check).summary
    assert (found.value < 0.5 * found.before) is (metric == "relative-l2")


@pytest.mark.parametrize(
    ("metric", "tolerance"), [("max-abs", 2e-3), ("cosine", 0.999999), ("psnr", 55.0)], ids=str
)
def test_every_metric_can_be_the_goal(metric: str, tolerance: float) -> None:
    found = searched(graphs.graph(CANCELLING), ErrorLimit(tolerance, metric))
    assert found.met
    assert not ErrorLimit(tolerance, metric).meets(found.before)
    assert {"0:a", "0:s"} <= found.plan.fp32


def test_nodes_that_the_rules_keep_stay_in_fp32() -> None:
    kept = Decision("Exp(y)", "Exp", "0:y", "overflow", "a reason")
    found = searched(graphs.graph(CANCELLING), ErrorLimit(2e-3), Plan("fp16", decisions=(kept,)))
    assert found.met and kept in found.plan.decisions


def test_outputs_in_fp16_limit_the_accuracy() -> None:
    source = graphs.graph("g (float[8] x) => (float[8] y) { a = Exp(x)\n y = Tanh(a) }")
    feeds: dict[str, Array] = {"x": np.arange(8, dtype=np.float32) / 8}
    io: InputsOutputs = "fp16"
    found = searched(source, ErrorLimit(1e-6), Plan("fp16", io), feeds)
    assert not found.met and "with every node in FP32" in worded(found.check).summary
    assert 1e-5 < found.value < 1e-3


@pytest.mark.parametrize("length", [1, 5, 40])
def test_the_number_of_emulations_is_bounded(length: int) -> None:
    names = ["x", *(f"t{i}" for i in range(length - 1)), "y"]
    body = "\n".join(f"{out} = Tanh({name})" for name, out in pairwise(names))
    found = searched(graphs.graph(f"g (float[32] x) => (float[32] y) {{ {body} }}"), ErrorLimit(1e-5))
    assert found.met
    assert found.emulations <= most_emulations(length)


# -- through fix ---------------------------------------------------------------------------------
def fixed(source: Model, **options: Any) -> rewriter.FixResult:
    return rewriter.fix(
        source.whole(), inputs=graphs.random_feeds(source), build=False, skip=("simplify",), **options
    )


def test_a_tolerance_out_of_reach_is_a_failed_verification(tmp_path: Path) -> None:
    path = save(graphs.graph(OUT_OF_REACH), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.full((2, 8), 1.07, np.float32))
    arguments = [path, "--inputs", tmp_path / "d.npz", "--dry-run", "--no-build", "--no-repair"]
    outcome = CliRunner().invoke(cli.app, ["fix", *map(str, arguments), "--tolerance", "1e-3"])
    assert outcome.exit_code == exits.FAILED
    assert "cannot be met: with every node in FP32" in " ".join(outcome.stdout.split())


# -- a budget ----------------------------------------------------------------------
def test_a_budget_buys_the_most_accurate_plan() -> None:
    source = graphs.graph(CANCELLING)
    values = {}
    for share in (0.0, 0.3, 0.6, 10.0):
        found = reachable(begin(source, Plan("fp16"), Budget(share)), Budget(share))
        assert found.cost_us <= share * found.base_us * (1 + 1e-9)
        assert found.emulations <= 1 + 12, "a ranking, and plans"
        values[share] = found.value
        assert share or (found.plan, found.cost_us, found.value) == (Plan("fp16"), 0.0, found.before)
    assert list(values.values()) == sorted(values.values(), reverse=True)
    assert values[10.0] < values[0.0] / 100, "everything in FP32"


@pytest.mark.parametrize("options", [{"preset": "accurate"}, {"max_latency_cost": 0.2}])
def test_a_model_without_floats_has_nothing_to_search(options: dict[str, Any]) -> None:
    """Nothing diverges, and ONNX Runtime refuses a model without outputs."""
    source = graphs.graph("g (int64[2] x) => (int64[2] y) { y = Add(x, x) }")
    verdict = rewriter.fix(source.whole(), build=False, **options).verdict
    assert verdict is not None and verdict.passed


def test_a_budget_maximises_psnr() -> None:
    budget = Budget(10.0, "psnr")
    found = reachable(begin(graphs.graph(CANCELLING), Plan("fp16"), budget), budget)
    assert found.value > found.before + 40


def test_a_search_with_a_budget_respects_its_limit_of_plans() -> None:
    budget, trials = Budget(10.0), begin(graphs.graph(CANCELLING), Plan("fp16"), Budget(10.0))
    assert most_accurate(trials, budget, most=2).emulations <= 3, "two plans, and the ranking"


def test_a_user_metric_can_be_the_goal(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def far(e, a):\n    return float(abs(e['y'] - a['y']).max())\n")
    result = fixed(graphs.graph(CANCELLING), tolerance=2e-3, metric=f"{tmp_path / 'own.py'}:far")
    assert result.verdict is not None and result.verdict.passed
    assert result.plan is not None and {"0:a", "0:s"} <= result.plan.fp32


def test_all_samples_count() -> None:
    source = graphs.graph(
        "g (float[64] x) => (float[64] y) "
        "<float big = {64.0}, int64[2] l = {0, 1}, float[1,1,3] w = {0, 1, 0}> {"
        " h = Unsqueeze(x, l) v = Conv <pads = [1, 1]> (h, w) i = Squeeze(v, l)"
        " a = Add(i, big) y = Sub(a, big) }"
    )
    exact: dict[str, Array] = {"x": np.arange(64, dtype=np.float32) / 16}
    lost: dict[str, Array] = {"x": np.arange(64, dtype=np.float32) / 1600}
    for samples, kept in (([exact], False), ([exact, lost, exact], True)):
        result = rewriter.fix(source.whole(), inputs=samples, tolerance=1e-3, build=False, skip=("simplify",))
        assert result.plan is not None and bool(result.plan.fp32) == kept


def test_a_search_sums_in_another_order_than_the_check_of_what_it_finds() -> None:
    """Chance that is kind to a plan in one order is not kind in the other."""
    source = graphs.graph("""
        g (float[64,512] x, float[512,64] w) => (float[64,64] y) { m = MatMul(x, w) y = Sin(m) }""")
    feeds, plan = graphs.random_feeds(source), Plan("fp16", io="keep")
    own = begin(source, plan, ErrorLimit(1e-9), feeds).value(AddedNodes())
    low, (exact,) = lowered(source, plan), run_all(source, [feeds])
    forwards, backwards = (
        relative_l2(exact["y"], run_all(emulation(low, "fp16", backwards=order), [feeds])[0]["y"])
        for order in (False, True)
    )
    assert own == pytest.approx(backwards, rel=1e-6)
    assert own != pytest.approx(forwards, rel=1e-3)


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


def planned_trials(source: Model, target: Target | None = None, io: InputsOutputs = "keep") -> Trials:
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
        trials = planned_trials(source, Target.parse(f"tensorrt-rtx 1.6.1 {gpu}"))
        trials.plan = Plan("fp16")
        assert ("0:p" in trials.ranked()) == (gpu == "sm_80")


def test_a_norm_that_reads_a_residual_sum_is_no_candidate() -> None:
    trials = planned_trials(graphs.graph(STREAM))
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
    trials = planned_trials(weighted(CONVS))
    trials.ranking_sums = "fp32"
    ranking = trials.ranked()
    assert ranking.index("0:a") < ranking.index("0:y"), "the deep one first, although it costs more"
    assert sum_error(768) == pytest.approx(1.05e-3, rel=0.05)
    assert sum_error(4096) == pytest.approx(2.36e-3, rel=0.05)


def test_attention_keeps_the_types_of_the_rules_plan() -> None:
    trials = planned_trials(graphs.graph(ATTENTION))
    assert trials.plan.fp32 == {"0:p"}
    assert set(trials.useful_nodes()) <= {"0:t", "0:u", "0:y"}
    assert set(trials.all_nodes()) == set(trials.ranked()) > {"0:s", "0:r", "0:z"}
    first = trials.useful_nodes()
    assert trials.all_nodes()[: len(first)] == first, "the others as a last resort"


def test_attention_is_searched_if_the_target_fuses_it_in_any_type() -> None:
    found = planned_trials(graphs.graph(ATTENTION), replace(Target(), answers={"attention-islands": "any"}))
    assert {"0:s", "0:r", "0:z"} <= set(found.useful_nodes())


def test_a_clearly_better_plan_is_chosen() -> None:
    found = most_accurate(planned_trials(graphs.graph(CANCELLING)), Budget(10.0))
    assert {"0:a", "0:s"} <= found.plan.fp32
    assert found.value <= (1.0 - LEAST_GAIN) * found.before


LITTLE = "g (float[4096] x) => (float[4096] y) <float k = {0.1}> { a = Mul(x, k) y = Add(a, x) }"


def test_the_rules_plan_is_kept_if_the_gain_is_small() -> None:
    """Input and output are FP16 and always rounded: that is most of the error."""
    found = most_accurate(planned_trials(graphs.graph(LITTLE), io="fp16"), Budget(10.0))
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
        (check,) = [check for check in result.checks if check.name == "max-latency-cost"]
        assert words in worded(check).summary


NET = """
    g (float[1,16,8,8] x, float[16,16,3,3] w, float[16,16,1,1] u, float[16,16,3,3] v, float[16,16,1,1] z)
        => (float[1,16,6,6] y) {
        a = Conv<pads = [1,1,1,1]>(x, w) b = Tanh(a) c = Conv(b, u) d = Sigmoid(c)
        e = Conv<pads = [1,1,1,1]>(d, v) f = Tanh(e) h = Conv(f, z)
        y = AveragePool<kernel_shape = [3, 3]>(h) }"""


def test_a_net_of_convs_all_in_fp32_is_a_candidate_although_parts_cost_more() -> None:
    trials = planned_trials(weighted(NET))
    ranked = trials.useful_nodes()
    whole = trials.latency_us(AddedNodes(ranked))
    own = trials.ranked(by_cost=False)
    parts = [trials.latency_us(AddedNodes(own[:count])) for count in range(1, len(own))]
    assert max(parts) > whole
    most_accurate(trials, Budget(whole / trials.latency_us(AddedNodes([])) - 1.0 + 1e-6))
    assert any(trials.plan_of(candidate).fp32 >= set(ranked) for candidate in tried(trials))


@pytest.mark.parametrize("share", [0.05, 0.5, 5.0])
def test_a_dearer_plan_must_save_a_share_of_error_as_large_as_its_latency(share: float) -> None:
    trials = planned_trials(weighted(NET))
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
