"""Cases written by hand as ONNX text: founding cases 2, 3 and 4, control flow, and local functions.

Weights are added to the text as initializers. This module needs only `onnx` and `numpy`, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper, parser

from models.common import Built, Sample, natural_image, rng_for


def parsed(text: str, weights: Mapping[str, np.ndarray] | None = None) -> onnx.ModelProto:
    """A model from onnx.parser's text form, with `weights` added to its main graph."""
    model = parser.parse_model(text)
    model.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in (weights or {}).items()
    )
    return model


def gaussian(rng: np.random.Generator, *shape: int, gain: float = 1.0) -> np.ndarray:
    """A float32 weight whose product with unit-variance inputs along its first axis has standard deviation `gain`."""
    return (gain * shape[0] ** -0.5 * rng.standard_normal(shape)).astype(np.float32)


# A mixed FP16/FP32 graph as converters write it: L2 normalisations with Cast chains between (NVIDIA/TensorRT#4019).
# The name of every Cast says what kind it is.
MIXED_CASTS = """
<ir_version: 8, opset_import: ["" : 17]>
mixed_casts (float[1,R,64] tokens, float[1,R,64] queries)
  => (float16[1,R,64] keys_half, float[1,R,64] values, float[1,R,R] scores, float[1,R,1] norm)
<float epsilon = {1e-12}, float half_power = {0.5}, float two = {2.0}, int64[1] first = {0}>
{
  same_type = Cast<to = 1>(tokens)
  tokens_half = Cast<to = 10>(same_type)
  projected_half = MatMul(tokens_half, w_key)
  projected = Cast<to = 1>(projected_half)
  there = Cast<to = 10>(projected)
  key_in = Cast<to = 1>(there)

  key_square = Pow(key_in, two)
  key_sum = ReduceSum<keepdims = 1>(key_square, last)
  key_sum_again = Cast<to = 1>(key_sum)
  key_norm = Pow(key_sum_again, half_power)
  key_clip = Clip(key_norm, epsilon)
  key_shape = Shape(key_in)
  key_wide = Expand(key_clip, key_shape)
  key_unit = Div(key_in, key_wide)
  keys_half = Cast<to = 10>(key_unit)

  query = MatMul(queries, w_query)
  query_square = Pow(query, two)
  query_sum = ReduceSum<keepdims = 1>(query_square, last)
  query_sum_half = Cast<to = 10>(query_sum)
  query_sum_back = Cast<to = 1>(query_sum_half)
  query_norm = Pow(query_sum_back, half_power)
  query_clip = Clip(query_norm, epsilon)
  query_shape = Shape(query)
  query_wide = Expand(query_clip, query_shape)
  query_unit = Div(query, query_wide)

  shared = Cast<to = 1>(keys_half)
  duplicate = Cast<to = 1>(keys_half)
  shared_turned = Transpose<perm = [0, 2, 1]>(shared)
  scores = MatMul(query_unit, shared_turned)
  values_half = MatMul(keys_half, w_value)
  values_back = Cast<to = 1>(values_half)
  values = Add(values_back, duplicate)
  norm = Cast<to = 1>(key_clip)
}
"""


def mixed_casts(full: bool) -> Built:
    """L2 norms with Casts: tokens and queries, float32 [1, R, 64]; key norms near 6000 (3.6e7 squared), one zero query.

    In FP16 the sum of squares is inf, so the keys become zero; and 1e-12 is 0, so the zero query becomes 0 / 0.
    """
    rng = rng_for("mixed_casts")
    weights = {
        "w_key": gaussian(rng, 64, 64, gain=750).astype(np.float16),
        "w_query": gaussian(rng, 64, 64, gain=8),
        "w_value": gaussian(rng, 64, 64).astype(np.float16),
    }
    rows = 1024 if full else 16

    def sample(index: int) -> Sample:
        draw = rng_for("mixed_casts_sample", index)
        tokens, queries = draw.standard_normal((2, 1, rows, 64)).astype(np.float32)
        queries[0, 3] = 0  # a padded row
        return {"tokens": tokens, "queries": queries}

    return Built(parsed(re.sub(r"\bR\b", str(rows), MIXED_CASTS), weights), sample)


