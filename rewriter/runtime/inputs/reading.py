"""Reads samples from npz and npy files, folders of either, Polygraphy's JSON, dicts and generators."""

from __future__ import annotations

import base64
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rewriter.ir.english import article
from rewriter.ir.errors import InputsError, UsageError
from rewriter.ir.model import Model, Signature
from rewriter.ir.model.writing import from_json
from rewriter.runtime.inputs.arranging import MOST_ITEMS, arranged, is_array, items, left_out, named, unnamed
from rewriter.runtime.inputs.images import EXAMPLE, OPTION, image_files, image_samples
from rewriter.runtime.inputs.samples import Sample, Samples
from rewriter.runtime.inputs.stored_arrays import Archive, StoredArray, explained, npy_file

FORMATS = "an .npz file, a folder of .npz or .npy files, or a .json file written by Polygraphy"


def read_samples(data: Any, model: Model, image_preprocess: str | None = None) -> Samples:
    """Samples from a path, arrays, dicts of arrays, loaders of either, or a function that returns one.

    An .npz file is one sample. A folder holds one .npz file for each sample; or one .npy file for each
    input, which is one sample; or subfolders of such .npy files. A JSON file is what
    `polygraphy.json.save_json` writes for a list of feeds. Sources that can be read only once (JSON,
    generators) are copied to a temporary folder, so that one sample is in memory at a time.

    Raises:
        InputsError: missing or unreadable data, or data that does not fit the model's inputs.
        UsageError: the data is none of these.
    """
    signature = model.signature
    if isinstance(data, Samples):
        return data
    if callable(data) and not isinstance(data, Iterable):
        data = data()
    _require_type(data, "`inputs`")
    path, steps, found = "", "", list[str]()
    if isinstance(data, (str, os.PathLike)):
        samples, path = _opened(Path(data), signature, image_preprocess), str(data)
        steps = image_preprocess or ""
        origin = f"{path} ({steps})" if steps else path
    else:
        samples, origin, found = _of_objects(
            data, partial(named, signature=signature), partial(left_out, signature=signature)
        )
    _require_some(samples, origin)
    samples, notes = arranged(samples, signature)
    count = f"{len(samples)} sample" + "s" * (len(samples) != 1)
    text = f"{count} from {origin}"
    return Samples(signature, samples, text, real=True, notes=(*found, *notes), path=path, preprocess=steps)


def _of_objects(
    data: Any, as_dict: Callable[..., Any], left_out: Callable[[Any], str]
) -> tuple[list[Sample], str, list[str]]:
    """Samples of Python objects, their origin, and sentences about what was left out.

    Args:
        as_dict: Returns one item by name; `where` names the item for messages.
        left_out: Returns the sentence about what `as_dict` drops; "" if there is nothing.
    """
    if is_array(data) or _is_one_sample(data) or isinstance(data, Mapping):
        where = "the given dict" if isinstance(data, Mapping) else "the given arrays"
        feeds = as_dict(data, where=where)
        return [Sample(where, _constant(feeds))], "arrays", []
    spare: dict[str, None] = {}

    def feeds_of(items: Iterable[Any]) -> Iterator[Any]:
        for index, item in enumerate(items):
            if not any(spare):  # later samples hold the same, in other sizes
                spare.setdefault(left_out(item))
            yield as_dict(item, where=f"sample {index}")

    if isinstance(data, Sequence):
        samples = [Sample(f"sample {i}", _constant(feeds)) for i, feeds in enumerate(feeds_of(data))]
        origin = "a list of arrays"
    else:
        samples, origin = _spooled(feeds_of(items(data)), "sample"), "an iterable"
        if len(samples) == MOST_ITEMS:
            spare.setdefault(f"the first {MOST_ITEMS} items were taken; give a list to use more")
    return samples, origin, [note for note in spare if note]


def _is_one_sample(data: Any) -> bool:
    """True for a tuple of arrays, one for each input; a list holds samples."""
    return isinstance(data, tuple) and bool(data) and all(map(is_array, data))


def may_hold_samples(data: Any) -> bool:
    """True for the types that `read_samples` and `read_raw_samples` take, but for functions."""
    if isinstance(data, (bytes, bytearray)):
        return False
    is_data_set = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return isinstance(data, (str, os.PathLike, Iterable)) or is_array(data) or is_data_set


def _require_type(data: Any, where: str | None) -> None:
    if not may_hold_samples(data):
        what = f"cannot read samples from {article(type(data).__name__)}"
        raise UsageError(what, where=where, hint=f"give {FORMATS}; arrays, dicts of arrays, or a data loader")


def read_raw_samples(data: Any) -> Sequence[Sample]:
    """The samples that `read_samples` reads, in their own names and shapes, checked against no model.

    An array without a name is called `array`, and those of a tuple `array 0`, `array 1` and so on.

    Raises:
        InputsError: missing or unreadable data.
        UsageError: the data, or a sample, is of a type that holds no arrays.
    """
    if callable(data) and not isinstance(data, Iterable):
        data = data()
    _require_type(data, None)
    if not isinstance(data, (str, os.PathLike)):
        samples, origin, _ = _of_objects(data, unnamed, lambda item: "")
    elif (path := Path(data)).is_file() and path.suffix == ".npy":
        return [Sample(str(path), lambda: {"array": npy_file(path)})]
    else:
        samples, origin = _opened(path, Signature((), ())), str(path)
    _require_some(samples, origin)
    return samples


def _require_some(samples: Sequence[Sample], origin: str) -> None:
    if not samples:
        raise InputsError("there is no sample in it", where=origin, hint="give at least one")


