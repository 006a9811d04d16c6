"""Recognises how an array was made from its photograph: stretched, cropped or letterboxed, and resized how.

Every way to resize is a line of OpenCV, Pillow or PyTorch, which is run on the photograph where that library
is installed. The line that explains most of an array, whatever its channels and scale, is how it was made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from rewriter.ir.errors import InputsError
from rewriter.ir.model import Array
from rewriter.parity.comparison import ArrayComparison, Difference, Kind
from rewriter.parity.explain import ASK, PIXEL_LEVELS
from rewriter.parity.relation import Window, canonical, content, extent, layouts, standard
from rewriter.runtime.inputs.arranging import as_array, is_array
from rewriter.runtime.inputs.images import pillow

RECOGNISED = 0.02
"""Largest share of the variance that the best candidate leaves: another interpolation leaves less than 0.1, a
line of code that is right less than 1e-3."""

EQUAL, EXACT = 1.3, 2e-6
"""Ratio of unexplained shares up to which the usual method wins; and a share that is nothing, beside that of
rounding to whole pixels (some 1e-5 of the variance)."""

RATIOS = (1.0, 256 / 224, 1 / 0.9, 1 / 0.95, 1 / 0.96, 232 / 224, 236 / 224, 248 / 224, 272 / 224)
"""Shorter side before a centre crop, over the crop: 224 of 256 and other usual ratios, from timm."""


# -- reading ------------------------------------------------------------------------------------


def are_photographs(source: Any) -> bool:
    """True for the types that `photographs` takes."""
    if isinstance(source, (list, tuple)):
        return all(map(are_photographs, source))
    return (
        isinstance(source, (str, os.PathLike)) or is_array(source) or hasattr(source, "__array_interface__")
    )


def photographs(source: Any) -> list[Array]:
    """The photographs as [H, W, 3] in uint8, RGB.

    Args:
        source: A file, a folder (in the order of names), an array, a picture of Pillow, or a list of these.

    Raises:
        InputsError: a file cannot be read, or is no photograph; Pillow is not installed.
    """
    if isinstance(source, (list, tuple)):
        return [pixels for one in source for pixels in photographs(one)]
    if not isinstance(source, (str, os.PathLike)):
        return [_checked(np.asarray(as_array(source)), "`images`")]
    path = Path(source)
    if not path.exists():
        raise InputsError("no such file or folder", where=str(path), hint="name the photographs, in order")
    files = sorted(one for one in path.iterdir() if one.is_file()) if path.is_dir() else [path]
    return [_checked(_read(file), str(file)) for file in files]


def _read(file: Path) -> Array:
    library = None if file.suffix.lower() == ".npy" else pillow(file)
    try:
        if library is None:
            return np.asarray(np.load(file, allow_pickle=False))
        with library.open(file) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError) as error:
        raise InputsError(f"cannot read it: {error}", where=str(file), hint="is it an image?") from error


def _checked(pixels: Array, where: str) -> Array:
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        what = f"it holds {pixels.dtype} {list(pixels.shape)}, not uint8 [H, W, 3]"
        raise InputsError(what, where=where, hint="save it as RGB")
    return pixels


# -- ways to resize -----------------------------------------------------------------------------

LIBRARIES = {"cv2": "cv2", "Image": "PIL.Image", "F": "torch.nn.functional"}
"""The module of each name in the lines below."""


@dataclass(frozen=True)
class Method:
    """A way to resize: `line` reads `image` and `size`, its height and width."""

    kernel: str
    antialias: bool
    coordinates: str
    line: str

    def __call__(self, image: Array, size: tuple[int, int]) -> Array:
        """The image [H, W, 3] in float32, not rounded to whole pixels."""
        library = next(name for name in LIBRARIES if name in self.line)
        module = import_module(LIBRARIES[library])
        names: dict[str, Any] = {library: module, "size": size}
        if library == "cv2":
            return np.asarray(eval(self.line, {**names, "image": np.float32(image)}))
        planes = np.ascontiguousarray(np.moveaxis(image.astype(np.float32), -1, 0))
        if library == "F":
            tensor = import_module("torch").from_numpy(planes)[None]
            return np.asarray(eval(self.line, {**names, "image": tensor})[0].numpy().transpose(1, 2, 0))
        channels = [eval(self.line, {**names, "image": module.fromarray(plane)}) for plane in planes]
        return np.stack([np.asarray(channel) for channel in channels], axis=-1)


def _cv2(flag: str) -> str:
    return f"cv2.resize(image, size[::-1], interpolation=cv2.{flag})"


def _pillow(flag: str) -> str:
    return f"image.resize(size[::-1], Image.{flag})"


def _torch(mode: str) -> str:
    return f"F.interpolate(image, size, mode={mode})"


METHODS = (
    Method("bilinear", False, "half-pixel", _cv2("INTER_LINEAR")),
    Method("bilinear", True, "half-pixel", _pillow("BILINEAR")),
    Method("bilinear", False, "half-pixel", _torch('"bilinear", align_corners=False')),
    Method("bilinear", True, "half-pixel", _torch('"bilinear", antialias=True')),
    Method("bilinear", False, "align-corners", _torch('"bilinear", align_corners=True')),
    Method("nearest", False, "floor", _cv2("INTER_NEAREST")),
    Method("nearest", False, "centre", _pillow("NEAREST")),
    Method("bicubic", False, "half-pixel", _cv2("INTER_CUBIC")),
    Method("bicubic", True, "half-pixel", _pillow("BICUBIC")),
    Method("bicubic", False, "align-corners", _torch('"bicubic", align_corners=True')),
    Method("area", True, "half-pixel", _cv2("INTER_AREA")),
    Method("area", True, "floor", _torch('"area"')),
    Method("lanczos", True, "half-pixel", _pillow("LANCZOS")),
)
"""What preprocessing uses; the usual ones first, which win where several give the same."""


def methods() -> list[Method]:
    """The methods of the libraries that are installed."""
    there = [name for name, module in LIBRARIES.items() if find_spec(module.partition(".")[0])]
    if not there:
        hint = 'install one of them: pip install "rewriter[images]"'
        raise InputsError("comparing resizes needs OpenCV, Pillow or PyTorch", where="`images`", hint=hint)
    return [method for method in METHODS if any(name in method.line for name in there)]


# -- recognising --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Origin:
    """How an array was made: `size` before a crop or border, and the photograph's place in the array.

    `rounds`: pixels were rounded to whole numbers; `unexplained`: share of the variance that is left.
    """

    geometry: str
    size: tuple[int, int]
    box: Window
    method: Method
    rounds: bool
    unexplained: float

    @property
    def lines(self) -> tuple[str, ...]:
        """Code that does the same."""
        lines = [f"size = {self.size}", f"image = {self.method.line}"]
        if self.geometry == "cropped":
            top, left = _corner(self.size, self.box)
            high, wide = extent(self.box)
            lines.append(
                f"image = image[{top}:{top + high}, {left}:{left + wide}]  # height, width, channels"
            )
        if self.rounds and "F.interpolate" in self.method.line:
            lines.append("image = image.round().clamp(0, 255)")
        return tuple(lines)

    @property
    def text(self) -> str:
        """`letterboxed: resized to ...`."""
        size, (rows, columns) = f"{self.size[0]}x{self.size[1]}", self.box
        return {
            "stretched": f"stretched to {size}",
            "cropped": f"resized to {size}, then cropped in the middle",
            "letterboxed": f"letterboxed: resized to {size}, then padded from row {rows.start}, "
            f"column {columns.start}",
        }[self.geometry]


def recognise(image: Array, array: Array) -> Origin | None:
    """How the array, one image in any layout, scale and order of channels, was made of [H, W, 3] in uint8."""
    shapes = (canonical(array, axes).astype(np.float64) for axes in layouts(array.shape))
    target = next((one for one in shapes if one.shape[:2] == (1, 3)), None)
    if target is None or not np.isfinite(target).all():
        return None
    candidates = methods()
    softest = next((m for m in candidates if m.antialias), candidates[0])  # nearest to the mean of all
    places = [_origin(image, target, place, softest) for place in _places(image, target)]
    best = min(places, key=lambda o: o.unexplained)
    if best.unexplained > 10 * RECOGNISED:
        return None
    place = best.geometry, best.size, best.box
    origins = [_origin(image, target, place, method) for method in candidates]
    least = min(o.unexplained for o in origins)
    best = next(o for o in origins if o.unexplained <= EQUAL * least + EXACT)
    return best if best.unexplained <= RECOGNISED else None


Place = tuple[str, tuple[int, int], Window]


def _places(image: Array, target: Array) -> Iterator[Place]:
    (height, width), (high, wide) = target.shape[-2:], image.shape[:2]
    whole, box = (slice(0, height), slice(0, width)), content(target)
    yield "stretched", (height, width), whole
    if box != whole:
        yield "letterboxed", extent(box), box
        return
    for ratio in RATIOS:
        side = round(min(height, width) * ratio)
        exact = side * high / min(high, wide), side * wide / min(high, wide)
        for rows, columns in dict.fromkeys(
            [(int(exact[0]), int(exact[1])), (round(exact[0]), round(exact[1]))]
        ):
            if rows >= height and columns >= width and (rows, columns) != (height, width):
                yield "cropped", (rows, columns), whole


def _corner(size: tuple[int, int], box: Window) -> tuple[int, int]:
    high, wide = extent(box)
    return (size[0] - high) // 2, (size[1] - wide) // 2


def _origin(image: Array, target: Array, place: Place, method: Method) -> Origin:
    geometry, size, box = place
    made = method(image, size)
    if geometry == "cropped":
        (top, left), (high, wide) = _corner(size, box), extent(box)
        made = made[top : top + high, left : left + wide]
    a, b = standard(made.reshape(-1, 3).T.astype(np.float64)), standard(target[0][:, *box].reshape(3, -1))
    agreement = ((a @ b.T / a.shape[1]) ** 2).max(axis=0)  # with the channel that fits best
    return Origin(geometry, size, box, method, _is_rounded(target), float(1.0 - agreement.mean()))


def _is_rounded(target: Array) -> bool:
    """True if no channel has more values than whole pixels have."""
    channels = target[0].reshape(3, -1).astype(np.float32)
    enough = channels.shape[1] >= 4 * PIXEL_LEVELS
    return enough and all(np.unique(channel).size <= PIXEL_LEVELS for channel in channels)


# -- in words -----------------------------------------------------------------------------------

BLIND: frozenset[Kind] = frozenset({"interpolation", "antialias", "rounding", "size", "values"})
"""Differences that both origins state better than the arrays alone."""


def with_origins(comparison: ArrayComparison, image: Array, ours: Array, theirs: Array) -> ArrayComparison:
    """The comparison with how each side was made from the photograph; a note if one is not recognised."""
    mine, other = recognise(image, ours), recognise(image, theirs)
    if mine is None or other is None:
        who = " and ".join(name for name, one in (("ours", mine), ("theirs", other)) if one is None)
        note = f"{who} is not recognised in the photograph: mirrored, cropped elsewhere, or of another"
        return replace(comparison, notes=(*comparison.notes, note))
    different = tuple(_differences(mine, other))
    kinds = {d.kind for d in comparison.differences}
    if not different and kinds & {"values", "size"}:
        return comparison
    blind = BLIND | (set() if mine.geometry == other.geometry else {"padding", "shift"})
    kept = tuple(d for d in comparison.differences if not different or d.kind not in blind)
    notes = tuple(n for n in comparison.notes if n != ASK and not n.startswith("in our pipeline"))
    made = (f"{who}: {line}" for who, one in (("ours", mine), ("theirs", other)) for line in one.lines)
    return replace(comparison, differences=(*kept, *different), notes=(*notes, *made))


def _differences(ours: Origin, theirs: Origin) -> Iterator[Difference]:
    a, b = ours.method, theirs.method
    lines = f"theirs is as by {b.line}, ours as by {a.line}"
    whole_pixels = "nearest" in (a.kernel, b.kernel)  # it picks them
    if (ours.geometry, ours.size) != (theirs.geometry, theirs.size):
        text = f"theirs is {theirs.text}, ours {ours.text}"
        yield Difference("size", f"is {theirs.text}, not {ours.geometry}", text)
    if a.kernel != b.kernel:
        yield Difference("interpolation", f"is resized {b.kernel}, not {a.kernel}", lines)
    elif a.coordinates != b.coordinates:
        yield Difference("interpolation", f"has {b.coordinates} coordinates, not {a.coordinates}", lines)
    if a.antialias != b.antialias and not whole_pixels:
        yield Difference("antialias", f"is resized with{'' if b.antialias else 'out'} antialiasing", lines)
    if ours.rounds != theirs.rounds and not whole_pixels:
        phrase = f"{'rounds' if theirs.rounds else 'does not round'} to whole pixels"
        yield Difference("rounding", phrase, f"theirs {phrase} (uint8) after the resize, ours differs")
