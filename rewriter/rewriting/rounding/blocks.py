"""Decides by the results of the whole network which of the weights that were rounded together are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewriter.model import Array, Model
from rewriter.rewriting.rounding.fit import Rounded
from rewriter.rewriting.rounding.network import ErrorOf, Weights, network

BLOCKS = 4
"""Blocks of consecutive layers that are judged alone if all of them lose. Each costs a run of the network,
and more blocks would be told apart by the noise of one sample."""


@dataclass(frozen=True)
class Used:
    """The layers whose rounded weights are used, and the errors of the network's results (`network.ErrorOf`).

    Attributes:
        layers: All of them, some, or none.
        together: With the weights of `layers` rounded together; of all layers if there is none.
        nearest: With all weights rounded to nearest.
    """

    layers: tuple[Rounded, ...]
    together: float
    nearest: float


def used(
    model: Model,
    feeds: Mapping[str, Array],
    own: Mapping[str, Array],
    rounded: Sequence[Rounded],
    together: Weights,
    given: Weights,
) -> Used:
    """Returns all layers if the network errs no more with them, else the blocks with which it errs less.

    Args:
        model, feeds, own, together, given: See `network`.

    Raises:
        NoKernelError, ArithmeticRunError: the sample does not run; the message names the node.
    """
    with network(model, feeds, own, together, given) as error:
        nearest, whole = error(()), error(_names(rounded))
        if whole <= nearest:
            return Used(tuple(rounded), whole, nearest)
        found = list(_gaining(error, rounded, nearest))
        best, layers = min(found, key=lambda pair: pair[0], default=(whole, ()))
        return Used(layers, best, nearest)


def _gaining(
    error: ErrorOf, rounded: Sequence[Rounded], nearest: float
) -> Iterator[tuple[float, tuple[Rounded, ...]]]:
    """Yields blocks with which the network errs less than `nearest`, alone and together."""
    alone = []
    for block in _blocks(rounded):
        err = error(_names(block))
        if err < nearest:
            alone.append(block)
            yield err, block
    layers = tuple(layer for block in alone for layer in block)
    if len(alone) > 1 and (err := error(_names(layers))) < nearest:
        yield err, layers


def _blocks(rounded: Sequence[Rounded]) -> Iterator[tuple[Rounded, ...]]:
    """Yields at most `BLOCKS` blocks of equally many layers; none if there is one layer."""
    count = min(BLOCKS, len(rounded)) if len(rounded) > 1 else 0
    for i in range(count):
        yield tuple(rounded[i * len(rounded) // count : (i + 1) * len(rounded) // count])


def _names(layers: Sequence[Rounded]) -> frozenset[str]:
    return frozenset(name for layer in layers for name in layer.stored())
