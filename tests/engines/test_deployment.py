"""The options of an engine: valid and invalid names, libraries and shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import graph

from rewriter.ir.errors import UsageError
from rewriter.runtime.engines.deployment import Deployment, deployment
from rewriter.runtime.engines.tensor_files import Span

MODEL = graph("g (float[n,3,8,8] x, int64[2] sizes) => (float[n,3,8,8] y) { y = Relu(x) }")
ONE, FOUR, EIGHT = (1, 3, 8, 8), (4, 3, 8, 8), (8, 3, 8, 8)


def test_a_missing_shape_of_the_three_is_replaced_by_another() -> None:
    assert deployment(min_shapes={"x": ONE}, max_shapes={"x": EIGHT}).profile == {"x": (ONE, EIGHT, EIGHT)}
    assert deployment(opt_shapes={"x": (2,)}).profile == {"x": ((2,), (2,), (2,))}
    assert deployment().profile == {}


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


BAD: dict[str, tuple[dict[str, Span], str]] = {
    "a name that no input has": ({"image": (ONE, ONE, ONE)}, "no input 'image'"),
    "another rank": ({"x": ((1,), (1,), (1,))}, "1 does not fit input 'x', which is nx3x8x8"),
    "a fixed axis": ({"x": (ONE, ONE, (1, 4, 8, 8))}, "1x4x8x8 does not fit input 'x'"),
}


@pytest.mark.parametrize(("profile", "words"), BAD.values(), ids=BAD.keys())
def test_a_profile_that_does_not_fit_the_model_is_refused(profile: dict[str, Span], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Deployment(profile=profile).check(MODEL.signature)


@pytest.mark.parametrize(
    ("span", "words"),
    [
        pytest.param((ONE, FOUR, FOUR), "'x' is 1x3x8x8 in the data", id="too small"),
        pytest.param((FOUR, FOUR, EIGHT), "'x' is 8x3x8x8 in the data", id="too large"),
    ],
)
def test_a_sample_outside_the_profile_is_refused(span: Span, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Deployment(profile={"x": (FOUR, FOUR, FOUR)}).check_data({"x": span})


def test_a_profile_that_fits_is_accepted() -> None:
    found = Deployment(profile={"x": (ONE, FOUR, EIGHT)})
    found.check(MODEL.signature)
    found.check_data({"x": (ONE, ONE, EIGHT)})
    assert {name: span[1] for name, span in found.profile.items()} == {"x": FOUR}
