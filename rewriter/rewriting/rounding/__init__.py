"""Weights put on the grid of a lower type so that products err less than with each one rounded to nearest."""

from __future__ import annotations

from rewriter.rewriting.rounding.compensate import compensate
from rewriter.rewriting.rounding.fit import Rounded
from rewriter.rewriting.rounding.grid import Grid
from rewriter.rewriting.rounding.layers import Layer, Left, Source, Window, layers

__all__ = ["Grid", "Layer", "Left", "Rounded", "Source", "Window", "compensate", "layers"]
