"""Algorithms of large passes.

`opsets` converts nodes to later operator sets, `rescaling` removes overflow by powers of two, `windows` are
those of a Conv that is written another way.
"""
