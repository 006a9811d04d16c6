"""Scans or fixes committed .onnx files for pre-commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.errors import RewriterError
from rewriter.graph import made_by
from rewriter.hazards.kinds import Severity
from rewriter.hooks.fixing import Unverified
from rewriter.model import Model, load, save
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.pipeline.config import load as load_configuration

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


def scan_file(path: Path, **options: Any) -> FileOutcome:
    """Scan a file for hazards; options and configuration are those of `rewriter scan`."""
    from rewriter.jobs.scan import scan
    from rewriter.report.scan import verdict_line

    try:
        reason = _skipped(path)
        if reason:
            return FileOutcome(path, f"{path}: {reason}")
        resolved = load_configuration().resolve(**options)
        with resolved.errors_name_sources():
            result = scan(path, **{**_data(path), **resolved.arguments("scan")})
        least: Severity = resolved.values["fail_on"] or "error"
    except RewriterError as error:
        return FileOutcome(path, f"{path}: {error}", passed=False, error=error)
    return FileOutcome(path, verdict_line(result).plain, not result.reaches(least), detail=result)


def fix_file(path: Path, **options: Any) -> FileOutcome:
    """Fix a file in place, once; a file that was fixed before, or whose fix fails verification, is unchanged.

    Args:
        options: Those of `rewriter fix`; `build` is off by default, since TensorRT's build is slow.
    """
    from rewriter.jobs.fix.api import fix

    try:
        reason = _skipped(path)
        if reason:
            return FileOutcome(path, f"{path}: {reason}")
        resolved = load_configuration().resolve(**options)
        arguments = {"build": False, **_data(path), **resolved.arguments("fix"), "strict": False}
        with resolved.errors_name_sources():
            result = fix(path, None, **arguments)
        if result.verdict is not None and not result.verdict.passed:
            raise Unverified("the fixed model failed its verification; the file is unchanged")
        if _same(result.model, path):
            return FileOutcome(path, f"{path}: nothing to do", detail=result)
        save(result.model, path)
    except RewriterError as error:
        return FileOutcome(path, f"{path}: {error}", passed=False, error=error)
    return FileOutcome(
        path, f"{path}: fixed; review it, and add it to the commit", passed=False, detail=result
    )


def _data(path: Path) -> dict[str, Any]:
    """Samples beside the model, if there are any: `net.npz` beside `net.onnx`."""
    samples = path.with_suffix(".npz")
    return {"inputs": samples} if samples.is_file() else {}


def _skipped(path: Path) -> str:
    """Why a file is skipped, if it is.

    `rewriter` chose the types of a fixed model: a second run must change nothing, and a scan would report
    hazards that its Casts avoid.
    """
    if path.is_file():
        with path.open("rb") as stream:
            if stream.read(len(LFS)) == LFS:
                return "skipped: Git LFS has not fetched it"
    nodes = load(path).proto.graph.node
    return "already fixed" if any(made_by(node, (MixedPrecision.name,)) for node in nodes) else ""


def _same(model: Model, path: Path) -> bool:
    return not model.external and model.whole().SerializeToString(deterministic=True) == path.read_bytes()
