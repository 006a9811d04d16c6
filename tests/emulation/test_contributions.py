"""The share of each node in the error of the outputs, checked against whole emulations."""

import math
from dataclasses import replace

import graphs
import numpy as np
import pytest

from rewriter.ir.model import Array, Model
from rewriter.ir.plan import Decision, Plan
from rewriter.passes.mixed_precision import lowered
from rewriter.runtime.emulation import emulation
from rewriter.runtime.emulation.divergence import NodeError, contributions, diverge
from rewriter.runtime.metrics.pairwise_error import relative_l2
from rewriter.verification.expected import run_all


def measured(source: Model, feeds: dict[str, Array]) -> tuple[dict[str, float], dict[str, float]]:
    """The error that each node adds by itself in FP16, and the shares of all nodes."""
    rows = diverge(source, lowered(source, Plan("fp16")), [feeds])
    errors = {row.key: row.added for row in rows if row.added}
    return errors, contributions(source, rows, errors)


def whole_error(source: Model, feeds: dict[str, Array], *exact_nodes: str) -> float:
    """The error of the first output in FP16 where some nodes are not rounded."""
    decisions = tuple(Decision(name, "", f"0:{name}", "user", "") for name in exact_nodes)
    low = emulation(lowered(source, Plan("fp16", "keep", decisions)))
    ((name, exact),) = run_all(source, [feeds])[0].items()
    return relative_l2(exact, run_all(low, [feeds])[0][name])


def test_what_is_amplified_has_the_share_that_a_whole_emulation_shows() -> None:
    """Every node adds as much error; that of the first is 100 times larger after a difference."""
    rest = " ".join(f"t{n} = Mul(t{n - 1}, k)" for n in range(1, 22))
    source = graphs.graph(f"""
        g (float[256] x) => (float[256] t21) <float k = {{1.01}}> {{a = Mul(x, k) t0 = Sub(a, x) {rest}}}""")
    feeds = graphs.random_feeds(source)
    feeds["x"] = feeds["x"].astype(np.float16).astype(np.float32)  # its own rounding is no node's
    errors, shares = measured(source, feeds)
    assert max(errors.values()) < 2.0 * min(errors.values())
    assert shares["0:a"] > 50.0 * max(share for key, share in shares.items() if key != "0:a")
    assert math.sqrt(sum(shares.values())) == pytest.approx(whole_error(source, feeds), rel=0.1)


BRANCHES = """
    g (float[64,64] x) => (float[64,64] y) <float small = {{0.0625}}> {{
        a = Sin(x) b = Cos(x) c = Mul(b, small)
        y = {op}(a, c) }}"""


@pytest.mark.parametrize(
    ("op", "least", "most"),
    [("Add", 0.0, 0.02), ("Mul", 0.5, 3.0)],
    ids=["a sum weighs by size", "a product does not"],
)
def test_a_small_branch_counts_by_what_it_adds(op: str, least: float, most: float) -> None:
    source = graphs.graph(BRANCHES.format(op=op))
    feeds = graphs.random_feeds(source)
    feeds["x"] = feeds["x"].astype(np.float16).astype(np.float32)
    _, shares = measured(source, feeds)
    ratio = (shares["0:b"] + shares["0:c"]) / shares["0:a"]
    assert least <= ratio <= most


def test_a_share_is_what_the_node_in_fp32_takes_from_the_squared_error() -> None:
    """Two blocks with a residual connection, of which the second amplifies by 3."""
    source = graphs.graph("""
        g (float[64,64] x) => (float[64,64] y) <float three = {3.0}, float half = {0.5}> {
            a = Sin(x) b = Mul(a, half) c = Add(x, b) d = Sin(c) e = Mul(d, three) y = Add(c, e)
        }""")
    feeds = graphs.random_feeds(source)
    feeds["x"] = feeds["x"].astype(np.float16).astype(np.float32)
    _, shares = measured(source, feeds)
    assert math.sqrt(sum(shares.values())) == pytest.approx(whole_error(source, feeds), rel=0.1)
    without = whole_error(source, feeds) ** 2 - whole_error(source, feeds, "d", "e", "y") ** 2
    assert shares["0:d"] + shares["0:e"] + shares["0:y"] == pytest.approx(without, rel=0.3)


def test_without_finite_outputs_the_nodes_own_errors_decide() -> None:
    source = graphs.graph("g (float[8] x) => (float[8] y) { a = Sin(x) b = Exp(a) y = Add(b, a) }")
    errors = {"0:a": 3e-4, "0:b": math.inf, "0:y": 2e-4}

    def rows(total: float) -> list[NodeError]:
        keys = {"a": "0:a", "b": "0:b", "y": "0:y"}
        return [NodeError(n, "", key, n, errors[key], total, 1.0) for n, key in keys.items()]

    own = {"0:a": pytest.approx(9e-8), "0:b": math.inf, "0:y": pytest.approx(4e-8)}
    assert contributions(source, rows(math.inf), errors) == own
    assert contributions(source, rows(0.0), errors) == own
    assert contributions(source, rows(1e-3), errors)["0:b"] == math.inf


def test_an_error_that_is_infinite_on_the_way_is_followed_to_where_it_began() -> None:
    """Exp overflows, and the quotient by it is 0 in both."""
    source = graphs.graph("""
        g (float[8] x) => (float[8] y) <float one = {1.0}> {
            a = Sin(x) b = Exp(a) c = Mul(b, b) d = Add(c, a) e = Div(one, d) y = Add(e, a)
        }""")
    totals = {"a": 2e-4, "b": 3e-4, "c": math.inf, "d": math.inf, "e": 1e-3, "y": 5e-4}
    rows = [NodeError(n, "", f"0:{n}", n, 2e-4, total, 0.0) for n, total in totals.items()]
    errors = {row.key: row.added for row in rows}
    shares = contributions(source, [replace(row, norm=1.0) for row in rows], errors)
    assert all(map(math.isfinite, shares.values()))
    assert sum(shares.values()) == pytest.approx(5e-4**2)
    assert shares["0:c"] == shares["0:d"] == 0.0 < min(shares["0:a"], shares["0:b"])
    assert all(map(math.isfinite, contributions(source, rows, errors).values())), "a tensor of zeros"
