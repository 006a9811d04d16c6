"""What users have at hand: arrays, tuples, loaders, functions, batches, float64."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import pytest

import rewriter
from rewriter.base.errors import InputsError
from rewriter.ir.model import Model
from rewriter.runtime.inputs import load_samples
from rewriter.runtime.inputs.arranging import MOST_ITEMS

ONE = graphs.graph("g (float[1,3] x) => (float[1,3] y) { y = Relu(x) }")
FREE = graphs.graph("g (float[N,3] x) => (float[N,3] y) { y = Relu(x) }")
TWO = graphs.graph("g (float[1,3] x, int64[1] ids) => (float[1,3] y) { y = Relu(x) }")

BATCH = np.arange(12, dtype=np.float32).reshape(4, 3)
IDS = np.arange(4)


class Dataset:
    """With a length and items, and no iterator, as PyTorch's data sets are."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return BATCH[index], index


def loader() -> Iterator[list[Any]]:
    yield [BATCH[:2], np.array([0, 1])]
    yield [BATCH[2:], np.array([1, 0])]


ROWS = [BATCH[i : i + 1] for i in range(4)]
FORMS: list[Any] = [
    pytest.param(BATCH, ONE, ROWS, id="a batch for a batch of one"),
    pytest.param({"x": BATCH}, ONE, ROWS, id="the same as a dict"),
    pytest.param(BATCH, FREE, [BATCH], id="a batch for a free axis"),
    pytest.param(BATCH[0], FREE, [BATCH[:1]], id="no batch axis"),
    pytest.param(list(BATCH), ONE, ROWS, id="a list of arrays without one"),
    pytest.param(loader(), ONE, ROWS, id="a loader with labels"),
    pytest.param(loader, ONE, ROWS, id="a function that makes one"),
    pytest.param(lambda: BATCH, ONE, ROWS, id="a function that returns an array"),
    pytest.param(Dataset(), ONE, ROWS, id="a data set"),
    pytest.param([{"x": BATCH}], ONE, ROWS, id="a list of dicts"),
    pytest.param([({"x": BATCH}, IDS)], ONE, ROWS, id="dicts with labels"),
    pytest.param(BATCH.astype(np.float64), ONE, ROWS, id="float64"),
    pytest.param((BATCH, IDS), TWO, ROWS, id="a tuple for two inputs"),
]


@pytest.mark.parametrize(("data", "model", "wanted"), FORMS)
def test_what_is_at_hand_becomes_samples(data: Any, model: Model, wanted: list[Any]) -> None:
    samples = load_samples(data, model)
    for _ in range(2):
        found = [feeds["x"] for feeds in samples]
        assert all(array.dtype == np.float32 for array in found)
        assert [array.tolist() for array in found] == [array.tolist() for array in wanted]


def test_tensors_with_gradients_are_arrays() -> None:
    torch = pytest.importorskip("torch")
    samples = load_samples([torch.tensor(BATCH, requires_grad=True)], ONE)
    assert [feeds["x"].tolist() for feeds in samples] == [row.tolist() for row in ROWS]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(loader(), "items after the inputs of a sample are not used", id="labels"),
        pytest.param([({"x": BATCH}, IDS)], "items after the inputs", id="labels of a dict"),
        pytest.param([(BATCH[:1], {"boxes": IDS})], "items after the inputs", id="labels in a dict"),
        pytest.param(BATCH, "batches were split to the model's batch size", id="split"),
        pytest.param(BATCH[0], "a batch axis of size 1 was added to x", id="axis"),
        pytest.param(BATCH.astype(float), "input 'x' was cast from float64 to float32", id="cast"),
        pytest.param((row for row in [BATCH[:1]] * (MOST_ITEMS + 9)), "the first 256 items", id="many"),
    ],
)
def test_what_was_done_is_noted(data: Any, words: str) -> None:
    assert any(words in note for note in load_samples(data, ONE).notes)


def test_the_notes_reach_the_user() -> None:
    assert any("cast from float64" in w for w in rewriter.scan(ONE, inputs=BATCH.astype(float)).warnings)


@pytest.mark.parametrize(
    ("data", "model", "words"),
    [
        pytest.param(BATCH, TWO, "holds 1 array, the model has 2 inputs", id="too few"),
        pytest.param({"x": BATCH, "label": IDS}, ONE, "no input 'label'", id="an extra array"),
        pytest.param(np.zeros((5, 2), np.float32), ONE, "axis 1 must be 3, not 2", id="another shape"),
        pytest.param(IDS, graphs.graph("g (float[4] x) => (float[4] y) { y = Relu(x) }"), "int64", id="type"),
    ],
)
def test_what_does_not_fit_is_named(data: Any, model: Model, words: str) -> None:
    with pytest.raises(InputsError, match=words):
        load_samples(data, model)


def test_a_folder_of_images_is_explained(tmp_path: Path) -> None:
    (tmp_path / "0.PNG").write_bytes(b"")
    with pytest.raises(InputsError, match="holds images") as caught:
        load_samples(tmp_path, ONE)
    assert caught.value.hint == "save what your program feeds the model with np.savez"
