"""Records the calls of ONNX Runtime in one process: samples of each file, and the links between files.

A link is found by its content: an input that equals an earlier output, or whose new part does where it grew.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import threading
import time
import zipfile
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from rewriter.runtime.recording.interception import end_script, model_of
from rewriter.runtime.recording.record import (
    STOPPED,
    Link,
    RecordedFile,
    Recording,
    Shape,
    State,
    median_step,
    sampled,
    span_of,
    ways,
)

if TYPE_CHECKING:
    from rewriter.ir.model import Array

MOST_SAMPLES = 24  # samples of a file that are kept: `fix` runs each of them several times

WIDER = 1.1  # a call is one of the widest if the largest value of an input grows by this factor

REMEMBERED = 8
"""Calls of a file whose outputs may still become inputs: several streams may take turns."""

FOLLOWED = 256
"""Calls of which all are counted in the steps of states; of later ones every eighth is."""

DISTINCT = 4
"""Different values that show a link of arrays which may agree by chance, such as one integer."""

ALWAYS = 0.9  # share of the calls in which such a link is seen

FREE_S, SHARE, RESUMED = 0.3, 0.22, 0.18
"""CPU seconds, or share of the process's CPU time, after which the recorder rests; share to begin again."""

LIBRARIES = ("onnxruntime", "numpy", "torch", "transformers", "optimum", "diffusers")

Key = tuple[str, Shape, int]  # type, shape and hash of an array

Route = tuple[int, str, int, str]  # producer, output, consumer and input; files by number


class _File:
    """A model, and what its calls have shown of it so far."""

    def __init__(self, number: int, model: str, folder: Path) -> None:
        self.number, self.model, self.folder = number, model, folder
        self.calls = self.observed = 0
        self.samples: dict[int, bool] = {}  # by call; True for the widest
        self.shapes: dict[str, Counter[Shape]] = defaultdict(Counter)
        self.shape_before: dict[str, Shape] = {}
        self.peaks: dict[str, float] = {}
        self.last: tuple[int, dict[str, Array]] = 0, {}
        self.outputs: deque[tuple[int, list[Key]]] = deque()
        self.loops: dict[tuple[str, str], Any] = {}  # output and input: the ways between them
        self.axes: dict[str, int] = {}  # on which inputs grow


