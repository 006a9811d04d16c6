"""Rounds weights to the grid of a lower type so that the errors of a product's weights cancel.

1. `layers`: finds the products with constant weights and the sources of the rows that they multiply.
2. `rows`: reads these rows on samples; `segments` runs the graph in parts where memory is short.
3. `grid`: the numbers of FP16, BF16 and TF32.
4. `nearest_plane`: Babai's nearest-plane algorithm (GPTQ) with the Cholesky factor of the rows' Gram matrix.
5. `fit`: applies it to the layers that share rows, and judges the result on held-out rows.
6. `worth`: estimates which weights cause a share of the error worth the time.
7. `compensate`: runs all of it within bounds on memory and on runs of the model.
8. `blocks`: uses the weights if the whole `network` errs no more than with weights rounded to nearest; else
   those of the blocks of layers with which it errs less.

docs/weights.md has the method and the measurements.
"""

from __future__ import annotations

from rewriter.rewriting.rounding.blocks import Used, used
from rewriter.rewriting.rounding.compensate import FittingData, compensate
from rewriter.rewriting.rounding.fit import Rounded
from rewriter.rewriting.rounding.grid import Grid
from rewriter.rewriting.rounding.layers import Layer, RowSource, Skipped, Types, Window, layers
from rewriter.rewriting.rounding.rows import Reader
from rewriter.rewriting.rounding.worth import Worth

__all__ = [
    "FittingData",
    "Grid",
    "Layer",
    "Reader",
    "Rounded",
    "RowSource",
    "Skipped",
    "Types",
    "Used",
    "Window",
    "Worth",
    "compensate",
    "layers",
    "used",
]
