"""The report of TensorRT's parser and builder on a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class NetworkLayer:
    """A layer of the parsed network.

    Attributes:
        type: Name in `LayerType`, e.g. `NORMALIZATION`.
        node: ONNX node that it was made from; "" if unknown.
        outputs: Name and type (in `DataType`, e.g. `HALF`) of each output. A tensor has its ONNX
            name if it is one of the ONNX graph's.
    """

    name: str
    type: str
    node: str
    outputs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ParserError:
    """A node (or initializer) that the parser refuses; `node` and `op` may be ""."""

    node: str
    op: str
    message: str

    def __str__(self) -> str:
        return f"node {self.node or '(unnamed)'} ({self.op}): {self.message}" if self.op else self.message


@dataclass(frozen=True)
class BuildReport:
    """The parsed network, and the result of its build.

    Attributes:
        layers: The parsed network; empty if the parser refused the model.
        inputs: Name and type of each network input.
        warnings, errors: Distinct messages of parser and builder, in order.
        obstacle, hint: Reason and advice if the model was parsed but not built because something is missing,
            such as the shape of an input; else "".
        engine_bytes: Size of the engine; None if none was built.
        notes: Requests that could not be met, such as an output that is not in the network.
        log: End of what the child printed.
        parse_s, build_s: Wall time.
    """

    library: str
    version: str
    parsed: bool
    layers: tuple[NetworkLayer, ...] = ()
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
        """Number of layers of a type in the parsed network."""
        return sum(layer.type == layer_type for layer in self.layers)

    def types(self) -> Iterator[tuple[str, str, str]]:
        """Tensor name, type in `DataType`, and ONNX node (or layer) of all inputs and layer outputs."""
        yield from ((name, dtype, "an input") for name, dtype in self.inputs)
        for layer in self.layers:
            yield from ((name, dtype, layer.node or layer.name) for name, dtype in layer.outputs)
