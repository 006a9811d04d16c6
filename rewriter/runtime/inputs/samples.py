"""Feeds for a model: read one at a time, any number of times, and checked against its inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from rewriter.base.errors import InputsError, did_you_mean
from rewriter.base.text import article
from rewriter.ir.model import Array, Port, Signature
from rewriter.runtime.engines.tensor_files import Shape, Span, spans_of, values_of

NO_NUMBERS = (0, TensorProto.STRING)
"""Element types that cannot be fed: of sequences, maps and optionals, and strings."""

SHAPE_TYPES = (TensorProto.INT32, TensorProto.INT64)
"""Element types of inputs that may be shapes or trip counts."""


@dataclass(frozen=True)
class Room:
    """The sizes that a model takes along its dynamic axes."""

    # the smallest shapes that it runs with, by input; {} if they are not known
    least: Mapping[str, Shape] = field(default_factory=dict)
    # axes that cannot be longer than in the sample, as pairs of input and axis
    rigid: frozenset[tuple[str, int]] = frozenset()
    # axes that are one shorter than twice the sample where the others are doubled
    one_less: frozenset[tuple[str, int]] = frozenset()

    def profile(self, port: Port, span: Span) -> Span:
        """The profile that is proposed: from the smallest shape to twice the samples' largest."""
        low, usual, high = span
        free = [port.shape is None or not isinstance(port.shape[axis], int) for axis in range(len(usual))]
        if port.name in self.least:
            low = self.least[port.name]
        elif len(low) > 1 and free[0]:
            low = (min(1, low[0]), *low[1:])
        longer = [
            varies and size > 1 and (port.name, axis) not in self.rigid
            for axis, (size, varies) in enumerate(zip(high, free, strict=True))
        ]
        largest = (size << more for size, more in zip(high, longer, strict=True))
        return low, usual, tuple(s - ((port.name, axis) in self.one_less) for axis, s in enumerate(largest))


@dataclass(frozen=True)
class Unshown:
    """The original's outputs by which no error shows, as each sample's has no element, or only zeros."""

    empty: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    all_outputs: bool = False  # True if it has no others


@dataclass(frozen=True)
class DataSource:
    """Where samples came from."""

    text: str
    samples: int
    real: bool  # False for generated samples
    path: str = ""  # the file or folder that the user named; "" for objects in memory and generated samples
    preprocess: str = ""  # how photographs became samples, as `image_preprocess`; "" for other data
    # smallest, typical and largest shape by input, where known: builds with dynamic shapes use them
    spans: Mapping[str, Span] = field(default_factory=dict)
    # the same of the values of small integer inputs, which may be shapes themselves
    values: Mapping[str, Span] = field(default_factory=dict)
    room: Room = field(default_factory=Room)
    # where the samples came from, file by file, in the order in which results are judged by them
    names: tuple[str, ...] = ()
    # sizes of random samples that nobody gave, by the name of the dimension or the axis
    drawn: Mapping[str, int] = field(default_factory=dict)
    # options that draw the same random samples again, as text by key
    options: Mapping[str, str] = field(default_factory=dict)
    profiled: frozenset[str] = frozenset()  # inputs whose span the user gave, or a recording
    # median steps of recorded states, as `Range.step`, by the output that becomes an input again
    steps: Mapping[str, float] = field(default_factory=dict)
    recorded: bool = False  # True if they are of a recording, which `path` finds again
    # as `Deployment.beyond`: results are compared at the shapes of the samples
    beyond: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    constant: bool = False  # True if every input with several elements holds one value in each sample
    repeated: bool = False  # True if there are several samples, all of them the same
    unshown: Unshown = field(default_factory=Unshown)

    @property
    def all_spans(self) -> dict[str, Span]:
        """Spans of all inputs: of values, for inputs that are shapes."""
        return {**self.values, **self.spans}

    @property
    def doubt(self) -> str:
        """Why results on these samples prove nothing about others: what they are; "" if they do."""
        if not self.real:
            return "random data"
        if self.constant:
            return "constant samples"
        if self.unshown.all_outputs:
            return f"samples with {'outputs of zeros' if self.unshown.zeros else 'empty outputs'}"
        return f"one sample, {self.samples} times" if self.repeated else ""


Read = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Sample:
    """The origin of one sample, for messages, and a function that reads it."""

    where: str
    read: Read


