"""The tolerance of a model follows from the types of its tensors."""

from __future__ import annotations

import math

import pytest
from graphs import graph

from rewriter.ir.model import facts
from rewriter.runtime.figures.tolerances import TOLERANCES, Tolerance, default_tolerance, precision_of

FP32 = "g (float[2] x) => (float[2] y) { y = Relu(x) }"
FP16 = "g (float[2] x) => (float[2] y) { a = Cast<to = 10>(x) b = Relu(a) y = Cast<to = 1>(b) }"
BF16 = "g (float[2] x) => (float[2] y) { a = Cast<to = 16>(x) y = Cast<to = 1>(a) }"
BOTH = "g (float[2] x) => (float[2] y) { h = Cast<to = 10>(x) a = Cast<to = 16>(h) y = Cast<to = 1>(a) }"

TABLE = [
    pytest.param(FP32, False, "fp32", 1e-4, id="FP32"),
    pytest.param(FP32, True, "fp32", 5e-3, id="FP32 whose products may be rounded to TF32"),
    pytest.param(FP16, False, "fp16", 5e-3, id="FP16"),
    pytest.param(FP16, True, "fp16", 5e-3, id="FP16 and TF32"),
    pytest.param(BF16, False, "bf16", 4e-2, id="BF16"),
    pytest.param(BF16, True, "bf16", 4e-2, id="BF16 and TF32"),
    pytest.param(BOTH, False, "bf16", 4e-2, id="the coarsest of two"),
]


@pytest.mark.parametrize(("text", "tf32", "precision", "value"), TABLE)
def test_the_coarsest_type_decides(text: str, tf32: bool, precision: str, value: float) -> None:
    found = facts.infer(graph(text))
    assert precision_of(found) == precision
    assert default_tolerance(found, tf32=tf32).value == value


def test_another_metric_leaves_the_single_outputs_free() -> None:
    assert TOLERANCES["fp16"].of_each_output == 5e-3
    assert Tolerance(40.0, "psnr", "--tolerance").of_each_output == math.inf
