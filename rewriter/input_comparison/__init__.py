"""Finds the differences between two preprocessing pipelines, from their results on the same data.

`images` relates two images: layout, order of channels and scale together. `job` puts differences into words.
"""
