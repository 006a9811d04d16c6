"""Reads the layers of a built engine from TensorRT's engine inspector."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from rewriter.runtime.engines.protocol import EngineLayer

_NODE = re.compile(r"\[ONNX Layer: (.*?)(?: \| .*?)?\]")


def read_layers(trt: Any, engine: Any) -> tuple[EngineLayer, ...]:
    """The layers of an engine; empty if it was built without details, or the library has no inspector."""
    try:
        inspector = engine.create_engine_inspector()
        text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    except (AttributeError, RuntimeError):
        return ()
    return layers_of(text)


def layers_of(text: str) -> tuple[EngineLayer, ...]:
    """The layers in the inspector's JSON; a layer without details is its name alone."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return ()
    layers = found.get("Layers", []) if isinstance(found, dict) else []
    return tuple(_layer(layer) for layer in layers)


def _layer(layer: Mapping[str, Any] | str) -> EngineLayer:
    if isinstance(layer, str):
        return EngineLayer(layer, "")
    outputs = tuple(
        (str(output.get("Name", "")), str(output.get("Format/Datatype") or output.get("Datatype") or ""))
        for output in layer.get("Outputs", [])
        if isinstance(output, dict)
    )
    nodes = tuple(dict.fromkeys(_NODE.findall(str(layer.get("Metadata", "")))))
    return EngineLayer(str(layer.get("Name", "")), str(layer.get("LayerType", "")), nodes, outputs)