class Recorder:
    """A hook that records."""

    def __init__(
        self,
        folder: str,  # a folder for this process is made in it
        calls: int = 0,  # of all files together, after which recording ends; 0: all
        most_bytes: float = 2.0**32,  # of all samples together
        *,
        stop: bool = False,  # end the process after `calls`
    ) -> None:
        self.parent, self.most_calls, self.most_bytes, self.stop = Path(folder), calls, most_bytes, stop
        self._begin()

    def _begin(self) -> None:
        """Begins the recording of this process; a fork has a recording of its own."""
        self.pid = os.getpid()
        self.folder, self.bytes_left = self.parent / str(self.pid), self.most_bytes
        self.lock, self.own_s, self.rests, self.ended = threading.RLock(), 0.0, False, False
        self.files: dict[str, _File] = {}
        self.sessions: WeakKeyDictionary[Any, _File] = WeakKeyDictionary()
        self.calls: list[tuple[int, int]] = []  # file, and its call
        self.producers: dict[Key, tuple[int, int, tuple[str, ...]]] = {}  # file, call, outputs
        self.links: Counter[Route] = Counter()
        self.sure: set[Route] = set()
        self.alone: set[Route] = set()  # of outputs that no other one equalled
        self.doubtful: dict[Route, set[int]] = defaultdict(set)
        self.notes: dict[str, None] = {}

    def load(self, session: Any, model: Any) -> Any:
        if self.pid != os.getpid():
            self._begin()
        with self.lock:
            self._file(session, model)
        return model

    def call(
        self, session: Any, names: Sequence[str], feeds: dict[str, Any], run: Callable[[], Sequence[Any]]
    ) -> Sequence[Any]:
        outputs = run()
        if self.pid != os.getpid():
            self._begin()
        with self.lock:
            start = time.process_time()
            if not self.ended:
                file = self.sessions.get(session) or self._file(session, model_of(session))
                inputs = _arrays(feeds)
                for name in feeds.keys() - inputs.keys():
                    self.notes[f"{file.model}: input {name!r} holds no plain numbers: not recorded"] = None
                self._observe(file, inputs, _arrays(dict(zip(names, outputs, strict=False))))
            self.own_s += time.process_time() - start
            if self.most_calls and len(self.calls) >= self.most_calls:
                self.finish()
                if self.stop:
                    (self.parent / STOPPED).touch()
                    end_script(0)
        return outputs

    def finish(self) -> None:
        if os.getpid() != self.pid:  # a fork without calls
            return
        with self.lock:
            if not self.ended:
                self.ended = True
                self._write()

    def _write(self) -> None:
        if "onnxruntime_genai" in sys.modules:
            self.notes["onnxruntime-genai calls ONNX Runtime in C++: its calls were not recorded"] = None
        if self.calls or self.notes:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._recording().write(self.folder)

    def _file(self, session: Any, model: Any) -> _File:
        """The file of a session; the bytes of one that was made from bytes are written."""
        from_bytes = isinstance(model, (bytes, bytearray))
        key = hashlib.sha256(model).hexdigest() if from_bytes else str(Path(model).absolute())
        if key not in self.files:
            folder = self.folder / f".{len(self.files)}"
            folder.mkdir(parents=True, exist_ok=True)
            if from_bytes:
                (folder / "model.onnx").write_bytes(model)
            self.files[key] = _File(len(self.files), "" if from_bytes else key, folder)
        self.sessions[session] = self.files[key]
        return self.files[key]

    def _observe(self, file: _File, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
        number, file.calls = file.calls, file.calls + 1
        self.calls.append((file.number, number))
        for name, array in inputs.items():
            file.shapes[name][array.shape] += 1
        self.rests = self.own_s > max(FREE_S, (RESUMED if self.rests else SHARE) * time.process_time())
        power = number & file.calls == 0
        if power or (not self.rests and self._widens(file, inputs)):
            self._keep(file, number, inputs, widest=not power)
        if not self.rests:
            file.observed += 1
            file.last = number, {name: array.copy() for name, array in inputs.items()}
            self._find_links(file, inputs)
            if file.observed <= FOLLOWED or file.observed % 8 == 0:
                self._follow_states(file, inputs, outputs)
            self._remember(file, number, outputs)

    def _widens(self, file: _File, inputs: Mapping[str, Array]) -> bool:
        """True if an input has a larger value than in every call before."""
        wider = False
        for name, array in inputs.items():
            if array.dtype.kind == "f" and array.size:
                peak = float(max(array.max(), -array.min()))
                if peak > WIDER * file.peaks.get(name, 0.0):
                    file.peaks[name], wider = peak, True
        return wider

    def _keep(self, file: _File, number: int, inputs: Mapping[str, Array], *, widest: bool) -> None:
        """Writes the inputs of a call; an earlier one of the widest makes room."""
        size = sum(array.nbytes for array in inputs.values())
        if size > self.bytes_left:
            self.notes["later calls were not kept as samples: the limit on disk was reached"] = None
            return
        if len(file.samples) >= MOST_SAMPLES - 1:
            old = next((n for n, wide in file.samples.items() if wide), [*file.samples][2])
            del file.samples[old]
            self.bytes_left += _sample(file, old).stat().st_size
            _sample(file, old).unlink()
        try:
            with zipfile.ZipFile(_sample(file, number), "w") as archive:
                for name, array in inputs.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                        np.lib.format.write_array(stream, array, allow_pickle=False)
        except BaseException as error:
            _sample(file, number).unlink(missing_ok=True)
            if not isinstance(error, OSError):
                raise
            self.notes[f"later calls were not kept as samples: {error.strerror}"] = None
            self.bytes_left = 0.0  # the script goes on
        else:
            file.samples[number] = widest
            self.bytes_left -= size

    def _find_links(self, file: _File, inputs: Mapping[str, Array]) -> None:
        """Counts the inputs that equal an earlier output, or whose new part does."""
        for name, array in inputs.items() if self.producers else ():
            key, axis = _key(array), _grown(file.shape_before.get(name), array.shape)
            producer = self.producers.get(key)
            if producer is None and axis is not None:
                array = array[(slice(None),) * axis + (slice(file.shape_before[name][axis], None),)]
                if (producer := self.producers.get(key := _key(array))) is not None:
                    file.axes[name] = axis
            owner, _, outputs = producer or (0, 0, ())
            for output in outputs:
                route = owner, output, file.number, name
                self.links[route] += 1
                self.alone |= {route} if len(outputs) == 1 else set()
                if route not in self.sure and _tells(array):
                    self.sure.add(route)
                    if owner == file.number:
                        file.loops[output, name] = 0.0
                elif route not in self.sure:
                    self.doubtful[route].add(key[2])
        file.shape_before = {name: array.shape for name, array in inputs.items()}

    def _follow_states(self, file: _File, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Adds the moves of this call's states, and finds the axes on which they grow."""
        for output, name in file.loops:
            before, after = inputs.get(name), outputs.get(output)
            if before is None or after is None:
                continue
            if (axis := _grown(before.shape, after.shape)) is not None:
                file.axes[name] = axis
            elif before.shape == after.shape and after.dtype.kind == "f":
                a, b = (sampled(array).astype(np.float32, copy=False) for array in (before, after))
                file.loops[output, name] = file.loops[output, name] + ways(a, b)

    def _remember(self, file: _File, number: int, outputs: Mapping[str, Array]) -> None:
        """Remembers the outputs of a call, which may become inputs.

        A script may pass on any of several equal ones, such as a GRU's sequence of one step and its state.
        """
        keys, owner = [], (file.number, number)
        for name, array in outputs.items():
            key = _key(array)
            *producer, names = self.producers.get(key, (-1, -1, ()))
            if not array.size:
                continue
            if (*producer,) != owner:
                self.producers[key] = *owner, (name,)
                keys.append(key)
            elif _tells(array):  # zeros, which many outputs begin with, are one's
                self.producers[key] = *owner, (*names, name)
        file.outputs.append((number, keys))
        if len(file.outputs) > REMEMBERED:
            number, keys = file.outputs.popleft()
            for key in keys:
                if self.producers.get(key, ())[:2] == (file.number, number):
                    del self.producers[key]

    def _recording(self) -> Recording:
        files = [file for file in self.files.values() if file.calls]
        names = dict(zip((file.number for file in files), _names(files), strict=True))
        for file in files:
            if file.last[0] not in file.samples:
                self._keep(file, *file.last, widest=False)
        for file in sorted(files, key=lambda file: names[file.number]):  # `a` before `a/b`
            (self.folder / names[file.number]).parent.mkdir(parents=True, exist_ok=True)
            file.folder = file.folder.replace(self.folder / names[file.number])
        links = tuple(self._sure_links(names))
        own = {(link.output, link.input, link.producer, link.consumer) for link in links}
        return Recording(
            command=(),
            files=tuple(_recorded(file, names[file.number]) for file in files),
            calls=tuple((names[file], call) for file, call in self.calls),
            links=links,
            states=tuple(
                State(names[file.number], name, output, median_step(below) if np.ndim(below) else None)
                for file in files
                for (output, name), below in file.loops.items()
                if (output, name, names[file.number], names[file.number]) in own
            ),
            printed="",
            exit_code=0,
            versions={"python": platform.python_version()}
            | {name: _version(name) for name in LIBRARIES if name in sys.modules},
            notes=tuple(self.notes),
        )

    def _sure_links(self, names: Mapping[int, str]) -> Iterator[Link]:
        """The links that are no coincidence; of outputs equal in some calls, the one that fits all calls."""
        by_number = {file.number: file for file in self.files.values()}
        most = Counter[tuple[int, int, str]]()
        for (producer, _, consumer, name), calls in self.links.items():
            most[producer, consumer, name] = max(calls, most[producer, consumer, name])
        for route, calls in self.links.items():
            producer, output, consumer, name = route
            file = by_number[consumer]
            always = len(self.doubtful[route]) >= DISTINCT and calls >= ALWAYS * (file.observed - 1)
            first = route in self.alone or calls == most[producer, consumer, name]
            if first and (route in self.sure or always):
                yield Link(names[producer], output, names[consumer], name, file.axes.get(name), calls)


def _names(files: Sequence[_File]) -> Iterator[str]:
    """Paths relative to the folder that all share, without the suffix; numbers for models from bytes."""
    shared = os.path.commonpath([str(Path(file.model).parent) for file in files if file.model] or ["/"])
    for file in files:
        path = Path(file.model)
        yield path.relative_to(shared).with_suffix("").as_posix() if file.model else f"bytes-{file.number}"


def _version(name: str) -> str:
    """The version of a library, whose package may have another name, as onnxruntime-gpu has."""
    with suppress(PackageNotFoundError):
        return version(name)
    return str(getattr(sys.modules[name], "__version__", "unknown"))


def _recorded(file: _File, name: str) -> RecordedFile:
    model = Path(file.model or file.folder / "model.onnx")
    with model.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    spans = {name: span_of([*shapes.elements()]) for name, shapes in file.shapes.items()}
    return RecordedFile(name, file.model or f"{name}/model.onnx", digest, name, file.calls, spans)


def _arrays(values: Mapping[str, Any]) -> dict[str, Array]:
    arrays = {n: np.asarray(v) for n, v in values.items() if isinstance(v, np.ndarray) or _is_nested(v)}
    return {name: array for name, array in arrays.items() if not array.dtype.hasobject}


def _is_nested(value: Any) -> bool:
    """True for lists of numbers, which ONNX Runtime takes as an array; a list of arrays is a sequence."""
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, (int, float))


def _sample(file: _File, number: int) -> Path:
    return file.folder / f"{number:06d}.npz"


def _key(array: Array) -> Key:
    return array.dtype.str, array.shape, hash(sampled(array).tobytes())


def _tells(array: Array) -> bool:
    """True if an equal array is no coincidence: its elements differ, or it is a number of many digits."""
    flat = sampled(array)
    if flat.size == 1:
        return flat.dtype.kind == "f" and bool(flat[0] * 2**10 % 1 != 0)
    return (flat.dtype.kind == "f" or flat.size > DISTINCT) and bool((flat != flat[0]).any())


def _grown(before: Shape | None, after: Shape) -> int | None:
    """The one axis that is longer; None if there is none, or if more differs."""
    if before is None or len(before) != len(after):
        return None
    axes = [axis for axis, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    return axes[0] if len(axes) == 1 and before[axes[0]] < after[axes[0]] else None
