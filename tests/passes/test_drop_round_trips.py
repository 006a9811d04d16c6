"""drop-round-trips: pairs of Casts that are removed, pairs that end no kernel, and the targets concerned."""

from __future__ import annotations

import pytest
from graphs import apply, graph

from rewriter.ir.base import Context, Target
from rewriter.passes.drop_round_trips import PROBE, DropRoundTrips


@pytest.mark.parametrize(
    ("when", "target", "answer", "applies"),
    [
        pytest.param("auto", "tensorrt-rtx", "", True, id="TensorRT-RTX without probe results"),
        pytest.param("auto", "tensorrt-rtx", "wrong", True, id="seen to be wrong"),
        pytest.param("auto", "tensorrt-rtx", "right", False, id="seen to be right"),
        pytest.param("auto", "tensorrt", "", True, id="an unknown release"),
        pytest.param("auto", "10.13", "", False, id="a release of which nothing is known"),
        pytest.param("auto", "10.13", "wrong", True, id="a release seen to be wrong"),
        pytest.param("never", "tensorrt-rtx", "wrong", False, id="never"),
        pytest.param("always", "10.13", "right", True, id="always"),
    ],
)
def test_when(when: str, target: str, answer: str, applies: bool) -> None:
    parsed = Target.parse(target)
    known = Target(parsed.library, parsed.version, {PROBE: answer} if answer else {})
    step = DropRoundTrips(when=when)  # type: ignore[arg-type]
    _, report = apply(step, graph(DropRoundTrips.before), Context(target=known))
    assert bool(report.changes) is applies
