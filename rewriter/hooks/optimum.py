"""Hugging Face Optimum: fixes the folder written by `main_export` or `onnx_export_from_model`."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rewriter.base.errors import ModelError, UsageError
from rewriter.hooks.fixing import Fixed, HookOptions, attempt, fix_file
from rewriter.hooks.torch import calibration_source
from rewriter.ir.model.output_files import work_folder
from rewriter.jobs.record import record_script


def fix_export(
    folder: str | os.PathLike[str],
    script: Sequence[str] | str | os.PathLike[str] | None = None,
    *,
    calibration: Iterable[Any] | Mapping[str, Iterable[Any]] | None = None,
    **options: Any,
) -> list[Fixed]:
    """Fix every .onnx file of a folder in place; a file that fails is unchanged, with a warning.

    Args:
        folder: The `output` of the export.
        script: A Python file that runs the export with ONNX Runtime, or a command line such as
            `["python", "run.py", "export/"]`. It is recorded, and each file is fixed on its own calls; a file
            that it does not call is unchanged.
        calibration: Samples as a tokenizer returns them; other entries than the model's inputs are ignored.
            For several files, samples by file name: `{"encoder_model.onnx": [...]}`. None: random data.
        options: Fields of `HookOptions`.

    Raises:
        ModelError: there is no .onnx file. UsageError: the script cannot be recorded.
    """
    base = HookOptions(calibration=calibration, **options)
    files = sorted(path for path in Path(folder).glob("*.onnx") if not path.stem.endswith(".raw"))
    if not files:
        raise ModelError("there is no .onnx file in it", where=folder, hint="name the export's output")
    if script is not None:
        with work_folder() as work:
            if isinstance(script, (str, os.PathLike)):
                script = [sys.executable, os.fspath(script)]
            recording = record_script(work / "calls", script)
            samples = {Path(file.model).resolve(): work / "calls" / file.samples for file in recording.files}
            return [_fix_recorded(path, samples.get(path.resolve()), base) for path in files]
    by_name = calibration if isinstance(calibration, Mapping) else {path.name: calibration for path in files}
    return [fix_file(path, calibration_source(by_name.get(path.name), base.samples), base) for path in files]


def _fix_recorded(path: Path, samples: Path | None, base: HookOptions) -> Fixed:
    """Fixes a file on the samples of a recording; None: the script did not call it."""

    def uncalled() -> Fixed:
        raise UsageError("the script does not call it", where=path, hint="run it in the script, too")

    if samples is None:
        return attempt(uncalled, base, str(path), path)
    return fix_file(path, lambda model: None, replace(base, fix={**base.fix, "inputs": samples}))
