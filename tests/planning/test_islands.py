"""FP32 islands grow together, and residual sums between them join where that needs no more Casts."""

import graphs
import pytest
from plans import kept, planned

from rewriter.hazards.analysis import PrecisionRequest
from rewriter.ir.plan.node_patterns import NodePatterns


@pytest.mark.parametrize(("text", "words", "expected"), graphs.cases("planning/islands.txt"))
def test_islands_grow_together(text: str, words: str, expected: str) -> None:
    options = dict(word.split("=") for word in words.split())
    nodes, ops, lower = (
        tuple(filter(None, options.pop(key, "").split(","))) for key in ("nodes", "ops", "lower")
    )
    wanted = PrecisionRequest(keep_nodes=nodes, keep_ops=ops, lower=NodePatterns(nodes=lower), **options)  # type: ignore[arg-type]
    plan = kept(planned(graphs.graph(text), wanted))
    assert ", ".join(f"{rule} {name}" for name, rule in plan.items()) == expected