def conv_clip(full: bool) -> Built:
    """Conv and Clip on an image in +-0.5, float32 [1, 3, 512, 512] (NVIDIA/TensorRT#3938). There is one size only."""
    rng = rng_for("conv_clip")
    model = parsed(
        """
        <ir_version: 8, opset_import: ["" : 13]>
        conv_clip (float[1,3,512,512] image) => (float[1,8,512,512] clipped)
        <float low = {0.0}, float high = {0.5}>
        {
          features = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(image, weight, bias)
          clipped = Clip(features, low, high)
        }""",
        {"weight": gaussian(rng, 27, 8, gain=2).T.reshape(8, 3, 3, 3).copy(), "bias": gaussian(rng, 8)},
    )
    return Built(
        model, lambda index: {"image": natural_image(rng_for("conv_clip", index), 512, 512) - np.float32(0.5)}
    )


def matmul_clip(full: bool) -> Built:
    """MatMul, Add and Clip(0, 6): the upper bound was dropped by some releases (NVIDIA/TensorRT#4606)."""
    rng = rng_for("matmul_clip")
    width = 1024 if full else 64
    model = parsed(
        f"""
        <ir_version: 8, opset_import: ["" : 13]>
        matmul_clip (float[8,{width}] x) => (float[8,{width}] y)
        <float low = {{0.0}}, float high = {{6.0}}>
        {{
          product = MatMul(x, weight)
          shifted = Add(product, bias)
          y = Clip(shifted, low, high)
        }}""",
        {"weight": gaussian(rng, width, width, gain=6), "bias": gaussian(rng, width, gain=float(width**0.5))},
    )
    return Built(
        model,
        lambda index: {"x": rng_for("matmul_clip", index).standard_normal((8, width)).astype(np.float32)},
    )


# Real data of `mismatch`: strain-gauge readings, mean 0.002 and deviation 0.001 (strain is about 1e-3 in metal).
STRAIN_MEAN, STRAIN_DEVIATION = 0.002, 0.001


def mismatch(full: bool) -> Built:
    """Founding case 3 (NVIDIA/TensorRT#4361): right in FP16 on real data, wrong on random data.

    strain, float32 [1, 64], is standardised, then scored by a Mahalanobis-like distance to 16 prototypes. Real data
    gives |z| < 5. Uniform or normal random numbers give |z| near 1000, whose square overflows FP16; FP32 holds it.
    """
    rng = rng_for("mismatch")
    weights = {
        "mean": (STRAIN_MEAN * rng.uniform(0.8, 1.2, 64)).astype(np.float32),
        "deviation": (STRAIN_DEVIATION * rng.uniform(0.8, 1.2, 64)).astype(np.float32),
        "rotation": gaussian(rng, 64, 64),
        "precision": (rng.uniform(0, 2, (64, 16)) / 64).astype(np.float32),
        "readout": gaussian(rng, 16, 8),
    }
    model = parsed(
        """
        <ir_version: 8, opset_import: ["" : 13]>
        mismatch (float[1,64] strain) => (float[1,8] anomaly)
        <float floor = {1e-3}>
        {
          centred = Sub(strain, mean)
          z = Div(centred, deviation)
          turned = MatMul(z, rotation)
          square = Mul(turned, turned)
          distance = MatMul(square, precision)
          floored = Add(distance, floor)
          root = Sqrt(floored)
          anomaly = MatMul(root, readout)
        }""",
        weights,
    )

    def sample(index: int) -> Sample:
        z = rng_for("mismatch_sample", index).standard_normal((1, 64))
        return {"strain": (weights["mean"] + weights["deviation"] * z).astype(np.float32)}

    return Built(model, sample)


