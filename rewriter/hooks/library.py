"""The training libraries, which `rewriter` works without."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def needed(module: str, package: str, by: str) -> Any:
    """The module of a training library.

    Args:
        package: What pip calls it.
        by: The hook that needs it.

    Raises:
        ImportError: it is not installed; one line says what to do.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise  # the library is there, and something that it needs is not
        raise ImportError(
            f"{by} needs {package}, which is not installed: pip install {package}", name=error.name
        ) from None
