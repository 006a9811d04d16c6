"""Imports ONNX Runtime without its telemetry.

The wheels of 1.31 for Linux keep a database in the user's cache folder, with the names of nodes, and send it
to their maker. The environment switches that off before anything is written; the function switches it off
where the module was imported before.
"""

from __future__ import annotations

import os
from typing import Any

from rewriter import walls


def import_onnxruntime() -> Any:
    """The module `onnxruntime`."""
    os.environ.update(walls.QUIET)
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime
