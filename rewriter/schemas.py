"""What an operator's schema says of the floating-point types at its inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import onnx
from onnx import NodeProto, TensorProto

TYPE_NAMES = {
    TensorProto.FLOAT: "tensor(float)",
    TensorProto.FLOAT16: "tensor(float16)",
    TensorProto.BFLOAT16: "tensor(bfloat16)",
    TensorProto.DOUBLE: "tensor(double)",
}

ANY_TYPE_OPS = frozenset({"Shape", "Size", "IsNaN", "IsInf", "Cast"})
"""Operators that read one float tensor of whatever type it has: a Cast before them is waste."""

FP32_INPUTS: dict[str, frozenset[int]] = {
    "Resize": frozenset({1, 2}),  # roi and scales: 1/3 in FP16 gives another output size
    "Upsample": frozenset({1}),
}
"""Inputs that stay FP32 whatever the node's own precision is."""

DTYPE_ATTRIBUTES = {
    "EyeLike": "dtype",
    "RandomNormal": "dtype",
    "RandomUniform": "dtype",
    "RandomNormalLike": "dtype",
    "RandomUniformLike": "dtype",
    "Bernoulli": "dtype",
    "BlackmanWindow": "output_datatype",
    "HannWindow": "output_datatype",
    "HammingWindow": "output_datatype",
    "MelWeightMatrix": "output_datatype",
}
"""Operators whose output type is an attribute; it stays FP32."""


class Port(Enum):
    """How the float type at one input or output is decided."""

    FOLLOWS = "the node's precision"
    FP32 = "always FP32"
    ANY = "whatever comes"


@dataclass(frozen=True)
class Ports:
    """One `Port` for each input and output of a node, those that hold no float included."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def can_follow(self) -> bool:
        """Whether any float of the node can have the lower precision."""
        return Port.FOLLOWS in self.inputs or Port.FOLLOWS in self.outputs


def ports(node: NodeProto, opset: int, low: int) -> Ports | None:
    """How the float types of `node` are decided when `low` is the lower precision.

    Args:
        opset: Version of the node's operator set.
        low: TensorProto.FLOAT16, BFLOAT16, or FLOAT (then everything may follow).

    Returns:
        None if the operator has no schema.
    """
    schema = schema_of(node.op_type, node.domain, opset)
    if schema is None:
        return None
    inputs = [_port(schema, schema.inputs, i, low) for i in range(len(node.input))]
    outputs = [_port(schema, schema.outputs, i, low) for i in range(len(node.output))]
    for index in FP32_INPUTS.get(node.op_type, frozenset()):
        if index < len(inputs):
            inputs[index] = Port.FP32
    if node.op_type in ANY_TYPE_OPS:
        inputs[0] = Port.ANY
    if node.op_type in DTYPE_ATTRIBUTES:
        outputs = [Port.FP32] * len(outputs)
    return Ports(tuple(inputs), tuple(outputs))


@lru_cache(maxsize=4096)
def schema_of(op_type: str, domain: str, opset: int) -> onnx.defs.OpSchema | None:
    """The schema of an operator at a version of its operator set; None if onnx has none."""
    try:
        return onnx.defs.get_schema(op_type, opset, "" if domain == "ai.onnx" else domain)
    except onnx.defs.SchemaError:
        return None


def _port(schema: onnx.defs.OpSchema, formals: object, index: int, low: int) -> Port:
    if not formals:
        return Port.ANY
    formal = formals[min(index, len(formals) - 1)]  # the last formal parameter may be variadic
    allowed = _allowed(schema).get(formal.type_str, frozenset({formal.type_str}))
    return Port.FOLLOWS if TYPE_NAMES[low] in allowed else Port.FP32


def _allowed(schema: onnx.defs.OpSchema) -> dict[str, frozenset[str]]:
    return _allowed_types(schema.name, schema.domain, schema.since_version)


@lru_cache(maxsize=4096)
def _allowed_types(op_type: str, domain: str, version: int) -> dict[str, frozenset[str]]:
    schema = onnx.defs.get_schema(op_type, version, domain)
    return {c.type_param_str: frozenset(c.allowed_type_strs) for c in schema.type_constraints}
