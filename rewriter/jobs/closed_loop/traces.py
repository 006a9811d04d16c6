"""The calls of a run of a script, and how far another run follows them."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from rewriter.ir.model import Array
from rewriter.jobs.closed_loop.result import OtherWord, OutputError, Stream
from rewriter.runtime.metrics.pairwise_error import Pair, is_float

MOST, FEW, MANY_CALLS = 2048, 64, 1000
"""Entries of an output that are kept of each call, evenly spread: a cache may have millions. Fewer from so
many calls on: a stream of hours has a million of them."""

Port = tuple[str, str]  # a file and one of its outputs


class Choice(NamedTuple):
    """The best entry of an output's last row, and its distance to the second."""

    best: int
    margin: float


@dataclass(frozen=True, eq=False)
class Call:
    """One call."""

    file: str
    key: bytes  # digest of its file, shapes and integers: calls with another one are another call
    words: Mapping[str, bytes]  # digests of outputs that are no floats, by name
    values: Mapping[str, Array]
    choices: Mapping[str, Choice]


@dataclass
class Trace:
    """All calls of one run in their order, and what it printed."""

    calls: list[Call] = field(default_factory=list)
    printed: str = ""

    def add(self, file: str, names: Sequence[str], feeds: Mapping[str, Any], outputs: Sequence[Any]) -> None:
        results = {n: o for n, o in zip(names, outputs, strict=True) if isinstance(o, np.ndarray)}
        floats = {name: value for name, value in results.items() if is_float(value)}
        words = {name: digest(value) for name, value in results.items() if name not in floats}
        most = MOST if len(self.calls) < MANY_CALLS else FEW
        values = {name: thinned(value, most) for name, value in floats.items()}
        choices = {name: choice(value) for name, value in floats.items() if value.size > 1 and value.ndim}
        self.calls.append(Call(file, key_of(file, feeds), words, values, choices))


def digest(array: Array) -> bytes:
    text = array.dtype.kind in "OU"
    data = repr(array.tolist()).encode() if text else np.ascontiguousarray(array).tobytes()
    return hashlib.blake2b(repr(array.shape).encode() + data, digest_size=16).digest()


def thinned(array: Array, most: int) -> Array:
    """At most so many entries as FP32."""
    flat = np.ravel(array)
    values: Array = flat[:: max(1, -(-flat.size // most))].astype(np.float32)
    return values


def choice(array: Array) -> Choice:
    row = np.ravel(array)[-array.shape[-1] :].astype(np.float64)
    best = int(row.argmax())
    others = np.delete(row, best)
    return Choice(best, float(row[best] - others.max()) if others.size else 0.0)


def key_of(file: str, feeds: Mapping[str, Any]) -> bytes:
    """A call without its floats, whose rounding may differ."""
    parts = [file.encode()]
    for name in sorted(feeds):
        value = np.asarray(feeds[name])
        parts += [name.encode(), repr(value.shape).encode() if is_float(value) else digest(value)]
    return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()


def compared(original: Trace, again: Trace | None, other: Trace, states: frozenset[Port]) -> Stream:
    """Compares a run with the original up to the first other word.

    Words that differ in `again`, the original's second run, are times or paths. `states`, which models read
    again, are reported, and not judged unless there are no other outputs.
    """
    if states.issuperset((call.file, name) for call in original.calls for name in call.values):
        states = frozenset()
    calls = zip(original.calls, other.calls, strict=False)
    pairs = list(takewhile(lambda pair: pair[0].key == pair[1].key, calls))
    usual = _sizes(original.calls)
    errors = []
    squares: dict[Port, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for ours, theirs in pairs:
        worst = math.nan
        for name, value in ours.values.items():
            port = ours.file, name
            pair = Pair(value, theirs.values.get(name, np.zeros(0, np.float32)))
            away, size = pair.squares
            entry = squares[port]
            entry[:] = entry[0] + away, entry[1] + size, max(entry[2], pair.max_abs)
            if port not in states:
                worst = max(math.sqrt(away) / max(math.sqrt(size), usual[port], 1e-30), worst)
        errors.append(worst)
    outputs = [
        OutputError(*port, float(np.sqrt(away / size)) if size else float(away > 0), largest, port in states)
        for port, (away, size, largest) in squares.items()
    ]
    printed = _printed(original.printed, (again or original).printed, other.printed)
    word = _other_word(original, other, len(pairs), states)
    return Stream(len(pairs), tuple(errors), tuple(outputs), word, *printed)


def _sizes(calls: Sequence[Call]) -> dict[Port, float]:
    """Median size of each output: silence is no reason for a large relative error."""
    sizes: dict[Port, list[float]] = defaultdict(list)
    for call in calls:
        for name, value in call.values.items():
            sizes[call.file, name].append(float(np.linalg.norm(value[np.isfinite(value)])))
    return {port: float(np.median(norms)) for port, norms in sizes.items()}


def _other_word(original: Trace, other: Trace, common: int, states: frozenset[Port]) -> OtherWord | None:
    """The call whose outputs led to the first call that is another one."""
    if common == len(original.calls) == len(other.calls):
        changed = (n for n in range(common) if original.calls[n].words != other.calls[n].words)
        index = next(changed, None)
        return None if index is None else OtherWord(index, original.calls[index].file)
    for index in range(common - 1, -1, -1):
        ours, theirs = original.calls[index], other.calls[index]
        for name, mine in ours.choices.items():
            if (ours.file, name) not in states and theirs.choices.get(name, mine).best != mine.best:
                margins = [c.choices[name].margin for c in original.calls if c.file == ours.file]
                return OtherWord(index, ours.file, name, mine.margin, float(np.median(margins)))
        if common - index > len({call.file for call in original.calls}):
            break  # a word leads to the next calls
    last = min(common, len(original.calls) - 1)
    return OtherWord(last, original.calls[last].file)


def _printed(ours: str, again: str, theirs: str) -> tuple[int, int]:
    """Number of printed words, and how many differ; times and paths are left out."""
    mine, second, other = ours.split(), again.split(), theirs.split()
    if len(mine) != len(second):
        return 0, 0
    if len(other) != len(mine):
        return len(mine), abs(len(other) - len(mine))
    steady = [index for index, word in enumerate(mine) if second[index] == word]
    return len(steady), sum(mine[index] != other[index] for index in steady)
