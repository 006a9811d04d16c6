"""Maps of probabilities: what is one, and how far two are apart."""

from __future__ import annotations

import numpy as np
import pytest

from rewriter.ir.model import Array
from rewriter.runtime.figures.maps import map_error


def squares(*sides: int, shape: tuple[int, ...] = (1, 1, 32, 32), value: float = 1.0) -> list[Array]:
    """Empty maps with a square from pixel (8, 8) on."""
    found = []
    for side in sides:
        array = np.zeros(shape, np.float32)
        array[..., 8 : 8 + side, 8 : 8 + side] = value
        found.append(array)
    return found


@pytest.mark.parametrize(
    ("shape", "is_map"),
    [
        pytest.param((1, 1, 16, 16), True, id="the smallest"),
        pytest.param((2, 5, 16, 400), True, id="several classes, a batch, wide"),
        pytest.param((1, 1, 15, 400), False, id="too low"),
        pytest.param((1, 1, 400, 15), False, id="too narrow"),
        pytest.param((1, 100, 100), False, id="scores of detections"),
        pytest.param((1, 1, 1, 64, 64), False, id="a volume"),
    ],
)
def test_a_map_has_two_sides_of_sixteen_pixels(shape: tuple[int, ...], is_map: bool) -> None:
    assert (map_error(np.zeros(shape), np.zeros(shape)) is not None) is is_map


@pytest.mark.parametrize(
    ("pair", "distance"),
    [
        pytest.param(squares(10, 10), 0.0, id="equal"),
        pytest.param(squares(9, 10), 0.19, id="an edge moved by a pixel"),
        pytest.param(squares(10, 9), 0.19, id="the other way"),
        pytest.param(squares(0, 10), 1.0, id="nothing was there"),
        pytest.param(squares(0, 0), 0.0, id="both empty"),
        pytest.param(squares(1, 2, value=0.125), 0.75, id="less than one pixel of area"),
    ],
)
def test_the_distance_is_the_share_of_the_area_that_differs(pair: list[Array], distance: float) -> None:
    found = map_error(*pair)
    assert found is not None and found.distance == pytest.approx(distance)


@pytest.mark.parametrize(
    ("value", "at", "beyond"),
    [
        pytest.param(0.25, (8, 7), 0.0, id="beside the square: a value between"),
        pytest.param(0.25, (7, 7), 0.0, id="at its corner"),
        pytest.param(0.25, (8, 6), 0.25, id="two pixels from it"),
        pytest.param(0.25, (6, 8), 0.25, id="two pixels above it"),
        pytest.param(1.5, (8, 8), 0.5, id="above all values around"),
        pytest.param(0.75, (10, 10), 0.25, id="below all values around"),
        pytest.param(0.25, (0, 0), 0.25, id="in the corner of the map"),
        pytest.param(0.25, (31, 31), 0.25, id="in the other corner"),
    ],
)
def test_a_value_between_those_of_its_neighbours_is_a_moved_edge(
    value: float, at: tuple[int, int], beyond: float
) -> None:
    expected, actual = squares(10, 10)
    actual[0, 0, *at] = value
    found = map_error(expected, actual)
    assert found is not None and found.beyond == pytest.approx(beyond)


def test_the_excess_is_that_of_the_worse_figure() -> None:
    found = map_error(*squares(9, 10))
    assert found is not None and found.beyond == 0.0
    assert found.excess(0.19) == pytest.approx(1.0) and found.excess(0.01) == pytest.approx(19.0)
    expected, actual = squares(10, 10)
    actual[0, 0, 0, 0] = 0.05
    small = map_error(expected, actual)
    assert small is not None and small.excess(1.0) == pytest.approx(0.5), "a tenth is allowed"
