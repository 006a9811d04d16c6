"""Algorithms of large passes.

`opsets` converts nodes to later operator sets, `rescaling` removes overflow by powers of two, and `windows`
rewrites the windows of a Conv.
"""
