"""What a user says of the engine: names, libraries and shapes that can be, and those that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from graphs import graph

from rewriter.engines.deployment import TENSORRT, Deployment, deployment
from rewriter.engines.protocol import Span
from rewriter.errors import UsageError

MODEL = graph("g (float[n,3,8,8] x, int64[2] sizes) => (float[n,3,8,8] y) { y = Relu(x) }")
ONE, FOUR, EIGHT = (1, 3, 8, 8), (4, 3, 8, 8), (8, 3, 8, 8)


def test_where_one_of_three_shapes_is_missing_another_stands_in() -> None:
    assert deployment(min_shapes={"x": ONE}, max_shapes={"x": EIGHT}).profile == {"x": (ONE, EIGHT, EIGHT)}
    assert deployment(opt_shapes={"x": (2,)}).profile == {"x": ((2,), (2,), (2,))}
    assert deployment().profile == {}


def test_emulation_needs_no_engine() -> None:
    choice = deployment("emulation").choose()
    assert (choice.engine, choice.reasons) == (None, ("--engine emulation",))
    assert deployment("onnxruntime").choose().engine == "onnxruntime"


def test_an_unknown_engine_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match=r"one of auto, tensorrt, .*onnxruntime-cuda, emulation"):
        deployment("openvino")
    with pytest.raises(UsageError, match="one of auto, tensorrt, tensorrt-rtx, emulation"):
        deployment("onnxruntime", engines=TENSORRT)


def test_a_plugin_library_has_to_be_there(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("profile", "message"), BAD.values(), ids=BAD.keys())
def test_a_profile_that_does_not_fit_the_model_is_refused(profile: dict[str, Span], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Deployment(profile=profile).check(MODEL.signature)


@pytest.mark.parametrize(
    ("span", "message"),
    [
        pytest.param((ONE, FOUR, FOUR), "'x' is 1x3x8x8 in the data", id="too small"),
        pytest.param((FOUR, FOUR, EIGHT), "'x' is 8x3x8x8 in the data", id="too large"),
    ],
)
def test_a_sample_out_of_the_profile_is_refused(span: Span, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Deployment(profile={"x": (FOUR, FOUR, FOUR)}).check_data({"x": span})


def test_a_profile_that_fits() -> None:
    found = Deployment(profile={"x": (ONE, FOUR, EIGHT)})
    found.check(MODEL.signature)
    found.check_data({"x": (ONE, ONE, EIGHT)})
    assert found.usual == {"x": FOUR}