IF_LOOP = """
<ir_version: 8, opset_import: ["" : 16]>
if_loop (float[4,16] x, bool wide) => (float[4,16] y, float[5,4,16] trace)
<bool go = {1}, int64 steps = {5}, float decay = {0.5}, float push = {800.0}, float two = {2.0}, float epsilon = {1e-5}, int64[1] first = {0}>
{
  start = If (wide) <
    then_branch = widen () => (float[4,16] lifted) {
      thousand = Constant<value_float = 1000.0>()
      lifted = Mul(x, thousand)
    },
    else_branch = keep () => (float[4,16] same) {
      one = Constant<value_float = 1.0>()
      same = Mul(x, one)
    }
  >
  final, trace = Loop (steps, go, start) <
    body = step (int64 i, bool go_in, float[4,16] state) => (bool go_out, float[4,16] state_out, float[4,16] seen) {
      go_out = Identity(go_in)
      mixed = MatMul(state, weight)
      square = Pow(mixed, two)
      mean_square = ReduceMean<axes = [-1], keepdims = 1>(square)
      shifted = Add(mean_square, epsilon)
      rms = Sqrt(shifted)
      normed = Div(mixed, rms)
      half = Mul(state, decay)
      pushed = Mul(normed, push)
      state_out = Add(half, pushed)
      seen = Tanh(normed)
    }
  >
  zero = ReduceSum<keepdims = 0>(nothing, first)
  total, sums = Scan (zero, final) <
    num_scan_inputs = 1,
    body = accumulate (float[16] so_far_in, float[16] row) => (float[16] so_far, float[16] sum_out) {
      so_far = Add(so_far_in, row)
      sum_out = Identity(so_far)
    }
  >
  y = Identity(sums)
}
"""


def if_loop(full: bool) -> Built:
    """An If, a Loop with float state and an RMSNorm in its body, and a Scan that sums along the first axis.

    The branch that runs lifts x to the thousands, so the square in the Loop's body overflows FP16 at every step.
    x is float32 [4, 16], and wide is bool []. There is one size only.
    """
    rng = rng_for("if_loop")
    model = parsed(IF_LOOP, {"weight": gaussian(rng, 16, 16), "nothing": np.zeros((1, 16), np.float32)})
    return Built(
        model,
        lambda index: {
            "x": rng_for("if_loop_sample", index).standard_normal((4, 16)).astype(np.float32),
            "wide": np.array(True),
        },
    )


LOCAL_FUNCTION = """
<ir_version: 8, opset_import: ["" : 17, "house" : 1]>
local_function (float[2,8,D] x) => (float[2,8,D] y)
{
  a = house.Norm<epsilon = 1e-5>(x, scale_1, bias_1)
  b = house.FeedForward(a, w_up, w_down)
  c = Add(x, b)
  y = house.Norm<epsilon = 1e-5>(c, scale_2, bias_2)
}
<domain: "house", opset_import: ["" : 17]>
Norm <epsilon> (x, scale, bias) => (y)
{
  two = Constant<value_float = 2.0>()
  eps = Constant<value_float: float = @epsilon>()
  mean = ReduceMean<axes = [-1], keepdims = 1>(x)
  centred = Sub(x, mean)
  square = Pow(centred, two)
  variance = ReduceMean<axes = [-1], keepdims = 1>(square)
  shifted = Add(variance, eps)
  deviation = Sqrt(shifted)
  normed = Div(centred, deviation)
  scaled = Mul(normed, scale)
  y = Add(scaled, bias)
}
<domain: "house", opset_import: ["" : 17]>
FeedForward (x, w_up, w_down) => (y)
{
  up = MatMul(x, w_up)
  active = Relu(up)
  y = MatMul(active, w_down)
}
"""


def local_function(full: bool) -> Built:
    """A residual block of two local functions, one of them a decomposed LayerNorm used twice; x in the thousands."""
    width = 512 if full else 32
    rng = rng_for("local_function")
    weights = {"w_up": gaussian(rng, width, 2 * width), "w_down": gaussian(rng, 2 * width, width, gain=1500)}
    for number in "12":
        weights[f"scale_{number}"] = rng.uniform(0.5, 1.5, width).astype(np.float32)
        weights[f"bias_{number}"] = gaussian(rng, width, gain=0.1 * width**0.5)
    model = parsed(LOCAL_FUNCTION.replace("D]", f"{width}]"), weights)
    return Built(
        model,
        lambda index: {
            "x": (1500 * rng_for("local_function_sample", index).standard_normal((2, 8, width))).astype(
                np.float32
            )
        },
    )
