"""The search on an engine: the tried plans, the chosen one, and failures."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import graphs
import pytest
from searching import CANCELLING, begin, problem_of
from typer.testing import CliRunner

import rewriter
from rewriter import cli
from rewriter.base import Target
from rewriter.data.inputs import load_samples
from rewriter.emulation import Accumulation
from rewriter.engines import this_machine
from rewriter.engines.deployment import Deployment
from rewriter.engines.protocol import EngineName, Timing, Variant
from rewriter.errors import EngineError, UsageError
from rewriter.figures.metrics import named
from rewriter.model import facts, save
from rewriter.plan import Decision, Plan
from rewriter.search.builder import TIME_UP, Builder
from rewriter.search.candidate import Candidate, Group, added
from rewriter.search.clock import Clock
from rewriter.search.effort import FEWER, FEWEST, MOST, RunCost, for_budget, for_tolerance
from rewriter.search.engine_evaluator import EngineEvaluator
from rewriter.search.fp32_groups import ESTIMATE_OFF, groups
from rewriter.search.goal import Budget, ErrorLimit, Fastest, Found, Goal
from rewriter.search.rounds import FIRST, SECOND, THIRD, by_measurement
from rewriter.search.run import SearchInput, SearchRequest, _one_ahead, run
from rewriter.search.trials import Trials
from rewriter.search.tried_plans import Measured


def trials_of(goal: Goal, plan: Plan | None = None) -> Trials:
    return begin(problem_of(graphs.graph(CANCELLING), "fp32"), plan or Plan("fp16"), goal)


def group(*names: str) -> Group:
    return Group(" and ".join(names), added(f"0:{name}" for name in names))


@dataclass
class Table:
    """A judge with a price and a gain for each node, from which the measurements of a plan follow.

    Times add to 100 us, squared errors to 1e-6; `fails` are nodes whose plans fail.
    """

    us: dict[str, float]
    squares: dict[str, float]
    fails: frozenset[str] = frozenset()
    noise: float = 0.0
    affordable: int = 1000
    batches: list[int] = field(default_factory=list)
    origin: str = "measured here"

    def measured(self, plans: Sequence[Plan]) -> Iterator[tuple[int, Measured]]:
        """Plans in the order of their times, as an engine returns them."""
        self.batches.append(len(plans))
        found = [(place, self._one(plan)) for place, plan in enumerate(plans)]
        return iter(sorted(found, key=lambda pair: pair[1].latency_us or 0.0))

    def affords(self) -> int:
        return self.affordable - sum(self.batches)

    def _one(self, plan: Plan) -> Measured:
        names = {key.removeprefix("0:") for key in plan.fp32}
        if names & self.fails:
            return Measured.failed(named("relative-l2"), "it does not build")
        square = 1e-6 * (1.0 + sum(self.squares.get(name, 0.0) for name in names))
        us = 100.0 + sum(self.us.get(name, 0.0) for name in names)
        return Measured(math.sqrt(square), us, self.noise)


@dataclass
class Emulated:
    """A judge that emulates plans."""

    trials: Trials
    origin: str = "emulated"

    def measured(self, plans: Sequence[Plan]) -> Iterator[tuple[int, Measured]]:
        problem, metric = self.trials.problem, self.trials.metric
        for place, plan in enumerate(plans):
            yield place, Measured(problem.emulated(plan, metric), problem.prices.total_us(plan))

    def affords(self) -> int:
        return 1000


def found_of(goal: Goal, judge: Table, candidates: Sequence[Group] | None = None) -> Found:
    singles = [group(name) for name in "ceyp"]
    return by_measurement(trials_of(goal), [singles if candidates is None else candidates], goal, judge)


def kept(found: Found) -> set[str]:
    """Without the nodes absorbed between two islands."""
    return {d.key.removeprefix("0:") for d in found.plan.decisions if d.rule != "between-islands"}


FAST = Table({"c": -10.0, "e": -5.0, "y": 4.0, "p": 8.0}, {"c": 0.5, "e": 0.0, "y": -0.6, "p": -0.3})
"""`c` is faster and worse, `e` is faster, `y` and `p` are slower and better."""


@pytest.mark.parametrize(
    ("goal", "names"),
    [
        pytest.param(ErrorLimit(1.3e-3), {"c", "e"}, id="the fastest that meets a loose tolerance"),
        pytest.param(ErrorLimit(1e-3), {"c", "e", "y"}, id="another node compensates a worse one"),
        pytest.param(ErrorLimit(7e-4), {"e", "y"}, id="a tight tolerance"),
        pytest.param(ErrorLimit(1e-5), {"e", "y", "p"}, id="out of reach: the most accurate"),
        pytest.param(Fastest(), {"c", "e", "y"}, id="no slower and no worse"),
        pytest.param(Budget(0.0), {"e", "y"}, id="no budget buys what another group pays for"),
        pytest.param(Budget(0.1), {"e", "y", "p"}, id="a budget"),
    ],
)
def test_the_best_plan_for_a_goal_is_found(goal: Goal, names: set[str]) -> None:
    judge = Table(FAST.us, FAST.squares)
    found = found_of(goal, judge)
    assert kept(found) == names
    assert found.met == (not isinstance(goal, ErrorLimit) or goal.tolerance > 1e-4)
    assert sum(one.applied for one in found.tried) == 1
    assert len(judge.batches) <= 4 and sum(judge.batches) <= 1 + FIRST + SECOND + THIRD


def test_the_same_measurements_give_the_same_plan() -> None:
    first, again = (found_of(Fastest(), Table(FAST.us, FAST.squares)) for _ in range(2))
    assert first == again


def test_differences_below_the_noise_change_nothing() -> None:
    judge = Table({"c": -0.4, "e": -0.5}, {})
    assert found_of(Fastest(), judge).plan == Plan("fp16")
    spread = Table({"c": -3.0, "e": -3.0}, {}, noise=8.0)
    assert found_of(Fastest(), spread).plan == Plan("fp16")


def test_plans_that_fail_count_as_worst_and_are_reported() -> None:
    judge = Table(FAST.us, FAST.squares, frozenset("c"))
    found = found_of(ErrorLimit(1.3e-3), judge)
    assert kept(found) == {"e", "y"} or kept(found) == {"e"}
    failed = [one for one in found.tried if one.problem]
    assert failed and all(one.value == math.inf and one.latency_us is None for one in failed)
    assert "failed" in found.summary


def test_another_plan_is_chosen_if_the_rules_plan_fails() -> None:
    class Odd(Table):
        def _one(self, plan: Plan) -> Measured:
            return super()._one(plan) if plan.fp32 else Measured.failed(named("relative-l2"), "it crashes")

    assert kept(found_of(Fastest(), Odd(FAST.us, FAST.squares))) == {"c"}


def test_the_rules_plan_is_kept_if_every_plan_fails() -> None:
    judge = Table({}, {}, frozenset("pasbcdefy"))
    trials = trials_of(
        ErrorLimit(1.0), Plan("fp16", decisions=(Decision("", "Exp", "0:y", "overflow", "r"),))
    )
    found = by_measurement(trials, [[group("c")]], ErrorLimit(1.0), judge)
    assert (found.plan, found.met, found.cost_us) == (trials.plan, False, 0.0)


def test_the_best_plan_so_far_is_chosen_at_the_deadline() -> None:
    judge = Table(FAST.us, FAST.squares, affordable=5)
    found = found_of(Fastest(), judge)
    assert judge.batches == [1, 3, 1, 0], "of four plans two thirds are groups by themselves"
    assert kept(found) == {"c", "e", "y"}
    alone = found_of(Fastest(), Table(FAST.us, FAST.squares, affordable=1))
    assert alone.plan == Plan("fp16") and "kept, there was no time for another" in alone.summary
    poor = Table(FAST.us, FAST.squares, affordable=2)
    assert kept(found_of(Fastest(), poor)) == set() and poor.batches == [1, 1, 0, 0]


def test_each_plan_is_reported_with_the_best_so_far() -> None:
    lines: list[str] = []
    goal, singles = Fastest(), [group(name) for name in "ce"]
    by_measurement(trials_of(goal), [singles], goal, Table(FAST.us, FAST.squares), lines.append)
    assert lines[0] == "1 plan tried; best so far: the rules' plan, relative-l2 0.001, 100.0 us"
    assert lines[2] == "3 plans tried; best so far: e, relative-l2 0.001, 95.0 us (-5.0%)"


def test_accurate_plans_are_tried_first_if_the_rules_plan_misses_the_tolerance() -> None:
    first, second = [group("c")], [group("y")]
    for tolerance, words in ((1.0, ["c", "y"]), (9e-4, ["y", "c"])):
        goal = ErrorLimit(tolerance)
        found = by_measurement(trials_of(goal), [first, second], goal, Table(FAST.us, FAST.squares))
        assert [one.words for one in found.tried[1:3]] == words


def test_the_rules_plan_is_kept_if_none_is_better_and_that_is_reported() -> None:
    slower = Table({"c": 9.0, "e": 0.5}, {"c": -0.5, "e": -0.01})
    found = found_of(Fastest(), slower, [group(name) for name in "ce"])
    assert found.plan == Plan("fp16"), "a tie in latency and error is the rules'"
    assert "the rules' plan is kept, no other was better: relative-l2 0.001, 100.0 us" in found.summary
    assert "plans tried" in found.summary


def test_the_emulation_can_measure_plans_too() -> None:
    goal = ErrorLimit(2e-3)
    trials = trials_of(goal)
    found = by_measurement(trials, groups(trials, goal), goal, Emulated(trials))
    assert found.met and {"0:a", "0:s"} <= found.plan.fp32


# -- groups ------------------------------------------------------------------------------------------

RESIZED = """
    g (float[1,16,4] x) => (float[1,4,16,16] y, float[1,16,4] z)
    <float[4,4] w = {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.1,1.2,1.3,1.4,1.5,1.6,1.7}, float[4,4,1,1] v =
    {0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,1.1,1.2,1.3,1.4,1.5,1.6,1.7}, int64[4] to = {1,4,4,4},
    float[4] by = {1.0,1.0,4.0,4.0}> {
        m = MatMul(x, w)
        t = Transpose<perm = [0,2,1]>(m)
        r = Reshape(t, to)
        u = Resize(r, , by)
        y = Conv(u, v)
        h = Softmax(x)
        z = Exp(h)
    }"""


def test_groups_are_nodes_of_one_kind_rule_or_place() -> None:
    source = graphs.graph(RESIZED)
    rules = Plan("fp16", decisions=(Decision("", "Exp", "0:z", "order", "r"),))
    trials = begin(problem_of(source, "fp32"), rules, Fastest())
    lowered, raised = groups(trials, ErrorLimit(1e-3))
    assert not lowered, "no FP32 product could be BF16"
    found = {one.words: one.candidate for one in raised}
    assert found["Resize and the view before it in FP32 (2)"].added == {"0:u", "0:r"}
    assert found["Resize and all views before it in FP32 (3)"].added == {"0:u", "0:r", "0:t"}
    assert found["Resize in FP32 (1)"].added == {"0:u"}
    assert found["Softmax in FP32 (1)"].added == {"0:h"}
    assert found["best 1 Conv in FP32"].added == {"0:y"}
    assert found["best 1 MatMul in FP32"].added == {"0:m"}
    plans = [trials.plan_of(candidate) for candidate in found.values()]
    assert len({(plan.fp32, plan.bf16) for plan in plans}) == len(plans), "no plan twice"
    assert all((plan.fp32, plan.bf16) != (rules.fp32, rules.bf16) for plan in plans)


def test_for_a_tolerance_products_in_bf16_come_first_and_no_group_releases_nodes() -> None:
    kept = (Decision("", "MatMul", "0:m", "overflow", "r"), Decision("", "Softmax", "0:h", "softmax", "r"))
    trials = begin(problem_of(graphs.graph(RESIZED), "fp32"), Plan("fp16", decisions=kept), Fastest())
    batches = groups(trials, ErrorLimit(1e-3))
    (first,) = next(batches)
    assert (first.words, [*first.candidate.bf16]) == ("FP32 products in BF16 (1)", ["0:m"])
    assert trials.count == 0, "no emulation is needed for it"
    every = [first, *(one for batch in batches for one in batch)]
    assert not any(one.candidate.released for one in every)
    assert not any(one.candidate.bf16 for batch in groups(trials, Fastest()) for one in batch)


def test_the_other_groups_remain_if_ranking_runs_out_of_time() -> None:
    trials = begin(problem_of(graphs.graph(RESIZED), "fp32"), Plan("fp16"), Fastest())
    trials.ranked_by = time.monotonic()
    (raised,) = groups(trials, Fastest())
    words = [one.words for one in raised]
    assert "Softmax in FP32 (1)" in words and not any(one.startswith("best") for one in words)


def test_groups_estimated_as_too_expensive_come_last() -> None:
    trials = begin(problem_of(graphs.graph(RESIZED), "fp32"), Plan("fp16"), Fastest())
    (raised,) = groups(trials, Fastest())
    costs = [trials.latency_us(one.candidate) / trials.latency_us(Candidate()) for one in raised]
    dear = [cost > 1.0 + ESTIMATE_OFF for cost in costs]
    assert any(dear) and not all(dear) and dear == sorted(dear)


def test_with_a_budget_groups_that_fill_it_come_first() -> None:
    trials = begin(problem_of(graphs.graph(RESIZED), "fp32"), Plan("fp16"), Fastest())
    goal = Budget(0.5)
    filling = next(groups(trials, goal))
    assert filling[0].words == "0.5 more latency by the estimate"
    base = trials.latency_us(Candidate())
    for one in filling:
        share = float(one.words.split()[0])
        assert one.candidate.added and trials.latency_us(one.candidate) <= base * (1.0 + share)


def test_with_a_budget_residual_sums_with_their_activations_come_before_those() -> None:
    text = """
        g (float[64] x, float[64] r) => (float[64] y) {
            a = Sin(x)
            s = Add(a, r)
            t = Relu(s)
            y = Tanh(t)
        }"""
    trials = begin(problem_of(graphs.graph(text), "fp32"), Plan("fp16"), Fastest())
    first = next(groups(trials, Budget(0.5)))[0]
    assert first.words == "residual sums and activations in FP32 (3)"
    assert first.candidate.added == {"0:s", "0:t", "0:y"}


# -- on real engines ---------------------------------------------------------------------------------


WEIGHTED = """
    g (float[4,2] x) => (float[4,2] y) <float[2,2] w = {1.0004, -1.0001, 0.3333, 0.7777}> {
        m = MatMul(x, w)
        y = Relu(m)
    }"""
"""ONNX Runtime computes FP16 in FP32 on a CPU, so only the weights are rounded to FP16."""


def evaluator(folder: Path, **options: object) -> EngineEvaluator:
    problem = problem_of(graphs.graph(WEIGHTED), "fp32")
    chosen = {"engine": "onnxruntime", "deployment": Deployment()} | options
    builder = Builder(problem, folder=folder, **chosen)  # type: ignore[arg-type]
    return EngineEvaluator(builder, named("relative-l2"), Timing(1, 5))


def worths(judge: EngineEvaluator, plans: Sequence[Plan]) -> list[Measured]:
    """Measurements in the order of the plans."""
    return [one for _, one in sorted(judge.measured(plans), key=lambda pair: pair[0])]


KEPT = Plan("fp16", decisions=tuple(Decision("", "MatMul", f"0:{k}", "user", "r") for k in "my"))


def test_an_engine_measures_plans_and_leaves_only_the_reference_s_files(tmp_path: Path) -> None:
    judge = evaluator(tmp_path)
    low, high = worths(judge, [Plan("fp16"), KEPT])
    assert low.value > 10 * high.value
    assert low.latency_us and high.latency_us and low.spread_us >= 0.0
    (again,) = worths(judge, [Plan("fp16", decisions=KEPT.decisions[:1])])
    assert again.latency_us and not judge.failures
    assert {file.name for file in tmp_path.iterdir()} == {"samples", "plan-0"}, "the reference's"
    assert judge.origin.startswith("measured with onnxruntime on ")


def test_a_build_that_was_begun_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builder, "workers", lambda _: 3)
    plans = [Plan("fp16", decisions=KEPT.decisions[:count]) for count in range(3)]
    judge = evaluator(tmp_path)
    with judge.builder as builder:
        builder.begin(plans)
        builder.begin(plans)
        assert len(worths(judge, [KEPT, *plans[:2]])) == 3
    assert builder._count == 3


@pytest.mark.parametrize(("engine", "workers"), [("onnxruntime", 1), ("tensorrt", 8)])
def test_no_build_is_begun_where_it_would_hold_up_others_or_disturb_timings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: EngineName, workers: int
) -> None:
    monkeypatch.setattr(Builder, "workers", lambda _: workers)
    with evaluator(tmp_path, engine=engine).builder as builder:
        builder.begin([KEPT])
    assert not list(tmp_path.iterdir())


def test_no_plan_is_built_after_the_deadline(tmp_path: Path) -> None:
    judge = evaluator(tmp_path, clock=Clock(0.0))
    (one,) = worths(judge, [KEPT])
    assert one.untried and one.value == math.inf and not judge.failures
    assert not list(tmp_path.iterdir())


def test_an_engine_that_does_not_run_fails_each_plan_without_an_error(tmp_path: Path) -> None:
    """TensorRT-RTX builds without a GPU but cannot run."""
    pytest.importorskip("tensorrt_rtx")
    if this_machine.gpu() is not None:
        pytest.skip("there is a GPU")
    judge = evaluator(tmp_path, engine="tensorrt-rtx")
    found = worths(judge, [Plan("fp16"), KEPT])
    assert [(one.value, one.latency_us) for one in found] == [(math.inf, None)] * 2
    assert len(judge.failures) == 2 and "0 nodes in FP32" in judge.failures[0]


def test_the_stage_searches_on_an_engine_and_reports_the_tried_plans() -> None:
    source, lines = graphs.graph(WEIGHTED), list[str]()
    samples = load_samples(graphs.random_feeds(source), source)
    order = SearchRequest(ErrorLimit(1e-5), "relative-l2", True, "onnxruntime", 60.0, 60.0, "fp32", Target())
    progress = lambda line, *_: lines.append(line)  # noqa: E731
    done = run(SearchInput(source, source, facts.infer(source), samples, Plan("fp16")), order, progress)
    assert lines[0] == "search: 0 s of 60: running the original"
    assert any("1 plan tried; best so far: the rules' plan" in line for line in lines)
    assert done.check is not None and done.check.passed and done.check.name == "tolerance"
    assert "0:m" in done.plan.fp32
    assert done.searched is not None and done.searched.tried[0].words == "the rules' plan"
    assert [one.plan for one in done.searched.tried if one.applied] == [done.plan]
    assert done.frontier is not None and done.frontier.chosen == done.plan


SLOW = """
    g (float[448,448] x) => (float[448,448] y) {
        a = MatMul(x, x)
        b = Tanh(a)
        c = MatMul(b, x)
        d = Softmax(c)
        e = MatMul(d, x)
        y = Relu(e)
    }"""
"""A plan needs more than a second: it starts a process and times at least 11 runs."""

MARGIN_S = 3.0
"""Allowance beyond the deadline: for the end of a child, the deletion of a folder, and a busy machine."""


@pytest.mark.parametrize("seconds", [pytest.param(0.02, id="no time"), 1.0, 8.0])
def test_the_search_ends_at_its_deadline(seconds: float) -> None:
    source, lines = graphs.graph(SLOW), list[str]()
    samples = load_samples(graphs.random_feeds(source), source)
    order = SearchRequest(Fastest(), "relative-l2", False, "onnxruntime", seconds, 60.0, "fp32", Target())
    start = time.monotonic()
    progress = lambda line, *_: lines.append(line)  # noqa: E731
    done = run(SearchInput(source, source, facts.infer(source), samples, Plan("fp16")), order, progress)
    assert time.monotonic() - start < seconds + MARGIN_S
    assert done.check is not None and done.check.passed and not done.warnings
    tried = list(done.searched.tried) if done.searched else []
    if seconds < 1.0:
        assert done.plan == Plan("fp16") and "--search-seconds" in done.check.summary
    if seconds > 1.0:
        assert tried[0].latency_us and not tried[0].untried
        assert any("1 plan tried; best so far: the rules' plan" in line for line in lines)
    assert all(one.problem == TIME_UP for one in tried if one.untried)


def test_plugins_and_the_profile_are_those_of_the_deployment(tmp_path: Path) -> None:
    profile = {"x": ((1, 2), (4, 2), (8, 2))}
    problem = problem_of(graphs.graph(WEIGHTED), "fp32")
    builder = Builder(problem, "onnxruntime", Deployment(profile=profile), tmp_path, Clock(60.0), 60.0)
    ((_, made),) = next(builder.built([KEPT]))
    assert isinstance(made, Variant) and made.shapes == profile


def test_a_plugin_that_is_no_library_fails_every_build(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    (library := tmp_path / "plugin.so").write_text("no library")
    judge = evaluator(tmp_path, engine="tensorrt-rtx", deployment=Deployment(plugins=(library,)))
    (one,) = worths(judge, [KEPT])
    assert one.latency_us is None and "plugin.so" in one.problem


# -- through fix -------------------------------------------------------------------------------------


def test_without_a_gpu_the_search_is_refused_before_it_starts() -> None:
    if this_machine.gpu() is not None:
        pytest.skip("there is a GPU")
    source = graphs.graph(CANCELLING).whole()
    with pytest.raises(EngineError, match="search='gpu': no engine runs here"):
        rewriter.fix(source, search="gpu")
    with pytest.raises(UsageError, match="search_seconds="):
        rewriter.fix(source, search="gpu", search_seconds=0.0)
    with pytest.raises(UsageError, match="search='gpu': the plan is given"):
        rewriter.fix(source, search="gpu", plan=Plan("fp16"))
    with pytest.raises(UsageError, match="search='gpu': no plan is needed"):
        rewriter.fix(source, search="gpu", precision="fp32")


def test_the_command_prints_and_reports_the_tried_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime's CPU replaces the GPU: it is an engine like the others, only slow."""
    monkeypatch.setattr(this_machine, "choose", lambda *_: this_machine.Choice("onnxruntime"))
    path, report = save(graphs.graph(WEIGHTED), tmp_path / "m.onnx"), tmp_path / "report.json"
    arguments = ["fix", path, "--dry-run", "--no-build", "--search", "gpu", "--report", report]
    done = CliRunner().invoke(
        cli.app, [*map(str, arguments), "--skip", "simplify", "--tolerance", "1e-5", "-v"]
    )
    assert done.exit_code == 0, done.output
    printed = " ".join(done.output.split())
    assert "Plans tried (measured with onnxruntime on CPU)" in printed
    assert "the rules' plan" in printed and "applied" in printed and "plans tried" in printed
    found = json.loads(report.read_text())["searched"]
    assert (found["metric"], found["tried"][0]["plan"]) == ("relative-l2", "the rules' plan")
    assert sum(one["applied"] for one in found["tried"]) == 1
    assert all(one["latency_us"] > 0 and not one["problem"] for one in found["tried"])


