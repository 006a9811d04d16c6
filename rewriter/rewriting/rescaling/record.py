"""Notes exponents in the model's metadata, so that comparisons with the original can undo them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rewriter.model import Model
from rewriter.model.json_text import from_json

EXPONENTS = "rewriter.exponents"
"""Metadata key of a JSON object: exponent of two by tensor of the main graph."""


def record(model: Model, exponents: Mapping[str, int]) -> None:
    """Add exponents of tensors of the main graph to those already noted."""
    found = recorded(model)
    for tensor, exponent in exponents.items():
        found[tensor] = found.get(tensor, 0) + exponent
    text = json.dumps({tensor: k for tensor, k in sorted(found.items()) if k})
    entry = next((e for e in model.proto.metadata_props if e.key == EXPONENTS), None)
    if entry is None:
        entry = model.proto.metadata_props.add(key=EXPONENTS)
    entry.value = text


def recorded(model: Model) -> dict[str, int]:
    """The noted exponents by tensor; empty if another program wrote something else under this key."""
    text = next((e.value for e in model.proto.metadata_props if e.key == EXPONENTS), "{}")
    try:
        found = from_json(text)
    except ValueError:
        return {}
    known = isinstance(found, dict) and all(type(k) is int for k in found.values())
    return dict(found) if known else {}


def between(original: Model, other: Model) -> dict[str, int]:
    """The exponents by which tensors of `other` differ from those of `original`."""
    before, after = recorded(original), recorded(other)
    steps = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
    return {name: k for name, k in steps.items() if k}
