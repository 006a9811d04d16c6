"""Exact rescaling: removes overflow by powers of two that are folded into constants.

`exponents` solves the linear equations that operators impose: each exponent is a sum of free ones. `choice`
chooses these, from measured ranges and constants; the pass `rescale` multiplies constants and epsilons.
"""
