"""Corrupted models and data from a seed, each scanned: it succeeds, or ends in an error that says what to do.

    cd tests && python -m corruption 5000 7         # more of them than the tests do, from another seed
    cd tests && python -m corruption 1 7 1234       # number 1234 of that seed again

They run in child processes, so that a crash of native code is a finding with a number.
"""

import io
import json
import resource
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import numpy_helper
from paths import ROOT
from worker_pool import Crash, over

from rewriter.api import fix
from rewriter.base import sandbox
from rewriter.base.errors import PassError, RewriterError
from rewriter.jobs.scan import scan

FIXED = 10
"""Of the files that can be scanned, one of ten is also fixed, which costs six times as much."""

PROCESSES = 2
CASE_SECONDS = 60.0  # a scan needs about 0.1 s, and a child some seconds to start

ADDRESS_BYTES = 16 * 2**30
"""Limit on a child's addresses: a model that asks for more than that gets an error, and not this machine."""

TEXTS = (ROOT / "tests/model/sound.txt").read_text(encoding="utf-8").split("\n\n")
"""Models to corrupt; constants without values get positive ones."""


@dataclass
class Case:
    """A file and its neighbours in a folder, as they are before and after corruption."""

    files: dict[str, bytes]  # contents by name; `m.onnx` is the model, and `x.npz` its data, if it is there
    done: list[str] = field(default_factory=list)  # what was corrupted


@dataclass(frozen=True)
class Outcome:
    """How the scan of one case ended: `ok`, the class of an error of ours, or `DEFECT` with a traceback."""

    number: int
    kind: str
    text: str
    done: tuple[str, ...]

    @property
    def bad(self) -> bool:
        return self.kind == "DEFECT"


@cache
def originals() -> list[dict[str, bytes]]:
    """The sound files: each model with its data inside, with external data, and with a sample."""
    found = []
    for text in TEXTS:
        proto = _with_weights(text)
        found.append({"m.onnx": proto.SerializeToString()})
        found.append(_externalised(proto))
    (found[0])["x.npz"] = _npz(x=np.ones((3, 8), np.float32))
    return found


def _with_weights(text: str) -> onnx.ModelProto:
    """The model; declared tensors that have no value get a positive one as raw data."""
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for value in proto.graph.value_info:
        sizes = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
        weight = np.abs(rng.standard_normal(sizes)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weight, value.name))
    del proto.graph.value_info[:]
    return proto


def _externalised(proto: onnx.ModelProto) -> dict[str, bytes]:
    copy, data = onnx.ModelProto(), b""
    copy.CopyFrom(proto)
    for tensor in copy.graph.initializer:
        if not tensor.HasField("raw_data"):
            continue
        for key, value in (("location", "w.bin"), ("offset", len(data)), ("length", len(tensor.raw_data))):
            tensor.external_data.add(key=key, value=str(value))
        data += tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
    return {"m.onnx": copy.SerializeToString(), "w.bin": data}


def _npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


# -- corruption ------------------------------------------------------------------------------
def corrupted(sound: Sequence[dict[str, bytes]], seed: int, number: int) -> Case:
    """The case of a number: one of the sound ones, corrupted one to three times."""
    rng = np.random.default_rng([seed, number])
    case = Case(dict(_pick(rng, sound)))
    for _ in range(int(rng.integers(1, 4))):
        _pick(rng, CORRUPTIONS)(case, rng)
    return case


