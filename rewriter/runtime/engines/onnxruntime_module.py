"""Imports ONNX Runtime without its telemetry.

The wheels of 1.31 for Linux keep a database in the user's cache folder, with the names of nodes, and send it
to their maker. The environment switches that off before anything is written; the function switches it off
where the module was imported before.
"""

from __future__ import annotations

import os
from typing import Any

from rewriter.ir import children
from rewriter.ir.errors import EngineError

INSTALL_HINT = 'pip install "rewriter[rtx]"; docs/install.md has a light way, too'


def import_onnxruntime() -> Any:
    """The module `onnxruntime`.

    Raises:
        EngineError: it is not installed: the project came without its dependencies.
    """
    os.environ.update(children.QUIET)
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise EngineError("ONNX Runtime is not installed", hint=INSTALL_HINT) from error

    onnxruntime.disable_telemetry_events()
    return onnxruntime
