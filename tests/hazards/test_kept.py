"""Hazards that a mixed model has settled already, and those that its FP32 does not help."""

from dataclasses import replace

import pytest
from hazard_rules import analyzed

from rewriter.hazards import Hazard
from rewriter.hazards.analysis import is_already_avoided

MIXED = """
    g (float16[2] x, float[2] w) => (float16[2] y, float[2] z) {
        f = Cast<to = 1>(x)
        a = Exp(f)
        h = Cast<to = 10>(a)
        y = Neg(h)
        z = Exp(w)
    }"""


@pytest.mark.parametrize(
    ("node", "rule", "largest", "kept"),
    [
        pytest.param("z", "overflow", 1e6, True, id="a result that stays FP32"),
        pytest.param("a", "overflow", 1.0, False, id="a result that a Cast rounds"),
        pytest.param("a", "underflow", 1.0, False, id="a result that a Cast loses"),
        pytest.param("a", "internal-overflow", 1.0, True, id="what overflows inside alone"),
        pytest.param("a", "internal-overflow", 1e6, False, id="the Cast after it overflows, too"),
        pytest.param("a", "internal-overflow", 65504.0, True, id="the Cast after it is just in range"),
        pytest.param("y", "internal-overflow", 1.0, False, id="floats in FP16 that are no Cast"),
        pytest.param("z", "order", 1.0, True, id="operands in FP32"),
        pytest.param("a", "order", 1.0, False, id="operands that were rounded before"),
        pytest.param("y", "overflow", 1.0, False, id="a node in FP16"),
        pytest.param("f", "internal-overflow", 1.0, True, id="a Cast between floats"),
        pytest.param("z", "tf32", 1.0, False, id="what happens to FP32 as well"),
    ],
)
def test_what_fp32_settles(node: str, rule: str, largest: float, kept: bool) -> None:
    analysis = analyzed(MIXED, {"a": (0, largest), "z": (0, largest)}, mixed=True)
    (found,) = (one for one in analysis.graph.nodes if one.output[0] == node)
    assert is_already_avoided(analysis, Hazard(found, rule, "a reason")) is kept
    assert not is_already_avoided(
        replace(analysis, mixed=False), Hazard(found, rule, "all in FP32: nothing is settled")
    )