def _constant(feeds: Any) -> Callable[[], Any]:
    return lambda: feeds


def _opened(path: Path, signature: Signature, image_preprocess: str | None = None) -> list[Sample]:
    if path.is_dir():
        return _from_folder(path, signature, image_preprocess)
    if not path.is_file():
        raise InputsError("no such file or folder", where=str(path), hint=f"give {FORMATS}")
    if path.suffix == ".npz":
        return [_archive(path)]
    if path.suffix == ".json":
        return _spooled(_polygraphy(path), f"{path}: sample")
    if path.suffix == ".npy" and len(signature.inputs) == 1:
        name = signature.inputs[0].name
        return [Sample(str(path), lambda: {name: npy_file(path)})]
    raise InputsError(f"cannot read samples from a {path.suffix or 'such a'} file", where=str(path),
                      hint=f"give {FORMATS}")  # fmt: skip


def _steps_of_photographs(signature: Signature) -> str:
    """What to do with photographs: an input without three channels, as of spectrograms, takes none."""
    shapes = [port.shape for port in signature.inputs]
    if len(shapes) == 1 and (shapes[0] is None or (len(shapes[0]) == 4 and _may_be_colours(shapes[0]))):
        return f"add {OPTION} with the steps of your training; ImageNet's are '{EXAMPLE}'"
    return "save what your program feeds the model with np.savez, with an array for each input"


def _may_be_colours(shape: Sequence[int | str | None]) -> bool:
    return any(size == 3 or not isinstance(size, int) for size in (shape[1], shape[3]))


def _from_folder(folder: Path, signature: Signature, image_preprocess: str | None) -> list[Sample]:
    if image_preprocess is not None:
        return image_samples(folder, signature, image_preprocess)
    entries = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    archives = [p for p in entries if p.suffix == ".npz"]
    arrays = [p for p in entries if p.suffix == ".npy"]
    nested = [p for p in entries if p.is_dir() and any(p.glob("*.npy"))]
    if sum(map(bool, (archives, arrays, nested))) > 1:
        raise InputsError(
            "it holds a mixture of .npz files, .npy files and subfolders",
            where=str(folder),
            hint="keep one kind",
        )
    if archives:
        return [_archive(path) for path in archives]
    if arrays:
        return [_npy_folder(folder, signature)]
    if nested:
        return [_npy_folder(path, signature) for path in nested]
    if image_files(folder):
        raise InputsError(
            "it holds photographs, and how they become the model's input is not known",
            where=str(folder),
            hint=_steps_of_photographs(signature),
        )
    raise InputsError(
        "it holds no sample",
        where=str(folder),
        hint="one .npz file for each sample, or one .npy file for each input, called <input>.npy",
    )


def _archive(path: Path) -> Sample:
    return Sample(str(path), partial(Archive, path))


def _npy_folder(folder: Path, signature: Signature) -> Sample:
    """Files are named after the inputs; characters that file names cannot hold (`/`, `:`) are `_`."""
    plain = {re.sub(r"[^\w.-]", "_", port.name): port.name for port in signature.inputs}

    def read() -> dict[str, StoredArray]:
        return {plain.get(p.stem, p.stem): npy_file(p) for p in sorted(folder.glob("*.npy"))}

    return Sample(str(folder), read)


class _Spool:
    """Samples in a temporary folder that is removed with this object."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rewriter-samples-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def write(self, index: int, feeds: Mapping[str, Any], where: str) -> Callable[[], Mapping[str, Any]]:
        """Stores one sample and returns a function that reads it."""
        for position, value in enumerate(feeds.values()):
            with explained(where):
                np.save(self._file(index, position), np.asarray(value), allow_pickle=False)
        return partial(self._read, index, list(feeds))

    def _read(self, index: int, names: Sequence[str]) -> dict[str, StoredArray]:
        return {name: npy_file(self._file(index, position)) for position, name in enumerate(names)}

    def _file(self, index: int, position: int) -> Path:
        return self.folder / f"{index}-{position}.npy"


def _spooled(feeds: Iterable[Any], label: str) -> list[Sample]:
    """Writes each sample to disk as it comes, so that only one is in memory."""
    spool, samples = _Spool(), []
    for index, sample in enumerate(feeds):
        where = f"{label} {index}"
        # anything but a dict is passed on: `checked` raises the error that explains it
        read = spool.write(index, sample, where) if isinstance(sample, Mapping) else _constant(sample)
        samples.append(Sample(where, read))
    return samples


def _polygraphy(path: Path) -> Iterator[Mapping[str, Any]]:
    """Feeds from the JSON that Polygraphy writes, where an array is the base64 text of an npy file."""
    where = str(path)
    try:
        content = from_json(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputsError(f"it is not JSON: {error}", where=where, hint=f"give {FORMATS}") from error
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list):
        raise InputsError(
            "it holds no list of feeds", where=where, hint="write a list of dicts with save_json"
        )
    for index, sample in enumerate(content):
        if not isinstance(sample, Mapping):
            raise InputsError("it is not a dict of arrays", where=f"{where}: sample {index}",
                              hint="write a list of dicts with save_json")  # fmt: skip
        yield {n: _decoded(v, f"{where}: sample {index}: array {n!r}") for n, v in sample.items()}


def _decoded(value: Any, where: str) -> StoredArray:
    if isinstance(value, Mapping) and isinstance(value.get("array"), str):
        with explained(where):
            data = base64.b64decode(value["array"], validate=True)
        return npy_file(data, where)
    raise InputsError(
        "it is not an array as Polygraphy encodes them",
        where=where,
        hint="polygraphy.json.save_json writes numpy arrays; convert others first",
    )
