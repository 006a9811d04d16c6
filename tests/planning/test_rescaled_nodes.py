"""FP32 that is free, but would overflow without `rescale`, gives the overflow as its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rewriter.hazards.planning.rescaled_nodes import hazards_first, unscaled_overflows
from rewriter.ir.plan import Decision, Plan, Range

FREE = Decision("n", "Add", "0:y", "epilogue", "free", "m")
PLAN = Plan("fp16", decisions=(FREE,), exponents=((0, "m", -2),))


def measured(largest: float) -> Range:
    return Range(-largest, largest, largest / 2, True)


@pytest.mark.parametrize(
    ("plan", "after", "before"),
    [
        pytest.param(PLAN, 8189.0, 32756.0, id="four times 8189 is beyond the head-room"),
        pytest.param(PLAN, 8188.0, None, id="four times 8188 is just in range"),
        pytest.param(replace(PLAN, precision="bf16"), 8189.0, None, id="BF16 reaches farther"),
        pytest.param(replace(PLAN, precision="fp32"), 8189.0, None, id="FP32 rescales nothing"),
        pytest.param(replace(PLAN, exponents=((0, "m", 2),)), 32752.0, None, id="it was raised"),
        pytest.param(replace(PLAN, exponents=((1, "m", -2),)), 8189.0, None, id="of another graph"),
    ],
)
def test_the_range_before_rescaling_decides(plan: Plan, after: float, before: float | None) -> None:
    found = unscaled_overflows(plan, {(0, "m"): measured(after)})
    assert {place: one.absmax for place, one in found.items()} == ({(0, "m"): before} if before else {})


UNSCALED = {(0, "m"): measured(1e6)}


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        pytest.param(
            FREE, "m exceeded 32752 before rescale scaled it, and FP32 is free here", id="its evidence"
        ),
        pytest.param(
            replace(FREE, key="0:m", tensor=None),
            "m exceeded 32752 before rescale scaled it, and FP32 is free here",
            id="its own result",
        ),
        pytest.param(replace(FREE, rule="overflow"), "free", id="a hazard has a reason of its own"),
        pytest.param(replace(FREE, key="1:y"), "free", id="a node of another graph"),
        pytest.param(replace(FREE, tensor="k"), "free", id="another tensor"),
    ],
)
def test_a_free_node_is_named_for_its_hazard(decision: Decision, reason: str) -> None:
    (found,) = hazards_first(replace(PLAN, decisions=(decision,)), UNSCALED).decisions
    assert found.reason == reason
    assert found == decision or (found.rule, found.tensor, found.range) == ("overflow", "m", measured(1e6))


def test_without_an_overflow_the_plan_stays() -> None:
    assert hazards_first(PLAN, {}) is PLAN
