"""Scans or fixes committed .onnx files for pre-commit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.hooks.fixing import Unverified, copy_model, raw_path
from rewriter.ir.errors import OutputError, RewriterError
from rewriter.ir.graph import made_by
from rewriter.ir.model import data_files, load, save
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.pipeline.config import ResolvedOptions
from rewriter.pipeline.config import load as load_configuration
from rewriter.pipeline.options import Command

LFS = b"version https://git-lfs.github.com/spec/"
"""First line of a file that Git LFS has not fetched (Git LFS specification, v1)."""


@dataclass(frozen=True)
class FileOutcome:
    """Result for one file.

    Attributes:
        text: One line for the user.
        passed: False if the hook stops the commit: after an error, or if the file changed.
        error: Why the file could not be processed.
        detail: The ScanResult or FixResult.
    """

    path: Path
    text: str
    passed: bool = True
    error: RewriterError | None = None
    detail: Any = None


def process(path: Path, verb: Command, **options: Any) -> FileOutcome:
    """Scan a file, or fix it in place, once.

    A file that was fixed before, or whose fix fails verification, is unchanged.

    Args:
        verb: "scan" or "fix".
        options: Those of `rewriter scan` or `fix`; `build` is off by default, since TensorRT's build is slow.
    """
    try:
        if reason := _skipped(path):
            return FileOutcome(path, f"{path}: {reason}")
        resolved = load_configuration().resolve(**options)
        arguments = {**data_beside(path), **resolved.arguments(verb)}
        with resolved.errors_name_sources():
            return _scanned(path, resolved, arguments) if verb == "scan" else _fixed(path, arguments)
    except RewriterError as error:
        return FileOutcome(path, f"{path}: {error}", passed=False, error=error)


def _scanned(path: Path, resolved: ResolvedOptions, arguments: dict[str, Any]) -> FileOutcome:
    from rewriter.jobs.scan import scan
    from rewriter.report.scan import verdict_line

    result = scan(path, **arguments)
    passed = not result.reaches(resolved.values["fail_on"] or "error")
    return FileOutcome(path, verdict_line(result), passed, detail=result)


def _fixed(path: Path, arguments: dict[str, Any]) -> FileOutcome:
    from rewriter.jobs.fix.api import fix

    options: dict[str, Any] = {"build": False, **arguments, "strict": False}
    result = fix(path, None, **options)
    if result.verdict is not None and not result.verdict.passed:
        raise Unverified(
            "the fixed model failed its verification; the file is unchanged",
            where=str(path),
            hint=f"rewriter fix {path} --dry-run lists what failed; --tolerance allows more",
        )
    whole = None if result.model.external else result.proto.SerializeToString(deterministic=True)
    if whole == path.read_bytes():
        return FileOutcome(path, f"{path}: nothing to do", detail=result)
    kept = _keep_original(path)
    save(result.model, path)
    beside = f"; the model as it was is kept as {kept.name}" if kept else ""
    text = f"{path}: fixed; review it, and add it to the commit{beside}"
    return FileOutcome(path, text, passed=False, detail=result)


def _keep_original(path: Path) -> Path | None:
    """Copies a model that no commit holds, with its weights, to `net.raw.onnx`; returns the copy.

    Raises:
        OutputError: it cannot be written; the model is unchanged then.
    """
    if all(map(_is_in_head, (path, *data_files(path)))):
        return None
    raw = raw_path(path)
    if raw.exists():
        what = "it would be overwritten, and may be the only copy of another model"
        hint = f"move it away, or commit {path.name} first"
        raise OutputError(what, where=str(raw), hint=hint)
    copy_model(path, raw)
    return raw


def _is_in_head(path: Path) -> bool:
    """True if the last commit has the file as it is."""
    committed = _git(path.parent, "rev-parse", f"HEAD:./{path.name}")
    return bool(committed) and committed == _git(path.parent, "hash-object", "--", path.name)


def _git(folder: Path, *arguments: str) -> str:
    """What git prints; "" without git, or after an error."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def data_beside(path: Path) -> dict[str, Any]:
    """Samples beside the model, if there are any: `net.npz` beside `net.onnx`."""
    samples = path.with_suffix(".npz")
    return {"inputs": samples} if samples.is_file() else {}


def _skipped(path: Path) -> str:
    """Why a file is skipped, if it is.

    `rewriter` chose the types of a fixed model: a second run must change nothing, and a scan would report
    hazards that its Casts avoid.
    """
    if path.stem.endswith(".raw"):
        return "skipped: it is the original of a fixed model"
    if path.is_file():
        with path.open("rb") as stream:
            if stream.read(len(LFS)) == LFS:
                return "skipped: Git LFS has not fetched it"
    nodes = load(path).proto.graph.node
    return "already fixed" if any(made_by(node, (MixedPrecision.name,)) for node in nodes) else ""
