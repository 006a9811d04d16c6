"""Weights put on the grid of a lower type so that products err less than with each one rounded to nearest."""

from __future__ import annotations

from rewriter.rounding.compensate import compensate
from rewriter.rounding.fit import Rounded
from rewriter.rounding.grid import Grid
from rewriter.rounding.layers import Layer, Left, Source, Window, layers

__all__ = ["Grid", "Layer", "Left", "Rounded", "Source", "Window", "compensate", "layers"]
