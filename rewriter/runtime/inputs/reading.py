"""Reads samples from npz and npy files, folders of either, Polygraphy's JSON, dicts and generators."""

import base64
import io
import json
import os
import re
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rewriter.base.errors import InputsError, UsageError
from rewriter.base.text import article, count
from rewriter.ir.model import Array, Model, Port, Signature
from rewriter.ir.model.output_files import work_folder
from rewriter.runtime.engines.tensor_files import read_tensors, write_tensors
from rewriter.runtime.inputs.arranging import MOST_ITEMS, arranged, by_name, has_labels, is_array, items
from rewriter.runtime.inputs.images import EXAMPLE, OPTION, image_files, image_samples
from rewriter.runtime.inputs.samples import Sample, Samples
from rewriter.runtime.recording.record import RECORD, Recording

FORMATS = "an .npz file, a folder of .npz or .npy files, or a .json file written by Polygraphy"

UNUSED = f"`{OPTION}` is for a folder of photographs, and changes nothing here"

Ports = Sequence[Port] | None
"""The inputs of the model; None where samples are read for no model, in their own names and shapes."""


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
    if isinstance(data, Samples):
        return data
    samples, origin, notes = _read(data, model.signature.inputs, image_preprocess)
    samples, more = arranged(samples, model.signature)
    path = str(data) if isinstance(data, (str, os.PathLike)) else ""
    steps = (image_preprocess or "") if path and Path(path).is_dir() else ""
    if image_preprocess and not steps:
        more = (*more, UNUSED)
    text = f"{count(len(samples), 'sample')} from {origin}" + (f" ({steps})" if steps else "")
    notes = [*notes, *more]
    found = Recording.of_samples(Path(path)) if path else None
    signature = model.signature if found is None else _without_names(model.signature)
    result = Samples(signature, samples, text, real=True, notes=notes, path=path, preprocess=steps)
    if found is not None:
        recording, file = found
        spans = {name: file.shapes[name] for name in result.source.spans if name in file.shapes}
        result.source = replace(
            result.source,
            spans={**result.source.spans, **spans},
            profiled=frozenset(spans),
            steps=recording.steps(file.name),
            recorded=True,
        )
    return result


def _without_names(signature: Signature) -> Signature:
    """The signature without names of dimensions: what ran may contradict them, such as an empty cache."""
    ports = [
        replace(port, shape=port.shape and tuple(d if isinstance(d, int) else None for d in port.shape))
        for port in signature.inputs
    ]
    return replace(signature, inputs=tuple(ports))


def read_raw_samples(data: Any) -> Sequence[Sample]:
    """The samples that `read_samples` reads, in their own names and shapes, checked against no model.

    Raises:
        InputsError: missing or unreadable data.
        UsageError: the data, or a sample, is of a type that holds no arrays.
    """
    return _read(data, None)[0]


def _read(
    data: Any, ports: Ports, image_preprocess: str | None = None
) -> tuple[list[Sample], str, list[str]]:
    """The samples, their origin, and sentences about what was left out."""
    if callable(data) and not isinstance(data, Iterable):
        data = data()
    is_data_set = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    holds = isinstance(data, (str, os.PathLike, Iterable)) or is_array(data) or is_data_set
    if not holds or isinstance(data, (bytes, bytearray)):
        what = f"cannot read samples from {article(type(data).__name__)}"
        hint = f"give {FORMATS}; arrays, dicts of arrays, or a data loader"
        raise UsageError(what, option="inputs", hint=hint)
    if isinstance(data, (str, os.PathLike)):
        samples, origin, notes = _of_path(Path(data), ports, image_preprocess), str(data), list[str]()
    else:
        samples, origin, notes = _of_objects(data, ports)
    if not samples:
        raise InputsError("there is no sample in it", where=origin, hint="give at least one")
    return samples, origin, notes


def _of_objects(data: Any, ports: Ports) -> tuple[list[Sample], str, list[str]]:
    is_one = isinstance(data, tuple) and bool(data) and all(map(is_array, data))  # a list holds samples
    if is_array(data) or is_one or isinstance(data, Mapping):
        where = "the given dict" if isinstance(data, Mapping) else "the given arrays"
        return [Sample(where, partial(_same, by_name(data, where, ports)))], "arrays", []
    notes: dict[str, None] = {}

    def feeds_of(items: Iterable[Any]) -> Iterator[Any]:
        for index, item in enumerate(items):
            if ports is not None and has_labels(item, len(ports)):
                notes["items after the inputs of a sample are not used, such as labels"] = None
            yield by_name(item, f"sample {index}", ports)

    if isinstance(data, Sequence):
        samples = [Sample(f"sample {i}", partial(_same, feed)) for i, feed in enumerate(feeds_of(data))]
        return samples, "a list of arrays", [*notes]
    samples = _spooled(feeds_of(items(data)), "sample")
    if len(samples) == MOST_ITEMS:
        notes[f"the first {MOST_ITEMS} items were taken; give a list to use more"] = None
    return samples, "an iterable", [*notes]


def _same(feeds: Any) -> Any:
    return feeds


class _SampleFolder:
    """A temporary folder that is removed with this object."""

    def __init__(self) -> None:
        stack = ExitStack()
        self.folder = stack.enter_context(work_folder())
        weakref.finalize(self, stack.close)

    def read(self, number: str) -> dict[str, Array]:
        return read_tensors(self.folder / number)


