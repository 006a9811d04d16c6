"""Imports training libraries, which `rewriter` does not depend on."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def require(module: str, package: str, hook: str) -> Any:
    """Returns a module of a training library.

    Args:
        package: Its name for pip.
        hook: The hook that needs it, for the message.

    Raises:
        ImportError: it is not installed; one line says what to do.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or module.partition(".")[0] != error.name.partition(".")[0]:
            raise  # the library is installed, but a dependency of it is not
        raise ImportError(
            f"{hook} needs {package}, which is not installed: pip install {package}", name=error.name
        ) from None
