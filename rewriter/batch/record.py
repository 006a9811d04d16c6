"""The state file beside each result: what was done, so that the next run can skip it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rewriter.batch.entry import FINISHED, Entry, Outcome, Record
from rewriter.batch.key import digest
from rewriter.model import write_json

STATE_VERSION = 1
"""Of the state file; one of another version is not read, and its model is run again."""


def state_file(output: Path) -> Path:
    """The state file of a result: `net.onnx.batch.json` beside `net.onnx`."""
    return output.with_name(f"{output.name}.batch.json")


def save(record: Record, key: str) -> None:
    """Write the state of a finished model; the file is replaced as a whole.

    Raises:
        OutputError: it cannot be written.
    """
    folder = record.entry.output.parent
    content = {
        "state_version": STATE_VERSION,
        "key": key,
        "files": {name: digest(folder / name) for name in record.outcome.files},
        "outcome": asdict(record.outcome),
        "verdicts": {gpu: asdict(verdict) for gpu, verdict in record.verdicts.items()},
    }
    write_json(content, state_file(record.entry.output), "the state")


def finished(entry: Entry, key: str) -> Record | None:
    """The record of an earlier run with this key, if its files are unchanged; None otherwise."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        state = json.loads(state_file(entry.output).read_text(encoding="utf-8"))
        if (state["state_version"], state["key"]) != (STATE_VERSION, key):
            return None
        if any(digest(entry.output.parent / name) != is_ for name, is_ in state["files"].items()):
            return None
        verdicts = {gpu: _outcome(values) for gpu, values in state["verdicts"].items()}
        kept = {gpu: verdict for gpu, verdict in verdicts.items() if verdict.ending in FINISHED}
        return Record(entry, _outcome(state["outcome"]), skipped=True, verdicts=kept)
    return None


def _outcome(values: Mapping[str, Any]) -> Outcome:
    return Outcome(**{**values, "files": tuple(values["files"])})
