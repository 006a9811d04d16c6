"""compare-inputs names what differs between two pipelines, all of it, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_lines import invoke
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import gaussian_filter

import rewriter
from rewriter.base.errors import InputsError, UsageError
from rewriter.input_comparison.job import compare_arrays, compare_inputs
from rewriter.ir.model import Array

CONSTANTS: dict[str, tuple[float, Any, Any]] = {
    "0..255": (1.0, 0.0, 1.0),
    "0..1": (255.0, 0.0, 1.0),
    "Inception": (255.0, 0.5, 0.5),
    "ImageNet": (255.0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CLIP": (255.0, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "Caffe": (1.0, (123.68, 116.779, 103.939), 1.0),
}
MEAN = np.array([0.485, 0.456, 0.406], np.float32)[:, None, None]
STD = np.array([0.229, 0.224, 0.225], np.float32)[:, None, None]
HEIGHT, WIDTH = 48, 56


def photo(seed: int, height: int = HEIGHT, width: int = WIDTH) -> Array:
    """An uint8 image [3, H, W] as photographs are: smooth, its channels alike but not equal, some noise."""
    rng = np.random.default_rng(seed)
    own = gaussian_filter(rng.standard_normal((3, height, width)), (0, 2, 2))
    shared = gaussian_filter(rng.standard_normal((height, width)), 4)
    mixed = 0.8 * shared / shared.std() + 0.6 * own / own.std()
    values = 110 + np.array([40, 45, 35])[:, None, None] * mixed + 3 * rng.standard_normal((3, height, width))
    return np.asarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))


@dataclass(frozen=True)
class Pipeline:
    """What a preprocessing does with an image [3, H, W] of 0..255."""

    scaling: str = "0..1"
    layout: str = "NCHW"
    bgr: bool = False
    pad: int | None = None
    dtype: str = "float32"

    def __call__(self, image: Array) -> Array:
        divisor, mean, std = CONSTANTS[self.scaling]
        found = image
        if self.pad is not None:
            found = np.pad(found, ((0, 0), (6, 6), (0, 0)), constant_values=self.pad)
        mean, std = (np.resize(np.asarray(c, np.float32), 3)[:, None, None] for c in (mean, std))
        values = (found.astype(np.float32) / np.float32(divisor) - mean) / std
        values = values[::-1] if self.bgr else values
        values = np.rint(values) if self.dtype == "uint8" else values
        values = values[None] if "N" in self.layout else values
        if self.layout.endswith("C"):
            values = np.moveaxis(values, -3, -1)
        return np.ascontiguousarray(values, self.dtype)

    def kinds(self, other: Pipeline) -> set[str]:
        mine, yours = CONSTANTS[self.scaling], CONSTANTS[other.scaling]
        differing = {
            "dtype": self.dtype != other.dtype,
            "layout": self.layout != other.layout,
            "channel-order": self.bgr != other.bgr,
            "scale": mine[0] != yours[0],
            "normalization": mine[1:] != yours[1:],
            "padding": self.pad != other.pad,
        }
        return {kind for kind, differs in differing.items() if differs}


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Pipeline, Pipeline]:
    padded = draw(st.booleans())

    def one() -> Pipeline:
        scaling = draw(st.sampled_from(sorted(CONSTANTS)))
        types = ["float32", "uint8"] if scaling == "0..255" else ["float32", "float16"]
        return Pipeline(
            scaling,
            draw(st.sampled_from(["NCHW", "NHWC", "CHW", "HWC"])),
            draw(st.booleans()),
            draw(st.sampled_from([0, 114, 128])) if padded else None,
            draw(st.sampled_from(types)),
        )

    return one(), one()


@given(pipelines(), st.integers(0, 1000))
def test_all_differences_are_found_and_none_invented(pair: tuple[Pipeline, Pipeline], seed: int) -> None:
    image = photo(seed)
    ours, theirs = (pipeline(image) for pipeline in pair)
    found = compare_arrays(ours, theirs)
    assert {d.kind for d in found.differences} == pair[0].kinds(pair[1]), found
    assert found.after < 2e-3  # float16's rounding


@given(pipelines(), st.integers(0, 1000))
def test_unrelated_images_get_no_invented_relation(pair: tuple[Pipeline, Pipeline], seed: int) -> None:
    found = compare_arrays(pair[0](photo(seed)), pair[1](photo(seed + 5000)))
    kinds = {d.kind for d in found.differences}
    assert "values" in kinds
    assert kinds <= {"values", "dtype", "layout", "size"}
    assert found.after > 0.1


def inner(pipeline: Pipeline, seed: int = 3) -> Array:
    return pipeline(photo(seed))


RAW = inner(Pipeline("0..255"))[0]
UNIT, GREY, SMOOTH = RAW / 255, RAW[:1].repeat(3, 0), gaussian_filter(RAW, (0, 0.6, 0.6))
NOISE = np.random.default_rng(0).uniform(-0.4, 0.4, RAW.shape)

RELATIONS: dict[str, tuple[Any, Any, set[str], str | None]] = {
    "equal": (RAW, RAW.copy(), set(), "no difference"),
    "float rounding": (RAW / 3, (RAW.astype(np.float64) / 3).astype(np.float32), set(), "no difference"),
    "BGR, not divided": (
        inner(Pipeline("0..1")),
        inner(Pipeline("0..255", bgr=True)),
        {"channel-order", "scale"},
        "theirs is BGR (if ours is RGB) and is not divided by 255",
    ),
    "constants in the wrong order": (
        inner(Pipeline("ImageNet")),
        (inner(Pipeline("0..1"))[:, ::-1] - MEAN) / STD,
        {"channel-order", "normalization"},
        "theirs is BGR (if ours is RGB) and has mean and deviation in another order of channels",
    ),
    "ImageNet's constants without the division": (
        RAW,
        (RAW - MEAN) / STD,
        {"normalization"},
        "theirs has ImageNet's mean and standard deviation, not divided by 255 before",
    ),
    "divided twice": (RAW / 255, RAW / 65025, {"scale"}, "theirs is divided by 255 twice"),
    "constants that nobody named": (UNIT, (UNIT - 0.3) / 0.17, {"scale"}, "theirs is ours * 5.882 + -1.765"),
    "another size": (RAW, RAW[:, 3:43, 5:45].copy(), {"size", "values"}, None),
    "mirrored": (RAW, RAW[..., ::-1].copy(), {"values"}, "theirs shows something else"),
    "grey": (GREY, GREY / 255, {"scale"}, "theirs is divided by 255, ours is not"),
    "rounded on the way": (UNIT + NOISE / 255, UNIT, {"rounding"}, "theirs is rounded in another place"),
    "smoother details": (RAW, SMOOTH, {"interpolation"}, "theirs is resampled in another way"),
}


@pytest.mark.parametrize(("ours", "theirs", "kinds", "sentence"), RELATIONS.values(), ids=RELATIONS.keys())
def test_relations_of_images(ours: Array, theirs: Array, kinds: set[str], sentence: str | None) -> None:
    found = compare_arrays(ours.astype(np.float32), theirs.astype(np.float32))
    assert {d.kind for d in found.differences} == kinds
    assert sentence in (None, found.sentence)
    assert ("values" in kinds or "interpolation" in kinds) == any("resizes" in note for note in found.notes)
    assert found.after < 1e-5 or kinds & {"rounding", "interpolation", "values"}


PLAIN: dict[str, tuple[Any, Any, set[str]]] = {
    "equal ids": ([[5, 6, 7]], [[5, 6, 7]], set()),
    "a mask the other way round": ([[1.0, 1, 0, 0]], [[0.0, 0, 1, 1]], {"scale"}),
    "an additive mask": ([[1.0, 1, 0, 0]], [[0.0, 0, -10000, -10000]], {"scale"}),
    "other ids": ([[5, 6, 7]], [[5, 9, 1]], {"values"}),
    "another length": ([[5, 6, 7]], [[5, 6]], {"size"}),
    "NaN": ([[1.0, np.nan, 2]], [[1.0, 2, 2]], {"values"}),
    "the same NaN": ([[1.0, np.nan, 2]], [[1.0, np.nan, 2]], set()),
}


@pytest.mark.parametrize(("ours", "theirs", "kinds"), PLAIN.values(), ids=PLAIN.keys())
def test_relations_of_other_arrays(ours: Any, theirs: Any, kinds: set[str]) -> None:
    mine, other = np.asarray(ours), np.asarray(theirs)
    found = compare_arrays(mine, other)
    assert {d.kind for d in found.differences} == kinds
    assert found.after < 1e-6 or kinds & {"size", "values"}


def test_constant_and_empty_images_relate_only_to_themselves() -> None:
    flat = np.full((1, 3, 32, 32), 7.0, np.float32)
    assert compare_arrays(flat, flat.copy()).differences == ()
    assert compare_arrays(flat, np.full_like(flat, 9.0)).differences
    assert compare_arrays(RAW[None], flat).differences
    empty = np.zeros((1, 3, 0, 32), np.float32)
    assert compare_arrays(empty, empty).differences == ()


def written(folder: Path, name: str, **arrays: Any) -> Path:
    np.savez(folder / name, **arrays)
    return folder / f"{name}.npz"


def test_the_command_prints_the_differences_and_exits_with_1(tmp_path: Path) -> None:
    ours = written(tmp_path, "ours", image=inner(Pipeline("ImageNet")))
    theirs = written(tmp_path, "theirs", image=inner(Pipeline("0..255", "NHWC", bgr=True)))
    told = tmp_path / "told.json"
    result = invoke("compare-inputs", ours, theirs, "--json", told)
    assert result.exit_code == 1
    assert "is BGR (if ours is RGB), is not divided by 255" in " ".join(result.output.split())
    assert invoke("compare-inputs", ours, ours).exit_code == 0
    array = json.loads(told.read_text())["samples"][0]["arrays"][0]
    assert [d["kind"] for d in array["differences"]] == ["layout", "channel-order", "scale", "normalization"]
    assert array["sentence"].startswith(
        "theirs is NHWC, not NCHW, is BGR (if ours is RGB), is not divided by 255 and has no"
    )
    assert array["after"] < 1e-6


def test_folders_are_compared_sample_by_sample_and_arrays_by_name(tmp_path: Path) -> None:
    for side, value in (("ours", 0.0), ("theirs", 1.0)):
        (tmp_path / side).mkdir()
        for index in range(3):
            last = value if index == 2 else 0.0
            written(
                tmp_path / side,
                f"s{index}",
                image=RAW + last,
                mask=np.ones(4),
                **{f"ids_{side}": np.arange(4)},
            )
    found = compare_inputs(tmp_path / "ours", tmp_path / "theirs")
    kinds = [{a.name: {d.kind for d in a.differences} for a in s.arrays} for s in found.samples]
    assert kinds[0] == kinds[1] == {"image": set(), "mask": set(), "ids_ours": set()}
    assert kinds[2]["image"]
    assert found.samples[0].arrays[2].notes == ("it is called 'ids_theirs' in theirs",)


@pytest.mark.parametrize("content", [b"no archive", b""], ids=["garbage", "empty"])
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    ours, broken = written(tmp_path, "ours", image=RAW), tmp_path / "broken.npz"
    broken.write_bytes(content)
    with pytest.raises(InputsError, match="broken"):
        compare_inputs(ours, broken)
    assert invoke("compare-inputs", ours, broken).exit_code == 2


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
