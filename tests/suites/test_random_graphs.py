"""Random models through all passes and `fix`: no crash, the same results, nothing left for a second run."""

from collections import Counter
from collections.abc import Callable
from datetime import date

from nightly import NIGHTLY, sized
from random_graphs import findings

SEED = int(f"{date.today():%Y%m%d}") if NIGHTLY else 46
COUNT = sized(40, 4000)


def test_random_models_keep_their_results(record_property: Callable[[str, object], None]) -> None:
    counts: Counter[str] = Counter()
    defects = list(findings(COUNT, SEED, 0, counts))
    record_property("counts", f"random models of seed {SEED}: {dict(counts)}")
    assert not defects, "\n".join(defects)
    assert counts["ok"] > 0.7 * COUNT, "most are run and compared"
    assert not counts["slow"]
