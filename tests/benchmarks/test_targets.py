"""The targets of the side by side, judged on rows of the report."""

from __future__ import annotations

import json

import pytest
from paths import ROOT

from benchmarks.headline import Found
from benchmarks.targets import (
    Target,
    emulation_agreement,
    every_model,
    means,
    nafnet,
    naive,
    second_plan,
    targets,
    targets_table,
)

Row = dict[str, object]
Measured = tuple[float | None, float]
"""Error (None if not finite) and latency in us."""


def rows(model: str, emulated: float | None = 1e-3, /, **measured: Measured) -> list[Row]:
    return [
        {
            "model": model,
            "variant": variant.replace("_", "-"),
            "emulated_fp16": {"errors": {"y": emulated}},
            "engine": {"errors": {"y": error}, "latency_us": us},
        }
        for variant, (error, us) in measured.items()
    ]


GOOD = rows(
    "good", autocast=(2e-3, 100.0), fix=(0.8e-3, 86.0), naive=(None, 87.0), fix_accurate=(6e-4, 109.0)
)


def judged(found: Target) -> tuple[bool | None, str, tuple[str, ...]]:
    return found.met, found.reached, found.missed


def test_all_targets_are_met() -> None:
    assert judged(every_model(Found(GOOD))) == (True, "1 of 1 models", ())
    assert judged(means(Found(GOOD), "fix")) == (True, "latency 0.860x, error 0.400x (1 models)", ())
    assert judged(second_plan(Found(GOOD))) == (True, "1 of 1 models", ())
    assert judged(naive(Found(GOOD))) == (True, "at most 0.99x; right on 1 of 1 where it is garbage", ())


@pytest.mark.parametrize(
    ("fix", "autocast", "missed"),
    [
        pytest.param((2.04e-3, 102.0), (2e-3, 100.0), None, id="noise"),
        pytest.param((2.06e-3, 102.1), (2e-3, 100.0), "m error 1.03x, latency 1.02x", id="both missed"),
        pytest.param((1e-3, 120.0), (2e-3, 100.0), "m latency 1.20x", id="slower"),
        pytest.param((None, 90.0), (2e-3, 100.0), "m error inf", id="not finite"),
        pytest.param((None, 90.0), (None, 100.0), "m error inf", id="neither is finite"),
        pytest.param((1e-2, 90.0), (None, 100.0), None, id="only AutoCast is not finite"),
    ],
)
def test_fix_must_be_no_worse_than_autocast(fix: Measured, autocast: Measured, missed: str | None) -> None:
    found = every_model(Found(GOOD + rows("m", fix=fix, autocast=autocast)))
    expected = (True, "2 of 2 models", ()) if missed is None else (False, "1 of 2 models", (missed,))
    assert judged(found) == expected


def test_models_that_did_not_run_are_named() -> None:
    found = Found(GOOD + rows("alone", fix=(1e-3, 1.0)) + rows("theirs", autocast=(1e-3, 1.0)))
    assert every_model(found).missed == ("alone (no AutoCast)", "theirs (fix did not run)")
    assert second_plan(found).missed == ("alone (no AutoCast)", "theirs (no such plan)")
    assert naive(found).missed == ("alone (not both ran)", "theirs (not both ran)")
    assert means(found, "fix").met


def test_missed_means_name_the_models() -> None:
    slow = rows("slow", autocast=(1e-3, 100.0), fix=(1e-3, 100.0))
    met, reached, missed = judged(means(Found(GOOD + slow), "fix"))
    assert (met, missed) == (False, ("slow 1.00x, 1.00x",))
    assert reached == "latency 0.927x, error 0.632x (2 models)"


@pytest.mark.parametrize(
    ("plans", "missed"),
    [
        pytest.param(
            {"fix_accurate": (9e-4, 100.0), "fix_accurate_50": (6e-4, 110.0)}, None, id="the best one"
        ),
        pytest.param(
            {"fix_accurate": (1e-5, 110.3), "fix_accurate_50": (1e-3, 105.0)},
            "m fix-accurate error 0.005x at 1.103x",
            id="the accurate one is too slow, but by less than the other is inaccurate",
        ),
        pytest.param(
            {"fix_accurate": (1e-5, 120.0), "fix_accurate_50": (1e-6, 130.0)},
            "m fix-accurate error 0.005x at 1.200x",
            id="both are too slow",
        ),
        pytest.param({"fix_accurate": (None, 100.0)}, "m (no such plan)", id="not finite"),
    ],
)
def test_the_best_second_plan_counts(plans: dict[str, Measured], missed: str | None) -> None:
    found = second_plan(Found(rows("m", autocast=(2e-3, 100.0), fix=(2e-3, 90.0), **plans)))
    assert (found.met, found.missed) == ((True, ()) if missed is None else (False, (missed,)))


@pytest.mark.parametrize(
    ("fix", "plain", "missed"),
    [
        pytest.param((1e-3, 104.0), (1e-3, 100.0), ("m latency 1.04x",), id="slower"),
        pytest.param((6e-3, 90.0), (0.3, 100.0), ("m error 6.0e-03",), id="wrong where naive is garbage"),
        pytest.param((6e-3, 90.0), (1.2e-2, 100.0), (), id="inaccurate where naive is, too"),
        pytest.param((None, 110.0), (None, 100.0), ("m latency 1.10x", "m error inf"), id="both"),
    ],
)
def test_fix_is_compared_with_naive_fp16(fix: Measured, plain: Measured, missed: tuple[str, ...]) -> None:
    found = naive(Found(rows("m", fix=fix, naive=plain)))
    assert (found.met, found.missed) == (not missed, missed)


@pytest.mark.parametrize(
    ("fix", "met"),
    [
        pytest.param((8e-4, 102.0), True, id="met"),
        pytest.param((8.1e-4, 90.0), False, id="less accurate"),
        pytest.param((1e-4, 102.1), False, id="slower"),
    ],
)
def test_nafnet_must_be_as_fast_as_naive_and_accurate(fix: Measured, met: bool) -> None:
    found = nafnet(Found(rows("nafnet", fix=fix, naive=(0.3, 100.0))))
    assert found.met is met
    assert "against naive's 100" in found.reached


def test_the_emulation_is_judged_only_on_fp16_sums() -> None:
    good = [row for n in range(9) for row in rows(f"m{n}", fix=(1.9e-3, 1.0))]
    off = rows("off", fix=(2.1e-3, 1.0))
    assert judged(emulation_agreement(good + off)) == (
        True,
        "finite or not on 10 of 10; within the factor 90 % of 10",
        ("off fix 2.1x",),
    )
    surprise = rows("odd", None, fix=(1e-3, 1.0))
    assert emulation_agreement(good + surprise).missed == ("odd fix (finite on one side)",)
    assert emulation_agreement(good + surprise).met is False
    assert emulation_agreement(good + off + off).met is False
    (bare,) = rows("bare", fix=(1e-3, 1.0))
    del bare["emulated_fp16"]
    assert emulation_agreement([*good, bare | {"emulated_fp32": {"errors": {"y": 1e-3}}}]).missed == (
        "1 variants not emulated with FP16 sums",
    )


def test_nothing_measured_is_neither_met_nor_missed() -> None:
    assert {target.met for target in targets([])} == {None}
    assert {target.reached for target in targets([])} == {"not measured"}


def test_the_table_on_recorded_figures() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "side_by_side.json").read_text())["rows"]
    lines = targets_table(recorded).splitlines()
    assert len(lines) == 2 + len(targets(recorded)) == 9
    assert {line.count("|") for line in lines} == {6}
