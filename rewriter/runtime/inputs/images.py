"""A folder of photographs, read by Pillow, as samples: prepared as `size=640,fit=letterbox` says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from onnx import helper

from rewriter.base.errors import InputsError, UsageError, did_you_mean
from rewriter.ir.model import Array, Port
from rewriter.runtime.inputs.samples import Sample

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")

OPTION = "image-preprocess"
EXAMPLE = "size=256,crop=224,scale=255,mean=0.485:0.456:0.406,std=0.229:0.224:0.225"


@dataclass(frozen=True)
class Preprocessing:
    """How a photograph becomes the values of an input, in the order of the fields."""

    # height and width to resize to; with `crop`, size of the shorter side. Default: the input's
    size: tuple[int, int] | None = None
    # `stretch` both sides; or `letterbox`: keep the ratio and pad to the size with `pad`, centred
    fit: Literal["stretch", "letterbox"] = "stretch"
    pad: float = 114.0  # the value of the padding, 0 to 255
    # height and width of the centre that is cut out after resizing the shorter side to `size`
    crop: tuple[int, int] | None = None
    # of Pillow, which blurs before it shrinks, as torchvision does with antialias
    interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    order: Literal["RGB", "BGR"] = "RGB"  # of the channels
    scale: float = 1.0  # divisor of the pixel values: 255 for values from 0 to 1
    # mean, std: for each channel, in `order`: the mean is subtracted after scaling, then std divides
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @classmethod
    def parse(cls, text: str) -> Preprocessing:
        """Reads `name=value,...`; several numbers of a value are separated by colons, sizes are 480x640.

        Raises:
            UsageError: an unknown name, or a value that makes no sense.
        """
        names = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, equals, value = part.partition("=")
            if name not in names or not equals:
                hint = did_you_mean(name, names) or f"there are {', '.join(names)}; such as {EXAMPLE}"
                raise UsageError(f"there is no step {part!r}", option=OPTION, hint=hint)
            try:
                values[name] = _value(name, value.strip())
            except ValueError as error:
                raise UsageError(f"{name} cannot be {value!r}", option=OPTION, hint=str(error)) from error
        return cls(**values)


def _value(name: str, text: str) -> Any:
    """The value of a step; the ValueError of a wrong one says what there is."""
    words = get_args(get_type_hints(Preprocessing)[name])
    if get_origin(get_type_hints(Preprocessing)[name]) is Literal:
        if text.lower() not in (choices := {word.lower(): word for word in words}):
            raise ValueError(f"choose from {', '.join(words)}")
        return choices[text.lower()]
    if name in ("size", "crop"):
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", text):
            raise ValueError("one number of pixels, or height x width: 480x640")
        sides = [int(part) for part in text.split("x")]
        return sides[0], sides[-1]
    try:
        numbers = [float(part) for part in re.split(r"[:/]", text)]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3):
        raise ValueError("one number, or three between colons: 0.485:0.456:0.406")
    if name in ("scale", "std") and min(numbers) <= 0:
        raise ValueError("numbers above 0")
    return tuple(numbers) if name in ("mean", "std") else numbers[0]


def image_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def image_samples(folder: Path, ports: Sequence[Port], text: str) -> list[Sample]:
    """The photographs of a folder, one sample each.

    Raises:
        UsageError: the steps make no sense. InputsError: Pillow is missing, or the model has several inputs.
    """
    steps = Preprocessing.parse(text)
    if len(ports) != 1:
        what = f"the model has {len(ports)} inputs, and a photograph is one"
        hint = "save samples with np.savez, with an array for each input"
        raise InputsError(what, where=str(folder), hint=hint)

    (port,) = ports

    def read(path: Path) -> dict[str, Array]:
        return {port.name: prepared(path, port, steps)}

    return [Sample(str(path), partial(read, path)) for path in image_files(folder)]


def opened(path: Path) -> Any:
    """A photograph as an image of Pillow, in RGB; an InputsError if Pillow is missing or cannot read it."""
    try:
        from PIL import Image

        with Image.open(path) as image:
            return image.convert("RGB")
    except ImportError as error:
        what, hint = "Pillow reads photographs, and it is not installed", "pip install pillow, or use arrays"
        raise InputsError(what, where=str(path), hint=hint) from error
    except OSError as error:
        what = f"it cannot be read: {error}"
        raise InputsError(what, where=str(path), hint="is it a photograph?") from error


def prepared(path: Path, port: Port, steps: Preprocessing) -> Array:
    """One photograph as a batch of one for an input, in the input's element type and order of axes."""
    image = opened(path)
    shape = port.shape or ()
    channels_last = len(shape) == 4 and shape[3] == 3 and shape[1] != 3
    size = steps.size or (shape[1:3] if channels_last else shape[2:4])
    if len(size) != 2 or not all(isinstance(side, int) for side in size):
        what = "the model does not fix the size of its image"
        raise InputsError(what, where=str(path), hint=f"add size=640 to `{OPTION}`")
    pixels = np.asarray(_framed(image, size, steps), np.float32)
    if steps.order == "BGR":
        pixels = pixels[..., ::-1]
    mean, std = np.asarray(steps.mean, np.float32), np.asarray(steps.std, np.float32)
    values = (pixels / np.float32(steps.scale) - mean) / std
    axes = values if channels_last else values.transpose(2, 0, 1)
    wanted = np.dtype(helper.tensor_dtype_to_np_dtype(port.dtype))
    if wanted.kind in "ui":
        axes = np.clip(np.rint(axes), np.iinfo(wanted).min, np.iinfo(wanted).max)
    return np.ascontiguousarray(axes[None]).astype(wanted)


def _framed(image: Any, size: Sequence[Any], steps: Preprocessing) -> Any:
    from PIL import Image, ImageOps

    how, (height, width) = Image.Resampling[steps.interpolation.upper()], size
    if steps.crop is None:
        if steps.fit == "stretch":
            return image.resize((width, height), how)
        return ImageOps.pad(image, (width, height), how, color=(round(steps.pad),) * 3)
    ratio, (height, width) = height / min(image.size), steps.crop
    image = image.resize(tuple(max(1, round(side * ratio)) for side in image.size), how)
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))
