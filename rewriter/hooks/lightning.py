"""Lightning: exports and fixes at the end of training, or with every checkpoint.

Raises:
    ImportError: neither `lightning` nor `pytorch_lightning` is installed.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rewriter.base.errors import UsageError
from rewriter.hooks.fixing import Fixed, HookOptions, attempt, require

_OLD = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
_lightning = require("pytorch_lightning" if _OLD else "lightning.pytorch", "lightning", __name__)

from rewriter.hooks.torch import eval_mode, patched_with  # noqa: E402  # the message about Lightning first


class FixOnExport(_lightning.Callback):  # type: ignore[misc, name-defined]
    """Exports the module with its own `to_onnx`, and fixes the file.

    All errors, including errors of the export, become warnings, so that the result of training is kept.

    Args:
        path: The file; for checkpoints, the step is added to its name: `model-step=200.onnx`.
        when: At the end of training, or whenever a checkpoint is saved.
        example: Arguments that `to_onnx` runs the module on; None: its `example_input_array`.
        export: More arguments of `torch.onnx.export`.
        options: Fields of `HookOptions`, which are checked before training.
    """

    def __init__(
        self,
        path: str | Path = "model.onnx",
        *,
        when: Literal["train_end", "checkpoint"] = "train_end",
        example: Any = None,
        export: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if when not in ("train_end", "checkpoint"):
            raise UsageError(f"it cannot be {when!r}", where="when=", hint="train_end or checkpoint")
        self.path, self.when, self.example = Path(path), when, example
        self.export, self.options = dict(export or {}), HookOptions(**options)
        self.exports: list[Fixed] = []

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
            with eval_mode(module), patched_with(self.options) as exports:
                module.to_onnx(path, self.example, **self.export)
            self.exports += exports
            return Fixed(path)

        attempt(work, self.options, f"{path} (exported by FixOnExport)")
