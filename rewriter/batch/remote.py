"""One task of a Ray cluster: unpacks files, runs the child process, packs its result."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rewriter import __version__
from rewriter.batch.child import Child, fix_order, verify_order
from rewriter.batch.entry import Outcome
from rewriter.batch.packing import Packed, pack, unpack


@dataclass(frozen=True)
class Task:
    """A model to fix or to verify, without its files.

    Attributes:
        model: Its name in its folder.
        result: The name of its result.
        named: Options that name files and folders, with their last parts in the order of the contents.
        version: Of the rewriter that sent it.
    """

    model: str
    result: str
    options: Mapping[str, Any]
    named: Sequence[tuple[str, str]]
    limit_s: float
    version: str = __version__


def run(task: Task, model: Packed, fixed: Packed | None, *files: Packed) -> tuple[Outcome, Packed]:
    """Fixes a model, or verifies its result `fixed`; returns the outcome with the files that were made.

    Args:
        files: The contents of `task.named`.
    """
    if task.version != __version__:
        text = (
            f"this worker has rewriter {__version__}, and {task.version} sent the model: install one version"
        )
        return Outcome("refused", text), {}
    with tempfile.TemporaryDirectory(prefix="rewriter-batch-") as name:
        folder = Path(name)
        for part in ("result", "scratch"):
            (folder / part).mkdir()
        unpack(model, folder / "model")
        options = _relocated(task, files, folder)
        source, result = folder / "model" / task.model, folder / "result" / task.result
        if fixed is None:
            order = fix_order(source, result, options, task.limit_s)
        else:
            unpack(fixed, folder / "result")
            order = verify_order(source, result, options, task.limit_s)
        outcome = Child(order, folder / "scratch").wait()
        made = {} if fixed is not None else _made(folder / "result")
        return replace(outcome, text=outcome.text.replace(f"{folder}/", "")), made


def _relocated(task: Task, files: Sequence[Packed], folder: Path) -> dict[str, Any]:
    """The options with paths of this machine."""
    options = dict(task.options)
    for number, ((name, last), packed) in enumerate(zip(task.named, files, strict=True)):
        place = folder / f"file-{number}"
        unpack(packed, place)
        if name in task.options:
            options[name] = [*options[name], place / last]
        else:
            options[name] = place / last
    return options


def _made(folder: Path) -> Packed:
    found: dict[str, bytes] = {}
    for file in sorted(folder.iterdir()):
        found |= pack(file)
    return found
