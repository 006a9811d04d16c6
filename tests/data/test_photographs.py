"""compare-inputs on photographs, against what OpenCV, Pillow and PyTorch really do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rewriter.cli import app
from rewriter.ir.errors import InputsError
from rewriter.ir.model import Array
from rewriter.parity import compare_arrays, photographs
from rewriter.parity.job import compare_inputs
from rewriter.parity.photographs import METHODS, recognise

cv2 = pytest.importorskip("cv2")
torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")
datasets = pytest.importorskip("sklearn.datasets")

SIDE = 112
Resize = Callable[[Array, tuple[int, int]], Array]


@pytest.fixture(scope="module")
def photo() -> Array:
    """A photograph [240, 320, 3] in uint8."""
    return np.ascontiguousarray(datasets.load_sample_image("china.jpg")[100:340, 150:470])


def opencv(flag: str) -> Resize:
    return lambda image, size: np.asarray(cv2.resize(image, size[::-1], interpolation=getattr(cv2, flag)))


def pillow(flag: str) -> Resize:
    return lambda image, size: np.asarray(
        Image.fromarray(image).resize(size[::-1], getattr(Image.Resampling, flag))
    )


def pytorch(mode: str, **more: bool) -> Resize:
    def resized(image: Array, size: tuple[int, int]) -> Array:
        planes = torch.from_numpy(np.float32(image)).permute(2, 0, 1)[None]
        found = torch.nn.functional.interpolate(planes, size, mode=mode, **more)
        return np.asarray(found[0].permute(1, 2, 0).numpy())

    return resized


LINEAR = opencv("INTER_LINEAR")


def stretched(image: Array, how: Resize = LINEAR) -> Array:
    return how(image, (SIDE, SIDE))


def cropped(image: Array, how: Resize = LINEAR) -> Array:
    high, wide = image.shape[:2]
    size = (128, 128 * wide // high)
    found, left = how(image, size), (size[1] - SIDE) // 2
    return found[8 : 8 + SIDE, left : left + SIDE]


def letterboxed(image: Array, how: Resize = LINEAR, value: int = 114) -> Array:
    high, wide = image.shape[:2]
    size = (SIDE * high // wide, SIDE)
    found, top = np.full((SIDE, SIDE, 3), value, np.float32), (SIDE - size[0]) // 2
    found[top : top + size[0]] = how(image, size)
    return found


MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


def tensor(image: Array, *, bgr: bool = False) -> Array:
    """The image normalised with ImageNet's constants: [1, 3, H, W]."""
    values = (image.astype(np.float32) / 255 - MEAN) / STD
    return np.ascontiguousarray(values.transpose(2, 0, 1)[None, :: -1 if bgr else 1])


REAL = {
    ("bilinear", False, "half-pixel"): [LINEAR, pytorch("bilinear", align_corners=False)],
    ("bilinear", True, "half-pixel"): [pillow("BILINEAR"), pytorch("bilinear", antialias=True)],
    ("bilinear", False, "align-corners"): [pytorch("bilinear", align_corners=True)],
    ("nearest", False, "floor"): [opencv("INTER_NEAREST"), pytorch("nearest")],
    ("nearest", False, "centre"): [pillow("NEAREST"), pytorch("nearest-exact")],
    ("bicubic", False, "half-pixel"): [opencv("INTER_CUBIC"), pytorch("bicubic", align_corners=False)],
    ("bicubic", True, "half-pixel"): [pillow("BICUBIC"), pytorch("bicubic", antialias=True)],
    ("bicubic", False, "align-corners"): [pytorch("bicubic", align_corners=True)],
    ("area", True, "half-pixel"): [opencv("INTER_AREA")],
    ("area", True, "floor"): [pytorch("area")],
    ("lanczos", True, "half-pixel"): [pillow("LANCZOS")],
}


@pytest.mark.parametrize("method", dict.fromkeys((m.kernel, m.antialias, m.coordinates) for m in METHODS))
def test_a_resize_of_any_library_is_recognised(method: tuple[str, bool, str], photo: Array) -> None:
    for real in REAL[method]:
        made = stretched(photo, real)
        origin = recognise(photo, tensor(made))
        assert origin is not None
        found = origin.method
        assert (found.kernel, found.antialias, found.coordinates) == method
        assert origin.rounds == (made.dtype == np.uint8 or "nearest" in found.kernel)


def test_without_a_library_that_resizes_nothing_is_recognised(
    photo: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photographs, "LIBRARIES", {"cv2": "no_such_library"})
    with pytest.raises(InputsError, match="needs OpenCV, Pillow or PyTorch"):
        compare_arrays(tensor(stretched(photo)), tensor(cropped(photo)), image=photo)


