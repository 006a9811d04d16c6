"""The options of an engine: valid and invalid names, libraries and shapes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import graph

from rewriter.base.errors import InputsError, UsageError
from rewriter.ir.model import Array
from rewriter.runtime.engines.deployment import Deployment, deployment
from rewriter.runtime.engines.tensor_files import Span
from rewriter.runtime.inputs import load_samples

MODEL = graph("g (float[n,3,8,8] x) => (float[n,3,8,8] y) { y = Relu(x) }")
ONE, FOUR, EIGHT = (1, 3, 8, 8), (4, 3, 8, 8), (8, 3, 8, 8)


def test_a_missing_shape_of_the_three_is_replaced_by_another() -> None:
    assert deployment(min_shapes={"x": ONE}, max_shapes={"x": EIGHT}).profile == {"x": (ONE, EIGHT, EIGHT)}
    assert deployment(opt_shapes={"x": (2,)}).profile == {"x": ((2,), (2,), (2,))}
    assert deployment().profile == {}


def test_the_samples_give_the_shapes_that_the_user_did_not() -> None:
    sampled: dict[str, Any] = {"x": ((2, 5), (4, 6), (6, 9)), "other": ((1,), (1,), (1,))}

    def filled(**shapes: Any) -> Any:
        given: dict[str, Any] = {name: {"x": shape} for name, shape in shapes.items()}
        return deployment(**given).filled(sampled).profile

    assert filled(max_shapes=(64, 9)) == {"x": ((2, 5), (4, 6), (64, 9))}
    assert filled(min_shapes=(1, 1)) == {"x": ((1, 1), (4, 6), (6, 9))}
    assert filled(opt_shapes=(8, 6)) == {"x": ((2, 5), (8, 6), (8, 9))}
    assert filled(min_shapes=(1, 1), max_shapes=(3, 9)) == {"x": ((1, 1), (3, 6), (3, 9))}
    whole = {"min_shapes": (1, 1), "opt_shapes": (2, 2), "max_shapes": (3, 3)}
    assert filled(**whole) == {"x": ((1, 1), (2, 2), (3, 3))}
    assert filled() == {}


def test_emulation_needs_no_engine() -> None:
    choice = deployment("emulation").choose()
    assert (choice.engine, choice.reasons) == (None, ("`engine=emulation`",))
    assert deployment("onnxruntime").choose().engine == "onnxruntime"


def test_an_unknown_engine_is_refused_with_a_list_of_engines() -> None:
    with pytest.raises(UsageError, match=r"one of auto, tensorrt, .*onnxruntime-cuda, emulation"):
        deployment("openvino")


def test_a_missing_plugin_library_is_an_error(tmp_path: Path) -> None:
    library = tmp_path / "plugin.so"
    with pytest.raises(UsageError, match="no such file"):
        deployment(plugin_lib=[library])
    library.touch()
    assert deployment(plugin_lib=[library]).plugins == (library.resolve(),)


def data(*shapes: tuple[int, ...]) -> list[dict[str, Array]]:
    return [{"x": np.ones(shape, np.float32)} for shape in shapes]


BAD: dict[str, tuple[dict[str, Span], str]] = {
    "a name that no input has": ({"image": (ONE, ONE, ONE)}, "no input 'image'"),
    "another rank": ({"x": ((1,), (1,), (1,))}, "it must have 4 axes, not 1"),
    "a fixed axis": ({"x": (ONE, ONE, (1, 4, 8, 8))}, "axis 1 must be 3, not 4"),
}


@pytest.mark.parametrize(("profile", "words"), BAD.values(), ids=BAD.keys())
def test_a_profile_that_does_not_fit_the_model_is_refused(profile: dict[str, Span], words: str) -> None:
    with pytest.raises(InputsError, match=words):
        load_samples(None, MODEL, deployment=Deployment(profile=profile))


@pytest.mark.parametrize(
    ("span", "words"),
    [
        pytest.param((ONE, FOUR, FOUR), "'x' is 1x3x8x8 in the data", id="too small"),
        pytest.param((FOUR, FOUR, EIGHT), "'x' is 8x3x8x8 in the data", id="too large"),
    ],
)
def test_a_sample_outside_the_profile_is_refused(span: Span, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_samples(data(*span), MODEL, deployment=Deployment(profile={"x": (FOUR, FOUR, FOUR)}))


def test_a_profile_that_fits_is_accepted() -> None:
    found = Deployment(profile={"x": (ONE, FOUR, EIGHT)})
    load_samples(data(ONE, EIGHT), MODEL, deployment=found)
    assert {name: span[1] for name, span in found.profile.items()} == {"x": FOUR}
