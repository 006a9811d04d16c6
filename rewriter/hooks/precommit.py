"""What pre-commit runs on committed .onnx files: scan them, or fix them in their place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.errors import RewriterError
from rewriter.graph import made_by
from rewriter.hazards.kinds import Severity
from rewriter.hooks.core import Unverified
from rewriter.model import Model, load, save
from rewriter.passes.mixed_precision import MixedPrecision
from rewriter.pipeline.config import load as load_configuration

LFS = b"version https://git-lfs.github.com/spec/"
"""How a file begins that Git LFS has not fetched (its specification, v1)."""


@dataclass(frozen=True)
class Outcome:
    """What became of one file.

    Attributes:
        text: One line for the user.
        passed: False if the hook shall stop the commit: an error, or a file that changed.
        error: Why the file could not be looked at.
        detail: What to show of it: a ScanResult or FixResult.
    """

    path: Path
    text: str
    passed: bool = True
    error: RewriterError | None = None
    detail: Any = None


def scan_file(path: Path, **options: Any) -> Outcome:
    """Look for hazards; `options` and the configuration are those of `rewriter scan`."""
    from rewriter.jobs.scan import scan
    from rewriter.report.scan import verdict_line

    try:
        if _is_pointer(path):
            return Outcome(path, f"{path}: not scanned: Git LFS has not fetched it")
        if _was_fixed(load(path)):
            return Outcome(path, f"{path}: was fixed already")
        resolved = load_configuration(path).resolve(**options)
        with resolved.errors_name_sources():
            result = scan(path, **{**_data(path), **resolved.arguments("scan")})
        least: Severity = resolved.values["fail_on"] or "error"
    except RewriterError as error:
        return Outcome(path, f"{path}: {error}", passed=False, error=error)
    return Outcome(path, verdict_line(result).plain, not result.reaches(least), detail=result)


def fix_file(path: Path, **options: Any) -> Outcome:
    """Fix a file in its place, once; one that was fixed already, or fails verification, stays as it is.

    Args:
        options: Those of `rewriter fix`; without `build` TensorRT's build, which takes its time, is left out.
    """
    from rewriter.jobs.fix.api import fix

    try:
        if _is_pointer(path):
            return Outcome(path, f"{path}: not fixed: Git LFS has not fetched it")
        if _was_fixed(load(path)):
            return Outcome(path, f"{path}: was fixed already")
        resolved = load_configuration(path).resolve(**options)
        arguments = {"build": False, **_data(path), **resolved.arguments("fix"), "strict": False}
        with resolved.errors_name_sources():
            result = fix(path, None, **arguments)
        if result.verdict is not None and not result.verdict.passed:
            raise Unverified("the fixed model failed its verification; the file stays as it was")
        if _same(result.model, path):
            return Outcome(path, f"{path}: nothing to do", detail=result)
        save(result.model, path)
    except RewriterError as error:
        return Outcome(path, f"{path}: {error}", passed=False, error=error)
    return Outcome(path, f"{path}: fixed; look at it, and add it to the commit", passed=False, detail=result)


def _data(path: Path) -> dict[str, Any]:
    """Samples beside the model: `net.npz` beside `net.onnx`."""
    samples = path.with_suffix(".npz")
    return {"inputs": samples} if samples.is_file() else {}


def _is_pointer(path: Path) -> bool:
    if not path.is_file():
        return False  # loading it says so
    with path.open("rb") as stream:
        return stream.read(len(LFS)) == LFS


def _was_fixed(model: Model) -> bool:
    """Whether `rewriter` decided its types: a second run of a hook must change nothing.

    A scan of such a model would tell of hazards that Casts keep away.
    """
    return any(made_by(node, (MixedPrecision.name,)) for node in model.proto.graph.node)


def _same(model: Model, path: Path) -> bool:
    return not model.external and model.whole().SerializeToString(deterministic=True) == path.read_bytes()