def kinds(photo: Array, ours: Array, theirs: Array) -> set[str]:
    return {d.kind for d in compare_arrays(tensor(ours), tensor(theirs), image=photo).differences}


PAIRS = [
    pytest.param(stretched, cropped, {"size"}, id="resize-then-crop against direct"),
    pytest.param(stretched, letterboxed, {"size"}, id="letterbox against stretch"),
    pytest.param(
        lambda p: stretched(p, pytorch("bilinear", align_corners=False)),
        lambda p: stretched(p, pytorch("bilinear", align_corners=True)),
        {"interpolation"},
        id="align-corners",
    ),
    pytest.param(stretched, lambda p: stretched(p, pillow("BILINEAR")), {"antialias"}, id="antialias"),
    pytest.param(stretched, lambda p: stretched(p, opencv("INTER_NEAREST")), {"interpolation"}, id="nearest"),
    pytest.param(stretched, lambda p: stretched(p, opencv("INTER_CUBIC")), {"interpolation"}, id="bicubic"),
    pytest.param(
        stretched, lambda p: stretched(p, opencv("INTER_AREA")), {"interpolation", "antialias"}, id="area"
    ),
    pytest.param(
        lambda p: stretched(p, pytorch("bilinear", antialias=True)),
        lambda p: stretched(p, pillow("BILINEAR")),
        {"rounding"},
        id="whole pixels",
    ),
    pytest.param(letterboxed, lambda p: letterboxed(p, value=0), {"padding"}, id="padding value"),
    pytest.param(
        cropped,
        lambda p: letterboxed(p, pillow("BICUBIC")),
        {"size", "interpolation", "antialias"},
        id="several",
    ),
]


@pytest.mark.parametrize(("ours", "theirs", "expected"), PAIRS)
def test_what_people_mix_up_is_named(
    ours: Callable[[Array], Array], theirs: Callable[[Array], Array], expected: set[str], photo: Array
) -> None:
    assert kinds(photo, ours(photo), theirs(photo)) == expected


def halved(values: Array) -> Array:
    return values.astype(np.float16).astype(np.float32)


HALF_PIXEL = pytorch("bilinear", align_corners=False)
ALONE = [
    pytest.param(
        lambda p: tensor(stretched(p)),
        lambda p: tensor(cropped(p)),
        "is resized and then cropped, not stretched",
        "scale = 128 / min(image.shape[:2])",
        id="resize-then-crop against direct",
    ),
    pytest.param(
        lambda p: tensor(cropped(p)),
        lambda p: tensor(stretched(p)),
        "is stretched, not resized and then cropped",
        "image = cv2.resize(image, (112, 112))",
        id="direct against resize-then-crop",
    ),
    pytest.param(
        lambda p: tensor(stretched(p)),
        lambda p: tensor(letterboxed(p)),
        "is letterboxed, not stretched and is padded with (-0.1657, -0.03992, 0.1825), pixel value 114",
        "image = cv2.copyMakeBorder(image, 14, 14, 0, 0, cv2.BORDER_CONSTANT, value=(114, 114, 114))",
        id="letterbox against stretch",
    ),
    pytest.param(
        lambda p: tensor(letterboxed(p)),
        lambda p: tensor(stretched(p, pillow("BILINEAR")), bgr=True),
        "is stretched, not letterboxed and is BGR (if ours is RGB)",
        "image = cv2.resize(image, (112, 112))",
        id="stretch against letterbox, and BGR",
    ),
    pytest.param(
        lambda p: tensor(cropped(p)),
        lambda p: tensor(letterboxed(p)),
        "is letterboxed, not resized and then cropped and is padded with (-0.1657, -0.03992, 0.1825), "
        "pixel value 114",
        "image = cv2.resize(image, (112, 84))",
        id="letterbox against crop",
    ),
    pytest.param(
        lambda p: tensor(stretched(p, HALF_PIXEL)),
        lambda p: tensor(stretched(p, pytorch("bilinear", align_corners=True))),
        "is resampled in another way",
        "`images` with the photographs",
        id="align-corners",
    ),
    pytest.param(
        lambda p: tensor(stretched(p)),
        lambda p: tensor(stretched(p, pillow("BILINEAR"))),
        "is resized with antialiasing",
        "image.resize(size[::-1], Image.BILINEAR)",
        id="antialiasing of Pillow",
    ),
    pytest.param(
        lambda p: tensor(stretched(p, pytorch("bilinear", antialias=True))),
        lambda p: tensor(stretched(p)),
        "is resized without antialiasing",
        "interpolation=cv2.INTER_LINEAR",
        id="no antialiasing in OpenCV",
    ),
    pytest.param(
        lambda p: halved(tensor(stretched(p))),
        lambda p: tensor(stretched(p)),
        "is rounded in another place",
        "",
        id="FP16 of ours",
    ),
    pytest.param(
        lambda p: tensor(stretched(p, HALF_PIXEL)),
        lambda p: tensor(np.rint(stretched(p, HALF_PIXEL))),
        "rounds to whole pixels",
        "np.rint(",
        id="uint8",
    ),
    pytest.param(
        lambda p: tensor(np.rint(stretched(p, HALF_PIXEL))),
        lambda p: tensor(stretched(p, HALF_PIXEL)),
        "does not round to whole pixels",
        "image = image.astype(np.float32)",
        id="uint8 of ours",
    ),
    pytest.param(
        lambda p: tensor(letterboxed(p)),
        lambda p: tensor(letterboxed(p, value=0)),
        "is padded with (-2.118, -2.036, -1.804), pixel value 0",
        "theirs[:, :, 0:14, :] = ",
        id="padding value",
    ),
    pytest.param(
        lambda p: tensor(stretched(p)),
        lambda p: tensor(stretched(p)[..., ::-1]),
        "is BGR (if ours is RGB) and has mean and deviation in another order of channels",
        "np.take(ours, [2, 1, 0], 1)",
        id="channel order with normalisation",
    ),
]


