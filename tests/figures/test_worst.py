"""The worst sample and build of each output, with its picture."""

from __future__ import annotations

import numpy as np

from rewriter.runtime.figures.pair import Pair
from rewriter.runtime.figures.worst import WorstOutputs

IMAGE = np.zeros((1, 1, 16, 16), np.float32)
IMAGE[0, 0, 0, 0] = 1.0


def off(error: float) -> Pair:
    return Pair(IMAGE, IMAGE + np.float32(error))


def test_the_worst_sample_of_each_output_is_kept_with_its_picture() -> None:
    found = WorstOutputs()
    for sample, error in enumerate((0.25, 0.5, 0.125)):
        found.add("y", off(error), sample=sample, build=1)
    found.add("score", Pair(np.ones(4), np.ones(4)))
    assert [(one.name, one.sample, one.build) for one in found.statistics] == [("y", 1, 1), ("score", 0, 0)]
    assert [(one.name, one.largest) for one in found.pictures] == [("y", 0.5)]


def test_of_equal_ones_the_first_is_kept() -> None:
    found = WorstOutputs()
    found.add("y", off(0.25), sample=0)
    found.add("y", off(0.25), sample=1)
    assert [one.sample for one in found.statistics] == [0]


def test_a_pair_of_two_shapes_is_left_out() -> None:
    found = WorstOutputs()
    found.add("y", Pair(IMAGE, IMAGE[:, :, :8]))
    assert (found.statistics, found.pictures) == ((), ())
