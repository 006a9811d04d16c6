"""The phases of a run: passes by their stage, in an order that is checked before the model is loaded."""

import pytest

import rewriter
from rewriter.base.errors import UsageError
from rewriter.jobs.fix.job import Phases
from rewriter.pipeline.text import parse


def names(pipeline: str) -> list[list[str]]:
    phases = Phases.of(parse(pipeline))
    parts = (phases.structural, phases.measuring, phases.lowering)
    return [[step.name for step in part] for part in parts]


@pytest.mark.parametrize(
    ("pipeline", "parts"),
    [
        ("clean-casts,simplify", [["clean-casts", "simplify"], [], []]),
        (
            "simplify,rescale,clean-casts,mixed-precision,clean-casts",
            [["simplify"], ["rescale", "clean-casts"], ["mixed-precision", "clean-casts"]],
        ),
    ],
)
def test_a_pipeline_is_split_by_stages(pipeline: str, parts: list[list[str]]) -> None:
    assert names(pipeline) == parts


def test_a_pass_before_one_that_it_follows_is_refused() -> None:
    with pytest.raises(UsageError, match="mixed-precision has to follow rescale"):
        rewriter.fix("no such file.onnx", passes="mixed-precision,rescale")