@pytest.mark.parametrize(("ours", "theirs", "sentence", "line"), ALONE)
def test_arrays_alone_tell_what_people_mix_up_and_the_line_that_mends_it(
    ours: Callable[[Array], Array], theirs: Callable[[Array], Array], sentence: str, line: str, photo: Array
) -> None:
    found = compare_arrays(ours(photo), theirs(photo))
    assert found.sentence == f"theirs {sentence}"
    assert any(line in one for one in ("", *found.code, *found.notes)), (found.code, found.notes)
    assert found.after <= found.before


def test_the_line_for_our_pipeline_makes_theirs(photo: Array) -> None:
    found = compare_arrays(tensor(stretched(photo)), tensor(cropped(photo)))
    head = "in our pipeline: "
    names: dict[str, Any] = {"image": photo, "cv2": cv2}
    exec("\n".join(note.removeprefix(head) for note in found.notes if note.startswith(head)), names)
    error = np.abs(np.asarray(names["image"], float) - cropped(photo))
    assert error.shape == (SIDE, SIDE, 3) and np.median(error) <= 2.0


def test_channels_and_their_constants_are_told_apart_from_the_resize(photo: Array) -> None:
    ours, theirs = tensor(stretched(photo)), tensor(stretched(photo, pillow("BILINEAR")), bgr=True)
    found = compare_arrays(ours, theirs, image=photo)
    assert {d.kind for d in found.differences} >= {"channel-order", "antialias"}


def test_the_code_of_a_crop_does_the_same(photo: Array) -> None:
    origin = recognise(photo, tensor(cropped(photo)))
    assert origin is not None
    names: dict[str, object] = {"image": photo, "cv2": cv2}
    exec("\n".join(origin.lines), names)
    assert np.array_equal(np.asarray(names["image"]), cropped(photo))


def test_another_photograph_is_said_to_be_one(photo: Array) -> None:
    other = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
    found = compare_arrays(tensor(stretched(photo)), tensor(cropped(photo)), image=other)
    assert any("not recognised" in note for note in found.notes)


def test_the_command_reads_photographs_and_prints_the_line(photo: Array, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=tensor(stretched(photo)))
    np.savez(tmp_path / "b.npz", x=tensor(stretched(photo, pillow("BILINEAR"))))
    Image.fromarray(photo).save(tmp_path / "photo.png")
    paths = [str(tmp_path / name) for name in ("a.npz", "b.npz", "photo.png")]
    done = CliRunner().invoke(app, ["compare-inputs", *paths[:2], "--images", paths[2]])
    assert done.exit_code == 1
    assert done.output.startswith("The two pipelines differ: 1 sample compared")
    assert "theirs is resized with antialiasing" in done.output
    assert "theirs: image = image.resize(size[::-1], Image.BILINEAR)" in done.output
    (tmp_path / "none").mkdir()
    with pytest.raises(InputsError, match="0 photographs for 1 sample"):
        compare_inputs(paths[0], paths[1], images=tmp_path / "none")
    with pytest.raises(InputsError, match="cannot read it"):
        compare_inputs(paths[0], paths[1], images=paths[0])
