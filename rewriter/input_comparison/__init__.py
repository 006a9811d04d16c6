"""Finds the differences between two preprocessing pipelines, from their results on the same data.

Layout, order of channels and scale are found together (`relation`), the resize with the photograph.
"""
