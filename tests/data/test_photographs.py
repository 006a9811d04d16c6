"""compare-inputs on photographs, against what OpenCV, Pillow and PyTorch really do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rewriter.base.errors import InputsError
from rewriter.cli import app
from rewriter.input_comparison import photographs
from rewriter.input_comparison.job import compare_arrays, compare_inputs
from rewriter.input_comparison.photographs import METHODS, recognise
from rewriter.ir.model import Array

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


def letterboxed(image: Array, how: Resize = LINEAR, value: int = 114, top: int = 14) -> Array:
    high, wide = image.shape[:2]
    size = (SIDE * high // wide, SIDE)
    found = np.full((SIDE, SIDE, 3), value, np.float32)
    found[top : top + size[0]] = how(image, size)
    return found


MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


def tensor(image: Array, *, bgr: bool = False) -> Array:
    """The image normalised with ImageNet's constants: [1, 3, H, W]."""
    values = (image.astype(np.float32) / 255 - MEAN) / STD
    return np.ascontiguousarray(values.transpose(2, 0, 1)[None, :: -1 if bgr else 1])


REAL = {
    "bilinear": [LINEAR, pytorch("bilinear", align_corners=False)],
    "bilinear with antialiasing": [pillow("BILINEAR"), pytorch("bilinear", antialias=True)],
    "nearest": [opencv("INTER_NEAREST"), pytorch("nearest")],
    "nearest to the centre": [pillow("NEAREST"), pytorch("nearest-exact")],
    "bicubic": [opencv("INTER_CUBIC"), pytorch("bicubic", align_corners=False)],
    "bicubic with antialiasing": [pillow("BICUBIC"), pytorch("bicubic", antialias=True)],
    "area": [opencv("INTER_AREA")],
    "lanczos with antialiasing": [pillow("LANCZOS")],
}


@pytest.mark.parametrize("method", METHODS)
def test_a_resize_of_any_library_is_recognised(method: str, photo: Array) -> None:
    for place in (stretched, cropped, letterboxed):
        for real in REAL[method]:
            origin = recognise(photo, tensor(place(photo, real)))
            assert origin is not None
            assert (origin.method, origin.text.split()[0]) == (
                method,
                {stretched: "stretched", cropped: "resized", letterboxed: "letterboxed:"}[place],
            )


def test_without_a_library_that_resizes_nothing_is_recognised(
    photo: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photographs, "LIBRARIES", {"cv2": "no_such_library"})
    with pytest.raises(InputsError, match="needs OpenCV or Pillow"):
        compare_arrays(tensor(stretched(photo)), tensor(cropped(photo)), image=photo)


CROP = "resized to 128x170, then cropped in the middle"
BOX = "letterboxed: resized to 84x112, padded from row 14, column 0 with pixel value 114"
PAIRS = [
    pytest.param(stretched, cropped, f"is {CROP}, not stretched to 112x112", id="crop against stretch"),
    pytest.param(stretched, letterboxed, f"is {BOX}, not stretched to 112x112", id="letterbox"),
    pytest.param(
        letterboxed,
        lambda p: letterboxed(p, top=0),
        f"is {BOX.replace('row 14', 'row 0')}, not {BOX}",
        id="letterbox at the top",
    ),
    pytest.param(
        letterboxed,
        lambda p: letterboxed(p, value=0),
        f"is {BOX.replace('114', '0')}, not {BOX}",
        id="padding value",
    ),
    pytest.param(
        stretched,
        lambda p: stretched(p, pillow("BILINEAR")),
        "is resized bilinear with antialiasing, not bilinear",
        id="antialiasing",
    ),
    pytest.param(
        cropped,
        lambda p: letterboxed(p, pillow("BICUBIC"))[..., ::-1],
        f"is BGR (if ours is RGB), has mean and deviation in another order of channels, is {BOX}, not {CROP} "
        "and is resized bicubic with antialiasing, not bilinear",
        id="several",
    ),
    pytest.param(
        lambda p: p[:96, :96], lambda p: p[100:196, 100:196], "shows something else", id="not the whole"
    ),
]


@pytest.mark.parametrize(("ours", "theirs", "sentence"), PAIRS)
def test_what_people_mix_up_is_named(
    ours: Callable[[Array], Array], theirs: Callable[[Array], Array], sentence: str, photo: Array
) -> None:
    found = compare_arrays(tensor(ours(photo)), tensor(theirs(photo)), image=photo)
    assert found.sentence == f"theirs {sentence}"
    assert any("not recognised" in note for note in found.notes) == ("something else" in sentence)
    alone = compare_arrays(tensor(ours(photo)), tensor(theirs(photo)))
    assert alone.differences
    assert any("`images` with the photographs" in note for note in alone.notes) or "pixel value 0" in sentence


def test_the_command_reads_photographs_and_prints_the_line(photo: Array, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=tensor(stretched(photo)))
    np.savez(tmp_path / "b.npz", x=tensor(stretched(photo, pillow("BILINEAR"))))
    Image.fromarray(photo).save(tmp_path / "photo.png")
    paths = [str(tmp_path / name) for name in ("a.npz", "b.npz", "photo.png")]
    done = CliRunner().invoke(app, ["compare-inputs", *paths[:2], "--images", paths[2]])
    assert done.exit_code == 1
    assert done.output.startswith("The two pipelines differ: 1 sample compared")
    assert "theirs is resized bilinear with antialiasing, not bilinear" in done.output
    assert "theirs: image = image.resize(size[::-1], Image.BILINEAR)" in done.output
    (tmp_path / "none").mkdir()
    wrong: list[tuple[Any, str]] = [
        (tmp_path / "none", "0 photographs for 1 sample"),
        (paths[0], "it cannot be read"),
        (tmp_path / "no such file", "no such file or folder"),
    ]
    for images, message in wrong:
        with pytest.raises(InputsError, match=message):
            compare_inputs(paths[0], paths[1], images=images)
