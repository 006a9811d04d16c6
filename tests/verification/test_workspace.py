"""The files that runs of one verification share, and models that are no versions of each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from graphs import graph

from rewriter.ir.errors import UsageError
from rewriter.ir.model import load, save
from rewriter.judge.workspace import MOST_SAMPLES, Workspace, require_same_ports
from rewriter.runtime.engines.protocol import EngineOutcome
from rewriter.runtime.engines.tensor_files import write_samples
from rewriter.runtime.figures.tolerances import TOLERANCES, Tolerance
from rewriter.runtime.inputs import Samples, load_samples

TEXT = "g (float[2,3] x) => (float[2,3] y) { y = Softmax(x) }"


def samples(number: int) -> Samples:
    feeds = [{"x": np.full((2, 3), float(i), np.float32)} for i in range(number)]
    return load_samples(feeds, graph(TEXT))


def workspace(folder: Path, number: int = 2) -> Workspace:
    return Workspace(graph(TEXT), graph(TEXT), samples(number), folder)


def test_at_most_sixteen_samples_are_stored_and_compared(tmp_path: Path) -> None:
    assert MOST_SAMPLES == 16
    for number, kept in ((2, 2), (16, 16), (17, 16)):
        made = workspace(tmp_path / str(number), number)
        made.compute_reference()
        assert len(list(made.expected)) == kept
        assert len(list(made.stored(made.fixed, "fixed"))) == kept


def test_samples_are_written_once_for_each_name(tmp_path: Path) -> None:
    made = workspace(tmp_path)
    assert made.stored(made.fixed, "fixed") is made.stored(made.fixed, "fixed")
    assert made.stored(made.fixed, "fixed") is not made.stored(made.original, "original")


def test_a_loaded_model_is_run_from_its_own_file_and_a_new_one_from_a_copy(tmp_path: Path) -> None:
    original = load(save(graph(TEXT), tmp_path / "mine.onnx"))
    made = Workspace(original, graph(TEXT), samples(1), tmp_path / "work", {"x": ((1, 3), (2, 3), (4, 3))})
    reference, fixed = made.reference_variant(), made.fixed_variant()
    assert (reference.path, fixed.path) == (tmp_path / "mine.onnx", tmp_path / "work" / "fixed.onnx")
    assert (reference.tf32, fixed.tf32) == (False, True)
    assert reference.shapes == fixed.shapes == made.shapes


def test_a_default_tolerance_judges_probabilities_fairly_and_the_users_does_not(tmp_path: Path) -> None:
    made = workspace(tmp_path, 1)
    made.compute_reference()
    (row,) = made.expected
    near = row["y"] + np.asarray([[-0.004, 0.002, 0.002]] * 2, np.float32)
    found = made.folder / "found"
    found.mkdir(parents=True)
    outcome = EngineOutcome("fixed", 0, "ok", outputs=write_samples(found, [{"y": near}]).folders)
    default, asked = TOLERANCES["fp16"], Tolerance(5e-3, "relative-l2", "--tolerance")
    assert made.judge([outcome], default).passed
    assert not made.judge([outcome], asked).passed


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        pytest.param(
            TEXT.replace(" y", " z"), "of the outputs, it lacks y and has z in addition", id="renamed"
        ),
        pytest.param(
            TEXT.replace("(x)", "(w)").replace(" x", " w"), "of the inputs, it lacks x", id="an input"
        ),
        pytest.param(
            TEXT.replace("[2,3] y)", "[2,3] y, float[2,3] z)").replace("}", "z = Neg(x) }"),
            "of the outputs, it has z in addition",
            id="one more",
        ),
    ],
)
def test_models_with_other_ports_are_refused(fixed: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        require_same_ports(graph(TEXT), graph(fixed))
    assert str(caught.value).startswith("the fixed model: it is not a version of the original: ")
    path = save(graph(fixed), tmp_path / "f.onnx")
    with pytest.raises(UsageError) as named:
        require_same_ports(load(save(graph(TEXT), tmp_path / "o.onnx")), load(path))
    assert str(named.value).startswith(f"{path}: it is not a version of {tmp_path / 'o.onnx'}: ")


def test_types_may_differ() -> None:
    require_same_ports(graph(TEXT), graph(TEXT.replace("float[", "float16[")))
