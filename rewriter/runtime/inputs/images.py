"""A folder of photographs as samples, prepared as a text says: `size=640,fit=letterbox,scale=255`.

Pillow reads and resizes the files: `pip install pillow`, or the extra `images`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from onnx import helper

from rewriter.ir.errors import InputsError, UsageError, did_you_mean
from rewriter.ir.model import Array, Port, Signature
from rewriter.runtime.inputs.samples import Sample

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

OPTION = "`image-preprocess`"
EXAMPLE = "size=256,crop=224,scale=255,mean=0.485:0.456:0.406,std=0.229:0.224:0.225"


@dataclass(frozen=True)
class Preprocessing:
    """How a photograph becomes the values of an input, in the order of the fields.

    Attributes:
        size: Height and width to resize to; with `crop`, that of the shorter side. Default: the input's.
        fit: `stretch` both sides; or `letterbox`: keep the ratio and pad to the size with `pad`, centred.
        pad: The value of the padding, 0 to 255.
        crop: Height and width of the centre that is cut out after resizing the shorter side to `size`.
        interpolation: Of Pillow, which blurs before it shrinks, as torchvision does with antialias.
        order: Of the channels.
        scale: Divisor of the pixel values: 255 for values from 0 to 1.
        mean, std: For each channel, in `order`: the mean is subtracted after scaling, then std divides.
        layout: Order of the axes.
    """

    size: tuple[int, ...] = ()
    fit: Literal["stretch", "letterbox"] = "stretch"
    pad: float = 114.0
    crop: tuple[int, ...] = ()
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    order: Literal["RGB", "BGR"] = "RGB"
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    layout: Literal["NCHW", "NHWC"] = "NCHW"

    @classmethod
    def parse(cls, text: str) -> Preprocessing:
        """Reads `name=value,...`; several numbers of a value stand between colons, sizes as 480x640.

        Raises:
            UsageError: an unknown name, or a value that makes no sense.
        """
        values: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, equals, value = part.partition("=")
            if name not in _READERS or not equals:
                hint = did_you_mean(name, _READERS) or f"there are {', '.join(_READERS)}; such as {EXAMPLE}"
                raise UsageError(f"there is no step {part!r}", where=OPTION, hint=hint)
            try:
                values[name] = _READERS[name](value.strip())
            except ValueError as error:
                raise UsageError(f"{name} cannot be {value!r}", where=OPTION, hint=str(error)) from error
        return cls(**values)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in re.split(r"[:/]", text))
    except ValueError:
        raise ValueError("one number, or three between colons: 0.485:0.456:0.406") from None
    if len(found) not in (1, 3):
        raise ValueError("one number, or three between colons: 0.485:0.456:0.406")
    return found


def _positive(text: str) -> tuple[float, ...]:
    found = _numbers(text)
    if min(found) <= 0:
        raise ValueError("numbers above 0")
    return found


def _sides(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", text):
        raise ValueError("one number of pixels, or height x width: 480x640")
    return tuple(int(part) for part in text.split("x"))


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        for word in words:
            if word.lower() == text.lower():
                return word
        raise ValueError(f"choose from {', '.join(words)}")

    return read


_READERS: Mapping[str, Callable[[str], Any]] = {
    "size": _sides,
    "fit": _one_of("stretch", "letterbox"),
    "pad": lambda text: _numbers(text)[0],
    "crop": _sides,
    "interpolation": _one_of("nearest", "bilinear", "bicubic", "lanczos"),
    "order": _one_of("RGB", "BGR"),
    "scale": lambda text: _positive(text)[0],
    "mean": _numbers,
    "std": _positive,
    "layout": _one_of("NCHW", "NHWC"),
}
assert _READERS.keys() == {field.name for field in fields(Preprocessing)}


def image_files(folder: Path) -> list[Path]:
    """The photographs of a folder by name."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def image_samples(folder: Path, signature: Signature, text: str) -> list[Sample]:
    """The photographs of a folder, one sample each.

    Raises:
        UsageError: the steps make no sense. InputsError: Pillow is missing, or the model has several inputs.
    """
    steps = Preprocessing.parse(text)
    if len(signature.inputs) != 1:
        raise InputsError(
            f"the model has {len(signature.inputs)} inputs, and a photograph is one",
            where=str(folder),
            hint="save samples with np.savez, with an array for each input",
        )
    (port,) = signature.inputs
    pillow(folder)
    return [Sample(str(path), partial(_sample, path, port, steps)) for path in image_files(folder)]


def _sample(path: Path, port: Port, steps: Preprocessing) -> dict[str, Array]:
    return {port.name: prepared(path, port, steps)}


def pillow(where: Path) -> Any:
    """The module `PIL.Image`.

    Raises:
        InputsError: Pillow is not installed; the message names what was to be read.
    """
    try:
        from PIL import Image
    except ImportError as error:
        hint = "pip install pillow; or save arrays with NumPy"
        raise InputsError(
            "Pillow reads photographs, and it is not installed", where=str(where), hint=hint
        ) from error
    return Image


def prepared(path: Path, port: Port, steps: Preprocessing) -> Array:
    """One photograph as a batch of one for an input, in the input's element type."""
    library = pillow(path)
    try:
        with library.open(path) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        raise InputsError(
            f"it cannot be read: {error}", where=str(path), hint="is it a photograph?"
        ) from error
    pixels = np.asarray(_framed(image, _size(port, steps, path), steps, library), np.float32)
    if steps.order == "BGR":
        pixels = pixels[..., ::-1]
    values = (pixels / np.float32(steps.scale) - np.asarray(steps.mean, np.float32)) / np.asarray(
        steps.std, np.float32
    )
    axes = values.transpose(2, 0, 1) if steps.layout == "NCHW" else values
    wanted = np.dtype(helper.tensor_dtype_to_np_dtype(port.dtype))
    if wanted.kind in "ui":
        axes = np.clip(np.rint(axes), np.iinfo(wanted).min, np.iinfo(wanted).max)
    return np.ascontiguousarray(axes[None]).astype(wanted)


def _size(port: Port, steps: Preprocessing, path: Path) -> tuple[int, ...]:
    if steps.size:
        return steps.size
    shape = port.shape or ()
    sides = shape[2:4] if steps.layout == "NCHW" else shape[1:3]
    if len(shape) != 4 or not all(isinstance(side, int) for side in sides):
        raise InputsError(
            "the model does not fix the size of its image", where=str(path), hint=f"add size=640 to {OPTION}"
        )
    return tuple(side for side in sides if isinstance(side, int))


def _framed(image: Any, size: Sequence[int], steps: Preprocessing, library: Any) -> Any:
    """The image resized, padded or cropped."""
    how = getattr(library.Resampling, steps.interpolation.upper())
    if steps.crop:
        height, width = steps.crop if len(steps.crop) == 2 else (*steps.crop, *steps.crop)
        ratio = size[0] / min(image.size)
        image = image.resize(tuple(max(1, round(side * ratio)) for side in image.size), how)
        left, top = round((image.width - width) / 2), round((image.height - height) / 2)
        return image.crop((left, top, left + width, top + height))
    height, width = size if len(size) == 2 else (*size, *size)
    if steps.fit == "stretch":
        return image.resize((width, height), how)
    ratio = min(width / image.width, height / image.height)
    inner = image.resize((max(1, round(image.width * ratio)), max(1, round(image.height * ratio))), how)
    framed = library.new("RGB", (width, height), (round(steps.pad),) * 3)
    framed.paste(inner, ((width - inner.width) // 2, (height - inner.height) // 2))
    return framed