def _spooled(feeds: Iterable[Any], label: str) -> list[Sample]:
    """Writes each sample to disk as it comes, so that only one is in memory."""
    folder, samples = _SampleFolder(), []
    for index, sample in enumerate(feeds):
        read: Callable[[], Any] = partial(_same, sample)  # `checked` raises the error that explains it
        with suppress(ValueError, AttributeError):
            arrays = {name: np.asarray(value) for name, value in sample.items()}
            if all(array.dtype.kind != "O" for array in arrays.values()):
                write_tensors(folder.folder / str(index), arrays)
                read = partial(folder.read, str(index))
        samples.append(Sample(f"{label} {index}", read))
    return samples


def _of_path(path: Path, ports: Ports, image_preprocess: str | None) -> list[Sample]:
    if path.is_dir():
        if image_preprocess is not None:
            return image_samples(path, ports or (), image_preprocess)
        return _of_folder(path, ports or ())
    if not path.is_file():
        raise InputsError("no such file or folder", where=str(path), hint=f"give {FORMATS}")
    if path.suffix == ".npz":
        return [_npz_sample(path)]
    if path.suffix == ".json":
        return _spooled(_polygraphy(path), f"{path}: sample")
    if path.suffix == ".npy" and (ports is None or len(ports) == 1):
        name = ports[0].name if ports else "array"
        return [Sample(str(path), lambda: {name: _npy(path)})]
    raise InputsError(f"cannot read samples from a {path.suffix or 'such a'} file", where=str(path),
                      hint=f"give {FORMATS}")  # fmt: skip


def _of_folder(folder: Path, ports: Sequence[Port]) -> list[Sample]:
    entries = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    archives = [p for p in entries if p.suffix == ".npz"]
    arrays = [p for p in entries if p.suffix == ".npy"]
    nested = [p for p in entries if p.is_dir() and any(p.glob("*.npy"))]
    if sum(map(bool, (archives, arrays, nested))) > 1:
        text = "it holds a mixture of .npz files, .npy files and subfolders"
        raise InputsError(text, where=str(folder), hint="keep one kind")
    if archives or arrays or nested:
        return [_npz_sample(path) for path in archives] or [
            _npy_sample(path, ports) for path in ([folder] if arrays else nested)
        ]
    what = "it holds no sample"
    hint = "one .npz file for each sample, or one .npy file for each input, called <input>.npy"
    if (folder / RECORD).is_file():
        what, hint = "it is a recording of several models", "name the folder of this model in it"
    elif image_files(folder):
        what = "it holds photographs, and their preprocessing is unknown"
        hint = "save what your program feeds the model with np.savez"
        shapes = [port.shape for port in ports if port.shape and len(port.shape) == 4]
        if any(3 in (shape[1], shape[3]) or not isinstance(shape[1], int) for shape in shapes):
            hint = f"add `{OPTION}` with the steps of your training; ImageNet's are '{EXAMPLE}'; or {hint}"
    raise InputsError(what, where=str(folder), hint=hint)


def _npz_sample(path: Path) -> Sample:
    def read() -> dict[str, Array]:
        if not zipfile.is_zipfile(path):
            what = "not an npz archive, or a truncated one"
            raise InputsError(what, where=str(path), hint="write it with np.savez")
        with _explained(str(path)), np.load(path, allow_pickle=False) as archive:
            return dict(archive)

    return Sample(str(path), read)


def _npy_sample(folder: Path, ports: Sequence[Port]) -> Sample:
    """Files are named after the inputs; characters that file names cannot hold (`/`, `:`) are `_`."""
    plain = {re.sub(r"[^\w.-]", "_", port.name): port.name for port in ports}

    def read() -> dict[str, Array]:
        return {plain.get(p.stem, p.stem): _npy(p) for p in sorted(folder.glob("*.npy"))}

    return Sample(str(folder), read)


def _npy(path: Path) -> Array:
    with _explained(str(path)):
        return np.asarray(np.load(path, allow_pickle=False))


def _polygraphy(path: Path) -> Iterator[Mapping[str, Any]]:
    """Feeds from the JSON that Polygraphy writes, where an array is the base64 text of an npy file."""
    with _explained(str(path)):
        content = json.loads(path.read_bytes())
    hint = "write a list of dicts of arrays with polygraphy.json.save_json"
    for index, sample in enumerate(content if isinstance(content, list) else [content]):
        with _explained(f"{path}: sample {index}", hint):
            texts = {name: base64.b64decode(value["array"], validate=True) for name, value in sample.items()}
            feeds = {name: np.load(io.BytesIO(text), allow_pickle=False) for name, text in texts.items()}
        yield feeds


@contextmanager
def _explained(where: str, hint: str = "write it again") -> Iterator[None]:
    """Turns whatever libraries raise for a broken file into an InputsError."""
    try:
        yield
    except Exception as error:  # of zipfile, zlib, tokenize, NumPy; of memory that a claimed shape exceeds
        if "object array" in str(error).lower():
            what = "it holds Python objects (pickled data), which are not loaded because they can run code"
            hint = "save plain arrays: np.savez(file, **{name: np.asarray(value)})"
            raise InputsError(what, where=where, hint=hint) from error
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputsError(f"it cannot be read: {what}", where=where, hint=hint) from error
