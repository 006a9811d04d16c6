"""Ultralytics: fix what `model.export(format="onnx")` wrote.

For `format="engine"`, which builds from the ONNX file before it calls back, put the export into a block of
`rewriter.hooks.torch.patched` instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rewriter.hooks.core import fix_file, say
from rewriter.hooks.feeds import calibration_feeds
from rewriter.hooks.settings import Settings
from rewriter.model import Model


class FixOnExport:
    """A callback for `model.add_callback("on_export_end", ...)`, with options.

    Without `calibration` ranges come from random images, for Ultralytics exports with a black one.

    Args:
        preset: Short for `fix={"preset": ...}`; `options` are those of `rewriter.hooks.settings.Settings`,
            of which `prepare` has no effect here: the export is done.

    Raises:
        UsageError: an option that does not exist.
    """

    def __init__(self, preset: str | None = None, *, fix: Any = None, **options: Any) -> None:
        self.settings = Settings({**({"preset": preset} if preset else {}), **(fix or {})}, **options)
        self.settings.check()

    def __call__(self, exporter: Any) -> None:
        """
        Args:
            exporter: `ultralytics.engine.exporter.Exporter`; its `file` names the weights, beside which the
                export lies.
        """
        if exporter.args.format != "onnx":
            say(f"format={exporter.args.format!r} is not looked at; onnx is", self.settings)
            return
        fix_file(Path(exporter.file).with_suffix(".onnx"), self._feeds, self.settings)

    def _feeds(self, model: Model) -> Any:
        calibration, most = self.settings.calibration, self.settings.samples
        return None if calibration is None else calibration_feeds(model, None, calibration, most)


def on_export_end(exporter: Any) -> None:
    """The callback without options."""
    FixOnExport()(exporter)
