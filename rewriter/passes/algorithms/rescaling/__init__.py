"""Exact rescaling: removes overflow by powers of two that are folded into constants.

A tensor t becomes t * 2^k, and its consumers take the factor back. Significands stay as they are, so FP32
results are bit-equal as long as nothing leaves FP32's normal range: docs/rescaling.md.

1. `exponents`: the linear equations that operators impose on exponents k, solved: each is a sum of free ones.
2. `choice`: bounds and costs of every exponent, from measured ranges and constants, and the free ones chosen.

The pass `rescale` multiplies constants and epsilons, and notes the exponents in the model's metadata.
"""
