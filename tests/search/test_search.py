"""The search: the cheapest plan that meets a tolerance, or the reason why there is none."""

import time
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import pytest
from searching import CANCELLING, begin, most_emulations, reachable
from typer.testing import CliRunner

import rewriter
from rewriter import cli
from rewriter.base.stopwatch import OutOfTimeError
from rewriter.cli import exits
from rewriter.ir.model import Array, Model, save
from rewriter.ir.plan import Decision, InputsOutputs, Plan
from rewriter.jobs.search.goal import Budget, ErrorLimit, Found
from rewriter.jobs.search.run import best_in_time, most_accurate
from rewriter.jobs.search.trials import AddedNodes, Memory, Trials
from rewriter.passes.mixed_precision import lowered
from rewriter.runtime.emulation import emulation, reference
from rewriter.runtime.metrics.pairwise_error import relative_l2
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

    found = best_in_time(ending(3), goal)
    assert found.met and {"0:a", "0:s", "0:y"} <= found.plan.fp32, "every node that adds an error"
    assert found.emulations == 3, "the rules' plan, the ranking, and all of these nodes"
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
    assert "cannot be met: with every node in FP32, matrix products in TF32, it is" in found.summary
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
    assert not found.met and "with every node in FP32" in found.summary
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
def trials_of(source: Model, goal: ErrorLimit | Budget) -> Trials:
    return begin(source, Plan("fp16"), goal)


def test_a_budget_buys_the_most_accurate_plan() -> None:
    source = graphs.graph(CANCELLING)
    values = {}
    for share in (0.0, 0.3, 0.6, 10.0):
        found = reachable(trials_of(source, Budget(share)), Budget(share))
        assert found.cost_us <= share * found.base_us * (1 + 1e-9)
        assert found.emulations <= 1 + 12, "a ranking, and plans"
        values[share] = found.value
    assert list(values.values()) == sorted(values.values(), reverse=True)
    assert values[10.0] < values[0.0] / 100, "everything in FP32"


@pytest.mark.parametrize("options", [{"preset": "accurate"}, {"max_latency_cost": 0.2}])
def test_a_model_without_floats_has_nothing_to_search(options: dict[str, Any]) -> None:
    """Nothing diverges, and ONNX Runtime refuses a model without outputs."""
    source = graphs.graph("g (int64[2] x) => (int64[2] y) { y = Add(x, x) }")
    verdict = rewriter.fix(source.whole(), build=False, **options).verdict
    assert verdict is not None and verdict.passed


def test_a_budget_of_zero_keeps_the_rules_plan() -> None:
    found = reachable(trials_of(graphs.graph(CANCELLING), Budget(0.0)), Budget(0.0))
    assert (found.plan, found.cost_us, found.value) == (Plan("fp16"), 0.0, found.before)


def test_a_budget_maximises_psnr() -> None:
    budget = Budget(10.0, "psnr")
    found = reachable(trials_of(graphs.graph(CANCELLING), budget), budget)
    assert found.value > found.before + 40


def test_a_search_with_a_budget_respects_its_limit_of_plans() -> None:
    budget, trials = Budget(10.0), trials_of(graphs.graph(CANCELLING), Budget(10.0))
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
