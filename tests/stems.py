"""Convs of images with random weights, and what must hold when fold-strides has rewritten one."""

from __future__ import annotations

from graphs import keeps_results, with_constants

from rewriter.ir.model import Model
from rewriter.passes.fold_strides import FoldStrides

FOLDED = ["Reshape", "Transpose", "Reshape", "Conv"]
STEM = "Conv<strides = [2, 2], pads = [3, 3, 3, 3]>"
WEIGHTS: dict[str, tuple[int, ...]] = {
    "w": (5, 3, 7, 7),
    "b": (5,),
    "small": (5, 3, 3, 3),
    "flat": (5, 3, 7, 3),
    "six": (5, 6, 7, 7),
    "each": (6, 1, 7, 7),
    "wide": (4, 1, 7, 7),
    "line": (5, 3, 7),
    "turned": (3, 5, 7, 7),
    "turn": (2, 5, 1, 1),
    "patch": (5, 3, 8, 8),
}


def stem_model(
    body: str, outputs: str = "float[N,5,4,6] y", *, opset: int = 17, x: str = "float[N,3,8,12] x"
) -> Model:
    """A graph with those of the random FP32 weights above that it reads."""
    return with_constants(body, WEIGHTS, x, outputs, opset=opset)


def same_results(before: Model, after: Model, step: FoldStrides | None = None) -> None:
    keeps_results(before, after, step or FoldStrides())
