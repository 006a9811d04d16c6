"""One call of `torch.onnx.export`, whatever its signature: it changed with almost every release."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewriter.hooks.library import needed

torch = needed("torch", "torch", __name__)


@dataclass(frozen=True)
class Call:
    """The arguments of one export, by name where this PyTorch knows them.

    Attributes:
        export: The exporter that is called.
        args, kwargs: As they were given, and are handed on.
        named: The same by parameter name, with the defaults of this release.
    """

    export: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    named: Mapping[str, Any]

    @classmethod
    def of(cls, export: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """
        Raises:
            TypeError: the arguments are not those of this PyTorch's exporter.
        """
        bound = inspect.signature(export).bind(*args, **kwargs)
        bound.apply_defaults()
        return cls(export, args, kwargs, bound.arguments)

    def run(self) -> Any:
        """Export: None, or the ONNXProgram of the newer exporter."""
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
        """The file that is written, if it is one."""
        return None if self.target is None or hasattr(self.target, "write") else Path(self.target)

    @property
    def dynamo(self) -> bool:
        """Whether the newer exporter runs; it became the default in PyTorch 2.9."""
        exported = isinstance(self.model, torch.export.ExportedProgram)
        return exported or bool(self.named.get("dynamo", False))

    @property
    def opset(self) -> int | None:
        """The operator set that was asked for."""
        return self.named.get("opset_version")

    @property
    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword example arguments of the model.

        A dict at the end of the tuple is keyword arguments, as in every release of either exporter.
        """
        args, named = self.named.get("args", ()), dict(self.named.get("kwargs") or {})
        args = tuple(args) if isinstance(args, (tuple, list)) else (args,)
        if args and not named and isinstance(args[-1], dict):
            return args[:-1], args[-1]
        return args, named