# -- how much emulation a model gets -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "accumulation", "left"),
    [
        pytest.param(0.01, "fp16", (4, "fp16"), id="a quick model"),
        pytest.param(1.0, "fp16", (1, "fp16"), id="fewer samples first"),
        pytest.param(2.0, "fp16", (4, "fp32"), id="then FP32 sums"),
        pytest.param(11.0, "fp16", (1, "fp32"), id="both"),
        pytest.param(11.0, "fp32", (1, "fp32"), id="FP32 sums on request"),
    ],
)
def test_slow_models_get_less_emulation_and_that_is_reported(
    seconds: float, accumulation: Accumulation, left: tuple[int, Accumulation]
) -> None:
    """A product of this size is emulated eight times as slowly with FP16 sums."""
    effort = for_tolerance(cost(seconds), 4, accumulation)
    assert (effort.samples, effort.accumulation) == left
    assert bool(effort.reduced) == (left != (4, accumulation))
    assert not effort.reduced or "s of a core" in effort.reduced


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        pytest.param(0.01, (4, "fp16", MOST), id="a quick model"),
        pytest.param(1.0, (1, "fp16", MOST), id="fewer samples first"),
        pytest.param(2.0, (1, "fp32", FEWER), id="then FP32 sums in the ranking and fewer plans"),
        pytest.param(11.0, (1, "fp32", FEWEST), id="then the fewest"),
    ],
)
def test_a_budget_reduces_plans_but_judges_with_fp16_sums(
    seconds: float, left: tuple[int, Accumulation, int]
) -> None:
    effort = for_budget(cost(seconds), 4)
    assert (effort.samples, effort.accumulation, effort.most) == left
    assert bool(effort.reduced) == (left != (4, "fp16", MOST))


def cost(seconds: float) -> RunCost:
    source = graphs.graph("g (float[8,8] x) => (float[8,8] y) { y = MatMul(x, x) }")
    return RunCost.of(source, facts.infer(source), seconds)


def test_the_first_batch_is_made_before_it_is_asked_for_and_all_come_in_order() -> None:
    begun = threading.Event()

    def batches() -> Iterator[list[Group]]:
        for count in (1, 2):
            begun.set()
            yield [Group(str(place), Candidate()) for place in range(count)]

    announced: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        ahead = _one_ahead(batches(), pool, lambda batch: announced.append(len(batch)))
        assert begun.wait(5.0)
        assert [len(batch) for batch in ahead] == [1, 2] == announced
