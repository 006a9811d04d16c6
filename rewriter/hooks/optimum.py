"""Hugging Face Optimum: fixes the folder written by `main_export` or `onnx_export_from_model`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rewriter.base.errors import ModelError
from rewriter.hooks.fixing import Fixed, HookOptions, fix_file
from rewriter.hooks.torch_feeds import calibration_source


def fix_export(
    folder: str | os.PathLike[str],
    *,
    calibration: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
    **options: Any,
) -> list[Fixed]:
    """Fix every .onnx file of a folder in place; a file that fails is unchanged, with a warning.

    Args:
        folder: The `output` of the export.
        calibration: Samples as a tokenizer returns them; other entries than the model's inputs are ignored.
            For several files, samples by file name: `{"encoder_model.onnx": [...]}`. None: random data.
        options: Fields of `HookOptions`.

    Raises:
        ModelError: there is no .onnx file.
    """
    base = HookOptions(calibration=calibration, **options)
    files = sorted(path for path in Path(folder).glob("*.onnx") if not path.stem.endswith(".raw"))
    if not files:
        raise ModelError("there is no .onnx file in it", where=str(folder), hint="name the export's output")
    by_name = calibration if isinstance(calibration, Mapping) else {path.name: calibration for path in files}
    return [fix_file(path, calibration_source(by_name.get(path.name), base.samples), base) for path in files]