class Samples:
    """Samples that fit the model's inputs: re-iterable, with a length, one in memory at a time.

    The constructor reads and checks every sample once, so that wrong data is an error before any work.

    Raises:
        InputsError: a sample does not fit; the message names the sample, the input, and what to change.
    """

    def __init__(
        self,
        signature: Signature,
        samples: Sequence[Sample],
        text: str,  # the origin of the samples, in one line
        *,
        real: bool,
        notes: Sequence[str] = (),  # sentences about what was done to the data for it to fit
        # path, preprocess: as in `DataSource`
        path: str = "",
        preprocess: str = "",
    ) -> None:
        self.notes = tuple(notes)
        self._ports = {port.name: port for port in signature.inputs}
        self._samples = samples
        names = tuple(sample.where for sample in samples)
        varied, digests = [False], set[bytes]()

        def read() -> Iterator[dict[str, Array]]:
            for index, sample in enumerate(samples):
                feeds, digest = self.feeds(index), hashlib.blake2b(digest_size=16)
                for name, array in feeds.items():
                    _require_finite(array, name, index, sample.where)
                    digest.update(f"{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
                digests.add(digest.digest())
                wide = [array for array in feeds.values() if array.size > 1]
                varied[0] |= not wide or any((array != array.flat[0]).any() for array in wide)
                yield feeds

        spans = spans_of(read())
        shapes = [port.shape or () for port in signature.inputs if port.dtype in SHAPE_TYPES]
        values = values_of(self) if any(len(shape) <= 1 for shape in shapes) else {}
        source = DataSource(text, len(samples), real, path, preprocess, spans, values, names=names)
        repeated = len(samples) > 1 and len(digests) == 1
        self.source = replace(source, constant=not varied[0], repeated=repeated)

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return map(self.feeds, range(len(self)))

    def feeds(self, index: int) -> dict[str, Array]:
        sample = self._samples[index]
        return checked(sample.read(), self._ports, sample.where)

    def judged(self, judged: Sequence[int], kept: int | None = None) -> Samples:
        """The samples that a search for a user's goal may fit a plan to: all but `kept`, if there are others.

        The source of the result reports by how many samples (`judged`, by index) results are judged.
        """
        if len(self) < 2:
            return self
        fitting = copy(self)
        fitting._samples = tuple(sample for index, sample in enumerate(self._samples) if index != kept)
        number = "each" if len(judged) == len(self) else f"{len(judged)} of {len(self)}"
        text = f"{self.source.text}; judged on {number}"
        text += "" if kept is None else f", {self._samples[kept].where} kept from the first search"
        names = tuple(self._samples[index].where for index in judged)
        fitting.source = replace(self.source, text=text, names=names)
        return fitting


def checked(feeds: Any, ports: Mapping[str, Port], where: str) -> dict[str, Array]:
    """The feeds as arrays in the order of the inputs; an InputsError if names, types or shapes do not fit."""
    if not isinstance(feeds, Mapping):
        hint = f"give one dict for each sample, with an array for each input: {_listed(ports)}"
        raise InputsError(f"a sample is {article(type(feeds).__name__)}, not a dict", where=where, hint=hint)
    for name in feeds:
        if name not in ports:
            raise no_such_input(str(name), ports, where=where)
    bound: dict[str, tuple[int, str]] = {}
    arrays = {}
    for name, port in ports.items():
        if name not in feeds:
            what = f"there is no array for input {name!r}"
            raise InputsError(what, where=where, hint="every sample needs " + _listed(ports))
        which = f"{where}: input {name!r}"
        array = _as_array(feeds[name], port, which)
        check_shape(array.shape, port, bound, where=which)
        arrays[name] = _typed(array, port, which)
    return arrays


def no_such_input(name: str, ports: Mapping[str, Port], **where: Any) -> InputsError:
    """The error, with `where` or `option` in `place`, for a name that no input has; and the closest name."""
    text = "; ".join(filter(None, (f"the model has no input {name!r}", did_you_mean(name, ports))))
    return InputsError(text, hint="its inputs are " + _listed(ports), **where)


def _listed(ports: Mapping[str, Port]) -> str:
    types = {
        name: TensorProto.DataType.Name(port.dtype).lower()
        if port.dtype in NO_NUMBERS
        else np.dtype(helper.tensor_dtype_to_np_dtype(port.dtype))
        for name, port in ports.items()
    }
    return ", ".join(f"{name} ({dtype})" for name, dtype in types.items()) or "(none)"


def require_numbers(port: Port, where: str) -> None:
    """Raises an InputsError for an input of strings, or one that is no tensor."""
    if port.dtype in NO_NUMBERS:
        what = f"it is {'strings' if port.dtype else 'a sequence, map or optional'}, which TensorRT lacks"
        raise InputsError(what, where=where, hint="export the model without this input")


def _as_array(value: Any, port: Port, where: str) -> Array:
    require_numbers(port, where)
    try:
        return np.asarray(value)
    except ValueError as error:
        what = "it is a list whose parts differ in shape"
        hint = "pad the parts to one length, or give one sample for each of them"
        raise InputsError(what, where=where, hint=hint) from error


def _typed(array: Array, port: Port, where: str) -> Array:
    """The array in the port's element type; the byte order is converted, and float64 is cast."""
    wanted = np.dtype(helper.tensor_dtype_to_np_dtype(port.dtype))
    dtype = array.dtype
    nameless = dtype.kind == "V" and dtype.names is None and dtype != wanted
    if nameless and wanted.isbuiltin == 2 and dtype.itemsize == wanted.itemsize:
        return array.view(wanted)  # npy files keep the bits of ml_dtypes types, not their names
    if dtype.newbyteorder("=") == wanted or is_narrowed(dtype, port):
        return array.astype(wanted, copy=False)
    what = "objects (pickled data)" if dtype.kind == "O" else str(dtype)
    hint = f"convert it: array.astype({'np' if wanted.isbuiltin == 1 else 'ml_dtypes'}.{wanted})"
    raise InputsError(f"the model wants {wanted}, the data is {what}", where=where, hint=hint)


def is_narrowed(dtype: Any, port: Port) -> bool:
    """True for float64, NumPy's default, where the input is a smaller float: doubles are never intended."""
    if port.dtype in NO_NUMBERS:
        return False
    wanted = np.dtype(helper.tensor_dtype_to_np_dtype(port.dtype))
    small = wanted.kind == "f" or wanted.name == "bfloat16"
    return isinstance(dtype, np.dtype) and dtype == np.float64 and small and wanted.itemsize < 8


def _require_finite(array: Array, name: str, number: int, where: str) -> None:
    """Checks that there is no NaN or infinity; masks that are added to scores may hold -inf."""
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        return
    wide = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    bad = np.isnan(wide) | (np.isinf(wide) if "mask" not in name.lower() else np.isposinf(wide))
    if not bad.any():
        return
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    of = f", one of {np.count_nonzero(bad)} such elements of {bad.size}" if bad.sum() > 1 else ""
    what = f"element {list(at)} of sample {number} is {float(wide[at])}{of}"
    hint = "no result can be judged by it: check the program that wrote the data, and leave the sample out"
    raise InputsError(what, where=f"{where}: input {name!r}", hint=hint)


def check_shape(shape: tuple[int, ...], port: Port, bound: dict[str, tuple[int, str]], **where: Any) -> None:
    """Checks a shape against the declared one, and against the named dimensions so far, which are noted.

    Raises:
        InputsError: another rank, another fixed size, or two sizes of one name.
    """
    if port.shape is None:
        return
    declared = "x".join("?" if size is None else str(size) for size in port.shape) or "a scalar"
    hint = f"its shape in the model is {declared}"
    if len(shape) != len(port.shape):
        what = f"it must have {len(port.shape)} axes, not {len(shape)} {list(shape)}"
        raise InputsError(what, hint=hint, **where)
    for axis, (size, dim) in enumerate(zip(shape, port.shape, strict=True)):
        if isinstance(dim, int) and size != dim:
            raise InputsError(f"axis {axis} must be {dim}, not {size} {list(shape)}", hint=hint, **where)
        if isinstance(dim, str):
            first, owner = bound.setdefault(dim, (size, port.name))
            if first != size:
                what = f"axis {axis} ({dim}) is {size}, but {dim} is {first} in {owner!r}"
                hint = f"axes called {dim} have one size in a sample"
                raise InputsError(what, hint=hint, **where)
