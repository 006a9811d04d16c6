"""What TensorRT's parser and builder told of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layer:
    """A layer of the parsed network.

    Attributes:
        type: Name in `LayerType`, e.g. `NORMALIZATION`.
        node: ONNX node that it was made from; "" where the parser does not say.
        outputs: Name and type (in `DataType`, e.g. `HALF`) of each output. A tensor has its ONNX
            name if it is one of the ONNX graph's.
    """

    name: str
    type: str
    node: str
    outputs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ParserError:
    """A node (or initializer) that the parser refuses. `node` and `op` are "" if it names none."""

    node: str
    op: str
    message: str

    def __str__(self) -> str:
        return f"node {self.node or '(unnamed)'} ({self.op}): {self.message}" if self.op else self.message


@dataclass(frozen=True)
class BuildReport:
    """What became of a model.

    Attributes:
        layers: The parsed network; empty if the parser refused the model.
        inputs: Name and type of each network input.
        warnings, errors: Distinct messages of parser and builder, in order.
        obstacle, hint: Why nothing was built although the model was parsed (an input's shape is
            missing), and what to do; "" if that is not so.
        engine_bytes: Size of the engine; None if none was built.
        notes: What was asked for and could not be done: an output that is not in the network.
        log: End of what the child printed.
        parse_s, build_s: Wall time.
    """

    library: str
    version: str
    parsed: bool
    layers: tuple[Layer, ...] = ()
    inputs: tuple[tuple[str, str], ...] = ()
    parser_errors: tuple[ParserError, ...] = ()
    warnings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    obstacle: str = ""
    hint: str = ""
    engine_bytes: int | None = None
    notes: tuple[str, ...] = ()
    parse_s: float = 0.0
    build_s: float = 0.0
    log: str = ""

    def count(self, layer_type: str) -> int:
        """How many layers of a type the parsed network has."""
        return sum(layer.type == layer_type for layer in self.layers)

    def types(self) -> Iterator[tuple[str, str, str]]:
        """Tensor name, type in `DataType`, and ONNX node (or layer) of all inputs and layer outputs."""
        yield from ((name, dtype, "an input") for name, dtype in self.inputs)
        for layer in self.layers:
            yield from ((name, dtype, layer.node or layer.name) for name, dtype in layer.outputs)


def report_of(result: Mapping[str, Any], log: str) -> BuildReport:
    """The report out of JSON, which knows lists only."""
    structured = {
        "layers": tuple(_layer(*layer) for layer in result["layers"]),
        "inputs": tuple((name, dtype) for name, dtype in result["inputs"]),
        "parser_errors": tuple(ParserError(*error) for error in result["parser_errors"]),
        "warnings": tuple(result["warnings"]),
        "errors": tuple(result["errors"]),
        "notes": tuple(result.get("notes", ())),
    }
    return BuildReport(**{**result, **structured}, log=log)


def _layer(name: str, kind: str, node: str, outputs: list[list[str]]) -> Layer:
    return Layer(name, kind, node, tuple((tensor, dtype) for tensor, dtype in outputs))
