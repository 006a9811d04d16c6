"""Inputs of decoders, and their caches, by the names in optimum's exports or in genai_config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rewriter.ir.model import Array, Model

CACHES = (("past_key_values.%s", "present.%s"), ("past_%s", "present_%s"))
"""Patterns of a cache's input and output: of optimum, and of older exporters."""

POSITIONS = ("position_ids", "cache_position")

BRANCH = "use_cache_branch"
"""The input of optimum's merged decoders that chooses the branch with the cache."""

TOTAL = "past_sequence_length + sequence_length"
"""Length of the mask, as optimum writes it; genai's is called `total_sequence_length`."""


def cache_pairs(model: Model) -> dict[str, str]:
    """The outputs that become caches of the next call, by the input."""
    inputs, outputs = _genai(model)
    patterns = [
        (inputs[f"past_{kind}_names"], outputs[f"present_{kind}_names"])
        for kind in ("key", "value")
        if f"past_{kind}_names" in inputs and f"present_{kind}_names" in outputs
    ]
    names = {port.name for port in model.signature.outputs}
    return {
        port.name: output
        for port in model.signature.inputs
        for past, present in (*patterns, *CACHES)
        if (output := _renamed(port.name, past, present)) in names
    }


def agreeing(
    model: Model, shapes: Mapping[str, tuple[int, ...]], limits: Mapping[str, int]
) -> Iterator[tuple[str, Array]]:
    """Positions that follow the past, by input; none for a model without caches.

    Args:
        shapes: Of all inputs. `limits`: sizes of the tables that inputs index.
    """
    caches, ports = cache_pairs(model), model.signature.inputs
    lengths = [_past(port.shape, shapes[port.name]) for port in ports if port.name in caches]
    names = [_genai(model)[0].get(name, name) for name in POSITIONS]
    for port in ports if lengths else ():
        if port.name in names and (shape := shapes[port.name]):
            positions = np.arange(lengths[0], lengths[0] + shape[-1])
            limit = limits.get(port.name, 2**31) - 1
            yield port.name, np.broadcast_to(positions.clip(max=limit), shape)


def _past(dims: Any, shape: tuple[int, ...]) -> int:
    """The length of a cache: of the axis whose name says so, or of the last axis but one."""
    named = (size for dim, size in zip(dims, shape, strict=True) if isinstance(dim, str) and "past" in dim)
    return next(named, shape[-2])


def _renamed(name: str, pattern: str, other: str) -> str:
    """The name in another pattern; "" if it does not fit. `%s` and `%d` stand for a part of it."""
    regex = re.escape(pattern).replace("%d", r"(\d+)").replace("%s", "(.+)")
    match = re.fullmatch(regex, name)
    return re.sub("%[ds]", match[1], other) if match else ""


def _genai(model: Model) -> tuple[dict[str, str], dict[str, str]]:
    """The names of the decoder's inputs and outputs in the genai_config.json beside a model, by role."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        decoder = json.loads(Path(str(model.path)).with_name("genai_config.json").read_bytes())["model"][
            "decoder"
        ]
        return dict(decoder["inputs"]), dict(decoder["outputs"])
    return {}, {}
