"""What the tests of merge-branches share: small graphs with parallel Convs."""

from __future__ import annotations

from typing import Any

import numpy as np
from graphs import apply, with_constants
from onnx import helper, numpy_helper

from rewriter.ir.base import Context
from rewriter.ir.model import Model, load
from rewriter.passes.merge_branches import MergeBranches
from rewriter.pipeline.driver import PassResult

WIDE = "Conv<pads = [1, 1, 1, 1]>"

SHAPES: dict[str, tuple[int, ...]] = {
    "w3": (4, 3, 3, 3), "v3": (4, 3, 3, 3), "w1": (4, 3, 1, 1), "v1": (4, 3, 1, 1), "w13": (4, 3, 1, 3),
    "w31": (4, 3, 3, 1), "w2": (4, 3, 2, 2), "w5": (4, 3, 5, 5), "one": (1, 3, 1, 1), "six": (6, 3, 1, 1),
    "d3": (6, 1, 3, 3), "d1": (6, 1, 1, 1), "g1": (6, 3, 1, 1), "l3": (4, 3, 3), "l1": (4, 3, 1),
    "c3": (4, 3, 3, 3, 3), "c1": (4, 3, 1, 1, 1), "a": (4,), "b": (4,), "c": (4,),
}  # fmt: skip
"""Constants of the graphs below: weights by their windows (`d`: of six groups, `g`: of two), biases."""


def model(
    body: str, x: str = "float[2,3,6,7] x", outputs: str = "float[N,C,P,Q] y", *, opset: int = 17
) -> Model:
    """A graph with those of the constants that it names, random."""
    return with_constants(f"{{ {body} }}", SHAPES, x, outputs, opset=opset)


def merged(before: Model, **context: Any) -> tuple[Model, PassResult]:
    return apply(MergeBranches(), before, Context(**context))


def declined(before: Model, reason: str, **context: Any) -> None:
    """Nothing changes, and the pass says why."""
    after, report = merged(before, **context)
    assert after is before
    assert [reason in refusal.reason for refusal in report.refusals] == [True], report.refusals


def typed(dtype: int, weight: float, bias: float) -> Model:
    """Two pointwise Convs of a type, each with one value in its weight and another in its bias."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    constants = {"w": np.full((2, 3, 1, 1), weight), "v": np.full((2, 3, 1, 1), weight), "b": [bias] * 2}
    held = [numpy_helper.from_array(np.asarray(v).astype(kind), n) for n, v in constants.items()]
    x, y = (helper.make_tensor_value_info(n, dtype, s) for n, s in (("x", [1, 3, 4, 4]), ("y", [1, 2, 4, 4])))
    nodes = [helper.make_node("Conv", ["x", w, "b"], [o]) for w, o in (("w", "p"), ("v", "q"))]
    made = helper.make_graph([*nodes, helper.make_node("Add", ["p", "q"], ["y"])], "g", [x], [y], held)
    return load(helper.make_model(made, opset_imports=[helper.make_opsetid("", 22)], ir_version=10))
