"""The float types of tensors and constants, and those that an operator's schema allows at its ends."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import NodeProto, TensorProto

from rewriter.base.errors import PassError
from rewriter.ir.model.graphs import STANDARD_DOMAINS, schema_of
from rewriter.ir.model.tensors import Array

_FLOAT_TYPES: dict[int, tuple[str, type[Any]]] = {
    TensorProto.FLOAT: ("fp32", np.float32),
    TensorProto.FLOAT16: ("fp16", np.float16),
    TensorProto.BFLOAT16: ("bf16", ml_dtypes.bfloat16),
}

NUMPY_TYPES = {dtype: np.dtype(kind) for dtype, (_, kind) in _FLOAT_TYPES.items()}
"""Their NumPy types. float64 is not among them: the pass demote-float64 removes it."""

EXCHANGEABLE = frozenset(NUMPY_TYPES)
SHORT_NAMES = {dtype: name for dtype, (name, _) in _FLOAT_TYPES.items()} | {int(TensorProto.DOUBLE): "fp64"}


SIGNIFICAND: dict[int, tuple[int, int]] = {
    TensorProto.BFLOAT16: (8, 8),
    TensorProto.FLOAT16: (11, 5),
    TensorProto.FLOAT: (24, 8),
    TensorProto.DOUBLE: (53, 11),
}
"""Bits of significand, including the implicit one, and of exponent (IEEE 754-2019, table 3.5)."""

INTEGERS: dict[int, tuple[int, int]] = {
    TensorProto.BOOL: (0, 1),
    **{TensorProto.DataType.Value(f"UINT{bits}"): (0, bits) for bits in (8, 16, 32, 64)},
    **{TensorProto.DataType.Value(f"INT{bits}"): (1, bits - 1) for bits in (8, 16, 32, 64)},
}
"""Sign bits and value bits."""

KNOWN = SIGNIFICAND.keys() | INTEGERS.keys()


def embeds(narrow: int, wide: int) -> bool:
    """True if every value of element type `narrow` (TensorProto.DataType) is a value of `wide`."""
    if narrow not in KNOWN or wide not in KNOWN:
        return narrow == wide
    if narrow in SIGNIFICAND:
        bits = zip(SIGNIFICAND[narrow], SIGNIFICAND.get(wide, (0, 0)), strict=True)
        return all(least <= held for least, held in bits)
    signed, size = INTEGERS[narrow]
    if wide in SIGNIFICAND:
        return size <= SIGNIFICAND[wide][0] and size < 2 ** (SIGNIFICAND[wide][1] - 1)
    other_signed, other_size = INTEGERS[wide]
    return signed <= other_signed and size <= other_size


def convert(value: Array, dtype: int, name: str, *, overflows: bool = False) -> Array:
    """`value` in another float type, rounded to nearest even; zeros and underflows keep their sign.

    Raises:
        PassError: a finite value would become infinite, unless it `overflows`.
    """
    with np.errstate(over="ignore"):
        converted = value.astype(NUMPY_TYPES.get(dtype, np.float64))
    if overflows or converted.itemsize > value.itemsize:
        return converted
    infinite = np.isinf(converted)
    if infinite.any() and np.isfinite(value[infinite]).any():
        largest = np.abs(value[np.isfinite(value)]).max()
        short = SHORT_NAMES[dtype].upper()
        what = f"the constant holds values up to {largest:.4g}, which {short} cannot represent, and its "
        hint = "keep its consumers in FP32 (`keep-fp32`), or clamp it (pass clamp-constants)"
        raise PassError(f"{what}consumer is planned as {short}", where=name, hint=hint)
    return converted


ANY_TYPE_OPS = frozenset({"Shape", "Size", "IsNaN", "IsInf", "Cast", "CastLike"})
"""Operators whose first input may have any float type: a Cast before it would be waste."""

FP32_INPUTS: dict[str, frozenset[int]] = {
    "Resize": frozenset({1, 2}),  # roi and scales: 1/3 in FP16 gives another output size
    "Upsample": frozenset({1}),
}
"""Inputs that stay FP32 whatever the node's own precision is."""

READS_BITS = frozenset({"BitCast"})
"""Operators whose results are the bits of their input: in another type they would be other numbers."""

