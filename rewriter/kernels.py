"""Of which operators TensorRT makes one kernel, as far as types and results depend on it.

Seen on one H200 with TensorRT-RTX 1.6.1, strongly typed; the names of fused kernels stand in the library's
verbose log, also where it builds without a GPU.
"""

from __future__ import annotations

from onnx import NodeProto

PRODUCTS = frozenset({"MatMul", "Gemm"})

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})

ELEMENTWISE = frozenset(
    "Add Sub Mul Div Pow Neg Abs Sqrt Reciprocal Exp Log Erf Tanh Sigmoid Relu LeakyRelu Elu Celu Selu Gelu "
    "Softplus Softsign Mish Swish HardSigmoid HardSwish PRelu Clip Min Max Sum".split()
)
"""What the kernel of the product before it computes, too."""

NORMS = frozenset({"LayerNormalization", "RMSNormalization"})
"""Norms of one operator over the last axes: they compute in FP32 inside, whatever type they read."""

_REDUCING = NORMS | frozenset(
    "SimplifiedLayerNormalization GroupNormalization "
    "InstanceNormalization Softmax LogSoftmax GlobalAveragePool GlobalMaxPool".split()
)


def reduces(node: NodeProto) -> bool:
    """Whether the operator's kernel takes what is elementwise before it, away from a product's."""
    return node.op_type in _REDUCING or node.op_type.startswith("Reduce")
