"""merge-branches as a part of `fix`: RT-DETR's blocks, what an option names, presets."""

from __future__ import annotations

from paths import MODELS

from pathlib import Path

import numpy as np
import pytest
from branched import merged
from graphs import ops, run

from rewriter.jobs.fix import api
from rewriter.model import load
from rewriter.passes.merge_branches import MergeBranches
from rewriter.pipeline.presets import PRESETS

BLOCKS = 12
"""Of RT-DETR's encoder: three in each of two blocks down and two up."""


def test_rt_detr_has_its_blocks_merged() -> None:
    before = load(MODELS / "rtdetr.onnx")
    after, report = merged(before)
    assert (len(report.changes), report.refusals) == (BLOCKS, ())
    assert ops(before).count("Conv") - ops(after).count("Conv") == BLOCKS
    assert ops(before).count("Add") - ops(after).count("Add") == BLOCKS
    feeds = dict(np.load(MODELS / "rtdetr.npz"))
    for wanted, found in zip(run(before, feeds), run(after, feeds), strict=True):
        error = np.linalg.norm(found.astype(np.float64) - wanted)
        assert error <= MergeBranches.exactness.tolerance * np.linalg.norm(wanted)


def test_fix_merges_what_no_option_names() -> None:
    name = "/inner/model/encoder/fpn_blocks.0/bottlenecks/bottlenecks.0/conv2/conv/Conv"
    result = api.fix(MODELS / "rtdetr.onnx", inputs=MODELS / "rtdetr.npz", verify=False, keep_fp32=[name])
    (report,) = (step for step in result.passes if step.name == "merge-branches")
    assert (len(report.changes), len(report.refusals)) == (BLOCKS - 1, 1)
    nodes = {node.name: node.op_type for node in result.proto.graph.node}
    assert nodes[name] == "Conv"
    assert sum(made.endswith("/merged") for made in nodes) >= BLOCKS - 1


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_merges_once_batch_norms_are_folded(preset: str) -> None:
    names = PRESETS[preset].pipeline.split(",")
    assert names.index("simplify") < names.index("merge-branches")
