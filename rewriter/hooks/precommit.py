"""Scans or fixes committed .onnx files for pre-commit."""

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from rewriter.base.errors import OutputError, RewriterError
from rewriter.hooks.fixing import HookOptions, fix_export, raw_path
from rewriter.ir.graph import made_by
from rewriter.ir.model import load
from rewriter.passes.mixed_precision import MixedPrecision

LFS = b"version https://git-lfs.github.com/spec/"
"""First line of a file that Git LFS has not fetched (Git LFS specification, v1)."""


def skipped(path: Path) -> str:
    """Why a file is skipped; "" if it is not.

    `rewriter` chose the types of a fixed model: a second run must change nothing, and a scan would report
    hazards that its Casts avoid. What is no model is the job's to report.
    """
    if path.stem.endswith(".raw"):
        return "skipped: it is the original of a fixed model"
    if path.is_file():
        with path.open("rb") as stream:
            if stream.read(len(LFS)) == LFS:
                return "skipped: Git LFS has not fetched it"
    with suppress(RewriterError):
        nodes = load(path).proto.graph.node
        return "already fixed" if any(made_by(node, (MixedPrecision.name,)) for node in nodes) else ""
    return ""


def fix_committed(path: Path, options: dict[str, Any]) -> bool:
    """Fixes a file in place, and keeps the original beside it; returns False if there was nothing to do.

    git ignores the original from then on, in this clone (info/exclude).

    Args:
        options: Options of `rewriter.fix`, except `build`: TensorRT's build is slow.

    Raises:
        RewriterError: it failed, or its verification did; the file is unchanged then.
    """
    raw, before = raw_path(path), path.read_bytes() if path.is_file() else b""
    if raw.exists():
        what = "it would be overwritten, and may be the only copy of another model"
        raise OutputError(what, where=str(raw), hint="move it away, or delete it")
    fix = {"build": False, **data_beside(path), **options}
    fix_export(path, lambda _model: None, HookOptions(fix=fix, keep_raw=True, quiet=True))
    changed = path.read_bytes() != before
    if not changed:
        raw.unlink()
    elif shutil.which("git") and _git(raw.parent, "check-ignore", "-q", "--", raw.name).returncode == 1:
        exclude = raw.parent / _git(raw.parent, "rev-parse", "--git-path", "info/exclude").stdout.strip()
        exclude.parent.mkdir(exist_ok=True)
        with exclude.open("a", encoding="utf-8") as stream:
            stream.write("*.raw.onnx\n")
    return changed


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)


def data_beside(path: Path) -> dict[str, Any]:
    """Samples beside the model, if there are any: `net.npz` beside `net.onnx`."""
    samples = path.parent / f"{path.stem}.npz"
    return {"inputs": samples} if samples.is_file() else {}
