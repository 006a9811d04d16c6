"""Shared parts of all JSON reports.

Paths are as the user wrote them; times are wall seconds. JSON has no NaN or infinity: such numbers become
the strings "nan", "inf" and "-inf".
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rewriter.base.text import one_line
from rewriter.ir.model.files import UNENCODABLE
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


def document(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a report as objects that `json.dumps` takes, after the versions."""
    ending = {"ending": content["ending"]} if "ending" in content else {}
    return {"schema_version": SCHEMA_VERSION, **ending, "versions": installed_versions(), **plain(content)}


def attributes(value: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def data_dict(data: DataSource | None) -> dict[str, Any] | None:
    names = ("text", "samples", "real", "constant", "repeated", "path", "preprocess")
    return None if data is None else attributes(data, *names)


def installed_versions() -> dict[str, str]:
    """Versions of the installed libraries that a result depends on."""
    versions = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def shown(value: Any) -> Any:
    """Plain data whose texts people read: each on one line."""
    if isinstance(value, dict):
        return {key: shown(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(shown, value))
    return one_line(value) if isinstance(value, str) else value


def plain(value: Any) -> Any:
    """Fields by name, paths and numbers that JSON lacks as strings, NumPy's values as Python's."""
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, (str, Path)):
        return str(value).encode(errors=UNENCODABLE).decode()
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value
