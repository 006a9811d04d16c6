"""A run of a script as its models show it: their files, calls and samples, and how they feed each other.

A recording is a folder: `record.json`, and for each file a folder of samples, one `.npz` for each kept call.
This module loads in the script's own environment, which may lack all but NumPy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rewriter.ir.model import Array

RECORD = "record.json"

STOPPED = "stopped"  # file beside the folders of a script's processes, once one of them had enough calls

Shape = tuple[int, ...]
Span = tuple[Shape, Shape, Shape]  # smallest, usual (TensorRT's optimum) and largest shape


def span_of(shapes: Collection[Shape]) -> Span:
    """The smallest and the largest size of each axis, and the middle shape by size."""
    low, high = (tuple(map(pick, zip(*shapes, strict=False))) for pick in (min, max))
    return low, sorted(shapes, key=math.prod)[len(shapes) // 2], high


@dataclass(frozen=True)
class RecordedFile:
    """A model that the script called."""

    name: str  # its path relative to the folder that all files share, without `.onnx`: `unet/model`
    model: str  # absolute path; relative to the recording for a session that was made from bytes
    sha256: str  # of the file, without its external data
    samples: str  # the folder of its samples, relative to the recording
    calls: int  # how often the script called it; fewer are kept as samples
    shapes: Mapping[str, Span]  # of each input in all calls


@dataclass(frozen=True)
class Link:
    """An output that became an input of a later call, of the same file or of another."""

    # producer, consumer: names of files
    producer: str
    output: str
    consumer: str
    input: str
    axis: int | None  # the axis on which the input grows from call to call; None if it keeps its shape
    calls: int  # in how many calls the input was the output


@dataclass(frozen=True)
class State:
    """A link of a file to itself, by which a value lives on from call to call."""

    file: str
    input: str
    output: str
    # its median step, weighted by the way, in FP16's last places; None if it grows, or never moved
    step: float | None


@dataclass(frozen=True)
class Recording:
    """One run of a script."""

    command: tuple[str, ...]  # the command line; () where Python code recorded itself
    files: tuple[RecordedFile, ...]
    # file and number of the call (from 0 for each file), in the order of the script
    calls: tuple[tuple[str, int], ...]
    links: tuple[Link, ...]
    states: tuple[State, ...]
    printed: str  # on standard output
    exit_code: int
    versions: Mapping[str, str]  # of Python and of the libraries that ran the models, by name
    notes: tuple[str, ...] = ()  # sentences about what could not be recorded

    @classmethod
    def read(cls, folder: Path) -> Recording:
        """Reads `record.json` of a folder; a UsageError if there is none, or if it is no recording."""
        from rewriter.ir.reading import read_json

        recording: Recording = read_json(folder / RECORD, cls, "record the script again: `rewriter record`")
        return recording

    def write(self, folder: Path) -> None:
        """Writes `record.json` into a folder that exists."""
        (folder / RECORD).write_text(json.dumps(vars(self), default=vars), encoding="utf-8")

    @classmethod
    def of_samples(cls, folder: Path) -> tuple[Recording, RecordedFile] | None:
        """The recording, and its file, whose samples a folder holds; None if it is part of no recording."""
        folder = folder.absolute()
        for parent in folder.parents:
            if (parent / RECORD).is_file():
                recording = cls.read(parent)
                files = (file for file in recording.files if parent / file.samples == folder)
                return next(((recording, file) for file in files), None)
        return None

    def steps(self, name: str) -> dict[str, float]:
        """The steps of a file's states, by output."""
        own = (state for state in self.states if state.file == name)
        return {state.output: state.step for state in own if state.step is not None}

    def file(self, name: str) -> RecordedFile:
        return next(file for file in self.files if file.name == name)


LAST_PLACE = 2.0**-10.5  # FP16's last place relative to a number, the geometric mean over a binade

LEAST_NORMAL = 2.0**-14  # smaller numbers of FP16 have its last place

AT_REST = 2.0**-7
"""Least median step, in last places: a state that stays where it began moves by FP32's rounding, 2^-13."""

EDGES: Array = np.concatenate([2.0 ** np.arange(-8, 12.5, 0.5), [1e30]])
"""Limits of steps in last places."""

SAMPLED = 4096  # elements of a state, or of a sequence of states, that are looked at


def sampled(array: Array) -> Array:
    """At most `SAMPLED` elements of an array, flat; the stride is odd, to meet every unit of 2^k."""
    flat = array.reshape(-1)
    return flat if flat.size <= SAMPLED else flat[:: flat.size // (2 * SAMPLED) * 2 + 1]


def ways(before: Array, after: Array) -> Array:
    """The way between two states in steps below each of `EDGES`, from elements of both, flat."""
    moves = np.abs(after - before)
    unit = np.maximum(np.maximum(np.abs(before), np.abs(after)), LEAST_NORMAL) * LAST_PLACE
    edges = np.minimum(np.searchsorted(EDGES, moves / unit, "right"), len(EDGES) - 1)
    return np.bincount(edges, moves, len(EDGES)).cumsum()


def median_step(below: Sequence[float] | Array) -> float | None:
    """The median step, by the way in steps below each of `EDGES`; None if nothing moves, or without end."""
    total: Any = below[-1]
    step = float(np.interp(total / 2, below[:-1], EDGES[:-1])) if 0 < total < np.inf else 0.0
    return step if step >= AT_REST else None