TYPE_ATTRIBUTES = {
    "Cast": "to",
    "DequantizeLinear": "output_dtype",
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"), "output_datatype"),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), "dtype"),
    **dict.fromkeys(("Bernoulli", "EyeLike"), "dtype"),
}
"""Operators whose output type is an attribute."""


class TypeRule(Enum):
    """The rule that decides the float type of one input or output."""

    FOLLOWS = "the node's precision"
    FP32 = "always FP32"
    ANY = "whatever comes"

    __hash__ = object.__hash__  # Enum's own is a Python function, which `retype` calls for every tensor


@dataclass(frozen=True)
class TypeRules:
    """One `TypeRule` for each input and output of a node, including those that hold no float."""

    inputs: tuple[TypeRule, ...]
    outputs: tuple[TypeRule, ...]

    @property
    def can_follow(self) -> bool:
        """True if any float of the node can have the lower precision."""
        return TypeRule.FOLLOWS in self.inputs or TypeRule.FOLLOWS in self.outputs


def type_rules(node: NodeProto, opsets: Mapping[str, int], low: int) -> TypeRules | None:
    """The rules for a node with `low` as the lower precision; None without a schema, or if it reads bits."""
    domain = "" if node.domain in STANDARD_DOMAINS else node.domain
    counts = len(node.input), len(node.output)
    return _rules(node.op_type, domain, opsets.get(domain, 1), counts, low, _generates_fp32(node))


@lru_cache(maxsize=4096)  # most nodes of a graph share their rules with others
def _rules(
    op: str, domain: str, opset: int, counts: tuple[int, int], low: int, generates_fp32: bool
) -> TypeRules | None:
    schema = schema_of(op, domain, opset)
    if schema is None or op in READS_BITS:
        return None
    inputs = [_port(schema, schema.inputs, i, low) for i in range(counts[0])]
    outputs = [_port(schema, schema.outputs, i, low) for i in range(counts[1])]
    for index in FP32_INPUTS.get(op, frozenset()):
        if index < len(inputs):
            inputs[index] = TypeRule.FP32
    if op in ANY_TYPE_OPS:
        reads_fp16 = _port(schema, schema.inputs, 0, TensorProto.FLOAT16) is TypeRule.FOLLOWS
        inputs[0] = TypeRule.ANY if reads_fp16 else TypeRule.FP32  # IsInf does from opset 20 on
    if generates_fp32:
        outputs = [TypeRule.FP32] * len(outputs)
    if op == "LayerNormalization":  # Mean and InvStdDev have the type named by stash_type
        outputs[1:] = [TypeRule.FP32] * len(outputs[1:])
    return TypeRules(tuple(inputs), tuple(outputs))


def set_type_attributes(node: NodeProto, dtype: int, floats: AbstractSet[int] = EXCHANGEABLE) -> None:
    """Sets the attributes of `node` that name one of `floats` to `dtype`, its first output's type."""
    for item in node.attribute:
        if item.name == TYPE_ATTRIBUTES.get(node.op_type) and item.i in floats:
            item.i = dtype
        elif item.name == "stash_type" and node.op_type == "LayerNormalization" and len(node.output) > 1:
            item.i = TensorProto.FLOAT


def _generates_fp32(node: NodeProto) -> bool:
    """True if the node makes floats of a type that its own attribute names, or FP32 by default.

    `...Like` operators and Bernoulli without the attribute take the type of their input instead.
    """
    if node.op_type not in TYPE_ATTRIBUTES or node.op_type in {"Cast", "DequantizeLinear"}:
        return False
    inherits = node.op_type.endswith("Like") or node.op_type == "Bernoulli"
    return not inherits or any(item.name == TYPE_ATTRIBUTES[node.op_type] for item in node.attribute)


def _port(
    schema: onnx.defs.OpSchema, formals: Sequence[onnx.defs.OpSchema.FormalParameter], index: int, low: int
) -> TypeRule:
    if not formals:
        return TypeRule.ANY
    formal = formals[min(index, len(formals) - 1)]  # the last formal parameter may be variadic
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    types = allowed.get(formal.type_str, [formal.type_str])
    name = f"tensor({TensorProto.DataType.Name(low).lower()})"
    return TypeRule.FOLLOWS if name in types else TypeRule.FP32
