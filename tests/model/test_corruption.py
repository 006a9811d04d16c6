"""Corrupted files end in success or in an error that says what to do, never in a crash or a traceback."""

from collections import Counter

import corruption
from nightly import sized

COUNT = sized(100, 5000)
SEED = 17


def test_corrupted_files_are_scanned_or_refused() -> None:
    outcomes = corruption.run(COUNT, SEED)
    counts = Counter(outcome.kind for outcome in outcomes)
    assert sorted(outcome.number for outcome in outcomes) == list(range(COUNT))
    assert not counts["DEFECT"], corruption.report(outcomes, SEED)
    assert counts["ok"] > COUNT / 20, "some corruption is harmless"
    assert counts["ModelError"] > COUNT / 4, "and most is not"
