"""Hugging Face Optimum: fix the folder that `main_export` or `onnx_export_from_model` wrote."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rewriter.errors import ModelError
from rewriter.hooks.core import Fixed, fix_file
from rewriter.hooks.feeds import calibration_feeds
from rewriter.hooks.settings import Settings
from rewriter.model import Model


def fix_export(
    folder: str | os.PathLike[str],
    preset: str | None = None,
    *,
    calibration: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
    fix: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Fixed]:
    """Fix every .onnx file of a folder in its place; each that fails stays as it is, with a warning.

    Args:
        folder: The `output` of the export.
        calibration: Samples as a tokenizer returns them, or by file name where there are several files
            (`{"encoder_model.onnx": [...]}`); what is no input of the model is left out. None: random.
        options: Those of `rewriter.hooks.settings.Settings`.

    Raises:
        ModelError: there is no .onnx file.
        UsageError: an option that does not exist.
    """
    base = Settings({**({"preset": preset} if preset else {}), **(fix or {})}, **options)
    base.check()
    files = sorted(path for path in Path(folder).glob("*.onnx") if not path.stem.endswith(".raw"))
    if not files:
        raise ModelError("there is no .onnx file in it", where=str(folder), hint="name the export's output")
    return [fix_file(path, partial(_feeds, calibration, path.name, base.samples), base) for path in files]


def _feeds(calibration: Any, name: str, most: int, model: Model) -> Any:
    items = calibration.get(name) if isinstance(calibration, Mapping) else calibration
    return None if items is None else calibration_feeds(model, None, items, most)
