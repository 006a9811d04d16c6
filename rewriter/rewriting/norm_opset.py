"""The operator set that a model's norms call for.

An RMSNorm that is written out has to be FP32, for its squares overflow FP16; RMSNormalization, from opset
23 on, reads FP16 and computes in FP32 inside. TensorRT maps it from 10.15 on (its changelog); TensorRT-RTX
1.6 was measured.
"""

from __future__ import annotations

from rewriter.base import Target
from rewriter.graph import open_graphs
from rewriter.model import Model
from rewriter.model import facts as tensor_facts
from rewriter.patterns.norms import find_norms

RMS_NORM_OPSET = 23

_FIRST = {"tensorrt": (10, 15), "tensorrt-rtx": (1, 6)}
"""The first releases that are known to map RMSNormalization."""


def maps_rms_norm(target: Target) -> bool:
    """Whether the target is known to: not a TensorRT of unknown version; a TensorRT-RTX of one is new."""
    if not target.version:
        return target.library == "tensorrt-rtx"
    return target.version >= _FIRST[target.library]


def needed_opset(model: Model, opset: int, target: Target) -> int:
    """`opset`, or that of RMSNormalization where the model writes out RMSNorms and the target maps it."""
    if opset >= RMS_NORM_OPSET or not maps_rms_norm(target):
        return opset
    graphs = open_graphs(model, tensor_facts.infer(model))
    norms = (norm for graph in graphs for norm in find_norms(graph))
    return RMS_NORM_OPSET if any(n.kind == "rms-norm" and n.blocked is None for n in norms) else opset
