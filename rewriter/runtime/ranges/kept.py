"""Ranges of earlier runs, kept by the content of the model and its samples."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rewriter import __version__
from rewriter.ir.errors import OutputError
from rewriter.ir.model import Model, write_text
from rewriter.ir.model.facts import Facts
from rewriter.ir.plan import Range
from rewriter.runtime.engines.caches import user_cache
from rewriter.runtime.engines.onnxruntime_library import import_onnxruntime
from rewriter.runtime.inputs import Samples
from rewriter.runtime.ranges import Ranges, measure

VARIABLE = "REWRITER_REUSE_RANGES"
"""`rewriter batch` sets it to 1 for the processes that fix its models."""


def kept_or_measured(
    model: Model, samples: Samples, facts: Facts, *, progress: Callable[[int], None]
) -> Ranges:
    """The ranges that `measure` returns; read from the user's cache folder, if `VARIABLE` asks for that.

    A file that cannot be read or written costs a measurement, and is no error.

    Raises:
        ArithmeticRunError: as `measure`.
    """
    if os.environ.get(VARIABLE) != "1":
        return measure(model, samples, facts, progress=progress)
    file = _file(model, samples)
    found = _read(file) if file else None
    if found is None:
        found = measure(model, samples, facts, progress=progress)
        if file:
            with suppress(OutputError):
                write_text(_text(found), file)
    return found


def _file(model: Model, samples: Samples) -> Path | None:
    try:
        return user_cache("ranges", f"{_key(model, samples)}.json")
    except OSError:
        return None


def _key(model: Model, samples: Samples) -> str:
    """Hash of the model, its weights, the samples, and of the code that measures."""
    found = hashlib.sha256(f"{__version__} {import_onnxruntime().__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        found.update(source.read_bytes())
    found.update(model.proto.SerializeToString(deterministic=True))
    for arrays in (model.weights, *samples):
        for name, array in sorted(arrays.items()):
            found.update(f"{name} {array.dtype} {array.shape}".encode())
            found.update(array.tobytes())
    return found.hexdigest()


def _text(ranges: Ranges) -> str:
    """JSON with NaN and infinity, as Python reads them; its floats are exact."""
    rows = [[*key, r.low, r.high, r.mean_abs, r.finite] for key, r in ranges.items()]
    return json.dumps({"unsupported": ranges.unsupported, "samples": ranges.samples, "ranges": rows})


def _read(file: Path) -> Ranges | None:
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        rows = ((int(scope), str(name), values) for scope, name, *values in stored["ranges"])
        found = Ranges({(scope, name): Range(*values) for scope, name, values in rows})
        found.unsupported, found.samples = tuple(stored["unsupported"]), int(stored["samples"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found
