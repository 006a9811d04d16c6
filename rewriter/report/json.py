"""Shared parts of all JSON reports.

Paths stand as the user wrote them; times are wall seconds. JSON has no NaN or infinity: such numbers become
the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rewriter.runtime.inputs.samples import DataSource

SCHEMA_VERSION = 1
"""Incremented when a field changes its meaning or is removed, not when one is added."""

LIBRARIES = (
    "rewriter",
    "onnx",
    "onnx-graphsurgeon",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxsim",
    "numpy",
    "tensorrt",
    "tensorrt-rtx",
)


def document(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a report as objects that `json.dumps` takes, after the versions."""
    header = {"schema_version": SCHEMA_VERSION, "versions": installed_versions()}
    return {**header, **{name: plain(value) for name, value in fields.items()}}


def installed_versions() -> dict[str, str]:
    """Versions of the installed libraries that a result depends on."""
    versions = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def data_dict(data: DataSource) -> dict[str, Any]:
    """The samples that a result was measured on."""
    fields = ("text", "samples", "real", "path", "preprocess")
    return {name: getattr(data, name) for name in fields}


def plain(value: Any) -> Any:
    """Returns the value with NumPy's numbers as Python's, and NaN and infinities as strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
