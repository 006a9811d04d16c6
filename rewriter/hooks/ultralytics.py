"""Ultralytics: fixes the result of `model.export(format="onnx")`.

`format="engine"` builds from the ONNX file before its callback. Use `rewriter.hooks.torch.patched` around the
export instead.
"""

from pathlib import Path
from typing import Any

from rewriter.hooks.fixing import HookOptions, fix_file, say
from rewriter.hooks.torch import calibration_source


class FixOnExport:
    """A callback for `model.add_callback("on_export_end", ...)`, with options.

    Without `calibration`, ranges come from random images: Ultralytics exports with a black one.

    Args:
        options: Fields of `HookOptions`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = HookOptions(**options)

    def __call__(self, exporter: Any) -> None:
        """Fix the file of an `ultralytics.engine.exporter.Exporter`: it is beside the weights, its `file`."""
        if exporter.args.format != "onnx":
            say(f"format={exporter.args.format!r} is not fixed, only onnx is", self.options)
            return
        feeds = calibration_source(self.options.calibration, self.options.samples)
        fix_file(Path(exporter.file).with_suffix(".onnx"), feeds, self.options)
