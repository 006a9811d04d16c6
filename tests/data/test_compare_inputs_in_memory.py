"""compare-inputs on what Python programs have at hand: arrays, tensors, loaders; and on wrong types."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rewriter
from rewriter.base.errors import InputsError, UsageError
from rewriter.ir.model import Array

RNG = np.random.default_rng(0)
PHOTO: Array = RNG.integers(0, 256, (24, 32, 3), np.uint8)
RGB: Array = PHOTO.transpose(2, 0, 1)[None].astype(np.float32)
BGR: Array = RGB[:, ::-1]


def _file(folder: Path, array: Array) -> Path:
    path = folder / f"{array[0, 0, 0, 0]}.npz"
    np.savez(path, x=array)
    return path


def _tensor(folder: Path, array: Array) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array.copy()).requires_grad_()


SHAPES: list[Any] = [
    pytest.param(lambda folder, array: array, "array", id="an array"),
    pytest.param(lambda folder, array: {"x": array}, "x", id="a dict"),
    pytest.param(lambda folder, array: [({"x": array}, 3)], "x", id="a dict and a label"),
    pytest.param(lambda folder, array: [(array, 3)], "array", id="an array and a label"),
    pytest.param(lambda folder, array: lambda: {"x": array}, "x", id="a function"),
    pytest.param(_tensor, "array", id="a tensor that needs a gradient"),
    pytest.param(_file, "x", id="a path"),
]


@pytest.mark.parametrize(("made", "name"), SHAPES)
def test_all_that_inputs_takes_works(made: Callable[[Path, Array], Any], name: str, tmp_path: Path) -> None:
    found = rewriter.compare_inputs(made(tmp_path, RGB), made(tmp_path, BGR))
    (sample,) = found.samples
    assert [array.name for array in sample.arrays] == [name]
    assert {d.kind for d in sample.arrays[0].differences} == {"channel-order"}
    same = rewriter.compare_inputs(made(tmp_path, RGB), made(tmp_path, RGB))
    assert (same.differ, same.counts) == (False, (1, 1))


def test_a_file_is_compared_with_an_array(tmp_path: Path) -> None:
    assert not rewriter.compare_inputs(_file(tmp_path, RGB), RGB).differ
    assert rewriter.compare_inputs({"image": RGB}, [BGR, RGB]).counts == (1, 2)


def test_arrays_of_a_tuple_are_told_apart() -> None:
    found = rewriter.compare_inputs((RGB, np.arange(4)), (RGB, np.arange(1, 5)))
    differing = {array.name: bool(array.differences) for array in found.samples[0].arrays}
    assert differing == {"array 0": False, "array 1": True}


def test_an_array_that_one_side_lacks_is_named() -> None:
    both, one = {"x": RGB, "ids": np.arange(4)}, {"x": RGB}
    for sides, phrase in (
        ((both, one), "has no array 'ids'"),
        ((one, both), "has an array 'ids' that ours lacks"),
    ):
        (sample,) = rewriter.compare_inputs(*sides).samples
        assert [array.sentence for array in sample.arrays] == ["no difference", f"theirs {phrase}"]


def test_labels_of_a_loader_are_dropped_where_the_other_side_has_one_array() -> None:
    labelled = [[RGB, np.arange(1)], [RGB, np.arange(1)]]
    for sides in ((labelled, [BGR, BGR]), ([BGR, BGR], labelled)):
        found = rewriter.compare_inputs(*sides)
        assert [len(sample.arrays) for sample in found.samples] == [1, 1]
        assert "BGR" in found.samples[0].arrays[0].sentence


WRONG: list[Any] = [
    pytest.param({"ours": 3}, UsageError, "`ours`: cannot read samples from an int", id="a number"),
    pytest.param({"theirs": None}, UsageError, "`theirs`: cannot read samples from a NoneType", id="nothing"),
    pytest.param({"ours": [1, 2]}, UsageError, "`ours` sample 0: it is an int without arrays", id="numbers"),
    pytest.param(
        {"theirs": lambda: 3},
        UsageError,
        "`theirs`: cannot read samples from an int",
        id="a function's result",
    ),
    pytest.param({"samples": 0}, UsageError, "`samples`: it cannot be 0", id="no samples"),
    pytest.param({"ours": []}, InputsError, "there is no sample", id="an empty list"),
    pytest.param({"ours": {"x": ["a"]}}, InputsError, "not numbers", id="text"),
    pytest.param({"ours": {"x": [[1], [1, 2]]}}, InputsError, "parts differ in shape", id="ragged"),
]


@pytest.mark.parametrize(("keywords", "kind", "words"), WRONG)
def test_a_wrong_argument_is_named(keywords: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        rewriter.compare_inputs(**{"ours": RGB, "theirs": RGB, **keywords})
    assert "--" not in str(caught.value)