def _pick(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _spoil(case: Case, rng: np.random.Generator) -> None:
    """Flips a bit, repeats, removes or overwrites a piece of a file, or cuts off what follows it."""
    name = _pick(rng, list(case.files))
    content = case.files[name]
    start, end = sorted(int(p) for p in rng.integers(0, len(content) + 1, 2))
    end = min(end, start + 64)
    piece, rest = content[start:end], content[end:]
    kinds = {
        "flipped": bytes(byte ^ 1 << int(rng.integers(8)) for byte in piece[:1]) + piece[1:] + rest,
        "repeated": piece * 2 + rest,
        "removed": rest,
        "zeroed": bytes(len(piece)) + rest,
        "filled": b"\xff" * len(piece) + rest,
        "cut off": b"",
    }
    kind = _pick(rng, list(kinds))
    case.files[name] = content[:start] + kinds[kind]
    case.done.append(f"{name}: bytes {start} to {end} {kind}")


def _lose(case: Case, rng: np.random.Generator) -> None:
    """Removes the external data, if there are any."""
    if case.files.pop("w.bin", None) is not None:
        case.done.append("w.bin: removed")


def _change_field(case: Case, rng: np.random.Generator) -> None:
    """Changes one field anywhere in the protobuf message."""
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(case.files["m.onnx"])
        fields = list(_fields(proto, ""))
        place, owner, descriptor = _pick(rng, fields)
        _replace(owner, descriptor, [o for _, o, d in fields if d is descriptor], rng)
        case.files["m.onnx"] = proto.SerializeToString()
    except (IndexError, ValueError, TypeError) as error:  # corrupted before, or not possible here
        case.done.append(f"no field changed: {type(error).__name__}")
        return
    except Exception as error:
        if type(error).__name__ not in ("DecodeError", "EncodeError"):
            raise
        return
    case.done.append(f"{place} changed")


CORRUPTIONS: tuple[Callable[[Case, np.random.Generator], None], ...] = (
    *[_spoil] * 3, _lose, *[_change_field] * 8,
)  # fmt: skip
"""Changes of fields get further than others, which protobuf notices."""

NUMBERS = (0, 1, -1, 2, 3, 7, 16, 77, 255, 2**15, 2**31 - 1, -(2**31), 2**31, 2**40, 2**62, -(2**63))
FLOATS = (0.0, -1.0, 1e-30, 1e30, float("inf"), float("nan"))
WORDS = ("", "x", "y", "w", "a", "no such", "Add", "Cast", "Loop", "Softmax", "ai.onnx", "com.microsoft",
         "local", "../x", "w.bin", "-1", "99999999999999999999", "\x1b[31m", "\0", "é",
         "n" * 5000)  # fmt: skip


def _fields(message: Message, place: str) -> Iterator[tuple[str, Message, FieldDescriptor]]:
    """Every field that is set, with the message that owns it."""
    for descriptor, value in message.ListFields():
        here = f"{place}.{descriptor.name}".lstrip(".")
        yield here, message, descriptor
        if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
            for index, item in enumerate(value if descriptor.is_repeated else [value]):
                yield from _fields(item, f"{here}[{index}]" if descriptor.is_repeated else here)


def _replace(
    owner: Message, descriptor: FieldDescriptor, others: Sequence[Message], rng: np.random.Generator
) -> None:
    name = descriptor.name
    if rng.random() < 0.15:
        owner.ClearField(name)
        return
    if descriptor.type == FieldDescriptor.TYPE_MESSAGE:
        other = getattr(_pick(rng, others), name)
        if not descriptor.is_repeated:
            getattr(owner, name).CopyFrom(type(other).FromString(other.SerializeToString()))
            return
        items = [type(item).FromString(item.SerializeToString()) for item in getattr(owner, name)]
        items = _rearranged(items, [type(i).FromString(i.SerializeToString()) for i in other], rng)
        owner.ClearField(name)
        getattr(owner, name).extend(items)
    elif descriptor.is_repeated:
        items = _rearranged(list(getattr(owner, name)), [_scalar(descriptor, b"", rng)], rng)
        owner.ClearField(name)
        getattr(owner, name).extend(items)
    else:
        setattr(owner, name, _scalar(descriptor, getattr(owner, name), rng))


def _rearranged(items: list[Any], others: list[Any], rng: np.random.Generator) -> list[Any]:
    """The items without one, with one twice, in another order, or with one of the others."""
    kind, place = int(rng.integers(4)), int(rng.integers(len(items)))
    if kind == 0:
        return items[:place] + items[place + 1 :]
    if kind == 1:
        return [*items, items[place]]
    if kind == 2:
        return items[::-1]
    return [*items[:place], _pick(rng, others), *items[place + 1 :]]


def _scalar(descriptor: FieldDescriptor, old: Any, rng: np.random.Generator) -> Any:
    kinds = FieldDescriptor
    if descriptor.type == kinds.TYPE_ENUM:
        assert descriptor.enum_type is not None
        return _pick(rng, [value.number for value in descriptor.enum_type.values])
    if descriptor.type == kinds.TYPE_STRING:
        return _pick(rng, WORDS)
    if descriptor.type == kinds.TYPE_BYTES:
        return _pick(rng, (b"", b"\xff\xfe", bytes(old)[:-1], bytes(old) * 2, bytes(rng.bytes(len(old)))))
    if descriptor.type in (kinds.TYPE_FLOAT, kinds.TYPE_DOUBLE):
        return _pick(rng, FLOATS)
    narrow = descriptor.type in (kinds.TYPE_INT32, kinds.TYPE_UINT32)
    least = 0 if descriptor.type in (kinds.TYPE_UINT32, kinds.TYPE_UINT64) else -(2**31)
    return _pick(rng, [n for n in NUMBERS if not narrow or least <= n < 2**31])


# -- trials ----------------------------------------------------------------------------------
def trial(case: Case, number: int, folder: Path) -> Outcome:
    """Writes the files of a case to an empty folder and scans the model."""
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    inputs = folder / "x.npz" if "x.npz" in case.files else None
    done = tuple(case.done)
    try:
        scan(folder / "m.onnx", inputs=inputs)
        if number % FIXED == 0:
            fix(folder / "m.onnx", None, inputs=inputs, verify=False)
    except RewriterError as error:
        if isinstance(error, PassError) or not error.hint:
            return Outcome(number, "DEFECT", f"{type(error).__name__} without help: {error}", done)
        return Outcome(number, type(error).__name__, str(error), done)
    except Exception:
        return Outcome(number, "DEFECT", traceback.format_exc(), done)
    return Outcome(number, "ok", "", done)


def tried(work: tuple[int, int]) -> Outcome:
    """Tries the case of a seed and a number; in a child, whose addresses are limited."""
    seed, number = work
    sandbox.inside = False  # crashes of native code are errors that users meet, too
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    with tempfile.TemporaryDirectory(prefix="corruption-", ignore_cleanup_errors=True) as folder:
        return trial(corrupted(originals(), seed, number), number, Path(folder))


def run(count: int, seed: int) -> list[Outcome]:
    """Tries `count` cases in child processes; a case that ends its child is a defect."""
    work = [(seed, number) for number in range(count)]
    outcomes = []
    for (_, number), answer in over(work, tried, children=PROCESSES, timeout_s=CASE_SECONDS):
        if isinstance(answer, Crash):
            done = tuple(corrupted(originals(), seed, number).done)
            answer = Outcome(number, "DEFECT", answer.how, done)
        outcomes.append(answer)
    return outcomes


def report(outcomes: Sequence[Outcome], seed: int) -> str:
    """Counts by kind, and every defect with what was corrupted."""
    counts = Counter(outcome.kind for outcome in outcomes)
    lines = [f"{len(outcomes)} corrupted: " + json.dumps(dict(counts.most_common()))]
    for outcome in outcomes:
        if outcome.bad:
            lines += [f"{seed} {outcome.number}: {'; '.join(outcome.done)}", outcome.text]
    return "\n".join(lines)


def main(count: int, seed: int, *only: int) -> int:
    """Prints what became of `count` cases, or of the one number whose files stay."""
    folder = tempfile.mkdtemp(prefix="corruption-") if only else ""
    cases = ((number, corrupted(originals(), seed, number)) for number in only)
    outcomes = [trial(case, number, Path(folder)) for number, case in cases] or run(count, seed)
    sys.stdout.write(f"{report(outcomes, seed)}\n{folder}\n")
    return int(any(outcome.bad for outcome in outcomes))


if __name__ == "__main__":
    import corruption  # children import its functions by this name

    sys.exit(corruption.main(*map(int, sys.argv[1:])))
