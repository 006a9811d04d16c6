"""drop-round-trips: pairs of Casts that are removed, pairs that end no kernel, and the targets concerned."""

import pytest
from graphs import apply, graph
from onnx_text import sides

from rewriter.passes.base import Context
from rewriter.passes.drop_round_trips import PROBE, DropRoundTrips
from rewriter.target import Target


@pytest.mark.parametrize(
    ("target", "answer", "applies"),
    [
        pytest.param("tensorrt-rtx", "", True, id="TensorRT-RTX without probe results"),
        pytest.param("tensorrt-rtx", "wrong", True, id="seen to be wrong"),
        pytest.param("tensorrt-rtx", "right", False, id="seen to be right"),
        pytest.param("tensorrt", "", True, id="an unknown release"),
        pytest.param("10.13", "", False, id="a release of which nothing is known"),
        pytest.param("10.13", "wrong", True, id="a release seen to be wrong"),
    ],
)
def test_the_target_decides(target: str, answer: str, applies: bool) -> None:
    parsed = Target.parse(target)
    known = Target(parsed.library, parsed.version, {PROBE: answer} if answer else {})
    _, report = apply(DropRoundTrips(), graph(sides(DropRoundTrips.example)[0]), Context(target=known))
    assert bool(report.changes) is applies
