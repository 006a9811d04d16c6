"""One call of `torch.onnx.export`, independent of its signature, which differs between releases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.hooks.library import require

torch = require("torch", "torch", __name__)


@dataclass(frozen=True)
class ExportCall:
    """The arguments of one export.

    Attributes:
        export: The exporter.
        args, kwargs: The arguments as they were given, which are passed on.
        named: The same by parameter name, with the defaults of this release.
    """

    export: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    named: Mapping[str, Any]

    @classmethod
    def of(cls, export: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportCall:
        """Binds the arguments.

        Raises:
            TypeError: this PyTorch's exporter does not take these arguments.
        """
        bound = inspect.signature(export).bind(*args, **kwargs)
        bound.apply_defaults()
        return cls(export, args, kwargs, bound.arguments)

    def run(self) -> Any:
        """Export; returns None, or the ONNXProgram of the newer exporter."""
        return self.export(*self.args, **self.kwargs)

    @property
    def model(self) -> Any:
        return self.named["model"]

    @property
    def target(self) -> Any:
        """A path, a stream, or None."""
        return self.named.get("f")

    @property
    def path(self) -> Path | None:
        """The target if it is a path, else None."""
        return None if self.target is None or hasattr(self.target, "write") else Path(self.target)

    @property
    def dynamo(self) -> bool:
        """True if the newer exporter runs; it is the default since PyTorch 2.9."""
        exported = isinstance(self.model, torch.export.ExportedProgram)
        return exported or bool(self.named.get("dynamo", False))

    @property
    def opset(self) -> int | None:
        """The requested operator set."""
        return self.named.get("opset_version")

    @property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments that the model is exported with.

        A dict at the end of the tuple holds keyword arguments, as in all releases of both exporters.
        """
        args, named = self.named.get("args", ()), dict(self.named.get("kwargs") or {})
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        if args and not named and isinstance(args[-1], dict):
            return args[:-1], args[-1]
        return args, named
