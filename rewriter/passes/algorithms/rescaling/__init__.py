"""Exact rescaling: removes overflow by powers of two that are folded into constants.

A tensor t becomes t * 2^k, and its consumers take the factor back. Significands stay as they are, so FP32
results are bit-equal as long as nothing leaves FP32's normal range: docs/rescaling.md.

1. `rules`: the linear equations that each operator imposes on the exponents k of its inputs and outputs.
2. `exponents`: these equations for a whole graph, solved: every exponent is a sum of free ones.
3. `choice`: bounds and costs of every exponent, from measured ranges and constants, and the free ones chosen.
4. `apply`: multiplies constants and epsilons, and notes the exponents in the model's metadata.
"""
