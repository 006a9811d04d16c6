"""The share of each node in the error of the outputs, checked against whole emulations."""

import math

import graphs
import numpy as np
import pytest

from rewriter.ir.model import Model
from rewriter.ir.plan import Plan
from rewriter.passes.mixed_precision import lowered
from rewriter.runtime.emulation import contributions as module
from rewriter.runtime.emulation import emulation
from rewriter.runtime.emulation.contributions import RUNS, contributions
from rewriter.runtime.emulation.divergence import diverge
from rewriter.runtime.engines.onnxruntime import Session
from rewriter.runtime.metrics.pairwise_error import relative_l2
from rewriter.verification.expected import run_all


def own_errors(source: Model) -> dict[str, float]:
    """The error that each node adds by itself in FP16."""
    rows = diverge(source, lowered(source, Plan("fp16")), [graphs.random_feeds(source)], totals=False)
    assert not any(row.total for row in rows)
    return {row.key: row.added for row in rows if row.key and row.added}


def amplifying(length: int) -> Model:
    """Every node adds as much error; that of the first is 100 times larger after a difference."""
    rest = " ".join(f"t{n} = Mul(t{n - 1}, k)" for n in range(1, length))
    text = f"{{a = Mul(x, k) t0 = Sub(a, x) {rest}}}"
    return graphs.graph(f"g (float[256] x) => (float[256] t{length - 1}) <float k = {{1.01}}> {text}")


def test_what_is_amplified_has_the_share_that_a_whole_emulation_shows() -> None:
    source, feeds = amplifying(22), graphs.random_feeds(amplifying(22))
    errors = own_errors(source)
    assert max(errors.values()) < 2.0 * min(errors.values())
    shares = contributions(source, errors, feeds)
    assert shares["0:a"] > 50.0 * max(share for key, share in shares.items() if key != "0:a")
    (exact,), (low,) = (
        run_all(model, [feeds]) for model in (source, emulation(lowered(source, Plan("fp16"))))
    )
    whole = relative_l2(exact["t21"], low["t21"])
    assert math.sqrt(sum(shares.values())) == pytest.approx(whole, rel=0.5)


def test_the_runs_are_few_however_many_nodes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    source, runs = amplifying(200), list[int]()

    class Counted(Session):
        def run(self, *arguments: object, **keywords: object) -> dict[str, np.ndarray]:
            runs.append(1)
            return super().run(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "Session", Counted)
    shares = contributions(source, own_errors(source), graphs.random_feeds(source))
    assert max(shares, key=lambda key: shares[key]) == "0:a"
    assert len(runs) <= RUNS + 2, "the exact outputs, all nodes together, and their parts"
    runs.clear()
    contributions(source, own_errors(source), graphs.random_feeds(source), until=0.0)
    assert len(runs) == 2, "no part is halved"


@pytest.mark.parametrize(
    ("text", "opset"),
    [
        ("g (float[8] x) => (float[8] y) { a = Sin(x) b = Exp(a) i = Log(z) y = Add(b, i) }", 17),
        ("g (float[8] x) => (float[8] y) { a = Sin(x) y = Exp(a) }", 12),
    ],
    ids=["outputs that are not finite", "an opset without BF16"],
)
def test_without_a_run_the_nodes_own_errors_decide(text: str, opset: int) -> None:
    source = graphs.graph(text.replace("=> (float[8] y)", "=> (float[8] y) <float z = {0.0}>"), opset=opset)
    errors = {"0:a": 3e-4, "0:b": math.inf, "0:y": 2e-4}
    shares = contributions(source, errors, graphs.random_feeds(source))
    assert shares == {"0:a": pytest.approx(9e-8), "0:b": math.inf, "0:y": pytest.approx(4e-8)}
