"""Lightning: export and fix at the end of training, or with every checkpoint.

Raises:
    ImportError: neither `lightning` nor `pytorch_lightning` is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rewriter.errors import UsageError
from rewriter.hooks.core import Fixed, attempt
from rewriter.hooks.library import needed

_OLD = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
_lightning = needed("pytorch_lightning" if _OLD else "lightning.pytorch", "lightning", __name__)

from rewriter.hooks.torch import Exported, patched  # noqa: E402  # the message about Lightning comes first
from rewriter.hooks.watch import evaluated  # noqa: E402

When = Literal["train_end", "checkpoint"]


class FixOnExport(_lightning.Callback):  # type: ignore[misc, name-defined]
    """Exports the module with its own `to_onnx`, and fixes the file.

    Whatever goes wrong, the export included, is a warning: training has been done, and its end is not lost.

    Args:
        path: The file; a checkpoint's has the step in its name, as `model-step=200.onnx`.
        when: At the end of training, or whenever a checkpoint is saved.
        example: What `to_onnx` shall run the module on; None: its `example_input_array`.
        export: More arguments of `torch.onnx.export`.
        preset: Short for `fix={"preset": ...}`; `options` are those of `rewriter.hooks.settings.Settings`.

    Raises:
        UsageError: an option that does not exist: before training, not after it.
    """

    def __init__(
        self,
        path: str | Path = "model.onnx",
        *,
        when: When = "train_end",
        example: Any = None,
        export: Mapping[str, Any] | None = None,
        preset: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if when not in ("train_end", "checkpoint"):
            raise UsageError(f"it cannot be {when!r}", where="when=", hint="train_end or checkpoint")
        self.path, self.when, self.example = Path(path), when, example
        self.export = dict(export or {})
        self.hook = patched(preset, **options)
        self.hook.settings.check()
        self.exports: list[Exported] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.when == "train_end" and trainer.is_global_zero:
            self._export(pl_module, self.path)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self.when == "checkpoint" and trainer.is_global_zero:
            name = f"{self.path.stem}-step={trainer.global_step}{self.path.suffix}"
            self._export(pl_module, self.path.with_name(name))

    def _export(self, module: Any, path: Path) -> None:
        def work() -> Fixed:
            path.parent.mkdir(parents=True, exist_ok=True)
            with evaluated(module), self.hook as exports:
                module.to_onnx(path, self.example, **self.export)
            self.exports += exports
            return Fixed(path)

        attempt(work, self.hook.settings, f"{path} (exported by FixOnExport)")
